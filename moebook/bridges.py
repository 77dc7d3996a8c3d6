"""Bridges: the probability that a diffusion has not changed its routing by time t.

X_t = x + drift t + sigma B_t starts in the cell of its k active experts, a convex
polyhedron, and leaves it at tau. Between two grid points it is a Brownian bridge, and
what that does to one face is known exactly. Work is in float64 on the device of the
generator, whatever the dtype of x; starts are grouped by cell.
"""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Generator, Tensor

from moebook import laws
from moebook.checks import check_count, check_starts
from moebook.routing import Affine
from moebook.sojourn import numbers
from moebook.walks import Faces, cells_of


def bridge_survival(
    router: Affine,
    x: Tensor,
    t: float,
    generator: Generator,
    k: int = 1,
    *,
    steps: int = 16,
    sigma: float = 1.0,
    drift: Tensor | None = None,
) -> Tensor:
    """Weights in [0, 1] with mean P(tau > t), starts x (n, d) -> (n,).

    The product over steps and faces of 1 - exp(-2 a b / (sigma^2 dt)), the chance that
    a Brownian bridge from distance a to distance b avoids the face. Exact for one face
    and for orthogonal faces, with any number of steps. Otherwise faces are taken as
    independent: too high where all inner normals meet at obtuse angles (an acute
    wedge), too low where at acute ones (Slepian); `bridge_bounds` encloses the truth.
    Raises TypeError or ValueError that says what was expected.
    Source: the bridge correction of Baldi (1995) and Gobet (2000), as a weight.
    """
    return _bridge(router, x, t, generator, k, steps, sigma, drift, [_product])[0]


def bridge_bounds(
    router: Affine,
    x: Tensor,
    t: float,
    generator: Generator,
    k: int = 1,
    *,
    steps: int = 16,
    sigma: float = 1.0,
    drift: Tensor | None = None,
) -> Tensor:
    """Weights whose means enclose P(tau > t), starts x (n, d) -> (n, 2), low and high.

    As `bridge_survival`, on the same paths for an equal generator, with
    max(0, 1 - sum p) and 1 - max p in place of the product of 1 - p over faces.
    Source: ours; the bounds of Bonferroni and Frechet, step by step.
    """
    rules = [_bonferroni, _frechet]
    return torch.stack(
        _bridge(router, x, t, generator, k, steps, sigma, drift, rules), 1
    )


def _bridge(
    router: Affine,
    x: Tensor,
    t: float,
    generator: Generator,
    k: int,
    steps: int,
    sigma: float,
    drift: Tensor | None,
    rules: list[Callable[[Tensor], Tensor]],
) -> list[Tensor]:
    """One weight a rule, which turns log p (n, F) of the faces into survival (n,)."""
    x, steps = check_starts(x, generator), check_count("steps", steps)
    t, sigma = numbers("t", t).item(), numbers("sigma", sigma, zero=False).item()
    out = [x.new_ones(len(x)) for _ in rules]
    dt = t / steps
    for rows, faces in cells_of(router, x, k):
        normal, y, push = _across(faces, x[rows], drift)
        here = torch.addmm(faces.offset, y, normal.T)
        for _ in range(steps if len(faces.pair) else 0):
            noise = laws.gaussian(*y.shape, generator)
            y = y + push * dt + sigma * math.sqrt(dt) * noise
            there = torch.addmm(faces.offset, y, normal.T)
            power = -2 * (here * there).clamp_min_(0) / (sigma**2 * dt)
            power = power.nan_to_num_(nan=0.0, neginf=-math.inf)  # t = 0 on a face
            for weight, rule in zip(out, rules, strict=True):
                weight[rows] *= rule(power)
            here = there
    return out


def _product(power: Tensor) -> Tensor:
    return torch.expm1(power).neg_().prod(1)


def _bonferroni(power: Tensor) -> Tensor:
    return (1 - power.exp().sum(1)).clamp_min(0)


def _frechet(power: Tensor) -> Tensor:
    return -torch.expm1(power.amax(1))


def euler_survival(
    router: Affine,
    x: Tensor,
    t: float,
    generator: Generator,
    k: int = 1,
    *,
    steps: int = 100,
    sigma: float = 1.0,
    drift: Tensor | None = None,
    shifted: bool = False,
) -> Tensor:
    """1 where no grid point leaves the cell, else 0, starts x (n, d) -> (n,).

    The control to `bridge_survival`: blind between grid points, its mean exceeds
    P(tau > t) by order sqrt(t / steps). shifted=True moves the boundary inwards by
    `overshoot` sigma sqrt(dt), which leaves a smaller error of higher order.
    Raises as `bridge_survival`.
    Source: for the shift Broadie, Glasserman and Kou (1997).
    """
    x, steps = check_starts(x, generator), check_count("steps", steps)
    t, sigma = numbers("t", t).item(), numbers("sigma", sigma, zero=False).item()
    out, root = x.new_zeros(len(x)), sigma * math.sqrt(t / steps)
    level = overshoot() * root if shifted else 0.0
    for rows, faces in cells_of(router, x, k):
        normal, y, push = _across(faces, x[rows], drift)
        for _ in range(steps if len(faces.pair) else 0):
            y = y + push * (t / steps) + root * laws.gaussian(*y.shape, generator)
            alive = (torch.addmm(faces.offset, y, normal.T) > level).all(1)
            y, rows = y[alive], rows[alive]
        out[rows] = 1.0
    return out


@cache
def overshoot() -> float:
    """-zeta(1/2) / sqrt(2 pi), about .58: the mean overshoot of a Gaussian walk.

    In units of a step's deviation, over a distant barrier.
    Source: Siegmund (1979); Chang and Peres (1997) for the zeta function.
    """
    from mpmath import zeta  # here alone: it takes a tenth of a second

    return float(-zeta(0.5)) / math.sqrt(2 * math.pi)


def _across(
    faces: Faces, x: Tensor, drift: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normals, starts and drift in coordinates that span the normals: the rest is
    free motion, which no face sees."""
    normal = faces.normal
    push = (
        x.new_zeros(x.shape[1])
        if drift is None
        else numbers("drift", drift, signed=True).to(x)
    )
    if push.shape != x.shape[1:]:
        raise ValueError(
            f"drift must have shape (d,) = ({x.shape[1]},), got {tuple(push.shape)}: "
            "it is the velocity of the walk"
        )
    if 0 < len(normal) < x.shape[1]:
        basis = torch.linalg.qr(normal.T).Q
        return normal @ basis, x @ basis, push @ basis
    return normal, x, push

"""Surface: integrals over the zero set of a smooth score, by lines across it.

Needs a score that can be called and differentiated, no router. Roots on a line are
bracketed on a grid and then polished.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moebook.checks import check_finite, check_input
from moebook.lines import WORK, chunks, density

Function = Callable[[Tensor], Tensor]

#: Lines are searched on [-REACH, REACH]; 2e-17 of a Gaussian lies beyond.
REACH = 8.5


def interface(
    score: Function,
    x: Tensor,
    integrand: Function | None = None,
    *,
    directions: Tensor | None = None,
    weighting: str = "cosine",
    cells: int = 96,
) -> Tensor:
    """Samples with mean the integral of g p / |grad s| over {s = 0}, (n, d) -> (n,).

    p is the standard Gaussian density, x is drawn from it; s = score and g = integrand
    (1 if None) are smooth, (n, d) -> (n,) row by row, s differentiable by autograd.
    Through each x go lines along the d axes, or with directions (n, d), drawn uniform
    on the sphere, one line along its row. A root of s at coordinate t along e counts
    phi(t) g |d_e s| / |grad s|^2, times d for a single line: squared cosines sum to one
    over axes and average 1/d over directions. Bounded as roots and 1/|grad s| are.
    weighting="plain" counts phi(t) g / |d_e s|: the same mean with infinite variance,
    since tangencies are not damped; a control, not a tool.
    Bias: 2e-17 beyond |t| = 8.5, and pairs of roots closer than a cell (17 / cells)
    that the parabola through three nodes does not reveal; such lines are nearly
    tangent. Double `cells` to see it.
    Raises ValueError for a wrong shape, NaN, and a root where grad s = 0.
    Source: ours, from Crofton's formula with the weight of the coarea formula.
    """
    check_input(x, None)
    check_finite(x.sum(), x)
    _check_lines(x, directions, weighting)
    n, d = x.shape
    axes = torch.eye(d, dtype=x.dtype, device=x.device)
    out = x.new_zeros(n, dtype=torch.float64)
    for rows in chunks(n, (cells + 1) * d, 8 * WORK):
        part = x[rows].detach()
        for e in axes if directions is None else [directions[rows]]:
            base = part - (part * e).sum(1, keepdim=True) * e
            row, point, t, e, rise = _roots(score, base, e.expand_as(base), cells)
            weight = _weights(score, point, e, rise, weighting)
            weight *= density(t.square())
            if integrand is not None:
                weight = weight * _values("integrand", integrand, point).detach()
            out[rows].index_add_(0, row, weight)
    return out if directions is None or weighting == "plain" else out * d


def _roots(score: Function, base: Tensor, e: Tensor, cells: int) -> tuple[Tensor, ...]:
    """Roots of s on the lines base + R e: their rows, points (r, d), coordinates and
    directions, and the mean slope of s over the bracket of each.
    """

    def along(row: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            return _values("score", score, base[row] + t[:, None] * e[row])

    t = torch.linspace(-REACH, REACH, cells + 1, dtype=base.dtype, device=base.device)
    every = torch.arange(len(base), device=base.device).repeat_interleave(len(t))
    row, left, right = _brackets(along, t, along(every, t.repeat(len(base))))
    t = _solve(lambda t: along(row, t), left, right)
    rise = (along(row, right) - along(row, left)) / (right - left)
    return row, base[row] + t[:, None] * e[row], t.double(), e[row], rise


def _weights(
    score: Function, point: Tensor, e: Tensor, rise: Tensor, weighting: str
) -> Tensor:
    """|d_e s| / |grad s|^2, or 1 / |d_e s| for plain weighting, at roots (r, d)."""
    point = point.clone().requires_grad_()
    with torch.enable_grad():
        s = _values("score", score, point)
        (gradient,) = torch.autograd.grad(s.sum(), point)
    rate = (gradient * e).sum(1).abs().double()
    steep = gradient.double().square().sum(1)
    flat = ~(steep > 1e-12 * rise.double().square())
    if flat.any():
        raise ValueError(
            f"|grad score| = {steep[flat][0].sqrt():.3g} where score = 0, at "
            f"{point[flat][0].tolist()}: transversality fails and the integral of "
            "p / |grad score| may diverge; shift the level, or look at layers of "
            "finite width"
        )
    return rate / steep if weighting == "cosine" else 1 / rate


def _brackets(
    along: Callable, nodes: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and intervals on which s, given at the nodes of each row, changes sign."""
    s = s.reshape(-1, len(nodes))
    sign = s >= 0
    row, cell = (sign[:, 1:] != sign[:, :-1]).nonzero().unbind(1)
    found = [(row, nodes[cell], nodes[cell + 1])]
    # A valley of |s| may hide a pair: look at the bottom of the parabola through it.
    before, here, after = (s[:, m : s.shape[1] - 2 + m].abs() for m in range(3))
    same = (sign[:, :-2] == sign[:, 1:-1]) & (sign[:, 1:-1] == sign[:, 2:])
    row, cell = (same & (here <= before) & (here < after)).nonzero().unbind(1)
    before, here, after = (t[row, cell] for t in (before, here, after))
    shift = (before - after) / (before - 2 * here + after) / 2
    bottom = nodes[cell + 1] + shift * (nodes[1] - nodes[0])
    hidden = (along(row, bottom) >= 0) != sign[row, cell]
    row, cell, bottom = row[hidden], cell[hidden], bottom[hidden]
    found += [(row, nodes[cell], bottom), (row, bottom, nodes[cell + 2])]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _solve(f: Function, near: Tensor, far: Tensor) -> Tensor:
    """Root of f between near and far (r,): Chandrupatla (1997), all rows at once."""
    f_near, f_far, share = f(near), f(far), torch.full_like(near, 0.5)
    for _ in range(120):
        width = (far - near).abs()
        least = 16 * REACH * torch.finfo(near.dtype).eps / width.clamp_min(1e-300)
        if not len(near) or least.min() > 0.5:
            break
        # Never closer to an end than the tolerance, so that the bracket shuts.
        share = torch.minimum(torch.maximum(share, least), 1 - least)
        t = near + share.where(least <= 0.5, 0.5) * (far - near)
        f_t = f(t)
        same = (f_t >= 0) == (f_near >= 0)
        old, f_old = torch.where(same, near, far), torch.where(same, f_near, f_far)
        far, f_far = torch.where(same, far, near), torch.where(same, f_far, f_near)
        near, f_near = t, f_t
        # Inverse quadratic interpolation where it is safe, else halve.
        xi, phi = (near - far) / (old - far), (f_near - f_far) / (f_old - f_far)
        safe = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        step = f_near / (f_far - f_near) * f_old / (f_far - f_old)
        step += (
            (old - near) / (far - near) * f_near / (f_old - f_near)
            * f_far / (f_old - f_far)
        )  # fmt: skip
        share = step.where(safe, 0.5)
    return torch.where(f_near.abs() < f_far.abs(), near, far)


def _check_lines(x: Tensor, directions: Tensor | None, weighting: str) -> None:
    if weighting != "cosine" and (weighting != "plain" or directions is None):
        raise ValueError(
            "weighting must be 'cosine', or 'plain' with random directions (fixed axes "
            f"may miss a flat interface altogether), got {weighting!r} with "
            f"directions {'of the axes' if directions is None else 'given'}"
        )
    if directions is None:
        return
    if directions.shape != x.shape or directions.dtype != x.dtype:
        raise ValueError(
            f"directions must have the shape and dtype of x, {tuple(x.shape)} and "
            f"{x.dtype}, got {tuple(directions.shape)} and {directions.dtype}"
        )
    norm = directions.norm(dim=1)
    if not torch.allclose(norm, torch.ones_like(norm), atol=1e-5, rtol=0):
        raise ValueError(
            f"directions must be unit vectors, got norms from {norm.min():.4g} to "
            f"{norm.max():.4g}: divide by directions.norm(dim=1, keepdim=True)"
        )


def _values(name: str, function: Function, points: Tensor) -> Tensor:
    values = function(points)
    if not isinstance(values, Tensor) or values.shape != points.shape[:1]:
        got = getattr(values, "shape", type(values).__name__)
        raise ValueError(
            f"{name} must map (n, d) to (n,), one number a row; for points of shape "
            f"{tuple(points.shape)} it returned {got}"
        )
    if values.isnan().any():
        raise ValueError(
            f"{name} is NaN at {points[values.isnan()][0].tolist()}: it must be a "
            "number everywhere, since lines pass everywhere"
        )
    return values

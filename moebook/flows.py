"""Flows: the Gaussian risk of two linear experts, nodes for it, and its gradient flow.

The student is F = tanh(u.x / 2 tau) c.x, the teacher y = sgn(v.x)(a.x), and x is
N(0, I). What is used is named again by `stability`, which says what grows first.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moebook.gating import check_temperature

Field = Callable[[Tensor], Tensor]

ROOT = math.sqrt(2 / math.pi)  # E|z|, z standard normal


def quadrature(separator: Tensor, order: int = 12) -> tuple[Tensor, Tensor]:
    """Points (n, d) and weights (n,) of N(0, I_d), split at v.x = 0, n = 2 order^d.

    Exact up to rounding for any sgn(v.x) times a polynomial of degree below 2 order.
    Half-range Gauss rule along v, Gauss-Hermite across: meant for d <= 4. ValueError
    for a zero separator, an order outside 2..40, or more than 2^22 points.
    Source: Golub and Welsch; the half-range recurrence by Stieltjes' procedure.
    """
    v = real_array("separator", separator, 1)
    d = len(v)
    if not v.norm() > 0:
        raise ValueError("the separator must not be zero: it says where to split")
    if not 2 <= order <= 40 or 2 * order**d > 2**22:
        raise ValueError(
            f"order must be from 2 to 40 with 2 order^d <= 2^22, got order={order}, "
            f"d={d}: use draws and `along` in many dimensions"
        )
    z, w = _half_range(order)
    axes = [(np.concatenate([z, -z]), np.concatenate([w, w]))]
    t, u = np.polynomial.hermite_e.hermegauss(order)
    axes += [(t, u / math.sqrt(2 * math.pi))] * (d - 1)
    grid = np.stack(np.meshgrid(*(a[0] for a in axes), indexing="ij"), -1)
    weight = np.prod(np.meshgrid(*(a[1] for a in axes), indexing="ij"), 0)
    x = torch.as_tensor(grid.reshape(-1, d), device=v.device) @ _frame(v)
    return x, torch.as_tensor(weight.ravel(), device=v.device)


def risk(
    u: Tensor, c: Tensor, separator: Tensor, contrast: Tensor, tau: float
) -> Tensor:
    """Risk E (y - tanh(u.x / 2 tau) c.x)^2 of the teacher sgn(v.x)(a.x), x ~ N(0, I).

    u and c are (..., d), the answer (...,); d >= 2. The common fit w0 = 0 is optimal,
    since the teacher is even. Given u.x all is closed form; one integral is left, a
    trapezoid sum of an analytic function: error near 1e-13 |a|^2 at every tau and
    every |u| up to 1e6 tau. Differentiable in u, c, v, a where u != 0.
    ValueError for wrong shapes, NaN, tau <= 0, u = 0 or v = 0. Source: ours.
    """
    tau = positive("tau", tau)
    u, c, v, a = _states(u, c, separator, contrast)
    size = u.norm(dim=-1, keepdim=True)
    v, e = v / v.norm(), u / size
    across = v - (v * e).sum(-1, keepdim=True) * e
    width = across.square().sum(-1, keepdim=True).clamp_min(1e-30).sqrt()
    f = across / width
    first, second = _given_score(size / (2 * tau), (v * e).sum(-1, keepdim=True), width)
    ce, cf, ae, af = ((z * w).sum(-1) for z in (c, a) for w in (e, f))
    rest = (c * a).sum(-1) - ce * ae - cf * af
    ss, sg, gg, one = first
    cross = ss * ce * ae + sg * (ce * af + cf * ae) + gg * cf * af + one * rest
    square = second[0] * ce**2 + second[1] * (c.square().sum(-1) - ce**2)
    return a @ a - 2 * cross + square


def flow(field: Field, state: Tensor, times: Tensor, steps: int = 10) -> Tensor:
    """Solve z' = field(z) by Runge-Kutta of order four, state z -> (m, *z.shape).

    Values at times (m,), rising, from the state at times[0]; `steps` equal steps
    between neighbours. Its error falls like steps^-4: double steps to see it.
    ValueError for times that do not rise, steps < 1, or a state that is not finite
    on the way. Source: Runge and Kutta.
    """
    times = real_array("times", times, 1)
    if not (times.diff() > 0).all() or steps < 1:
        raise ValueError(f"times must rise and steps be >= 1, got {times}, {steps}")
    found = [state]
    for gap in times.diff().tolist():
        h = gap / steps
        for _ in range(steps):
            k1 = field(state)
            k2 = field(state + h / 2 * k1)
            k3 = field(state + h / 2 * k2)
            k4 = field(state + h * k3)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        if not state.isfinite().all():
            raise ValueError("the flow left the finite numbers: raise steps")
        found.append(state)
    return torch.stack(found)


def real_array(name: str, values: Tensor, ndim: int | None) -> Tensor:
    """The values in float64, if real, finite, not empty; ndim = None: (..., d)."""
    try:
        array = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be numbers, got {values!r}") from error
    if array.is_complex() or array.dtype == torch.bool:
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    if (ndim is not None and array.ndim != ndim) or array.ndim < 1 or not array.numel():
        wanted = "(..., d)" if ndim is None else ("(d,)", "(d, d)")[ndim - 1]
        raise ValueError(f"{name} must have shape {wanted}, got {tuple(array.shape)}")
    if not array.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinite numbers")
    return array.double()


def positive(name: str, value: float) -> float:
    """The value as a float, if it is a finite number > 0."""
    number = check_temperature(value)
    if not 0 < number < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, got {number}: the rates grow like "
            "1/tau, and at tau = 0 there is no flow"
        )
    return number


def _states(
    u: Tensor, c: Tensor, separator: Tensor, contrast: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, c = real_array("u", u, None), real_array("c", c, None)
    v, a = real_array("separator", separator, 1), real_array("contrast", contrast, 1)
    if not u.shape == c.shape or {u.shape[-1], len(a)} != {len(v)} or len(v) < 2:
        raise ValueError(
            "u and c (..., d), separator (d,) and contrast (d,) share one d >= 2, got "
            f"{[tuple(z.shape) for z in (u, c, v, a)]}"
        )
    if not (u.norm(dim=-1) > 0).all() or not v.norm() > 0:
        raise ValueError("u and the separator must not be zero: they have a direction")
    return u, c, v, a


def _given_score(kappa: Tensor, cos: Tensor, sin: Tensor) -> tuple[tuple, tuple]:
    # E over s = e.x of T = tanh(kappa s) and the moments of sgn(v.x) in g = f.x given
    # s; all integrands are even in s. With s = sinh(y) / scale, and a scale no smaller
    # than the steepness of T and of the jump, they are analytic for |Im y| < pi/4: a
    # step of 1/8 errs by about exp(-4 pi^2).
    scale = (1 + kappa**2 + (cos / sin) ** 2).sqrt().detach().clamp_max(1e7)
    last = math.ceil(8 * math.asinh(12 * float(scale.max()))) if scale.numel() else 1
    y = torch.arange(last + 1, dtype=torch.float64, device=kappa.device) / 8
    s = y.sinh() / scale
    weight = y.cosh() / scale * (-s.square() / 2).exp() * ROOT / 8
    h = cos / sin * s
    sign = torch.erf(h / math.sqrt(2))
    bell = ROOT * (-h.square() / 2).exp()
    gate = torch.tanh(kappa * s)
    by = weight * gate  # zero at s = 0: the half weight of that end is not missed
    first = (by * s**2 * sign, by * s * bell, by * (sign - h * bell), by * sign)
    second = (by * gate * s**2, by * gate)
    return tuple(z.sum(-1) for z in first), tuple(z.sum(-1) for z in second)


def _frame(v: Tensor) -> Tensor:
    """The reflection that takes the first axis to v: any orthogonal frame would do."""
    frame = torch.eye(len(v), dtype=v.dtype, device=v.device)
    n = v / v.norm() - frame[0]
    return frame - 2 * n.outer(n) / (n @ n) if n.norm() > 0 else frame


def _half_range(order: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss rule of the density phi on (0, inf), total mass one half."""
    t, w = np.polynomial.legendre.leggauss(400)
    t, w = 10 * (t + 1), 10 * w  # up to 20: nothing is cut off in float64
    w = w * np.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    previous, current = np.zeros_like(t), np.full_like(t, 1 / math.sqrt(w.sum()))
    diagonal, side = [], []
    for _ in range(order):
        diagonal.append((w * t * current**2).sum())
        following = (t - diagonal[-1]) * current - (side[-1] if side else 0) * previous
        side.append(math.sqrt((w * following**2).sum()))
        previous, current = current, following / side[-1]
    matrix = np.diag(diagonal) + np.diag(side[:-1], 1) + np.diag(side[:-1], -1)
    nodes, vectors = np.linalg.eigh(matrix)
    return nodes, w.sum() * vectors[0] ** 2

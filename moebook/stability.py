"""Stability: what grows first when two linear experts are still equal.

The student is F = w0.x + tanh(u.x / 2 tau) c.x: experts w0 + c and w0 - c, score u.x,
gate sigma(u.x / tau). Risk E (y - F)^2, without a half. At u = c = 0, with w0 the best
linear fit and r its residual, M = E[r x x'] decides. Inputs are centred Gaussian unless
a function says otherwise.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from moebook.checks import check_finite, check_input
from moebook.gating import check_temperature

Function = Callable[[Tensor], Tensor]

ROOT = math.sqrt(2 / math.pi)  # E|z|, z standard normal


def operator(
    separator: Tensor, contrast: Tensor, covariance: Tensor | None = None
) -> Tensor:
    """M = E[y x x'] for y = sgn(v.x)(a.x), separator v, contrast a (d,) -> (d, d).

    x ~ N(0, covariance (d, d)), the identity if None. The length of v does not matter.
    Differentiable in all three. TypeError for what is no vector of real numbers;
    ValueError for a wrong shape, NaN, a separator that does not vary, or a covariance
    that is not symmetric positive semidefinite.
    Source: ours, for the operator of the reduced model of Rastegar (2026).
    """
    v = _array("separator", separator, 1)
    a = _array("contrast", contrast, 1).to(v.device)
    if a.shape != v.shape:
        raise ValueError(
            f"separator and contrast share one d, got {tuple(v.shape)} and "
            f"{tuple(a.shape)}: both are vectors of the input space"
        )
    spread = torch.eye(len(v), dtype=v.dtype, device=v.device)
    if covariance is not None:
        spread = _covariance(covariance, len(v)).to(v.device)
    variance = v @ spread @ v
    if not variance > 0:
        raise ValueError(
            "the separator must vary with x, but v' covariance v is "
            f"{float(variance):g}: give a direction within the support of the law"
        )
    p, q = spread @ v / variance.sqrt(), spread @ a
    level = v @ q / variance.sqrt()
    return ROOT * (level * (spread - p.outer(p)) + p.outer(q) + q.outer(p))


def operator_of(
    label_mean: Function,
    x: Tensor,
    weights: Tensor | None = None,
    *,
    intercept: bool = False,
) -> Tensor:
    """M = E[r x x'] of any label, on points x (n, d) of any law -> (d, d).

    r is the residual of the least-squares fit w0.x, or w0.x + b0 with intercept, on the
    same points. With draws the error is that of n draws, and a bias of order 1/n from
    the fit; with the weights (n,) of `quadrature` it is that of the rule.
    label_mean: (n, d) -> (n,). Raises as `along`; ValueError for fewer than d points
    and for weights that do not fit. Source: ours.
    """
    label = _label(label_mean, x)
    x = x.double()
    weights = _weights(weights, x)
    design = torch.cat([x, torch.ones_like(x[:, :1])], 1) if intercept else x
    if len(x) < design.shape[1]:
        raise ValueError(
            f"a fit of {design.shape[1]} numbers needs as many points, got {len(x)}"
        )
    weighted = design * weights[:, None]
    fit = torch.linalg.lstsq(weighted.T @ design, weighted.T @ label[:, None])
    residual = label - (design @ fit.solution)[:, 0]
    return (x * (weights * residual)[:, None]).T @ x


def along(
    label_mean: Function, x: Tensor, q: Tensor, *, intercept: bool = False
) -> Tensor:
    """Samples with mean q'Mq, x (n, d) from a centred Gaussian, q (d,) -> (n,).

    No fit is needed: third moments vanish, so a linear fit leaves E[y x x'] as it is.
    With an intercept fitted, the sample is y ((q.x)^2 - q'Sq), where S is the mean of
    x x' over these rows; that costs a bias of order 1/n. Finite variance if y has
    moments beyond the second. label_mean: (n, d) -> (n,); it may add noise.
    TypeError and ValueError for x or q of another kind or shape, and for NaN in x, q or
    the label.
    Source: ours.
    """
    label = _label(label_mean, x)
    q = _array("q", q, 1).to(x.device)
    if len(q) != x.shape[1]:
        raise ValueError(f"q must have shape ({x.shape[1]},), got ({len(q)},)")
    square = (x.double() @ q).square()
    if intercept and len(x):
        square = square - square.mean()
    return label * square


def quadrature(separator: Tensor, order: int = 12) -> tuple[Tensor, Tensor]:
    """Points (n, d) and weights (n,) of N(0, I_d), split at v.x = 0, n = 2 order^d.

    Exact up to rounding for any sgn(v.x) times a polynomial of degree below 2 order.
    Half-range Gauss rule along v, Gauss-Hermite across: meant for d <= 4. ValueError
    for a zero separator, an order outside 2..40, or more than 2^22 points.
    Source: Golub and Welsch; the half-range recurrence by Stieltjes' procedure.
    """
    v = _array("separator", separator, 1)
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
    # A reflection takes the first axis to v: any orthogonal frame would do.
    frame = torch.eye(d, dtype=v.dtype, device=v.device)
    n = v / v.norm() - frame[0]
    if n.norm() > 0:
        frame = frame - 2 * n.outer(n) / (n @ n)
    x = torch.as_tensor(grid.reshape(-1, d), device=v.device) @ frame
    return x, torch.as_tensor(weight.ravel(), device=v.device)


def rates(
    M: Tensor, tau: float, eta_u: float = 1.0, eta_c: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Growth rates (d,), falling, and their modes (d, 2, d), rows u and c, of length 1.

    Flow u' = -eta_u dL/du, c' = -eta_c dL/dc at the symmetric state. Rate
    sqrt(eta_u eta_c)|lambda|/tau per unit of time; each has a decaying partner of the
    same size, with the sign of c changed. ValueError for an M that is not square,
    finite and symmetric, for tau <= 0 and a learning rate <= 0. Source: ours.
    """
    M = _symmetric("M", M)
    tau = _positive("tau", tau)
    eta_u, eta_c = _positive("eta_u", eta_u), _positive("eta_c", eta_c)
    values, vectors = torch.linalg.eigh(M)
    order = values.abs().argsort(descending=True)
    values, q = values[order], vectors.T[order]
    sign = 1 - 2 * (values < 0).to(values)[:, None]
    modes = torch.stack([math.sqrt(eta_u) * q, math.sqrt(eta_c) * sign * q], 1)
    modes = modes / math.sqrt(eta_u + eta_c)
    return math.sqrt(eta_u * eta_c) * values.abs() / tau, modes


def linear_flow(
    M: Tensor, u0: Tensor, c0: Tensor, t: float, tau: float
) -> tuple[Tensor, Tensor]:
    """u(t) and c(t) of u' = Mc/tau, c' = Mu/tau from u0 and c0 (d,) -> (d,), (d,).

    u = cosh(Mt/tau) u0 + sinh(Mt/tau) c0, and c with the two exchanged. Differentiable.
    Raises as `rates`; ValueError for starts of another shape. Source: ours.
    """
    M = _symmetric("M", M)
    tau = _positive("tau", tau)
    start = [_array(name, x, 1) for name, x in (("u0", u0), ("c0", c0))]
    if any(x.shape != M.shape[:1] for x in start):
        raise ValueError(
            f"u0 and c0 must have shape ({len(M)},), got "
            f"{[tuple(x.shape) for x in start]}"
        )
    grown = torch.linalg.matrix_exp(M * (t / tau)) @ (start[0] + start[1]) / 2
    decayed = torch.linalg.matrix_exp(-M * (t / tau)) @ (start[0] - start[1]) / 2
    return grown + decayed, grown - decayed


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
    tau = _positive("tau", tau)
    v, a = _array("separator", separator, 1), _array("contrast", contrast, 1)
    u, c = (_array(name, z, None) for name, z in (("u", u), ("c", c)))
    if not u.shape == c.shape or {u.shape[-1], len(a)} != {len(v)} or len(v) < 2:
        raise ValueError(
            "u and c (..., d), separator (d,) and contrast (d,) share one d >= 2, got "
            f"{[tuple(z.shape) for z in (u, c, v, a)]}"
        )
    size = u.norm(dim=-1, keepdim=True)
    if not (size > 0).all() or not v.norm() > 0:
        raise ValueError("u and the separator must not be zero: they have a direction")
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


def flow(field: Function, state: Tensor, times: Tensor, steps: int = 10) -> Tensor:
    """Solve z' = field(z) by Runge-Kutta of order four, state z -> (m, *z.shape).

    Values at times (m,), rising, from the state at times[0]; `steps` equal steps
    between neighbours. Its error falls like steps^-4: double steps to see it.
    ValueError for times that do not rise, steps < 1, or a state that is not finite
    on the way. Source: Runge and Kutta.
    """
    times = _array("times", times, 1)
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


def _array(name: str, values: Tensor, ndim: int | None) -> Tensor:
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


def _symmetric(name: str, values: Tensor) -> Tensor:
    matrix = _array(name, values, 2)
    scale = matrix.abs().max()
    if matrix.shape[0] != matrix.shape[1] or (matrix - matrix.mT).abs().max() > (
        1e-6 * scale
    ):
        raise ValueError(
            f"{name} must be square and symmetric, got shape {tuple(matrix.shape)}: "
            f"use ({name} + {name}.mT) / 2"
        )
    return (matrix + matrix.mT) / 2


def _covariance(values: Tensor, d: int) -> Tensor:
    matrix = _symmetric("covariance", values)
    if len(matrix) != d:
        raise ValueError(f"covariance must be ({d}, {d}), got {tuple(matrix.shape)}")
    least = float(torch.linalg.eigvalsh(matrix.detach())[0])
    if least < -1e-9 * float(matrix.detach().abs().max()):
        raise ValueError(
            "the covariance must be positive semidefinite, got smallest eigenvalue "
            f"{least:.3g}"
        )
    return matrix


def _positive(name: str, value: float) -> float:
    number = check_temperature(value)
    if not 0 < number < math.inf:
        raise ValueError(
            f"{name} must be positive and finite, got {number}: the rates grow like "
            "1/tau, and at tau = 0 there is no flow"
        )
    return number


def _label(label_mean: Function, x: Tensor) -> Tensor:
    check_input(x, None)
    check_finite(x.sum(), x)
    label = label_mean(x)
    if not isinstance(label, Tensor) or label.shape != x.shape[:1]:
        came = tuple(label.shape) if isinstance(label, Tensor) else type(label).__name__
        raise ValueError(f"label_mean must return shape ({len(x)},), got {came}")
    if not label.isfinite().all():
        raise ValueError("label_mean must be finite, got NaN or infinite labels")
    return label.double()


def _weights(weights: Tensor | None, x: Tensor) -> Tensor:
    if weights is None:
        return x.new_full((len(x),), 1 / max(len(x), 1))
    weights = _array("weights", weights, 1).to(x.device)
    if len(weights) != len(x):
        raise ValueError(f"weights must have shape ({len(x)},), got ({len(weights)},)")
    return weights / weights.sum()

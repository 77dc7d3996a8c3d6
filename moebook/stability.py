"""Stability: what grows first when two linear experts are still equal.

The student is F = w0.x + tanh(u.x / 2 tau) c.x: experts w0 + c and w0 - c, score u.x,
gate sigma(u.x / tau). Risk E (y - F)^2, without a half. At u = c = 0, with w0 the best
linear fit and r its residual, M = E[r x x'] decides. Inputs are centred Gaussian unless
a function says otherwise.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from moebook.checks import check_finite, check_input
from moebook.flows import ROOT, flow, positive, quadrature, real_array, risk

__all__ = [
    "along",
    "flow",
    "linear_flow",
    "operator",
    "operator_of",
    "quadrature",
    "rates",
    "risk",
]

Function = Callable[[Tensor], Tensor]


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
    v, a = _teacher(separator, contrast)
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
    q = real_array("q", q, 1).to(x.device)
    if len(q) != x.shape[1]:
        raise ValueError(f"q must have shape ({x.shape[1]},), got ({len(q)},)")
    square = (x.double() @ q).square()
    if intercept and len(x):
        square = square - square.mean()
    return label * square


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
    tau = positive("tau", tau)
    eta_u, eta_c = positive("eta_u", eta_u), positive("eta_c", eta_c)
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
    tau = positive("tau", tau)
    start = [real_array(name, x, 1) for name, x in (("u0", u0), ("c0", c0))]
    if any(x.shape != M.shape[:1] for x in start):
        raise ValueError(
            f"u0 and c0 must have shape ({len(M)},), got "
            f"{[tuple(x.shape) for x in start]}"
        )
    grown = torch.linalg.matrix_exp(M * (t / tau)) @ (start[0] + start[1]) / 2
    decayed = torch.linalg.matrix_exp(-M * (t / tau)) @ (start[0] - start[1]) / 2
    return grown + decayed, grown - decayed


def _teacher(separator: Tensor, contrast: Tensor) -> tuple[Tensor, Tensor]:
    v = real_array("separator", separator, 1)
    a = real_array("contrast", contrast, 1).to(v.device)
    if a.shape != v.shape:
        raise ValueError(
            f"separator and contrast share one d, got {tuple(v.shape)} and "
            f"{tuple(a.shape)}: both are vectors of the input space"
        )
    return v, a


def _symmetric(name: str, values: Tensor) -> Tensor:
    matrix = real_array(name, values, 2)
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
    weights = real_array("weights", weights, 1).to(x.device)
    if len(weights) != len(x):
        raise ValueError(f"weights must have shape ({len(x)},), got ({len(weights)},)")
    return weights / weights.sum()

"""Landscape: the risk of a partition whose experts are the best ones for it.

Teacher y = sgn(v.x)(a.x), x ~ N(0, I_d), with separator v and contrast a; student
experts +-c.x on the two sides of u, or mixed by the soft gate sigma(u.x / tau). A risk
is *profiled* when c is the least-squares answer to u. Only the directions of u and v
count. Risks have the unit of |a|^2, temperatures that of u.x at |u| = 1.
"""

import math
from functools import cache
from numbers import Real

import numpy as np
import torch
from scipy.special import roots_legendre
from torch import Tensor

from moebook.sphere import (
    Vector,
    descend,
    numbers,
    sphere_gradient,
    sphere_hessian,
    unit,
)

__all__ = [
    "descend",
    "gate_moments",
    "hard_contrast",
    "hard_profiled",
    "smooth_label",
    "soft_profiled",
    "soft_risk",
    "sphere_gradient",
    "sphere_hessian",
]

#: Beyond it the risk of the best experts is that of infinite temperature, to 1e-16.
HOT = 1e8

#: Panels of the half line. They halve towards zero, so that every scale is resolved.
EDGES = (0.0, *(2.0**-k for k in range(44, -1, -1)), 2.0, 3.0, 4.5, 6.0, 8.5)


def hard_contrast(u: Vector, separator: Vector, contrast: Vector) -> Tensor:
    """The best expert N(u) a on the side u.x > 0, (d,) -> (d,) or (m, d) -> (m, d).

    N(u) = E[sgn(u.x) sgn(v.x) x x'] = (1 - 2t/pi) I + (2 sin t / pi)(e e' - f f'), with
    t the angle of u and v, e and f the directions of v + u and v - u. The other side
    has -N(u) a, and a common linear part is zero.
    Raises TypeError or ValueError for what is no vector, NaN, or a zero u or separator.
    Source: ours; for the identity in N see Stein (1981).
    """
    return _hard(*_vectors(u, separator, contrast))


def hard_profiled(u: Vector, separator: Vector, contrast: Vector) -> Tensor:
    """Profiled hard risk |a|^2 - |N(u) a|^2, (d,) -> () or (m, d) -> (m,).

    Exact to rounding, differentiable, and stable as u tends to v or -v. There, unless a
    is parallel to v, the risk is a cone: at u = +-v itself it has no gradient, and
    autograd answers zero. Raises as `hard_contrast`. Source: ours.
    """
    u, v, a = _vectors(u, separator, contrast)
    best = _hard(u, v, a)
    return ((a - best) * (a + best)).sum(-1)


def soft_profiled(
    u: Vector, separator: Vector, contrast: Vector, tau: float | Tensor
) -> Tensor:
    """Profiled soft risk at temperature tau > 0, (d,) -> () or (m, d) -> (m,).

    With T = tanh(u.x / 2 tau) the experts are +-S^-1 N a, S = E[T^2 xx'] and N =
    E[T sgn(v.x) xx']; a common linear part is zero. Smooth, also at u = +-v. Three
    integrals over a half line, 20 Gauss nodes on panels that halve towards zero; the
    error is below 1e-11 |a|^2 for 1e-6 <= tau <= 10 (measured with twice the nodes).
    Raises as `hard_contrast`; ValueError unless tau is positive and finite.
    Source: ours; Stein's identity twice removes the other integrals.
    """
    u, v, a = _vectors(u, separator, contrast)
    target, across, along = _soft(u, v, a, _temperature(tau).clamp(max=HOT))
    on_u = (u * target).sum(-1)
    explained = target.square().sum(-1) / across
    explained = explained + on_u.square() * (1 / along - 1 / across)
    return a.square().sum() - explained


def soft_risk(
    u: Vector,
    separator: Vector,
    contrast: Vector,
    tau: float | Tensor,
    experts: Vector | None = None,
) -> Tensor:
    """Soft risk of the fixed experts +-experts.x, (d,) -> () or (m, d) -> (m,).

    The teacher's own, +-contrast, where not given. Quadrature and errors as in
    `soft_profiled`. Source: ours.
    """
    u, v, a = _vectors(u, separator, contrast)
    c = a if experts is None else _vectors(u, separator, experts)[2]
    target, across, along = _soft(u, v, a, tau)
    squares = across * c.square().sum() + (along - across) * (u * c).sum(-1).square()
    return a.square().sum() - 2 * (target * c).sum(-1) + squares


def gate_moments(tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """A = E tanh^2(z / 2 tau) and B = E z tanh(z / 2 tau) for z ~ N(0, 1), tau > 0.

    They tend to 1 and sqrt(2/pi). Errors and quadrature as in `soft_profiled`.
    Source: ours.
    """
    z, weight = _half_line(_device(tau))
    gate = torch.tanh(z / (2 * _temperature(tau)))
    return (weight * gate.square()).sum(), (weight * z * gate).sum()


def smooth_label(
    theta: float | Tensor, tau: float | Tensor, contrast: float | Tensor | None = None
) -> Tensor:
    """Soft risk for the label mean v.x and constant experts +-c, theta (any) -> same.

    theta is the angle of u and v in radians; c = contrast, or the best one where not
    given: 1 + c^2 A - 2 c B cos(theta), or 1 - (B^2 / A) cos^2(theta), by
    `gate_moments`. Label noise is left out. Raises ValueError for an angle that is not
    finite and for tau not positive and finite. Source: ours.
    """
    hot = HOT if contrast is None else math.inf
    square, slope = gate_moments(_temperature(tau).clamp(max=hot))
    theta = torch.as_tensor(theta, dtype=torch.float64)
    if not theta.isfinite().all():
        raise ValueError(f"theta must be a finite angle in radians, got {theta}")
    if contrast is None:
        return 1 - slope**2 / square * theta.cos() ** 2
    return 1 + contrast**2 * square - 2 * contrast * slope * theta.cos()


def _hard(u: Tensor, v: Tensor, a: Tensor) -> Tensor:
    less, more = v - u, v + u
    # Sine and cosine of half the angle.
    sine, safe_sine = _root(less.square().sum(-1, keepdim=True) / 4)
    cosine, safe_cosine = _root(more.square().sum(-1, keepdim=True) / 4)
    both = (u * a).sum(-1, keepdim=True) * u + (v * a).sum() * v
    # Two forms of one vector; each keeps its digits on its own half of the sphere.
    near = sine * both - (less * a).sum(-1, keepdim=True) * less / (2 * safe_sine)
    far = (more * a).sum(-1, keepdim=True) * more / (2 * safe_cosine) - cosine * both
    turn = torch.where(sine <= cosine, near / safe_cosine, far / safe_sine)
    share = 1 - 4 * torch.atan2(sine, cosine) / math.pi
    return share * a + 2 / math.pi * turn


def _root(square: Tensor) -> tuple[Tensor, Tensor]:
    """The root, and the root with 1 in place of 0, whose gradient is never NaN."""
    there = square > 0
    safe = torch.where(there, square, 1.0).sqrt()
    return safe * there, safe


def _soft(
    u: Tensor, v: Tensor, a: Tensor, tau: float | Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """N a (..., d), and the eigenvalues of S across and along u, for T = tanh.

    With Z = u.x, V = v.x of correlation c = cos t: N = n I + k uu' + b (uv' + vu' -
    c (uu' + vv')), n = E[T sgn V], k = E[Z T' sgn V], b = sqrt(2/pi) E[T'(z sin t)].
    """
    tau = _temperature(tau)
    z, weight = _half_line(u.device)
    gate, slope = torch.tanh(z / (2 * tau)), _slope(z, tau)
    less, more = ((v + sign * u).square().sum(-1, keepdim=True) / 4 for sign in (-1, 1))
    c = more - less
    # The shift keeps derivatives at u = +-v finite and moves values by 1e-12 of them.
    shift = 1e-6 * tau.detach().clamp(max=1)
    sine = (4 * less * more + shift**2).sqrt()
    sign = torch.erf(c / sine * z / math.sqrt(2))
    n = (weight * gate * sign).sum(-1, keepdim=True)
    k = (weight * z * slope * sign).sum(-1, keepdim=True)
    b = (weight * _slope(sine * z, tau)).sum(-1, keepdim=True) * math.sqrt(2 / math.pi)
    p, q = (u * a).sum(-1, keepdim=True), (v * a).sum()
    target = n * a + k * p * u + b * ((q - c * p) * u + (p - c * q) * v)
    square = weight * gate.square()
    return target, square.sum(), (square * z.square()).sum()


def _slope(z: Tensor, tau: Tensor) -> Tensor:
    """Derivative of tanh(z / 2 tau), without overflow."""
    return 2 / tau * torch.sigmoid(z / tau) * torch.sigmoid(-z / tau)


@cache
def _rule() -> tuple[np.ndarray, np.ndarray]:
    # Arrays, not tensors: a tensor made inside torch.func must not outlive the call.
    node, weight = roots_legendre(20)
    edge = np.array(EDGES)
    half, middle = np.diff(edge)[:, None] / 2, (edge[1:] + edge[:-1])[:, None] / 2
    z = (middle + half * node).ravel()
    return z, (half * weight).ravel() * np.exp(-(z**2) / 2) * math.sqrt(2 / math.pi)


def _half_line(device: torch.device) -> tuple[Tensor, Tensor]:
    """Nodes z > 0 and weights: sum(weight * g(z)) is E g(|z|), z ~ N(0, 1)."""
    z, weight = (torch.from_numpy(part).to(device) for part in _rule())
    return z, weight


def _device(tau: float | Tensor) -> torch.device:
    return tau.device if isinstance(tau, Tensor) else torch.device("cpu")


def _temperature(tau: float | Tensor) -> Tensor:
    scalar = isinstance(tau, Tensor) and tau.ndim == 0
    number = isinstance(tau, Real) and not isinstance(tau, bool)
    if not scalar and not number:
        raise TypeError(f"tau must be one number, got {tau!r}: call once for each")
    tau = torch.as_tensor(tau, dtype=torch.float64)
    if not 0 < tau.item() < math.inf:
        raise ValueError(
            f"tau must be positive and finite, got {tau.item()}: the limit tau = 0 is "
            "hard_profiled"
        )
    return tau


def _vectors(u: Vector, separator: Vector, contrast: Vector) -> tuple[Tensor, ...]:
    """Unit u (..., d), unit separator (d,), contrast (d,), on the device of u."""
    u = unit("u", u)
    v = unit("separator", separator, u)
    return u, v, numbers("contrast", contrast, u)

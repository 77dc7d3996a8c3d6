"""Sojourn: the expected time of a Brownian motion near a flat, in closed form.

X_t = x + sigma B_t, with independent coordinates. Functions take floats or tensors,
which broadcast, and return float64 on the device of the tensors.
"""

import math
from numbers import Real

import numpy as np
import torch
from scipy import special
from torch import Tensor

from moebook.checks import check_count

Numbers = float | Tensor

NODES, WEIGHTS = special.roots_legendre(200)
#: Gauss-Legendre on [0, pi], where the integrands are smooth.
ANGLE, WEIGHTS = (NODES + 1) * math.pi / 2, WEIGHTS * math.pi / 2


def occupation(
    eps: Numbers,
    T: Numbers,
    *,
    distance: Numbers,
    codimension: int,
    sigma: Numbers = 1.0,
) -> Tensor:
    """Expected time within eps of a flat over [0, T], broadcast over the numbers.

    X starts at this distance from a flat of this codimension n >= 1. T = inf is exact
    for n >= 3 and gives inf for n <= 2, where the flat is approached for ever. Started
    on the flat it is closed; otherwise a quadrature over the distance r from the start,
    relative error below 1e-10 (against the integral over time). Without gradient.
    Raises TypeError or ValueError for NaN, a number out of range, n not an int >= 1.
    Source: ours. The time spent at distance r from the start, in the ball of radius eps
    in the normal space: r Gamma(n/2 - 1, r^2 / 2T) / Gamma(n/2) dr times the share of
    the sphere of radius r that lies inside the ball.
    """
    n = check_count("codimension", codimension)
    eps = numbers("eps", eps)
    T = numbers("T", T, infinite=True)
    a = numbers("distance", distance)
    sigma = numbers("sigma", sigma, zero=False)
    eps, T, a, sigma = aligned(eps, T, a, sigma)
    variance = _array(sigma) ** 2
    time = _expected(_array(eps), _array(T) * variance, _array(a), n) / variance
    return torch.as_tensor(time, dtype=torch.float64, device=eps.device)


def _expected(eps: np.ndarray, T: np.ndarray, a: np.ndarray, n: int) -> np.ndarray:
    """`occupation` for sigma = 1, by the place of the start and the horizon."""
    with np.errstate(all="ignore"):  # the branches not taken may be 0/0
        start = np.maximum(eps - a, 0)
        time = _from_the_flat(start, T, n) + _shells(eps, T, a, n)
        if n >= 3:  # the solution of u'' + (n - 1) u'/r = -2 inside, harmonic outside
            outside = 2 * eps**2 * (eps / a) ** (n - 2) / (n * (n - 2))
            forever = np.where(a < eps, eps**2 / (n - 2) - a**2 / n, outside)
        else:
            forever = np.full_like(time, math.inf)
    time = np.where(np.isinf(T), forever, time)
    return np.where((T == 0) | (eps == 0), 0.0, time)


def _from_the_flat(eps: np.ndarray, T: np.ndarray, n: int) -> np.ndarray:
    """int_0^T P(n/2, eps^2 / 2t) dt, by parts."""
    q = eps**2 / (2 * T)
    # Where eps^2 underflows the rest does too, and 0 times an infinite gamma is NaN.
    rest = np.where(eps**2 > 0, eps**2 / 2 * _upper_gamma(n, q), 0.0)
    return T * special.gammainc(n / 2, q) + rest


def _upper_gamma(n: int, z: np.ndarray) -> np.ndarray:
    """Gamma(n/2 - 1, z) / Gamma(n/2)."""
    if n == 1:
        root = np.sqrt(math.pi * z)
        return 2 * np.exp(-z) / root * (1 - root * special.erfcx(np.sqrt(z)))
    if n == 2:
        return special.exp1(z)
    return special.gammaincc(n / 2 - 1, z) / (n / 2 - 1)


def _shells(eps: np.ndarray, T: np.ndarray, a: np.ndarray, n: int) -> np.ndarray:
    """Time at the distances r from |a - eps| to a + eps of the start, a > 0."""
    eps, T, a = (t[..., None] for t in (eps, T, a))
    near, small, large = np.abs(a - eps), np.minimum(a, eps), np.maximum(a, eps)
    # Beyond this r nothing is left: exp(-r^2 / 2T) beats the growth of the share.
    cut = (92 + 2 * n) * T
    length = np.minimum(2 * small, cut / (near + np.hypot(near, np.sqrt(cut))))
    step = length * np.sin(ANGLE / 2) ** 2  # smooths the roots at both ends
    r = near + step
    # By ratios: squares of a tiny a would underflow.
    sine = step / (2 * a) * ((2 * small - step) / (2 * a)) * ((2 * near + step) / r)
    sine = np.clip(sine * ((2 * large + step) / r), 0, 1)
    share = special.betainc((n - 1) / 2, 0.5, sine) / 2 if n > 1 else 0.5
    share = np.where((n == 1) | (r**2 + a**2 > eps**2), share, 1 - share)
    density = r * share * _upper_gamma(n, r**2 / (2 * T))
    time = (density * length * np.sin(ANGLE) / 2) @ WEIGHTS
    return np.where(a[..., 0] > 0, time, 0.0)


def exit_occupation(
    eps: Numbers, R: Numbers, d: int, codimension: int, sigma: Numbers = 1.0
) -> Tensor:
    """Expected time within eps of a flat through 0 until |X| = R, broadcast.

    X starts at 0 in d dimensions; the flat has codimension n from 1 to d. eps >= R
    gives the mean exit time R^2 / (d sigma^2) of the ball. Closed for n = d, otherwise
    a quadrature over the radius, relative error below 1e-10. Without gradient.
    Raises as `occupation`; ValueError for a codimension above d.
    Source: ours. By the Green function of the ball, 2 r^(d - 1) int_r^R s^(1 - d) ds dr
    is the time spent at radius r.
    """
    d, n = check_count("d", d), check_count("codimension", codimension)
    if n > d:
        raise ValueError(
            f"a flat in d = {d} dimensions has a codimension up to {d}, got {n}: give "
            "the dimension of the space as d"
        )
    eps, R = numbers("eps", eps), numbers("R", R, zero=False)
    sigma = numbers("sigma", sigma, zero=False)
    eps, R, sigma = aligned(eps, R, sigma)
    ratio = np.minimum(_array(eps / R), 1.0)
    time = _within_ball(ratio, d)
    if n < d:
        time = time + _beyond_ball(ratio, d, n)
    return torch.as_tensor(time, device=eps.device) * ((R / sigma) ** 2).detach()


def _within_ball(ratio: np.ndarray, d: int) -> np.ndarray:
    """Time at radii below the ratio, R = 1."""
    if d == 2:
        return ratio**2 / 2 - special.xlogy(ratio**2, ratio)
    return (ratio**2 - 2 * ratio**d / d) / (d - 2)


def _beyond_ball(ratio: np.ndarray, d: int, n: int) -> np.ndarray:
    """Time near the flat at radii from the ratio to 1, R = 1."""
    span = -np.log(np.maximum(ratio, 1e-150))[..., None]
    log_r = -span * np.cos(ANGLE / 2) ** 2  # in log r a small eps is as easy as any
    if d == 2:
        spent = -2 * np.exp(2 * log_r) * log_r
    else:
        spent = -2 * np.exp(2 * log_r) * np.expm1((d - 2) * log_r) / (d - 2)
    inside = np.exp(-2 * span * np.sin(ANGLE / 2) ** 2)  # (eps / r)^2
    share = special.betainc(n / 2, (d - n) / 2, inside)
    time = (spent * share * span * np.sin(ANGLE) / 2) @ WEIGHTS
    return np.where(ratio > 0, time, 0.0)


def numbers(
    name: str, value: Numbers, *, zero: bool = True, signed=False, infinite=False
) -> Tensor:
    """The value in float64, if it is real and in range; gradients flow through.

    TypeError for anything but real numbers or a tensor of them, ValueError for NaN and
    for what zero, signed and infinite do not admit.
    """
    if isinstance(value, list | tuple | np.ndarray) and not isinstance(value, Tensor):
        value = torch.as_tensor(value)
    real = isinstance(value, Real) and not isinstance(value, bool)
    if isinstance(value, Tensor):
        real = not (value.is_complex() or value.dtype == torch.bool)
    if not real:
        raise TypeError(
            f"{name} must be a real number or a tensor of them, got {value!r} of type "
            f"{type(value).__name__}: convert with float({name})"
        )
    value = torch.as_tensor(value, dtype=torch.float64)
    low = value >= -math.inf if signed else (value >= 0 if zero else value > 0)
    fits = low & (value.abs() < math.inf) | (infinite & (value == math.inf))
    if not fits.all():
        kind = "" if signed else (" >= 0" if zero else " > 0")
        came = value.detach()[~fits].reshape(-1)[0].item()
        raise ValueError(
            f"{name} must be a {'' if infinite else 'finite '}number{kind}, got {came}"
            f": look at where {name} is computed"
        )
    return value


def aligned(*values: Tensor) -> tuple[Tensor, ...]:
    """The values in one shape, on the device of the first that is off the CPU."""
    device = next((v.device for v in values if v.device.type != "cpu"), "cpu")
    return torch.broadcast_tensors(*(v.to(device) for v in values))


def _array(values: Tensor) -> np.ndarray:
    return values.detach().cpu().numpy()

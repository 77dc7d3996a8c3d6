"""Wedges: when and where a Brownian motion in the plane leaves a corner of its cell.

Two routing boundaries meet at an angle; their corner is a tie of three. X_t = x +
sigma B_t starts at polar (radius, theta) in the wedge 0 < theta < angle and leaves it
at tau; a factor of the space along the corner changes nothing. Functions take floats or
tensors, which broadcast, and return float64 on the device of the tensors.
"""

import math
import warnings
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from moebook.sojourn import Numbers, aligned, numbers


class Tail(NamedTuple):
    """P(tau > t) ~ constant t^(-exponent) for t to infinity."""

    constant: Tensor
    exponent: float


def wedge_survival(
    t: Numbers,
    *,
    angle: float,
    radius: Numbers,
    theta: Numbers,
    sigma: Numbers = 1.0,
) -> Tensor:
    """P(tau > t) in the wedge 0 < theta < angle, from polar (radius, theta), broadcast.

    angle in [.001, 2 pi]. Absolute error below 1e-12: the series stops where its rest
    is below 1e-17; small t takes the faces one by one, where meeting both has a chance
    below 1e-24. Without gradient and without drift.
    Raises TypeError or ValueError for NaN, t < 0, radius <= 0 (the corner is on the
    boundary, at no theta), theta outside [0, angle], sigma <= 0.
    Source: Carslaw's heat kernel, integrated over the wedge.
    """
    angle, r, theta = _wedge(angle, radius, theta)
    if angle < 1e-3:
        raise ValueError(
            f"angle must be at least .001 for wedge_survival, got {angle:.3g}: in so "
            "thin a wedge Bessel functions lose digits; the faces are parallel there"
        )
    t, s = numbers("t", t, infinite=True), numbers("sigma", sigma, zero=False)
    t, r, theta, s = aligned(t, r, theta, s)
    where = theta.detach().cpu().numpy()
    narrow = math.sin(min(angle, math.pi / 2)) ** 2
    with np.errstate(all="ignore"):  # t = 0 is q = inf
        q = ((r / s).detach() / t.detach().sqrt() / 2).cpu().numpy() ** 2
        value = np.where(q > 0, _face_by_face(q, where, angle), 0.0)
    late = (q * narrow <= 30) & (q > 0)
    value[late] = _series(q[late], where[late], angle)
    value[(where <= 0) | (where >= angle)] = 0.0
    return torch.as_tensor(value.clip(0, 1), device=t.device)


def _face_by_face(q: np.ndarray, theta: np.ndarray, angle: float) -> np.ndarray:
    """1 less the chance of meeting either face alone.

    A face further than the corner is not met before the ball about the start that the
    corner limits; meeting one after the other needs the distance of the mirror image.
    """
    value = np.ones_like(q)
    for away in (theta, angle - theta):
        height = np.sin(np.minimum(away, math.pi / 2))
        value -= special.erfc(height * np.sqrt(2 * q)) * (away < math.pi / 2)
    return value


def _series(q: np.ndarray, theta: np.ndarray, angle: float) -> np.ndarray:
    """sqrt(8 q / pi) sum over odd j of sin(j m theta) / j (I_(jm-1)/2 + I_(jm+1)/2).

    exp(-q) I_n(q) is the law of the difference N of two Poisson numbers of mean q / 2,
    and P(N >= n) <= exp(-n^2 / 2 (q + n / 3)): below exp(-50) from `order` on.
    """
    m, total = math.pi / angle, np.zeros_like(q)
    order = 19 + 10 * math.sqrt(3 + q.max(initial=0.0)) + 17
    for j in range(1, 2 * math.ceil(order / m) + 4, 2):
        bessel = special.ive((j * m - 1) / 2, q) + special.ive((j * m + 1) / 2, q)
        total += np.sin(j * m * theta) / j * bessel
    return np.sqrt(8 * q / math.pi) * total


def wedge_tail(
    *, angle: float, radius: Numbers, theta: Numbers, sigma: Numbers = 1.0
) -> Tail:
    """Constant and exponent pi / (2 angle) of P(tau > t) for large t.

    E tau^p is finite for p < exponent alone. Constant broadcast, in time^exponent.
    Raises as `wedge_survival`. Source: the first term of its series.
    """
    angle, r, theta = _wedge(angle, radius, theta)
    m, s = math.pi / angle, numbers("sigma", sigma, zero=False)
    power = m * torch.log(r / s / math.sqrt(8)) - math.lgamma((m + 1) / 2)
    sine = torch.sin(m * theta).clamp_min(0)
    return Tail(4 / math.sqrt(math.pi) * torch.exp(power) * sine, m / 2)


def wedge_mean_exit(
    *, angle: float, radius: Numbers, theta: Numbers, sigma: Numbers = 1.0
) -> Tensor:
    """E tau in a wedge of angle below pi / 2, from polar (radius, theta), broadcast.

    Warns from pi / 4 on, where tau has infinite variance and no sample mean of it a
    standard error. Differentiable.
    Raises as `wedge_survival`; ValueError from pi / 2 on, where E tau is infinite.
    Source: ours; the solution of sigma^2 / 2 Laplace u = -1 in the wedge that grows
    like r^2. From pi / 2 on the same formula is negative.
    """
    angle, r, theta = _wedge(angle, radius, theta)
    s = numbers("sigma", sigma, zero=False)
    if angle >= math.pi / 2:
        raise ValueError(
            f"E tau is infinite in a wedge of angle >= pi / 2, got {angle:.6g}: ask "
            "wedge_survival, or wedge_tail for the moments that exist"
        )
    if angle >= math.pi / 4:
        warnings.warn(
            f"angle = {angle:.6g} >= pi / 4: tau has infinite variance, so a sample "
            "mean of it has no standard error; this value is exact",
            stacklevel=2,
        )
    # cos(2 theta - angle) - cos(angle), without cancellation near the faces.
    rise = 2 * torch.sin(theta) * torch.sin(angle - theta)
    return (r / s) ** 2 * rise / (2 * math.cos(angle))


def wedge_corner_probability(
    r: Numbers, *, angle: float, radius: Numbers, theta: Numbers
) -> Tensor:
    """P(|X_tau| < r) in a wedge, from polar (radius, theta), broadcast.

    The exit place is within r of the corner; of order r^(pi / angle), not r^2. Free of
    sigma. Differentiable for r > 0.
    Raises as `wedge_survival`; ValueError for r < 0.
    Source: ours; z^(pi / angle) maps the wedge on a half-plane, with Cauchy exits.
    """
    angle, start, theta = _wedge(angle, radius, theta)
    m, r = math.pi / angle, numbers("r", r, infinite=True)
    sine = torch.sin(m * theta).clamp_min(0)
    return torch.atan2(sine, -torch.sinh(m * torch.log(r / start))) / math.pi


def _wedge(
    angle: float, radius: Numbers, theta: Numbers
) -> tuple[float, Tensor, Tensor]:
    angle = numbers("angle", angle, zero=False)
    if angle.ndim or angle > 2 * math.pi:
        raise ValueError(
            f"angle must be one number in (0, 2 pi], got {angle.tolist()}: it is the "
            "full angle of the wedge, in radians"
        )
    radius, theta = numbers("radius", radius, zero=False), numbers("theta", theta)
    if (theta > angle).any():
        raise ValueError(
            f"theta must be in [0, angle] = [0, {angle.item():.6g}], got "
            f"{theta.max().item():.6g}: it is measured from one face, in radians"
        )
    return angle.item(), radius, theta

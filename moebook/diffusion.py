"""Diffusion: when and where a Brownian input meets a routing boundary.

Closed forms, and the names of the samplers that go with them. X_t = x + drift t +
sigma B_t, and tau is the time at which it first meets the boundary. Functions take
floats or tensors, which broadcast, and return float64 on the device of the tensors.
"""

import math

import torch
from torch import Tensor

from moebook.bridges import bridge_bounds, bridge_survival, euler_survival, overshoot
from moebook.sojourn import (
    Numbers,
    aligned,
    exit_occupation,
    numbers,
    occupation,
)
from moebook.visits import occupation_hits, occupation_near_flat, occupation_near_tie
from moebook.walks import Walk, walk_on_spheres, wedge
from moebook.wedges import (
    Tail,
    wedge_corner_probability,
    wedge_mean_exit,
    wedge_survival,
    wedge_tail,
)

__all__ = [
    "Tail",
    "Walk",
    "bridge_bounds",
    "bridge_survival",
    "euler_survival",
    "exit_occupation",
    "halfspace_cdf",
    "halfspace_density",
    "halfspace_mean",
    "occupation",
    "occupation_hits",
    "occupation_near_flat",
    "occupation_near_tie",
    "overshoot",
    "union_bounds",
    "walk_on_spheres",
    "wedge",
    "wedge_corner_probability",
    "wedge_mean_exit",
    "wedge_survival",
    "wedge_tail",
]


def halfspace_cdf(
    t: Numbers, *, distance: Numbers, drift: Numbers = 0.0, sigma: Numbers = 1.0
) -> Tensor:
    """P(tau <= t) for one boundary at this distance, broadcast.

    drift > 0 is the speed towards the boundary. t = inf gives the chance of ever
    meeting it, 1 for drift >= 0 and exp(2 drift distance / sigma^2) below. No
    intermediate overflows. Gradients flow for 0 < t < inf.
    Raises TypeError or ValueError for NaN, t < 0, distance < 0 or sigma <= 0.
    Source: the inverse Gaussian law; the reflection principle without drift.
    """
    t, a, m, s = _halfspace(t, distance, drift, sigma)
    early, never = t == 0, t == math.inf
    safe = torch.where(early | never | (a == 0), 1.0, t)
    root = s * safe.sqrt()
    # exp(2 m a / s^2) Phi(-y) with the two exponentials in one, where both are large.
    y = (a + m * safe) / root
    wide = y > 0
    steep = torch.special.erfcx(torch.where(wide, y, 1.0) / math.sqrt(2)) / 2
    steep = torch.exp(-(((a - m * safe) / root) ** 2) / 2) * steep
    ever = torch.exp(2 * m.clamp_max(0) * a / s**2)
    second = torch.where(wide, steep, ever * torch.special.ndtr(-y))
    value = torch.special.ndtr((m * safe - a) / root) + second
    value = torch.where(never, ever, value.clamp(0, 1))
    value = torch.where(early, torch.zeros_like(value), value)
    return torch.where(a == 0, torch.ones_like(value), value)


def halfspace_density(
    t: Numbers, *, distance: Numbers, drift: Numbers = 0.0, sigma: Numbers = 1.0
) -> Tensor:
    """Density of tau at t, in one over time, as `halfspace_cdf`; zero at t = 0 and inf.

    Raises as `halfspace_cdf`; ValueError for distance = 0, where tau = 0 is certain.
    """
    numbers("distance", distance, zero=False)
    t, a, m, s = _halfspace(t, distance, drift, sigma)
    inside = (t > 0) & (t < math.inf)
    safe = torch.where(inside, t, 1.0)
    root = s * safe.sqrt()
    power = torch.log(a / root) - torch.log(safe) - ((a - m * safe) / root) ** 2 / 2
    return torch.where(inside, torch.exp(power) / math.sqrt(2 * math.pi), 0.0)


def halfspace_mean(*, distance: Numbers, drift: Numbers) -> Tensor:
    """E tau = distance / drift, whatever sigma; inf for drift <= 0. Broadcast.

    Raises as `halfspace_cdf`. Source: Wald's identity.
    """
    a, m = aligned(numbers("distance", distance), numbers("drift", drift, signed=True))
    mean = torch.where(m > 0, a / torch.where(m > 0, m, 1.0), math.inf)
    return torch.where(a == 0, torch.zeros_like(mean), mean)


def union_bounds(
    distances: Tensor, t: Numbers, sigma: Numbers = 1.0
) -> tuple[Tensor, Tensor]:
    """Bounds of P(tau <= t) without drift, distances (..., F) to F faces -> two (...).

    The largest of P(face met) and their sum, at most 1. t, sigma broadcast with (...).
    Raises as `halfspace_cdf`; ValueError for no face.
    Source: ours, of `halfspace_cdf` for each face.
    """
    distances = numbers("distances", distances, infinite=True)
    if not distances.ndim or not distances.shape[-1]:
        raise ValueError(
            "distances must have shape (..., F), one number a face and F >= 1, got "
            f"{tuple(distances.shape)}: without a face nothing is met"
        )
    t, sigma = numbers("t", t, infinite=True), numbers("sigma", sigma, zero=False)
    far = distances == math.inf
    met = halfspace_cdf(
        t[..., None].to(distances.device),
        distance=torch.where(far, 1.0, distances),
        sigma=sigma[..., None].to(distances.device),
    )
    met = torch.where(far, 0.0, met)
    return met.amax(-1), met.sum(-1).clamp_max(1)


def _halfspace(
    t: Numbers, distance: Numbers, drift: Numbers, sigma: Numbers
) -> tuple[Tensor, ...]:
    return aligned(
        numbers("t", t, infinite=True),
        numbers("distance", distance),
        numbers("drift", drift, signed=True),
        numbers("sigma", sigma, zero=False),
    )

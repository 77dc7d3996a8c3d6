"""Visits: samples of the time that a Brownian motion spends near a flat or a tie.

X_t = x + sigma B_t. For a fixed horizon no path is needed: X_t at a random time has an
exact law, and a mean asks for no more. Each sampler returns one float64 number a
sample, whose mean is the expected time of [0, T]; none has a grid or a gradient.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy import special
from torch import Generator, Tensor

from moebook import laws
from moebook.checks import check_count, check_input, check_router, check_starts
from moebook.lines import chunks, interval_mass, stretch, take_largest
from moebook.routing import Affine
from moebook.sojourn import numbers

#: From this noncentrality on the expansion about a plane is good to 1e-9.
FAR = 1e9


def occupation_hits(
    inside: Callable[[Tensor], Tensor],
    x: Tensor,
    T: float,
    generator: Generator,
    *,
    sigma: float = 1.0,
) -> Tensor:
    """Samples T [X_t in A] at a random time t of [0, T], starts x (n, d) -> (n,).

    inside is the indicator of A, (n, d) -> bool (n,), asked in float64.
    Raises TypeError or ValueError for a wrong shape, NaN, T negative or infinite.
    Source: ours; by Fubini only the law of X_t at each t matters.
    """
    x, T, root, noise = _random_time(x, T, generator, sigma)
    hit = inside(x + root[:, None] * noise)
    if hit.dtype != torch.bool or hit.shape != root.shape:
        raise ValueError(
            f"inside must answer with bool (n,) = ({len(x)},), got {hit.dtype} "
            f"{tuple(hit.shape)}: one truth value a row"
        )
    return T * hit.double()


def occupation_near_flat(
    eps: float,
    T: float,
    n: int,
    generator: Generator,
    *,
    distance: float,
    codimension: int,
    sigma: float = 1.0,
) -> Tensor:
    """Samples T P(|X_t| < eps given t) at n random times t of [0, T] -> (n,).

    |X_t| is the distance from a flat as in `sojourn.occupation`, whose value is the
    mean: given t a noncentral chi-square, so that a small eps loses no sample.
    Raises as `sojourn.occupation`; ValueError for an infinite T or n < 0.
    Source: ours; `occupation_hits` given its time.
    """
    codimension, n = check_count("codimension", codimension), check_count("n", n, 0)
    eps, T = numbers("eps", eps).item(), numbers("T", T).item()
    distance = numbers("distance", distance).item()
    sigma = numbers("sigma", sigma, zero=False).item()
    late = 1 - _uniforms(n, generator)  # never 0
    deviation = (sigma * math.sqrt(T) * late.sqrt()).clamp_min(1e-150).cpu().numpy()
    with np.errstate(over="ignore"):  # an infinite one is far
        center, level = (distance / deviation) ** 2, (eps / deviation) ** 2
    share = special.chndtr(level, codimension, np.minimum(center, FAR))
    # So far from the flat its sphere of radius eps is flat, but for its mean curvature.
    bend = (codimension - 1) / 2 * deviation / max(distance, 1e-150)
    plane = special.ndtr((eps - distance) / deviation - bend)
    share = np.where(center < FAR, share, plane)
    return T * torch.as_tensor(share, dtype=torch.float64, device=generator.device)


def occupation_near_tie(
    router: Affine,
    x: Tensor,
    w: float,
    T: float,
    generator: Generator,
    k: int = 1,
    *,
    sigma: float = 1.0,
) -> Tensor:
    """Samples with mean the time of [0, T] with gap_k <= w, starts x (n, d) -> (n,).

    Each in [0, T], with never more variance than `occupation_hits`. gap_k is the k-th
    less the (k + 1)-th largest logit, w in units of the logits. From three experts on
    the samples over w have a heavy tail, P(> s) like s^-2 up to s = T/w, by near triple
    ties: their variance grows like log(1/w), and for tiny w a sample shows too little.
    Raises TypeError or ValueError that says what was expected.
    Source: ours. Given the time, and all but the place on the line through X_t normal
    to the tie of ranks k and k + 1, as far as these two keep clear of the others.
    """
    k = check_router(router, k)
    check_input(x, router.weight.shape[1])
    w = numbers("w", w, infinite=True).item()
    x, T, root, noise = _random_time(x, T, generator, sigma)
    weight, bias = (t.detach().to(x) for t in (router.weight, router.bias))
    if k == len(bias):
        return torch.full_like(root, T if w == math.inf else 0.0)
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    # Not from the Gram matrix, which loses the distance of near twins to rounding.
    length = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    gram, out = weight @ weight.T, torch.empty_like(root)
    for rows in chunks(len(x), len(bias)):
        start, spread = x[rows] @ weight.T + bias, noise[rows] @ weight.T
        out[rows] = T * _line_share(start, spread, root[rows], gram, length, w, k)
    return out


def _line_share(
    start: Tensor, spread: Tensor, s: Tensor, gram: Tensor, length: Tensor, w, k: int
) -> Tensor:
    """P(gap_k <= w) on the line through each row's logits start + s spread -> (n,)."""
    z = torch.addcmul(start, s[:, None], spread)
    value, place = take_largest(z, k + 1)
    z.scatter_(1, place[:, : k - 1], value[:, : k - 1])
    pair = place[:, k - 1 :]
    i, j = pair.unbind(1)
    speed, steep = gram[i] - gram[j], length[i, j]
    down, up = torch.zeros_like(s), torch.zeros_like(s)
    for m in (0, 1):  # 1/|u| of the nearest meeting with a third along w_i - w_j
        inverse = speed - speed.gather(1, pair[:, m : m + 1])
        inverse.div_(value[:, k - 1 + m, None] - z)
        inverse.nan_to_num_(0.0, math.inf, -math.inf)  # 0/0: they never part
        down = torch.maximum(down, -inverse.amin(1))
        up = torch.maximum(up, inverse.amax(1))
    # In deviations s from the tie, which lies at `tie` from the middle of the law.
    gap = value[:, k - 1] - value[:, k]
    at, half = gap / (steep * s), w / (steep * s)
    tie = spread.gather(1, pair).diff(dim=1)[:, 0].neg() / steep - at
    low, high = at - stretch(steep / s, down), at + stretch(steep / s, up)
    left, right = torch.maximum(low, -half), torch.minimum(high, half)
    part = interval_mass("gaussian", tie, left, torch.maximum(left, right))
    share = part / interval_mass("gaussian", tie, low, high)
    # Parallel logits, or a stretch without length: count the hit.
    return torch.where(share.isfinite(), share.clamp(0, 1), (gap <= w).double())


def _random_time(
    x: Tensor, T: float, generator: Generator, sigma: float
) -> tuple[Tensor, float, Tensor, Tensor]:
    """x in float64, T, sigma sqrt(t) of a uniform t (n,), and normals (n, d)."""
    x = check_starts(x, generator)
    T = numbers("T", T).item()
    sigma = numbers("sigma", sigma, zero=False).item()
    root = sigma * math.sqrt(T) * (1 - _uniforms(len(x), generator)).sqrt()
    return x, T, root, laws.gaussian(*x.shape, generator)


def _uniforms(n: int, generator: Generator) -> Tensor:
    if not isinstance(generator, Generator):
        raise TypeError(
            f"a sampler draws from a torch.Generator, got {generator!r}: pass "
            "torch.Generator().manual_seed(seed)"
        )
    return torch.rand(
        n, generator=generator, dtype=torch.float64, device=generator.device
    )

"""Tubes: thickened sets about the ties of n + 1 experts, and samples of their mass.

A tie of order n: n + 1 experts agree, at least one of them active and one idle. Their
scores agree on a flat of codimension n; u are normal coordinates, the projection of x
on an orthonormal basis of the normal space. Tables have experts or coordinates in rows
and samples in columns, so that sums over experts run along memory.
"""

import math
from numbers import Real

import torch
from torch import Generator, Tensor

from moebook.checks import (
    check_ball,
    check_count,
    check_finite,
    check_input,
    check_router,
)
from moebook.flats import Flats, apply, cell, chances, density, double_on, flats_of
from moebook.lines import chunks, take_largest
from moebook.routing import Affine

KINDS = ("one_sided", "spread", "cube", "tube")


def thickened(
    router: Affine, x: Tensor, eps: float, n: int = 1, k: int = 1, kind: str = "spread"
) -> Tensor:
    """Which x lie in the thickened set of order n, (m, d) -> bool (m,).

    x is inside if some n + 1 experts, active and idle ones among them, are close:
    kind="one_sided": all less than eps below the k-th score, which is one of them; the
    same as s_(k) - s_(k+n) < eps, and as n extra experts in a smooth top-k of window
    eps. kind="spread": largest less smallest below eps. kind="cube": all within eps of
    the k-th score, above or below; n <= routing.tie_order(logits, k, eps).
    kind="tube": x less than eps from the flat on which they agree, in units of x. At
    order one this is the Euclidean tube of the set of ties; at higher orders that tube
    up to ends of volume O(eps^(n+1)).
    eps is in units of the logits for the first three. Empty for k = K and n >= K.
    Raises TypeError or ValueError that says what was expected; the tube also needs
    flats as `tie_samples` does.
    Source: ours; one-sided is the active set of SmoothSMoE, arXiv:2606.19036.
    """
    n, k = _check(router, x, eps, n, k, kind)
    inside = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    if _empty(len(router.bias), n, k, kind):
        return inside
    flats = flats_of(router, n, x.device) if kind == "tube" else None
    for rows in chunks(len(x), len(router.bias)):
        scores = _scores(router, x[rows])
        inside[rows] = _count(flats, scores, eps, n, k, kind) > 0
    return inside


def tie_samples(
    router: Affine,
    x: Tensor,
    eps: float,
    n: int = 1,
    k: int = 1,
    kind: str = "spread",
    law: str = "gaussian",
    *,
    generator: Generator,
) -> Tensor:
    """Samples whose mean is the mass of the thickened set of order n, (m, d) -> (m,).

    The sets are those of `thickened`. x comes from N(0, I), or for law="ball" uniformly
    from the unit ball; the generator draws the rest. Unbiased at every eps, with a
    relative variance that tends to a constant as eps -> 0 (that of plain sampling grows
    as eps^-n). Made for thin sets of few experts: with many, few sets of n + 1 are at
    the threshold, and at order one boundary.mass does better; for eps far above the
    spread of the logits, plain sampling does.
    Raises as `thickened`; ValueError where n + 1 experts do not tie on a flat of
    codimension n, as for n > d, or where there are more than 65536 such sets.
    Source: ours. For each set the density of the normal coordinates is integrated over
    its window by a uniform draw, the flat by x itself, projected.
    """
    n, k = _check(router, x, eps, n, k, kind)
    _check_law(x, law)
    if not isinstance(generator, Generator) or generator.device.type != x.device.type:
        raise TypeError(
            f"generator must be a torch.Generator on the device of x, {x.device}, got "
            f"{generator!r}: write torch.Generator('{x.device.type}').manual_seed(1)"
        )
    out = x.new_zeros(len(x), dtype=torch.float64)
    if _empty(len(router.bias), n, k, kind):
        return out
    flats = flats_of(router, n, x.device)
    chance = chances(flats, law, x.shape[1])
    for rows in chunks(len(x), len(router.bias), 2**17):
        part = router, x[rows], eps, k, kind, law, generator
        out[rows] = _sample(flats, chance, *part)
    return out


def _sample(flats, chance, router, x, eps, k, kind, law, generator) -> Tensor:
    spot = torch.rand(len(x), generator=generator, **double_on(chance))
    pick = torch.searchsorted(chance.cumsum(0), spot).clamp_(max=len(chance) - 1)
    sets, foot = flats.sets[pick].T, flats.foot[pick].T
    offset, tied, volume = _window(flats, pick, eps, kind, generator)
    u, scores = foot + offset, _scores(router, x)
    apart = scores.gather(0, sets)
    before = foot + apply(flats.inverse, pick, apart[1:] - apart[:1])
    if law == "ball":  # given u, the rest of x is uniform in a ball of this radius
        room = (1 - u.square().sum(0)).clamp_min(0)
        room /= (1 - before.square().sum(0)).clamp_min(1e-300)
        bias = router.bias.detach().to(scores)[:, None]
        scores = bias + room.sqrt() * (scores - bias - apply(flats.lift, pick, before))
        scores += apply(flats.lift, pick, u)
    else:
        scores += apply(flats.lift, pick, u - before)
    # Relative to the first tied expert, so that a tiny eps is not lost to rounding.
    scores -= scores.gather(0, sets[:1])
    scores.scatter_(0, sets, tied)
    hit = _hits(scores, tied, eps, k, kind).nonzero().squeeze(1)
    number = _count(flats, scores[:, hit], eps, len(tied) - 1, k, kind, known=True)
    weight = density(u, law, x.shape[1]) * volume / chance[pick]
    out = torch.zeros_like(weight)
    out[hit] = torch.where(number > 0, weight[hit] / number, 0.0)
    return out


def _window(flats: Flats, pick: Tensor, eps: float, kind: str, generator) -> tuple:
    """Uniform u - foot (n, m), the tied scores (n + 1, m), and the volume."""
    m, n, numbers = len(pick), flats.foot.shape[1], double_on(flats.foot)
    if kind == "tube":
        ray = torch.randn(n, m, generator=generator, **numbers)
        reach = torch.rand(m, generator=generator, **numbers) ** (1 / n)
        offset = eps * reach * ray / ray.norm(dim=0)
        tied = apply(flats.root, pick, offset)
        volume = math.pi ** (n / 2) / math.gamma(n / 2 + 1) * eps**n
        return offset, torch.cat((torch.zeros_like(tied[:1]), tied)), volume
    width = 2 * eps if kind == "cube" else eps
    below = torch.rand(n + 1, m, generator=generator, **numbers)
    top = torch.randint(n + 1, (1, m), generator=generator, device=pick.device)
    below.scatter_(0, top, 0.0)
    tied = width * (below[:1] - below)
    offset = apply(flats.inverse, pick, tied[1:])
    return offset, tied, (n + 1) * width**n * cell(flats)[pick]


def _hits(scores: Tensor, tied: Tensor, eps: float, k: int, kind: str) -> Tensor:
    """Where the tied experts are one of the sets that the kind asks for."""
    above = (scores > tied.amax(0)).sum(0)
    upto = (scores >= tied.amin(0)).sum(0)
    good = (above < k) & (upto > k)
    if kind == "tube":
        return good
    good &= upto - above == len(tied)
    if kind == "one_sided":
        good &= above == k - 1
    if kind == "cube":
        order = tied.sort(0, descending=True).values
        place = (k - 1 - above).clamp(0, len(tied) - 1)
        edge = order.gather(0, place[None])[0]
        good &= (order[0] - edge < eps) & (edge - order[-1] < eps)
    return good


def _count(flats, scores, eps, n, k, kind, known=False) -> Tensor:
    """Number of sets of n + 1 experts that put each column of scores in the union.

    For known columns one such set is known already.
    """
    if kind == "tube":
        return _count_flats(flats, scores, eps, k, known)
    one = torch.ones_like(scores[0], dtype=torch.int64)
    if known and (kind == "one_sided" or n == 1):
        return one
    E = len(scores)
    value, _ = take_largest(scores.clone(), min(k + n, E), 0)
    # Close experts may be taken of consecutive ranks: the set of the ranks a to a + n.
    first = k - 1 if kind == "one_sided" else max(0, k - n)
    number = 0 * one
    for a in range(first, min(k - 1, E - n - 1) + 1):
        high, low = value[a], value[a + n]
        if kind == "cube":
            edge = value[k - 1]
            number += (high - edge < eps) & (edge - low < eps)
        else:
            number += high - low < eps
    return number


def _count_flats(flats: Flats, scores: Tensor, eps, k: int, known: bool) -> Tensor:
    """As `_count`, for the flats less than eps away."""
    value, _ = take_largest(scores.clone(), k + 1, 0)
    number = torch.full_like(scores[0], known, dtype=torch.int64)
    # Of two experts so tied, the scores differ by less than eps |w_i - w_j|.
    reach = eps * flats.root.norm(dim=2).max()
    near = ((scores - value[k - 1]).abs() <= reach).sum(0)
    close = (near >= len(flats.sets.T) + known).nonzero().squeeze(1)
    for part in close.split(max(1, 2**18 // flats.root.numel())):
        tied = scores[:, part][flats.sets]  # (m, n + 1, columns)
        away = (flats.inverse @ (tied[:, 1:] - tied[:, :1])).norm(dim=1)
        good = (tied.amax(1) >= value[k - 1, part]) & (tied.amin(1) <= value[k, part])
        number[part] = (good & (away < eps)).sum(0)
    return number


def _scores(router: Affine, x: Tensor) -> Tensor:
    """Logits in float64, experts in rows, (m, d) -> (E, m)."""
    weight = router.weight.detach().to(x.device, torch.float64)
    bias = router.bias.detach().to(x.device, torch.float64)[:, None]
    scores = weight @ x.detach().double().T + bias
    check_finite(scores.sum(0), x)
    return scores


def _empty(E: int, n: int, k: int, kind: str) -> bool:
    return k == E or n >= E or (kind == "one_sided" and k + n > E)


def _check(router: Affine, x: Tensor, eps, n, k, kind: str) -> tuple[int, int]:
    k = check_router(router, k)
    check_input(x, router.weight.shape[1])
    n = check_count("n, the order of the tie,", n)
    if isinstance(eps, bool) or not isinstance(eps, Real) or not 0 <= eps < math.inf:
        raise ValueError(f"eps must be a finite number >= 0, got {eps!r}")
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    return n, k


def _check_law(x: Tensor, law: str) -> None:
    if law not in ("gaussian", "ball"):
        raise ValueError(f"law must be 'gaussian' or 'ball', got {law!r}")
    if law == "ball":
        check_ball(x)

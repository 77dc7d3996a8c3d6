"""Lines: an affine router along straight lines, where every logit is linear.

A `Frame` holds what all lines of one router share. Lengths are float64 and count from
the tie of two experts, in units of x; u counts in steps of w_i - w_j.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moebook.checks import check_finite
from moebook.routing import Affine

#: Numbers in the largest table at work: it stays in cache, calls stay few.
WORK = 2**18
# Freeing one large block teaches glibc to keep its pages for the next temporaries
# instead of returning them: up to twice as fast, no memory is touched.
torch.empty(2**22, dtype=torch.float32, device="cpu")


class Frame(NamedTuple):
    """An affine router less its mean logit, which no gap sees; K experts."""

    weight: Tensor  # (K, d) in the dtype of x, like bias and gram
    bias: Tensor  # (K,)
    gram: Tensor  # (K, K) inner products of the weights
    exact: Tensor  # (K, d + 1) float64 weight and bias
    length: Tensor  # (K, K) float64 |w_i - w_j|
    tie: Tensor  # (K, K) float64 place of the tie of i and j on the axis w_i - w_j
    twin: Tensor | None  # (K,) first expert of the same weight, where any two agree

    def logits(self, x: Tensor) -> Tensor:
        z = x @ self.weight.T  # twins get equal bits, whatever the order of sums
        return (z if self.twin is None else z[:, self.twin]).add_(self.bias)

    def pair(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        at = i * len(self.bias) + j  # one flat look-up is five times faster than [i, j]
        return tuple(t.view(-1).index_select(0, at) for t in (self.length, self.tie))


def frame_of(router: Affine, x: Tensor) -> tuple[Frame, Tensor]:
    """The router in float64 about its mean logit, and x in the dtype it needs."""
    exact = torch.cat((router.weight, router.bias[:, None]), 1).detach()
    exact = exact.to(x.device, torch.float64)
    exact = exact - exact.mean(0)
    weight, bias = exact[:, :-1].contiguous(), exact[:, -1]
    # Not from the Gram matrix, which loses the distance of near twins to rounding.
    length = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
    same = length == 0
    twin = same.int().argmax(1) if int(same.sum()) > len(bias) else None
    gram = weight @ weight.T
    if twin is not None:
        gram = gram[twin][:, twin]
    tie = (bias - bias[:, None]) / length
    # Float32 inner products cannot resolve the direction in which near twins part,
    # nor hold the squares of extreme weights.
    far = length.max()
    hard = ((length < 1e-3 * far) & ~same).any() or not 1e-15 <= far <= 1e15
    x = x.detach().double() if hard else x.detach()
    working = (t.to(x.dtype) for t in (weight, bias, gram))
    return Frame(*working, exact, length, tie, twin), x


def take_largest(z: Tensor, count: int, dim: int = 1) -> tuple[Tensor, Tensor]:
    """The largest logits and their experts in order; leaves -inf in their places."""
    if count > 8:
        value, place = z.topk(count, dim=dim)
        z.scatter_(dim, place, -math.inf)
        return value, place
    found = []
    for _ in range(count):  # many times faster than topk
        found.append(_largest(z, dim))
        z.scatter_(dim, found[-1][1], -math.inf)
    return tuple(torch.cat(parts, dim) for parts in zip(*found, strict=True))


def _largest(z: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """z.max(dim, keepdim=True), twice as fast: where from one product with [1, m]."""
    top = z.amax(dim, keepdim=True)
    hot = torch.eq(z, top, out=torch.empty_like(z))
    expert = torch.arange(z.shape[dim], dtype=z.dtype, device=z.device)
    code = torch.stack((torch.ones_like(expert), expert), dim)
    count, place = (hot @ code if dim else code @ hot).split(1, dim)
    if len(expert) <= 256 and (count == 1).all():  # exact in any matmul precision
        return top, place.long()
    return z.max(dim, keepdim=True)


def chunks(n: int, columns: int, work: int = WORK) -> list[slice]:
    """Parts of n rows, so that a table of as many columns holds `work` numbers."""
    rows = max(1, work // columns)
    return [slice(start, start + rows) for start in range(0, n, rows)]


def line_share(frame: Frame, x: Tensor, widths: Tensor, k: int, law: str) -> Tensor:
    """Conditional P(gap_k <= w) on the line through each x, (n, d) -> (n, m)."""
    i, j, gap, down, up = _interval(frame, x, k)
    length, tie = frame.pair(i, j)
    # In float64 lengths from the tie, so that a tiny w is not lost in x.
    at = gap / length
    low, high = at - stretch(length, down), at + stretch(length, up)
    if law == "ball":
        low, high = clip(x, at, tie, low, high)
    low, high, tie = low[:, None], high[:, None], tie[:, None]
    half = widths / length[:, None]
    start, stop = torch.maximum(low, -half), torch.minimum(high, half)
    part = interval_mass(law, tie, start, torch.maximum(start, stop))
    share = (part / interval_mass(law, tie, low, high)).clamp_max_(1)
    if not share.isfinite().all():  # parallel weights, or no interval: count the hit
        apart = (frame.bias[i] - frame.bias[j]).double()
        gap = torch.where(length == 0, apart, gap)[:, None]
        share = share.where(share.isfinite(), (gap <= widths).double())
    return share


def _interval(frame: Frame, x: Tensor, k: int) -> tuple[Tensor, ...]:
    """Experts i, j of ranks k, k+1, their gap, and how far they keep them, each (n,).

    Along u -> x + u (w_i - w_j) every logit is linear. With the experts above held
    fixed, the pair keeps its ranks until i or j meets a third expert, whichever side
    that comes from: one interval, given as 1/|u| of its ends. (The ranks alone do not
    suffice for k > 1: the pair may come back to them below another expert.)
    """
    z = frame.logits(x)
    value, place = take_largest(z, k + 1)
    z.scatter_(1, place[:, : k - 1], value[:, : k - 1])
    pair = place[:, k - 1 :]
    (i, j), (z_i, z_j) = pair.unbind(1), value[:, k - 1 :].split(1, 1)
    speed = frame.gram.index_select(0, i).sub_(frame.gram.index_select(0, j))
    s_i, s_j = speed.gather(1, pair).split(1, 1)
    room = z_j - z
    down_j, up_j = _meetings(speed - s_j, room)
    down_i, up_i = _meetings(speed.sub_(s_i), room.add_(z_i - z_j))
    gap = check_finite((z_i - z_j).squeeze(1), x)
    return i, j, gap, torch.maximum(down_i, down_j), torch.maximum(up_i, up_j)


def _meetings(speed: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """1/|u| of the nearest meeting of one logit with others, for u < 0 and u > 0."""
    inverse = speed.div_(room)
    down, up = inverse.amin(1), inverse.amax(1)
    if up.isnan().any():  # 0/0: tied with a parallel expert, which never parts
        inverse.nan_to_num_(0.0, math.inf, -math.inf)
        down, up = inverse.amin(1), inverse.amax(1)
    return -down, up


def stretch(length: Tensor, inverse: Tensor) -> Tensor:
    """The length of |u| steps, given 1/|u|: infinite where nothing is met."""
    return length / (inverse.clamp_min(0).double() + 0.0)  # + 0.0: 1/-0.0 is -inf


def clip(
    x: Tensor, at: Tensor, tie: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """The part of [low, high] inside the unit ball; x lies at `at` from the tie."""
    beside = x.double().square().sum(1) - (at + tie).square()
    chord = (1 - beside).clamp_min(0).sqrt()
    return torch.maximum(low, -chord - tie), torch.minimum(high, chord - tie)


def interval_mass(law: str, origin: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Mass of [low, high] + origin, to 13 digits; low <= high may be infinite."""
    width = high - low
    if law == "ball":
        return width
    left, right = origin + low, origin + high
    # Twice the middle picks the side: erfc of positive numbers keeps small masses.
    middle = left + right
    side = torch.full_like(middle, 0.5**0.5).copysign(middle)
    result = (torch.erfc(side * left) - torch.erfc(side * right)).abs() / 2
    narrow = (width * middle.abs().clamp_min(2) < 0.1).view(-1).nonzero().squeeze(1)
    if len(narrow):  # there the difference cancels: Taylor series about the middle
        width, middle = (t.reshape(-1).index_select(0, narrow) for t in (width, middle))
        h2, m2 = width.square(), (middle / 2).square()
        series = 1 + h2 * ((m2 - 1) / 24 + h2 * (m2 * (m2 - 6) + 3) / 1920)
        result.view(-1).index_copy_(0, narrow, density(m2) * width * series)
    return result


def density(square: Tensor) -> Tensor:
    """The standard normal density at t, given t^2."""
    return torch.exp(-square / 2) / math.sqrt(2 * math.pi)

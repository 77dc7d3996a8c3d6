"""Boundary: how much probability lies near a routing tie.

Samplers: each takes inputs x (n, d), one row a sample, and returns one float64 number a
row whose mean is the quantity named. Averages, errors and verdicts belong to `estimate`
and `claims`. gap_k is the difference of the k-th and the (k+1)-th largest logit, +inf
for k = K; BM(w) = P(gap_k <= w) is the boundary mass, BM'(0) the coarea constant.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from moebook.routing import Affine, check_active

Function = Callable[[Tensor], Tensor]

#: Numbers in the largest table at work: it stays in cache, calls stay few.
WORK = 2**18
# Freeing one large block teaches glibc to keep its pages for the next temporaries
# instead of returning them: up to twice as fast, no memory is touched.
torch.empty(2**22, dtype=torch.float32, device="cpu")
#: Lines are searched on [-REACH, REACH]; 2e-17 of a Gaussian lies beyond.
REACH = 8.5


def mass(
    router: Affine,
    x: Tensor,
    w: float | Tensor,
    k: int = 1,
    law: str = "gaussian",
    *,
    by: str = "line",
) -> Tensor:
    """Samples with mean P(gap_k <= w), x (n, d) -> (n,), or (n, m) for m widths w.

    x comes from N(0, I), or for law="ball" uniformly from the unit ball.
    by="line": the share of {gap_k <= w} on the line through x normal to the tie of
    ranks k and k+1, as far as these two keep their ranks below the same experts. In
    [0, 1], with never more variance than counting hits.
    by="stein": min(gap_k, w) u_S . x, where u_S sums over the active set the vectors
    with u_i . (w_j - w_l) = [i = j] - [i = l]. Gaussian law and affinely independent
    weights only, hence K <= d + 1; not confined to [0, 1]. For small w it is best where
    no weight is near an affine combination of the others: relative variance .035
    against 4.4 at w = .001 for 64 orthonormal rows, yet 5 to 25 for 64 random rows of
    64 numbers.
    Logits have the dtype of x; from there on float64, so that a tiny w loses nothing.
    w = 0 gives 0 unless experts are identical, and k = K gives [w = inf].
    Raises TypeError or ValueError that says what was expected.
    Source: ours; theory 1.2 is the limit w -> 0. Stein: E[x . F] = E[div F] with the
    continuous field F = u_S min(gap_k, w), whose divergence is [gap_k < w].
    """
    frame, x, k = _frame(router, x, k)
    _check_choices(x, law, by, "line")
    widths = _widths(w, x.device)
    out = x.new_empty((len(x), widths.numel()), dtype=torch.float64)
    if k == len(frame.bias):
        out[:] = widths.reshape(-1) == math.inf
        return out.reshape(len(x), *widths.shape)
    ladder, dual = widths.reshape(-1), _dual(frame) if by == "stein" else None
    for rows in _chunks(len(x), len(frame.bias)):
        if by == "stein":
            score, gap = _stein(frame, dual, x[rows], k)
            out[rows] = score * torch.minimum(gap, ladder)
        else:
            out[rows] = _line(frame, x[rows], ladder, k, law)
    return out.reshape(len(x), *widths.shape)


def slope(
    router: Affine, x: Tensor, k: int = 1, law: str = "gaussian", *, by: str = "facet"
) -> Tensor:
    """Samples with mean BM'(0), the slope of P(gap_k <= w) at w = 0, (n, d) -> (n,).

    by="facet": 2 p(tie) / (|w_i - w_j| P(chord)), summed over the facets of the routing
    cell of x that x projects into. Finite variance unless four or more experts tie on
    one flat of codimension two.
    by="stein": u_S . x as in `mass`; Gaussian tails, no division.
    For K = 2 all facet samples are equal: that number is exact.
    Raises as `mass`; ValueError for identical experts, whose tie has a probability, and
    for three experts that tie on one hyperplane.
    Source: ours; theory 1.2, extended to every k. The 2 counts both sides.
    """
    frame, x, k = _frame(router, x, k)
    _check_choices(x, law, by, "facet")
    _check_ties(frame, by)
    out = x.new_zeros(len(x), dtype=torch.float64)
    if k == len(frame.bias):
        return out
    dual = _dual(frame) if by == "stein" else None
    for rows in _chunks(len(x), len(frame.bias), WORK // 2):
        if by == "stein":
            out[rows] = _stein(frame, dual, x[rows], k)[0].squeeze(1)
        else:
            _add_facets(frame, x[rows], k, law, out[rows])
    return out


class _Frame(NamedTuple):
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


def _frame(router: Affine, x: Tensor, k: int) -> tuple[_Frame, Tensor, int]:
    _check_router(router)
    _check_input(x, router.weight.shape[1])
    k = check_active(router.bias[None], k)
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
    return _Frame(*working, exact, length, tie, twin), x, k


def _take_largest(z: Tensor, count: int, dim: int = 1) -> tuple[Tensor, Tensor]:
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


def _line(frame: _Frame, x: Tensor, widths: Tensor, k: int, law: str) -> Tensor:
    """Conditional P(gap_k <= w) on the line through each x, (n, d) -> (n, m)."""
    i, j, gap, down, up = _interval(frame, x, k)
    length, tie = frame.pair(i, j)
    # In float64 lengths from the tie, so that a tiny w is not lost in x.
    at = gap / length
    low, high = at - _stretch(length, down), at + _stretch(length, up)
    if law == "ball":
        low, high = _clip(x, at, tie, low, high)
    low, high, tie = low[:, None], high[:, None], tie[:, None]
    half = widths / length[:, None]
    start, stop = torch.maximum(low, -half), torch.minimum(high, half)
    part = _mass(law, tie, start, torch.maximum(start, stop))
    share = (part / _mass(law, tie, low, high)).clamp_max_(1)
    if not share.isfinite().all():  # parallel weights, or no interval: count the hit
        apart = (frame.bias[i] - frame.bias[j]).double()
        gap = torch.where(length == 0, apart, gap)[:, None]
        share = share.where(share.isfinite(), (gap <= widths).double())
    return share


def _interval(frame: _Frame, x: Tensor, k: int) -> tuple[Tensor, ...]:
    """Experts i, j of ranks k, k+1, their gap, and how far they keep them, each (n,).

    Along u -> x + u (w_i - w_j) every logit is linear. With the experts above held
    fixed, the pair keeps its ranks until i or j meets a third expert, whichever side
    that comes from: one interval, given as 1/|u| of its ends. (The ranks alone do not
    suffice for k > 1: the pair may come back to them below another expert.)
    """
    z = frame.logits(x)
    value, place = _take_largest(z, k + 1)
    z.scatter_(1, place[:, : k - 1], value[:, : k - 1])
    pair = place[:, k - 1 :]
    (i, j), (z_i, z_j) = pair.unbind(1), value[:, k - 1 :].split(1, 1)
    speed = frame.gram.index_select(0, i).sub_(frame.gram.index_select(0, j))
    s_i, s_j = speed.gather(1, pair).split(1, 1)
    room = z_j - z
    down_j, up_j = _meetings(speed - s_j, room)
    down_i, up_i = _meetings(speed.sub_(s_i), room.add_(z_i - z_j))
    gap = _finite((z_i - z_j).squeeze(1), x)
    return i, j, gap, torch.maximum(down_i, down_j), torch.maximum(up_i, up_j)


def _meetings(speed: Tensor, room: Tensor) -> tuple[Tensor, Tensor]:
    """1/|u| of the nearest meeting of one logit with others, for u < 0 and u > 0."""
    inverse = speed.div_(room)
    down, up = inverse.amin(1), inverse.amax(1)
    if up.isnan().any():  # 0/0: tied with a parallel expert, which never parts
        inverse.nan_to_num_(0.0, math.inf, -math.inf)
        down, up = inverse.amin(1), inverse.amax(1)
    return -down, up


def _stretch(length: Tensor, inverse: Tensor) -> Tensor:
    return length / (inverse.clamp_min(0).double() + 0.0)  # + 0.0: 1/-0.0 is -inf


def _clip(
    x: Tensor, at: Tensor, tie: Tensor, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    """The part of [low, high] inside the unit ball; x lies at `at` from the tie."""
    beside = x.double().square().sum(1) - (at + tie).square()
    chord = (1 - beside).clamp_min(0).sqrt()
    return torch.maximum(low, -chord - tie), torch.minimum(high, chord - tie)


def _mass(law: str, origin: Tensor, low: Tensor, high: Tensor) -> Tensor:
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
        result.view(-1).index_copy_(0, narrow, _density(m2) * width * series)
    return result


def _density(square: Tensor) -> Tensor:
    return torch.exp(-square / 2) / math.sqrt(2 * math.pi)


def _dual(frame: _Frame) -> Tensor:
    """Vectors u with u_i . (w_j - w_l) = [i = j] - [i = l], (d, K)."""
    left, size, right = torch.linalg.svd(frame.exact[:, :-1], full_matrices=False)
    K, rank = len(left), int((size > 1e-6 * size[0]).sum())
    if rank < K - 1:
        raise ValueError(
            f"by='stein' needs affinely independent weights: {K} weights in d = "
            f"{right.shape[1]} span {rank} directions (to 1e-6), not {K - 1}: leave by "
            "at its default, which has no such condition"
        )
    dual = right[: K - 1].T / size[: K - 1] @ left[:, : K - 1].T
    return dual.to(frame.weight.dtype)


def _stein(frame: _Frame, dual: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Score u_S . x and gap_k, each (n, 1)."""
    value, place = _take_largest(frame.logits(x), k + 1)
    score = (x @ dual).gather(1, place[:, :k]).double().sum(1, keepdim=True)
    return score, _finite(value[:, k - 1 : k] - value[:, k:], x)


def _add_facets(frame: _Frame, x: Tensor, k: int, law: str, out: Tensor) -> None:
    """Add to out (n,) the facet terms of x (n, d).

    Let S be the active set of x, i in S, j not, A = S less i. On the line through x
    along w_i - w_j the term is one number from wherever the active set is A+i or A+j;
    where the tie is on the facet these convex stretches meet there and form one chord.
    E[1/P(chord); chord] = 1 leaves the integral of 2 p / |w_i - w_j| over every facet.
    The second moment is the integral of 1/P(chord); of the two sectors beside a facet
    at a tie of three one is obtuse, so chords vanish only at ties of four or more.
    """
    z = frame.logits(x).T.contiguous()  # (K, n): sums over experts run along memory
    value, place = _take_largest(z, k + 1, dim=0)
    z.scatter_(0, place, value)
    _finite(value[k - 1] - value[k], x)
    for rank in range(k):
        j, row = _candidates(frame, z, value, place, rank)
        active = place[:k].index_select(1, row)
        gap, down, up, met = _chord(frame, z.index_select(1, row), active, rank, j)
        length, tie = frame.pair(active[rank], j)
        low, high = -_stretch(length, down), _stretch(length, up)
        if law == "ball":
            low, high = _clip(x[row], gap / length, tie, low, high)
            density = ((low < 0) & (high > 0)).double()
        else:
            density = _density(tie.square())
        # A chord so far out that its mass underflows is met by no draw of x.
        chord = _mass(law, tie, low, high).clamp_min(1e-300)
        met &= length > 0  # parallel experts never tie
        out.index_add_(0, row, (2 * density / (length * chord)).where(met, 0.0))


def _candidates(
    frame: _Frame, z: Tensor, value: Tensor, place: Tensor, rank: int
) -> tuple[Tensor, Tensor]:
    """Idle j and rows whose tie with the expert at `rank` may lie on the facet."""
    k, i = len(place) - 1, place[rank]
    pull = frame.length.square().reciprocal_().to(z.dtype)
    pull[frame.length == 0] = math.nan  # compares false: no pair
    u = (z - value[rank]).mul_(pull.index_select(1, i))
    if k > 1:  # nor are two active experts
        u.scatter_(0, place[:k], math.nan)
    # At the tie the last of the active is to be above, the first of the idle below.
    alive = None
    for other in {k - 1, k} - {rank}:
        at = place[other]
        speed = frame.gram.index_select(1, i).sub_(frame.gram.index_select(1, at))
        lead = (speed.gather(0, i[None]) - speed).mul_(u)
        lead.add_(value[rank] - value[other])
        test = lead.scatter_(0, at[None], 0.0) >= 0 if other == k else lead <= 0
        alive = test if alive is None else alive & test
    return alive.nonzero().unbind(1)


def _chord(
    frame: _Frame, z: Tensor, active: Tensor, rank: int, j: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gap of i = active[rank] and j, 1/|u| of the chord's ends from their tie, and
    whether the tie is on the facet; z (K, r), active (k, r), j (r,) -> (r,) each.
    """
    i = active[rank]
    pair = torch.stack((i, j))
    speed = frame.gram.index_select(1, i).sub_(frame.gram.index_select(1, j))
    (z_i, z_j), (s_i, s_j) = z.gather(0, pair), speed.gather(0, pair)
    u = (z_j - z_i) / (s_i - s_j)
    excess = (speed * u).add_(z).sub_(z_i + u * s_i)  # over the tied logits, at the tie
    mates, s_mates = excess.gather(0, active), speed.gather(0, active)
    room = excess.scatter_(0, torch.cat((active, j[None])), -math.inf).neg_()
    met = room.amin(0) > 0
    # The chord ends where an active expert meets an idle one: i is active above the
    # tie, j below it, their mates on both sides.
    up = (speed - s_i).div_(room).amax(0)
    down = (s_j - speed).div_(room).amax(0)
    for q in {*range(len(active))} - {rank}:
        mate, s_mate = mates[q], s_mates[q]
        met &= mate > 0
        rise = (speed - s_mate).div_(room + mate)
        up = torch.maximum(up, rise.amax(0)).maximum((s_j - s_mate) / mate)
        down = torch.maximum(down, -rise.amin(0)).maximum((s_mate - s_i) / mate)
    return z_i - z_j, down, up, met


def interface(
    score: Function,
    x: Tensor,
    integrand: Function | None = None,
    *,
    directions: Tensor | None = None,
    weighting: str = "cosine",
    cells: int = 96,
) -> Tensor:
    """Samples with mean the integral of g p / |grad s| over {s = 0}, (n, d) -> (n,).

    p is the standard Gaussian density, x is drawn from it; s = score and g = integrand
    (1 if None) are smooth, (n, d) -> (n,) row by row, s differentiable by autograd.
    Through each x go lines along the d axes, or with directions (n, d), drawn uniform
    on the sphere, one line along its row. A root of s at coordinate t along e counts
    phi(t) g |d_e s| / |grad s|^2, times d for a single line: squared cosines sum to one
    over axes and average 1/d over directions. Bounded as roots and 1/|grad s| are.
    weighting="plain" counts phi(t) g / |d_e s|: the same mean with infinite variance,
    since tangencies are not damped; a control, not a tool.
    Bias: 2e-17 beyond |t| = 8.5, and pairs of roots closer than a cell (17 / cells)
    that the parabola through three nodes does not reveal; such lines are nearly
    tangent. Double `cells` to see it.
    Raises ValueError for a wrong shape, NaN, and a root where grad s = 0.
    Source: ours; theory 8, Crofton's formula with the coarea weight.
    """
    _check_input(x, None)
    _finite(x.sum(), x)
    _check_lines(x, directions, weighting)
    n, d = x.shape
    axes = torch.eye(d, dtype=x.dtype, device=x.device)
    out = x.new_zeros(n, dtype=torch.float64)
    for rows in _chunks(n, (cells + 1) * d, 8 * WORK):
        part = x[rows].detach()
        for e in axes if directions is None else [directions[rows]]:
            base = part - (part * e).sum(1, keepdim=True) * e
            row, point, t, e, rise = _roots(score, base, e.expand_as(base), cells)
            weight = _weights(score, point, e, rise, weighting)
            weight *= _density(t.square())
            if integrand is not None:
                weight = weight * _values("integrand", integrand, point).detach()
            out[rows].index_add_(0, row, weight)
    return out if directions is None or weighting == "plain" else out * d


def _roots(score: Function, base: Tensor, e: Tensor, cells: int) -> tuple[Tensor, ...]:
    """Roots of s on the lines base + R e: their rows, points (r, d), coordinates and
    directions, and the mean slope of s over the bracket of each.
    """

    def along(row: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            return _values("score", score, base[row] + t[:, None] * e[row])

    t = torch.linspace(-REACH, REACH, cells + 1, dtype=base.dtype, device=base.device)
    every = torch.arange(len(base), device=base.device).repeat_interleave(len(t))
    row, left, right = _brackets(along, t, along(every, t.repeat(len(base))))
    t = _solve(lambda t: along(row, t), left, right)
    rise = (along(row, right) - along(row, left)) / (right - left)
    return row, base[row] + t[:, None] * e[row], t.double(), e[row], rise


def _weights(
    score: Function, point: Tensor, e: Tensor, rise: Tensor, weighting: str
) -> Tensor:
    """|d_e s| / |grad s|^2, or 1 / |d_e s| for plain weighting, at roots (r, d)."""
    point = point.clone().requires_grad_()
    with torch.enable_grad():
        s = _values("score", score, point)
        (gradient,) = torch.autograd.grad(s.sum(), point)
    rate = (gradient * e).sum(1).abs().double()
    steep = gradient.double().square().sum(1)
    flat = ~(steep > 1e-12 * rise.double().square())
    if flat.any():
        raise ValueError(
            f"|grad score| = {steep[flat][0].sqrt():.3g} where score = 0, at "
            f"{point[flat][0].tolist()}: transversality fails and the integral of "
            "p / |grad score| may diverge; shift the level, or look at layers of "
            "finite width"
        )
    return rate / steep if weighting == "cosine" else 1 / rate


def _brackets(
    along: Callable, nodes: Tensor, s: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and intervals on which s, given at the nodes of each row, changes sign."""
    s = s.reshape(-1, len(nodes))
    sign = s >= 0
    row, cell = (sign[:, 1:] != sign[:, :-1]).nonzero().unbind(1)
    found = [(row, nodes[cell], nodes[cell + 1])]
    # A valley of |s| may hide a pair: look at the bottom of the parabola through it.
    before, here, after = (s[:, m : s.shape[1] - 2 + m].abs() for m in range(3))
    same = (sign[:, :-2] == sign[:, 1:-1]) & (sign[:, 1:-1] == sign[:, 2:])
    row, cell = (same & (here <= before) & (here < after)).nonzero().unbind(1)
    before, here, after = (t[row, cell] for t in (before, here, after))
    shift = (before - after) / (before - 2 * here + after) / 2
    bottom = nodes[cell + 1] + shift * (nodes[1] - nodes[0])
    hidden = (along(row, bottom) >= 0) != sign[row, cell]
    row, cell, bottom = row[hidden], cell[hidden], bottom[hidden]
    found += [(row, nodes[cell], bottom), (row, bottom, nodes[cell + 2])]
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _solve(f: Function, near: Tensor, far: Tensor) -> Tensor:
    """Root of f between near and far (r,): Chandrupatla (1997), all rows at once."""
    f_near, f_far, share = f(near), f(far), torch.full_like(near, 0.5)
    for _ in range(120):
        width = (far - near).abs()
        least = 16 * REACH * torch.finfo(near.dtype).eps / width.clamp_min(1e-300)
        if not len(near) or least.min() > 0.5:
            break
        # Never closer to an end than the tolerance, so that the bracket shuts.
        share = torch.minimum(torch.maximum(share, least), 1 - least)
        t = near + share.where(least <= 0.5, 0.5) * (far - near)
        f_t = f(t)
        same = (f_t >= 0) == (f_near >= 0)
        old, f_old = torch.where(same, near, far), torch.where(same, f_near, f_far)
        far, f_far = torch.where(same, far, near), torch.where(same, f_far, f_near)
        near, f_near = t, f_t
        # Inverse quadratic interpolation where it is safe, else halve.
        xi, phi = (near - far) / (old - far), (f_near - f_far) / (f_old - f_far)
        safe = (phi**2 < xi) & ((1 - phi) ** 2 < 1 - xi)
        step = f_near / (f_far - f_near) * f_old / (f_far - f_old)
        step += (
            (old - near) / (far - near) * f_near / (f_old - f_near)
            * f_far / (f_old - f_far)
        )  # fmt: skip
        share = step.where(safe, 0.5)
    return torch.where(f_near.abs() < f_far.abs(), near, far)


def brute_force(
    router: Affine, n: int, w: float | Tensor, generator: Generator, k: int = 1
) -> Tensor:
    """Hits gap_k <= w among n draws of N(0, I), int64 (), or (m,) for m widths w.

    The peer of `mass` and the contrast to it: the relative variance of a draw is about
    1/P(gap_k <= w). Float32, so not for w below 1e-5; draws on the generator's device.
    Raises as `mass`. Source: ours.
    """
    _check_router(router)
    k = check_active(router.bias[None], k)
    device, K = generator.device, len(router.bias)
    widths = _widths(w, device)
    if k == K:
        return n * (widths == math.inf).long()
    weight = router.weight.detach().to(device, torch.float64)
    if weight.shape[1] > K:  # W x and R'y, y ~ N(0, I) in K dimensions, have one law
        weight = torch.linalg.qr(weight.T, mode="r").R.T
    weight = weight.float().contiguous()
    bias = router.bias.detach().to(device, torch.float32)[:, None]
    biased = bool(bias.any())
    hits = torch.zeros(widths.shape, dtype=torch.int64, device=device)
    x, z = weight.new_empty(2**14, weight.shape[1]), weight.new_empty(K, 2**14)
    for start in range(0, n, 2**14):
        size = min(n - start, 2**14)
        part, logits = x[:size].normal_(generator=generator), z[:, :size]
        torch.mm(weight, part.T, out=logits)
        gap = _running_gap(logits.add_(bias) if biased else logits, k)
        for total, width in zip(hits.view(-1), widths.view(-1).tolist(), strict=True):
            total += torch.count_nonzero(gap <= width)
    return hits


def _running_gap(z: Tensor, k: int) -> Tensor:
    """gap_k in one pass over the experts, (K, n) -> (n,): far cheaper than topk."""
    if 2 * k > len(z):
        z, k = -z, len(z) - k
    top = [torch.full_like(z[0], -math.inf) for _ in range(k + 1)]
    spare = torch.empty_like(z[0]), torch.empty_like(z[0])
    for loser in z:
        for m in range(k):
            torch.minimum(top[m], loser, out=spare[m % 2])
            torch.maximum(top[m], loser, out=top[m])
            loser = spare[m % 2]
        torch.maximum(top[k], loser, out=top[k])
    return top[k - 1] - top[k]


def _chunks(n: int, columns: int, work: int = WORK) -> list[slice]:
    rows = max(1, work // columns)
    return [slice(start, start + rows) for start in range(0, n, rows)]


def _widths(w: float | Tensor, device: torch.device) -> Tensor:
    widths = torch.as_tensor(w, dtype=torch.float64, device=device)
    if widths.ndim > 1 or not bool((widths >= 0).all()):
        raise ValueError(
            "w must be a width >= 0 in units of the logits, or a row of them (0 and "
            f"inf are allowed), got {w!r}"
        )
    return widths


def _check_router(router: Affine) -> None:
    if not isinstance(router, Affine):
        raise TypeError(
            "a routing.Affine is needed, whose logits are linear along lines, got "
            f"{type(router).__name__}: for a smooth score use boundary.interface"
        )


def _check_input(x: Tensor, d: int | None) -> None:
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x must be a float32 or float64 tensor (n, d), got {kind}: draw it by "
            "laws.gaussian, or convert with x.double()"
        )
    if x.ndim != 2 or x.shape[1] == 0 or d not in (None, x.shape[1]):
        raise ValueError(
            f"x must have shape (n, {'d' if d is None else d}), one row a sample, got "
            f"{tuple(x.shape)}"
        )


def _finite(gap: Tensor, x: Tensor) -> Tensor:
    """The gap in float64, a cheap witness that all of x is finite."""
    if not gap.isfinite().all() and not x.isfinite().all():
        raise ValueError(
            f"x must be finite, got {int((~x.isfinite()).sum())} NaN or infinite "
            "numbers: look for them where x is drawn"
        )
    return gap.double()


def _check_choices(x: Tensor, law: str, by: str, default: str) -> None:
    if law not in ("gaussian", "ball") or by not in (default, "stein"):
        raise ValueError(
            f"law must be 'gaussian' or 'ball' and by {default!r} or 'stein', got "
            f"law={law!r} and by={by!r}"
        )
    if law == "ball" and by == "stein":
        raise ValueError(
            "by='stein' integrates by parts against the Gaussian density: for "
            f"law='ball' use by={default!r}"
        )
    if law == "ball" and len(x) and (far := x.norm(dim=1).max().item()) > 1 + 1e-5:
        raise ValueError(
            f"law='ball' needs x in the unit ball, got a row of norm {far:.4g}: draw x "
            "by laws.ball"
        )


def _check_ties(frame: _Frame, by: str) -> None:
    """Refuse ties for which the facet sum is wrong or has no variance."""
    same = (frame.length == 0) & (frame.bias == frame.bias[:, None])
    twins = same.triu(1).nonzero().tolist()
    if twins:
        raise ValueError(
            f"experts {twins[0]} are identical: their gap is 0 with a probability, "
            "which has no slope; merge them, or ask for boundary.mass"
        )
    K = len(same)
    if by == "stein" or K < 3:
        return
    rank, full = (_rank(t) for t in (frame.exact[:, :-1], frame.exact))
    if rank == full == 2 and K > 3:
        raise ValueError(
            f"all {K} experts tie at one point of a plane: the facet samples have "
            "infinite variance there. Take twice the sum over pairs i < j of "
            "boundary.interface for z_i - z_j, with integrand 1 where i and j hold "
            "ranks k and k + 1, else 0"
        )
    if rank < K - 1 and (triple := _aligned(frame.exact)):
        raise ValueError(
            f"experts {triple} tie on one hyperplane, where the order of three "
            "logits changes at once: take boundary.mass at a small w"
        )


def _rank(rows: Tensor) -> int:
    size = torch.linalg.eigvalsh(rows @ rows.T)
    return int((size > 1e-12 * size[-1]).sum())


def _aligned(points: Tensor) -> list[int]:
    """Three collinear rows of points (K, d), or none; by two slopes in projection."""
    probe = torch.arange(3 * points.shape[1], dtype=points.dtype, device=points.device)
    run, *rise = (points @ (probe**2).cos().reshape(-1, 3)).unbind(1)
    run = run - run[:, None]
    slopes = [(y - y[:, None]) / run for y in rise]  # NaN on the diagonal, sorted last
    first, order = slopes[0].sort(1)
    second = slopes[1].gather(1, order)
    near = [
        (t[:, 1:] - t[:, :-1]).abs() < 1e-11 * (1 + t[:, 1:].abs())
        for t in (first, second)
    ]
    found = (near[0] & near[1]).nonzero()
    if not len(found):
        return []
    i, m = found[0].tolist()
    return sorted([i, *order[i, m : m + 2].tolist()])


def _check_lines(x: Tensor, directions: Tensor | None, weighting: str) -> None:
    if weighting != "cosine" and (weighting != "plain" or directions is None):
        raise ValueError(
            "weighting must be 'cosine', or 'plain' with random directions (fixed axes "
            f"may miss a flat interface altogether), got {weighting!r} with "
            f"directions {'of the axes' if directions is None else 'given'}"
        )
    if directions is None:
        return
    if directions.shape != x.shape or directions.dtype != x.dtype:
        raise ValueError(
            f"directions must have the shape and dtype of x, {tuple(x.shape)} and "
            f"{x.dtype}, got {tuple(directions.shape)} and {directions.dtype}"
        )
    norm = directions.norm(dim=1)
    if not torch.allclose(norm, torch.ones_like(norm), atol=1e-5, rtol=0):
        raise ValueError(
            f"directions must be unit vectors, got norms from {norm.min():.4g} to "
            f"{norm.max():.4g}: divide by directions.norm(dim=1, keepdim=True)"
        )


def _values(name: str, function: Function, points: Tensor) -> Tensor:
    values = function(points)
    if not isinstance(values, Tensor) or values.shape != points.shape[:1]:
        got = getattr(values, "shape", type(values).__name__)
        raise ValueError(
            f"{name} must map (n, d) to (n,), one number a row; for points of shape "
            f"{tuple(points.shape)} it returned {got}"
        )
    if values.isnan().any():
        raise ValueError(
            f"{name} is NaN at {points[values.isnan()][0].tolist()}: it must be a "
            "number everywhere, since lines pass everywhere"
        )
    return values

"""Facets: the slope of the boundary mass, summed over the facets of a routing cell.

A facet is where the active set trades one expert for another; its chord is the part of
a line across it on which only these two change places.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moebook.checks import check_finite
from moebook.lines import Frame, clip, density, interval_mass, stretch, take_largest


def check_ties(frame: Frame, by: str) -> None:
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
    """Three collinear rows of points (K, d), or none; by slopes in a projection."""
    probe = torch.arange(3 * points.shape[1], dtype=points.dtype, device=points.device)
    run, *rise = (points @ (probe**2).cos().reshape(-1, 3)).unbind(1)
    rise = torch.complex(*rise)  # two slopes in one, lest a projection deceive
    slope = (rise - rise[:, None]) / (run - run[:, None])  # NaN on the diagonal
    order = slope.real.argsort(1)  # NaN last
    slope = slope.gather(1, order)
    found = (slope.diff(dim=1).abs() < 1e-11 * (1 + slope[:, 1:].abs())).nonzero()
    if not len(found):
        return []
    i, m = found[0].tolist()
    return sorted([i, *order[i, m : m + 2].tolist()])


class Chords(NamedTuple):
    """Facets that inputs project into: experts i and j trade places there, (r,) each.

    Lengths are float64, from the tie along w_i - w_j; a row is met if its tie is on the
    facet, and of no use otherwise.
    """

    row: Tensor
    i: Tensor
    j: Tensor
    at: Tensor  # where the input lies, at or above zero
    low: Tensor
    high: Tensor
    length: Tensor  # of w_i - w_j
    tie: Tensor  # place of the tie on the axis w_i - w_j
    met: Tensor


def chords(frame: Frame, x: Tensor, k: int) -> Iterator[Chords]:
    """Chords of each x (n, d), active expert by active expert.

    Let S be the active set of x, i in S, j not, A = S less i. The chord is the part of
    the line through x along w_i - w_j on which the active set is A+i or A+j.
    """
    z = frame.logits(x).T.contiguous()  # (K, n): sums over experts run along memory
    value, place = take_largest(z, k + 1, dim=0)
    z.scatter_(0, place, value)
    check_finite(value[k - 1] - value[k], x)
    for rank in range(k):
        j, row = _candidates(frame, z, value, place, rank)
        active = place[:k].index_select(1, row)
        gap, down, up, met = _chord(frame, z.index_select(1, row), active, rank, j)
        length, tie = frame.pair(active[rank], j)
        low, high = -stretch(length, down), stretch(length, up)
        met &= length > 0  # parallel experts never tie
        yield Chords(row, active[rank], j, gap / length, low, high, length, tie, met)


def facet_sum(frame: Frame, x: Tensor, k: int, law: str) -> Tensor:
    """Sum of the facet terms of each x, (n, d) -> (n,).

    The term of a chord is one number from wherever the active set is A+i or A+j; where
    the tie is on the facet these convex stretches meet there and form one chord.
    E[1/P(chord); chord] = 1 leaves the integral of 2 p / |w_i - w_j| over every facet.
    The second moment is the integral of 1/P(chord); of the two sectors beside a facet
    at a tie of three one is obtuse, so chords vanish only at ties of four or more.
    """
    total = x.new_zeros(len(x), dtype=torch.float64)
    for row, _, _, at, low, high, length, tie, met in chords(frame, x, k):
        if law == "ball":
            low, high = clip(x[row], at, tie, low, high)
            height = ((low < 0) & (high > 0)).double()
        else:
            height = density(tie.square())
        # A chord so far out that its mass underflows is met by no draw of x.
        chord = interval_mass(law, tie, low, high).clamp_min(1e-300)
        total.index_add_(0, row, (2 * height / (length * chord)).where(met, 0.0))
    return total


def _candidates(
    frame: Frame, z: Tensor, value: Tensor, place: Tensor, rank: int
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
    frame: Frame, z: Tensor, active: Tensor, rank: int, j: Tensor
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

"""Layers: integrals across the ties of an affine router, on nodes graded at scale tau.

A `Layer` holds the chords of many inputs and every logit along them. Lengths count from
the tie, in units of x, and t is the coordinate along w_i - w_j: expert i leads above
zero, expert j below.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from moebook.facets import Chords, chords
from moebook.lines import Frame, chunks, density, interval_mass

#: A side of a chord is left where gate times density has fallen by exp(-DEPTH).
DEPTH = 28.0
#: Gates further than this from a half, in units of tau, count as zero beside others.
FAR = 32.0
#: Rules for k and k^2 times powers of rho below their number of nodes, on [0, inf), for
#: k = 1 / (1 + e^rho), and the temperature over gap growth up to which each is used.
GATE_RULES = (
    (
        0.0015,
        (
            0.27400130405262837,
            1.3679293486127833,
            3.3575183332481578,
            6.979269519974435,
        ),
        (
            0.68976652004369659,
            1.4935149306419584,
            2.5980289044254768,
            5.0324833712836918,
        ),
    ),
    (
        0.012,
        (
            0.15664454294892822,
            0.79652232434260629,
            1.8936242635670031,
            3.5028312682673042,
            5.8107081543262777,
            9.1459304370591083,
            14.279902488415065,
        ),
        (
            0.3979526715124421,
            0.87122992662668597,
            1.3319254139488307,
            1.9181212374431584,
            2.748817866528127,
            4.0308726081601887,
            6.6460627553133794,
        ),
    ),
)


#: Length up to which nodes on a side are graded towards the tie, in units of x.
NARROW = 0.6
#: Length from which on a side takes twice the nodes: it holds a peak, and both slopes.
LONG = 8.0

_leggauss = cache(leggauss)  # arrays: a cached tensor would carry its autograd mode


class Layer(NamedTuple):
    """Chords (r,) whose tie is on the facet, and the logits of K experts on them."""

    row: Tensor
    pair: Tensor  # (r, 2) experts i and j
    axis: Tensor  # row of their unit normal in the table that comes with the layer
    at: Tensor
    span: Tensor  # (r, 2) lengths of the sides of i and of j
    rate: Tensor  # growth of the gap of i and j, |w_i - w_j|
    tie: Tensor
    mass: Tensor  # probability of the chord, given its line
    lead: Tensor  # (r, K) logit i less logit l at the tie
    speed: Tensor  # (r, K) its growth along the normal

    def select(self, index: Tensor) -> "Layer":
        return Layer(*(t.index_select(0, index) for t in self))


def layer_of(frame: Frame, x: Tensor) -> tuple[Layer, Tensor]:
    """The layer of x (n, d), all facets of its cell that an x projects into, and the
    unit normals of these facets.
    """
    (found,) = chords(frame, x, 1)
    index = found.met.nonzero().squeeze(1)
    found = Chords(*(t.index_select(0, index) for t in found))
    row, i, j, at, low, high, length, tie, _ = found
    axis, normals = _normals(frame, i, j)
    pair = torch.stack((i, j), 1)
    z = frame.logits(x).index_select(0, row).double()
    speed = frame.gram.index_select(0, i).sub_(frame.gram.index_select(0, j)).double()
    speed /= length[:, None]
    speed = speed.gather(1, pair[:, :1]) - speed
    lead = z.gather(1, pair[:, :1]) - z - at[:, None] * speed
    ends = torch.stack((torch.zeros_like(length), length), 1)
    mass = interval_mass("gaussian", tie, low, high).clamp_min(1e-300)
    span = torch.stack((high, -low), 1)
    lead, speed = lead.scatter_(1, pair, 0.0), speed.scatter_(1, pair, ends)
    return Layer(row, pair, axis, at, span, length, tie, mass, lead, speed), normals


def _normals(frame: Frame, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
    """Which unit normal each pair i, j has, and the unit normals of all that occur."""
    K = len(frame.bias)
    code = i * K + j
    occurs = torch.zeros(K * K, dtype=torch.bool, device=i.device)
    occurs[code] = True
    i, j = (t.squeeze(1) for t in occurs.view(K, K).nonzero().split(1, 1))
    normal = (frame.exact[i] - frame.exact[j])[:, :-1] / frame.pair(i, j)[0][:, None]
    return (occurs.cumsum(0) - 1)[code], normal.to(frame.weight.dtype)


class Part(NamedTuple):
    """Some lines of a layer with nodes and weights on the sides of i and of j."""

    layer: Layer
    t: Tensor  # (r, 2, c) distances from the tie
    weight: Tensor  # (r, 2, c)
    alone: bool  # whether all gates but two are zero

    @property
    def signed(self) -> Tensor:
        """Coordinates of the nodes, (r, 2 c)."""
        return torch.stack((self.t[:, 0], -self.t[:, 1]), 1).flatten(1)


def quadrature(
    layer: Layer, tau: float, nodes: int, columns: int, work: int
) -> Iterator[Part]:
    """The layer in parts, each with nodes of one kind, `work` numbers in all
    if a node is to have `columns` of them.

    The weights sum f against the Gaussian on the chord, for f that falls with the gate
    k = 1 / (1 + exp(rho)), rho = |t| rate / tau. Thin layers far from third experts
    take the rule for k and k^2 times polynomials; other sides are one Gauss-Legendre
    interval of `nodes` nodes, fewer if narrow, more if long, or several intervals where
    a third gate is steep.
    """
    # Infinity would make 0 * inf of a layer without width.
    slope = (layer.rate / tau).clamp_max(1e306)
    tie = torch.stack((layer.tie, -layer.tie), 1)
    start, stop = _support(tie + slope[:, None], layer.span)
    kind = _kind(layer, tau, (start, stop), slope)
    for group, (s, share) in enumerate(_rules(nodes, layer.at.device)):
        index = (kind == group).nonzero().squeeze(1)
        for rows in chunks(len(index), 2 * len(s) * columns, work):
            some = index[rows]
            if group < len(GATE_RULES):
                first, reach = 0.0, 1 / slope[some, None, None]
            else:
                first = start[some, :, None]
                reach = stop[some, :, None] - first
            t = (first + reach * s).expand(-1, 2, -1)
            height = density((tie[some, :, None] + t).square())
            weight = reach / layer.mass[some, None, None] * share * height
            yield Part(layer.select(some), t, weight, group < len(GATE_RULES))


def _kind(layer: Layer, tau: float, ends: tuple, slope: Tensor) -> Tensor:
    """Which of the rules suits each line."""
    start, stop = ends
    reach = (stop - start).amax(1)
    size = (reach > NARROW).long() + (reach > LONG).long()
    size[_steep(layer, tau, start, stop)] = 3
    kind = len(GATE_RULES) + size
    alone = _alone(layer, tau, slope)
    for group, (limit, *_) in reversed([*enumerate(GATE_RULES)]):
        kind[alone & (1 + layer.tie.abs() < limit * slope)] = group
    return kind


def _alone(layer: Layer, tau: float, slope: Tensor) -> Tensor:
    """Whether all gates but two are zero in the layer, and it ends inside the chord."""
    end = FAR / slope
    alone = end < layer.span.amin(1)
    if layer.lead.shape[1] > 2:
        places = torch.stack((torch.zeros_like(end), end, -end), 1)
        alone &= (_thirds(layer, gaps(layer, places)) > FAR * tau).flatten(1).all(1)
    return alone


def _thirds(layer: Layer, table: Tensor) -> Tensor:
    """The table (r, c, K) with infinity for the pair."""
    pair = layer.pair[:, None].expand(-1, table.shape[1], -1)
    return table.scatter(2, pair, math.inf)


def _support(centre: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """Where exp(-(t + centre)^2 / 2) on [0, span] is within exp(-DEPTH) of its peak."""
    peak = torch.minimum((-centre).clamp_min(0), span)
    slope = centre + peak

    def step(slope: Tensor) -> Tensor:
        root = torch.hypot(slope, slope.new_tensor(math.sqrt(2 * DEPTH)))
        return 2 * DEPTH / (slope + root)

    start = (peak - step((-slope).clamp_min(0))).clamp_min(0)
    return start, torch.minimum(span, peak + step(slope.clamp_min(0)))


def _steep(layer: Layer, tau: float, start: Tensor, stop: Tensor) -> Tensor:
    """Whether one interval cannot resolve a third gate that is not negligible."""
    if layer.lead.shape[1] == 2:
        return torch.zeros_like(layer.at, dtype=torch.bool)
    side = start.new_tensor([1.0, -1.0])
    first, last = gaps(layer, side * start), gaps(layer, side * stop)
    near = _thirds(layer, torch.minimum(first, last)) < FAR * tau
    return ((last - first).abs() > 45 * tau).logical_and_(near).flatten(1).any(1)


def gaps(layer: Layer, t: Tensor) -> Tensor:
    """Leading logit less every logit at t, (r, c) -> (r, c, K); exact for the pair."""
    behind = (-t).clamp_min(0)[:, :, None] * layer.rate[:, None, None]
    return torch.addcmul(
        layer.lead[:, None] + behind, t[:, :, None], layer.speed[:, None]
    )


def _rules(nodes: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Nodes and weights: of the gate in units of tau / rate, then two on [0, 1]."""
    gates = [tuple(torch.tensor(r[1:], dtype=torch.float64)) for r in GATE_RULES]
    s, weight = _legendre(nodes)
    half = torch.cat((torch.zeros(1), 0.5 ** torch.arange(8, 0, -1))).double()
    edge = torch.cat((half, 1 - half[:-1].flip(0)))
    width = edge.diff()[:, None]
    steep = (edge[:-1, None] + width * s).flatten(), (width * weight).flatten()
    fine, share = _legendre(2 * nodes // 3)
    # The map s (1 - a) / (1 - a s), a = .7, spreads the fall of the gate evenly.
    shrink = 0.3 / (1 - 0.7 * fine)
    narrow = fine * shrink, share * shrink / (1 - 0.7 * fine)
    rules = [*gates, narrow, (s, weight), _legendre(2 * nodes), steep]
    return [(s.to(device), weight.to(device)) for s, weight in rules]


def _legendre(count: int) -> tuple[Tensor, Tensor]:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    place, weight = (torch.from_numpy(t) for t in _leggauss(count))
    return (place + 1) / 2, weight / 2

"""Layers: integrals across the ties of an affine router, on nodes graded at scale tau.

A `Layer` holds the chords of many inputs and every logit along them. Lengths count from
the tie, in units of x, and t is the coordinate along w_i - w_j: expert i leads above
zero, expert j below.
"""

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.polynomial.legendre import leggauss
from torch import Tensor

from moebook.facets import Chords, chords
from moebook.lines import Frame, chunks, interval_mass

#: A side of a chord is left where gate times density has fallen by exp(-DEPTH).
DEPTH = 28.0
#: Gates further than this from a half, in units of tau, count as zero beside others.
FAR = 20.0
#: Rules for k and k^2 times powers of rho below their number of nodes, on [0, inf), for
#: k = 1 / (1 + e^rho), and the temperature over gap growth up to which each is used:
#: there the next power misses less than 1e-7.
GATE_RULES = (
    (
        0.001,
        (0.5245540313470789, 2.733469421163804),
        (1.305609727652938, 3.404018154873984),
    ),
    (
        0.012,
        (0.2740013040526284, 1.367929348612783, 3.357518333248158, 6.979269519974435),
        (0.6897665200436966, 1.493514930641958, 2.598028904425477, 5.032483371283692),
    ),
)
#: Where outputs are asked in a thin layer that a third gate makes a harder integral:
#: in between they are the polynomial through these nodes.
PROBE = GATE_RULES[-1]

#: Length up to which nodes on a side are graded towards the tie, in units of x.
NARROW = 0.6
#: Length from which on a side takes twice the nodes: it holds a peak, and both slopes.
LONG = 8.0


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

    def select(self, index: Tensor | slice, thirds: bool = True) -> "Layer":
        """Some chords, without the logits of third experts if these play no part."""
        kept = self if thirds else [*self[:-2], self.lead[:0], self.speed[:0]]
        if isinstance(index, slice):
            return Layer(*(t[index] for t in kept))
        return Layer(*(t.index_select(0, index) if len(t) else t for t in kept))


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
    gate: Tensor  # k there, (r, 2, c) or, the same on all lines, (c,)
    alone: bool  # whether all gates but two are zero
    ask: Tensor  # (r, 2, p) distances at which to ask for outputs
    blend: Tensor | None  # (r, 2, c, p) from outputs there to those at t, if others

    @staticmethod
    def signed(t: Tensor) -> Tensor:
        """Coordinates of distances on the two sides, (r, 2, c) -> (r, 2 c)."""
        return torch.stack((t[:, 0], -t[:, 1]), 1).flatten(1)


def quadrature(
    layer: Layer, tau: float, nodes: int, columns: int, work: int
) -> Iterator[Part]:
    """The layer in parts, each with nodes of one kind, `work` numbers in all
    if a node is to have `columns` of them.

    The weights sum f against the Gaussian on the chord, for f that falls with the gate
    k = 1 / (1 + exp(rho)), rho = |t| rate / tau. Thin layers far from third experts
    take the rule for k and k^2 times polynomials; other sides are one Gauss-Legendre
    interval of `nodes` nodes, fewer if narrow, more if long, or several intervals where
    a third gate is steep. In thin layers outputs at these are to be interpolated.
    """
    # Infinity would make 0 * inf of a layer without width.
    slope = (layer.rate / tau).clamp_max(1e306)
    kind = _kind(layer, tau, slope)
    for group, (s, share) in enumerate(_rules(nodes, layer.at.device)):
        index = (kind == group).nonzero().squeeze(1)
        gates, thin = group < len(GATE_RULES), group < len(GATE_RULES) + 2
        size = 2 * len(s) * (columns if gates or not thin else layer.lead.shape[1])
        for rows in chunks(len(index), size, work):
            some = rows if len(index) == len(kind) else index[rows]
            lines, steep = layer.select(some, not gates), slope[some, None, None]
            tie = torch.stack((lines.tie, -lines.tie), 1)
            if gates:
                first, reach = 0.0, 1 / steep
            else:
                start, stop = _support(tie + steep[:, 0], lines.span)
                first, reach = start[:, :, None], (stop - start)[:, :, None]
            t = (first + reach * s).expand(-1, 2, -1)
            weight = (tie[:, :, None] + t).square_().mul_(-0.5).exp_()
            scale = reach / lines.mass[:, None, None] / math.sqrt(2 * math.pi)
            weight.mul_(scale * share)
            rho = s if gates else t * (lines.rate / tau)[:, None, None]
            ask, blend = t, None
            if thin and not gates:
                known = t.new_tensor(PROBE[1])
                ask, blend = (known / steep).expand(-1, 2, -1), _blend(known, rho)
            yield Part(lines, t, weight, torch.sigmoid(-rho), gates, ask, blend)


def _blend(known: Tensor, wanted: Tensor) -> Tensor:
    """Lagrange polynomials of the places known (p,) at those wanted: (..., p)."""
    p = len(known)
    powers = torch.stack([wanted**m for m in range(p)], -1)
    return powers @ torch.linalg.inv(known[:, None] ** torch.arange(p).to(known))


def _kind(layer: Layer, tau: float, slope: Tensor) -> Tensor:
    """Which of `_rules` suits each line."""
    kind = torch.zeros_like(layer.row)
    width = (1 + layer.tie.abs()) / slope
    for limit, *_ in GATE_RULES[:-1]:
        kind += width >= limit
    thick = width >= GATE_RULES[-1][0]
    rest = (thick | ~_alone(layer, tau, slope)).nonzero().squeeze(1)
    if not len(rest):
        return kind
    few, thick = layer.select(rest), thick[rest]
    tie = torch.stack((few.tie, -few.tie), 1)
    start, stop = _support(tie + slope[rest, None], few.span)
    reach = (stop - start).amax(1)
    size = torch.where(thick, 2 + (reach > NARROW).long() + (reach > LONG).long(), 0)
    size[_steep(few, tau, start, stop)] = 1
    size[(size == 1) & thick] = 5
    return kind.index_copy_(0, rest, len(GATE_RULES) + size)


def _alone(layer: Layer, tau: float, slope: Tensor) -> Tensor:
    """Whether all gates but two are zero in the layer, and it ends inside the chord."""
    end = FAR / slope
    alone = end < layer.span.amin(1)
    if (K := layer.lead.shape[1]) > 2:
        # The least gap over the layer is at its middle or at an end: a gap is linear.
        fall = torch.minimum(layer.speed, layer.rate[:, None] - layer.speed)
        least = torch.addcmul(layer.lead, fall.clamp_max_(0), end[:, None])
        alone &= (least > FAR * tau).sum(1) == K - 2
    return alone


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
    pair = layer.pair[:, None].expand(-1, 2, -1)
    near = torch.minimum(first, last).scatter_(2, pair, math.inf) < FAR * tau
    return ((last - first).abs() > 45 * tau).logical_and_(near).flatten(1).any(1)


def gaps(layer: Layer, t: Tensor) -> Tensor:
    """Leading logit less every logit at t, (r, c) -> (r, c, K); exact for the pair."""
    behind = (-t).clamp_min(0)[:, :, None] * layer.rate[:, None, None]
    return torch.addcmul(
        layer.lead[:, None] + behind, t[:, :, None], layer.speed[:, None]
    )


def _rules(nodes: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Nodes and weights: of gates in units of tau / rate, then of kinds on [0, 1]."""
    for rule in _arrays(nodes):
        yield tuple(torch.from_numpy(t).to(device) for t in rule)


@cache  # arrays: a cached tensor would carry its autograd mode
def _arrays(nodes: int) -> list[tuple]:
    gates = [tuple(np.array(r[1:])) for r in GATE_RULES]
    s, weight = _legendre(nodes)
    half = np.concatenate(([0.0], 0.5 ** np.arange(8, 0, -1)))
    edge = np.concatenate((half, 1 - half[-2::-1]))
    width = np.diff(edge)[:, None]
    steep = (edge[:-1, None] + width * s).ravel(), (width * weight).ravel()
    fine, share = _legendre(2 * nodes // 3)
    # The map s (1 - a) / (1 - a s), a = .7, spreads the fall of the gate evenly.
    shrink = 0.3 / (1 - 0.7 * fine)
    narrow = fine * shrink, share * shrink / (1 - 0.7 * fine)
    return [*gates, narrow, steep, narrow, (s, weight), _legendre(2 * nodes), steep]


def _legendre(count: int) -> tuple:
    """Gauss-Legendre nodes and weights on [0, 1]."""
    place, weight = leggauss(count)
    return (place + 1) / 2, weight / 2

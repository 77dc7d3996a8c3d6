"""Risk: what soft routing gains or loses against hard routing.

Of K experts f_j, F_tau is the mixture under the softmax gates at temperature tau, F_0
the output of the expert with the largest logit, m the label mean and L = E(y - F)^2.
The noise of the label is in L_tau and in L_0 alike, so that L - E(y - m)^2 is what is
sampled. Samplers take inputs x (n, d), drawn from N(0, I) where it says so, and return
one float64 number a row; averages and verdicts are made elsewhere.

experts maps (r, d) to (r, K) and label_mean (r, d) to (r,), row by row, in the dtype of
x. Outputs are numbers: for vectors add up the components. Gradients flow to whatever
these two are made of; the router is taken as a constant by all but `soft` and
`ambiguity`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moebook import gating
from moebook.callables import (
    Function,
    Model,
    check_temperatures,
    check_values,
    model_of,
)
from moebook.facets import check_ties
from moebook.layers import Layer, Part, gaps, layer_of, quadrature
from moebook.lines import WORK, Frame, chunks, density, frame_of
from moebook.routing import Affine

__all__ = ["ambiguity", "first_order", "gap", "hard", "soft"]

#: Numbers at the nodes of one batch: fewer calls of experts against room in cache.
BATCH = 4 * WORK
CHUNK = 8 * WORK
#: Gates of losers below exp(-FAINT) of the best count as zero at x itself.
FAINT = 40.0


def gap(
    router: Affine,
    experts: Function,
    label_mean: Function,
    x: Tensor,
    tau: float | Tensor | Sequence,
    *,
    nodes: int = 24,
) -> Tensor:
    """Samples with mean L_tau - L_0, x (n, d) -> (n,), or (n, m) for m temperatures.

    x comes from N(0, I); all temperatures share it. For each facet of its routing cell
    that x projects into, the loser's share of (F_tau - F_0)(F_tau + F_0 - 2m) is
    integrated along the line across it, over the chord on which no third expert wins;
    losers without such a facet count as they are at x. Only gates of losers are
    multiplied, nothing is subtracted that nearly cancels, and the relative variance
    stays bounded as tau falls, unless four experts tie on one flat of codimension two
    or three on one hyperplane. For K > 2 some x within a few tau of a tie of three give
    samples of order 1 / tau times the mean: a share tau^2 of all, of finite variance.
    tau = 0 and K = 1 give 0 exactly.
    Cost: 4 evaluations a facet for tau < |w_i - w_j| / 1000, 8 where the layer is thin,
    2 * nodes at large tau; x meets one facet for K = 2, 2.5 for 8 random rows of
    weight.
    Bias: 1e-7 of the mean where experts and label mean are smooth on the scale of x,
    away from ties; at ties the label mean may jump, then give x in float64. A kink, as
    of relu, costs up to 1e-2 of a sample for tau > 0.01: triple `nodes` to see it.
    Raises TypeError or ValueError that says what was expected.
    Source: ours. The expectation of each loser's share given all but the place on the
    line; the exact gap k^2 |D|^2 + 2 k e . D for two experts.
    """
    model = model_of(router, experts, label_mean, x)
    ladder = check_temperatures(tau, x.device)
    if nodes < 3:
        raise ValueError(f"nodes must be at least 3 a side, 24 is usual, got {nodes}")
    frame, x = frame_of(router, x)
    parts = [
        _gap(frame, model, x[rows], ladder.reshape(-1).tolist(), nodes)
        for rows in chunks(len(x), model.K + x.shape[1], CHUNK)
    ]
    parts.append(x.new_zeros((0, ladder.numel()), dtype=torch.float64))
    return torch.cat(parts).reshape(len(x), *ladder.shape)


def _gap(
    frame: Frame, model: Model, x: Tensor, ladder: list[float], nodes: int
) -> Tensor:
    zero = x.new_zeros(len(x), dtype=torch.float64)
    if model.K == 1:
        return zero[:, None].expand(-1, len(ladder))
    layer, normals = layer_of(frame, x)
    others, away = _away(frame, model, x, layer, max(ladder, default=0.0))
    columns = x.shape[1] + model.K
    found = []
    for tau in ladder:
        total = zero
        if tau > 0:
            for part in quadrature(layer, tau, nodes, columns, BATCH):
                h = (part.weight * _across(model, x, normals, part, tau)).sum((1, 2))
                total = total.index_add(0, part.layer.row, h)
            if len(others):
                total = total.index_add(0, others, away(tau))
        found.append(total)
    return torch.stack(found, 1) if found else zero[:, None].expand(-1, 0)


def _across(model: Model, x: Tensor, normals: Tensor, part: Part, tau: float) -> Tensor:
    """The loser's share of (F - F_0)(F + F_0 - 2m), (r, 2, c), sides of i and j."""
    layer = part.layer
    f, m = model(_points(x, normals, layer, part.signed(part.ask)))
    if part.blend is not None:
        f, m = _between(f, m, part.blend)
    shape = part.t.shape
    first, second = _columns(f, layer.pair).double().reshape(*shape, 2).unbind(3)
    best = torch.stack((first[:, 0], second[:, 1]), 1)
    rest = torch.stack((second[:, 0], first[:, 1]), 1)
    contrast = rest - best
    if part.alone or model.K == 2:
        loser, change = part.gate, part.gate * contrast
    else:
        # Softmax over the leading logit: torch.softmax of short rows is far slower.
        odds = torch.exp(gaps(layer, part.signed(part.t)) / -tau)
        total = odds.sum(2).reshape(shape)
        loser = _columns(odds, layer.pair).reshape(*shape, 2)
        loser = torch.stack((loser[:, 0, :, 1], loser[:, 1, :, 0]), 1) / total
        change = (odds * (f - best.flatten(1)[:, :, None])).sum(2).reshape(shape)
        change = change / total
    return loser * contrast * (change + 2 * (best - m.reshape(shape)))


def _columns(table: Tensor, pair: Tensor) -> Tensor:
    """The columns of i and j: (r, c, K) with pairs (r, 2) -> (r, c, 2)."""
    return table.gather(2, pair[:, None].expand(-1, table.shape[1], -1))


def _between(f: Tensor, m: Tensor, blend: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (r, 2 c, K) and label means (r, 2 c) from those at 2 p places."""
    known = torch.cat((f, m[:, :, None]), 2).double()
    known = known.reshape(len(blend), 2, -1, known.shape[2])
    wanted = (blend @ known).flatten(1, 2)
    return wanted[:, :, :-1], wanted[:, :, -1]


def _points(x: Tensor, normals: Tensor, layer: Layer, t: Tensor) -> Tensor:
    """Points (r, c, d) of the lines at t (r, c)."""
    base = x.index_select(0, layer.row)[:, None]
    step = (t - layer.at[:, None]).to(x.dtype)[:, :, None]
    return torch.addcmul(base, step, normals.index_select(0, layer.axis)[:, None])


def _away(
    frame: Frame, model: Model, x: Tensor, layer: Layer, tau: float
) -> tuple[Tensor, Function]:
    """Losers whose tie is not on a facet before x count as they are at x: the rows
    where a gate of theirs is not zero up to temperature tau, and their part there.
    """
    if tau == 0 or len(layer.row) == len(x) * (model.K - 1):
        return layer.row[:0], lambda tau: 0.0
    z = frame.logits(x)
    top = z.argmax(1, keepdim=True)
    lead = z.gather(1, top) - z
    met = torch.zeros_like(lead, dtype=torch.bool).scatter_(1, top, True)
    met.view(-1)[layer.row * model.K + layer.pair[:, 1]] = True
    row = (lead.masked_fill(met, math.inf).amin(1) <= FAINT * tau).nonzero().squeeze(1)
    lead, met, top = lead[row].double(), met[row], top[row]
    f, m = (t.double() for t in model(x[row]))
    best = f.gather(1, top)

    def excess(tau: float) -> Tensor:
        gates = torch.softmax(lead / -tau, 1)
        change = (gates * (f - best)).sum(1)
        part = (gates.masked_fill(met, 0.0) * (f - best)).sum(1)
        return part * (change + 2 * (best.squeeze(1) - m))

    return row, excess


def first_order(
    router: Affine,
    experts: Function,
    label_mean: Function,
    x: Tensor,
    *,
    jump: Function | None = None,
) -> Tensor:
    """Samples with mean the limit of (L_tau - L_0) / tau as tau falls, (n, d) -> (n,).

    The integral of (-(f_i - f_j)^2 + 2 ln 2 jump (f_i - f_j)) p / |w_i - w_j| over the
    ties of the two largest logits, x from N(0, I). jump(points (r, d), i (r,), j (r,))
    -> (r,) is the label mean on the side of expert i less that on the side of j; 0 if
    None, for a label mean that is continuous there. Facets as in `boundary.slope`, with
    finite variance under the same condition. K = 1 gives 0.
    Raises as `gap`, and as `boundary.slope` for ties without such a limit.
    Source: ours.
    """
    model = model_of(router, experts, label_mean, x)
    frame, x = frame_of(router, x)
    check_ties(frame, "facet")
    total = x.new_zeros(len(x), dtype=torch.float64)
    if model.K == 1:
        return total
    parts = []
    for rows in chunks(len(x), model.K * frame.weight.shape[1], 16 * WORK):
        layer, normals = layer_of(frame, x[rows])
        origin = torch.zeros_like(layer.at)[:, None]
        points = _points(x[rows], normals, layer, origin).squeeze(1)
        f = model.outputs(points)
        difference = f.gather(1, layer.pair).double()
        difference = difference[:, 0] - difference[:, 1]
        value = -difference.square()
        if jump is not None:
            step = jump(points.to(model.dtype), *layer.pair.unbind(1))
            check_values("jump", step, (len(points),), "(r,)")
            value = value + 2 * math.log(2) * step.double() * difference
        weight = density(layer.tie.square()) / (layer.rate * layer.mass)
        parts.append(total[rows].index_add(0, layer.row, weight * value))
    return torch.cat([total[:0], *parts])


def ambiguity(router: Affine, experts: Function, x: Tensor, tau: float) -> Tensor:
    """Sum over pairs i < j of pi_i pi_j (f_i - f_j)^2 at each x, (n, d) -> (n,).

    The diversity of the mixture at temperature tau: sum_i pi_i (m - f_i)^2 less this is
    (m - F_tau)^2. Any x. Raises as `gap` and `gating.softmax`.
    Source: Krogh and Vedelsby (1995).
    """
    f = model_of(router, experts, None, x).outputs(x)
    logits = router(x)
    gates = gating.softmax(logits, tau).double()
    # About the winner, so that the tiny gates of losers meet no cancellation.
    f = f.double() - f.double().gather(1, logits.argmax(1, keepdim=True))
    spread = f - (gates * f).sum(1, keepdim=True)
    return (gates * spread.square()).sum(1)


def soft(
    router: Affine, experts: Function, label_mean: Function, x: Tensor, tau: float
) -> Tensor:
    """Squared error (F_tau - m)^2 at each x, (n, d) -> (n,).

    The noise of the label is left out. Any x; gradients flow to the router too. The
    peer of `gap`: less `hard` at the same x, its relative variance grows like 1 / tau.
    Raises as `gap` and `gating.softmax`.
    """
    f, m = model_of(router, experts, label_mean, x)(x)
    gates = gating.softmax(router(x), tau)
    return ((gates * f).sum(1) - m).double().square()


def hard(router: Affine, experts: Function, label_mean: Function, x: Tensor) -> Tensor:
    """Squared error (F_0 - m)^2 at each x, (n, d) -> (n,).

    The noise of the label is left out. Any x; at a tie the expert of lowest index wins.
    Raises as `gap`.
    """
    f, m = model_of(router, experts, label_mean, x)(x)
    top = gating.hard(router(x)).argmax(1, keepdim=True)
    return (f.gather(1, top).squeeze(1) - m).double().square()

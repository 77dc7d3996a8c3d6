"""Hugging Face models at the boundary: how near tokens are to it, and smoothing.

The families are those of `families`. Gaps and widths eps are in units of the selection
scores s: logits, or for DeepSeek-V3 sigmoid(logit) + bias.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moebook import families, smoothing


@dataclass(frozen=True, eq=False)
class BoundaryGaps:
    """How far the tokens of a batch are from a change of experts, one row a router.

    names: the routers, in the order of the model. below: how far each idle expert lies
    below the k-th score, (layers, tokens, E - k), ascending. distance: the gap in
    Euclidean units of the router's input, (layers, tokens). Source: ours.
    """

    names: tuple[str, ...]
    below: Tensor
    distance: Tensor

    @property
    def gap(self) -> Tensor:
        """Gap s_(k) - s_(k+1) of selection scores, (layers, tokens); inf for k = E."""
        if self.below.shape[-1] == 0:
            return torch.full_like(self.distance, math.inf)
        return self.below[..., 0]

    def extras(self, eps: float) -> Tensor:
        """Idle experts that a window of width eps lets in, int64 (layers, tokens)."""
        return (self.below < smoothing.check_width(eps)).sum(-1)

    def fraction(self, eps: float) -> Tensor:
        """Share of tokens with gap < eps, those that smoothing touches, (layers,)."""
        return (self.extras(eps) > 0).double().mean(-1)

    def quantiles(self, q: Sequence[float]) -> Tensor:
        """Quantiles of the gap over tokens, levels q in [0, 1] -> (layers, len(q))."""
        levels = torch.as_tensor(q, dtype=self.gap.dtype, device=self.gap.device)
        return self.gap.quantile(levels, dim=1).T


def boundary_gaps(model: nn.Module, batch: Mapping | Tensor) -> BoundaryGaps:
    """Gaps at every router of the model, from one forward pass without gradient.

    batch: the model's keyword arguments, or the tensor that is its one argument.
    Tokens that an attention_mask of shape (batch, length) hides are left out. The model
    runs in the mode it is in: call model.eval() first.

    distance is gap / |w_i - w_j| for the experts i, j in places k and k + 1: exactly
    the distance to the hyperplane of that pair. Another pair may tie nearer by. The
    scores of DeepSeek-V3 bend, and there it is gap / |grad(s_i - s_j)|, the distance
    to first order. Inside `smooth_router` the gaps are those of the smoothed model.
    Raises as `families.find`; ValueError for a batch that leaves out a router.
    """
    routers, seen = families.find(model), {}
    with ExitStack() as stack, torch.no_grad():
        for name, router in routers.items():
            hook = router.register_forward_hook(partial(_remember, seen, name))
            stack.callback(hook.remove)
        model(**batch) if isinstance(batch, Mapping) else model(batch)
    idle = [name for name in routers if name not in seen]
    if idle:
        raise ValueError(
            f"the forward pass of the batch left out the routers {idle}: give a batch "
            "that runs the whole model"
        )
    rows = [_gaps(routers[name], _visible(seen[name], batch)) for name in routers]
    shapes = {tuple(below.shape) for below, _ in rows}
    if len(shapes) > 1:
        raise ValueError(
            "routers must see the same tokens and leave equally many experts idle, got "
            f"(tokens, E - k) in {sorted(shapes)}: measure block by block"
        )
    home = rows[0][0].device
    below, distance = (
        torch.stack([each.to(home) for each in column])
        for column in zip(*rows, strict=True)
    )
    return BoundaryGaps(tuple(routers), below, distance)


def suggest_eps(gaps: BoundaryGaps | Tensor, budget: float = 0.5) -> Tensor:
    """Widths at which a token has `budget` extra experts on average, float64 (layers,).

    Takes gaps, or a tensor like their `below`, (..., n, E - k) -> (...). The root is
    empirical: the mean over n tokens is within 1/n of the budget unless values tie. It
    holds for these scores; smoothing a layer moves those of the next, so for the later
    layers measure again inside `smooth_router`.
    ValueError for no token, NaN, or a budget outside (0, E - k).
    Source: the budget of k + 1/2 active experts in arXiv:2606.19036; the root is ours.
    """
    below = gaps.below if isinstance(gaps, BoundaryGaps) else gaps
    if not isinstance(below, Tensor) or below.ndim < 2 or below.numel() == 0:
        came = tuple(below.shape) if isinstance(below, Tensor) else repr(below)
        raise ValueError(
            "suggest_eps needs gaps with a token and an idle expert, or a tensor "
            f"(..., n, E - k), got {came}: measure with boundary_gaps"
        )
    if not (below >= 0).all():
        raise ValueError(
            "an idle expert lies at least 0 below the k-th score, got NaN or a "
            "negative number: give s_(k) - s_i for the idle experts i"
        )
    n, idle = below.shape[-2:]
    if not 0 < budget < idle:
        raise ValueError(
            f"the budget must lie between 0 and E - k = {idle} extras, got {budget!r}"
        )
    ranked = below.flatten(-2).double().sort(-1).values
    place = min(round(n * budget), n * idle - 1)
    lower = ranked[..., place - 1] if place else torch.zeros_like(ranked[..., 0])
    return (lower + ranked[..., place]) / 2


@contextmanager
def smooth_router(
    model: nn.Module,
    eps: float | Tensor | Sequence[float],
    window: str | smoothing.Window = "cubic",
) -> Iterator[nn.Module]:
    """Context in which every router of the model lets experts in by a window.

    An expert at less than eps below the k-th score joins: its weight before any
    normalisation is multiplied by the window at u = 1 - (s_(k) - s_i) / eps, and
    `families.gates` does the rest. The experts' output is then continuous in the
    router's input. Tokens with nobody in the window keep their weights bit for bit,
    and eps = 0 changes nothing. On leaving, also by an exception, the model is what it
    was: only forward hooks came and went.

    eps >= 0, finite, in units of the selection scores: one number, or one a router.
    Gradients flow to the router, s_(k) and u included, and to a tensor eps. Every token
    gets the columns that the neediest needs, padded by the next experts at weight
    zero, and those are computed too. Under gradient checkpointing stay inside until the
    backward pass is done. Not for experts spread over devices.

    Raises for a width out of range, for routers smoothed already, and as
    `families.find`.
    Source: SmoothSMoE, arXiv:2606.19036, for plain top-k with normalised weights; the
    weights that do not sum to one and the biased scores are ours.
    """
    routers = families.find(model)
    hooks = [
        _Smooth(width, smoothing.window(window, router.top_k))
        for router, width in zip(routers.values(), _widths(eps, routers), strict=True)
    ]
    for name, router in routers.items():
        if any(isinstance(hook, _Smooth) for hook in router._forward_hooks.values()):
            raise ValueError(
                f"the router {name!r} is smoothed already: leave the smooth_router "
                "around this one first"
            )
    with ExitStack() as stack:
        for router, hook in zip(routers.values(), hooks, strict=True):
            stack.callback(router.register_forward_hook(hook).remove)
        yield model


@dataclass(frozen=True, eq=False)
class _Smooth:
    """Forward hook: the router's triple, with columns for the experts in the window."""

    eps: float | Tensor
    sigma: smoothing.Window

    def __call__(self, router: nn.Module, args: tuple, triple: tuple) -> tuple | None:
        if _width(self.eps) == 0.0:
            return None
        logits, weights, indices = triple
        s = families.scores(router, logits)
        u = _entry(s, router.top_k, self.eps)
        # The router's own leaders: at ties it has decided, whatever sort would say.
        leads = torch.zeros_like(u, dtype=torch.bool).scatter(1, indices, True)
        extras = ((u > 0) & ~leads).sum(1)
        if not extras.any():
            return None
        width = int(extras.max())
        others = s.detach().masked_fill(leads, -math.inf).topk(width, dim=1).indices
        columns = torch.cat([indices, others], dim=1)
        gates = families.gates(router, logits, self.sigma(u)).gather(1, columns)
        alone = nn.functional.pad(weights, (0, width))
        gates = torch.where((extras > 0)[:, None], gates.to(weights.dtype), alone)
        return logits, gates, columns


def _entry(s: Tensor, k: int, eps: float | Tensor) -> Tensor:
    """Place u in the window, (n, E) -> (n, E): 1 at the k-th score, 0 at eps below."""
    limits, dtype = torch.finfo(s.dtype), s.dtype
    if not limits.tiny <= _width(eps) <= limits.max:
        s = s.double()
    eps = torch.as_tensor(eps, dtype=s.dtype, device=s.device)
    below = s.topk(k, dim=1).values[:, -1:] - s
    u = torch.where(below > 0, (eps - below) / eps, 1.0)
    return u.clamp(min=0).to(dtype)


def _width(eps: float | Tensor) -> float:
    width = smoothing.check_width(eps)
    if width == math.inf:
        raise ValueError("the width eps must be finite, got inf: choose a number")
    return width


def _widths(eps: float | Tensor | Sequence[float], routers: Mapping) -> list:
    """One width a router, each checked."""
    several = isinstance(eps, list | tuple) or (isinstance(eps, Tensor) and eps.ndim)
    widths = list(eps) if several else [eps] * len(routers)
    if len(widths) != len(routers):
        asked = f"one width or one for each of the {len(routers)} routers"
        raise ValueError(f"eps must be {asked}, got {len(widths)}")
    for width in widths:
        _width(width)
    return widths


def _remember(seen: dict, name: str, router: nn.Module, args: tuple, out: tuple):
    seen[name] = out[0]


def _visible(logits: Tensor, batch: Mapping | Tensor) -> Tensor:
    """The rows of the tokens that the batch's mask lets through."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is None or mask.ndim != 2:
        return logits
    return logits[mask.reshape(-1).bool().to(logits.device)]


def _gaps(router: nn.Module, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (n, E) -> below (n, E - k) and distance (n,)."""
    k = router.top_k
    values, order = families.scores(router, logits).sort(1, descending=True)
    below = values[:, k - 1, None] - values[:, k:]
    if k == values.shape[1]:
        return below, torch.full_like(values[:, 0], math.inf)
    first, second = families.slopes(router, logits, order[:, k - 1 : k + 1]).unbind(1)
    steepness, gap = (first - second).norm(dim=1), below[:, 0]
    # Two equal rows tie everywhere or, apart by a bias, nowhere.
    flat = torch.where(gap > 0, math.inf, 0.0).to(gap.dtype)
    return below, torch.where(steepness > 0, gap / steepness, flat)

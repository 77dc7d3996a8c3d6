"""Mixture: a sparse layer of many small experts, routed hard, smoothly or by ReLU.

Tokens are rows, (n, d) or (batch, length, d). The layer works on the list of pairs
(token, expert) with a gate that is not zero, sorted by expert. The list is as long as
the gates make it, so a token may have any number of experts, none included.
"""

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from moebook import gating, smoothing

ROUTINGS = ("top_k", "smooth", "relu")


class MixtureOfExperts(nn.Module):
    """Mixture sum_j gate_j(x) f_j(x) of two-layer experts, (..., d) -> (..., d).

    f_j(x) = activation(x inner_j) outer_j with inner (E, d, h) and outer (E, h, d);
    logits are router x without bias, router (E, d). routing is "top_k", "smooth"
    (`gating.smooth_top_k` with this window) or "relu". All three are causal: the output
    at a token depends on that token alone.

    eps > 0 is the width at the start, in units of the logits. It is softplus(eta) of
    the parameter eta, which only `boundary_loss` moves: the forward map holds it fixed.
    A small eps moves slowly, since d eps / d eta = 1 - e^(-eps).
    Weights are Gaussian draws from the generator, of variance 1 / inputs.
    TypeError or ValueError for sizes, k, eps, routing or window out of range; the
    forward map raises TypeError or ValueError for tokens of another width or dtype, and
    for logits that are not finite.
    Source: Shazeer et al. (2017), arXiv:2606.19036 and arXiv:2412.14711 for the gates.
    """

    def __init__(
        self,
        d: int,
        hidden: int,
        experts: int,
        k: int,
        generator: Generator,
        *,
        routing: str = "top_k",
        window: str | smoothing.Window = "cubic",
        eps: float = 0.1,
        activation: Callable[[Tensor], Tensor] = functional.relu,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if not min(d, hidden, experts) >= 1 or not 1 <= k <= experts:
            raise ValueError(
                "a mixture needs d, hidden, experts >= 1 and 1 <= k <= experts, got "
                f"d={d}, hidden={hidden}, experts={experts}, k={k}"
            )
        if routing not in ROUTINGS:
            raise ValueError(f"routing must be one of {ROUTINGS}, got {routing!r}")
        if not 0 < smoothing.check_width(eps) < math.inf:
            raise ValueError(
                f"the width eps must be positive and finite, got {eps}: for eps = 0 "
                "use routing='top_k'"
            )
        smoothing.window(window, k)  # refuse at birth, not at the first token
        self.k, self.routing, self.window = k, routing, window
        self.activation = activation

        def draw(*shape: int) -> nn.Parameter:
            values = torch.empty(shape, dtype=dtype, device=generator.device)
            return nn.Parameter(
                values.normal_(0, shape[-2] ** -0.5, generator=generator)
            )

        self.router = nn.Parameter(draw(d, experts).detach().T.contiguous())
        self.inner = draw(experts, d, hidden)
        self.outer = draw(experts, hidden, d)
        # The inverse of softplus; expm1 overflows where it is the identity.
        eta = eps if eps > 30 else math.log(math.expm1(eps))
        # Half precision would lose the small steps of the search.
        kind = torch.promote_types(dtype, torch.float32)
        self.eta = nn.Parameter(torch.tensor(eta, dtype=kind, device=generator.device))

    @property
    def eps(self) -> Tensor:
        """Width of the window, softplus of eta: positive, ()."""
        return functional.softplus(self.eta)

    def gates(self, x: Tensor) -> Tensor:
        """Gates of the tokens, (..., d) -> (n, E) with n the number of tokens."""
        logits = functional.linear(self._rows(x), self.router)
        if self.routing == "relu":
            return gating.relu(logits)
        if self.routing == "top_k":
            return gating.top_k(logits, self.k)
        return gating.smooth_top_k(logits, self.k, self.eps.detach(), self.window)

    def boundary_loss(
        self, x: Tensor, budget: float = 0.5, alpha: float = 1.0
    ) -> Tensor:
        """Loss whose gradient in eps is alpha (mean active experts - k - budget), ().

        Add it to the loss of the task, or descend on it alone; it reaches eta only.
        For the routing "smooth"; raises as `smoothing.boundary_loss`.
        """
        if self.routing != "smooth":
            raise ValueError(
                f"routing {self.routing!r} has no window to adapt: use routing='smooth'"
            )
        with torch.no_grad():
            active = torch.count_nonzero(self.gates(x), dim=1)
        return smoothing.boundary_loss(active, self.eps, self.k, budget, alpha)

    def forward(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        """Outputs, (..., d) -> (..., d).

        Gates (n, E) of your own, from anywhere, replace the router's.
        """
        rows = self._rows(x)
        gates = self._gates_for(rows, gates)
        E = gates.shape[1]
        expert, token = (gates.detach() != 0).T.nonzero(as_tuple=True)
        sizes = torch.bincount(expert, minlength=E)
        hidden = self.activation(
            grouped_product(rows.index_select(0, token), self.inner, sizes)
        )
        spoken = grouped_product(hidden, self.outer, sizes)
        gate = gates.reshape(-1).index_select(0, token * E + expert)
        spoken = spoken * gate[:, None]
        return torch.zeros_like(rows).index_add(0, token, spoken).view(x.shape)

    def forward_by_expert(self, x: Tensor, gates: Tensor | None = None) -> Tensor:
        """The same map as `forward`, as a loop over the experts: the reference."""
        rows = self._rows(x)
        gates = self._gates_for(rows, gates)
        out = torch.zeros_like(rows)
        for j, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            (token,) = gates[:, j].detach().nonzero(as_tuple=True)
            spoken = self.activation(rows[token] @ inner) @ outer
            out.index_add_(0, token, spoken * gates[token, j, None])
        return out.view(x.shape)

    def _gates_for(self, rows: Tensor, gates: Tensor | None) -> Tensor:
        if gates is None:
            return self.gates(rows)
        if gates.shape != (len(rows), len(self.router)):
            raise ValueError(
                f"gates must have shape (n, E) = {(len(rows), len(self.router))}, one "
                f"row a token, got {tuple(gates.shape)}"
            )
        return gates

    def _rows(self, x: Tensor) -> Tensor:
        d = self.router.shape[1]
        if x.ndim not in (2, 3) or x.shape[-1] != d:
            raise ValueError(
                f"tokens must have shape (n, {d}) or (batch, length, {d}), got "
                f"{tuple(x.shape)}"
            )
        if x.dtype != self.router.dtype:
            raise TypeError(
                f"tokens must have the dtype of the weights, {self.router.dtype}, got "
                f"{x.dtype}: convert with .to({self.router.dtype})"
            )
        return x.reshape(-1, d)


def grouped_product(rows: Tensor, weight: Tensor, sizes: Tensor) -> Tensor:
    """Rows in E consecutive groups, each times its own matrix, (p, d) -> (p, h).

    weight (E, d, h), sizes int64 (E,) with sum p; a group may be empty. One fused
    kernel where this build of torch has one for the dtype, else one product a group.
    """
    if _has_kernel(rows, weight):
        offsets = sizes.cumsum(0).to(torch.int32)
        return functional.grouped_mm(rows, weight, offs=offsets)
    parts = rows.split(sizes.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight.unbind(), strict=True)])


def _has_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether `grouped_mm` takes these: from torch 2.9 on, strides of 16 bytes."""
    kinds = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
    return (
        hasattr(functional, "grouped_mm")
        and rows.dtype in kinds.get(rows.device.type, ())
        and len(rows) > 0
        and all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
    )

"""Families of routers in transformers 5.24: how each of them selects and weights.

A router maps hidden states to the triple (logits z (n, E), weights (n, k), indices
(n, k)). It keeps the k largest selection scores s. Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE
and DeepSeek-V2 select by their logits, s = z. DeepSeek-V3 selects by s = sigmoid(z) +
bias, yet weights by sigmoid(z) alone. A router is known by the name of its class, so
that nothing here imports transformers.
"""

import re

import torch
from torch import Tensor, nn

SOFTMAX = (
    "MixtralTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "OlmoeTopKRouter",
    "DeepseekV2TopkRouter",
)
SIGMOID = ("DeepseekV3TopkRouter",)


def find(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by name, in its order.

    TypeError for what is no module. ValueError for a model without routers, for a
    router of another family (its class ends in Router, Gating or Gate), and for one
    that keeps some groups of experts only: its experts outside those groups are idle
    whatever their scores.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    known, found, foreign = SOFTMAX + SIGMOID, {}, set()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in known:
            _check_groups(name, module)
            found[name] = module
        elif re.search(r"(Router|Gating|Gate)$", kind):
            foreign.add(kind)
    if foreign or not found:
        what = f"routers of class {', '.join(sorted(foreign))}" if foreign else "none"
        raise ValueError(
            f"looked for routers in {type(model).__name__} and found {what}: known are "
            f"{', '.join(known)} of transformers 5.24"
        )
    return found


def scores(router: nn.Module, logits: Tensor) -> Tensor:
    """Selection scores, (n, E) -> (n, E), in float32 or better."""
    z = _precise(logits)
    if type(router).__name__ in SOFTMAX:
        return z
    return z.sigmoid() + router.e_score_correction_bias


def gates(router: nn.Module, logits: Tensor, inside: Tensor) -> Tensor:
    """Weights by the rule of the family, each base times its window, (n, E) -> (n, E).

    The base is softmax(z) or sigmoid(z). Mixtral always normalises, Qwen, OLMoE and
    DeepSeek-V3 where norm_topk_prob says so, DeepSeek-V2 never, although its
    configuration has the switch. DeepSeek multiplies by routed_scaling_factor.
    """
    z, kind = _precise(logits), type(router).__name__
    weights = inside * (z.softmax(1) if kind in SOFTMAX else z.sigmoid())
    if kind == "MixtralTopKRouter" or getattr(router, "norm_topk_prob", False):
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def slopes(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    """Gradient of the scores of some experts, indices (n, m) -> (n, m, d)."""
    rows = router.weight.detach().to(_precise(logits).dtype)[experts]
    if type(router).__name__ in SOFTMAX:
        return rows
    p = _precise(logits).gather(1, experts).sigmoid()
    return (p * (1 - p))[..., None] * rows


def _precise(logits: Tensor) -> Tensor:
    # Each of these families computes its probabilities in float32 at least.
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _check_groups(name: str, router: nn.Module) -> None:
    groups = getattr(router, "num_group", None)
    if groups is None or getattr(router, "topk_method", None) == "greedy":
        return
    if router.topk_group < groups:
        raise ValueError(
            f"the router {name!r} keeps {router.topk_group} of {groups} groups of "
            "experts: where two groups tie, whole groups are exchanged and the output "
            "jumps, and a window on experts does not mend that. Only topk_group = "
            "n_group, without a limit, is plain top-k"
        )

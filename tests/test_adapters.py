"""Adapters: tiny random models of six families, smoothed, measured and put back."""

import functools
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from truths import DOUBLE, INF, generator

from moebook import adapters, families, gating, smoothing

torch.set_num_threads(1)

E, K, D = 8, 2, 16
COMMON = {
    "vocab_size": 64,
    "hidden_size": D,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
    "pad_token_id": None,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
DEEP = {
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
QWEN = {"num_experts": E, "moe_intermediate_size": 8}
FAMILIES = {
    "mixtral": {"num_local_experts": E},
    "qwen2_moe": QWEN | {"shared_expert_intermediate_size": 8},
    "qwen3_moe": QWEN | {"head_dim": 8, "norm_topk_prob": True},
    "olmoe": {"num_experts": E},
    "deepseek_v2": DEEP,
    "deepseek_v3": DEEP,
}
#: (family, switch of normalisation, whether the family then normalises)
RULES = [
    ("mixtral", None, True),
    ("qwen2_moe", False, False),
    ("qwen2_moe", True, True),
    ("qwen3_moe", False, False),
    ("qwen3_moe", True, True),
    ("olmoe", False, False),
    ("olmoe", True, True),
    ("deepseek_v2", False, False),
    ("deepseek_v2", True, False),
    ("deepseek_v3", False, False),
    ("deepseek_v3", True, True),
]
EPS = {family: 0.1 if family == "deepseek_v3" else 0.3 for family in FAMILIES}
TOKENS = torch.randint(64, (2, 24), generator=generator(5))


def build(family, experts="eager", dtype=torch.float32, **changes):
    """Random weights from our generator; a new bias of DeepSeek-V3 is not zero."""
    settings = COMMON | FAMILIES[family] | changes
    config = AutoConfig.for_model(family, **settings)
    model = AutoModel.from_config(config, experts_implementation=experts).eval()
    source = generator(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(std=weight.shape[-1] ** -0.5, generator=source)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(std=0.1, generator=source)
    return model.to(dtype)


shared = functools.cache(build)


def output(model):
    with torch.no_grad():
        return model(input_ids=TOKENS).last_hidden_state


def hooks(model):
    """Hooks of every module; transformers has some of its own for what it records."""
    return [list(module._forward_hooks.values()) for module in model.modules()]


def routed(block, x):
    """What the block's router says, hooks included: logits, weights, indices."""
    return block.gate(x)


def dense(weights, indices):
    return torch.zeros(len(weights), E, dtype=DOUBLE).scatter_add(
        1, indices, weights.double()
    )


def inputs(n, seed=0):
    return torch.randn(n, D, generator=generator(seed))


def by_hand(router, x, eps, normal, window=smoothing.cubic_window, biased=True):
    """Gates of smooth routing, token by token and expert by expert, (n, E)."""
    rows = []
    for z in (x.double() @ router.weight.detach().double().T).tolist():
        base = [math.exp(v) / sum(map(math.exp, z)) for v in z]
        score = list(z)
        if hasattr(router, "e_score_correction_bias"):
            base = [1 / (1 + math.exp(-v)) for v in z]
            bias = router.e_score_correction_bias.tolist() if biased else [0.0] * E
            score = [b + c for b, c in zip(base, bias, strict=True)]
        kth = sorted(score)[-router.top_k]
        u = [1 - (kth - s) / eps for s in score]
        rows.append([b * window(v).item() for b, v in zip(base, u, strict=True)])
        if normal:
            rows[-1] = [g / sum(rows[-1]) for g in rows[-1]]
    return torch.tensor(rows, dtype=DOUBLE) * getattr(
        router, "routed_scaling_factor", 1
    )


# --- what the context leaves alone ------------------------------------------


def test_the_import_needs_no_transformers():
    code = "import sys, moebook.adapters; print('transformers' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("family", FAMILIES)
def test_width_zero_changes_nothing_and_the_way_back_is_exact(family):
    model = shared(family)
    before, present = output(model), hooks(model)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    for eps in (0.0, 0, torch.tensor(0.0), 1e-12, 1e-320):
        with adapters.smooth_router(model, eps) as inside:
            assert inside is model
            assert torch.equal(output(model), before)
    with adapters.smooth_router(model, EPS[family]):
        assert (output(model) - before).abs().max() > 1e-3
    with pytest.raises(KeyError), adapters.smooth_router(model, EPS[family]):
        output(model)
        raise KeyError
    assert torch.equal(output(model), before)
    assert hooks(model) == present
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_with_nobody_in_the_window_keep_their_weights(family, dtype):
    """In double precision too, where the family still rounds to float32 on its way."""
    block, x = build(family, dtype=dtype).layers[0].mlp, inputs(500).to(dtype)
    logits, weights, indices = routed(block, x)
    with adapters.smooth_router(block, EPS[family]):
        found, wide, columns = routed(block, x)
    assert torch.equal(found, logits)
    assert torch.equal(columns[:, :K], indices)
    extra = (wide[:, K:] > 0).sum(1)
    quiet = extra == 0
    assert 50 < quiet.sum() < 450
    assert torch.equal(wide[quiet, :K], weights[quiet])
    assert not wide[quiet, K:].any()
    assert wide.dtype == weights.dtype
    assert wide.shape[1] == K + extra.max()
    # Beside an extra expert the leaders give way where weights are normalised only.
    kept = torch.allclose(wide[~quiet, :K], weights[~quiet], atol=1e-6)
    assert kept == (family in ("qwen2_moe", "olmoe", "deepseek_v2"))


@pytest.mark.parametrize("family", FAMILIES)
def test_columns_follow_the_ranking(family):
    router, x = shared(family).layers[0].mlp.gate, inputs(500)
    with adapters.smooth_router(router, EPS[family]):
        logits, wide, columns = router(x)
    scores = logits
    if family == "deepseek_v3":
        scores = logits.sigmoid() + router.e_score_correction_bias
    ranked = scores.argsort(1, descending=True)[:, : wide.shape[1]]
    assert torch.equal(columns[:, K:], ranked[:, K:])
    assert torch.equal(columns[:, :K].sort(1).values, ranked[:, :K].sort(1).values)
    assert (wide[:, K + 1 :] > 0).any()  # somewhere two enter at once


def test_the_model_still_reports_its_logits():
    model = shared("mixtral")
    ask = {"input_ids": TOKENS, "output_router_logits": True}
    hard = model(**ask).router_logits
    with adapters.smooth_router(model, 0.3):
        smooth = model(**ask).router_logits
    assert len(smooth) == 2
    assert torch.equal(smooth[0], hard[0])
    assert smooth[1].shape == hard[1].shape == (TOKENS.numel(), E)
    assert not torch.equal(smooth[1], hard[1])


# --- weights ----------------------------------------------------------------


@pytest.mark.parametrize(("family", "switch", "normal"), RULES)
def test_weights_follow_the_rule_of_the_family(family, switch, normal):
    changes = {} if switch is None else {"norm_topk_prob": switch}
    router, x = build(family, **changes).layers[0].mlp.gate, inputs(60)
    eps = EPS[family]
    with adapters.smooth_router(router, eps):
        _, weights, indices = router(x)
    found = dense(weights, indices)
    torch.testing.assert_close(
        found, by_hand(router, x, eps, normal), atol=2e-6, rtol=0
    )
    assert (found - by_hand(router, x, eps, not normal)).abs().max() > 0.05
    assert (found - by_hand(router, x, eps / 2, normal)).abs().max() > 0.01
    scale = 2.5 if "deepseek" in family else 1.0
    sums = found.sum(1) / scale
    assert torch.allclose(sums, torch.ones_like(sums), atol=1e-5) == normal


def test_deepseek_v3_selects_by_biased_scores_and_weights_by_unbiased():
    block, x = shared("deepseek_v3").layers[0].mlp, inputs(60)
    router = block.gate
    with adapters.smooth_router(block, 0.1):
        found = dense(*routed(block, x)[1:])
    torch.testing.assert_close(found, by_hand(router, x, 0.1, True), atol=2e-6, rtol=0)
    unbiased = by_hand(router, x, 0.1, True, biased=False)
    assert ((found > 0) != (unbiased > 0)).any()
    # Two leaders only: their shares are those of the sigmoids, without the bias.
    alone = (found > 0).sum(1) == K
    z = x.double() @ router.weight.detach().double().T
    base = z.sigmoid() * (found > 0)
    share = 2.5 * base / base.sum(1, keepdim=True)
    torch.testing.assert_close(found[alone], share[alone], atol=2e-6, rtol=0)


@pytest.mark.parametrize("window", ["paper", "optimal", smoothing.cubic_window])
def test_windows_are_those_of_smoothing(window):
    router, x = shared("mixtral").layers[0].mlp.gate, inputs(200)
    with adapters.smooth_router(router, 0.3, window):
        logits, weights, indices = router(x)
    gates = gating.smooth_top_k(logits.detach().double(), K, 0.3, window)
    torch.testing.assert_close(dense(weights, indices), gates, atol=2e-6, rtol=0)
    other = gating.smooth_top_k(logits.detach().double(), K, 0.3, lambda u: u**2)
    assert (other - gates).abs().max() > 0.02


def test_each_router_may_have_its_own_width():
    model, x = shared("olmoe"), inputs(200)
    with adapters.smooth_router(model, [0.0, 0.4]):
        first, second = (routed(layer.mlp, x)[1] for layer in model.layers)
    with adapters.smooth_router(model, torch.tensor([0.4, 0.4])):
        both = [routed(layer.mlp, x)[1] for layer in model.layers]
    assert first.shape == (200, K) != both[0].shape
    assert torch.equal(second, both[1])


# --- continuity -------------------------------------------------------------


def largest_step(block, points):
    """Largest step of the block's output along one line, from end to end."""
    t = torch.linspace(0, 1, points)[:, None]
    start, end = inputs(2, seed=8).mul(1.5)
    with torch.no_grad():
        y = block((start + t * (end - start))[None])[0]
    return (y[1:] - y[:-1]).norm(dim=1).max().item()


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_smoothing_takes_the_jumps_away(family, experts):
    block = shared(family, experts).layers[1].mlp
    coarse, fine = largest_step(block, 801), largest_step(block, 8001)
    assert fine > 0.9 * coarse > 0.05, "the line crosses no boundary"
    with adapters.smooth_router(block, EPS[family]):
        smooth, finer = largest_step(block, 801), largest_step(block, 8001)
    assert 8 < smooth / finer < 12
    assert finer < fine / 20


def test_the_sweep_notices_a_window_that_does_not_reach_one(monkeypatch):
    block = shared("mixtral").layers[1].mlp
    monkeypatch.setattr(smoothing, "window", lambda name, k: lambda u: u * 0.9)
    with adapters.smooth_router(block, 0.3):
        # A leader has u = 1 too, so 0.9 u shrinks it as well and cancels: no jump.
        assert 8 < largest_step(block, 801) / largest_step(block, 8001) < 12
    monkeypatch.setattr(
        smoothing, "window", lambda name, k: lambda u: u * torch.where(u < 1, 0.9, 1)
    )
    with adapters.smooth_router(block, 0.3):
        assert largest_step(block, 801) / largest_step(block, 8001) < 4


# --- gradients --------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3"])
def test_gradient_reaches_the_router_through_the_window(family):
    router, x = build(family).layers[0].mlp.gate, inputs(40)
    eps = EPS[family]
    target = torch.randn(40, E, generator=generator(3))

    def gates(weight, frozen):
        z = x.double() @ weight.T
        base = z.softmax(1)
        s = z
        if family == "deepseek_v3":
            base = z.sigmoid()
            s = base + router.e_score_correction_bias.double()
        u = 1 - (s.topk(K, dim=1).values[:, -1:] - s) / eps
        inside = smoothing.cubic_window(u.detach() if frozen else u)
        found = base * inside
        if family != "olmoe":
            found = found / found.sum(1, keepdim=True)
        return found * (2.5 if family == "deepseek_v3" else 1)

    def gradient(frozen):
        weight = router.weight.detach().double().requires_grad_()
        loss = (gates(weight, frozen) * target.double()).sum()
        return torch.autograd.grad(loss, weight)[0]

    with adapters.smooth_router(router, eps):
        _, weights, indices = router(x)
    (weights * target.gather(1, indices)).sum().backward()
    found, truth = router.weight.grad.double(), gradient(frozen=False)
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=1e-4)
    assert (gradient(frozen=True) - truth).norm() > 0.1 * truth.norm()


def test_gradient_reaches_a_width():
    router, x = shared("qwen3_moe").layers[0].mlp.gate, inputs(40)
    target = torch.randn(40, E, generator=generator(3))
    eps = torch.tensor(0.3, requires_grad=True)
    with adapters.smooth_router(router, eps):
        logits, weights, indices = router(x)
    (weights * target.gather(1, indices)).sum().backward()
    h = 1e-6
    up, down = (
        (gating.smooth_top_k(logits.detach().double(), K, 0.3 + e) * target).sum()
        for e in (h, -h)
    )
    assert eps.grad.item() == pytest.approx(((up - down) / (2 * h)).item(), rel=1e-3)
    assert abs(eps.grad.item()) > 0.1


# --- gaps -------------------------------------------------------------------


def recorded(model):
    """Input and logits of every router, read by hooks of our own."""
    seen = []
    readers = [
        layer.mlp.gate.register_forward_hook(
            lambda router, args, out: seen.append((args[0].reshape(-1, D), out[0]))
        )
        for layer in model.layers
    ]
    output(model)
    for reader in readers:
        reader.remove()
    return seen


@pytest.mark.parametrize("family", FAMILIES)
def test_gaps_are_those_computed_by_hand(family):
    model = shared(family)
    present = hooks(model)
    found = adapters.boundary_gaps(model, {"input_ids": TOKENS})
    assert found.names == ("layers.0.mlp.gate", "layers.1.mlp.gate")
    assert found.below.shape == (2, TOKENS.numel(), E - K)
    assert hooks(model) == present
    for row, (x, logits) in enumerate(recorded(model)):
        router = model.layers[row].mlp.gate
        for token in range(0, len(x), 7):
            point = x[token].double().requires_grad_()
            s = point @ router.weight.detach().double().T
            torch.testing.assert_close(s.float(), logits[token], atol=1e-5, rtol=0)
            if family == "deepseek_v3":
                s = s.sigmoid() + router.e_score_correction_bias.double()
            order = sorted(range(E), key=lambda i, s=s: -s[i].item())
            gap = s[order[K - 1]] - s[order[K]]
            (slope,) = torch.autograd.grad(gap, point)
            near = pytest.approx(gap.item(), abs=1e-5)
            assert found.gap[row, token].item() == near
            falls = [(s[order[K - 1]] - s[i]).item() for i in order[K:]]
            assert found.below[row, token].tolist() == pytest.approx(falls, abs=1e-5)
            distance = (gap / slope.norm()).item()
            assert found.distance[row, token].item() == pytest.approx(
                distance, abs=1e-4, rel=1e-4
            )


def test_distance_is_that_to_the_tie():
    """Walk it, straight at the hyperplane: k and k + 1 tie on arrival."""
    block, x = shared("mixtral").layers[0].mlp, inputs(50)
    found = adapters.boundary_gaps(block, x[None])
    weight = block.gate.weight.detach()
    order = (x @ weight.T).argsort(1, descending=True)
    across = weight[order[:, K]] - weight[order[:, K - 1]]
    there = x + found.distance[0][:, None] * across / across.norm(dim=1, keepdim=True)
    left = ((there @ weight.T).gather(1, order[:, K - 1 : K + 1]).diff(dim=1)).abs()
    assert left.max() < 1e-5 < found.gap.max() / 100


def test_hidden_tokens_do_not_count():
    model = shared("qwen3_moe")
    mask = torch.ones_like(TOKENS)
    mask[1, 10:] = 0
    found = adapters.boundary_gaps(model, {"input_ids": TOKENS, "attention_mask": mask})
    alone = adapters.boundary_gaps(model, {"input_ids": TOKENS[1:, :10]})
    assert found.gap.shape == (2, 34)
    torch.testing.assert_close(found.gap[:, 24:], alone.gap, atol=1e-5, rtol=0)


def test_fraction_quantiles_and_extras_count():
    below = torch.tensor([[[0.1, 0.5], [0.2, 0.3], [0.4, 0.9], [0.6, 0.7]]])
    found = adapters.BoundaryGaps(("a",), below, torch.zeros(1, 4))
    assert found.gap.tolist() == [pytest.approx([0.1, 0.2, 0.4, 0.6])]
    assert found.extras(0.45).tolist() == [[1, 2, 1, 0]]
    assert found.fraction(0.45).tolist() == [0.75]
    assert found.fraction(0.0).tolist() == [0.0]
    assert found.quantiles([0, 0.5, 1]).tolist() == [pytest.approx([0.1, 0.3, 0.6])]
    with pytest.raises(ValueError, match=">= 0"):
        found.fraction(-0.1)


def test_all_experts_active_is_no_boundary():
    block = build("mixtral", num_experts_per_tok=E).layers[0].mlp
    found = adapters.boundary_gaps(block, inputs(5)[None])
    assert found.gap.tolist() == found.distance.tolist() == [[INF] * 5]
    assert found.fraction(3.0).tolist() == [0.0]
    before = routed(block, inputs(5))[1]
    with adapters.smooth_router(block, 3.0):
        assert torch.equal(routed(block, inputs(5))[1], before)


def test_equal_rows_never_come_apart():
    block = build("deepseek_v3").layers[0].mlp
    with torch.no_grad():
        block.gate.weight.zero_()
    assert adapters.boundary_gaps(block, inputs(3)[None]).distance.tolist() == [
        [INF] * 3
    ]
    block.gate.e_score_correction_bias.zero_()
    assert adapters.boundary_gaps(block, inputs(3)[None]).distance.tolist() == [
        [0.0] * 3
    ]


def test_inside_the_context_the_gaps_are_of_the_smoothed_model():
    model, batch = shared("qwen3_moe"), {"input_ids": TOKENS}
    hard = adapters.boundary_gaps(model, batch)
    with adapters.smooth_router(model, 0.3):
        smooth = adapters.boundary_gaps(model, batch)
    assert torch.equal(smooth.gap[0], hard.gap[0])
    assert (smooth.gap[1] - hard.gap[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("family", "fine"), [("deepseek_v2", True), ("mixtral", False)]
)
def test_half_precision_keeps_what_the_family_computes_in_float32(family, fine):
    """DeepSeek reads its logits in float32; those of Mixtral are rounded."""
    model = build(family, dtype=torch.bfloat16)
    found = adapters.boundary_gaps(model, TOKENS).below
    z = torch.stack([logits.float() for _, logits in recorded(model)])
    ranked, rounded = (
        t.sort(-1, descending=True).values for t in (z, z.bfloat16().float())
    )
    assert torch.equal(found, ranked[..., K - 1 : K] - ranked[..., K:])
    assert torch.equal(found, rounded[..., K - 1 : K] - rounded[..., K:]) != fine
    hard = output(model)
    with adapters.smooth_router(model, 0.3):
        assert output(model).dtype == torch.bfloat16
        assert not torch.equal(output(model), hard)
    assert torch.equal(output(model), hard)


# --- budget -----------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [0.5, 1.7])
def test_the_suggested_width_spends_the_budget(family, budget):
    block, n = shared(family).layers[0].mlp, 701
    x = inputs(n)
    found = adapters.boundary_gaps(block, x[None])
    eps = adapters.suggest_eps(found, budget)
    assert eps.shape == (1,)
    # A window like the paper's underflows near its foot, so count with a linear one.
    with adapters.smooth_router(block, eps, lambda u: u):
        active = (routed(block, x)[1] > 0).sum(1)
    assert abs(active.double().mean() - K - budget) <= 1 / n
    assert abs(found.extras(eps.item() * 1.1).double().mean() - budget) > 1 / n


def test_one_layer_after_the_other_a_model_meets_its_budget():
    """Smoothing the first layer moves the scores of the second: measure again."""
    model, batch = shared("mixtral"), {"input_ids": TOKENS}
    n = TOKENS.numel()
    first = adapters.suggest_eps(adapters.boundary_gaps(model, batch))[0].item()
    with adapters.smooth_router(model, [first, 0.0]):
        second = adapters.suggest_eps(adapters.boundary_gaps(model, batch))[1].item()
    with adapters.smooth_router(model, [first, second]):
        found = adapters.boundary_gaps(model, batch)
    for row, eps in enumerate([first, second]):
        assert abs(found.extras(eps)[row].double().mean() - 0.5) <= 1 / n


def test_suggestion_on_a_table_and_its_ends():
    below = torch.tensor([[0.1, 0.5], [0.2, 0.3], [0.4, 0.9], [0.6, 0.7]])
    assert adapters.suggest_eps(below, 0.5).item() == pytest.approx(0.25)
    assert adapters.suggest_eps(below, 0.01).item() == pytest.approx(0.05)
    assert adapters.suggest_eps(below, 1.99).item() == pytest.approx(0.8)
    assert adapters.suggest_eps(below.expand(3, 4, 2)).shape == (3,)
    for budget in (0, 2, -1, math.nan):
        with pytest.raises(ValueError, match="between 0 and E - k = 2"):
            adapters.suggest_eps(below, budget)
    for bad in (below[0], below[:0], below[:, :0], [0.1]):
        with pytest.raises(ValueError, match=r"boundary_gaps"):
            adapters.suggest_eps(bad)
    for bad in (-below, below * math.nan):
        with pytest.raises(ValueError, match="NaN or a negative"):
            adapters.suggest_eps(bad)


# --- refusals ---------------------------------------------------------------


class NovelTopKRouter(nn.Linear):
    pass


def test_other_families_are_named():
    strange = nn.ModuleList([shared("mixtral").layers[0], NovelTopKRouter(4, 2)])
    for ask in (
        lambda: adapters.smooth_router(strange, 0.1).__enter__(),
        lambda: adapters.boundary_gaps(strange, inputs(1)),
    ):
        with pytest.raises(ValueError, match=r"NovelTopKRouter.*DeepseekV3TopkRouter"):
            ask()
    with pytest.raises(ValueError, match=r"found none: known are MixtralTopKRouter"):
        adapters.boundary_gaps(nn.Linear(4, 2), torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"torch.nn.Module, got int"):
        adapters.boundary_gaps(3, torch.ones(1, 4))


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_limits_to_groups_are_refused_and_groups_without_limit_are_not(family):
    method = {} if family == "deepseek_v3" else {"topk_method": "group_limited_greedy"}
    model = build(family, n_group=4, topk_group=2, **method)
    with (
        pytest.raises(ValueError, match=r"2 of 4 groups.*jumps"),
        adapters.smooth_router(model, 0.1),
    ):
        pass
    with pytest.raises(ValueError, match="groups"):
        adapters.boundary_gaps(model, {"input_ids": TOKENS})
    free = build(family, n_group=4, topk_group=4, **method).layers[1].mlp
    with adapters.smooth_router(free, EPS[family]):
        assert 8 < largest_step(free, 801) / largest_step(free, 8001) < 12


def test_what_groups_do_is_why_they_are_refused(monkeypatch):
    """A window inside the kept groups: where two groups tie, the output still jumps."""
    block = build("deepseek_v3", n_group=4, topk_group=2).layers[1].mlp

    def within(router, logits):
        s = (logits.sigmoid() + router.e_score_correction_bias).unflatten(1, (4, 2))
        kept = s.sum(2).topk(2, dim=1).indices
        hidden = torch.ones(len(s), 4, dtype=torch.bool).scatter(1, kept, False)
        return s.masked_fill(hidden[..., None], -INF).flatten(1)

    monkeypatch.setattr(families, "_check_groups", lambda name, router: None)
    monkeypatch.setattr(families, "scores", within)
    with adapters.smooth_router(block, 0.1):
        coarse, fine = largest_step(block, 801), largest_step(block, 8001)
        assert routed(block, inputs(50))[1].shape[1] > K
    assert fine > 0.9 * coarse > 0.05


def test_greedy_deepseek_v2_ignores_its_groups():
    model = build("deepseek_v2", n_group=4, topk_group=2)
    with adapters.smooth_router(model, 0.3):
        assert output(model).isfinite().all()


def test_twice_is_refused_and_leaves_the_first():
    model, x = shared("olmoe"), inputs(50)
    router = model.layers[0].mlp.gate
    hard = router(x)[1]
    with adapters.smooth_router(model, 0.3):
        smooth = router(x)[1]
        with (
            pytest.raises(ValueError, match=r"layers.0.mlp.gate.*smoothed already"),
            adapters.smooth_router(model, 0.2),
        ):
            pass
        assert torch.equal(router(x)[1], smooth)
    assert torch.equal(router(x)[1], hard)


@pytest.mark.parametrize(
    ("eps", "error", "match"),
    [
        (-0.1, ValueError, ">= 0"),
        (math.nan, ValueError, ">= 0"),
        (INF, ValueError, "finite, got inf"),
        ("0.1", TypeError, "one real number"),
        (True, TypeError, "one real number"),
        (torch.ones(1, 2), ValueError, "one for each of the 2 routers, got 1"),
        ([0.1], ValueError, "one for each of the 2 routers, got 1"),
        ([0.1, -1.0], ValueError, ">= 0"),
    ],
)
def test_bad_widths(eps, error, match):
    model = shared("mixtral")
    present = hooks(model)
    with pytest.raises(error, match=match), adapters.smooth_router(model, eps):
        pass
    assert hooks(model) == present


def test_bad_windows_and_batches():
    model = shared("mixtral")
    with (
        pytest.raises(ValueError, match="window must be"),
        adapters.smooth_router(model, 0.1, "square"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="0 at u = 0 and 1 at u = 1"),
        adapters.smooth_router(model, 0.1, lambda u: 0.9 * u),
    ):
        pass
    halves = nn.Module()
    halves.one, halves.two = (layer.mlp for layer in model.layers)
    halves.forward = halves.one.forward
    with pytest.raises(ValueError, match=r"left out the routers \['two.gate'\]"):
        adapters.boundary_gaps(halves, inputs(3)[None])
    pair = nn.Sequential(
        halves.one, build("mixtral", num_experts_per_tok=3).layers[0].mlp
    )
    with pytest.raises(ValueError, match=r"\(3, 5\), \(3, 6\).*block by block"):
        adapters.boundary_gaps(pair, inputs(3)[None])


@pytest.mark.parametrize("eps", [1e38, 1e300])
def test_no_token_and_large_widths(eps):
    block = shared("mixtral").layers[0].mlp
    with adapters.smooth_router(block, eps):
        _, weights, columns = routed(block, inputs(20))
        assert weights.shape == columns.shape == (20, E)
        assert routed(block, inputs(0))[1].shape == (0, K)
    softmax = (inputs(20).double() @ block.gate.weight.detach().double().T).softmax(1)
    torch.testing.assert_close(dense(weights, columns), softmax, atol=1e-6, rtol=0)


def test_exact_ties_share_at_every_width():
    """Rows 0 and 1 are equal: the router has decided, smoothing lets both in."""
    router = build("mixtral", num_experts_per_tok=1).layers[0].mlp.gate
    with torch.no_grad():
        router.weight[1] = router.weight[0]
    x = inputs(40)
    x = x[(x @ router.weight.T).argmax(1) < 2]
    for eps in (1e-320, 1e-9):
        router.zero_grad()
        with adapters.smooth_router(router, eps):
            _, weights, columns = router(x)
        assert columns.sort(1).values.tolist() == [[0, 1]] * len(x)
        assert weights.tolist() == [[0.5, 0.5]] * len(x)
        weights.square().sum().backward()
        assert router.weight.grad.isfinite().all()

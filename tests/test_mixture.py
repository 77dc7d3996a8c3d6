"""Mixture: the pair list against a loop, causality, continuity, and the budget."""

import math

import pytest
import torch
from truths import INF, generator

from moebook import mixture, smoothing
from moebook.mixture import MixtureOfExperts

torch.set_num_threads(1)
DOUBLE = torch.float64
routings = pytest.mark.parametrize("routing", mixture.ROUTINGS)


def build(routing="smooth", d=8, hidden=12, experts=6, k=2, seed=0, **options):
    return MixtureOfExperts(
        d, hidden, experts, k, generator(seed), routing=routing, **options
    )


def tokens(n=64, d=8, seed=1, dtype=torch.float32):
    return torch.randn(n, d, generator=generator(seed), dtype=DOUBLE).to(dtype)


def by_hand(layer, x):
    """Every expert on every token, one at a time."""
    gates, out = layer.gates(x), torch.zeros_like(x)
    for i in range(len(x)):
        for j in range(gates.shape[1]):
            hidden = layer.activation(x[i] @ layer.inner[j])
            out[i] += gates[i, j] * (hidden @ layer.outer[j])
    return out


@routings
@pytest.mark.parametrize("d", [8, 6])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_the_pair_list_is_the_sum_over_all_experts(routing, d, dtype):
    """With the kernel and without: float64 and widths such as 6 have none."""
    layer, x = build(routing, d, dtype=dtype, eps=0.5), tokens(40, d, dtype=dtype)
    slack = 20 * torch.finfo(dtype).eps
    found = layer(x)
    torch.testing.assert_close(found, by_hand(layer, x), rtol=slack, atol=slack)
    reference = layer.forward_by_expert(x)
    torch.testing.assert_close(found, reference, rtol=slack, atol=slack)
    assert found.dtype == dtype and found.abs().max() > 0.1


@routings
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_gradients_are_those_of_the_loop(routing, dtype):
    layer, x = build(routing, dtype=dtype, eps=0.5), tokens(100, dtype=dtype)
    x.requires_grad_()
    wanted = [x, layer.router, layer.inner, layer.outer]
    slope = tokens(100, seed=2, dtype=dtype)
    ours = torch.autograd.grad(layer(x), wanted, slope)
    theirs = torch.autograd.grad(layer.forward_by_expert(x), wanted, slope)
    for a, b in zip(ours, theirs, strict=True):
        slack = 100 * torch.finfo(dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=slack)
        assert b.abs().max() > 0


@routings
def test_gradients_pass_the_finite_difference_test(routing):
    layer = build(routing, d=3, hidden=4, dtype=DOUBLE, eps=0.5)
    x = tokens(5, 3, dtype=DOUBLE).requires_grad_()
    assert torch.autograd.gradcheck(layer, (x,))

    def of_router(router):
        return torch.func.functional_call(layer, {"router": router}, x.detach())

    assert torch.autograd.gradcheck(of_router, (layer.router,))


@routings
def test_half_precision_runs_and_agrees(routing):
    layer, x = build(routing, dtype=torch.bfloat16, eps=0.5), tokens(40).bfloat16()
    found = layer(x)
    torch.testing.assert_close(found, layer.forward_by_expert(x), rtol=0.1, atol=0.05)
    found.float().square().sum().backward()
    assert layer.router.grad.isfinite().all() and layer.inner.grad.abs().max() > 0
    assert layer.eta.dtype == torch.float32


@routings
def test_a_sequence_is_its_tokens(routing):
    layer, x = build(routing), tokens(30)
    assert torch.equal(layer(x.view(3, 10, 8)), layer(x).view(3, 10, 8))
    assert layer(x[:0]).shape == (0, 8)
    assert layer(x.view(3, 10, 8)[:, :0]).shape == (3, 0, 8)
    layer(x[:0]).sum().backward()
    strided = tokens(16, 60).T[:, :8]
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()))


@routings
def test_the_layer_is_causal(routing):
    """Later tokens change nothing before them, however needy they are."""
    layer, x = build(routing, dtype=DOUBLE, eps=0.3), tokens(40, dtype=DOUBLE)
    changed = x.clone()
    changed[20:] = 0  # all logits tie: everybody speaks
    assert (layer.gates(changed)[20:] > 0).sum(1).min() == {
        "top_k": 2,
        "smooth": 6,
        "relu": 0,
    }[routing]
    torch.testing.assert_close(
        layer(x)[:20], layer(changed)[:20], rtol=1e-14, atol=1e-15
    )
    before = layer.eps.item()
    layer.train()(x)
    assert layer.eps.item() == before


def test_no_expert_at_all_is_an_answer():
    layer = build("relu")
    x = tokens(10)
    gates = torch.zeros(10, 6)
    assert torch.equal(layer(x, gates), torch.zeros(10, 8))
    assert torch.equal(layer.forward_by_expert(x, gates), torch.zeros(10, 8))
    with torch.no_grad():
        layer.router.zero_()
    assert torch.equal(layer(x), torch.zeros(10, 8))


def test_gates_may_come_from_anywhere():
    layer, x = build("top_k"), tokens(10).requires_grad_()
    gates = tokens(10, 6, seed=3).requires_grad_()  # of both signs, all experts
    torch.testing.assert_close(layer(x, gates), layer.forward_by_expert(x, gates))
    (slope,) = torch.autograd.grad(layer(x, gates).sum(), gates)
    assert (slope != 0).all()
    with pytest.raises(ValueError, match=r"\(n, E\) = \(10, 6\).*\(10, 5\)"):
        layer(x, gates[:, :5])


def test_the_smooth_layer_has_no_jump_and_the_hard_one_does():
    # tanh: experts without a kink, so that only the router can break the line.
    options = dict(dtype=DOUBLE, eps=0.3, activation=torch.tanh)
    a, b = tokens(2, dtype=DOUBLE)

    def largest(routing, points):
        t = torch.linspace(-3, 3, points, dtype=DOUBLE)[:, None]
        with torch.no_grad():
            return build(routing, **options)(a + t * b).diff(dim=0).abs().max().item()

    hard, smooth, relu = (
        largest(r, 2001) / largest(r, 20001) for r in ("top_k", "smooth", "relu")
    )
    assert hard < 1.1
    assert 8 < smooth < 12 and 8 < relu < 12


def test_a_needy_token_has_as_many_experts_as_its_gates_say():
    layer, x = build(eps=3.0), tokens(200)
    active = (layer.gates(x) > 0).sum(1)
    assert active.min() >= 2 and active.max() == 6
    torch.testing.assert_close(layer(x), layer.forward_by_expert(x))


def test_the_boundary_loss_moves_the_width_alone():
    layer, x = build(eps=0.4), tokens(300)
    loss = layer.boundary_loss(x, budget=0.25, alpha=3.0)
    loss.backward()
    active = (layer.gates(x) > 0).sum(1).double().mean().item()
    slope = 3 * (active - 2.25) * torch.sigmoid(layer.eta).item()
    assert layer.eta.grad.item() == pytest.approx(slope, rel=1e-5)
    assert layer.router.grad is None and layer.inner.grad is None
    layer(x).sum().backward()  # and the task moves everything else
    assert layer.eta.grad.item() == pytest.approx(slope, rel=1e-5)
    assert layer.router.grad.abs().max() > 0


@pytest.mark.parametrize("start", [0.1, 2.0])
def test_descent_finds_the_width_of_the_budget(start):
    """Orthonormal router, Gaussian tokens: the width is that of the formula."""
    layer = build(eps=start, d=8, experts=8)
    with torch.no_grad():
        layer.router.copy_(torch.eye(8))
    optimizer = torch.optim.SGD([layer.eta], lr=0.3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 100))
    source, late = generator(5), []
    for step in range(1500):
        optimizer.zero_grad()
        layer.boundary_loss(torch.randn(256, 8, generator=source)).backward()
        optimizer.step()
        schedule.step()
        late += [layer.eps.item()] if step >= 750 else []
    found = sum(late) / len(late)
    assert found == pytest.approx(smoothing.budget_eps(8, 2), rel=0.03)


def test_draws_are_those_of_the_generator():
    a, b, c = build(seed=1), build(seed=1), build(seed=2)
    for name, values in a.named_parameters():
        assert torch.equal(values, b.get_parameter(name))
    assert not torch.equal(a.inner, c.inner)
    big = build(d=64, hidden=128, experts=32)
    assert big.inner.std().item() == pytest.approx(64**-0.5, rel=0.01)
    assert big.outer.std().item() == pytest.approx(128**-0.5, rel=0.01)
    assert big.router.std().item() == pytest.approx(64**-0.5, rel=0.1)


@pytest.mark.parametrize("eps", [1e-4, 0.1, 5.0, 50.0, 1000.0])
def test_the_width_starts_where_it_was_told(eps):
    assert build(eps=eps).eps.item() == pytest.approx(eps, rel=1e-5)
    state = build(eps=eps).state_dict()
    other = build(eps=0.2)
    other.load_state_dict(state)
    assert other.eps.item() == pytest.approx(eps, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (dict(routing="soft"), ValueError, "'top_k', 'smooth', 'relu'.*'soft'"),
        (dict(k=7), ValueError, "k=7"),
        (dict(k=0), ValueError, "k=0"),
        (dict(hidden=0), ValueError, "hidden=0"),
        (dict(eps=0.0), ValueError, "positive and finite.*top_k"),
        (dict(eps=INF), ValueError, "positive and finite"),
        (dict(eps=math.nan), ValueError, "nan"),
        (dict(window="cosine"), ValueError, "window must be one of"),
    ],
)
def test_a_bad_layer_is_refused_at_birth(options, error, words):
    with pytest.raises(error, match=words):
        build(**options)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.zeros(8), ValueError, r"\(n, 8\) or \(batch, length, 8\), got \(8,\)"),
        (torch.zeros(2, 7), ValueError, r"got \(2, 7\)"),
        (torch.zeros(1, 1, 2, 8), ValueError, "got"),
        (torch.zeros(2, 8, dtype=DOUBLE), TypeError, r"float32.*got torch\.float64"),
        (torch.full((1, 8), math.nan), ValueError, "logits must be finite, got nan"),
    ],
)
def test_bad_tokens_are_refused(x, error, words):
    for run in (build(), build("relu"), build().boundary_loss):
        with pytest.raises(error, match=words):
            run(x)


def test_only_a_window_can_be_adapted():
    with pytest.raises(ValueError, match="'relu' has no window"):
        build("relu").boundary_loss(tokens())
    with pytest.raises(ValueError, match="n >= 1"):
        build().boundary_loss(tokens(0))


# --- products in groups -----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.bfloat16])
@pytest.mark.parametrize("d", [8, 5])
@pytest.mark.parametrize("sizes", [[3, 0, 4], [0, 0, 7], [7, 0, 0], [0, 0, 0]])
def test_a_grouped_product_is_one_product_a_group(dtype, d, sizes):
    rows = tokens(sum(sizes), d, dtype=dtype)
    weight = torch.randn(3, d, 16, generator=generator(2)).to(dtype)
    found = mixture.grouped_product(rows, weight, torch.tensor(sizes))
    parts = [
        part @ w
        for part, w in zip(rows.double().split(sizes), weight.double(), strict=True)
    ]
    slack = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), torch.cat(parts), rtol=slack, atol=slack)


def test_without_the_kernel_the_layer_is_the_same(monkeypatch):
    layer, x = build(), tokens(50)
    fused = layer(x)
    monkeypatch.setattr(mixture, "_has_kernel", lambda rows, weight: False)
    torch.testing.assert_close(layer(x), fused)

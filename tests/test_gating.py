"""Gating: limits in the temperature, equivalences between gates, and refusals."""

import math

import pytest
import torch

from moebook import gating, routing

torch.set_num_threads(1)
INF = math.inf
TAUS = [0.0, 5e-324, 1e-300, 1e-40, 1e-3, 1.0, 30.0, 1e300, INF]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def draw(n, K, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, K, generator=generator, dtype=torch.float64).to(dtype)


def integers(n, K, levels, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (n, K), generator=generator).double()


def uniform_over_ties(logits):
    tied = logits == logits.amax(1, keepdim=True)
    return tied.to(logits.dtype) / tied.sum(1, keepdim=True)


GATES = {
    "softmax": lambda z: gating.softmax(z, 0.7),
    "cold": lambda z: gating.softmax(z, 0.0),
    "hard": gating.hard,
    "top_1": lambda z: gating.top_k(z, 1),
    "top_2": lambda z: gating.top_k(z, min(2, z.shape[-1])),
}
gates = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())


# --- what all normalised gates share ----------------------------------------


@gates
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("K", [1, 2, 3, 64])
def test_gates_are_a_distribution_of_the_same_dtype(gate, dtype, K):
    logits = draw(50, K, dtype=dtype)
    found = gate(logits)
    assert found.dtype == dtype and found.shape == (50, K)
    assert (found >= 0).all()
    # Each of K gates is rounded once, by at most half a unit of a number below one.
    slack = K * torch.finfo(dtype).eps / 2
    sums = found.double().sum(1)
    assert ((sums - 1).abs() <= slack).all()


@gates
def test_one_expert_has_the_whole_say(gate):
    assert torch.equal(gate(draw(5, 1)), torch.ones(5, 1, dtype=torch.float64))


@gates
def test_no_rows_give_no_rows(gate):
    assert gate(torch.zeros(0, 3)).shape == (0, 3)


@gates
def test_permuting_experts_permutes_gates(gate):
    logits = draw(200, 5)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(gate(logits[:, order]), gate(logits)[:, order])


@gates
def test_a_common_shift_changes_nothing(gate):
    logits = integers(200, 5, levels=9)
    assert torch.equal(gate(logits + 2.0**40), gate(logits))


@gates
def test_large_logits_neither_overflow_nor_vanish(gate):
    for scale, dtype in [(1e30, torch.float32), (1e300, torch.float64)]:
        logits = scale * torch.tensor(
            [[1.0, -1.0, 0.5], [-1.0, -2.0, 0.0]], dtype=dtype
        )
        assert gate(logits).tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]


@gates
@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        (torch.zeros(3), ValueError, r"shape \(n, K\), got \(3,\)"),
        (torch.zeros(1, 2, 3), ValueError, r"got \(1, 2, 3\)"),
        (torch.zeros(2, 0), ValueError, "at least one expert"),
        (torch.tensor([[0.0, math.nan]]), ValueError, r"nan at \(0, 1\)"),
        (torch.tensor([[0.0, -INF]]), ValueError, r"-inf at \(0, 1\).*mask"),
        (torch.zeros(1, 2, dtype=torch.int64), TypeError, "int64"),
    ],
)
def test_bad_logits_are_refused(gate, logits, error, words):
    with pytest.raises(error, match=words):
        gate(logits)


# --- softmax in the temperature ---------------------------------------------


@pytest.mark.parametrize("tau", [0.01, 0.3, 1.0, 30.0])
def test_softmax_is_the_ratio_of_exponentials(tau):
    logits = draw(200, 4)
    weights = (logits / tau).exp()
    torch.testing.assert_close(
        gating.softmax(logits, tau), weights / weights.sum(1, keepdim=True)
    )


def test_softmax_of_two_is_the_logistic_of_the_score():
    logits = draw(200, 2)
    score = logits[:, 0] - logits[:, 1]
    torch.testing.assert_close(
        gating.softmax(logits, 0.3)[:, 0], torch.sigmoid(score / 0.3)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tau", TAUS)
def test_softmax_is_finite_at_every_temperature(dtype, tau):
    logits = torch.tensor([[0.0, 0.0, -1.0], [2.0, 1.0, -3.0]], dtype=dtype)
    for scale in (1.0, 1e-3, 1e4):
        found = gating.softmax(logits * scale, tau)
        assert found.isfinite().all()
        assert found[0, 0] == found[0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [0.0, 5e-324, 1e-300, 1e-40, 1e-12])
def test_a_cold_softmax_is_hard_off_ties_and_shares_at_them(dtype, tau):
    logits = integers(300, 4, levels=3).to(dtype)
    assert torch.equal(gating.softmax(logits, tau), uniform_over_ties(logits))
    unique = routing.margin(logits) > 0
    assert torch.equal(gating.softmax(logits, tau)[unique], gating.hard(logits)[unique])
    assert not torch.equal(gating.softmax(logits, tau), gating.hard(logits))


def test_the_limit_at_a_fixed_margin_is_exponential():
    """1 - (largest gate) = 1 / (1 + e^(margin/tau)) for two experts: no jump early."""
    logits = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    for tau in (0.5, 0.25, 0.125, 0.0625):
        loser = gating.softmax(logits, tau)[0, 1].item()
        assert loser == pytest.approx(1 / (1 + math.exp(1 / tau)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tiny_temperature_still_resolves_tiny_margins(dtype):
    """At tau = 1e-40, below every normal float32, margins of 1e-40 are not hard."""
    logits = torch.tensor([[1e-40, 0.0]], dtype=dtype)
    ratio = logits[0, 0].item() / 1e-40  # float32 rounds a subnormal by 1e-5
    assert gating.softmax(logits, 1e-40)[0, 1].item() == pytest.approx(
        1 / (1 + math.exp(ratio)), rel=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_temperature_shares_equally(dtype):
    largest = torch.finfo(dtype).max
    logits = torch.tensor([[largest, -largest, 0.0, 1.0]], dtype=dtype)
    assert gating.softmax(logits, INF).tolist() == [[0.25] * 4]


def test_logits_and_temperature_scale_together():
    logits = draw(100, 4)
    scaled = gating.softmax(logits * 2.0**-500, 2.0**-500)
    assert torch.equal(scaled, gating.softmax(logits, 1.0))


def test_float32_agrees_with_float64():
    logits = draw(300, 5, dtype=torch.float32)
    for tau in TAUS:
        single, double = (
            gating.softmax(logits, tau),
            gating.softmax(logits.double(), tau),
        )
        # A margin m off by a rounding moves its gate by m e^(-m) <= 1/e roundings.
        slack = 5 * torch.finfo(torch.float32).eps
        assert ((single.double() - double).abs() <= slack).all()


def test_softmax_gradient_is_the_textbook_matrix():
    logits, tau = draw(1, 4), 0.3
    jacobian = torch.autograd.functional.jacobian(
        lambda z: gating.softmax(z, tau)[0], logits
    )[:, 0]
    p = gating.softmax(logits, tau)[0]
    torch.testing.assert_close(jacobian, (torch.diag(p) - torch.outer(p, p)) / tau)


def test_softmax_gradients_pass_the_finite_difference_test_at_ties_too():
    logits = torch.tensor(
        [[0.3, -1.0, 0.2], [0.5, 0.5, 0.5]], dtype=torch.float64, requires_grad=True
    )
    tau = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(gating.softmax, (logits, tau))
    assert torch.autograd.gradgradcheck(gating.softmax, (logits, tau))


@pytest.mark.parametrize("tau", [1e-300, 1e-40, INF])
def test_gradients_off_ties_vanish_at_extreme_temperatures(tau):
    logits = torch.tensor([[1.0, 0.0, -2.0]], requires_grad=True)
    gating.softmax(logits, tau)[0, 0].backward()
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("tau", [1e-300, 1e-40])
def test_gradients_at_a_tie_grow_without_bound_but_not_into_nan(tau):
    logits = torch.tensor([[1.0, 1.0, -2.0]], requires_grad=True)
    gating.softmax(logits, tau)[0, 0].backward()
    assert logits.grad.tolist() == [[INF, -INF, 0.0]]


def test_temperature_may_be_a_tensor_without_dimensions():
    logits = draw(20, 3)
    for tau in (0.0, 1e-300, 0.3, INF):
        as_tensor = torch.tensor(tau, dtype=torch.float64)
        assert torch.equal(
            gating.softmax(logits, as_tensor), gating.softmax(logits, tau)
        )
    assert torch.equal(gating.softmax(logits, 1), gating.softmax(logits, 1.0))


def test_softmax_does_not_write_into_its_input():
    logits = draw(20, 3)
    before = logits.clone()
    for tau in TAUS:
        gating.softmax(logits, tau)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("tau", "error", "words"),
    [
        (-1.0, ValueError, r"number >= 0, got -1.0.*use 0"),
        (-INF, ValueError, "got -inf"),
        (math.nan, ValueError, "got nan"),
        (torch.tensor(math.nan), ValueError, "got nan"),
        (torch.ones(3), TypeError, r"shape \(3,\)"),
        (torch.tensor(1j), TypeError, "one real number"),
        ("1", TypeError, "'1' of type str"),
        (None, TypeError, "None"),
        (True, TypeError, "bool"),
        (1j, TypeError, "complex"),
    ],
)
def test_bad_temperatures_are_refused(tau, error, words):
    with pytest.raises(error, match=words):
        gating.softmax(torch.zeros(1, 2), tau)


def test_minus_zero_is_zero():
    assert torch.equal(
        gating.softmax(torch.eye(2), -0.0), gating.softmax(torch.eye(2), 0.0)
    )


# --- hard -------------------------------------------------------------------


def test_hard_is_a_decision_of_lowest_index_at_ties():
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [-0.0, 0.0, -1.0]])
    expected = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    assert gating.hard(logits).tolist() == expected


def test_hard_is_the_active_set_of_one():
    logits = integers(300, 5, levels=3)
    assert torch.equal(gating.hard(logits), routing.active_set(logits, 1).double())


# --- top-k ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [1, 2, 7])
def test_top_k_with_all_experts_is_the_softmax_at_one(dtype, K):
    logits = draw(300, K, dtype=dtype)
    assert torch.equal(gating.top_k(logits, K), gating.softmax(logits, 1.0))


def test_top_one_is_hard():
    for logits in (draw(300, 5), integers(300, 5, levels=2)):
        assert torch.equal(gating.top_k(logits, 1), gating.hard(logits))


@pytest.mark.parametrize("k", range(1, 6))
def test_top_k_keeps_the_active_set_and_renormalises_the_softmax(k):
    logits = integers(300, 5, levels=3)
    active = routing.active_set(logits, k)
    found = gating.top_k(logits, k)
    assert torch.equal(found > 0, active)
    kept = gating.softmax(logits, 1.0) * active
    torch.testing.assert_close(found, kept / kept.sum(1, keepdim=True))


def test_top_k_is_the_softmax_of_the_kept_alone():
    logits = draw(300, 6)
    kept = logits.topk(3, dim=1)
    alone = torch.zeros_like(logits).scatter(
        1, kept.indices, gating.softmax(kept.values, 1.0)
    )
    torch.testing.assert_close(gating.top_k(logits, 3), alone)


def test_top_k_jumps_across_a_tie_by_what_theory_says():
    """At an order-1 tie the two swap the same gate, so the gates jump by its size."""
    step = 2.0**-40
    before = gating.top_k(torch.tensor([[1.0, step, 0.0]]).double(), 2)
    after = gating.top_k(torch.tensor([[1.0, 0.0, step]]).double(), 2)
    gate = 1 / (1 + math.e)
    assert before[0, 1].item() == pytest.approx(gate)
    assert after[0, 2].item() == pytest.approx(gate)
    assert before[0, 2] == after[0, 1] == 0


def test_top_k_gradient_reaches_the_kept_only():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.float64).requires_grad_()
    gating.top_k(logits, 2)[0, 1].backward()
    p = 1 / (1 + math.exp(-1.0))
    slope = p * (1 - p)
    expected = torch.tensor([[0.0, slope, -slope, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(logits.grad, expected)
    assert torch.autograd.gradcheck(lambda z: gating.top_k(z, 2), (logits,))


@pytest.mark.parametrize(
    ("k", "error", "words"),
    [
        (0, ValueError, "from 1 to K = 3, got 0"),
        (4, ValueError, "from 1 to K = 3, got 4"),
        (2.0, TypeError, "got 2.0 of type float"),
        (False, TypeError, "bool"),
    ],
)
def test_top_k_refuses_a_bad_k(k, error, words):
    with pytest.raises(error, match=words):
        gating.top_k(torch.zeros(2, 3), k)


# --- ReLU -------------------------------------------------------------------


def test_relu_keeps_the_positive_part_and_nothing_else():
    logits = torch.tensor([[1.5, -2.0, 0.0], [-1.0, -1.0, -1.0]])
    assert gating.relu(logits).tolist() == [[1.5, 0.0, 0.0], [0.0, 0.0, 0.0]]


def test_relu_is_continuous_where_top_k_jumps():
    """ReLU gates move no more than the logits do (Lipschitz constant one)."""
    z, moved = draw(500, 4), draw(500, 4, seed=1)
    moves = (gating.relu(z) - gating.relu(moved)).abs()
    assert (moves <= (z - moved).abs()).all()


def test_relu_refuses_nan():
    with pytest.raises(ValueError, match="finite"):
        gating.relu(torch.tensor([[math.nan]]))

"""Gating: limits in the temperature, equivalences between gates, and refusals."""

import math

import pytest
import torch

from moebook import gating, routing, smoothing

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
    "smooth": lambda z: gating.smooth_top_k(z, min(2, z.shape[-1]), 0.3),
    "paper": lambda z: gating.smooth_top_k(z, 1, 0.3, "paper"),
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


# --- smooth top-k -----------------------------------------------------------

WINDOWS = ["paper", "cubic", "optimal"]


def smooth_by_hand(row, k, eps, sigma):
    threshold = sorted(row, reverse=True)[k - 1]
    shares = [min(max((z - threshold + eps) / eps, 0.0), 1.0) for z in row]
    weights = [math.exp(z) * sigma(u) for z, u in zip(row, shares, strict=True)]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("k", [1, 2, 5, 6])
@pytest.mark.parametrize("window", WINDOWS)
def test_smooth_top_k_is_its_formula(k, window):
    sigma = {
        "paper": lambda u: u / (u + (1 - u) ** 50),
        "cubic": lambda u: u * u * (3 - 2 * u),
        "optimal": lambda u: k * u / (k + 1 - u),
    }[window]
    for logits, eps in [(draw(200, 6), 0.7), (integers(200, 6, levels=4), 1.5)]:
        found = gating.smooth_top_k(logits, k, eps, window)
        expected = [smooth_by_hand(row, k, eps, sigma) for row in logits.tolist()]
        expected = torch.tensor(expected, dtype=torch.float64)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_no_width_is_top_k_and_an_infinite_one_is_the_softmax():
    for logits in (draw(300, 5), integers(300, 5, levels=3)):
        for k in (1, 2, 5):
            assert torch.equal(
                gating.smooth_top_k(logits, k, 0.0), gating.top_k(logits, k)
            )
            soft = gating.softmax(logits, 1.0)
            assert torch.equal(gating.smooth_top_k(logits, k, INF), soft)
            wide = gating.smooth_top_k(logits, k, 1e300)
            torch.testing.assert_close(wide, soft)
            all_active = gating.smooth_top_k(logits, 5, 0.3)
            torch.testing.assert_close(all_active, soft)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("eps", [5e-324, 1e-300, 1e-40, 1e-12, 1e30, 1e300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_smooth_gates_and_gradients_are_finite_at_every_width(window, eps, dtype):
    logits = torch.tensor([[0.0, 1.0, -4.0], [2.0, 2.0, 2.0]], dtype=dtype)
    logits.requires_grad_()
    gates = gating.smooth_top_k(logits, 2, eps, window)
    gates[:, 0].sum().backward()
    assert gates.isfinite().all() and logits.grad[0].isfinite().all()
    if eps < 1:
        torch.testing.assert_close(gates[0], gating.top_k(logits, 2)[0])
        assert gates[1, 0] == gates[1, 1] == gates[1, 2]


def test_where_nobody_is_in_the_window_nothing_changes():
    logits, eps = draw(2000, 6), 0.2
    clear = routing.gap(logits, 2) >= eps
    smooth = gating.smooth_top_k(logits, 2, eps)
    torch.testing.assert_close(smooth[clear], gating.top_k(logits, 2)[clear])
    assert (smooth[~clear] > 0).sum(1).min() == 3


def test_every_expert_of_the_neediest_token_is_kept():
    """The count is that of the logits: no cap, and not one too few."""
    logits = torch.tensor([[0.0, -0.1, -0.2, -0.3, -0.39, -0.41, -5.0]]).double()
    for k in range(1, 6):
        threshold = logits[0].sort(descending=True).values[k - 1]
        expected = int((logits > threshold - 0.31).sum())
        found = int((gating.smooth_top_k(logits, k, 0.31) > 0).sum())
        assert found == expected
    logits = draw(3000, 8)
    for k, eps in [(1, 0.3), (2, 0.21), (2, 2.0)]:
        threshold = logits.topk(k, dim=1).values[:, -1:]
        gates = gating.smooth_top_k(logits, k, eps)
        assert torch.equal(gates > 0, logits > threshold - eps)


def tie(order, above, K, seed=0):
    """A tie of this order at the threshold of k = 2, and a direction through it."""
    center = torch.full((K,), -5.0, dtype=torch.float64)
    center[:above] = 1.0
    center[above : above + order + 1] = 0.0
    return center, draw(1, K, seed)[0]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("order", "above"), [(1, 1), (2, 0), (2, 1), (3, 0), (3, 1)])
def test_smooth_gates_close_the_jump_at_ties_of_every_order(window, order, above):
    """Across a tie hard gates jump as far for each step, smooth ones ever less."""
    center, way = tie(order, above, K=6)
    steps = (1e-3, 1e-4, 1e-5)

    def jumps(gate):
        ends = [gate(center + h * way) - gate(center - h * way) for h in steps]
        return torch.stack([end.abs().max() for end in ends])

    hard = jumps(lambda z: gating.top_k(z[None], 2)[0])
    assert (hard > 0.2).all() and (hard / hard[0] - 1).abs().max() < 0.02
    smooth = jumps(lambda z: gating.smooth_top_k(z[None], 2, 0.3, window)[0])
    assert ((smooth[:-1] / smooth[1:] - 10).abs() < 1).all()
    assert smooth[2] < 1e-2


def largest_step(gate, points):
    t = torch.linspace(-3, 3, points, dtype=torch.float64)[:, None]
    return gate(draw(1, 6, 4) + t * draw(1, 6, 5)).diff(dim=0).abs().max().item()


def test_on_a_fine_line_only_continuous_windows_have_small_steps():
    """A window that ends at 0.9, or starts at 0.01, jumps: seen on the finer grids."""
    jumping = {
        "late": lambda u: torch.where(u >= 1, 1.0, 0.9 * u * u * (3 - 2 * u)),
        "early": lambda u: torch.where(u <= 0, 0.0, 0.01 + 0.99 * u * u * (3 - 2 * u)),
    }
    ratios = {}
    for name in [*WINDOWS, *jumping]:
        sigma = jumping.get(name, name)
        found = [
            largest_step(lambda z, s=sigma: gating.smooth_top_k(z, 2, 0.3, s), n)
            for n in (20001, 200001)
        ]
        ratios[name] = found[0] / found[1]
    hard = [largest_step(lambda z: gating.top_k(z, 2), n) for n in (20001, 200001)]
    assert hard[1] > 0.1 and hard[0] / hard[1] < 1.1
    assert all(9 < ratios[name] < 11 for name in WINDOWS)
    assert all(ratios[name] < 2 for name in jumping)


def test_the_gate_at_entry_is_true_to_float64():
    """u = 1e-8 gives a gate of 1e-8, not the 1e-6 of a clamped logarithm."""
    eps, u = 0.5, 1e-8
    gap = eps - u * eps
    logits = torch.tensor([[0.0, -gap]], dtype=torch.float64)
    u = (eps - gap) / eps  # the rounding of the gap itself is not at issue
    weight = math.exp(-gap) * u / (u + math.exp(50 * math.log1p(-u)))
    found = gating.smooth_top_k(logits, 1, eps, "paper")[0, 1].item()
    assert found == pytest.approx(weight / (1 + weight), rel=1e-14)
    assert found < 1e-8 < 1e-6


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("k", [1, 2, 5])
def test_smooth_gradients_are_those_of_the_forward_map(window, k):
    """To the logits through threshold and window, and to the width."""
    eps = torch.tensor(0.9, dtype=torch.float64, requires_grad=True)
    logits = draw(30, 6).requires_grad_()
    assert (gating.smooth_top_k(logits, k, eps) > 0).sum(1).max() > k

    def gate(z, eps):
        return gating.smooth_top_k(z, k, eps, window)

    assert torch.autograd.gradcheck(gate, (logits, eps))


def test_a_gradient_that_holds_the_window_fixed_is_another_one():
    z = torch.tensor([[0.4, 0.0, -0.1, -0.25]], dtype=torch.float64)

    def held(z, u_from, k=2, eps=0.4):
        below = u_from.topk(k, dim=1).values[:, -1:] - u_from
        weights = z.exp() * smoothing.cubic_window((eps - below) / eps)
        return (weights / weights.sum(1, keepdim=True))[0, 2]

    ours = z.clone().requires_grad_()
    gating.smooth_top_k(ours, 2, 0.4)[0, 2].backward()
    fixed = z.clone().requires_grad_()
    held(fixed, z).backward()
    slope = torch.zeros_like(z)
    for j in range(4):
        h = 1e-6 * torch.eye(4, dtype=torch.float64)[j]
        slope[0, j] = (held(z + h, z + h) - held(z - h, z - h)) / 2e-6
    torch.testing.assert_close(ours.grad, slope, rtol=1e-7, atol=1e-9)
    assert (fixed.grad - slope).abs().max() > 0.1


def test_at_entry_the_cubic_window_is_flat_and_the_others_have_a_kink():
    for window, slope in [("cubic", 0.0), ("paper", 1.0), ("optimal", 0.5)]:
        z = torch.tensor([[0.0, -0.5 * (1 - 1e-9)]], dtype=torch.float64)
        z.requires_grad_()
        gating.smooth_top_k(z, 1, 0.5, window)[0, 1].backward()
        expected = math.exp(-0.5) * slope / 0.5
        assert z.grad[0, 1].item() == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_a_third_expert_in_the_window_makes_a_kink_at_a_swap():
    """Two leaders swap at t = 0; the third sees the threshold |t|, which has a kink."""
    eps, gap, h = 0.2, 0.1, 1e-6

    def kink(window, gap):
        t = torch.tensor([-h, 0.0, h], dtype=torch.float64)
        z = torch.stack((t, -t, torch.full_like(t, -gap)), 1)
        left, center, right = gating.smooth_top_k(z, 1, eps, window)[:, 2].tolist()
        return (right - 2 * center + left) / h

    weight = math.exp(-gap) * 0.5  # cubic: sigma(1/2) = 1/2, with slope 3/2
    share = weight / (2 + weight)
    exact = -2 * (1.5 / eps) * math.exp(-gap) * (1 - share) / (2 + weight)
    assert kink("cubic", gap) == pytest.approx(exact, rel=1e-4)
    assert kink("cubic", 2 * eps) == 0


@pytest.mark.parametrize(("window", "arrival"), [("cubic", 0), ("optimal", 3 / 2)])
def test_a_swap_is_smooth_if_the_window_arrives_flat_or_if_two_share_alone(
    window, arrival
):
    """Second and third swap at t = 0: the first feels the slope at which sigma ends."""
    eps, h = 0.2, 1e-6
    t = torch.tensor([-h, 0.0, h], dtype=torch.float64)
    first = torch.full_like(t, 0.4)
    gate = gating.smooth_top_k(torch.stack((first, t, -t), 1), 2, eps, window)[:, 0]
    share = math.exp(0.4) / (math.exp(0.4) + 2)
    exact = 2 * 2 * arrival / eps * share / (math.exp(0.4) + 2)
    kink = gate.diff().diff().item() / h
    assert kink == pytest.approx(exact, rel=1e-4, abs=1e-4)
    # With k = 1 the two gates sum to one and mirror each other: no kink either way.
    alone = gating.smooth_top_k(torch.stack((t, -t), 1), 1, eps, window)[:, 0]
    assert abs(alone.diff().diff().item()) < 1e-9 * h


@pytest.mark.parametrize("window", WINDOWS)
def test_smooth_mixtures_obey_the_lipschitz_bound(window):
    """|dF| <= D osc(dz) [1/4 + (m/k) M / eps]; without the second term it fails."""
    k, eps, n = 2, 0.3, 4000
    z, way, outputs = draw(n, 6), draw(n, 6, 1), draw(6, 2, 2)
    gates, moved = torch.autograd.functional.jvp(
        lambda z: gating.smooth_top_k(z, k, eps, window), z, way
    )
    active = gates > 0
    pairs = active[:, :, None] & active[:, None, :]
    diameter = (torch.cdist(outputs, outputs) * pairs).amax((1, 2))
    low = way.masked_fill(~active, INF).amin(1)
    spread = way.masked_fill(~active, -INF).amax(1) - low
    slope = (moved @ outputs).norm(dim=1)
    extra = active.sum(1) - k
    steep = extra / k * smoothing.max_slope(window, k) / eps
    bound = diameter * spread
    assert (slope <= bound * (0.25 + steep) * (1 + 1e-6) + 1e-12).all()
    assert (slope > bound * 0.25 * (1 + 1e-6)).sum() > 100


@pytest.mark.parametrize(
    ("window", "constant"),
    [("cubic", 0.115907331), ("paper", 0.234723885), ("optimal", 1 / 12)],
)
def test_smooth_tends_to_hard_in_the_mean_and_never_uniformly(window, constant):
    """Two experts, outputs 0 and 1: the mean square is density x eps x constant."""
    for eps in (1e-3, 1e-5):
        gap = eps * (torch.arange(200000, dtype=torch.float64) + 0.5) / 200000
        z = torch.stack((torch.zeros_like(gap), -gap), 1)
        away = gating.smooth_top_k(z, 1, eps, window)[:, 1]
        assert away.square().mean().item() == pytest.approx(constant, rel=2 * eps)
        assert away.max().item() == pytest.approx(0.5, abs=1e-3)


def test_a_fine_width_is_resolved_for_half_precision_logits():
    for dtype in (torch.float16, torch.bfloat16):
        z = torch.tensor([[1.0, 1.0, 0.75, -3.0]], dtype=dtype)
        found = gating.smooth_top_k(z, 1, 0.5)
        exact = gating.smooth_top_k(z.double(), 1, 0.5)
        torch.testing.assert_close(found, exact.to(dtype), rtol=0, atol=0)
        assert found[0, 0] == found[0, 1] and found[0, 3] == 0


def test_the_search_for_the_threshold_knows_ties():
    for k in range(1, 7):
        z = integers(300, 6, levels=3)
        sorted_z = z.sort(dim=1, descending=True).values
        threshold = sorted_z[:, k - 1, None]
        found = gating.smooth_top_k(z, k, 0.5)
        assert torch.equal(found > 0, z >= threshold)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0, 0.1), ValueError, "from 1 to K = 3, got 0"),
        ((4, 0.1), ValueError, "got 4"),
        ((2, -0.1), ValueError, "eps must be a number >= 0"),
        ((2, math.nan), ValueError, "nan"),
        ((2, torch.ones(2)), TypeError, r"shape \(2,\)"),
        ((2, "0.1"), TypeError, "one real number"),
        ((2, 0.1, "cosine"), ValueError, "window must be one of"),
        ((2, 0.0, "cosine"), ValueError, "window must be one of"),
        ((2, 0.1, lambda u: u / 2), ValueError, "1 at u = 1"),
    ],
)
def test_smooth_top_k_refuses(arguments, error, words):
    with pytest.raises(error, match=words):
        gating.smooth_top_k(torch.zeros(2, 3), *arguments)


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

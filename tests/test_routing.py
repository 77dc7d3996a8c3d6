"""Routing: the affine map, gaps, active sets and tie orders, at ties and off them."""

import itertools
import math

import pytest
import torch

from moebook import routing

torch.set_num_threads(1)
INF = math.inf


def draw(n, K, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, K, generator=generator, dtype=dtype)


def integers(n, K, levels, seed=0):
    """Logits on a few integer levels: ties of every order are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(levels, (n, K), generator=generator).double()


# --- the affine router ------------------------------------------------------


def test_affine_is_weight_times_input_plus_bias():
    weight, bias, x = draw(3, 2, 1), draw(1, 3, 2)[0], draw(5, 2, 3)
    logits = routing.Affine(weight, bias)(x)
    for i, j in itertools.product(range(5), range(3)):
        by_hand = weight[j, 0] * x[i, 0] + weight[j, 1] * x[i, 1] + bias[j]
        torch.testing.assert_close(logits[i, j], by_hand)


def test_affine_without_bias_ties_all_experts_at_the_origin():
    router = routing.Affine(draw(4, 3))
    origin = torch.zeros(1, 3, dtype=torch.float64)
    assert torch.equal(router.bias, torch.zeros(4, dtype=torch.float64))
    assert routing.tie_order(router(origin), 2).tolist() == [3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_affine_keeps_dtype_and_takes_no_rows(dtype):
    router = routing.Affine(torch.ones(3, 2, dtype=dtype))
    logits = router(torch.zeros(0, 2, dtype=dtype))
    assert logits.shape == (0, 3)
    assert logits.dtype == router.bias.dtype == dtype


def test_affine_lets_gradients_through():
    weight = draw(3, 2).requires_grad_()
    bias = draw(1, 3)[0].requires_grad_()
    x = draw(4, 2, 5).requires_grad_()
    routing.Affine(weight, bias)(x).sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(3, 2))
    assert bias.grad.tolist() == [4.0] * 3
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(4, 2))


def test_affine_is_frozen_and_hashable():
    router = routing.Affine(draw(3, 2))
    with pytest.raises(AttributeError):
        router.weight = draw(3, 2)
    assert router in {router}


@pytest.mark.parametrize(
    ("weight", "bias", "error", "words"),
    [
        ([[1.0]], None, TypeError, "torch.as_tensor"),
        (torch.ones(2, 2, dtype=torch.int64), None, TypeError, r"int64.*double"),
        (torch.ones(3), None, ValueError, r"shape \(K, d\), got \(3,\)"),
        (torch.ones(0, 2), None, ValueError, "an expert"),
        (torch.ones(2, 0), None, ValueError, "an input"),
        (torch.tensor([[1.0, math.nan]]), None, ValueError, r"nan at \(0, 1\)"),
        (torch.ones(2, 2), torch.ones(3), ValueError, r"\(2,\).*\(3,\)"),
        (torch.ones(2, 2), torch.ones(2, 1), ValueError, r"\(2, 1\).*reshape\(2\)"),
        (torch.ones(2, 2), torch.tensor([0.0, INF]), ValueError, r"inf at \(1,\)"),
        (torch.ones(2, 2), torch.ones(2).double(), TypeError, "float64"),
        (torch.ones(2, 2), 1.0, TypeError, "bias.*float"),
    ],
)
def test_affine_refuses_bad_parameters(weight, bias, error, words):
    with pytest.raises(error, match=words):
        routing.Affine(weight, bias)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.ones(2, 3), ValueError, r"\(n, 2\).*\(3, 2\).*\(2, 3\)"),
        (torch.ones(2), ValueError, r"shape \(n, d\), got \(2,\)"),
        (torch.full((1, 2), math.nan), ValueError, "finite, got nan"),
        (torch.ones(1, 2).double(), TypeError, r"float32.*float64.*\.to"),
        ([[1.0, 2.0]], TypeError, "list"),
    ],
)
def test_affine_refuses_bad_inputs(x, error, words):
    with pytest.raises(error, match=words):
        routing.Affine(torch.ones(3, 2))(x)


# --- margin and gap ---------------------------------------------------------


def test_gap_is_the_difference_of_sorted_neighbours():
    logits = draw(200, 6)
    ordered = logits.sort(dim=1, descending=True).values
    for k in range(1, 6):
        assert torch.equal(routing.gap(logits, k), ordered[:, k - 1] - ordered[:, k])
    assert torch.equal(routing.margin(logits), routing.gap(logits, 1))


def test_gaps_add_up_to_the_spread():
    logits = integers(100, 5, levels=9)
    spread = logits.amax(1) - logits.amin(1)
    assert torch.equal(sum(routing.gap(logits, k) for k in range(1, 5)), spread)


def test_gap_without_a_rival_is_infinite():
    assert routing.margin(draw(3, 1)).tolist() == [INF] * 3
    assert routing.gap(draw(3, 4), 4).tolist() == [INF] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_gap_keeps_the_dtype(dtype):
    logits = torch.ones(2, 3, dtype=dtype)
    assert routing.gap(logits, 2).dtype == routing.gap(logits, 3).dtype == dtype


def test_gap_ignores_a_common_shift_and_the_order_of_experts():
    logits = integers(100, 5, levels=9)
    mixed = logits[:, torch.randperm(5, generator=torch.Generator().manual_seed(3))]
    for k in range(1, 6):
        assert torch.equal(routing.gap(logits, k), routing.gap(logits + 7.0, k))
        assert torch.equal(routing.gap(logits, k), routing.gap(mixed, k))


def test_margin_for_two_experts_is_the_absolute_score():
    logits = draw(100, 2)
    score = (logits[:, 0] - logits[:, 1]).abs()
    assert torch.equal(routing.margin(logits), score)


def test_gap_gradient_pushes_the_two_neighbours_apart():
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0]], requires_grad=True)
    routing.gap(logits, 2).sum().backward()
    assert logits.grad.tolist() == [[0.0, -1.0, 1.0, 0.0]]


def test_large_logits_do_not_pass_for_infinite_ones():
    logits = torch.tensor([[1e30, -1e30], [3e38, 3e38]])
    assert routing.margin(logits).tolist() == [float(torch.tensor(2e30)), 0.0]
    assert routing.margin(torch.tensor([[3e38, -3e38]])).tolist() == [INF]


# --- the active set ---------------------------------------------------------


def lowest_index_first(row, k):
    order = sorted(range(len(row)), key=lambda j: (-row[j], j))
    return [j in order[:k] for j in range(len(row))]


@pytest.mark.parametrize("k", range(1, 6))
def test_active_set_has_k_experts_and_breaks_ties_by_lowest_index(k):
    logits = integers(300, 5, levels=3)
    active = routing.active_set(logits, k)
    assert active.dtype == torch.bool
    assert active.tolist() == [lowest_index_first(row, k) for row in logits.tolist()]


def test_active_sets_grow_with_k():
    logits = integers(300, 6, levels=3)
    for k in range(1, 6):
        smaller, larger = (
            routing.active_set(logits, k),
            routing.active_set(logits, k + 1),
        )
        assert not (smaller & ~larger).any()


def test_active_set_off_ties_follows_a_permutation_of_experts():
    logits = draw(200, 6)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    permuted = routing.active_set(logits[:, order], 3)
    assert torch.equal(permuted, routing.active_set(logits, 3)[:, order])


def test_active_set_takes_the_two_zeros_for_one():
    assert routing.active_set(torch.tensor([[-0.0, 0.0]]), 1).tolist() == [
        [True, False]
    ]


def test_active_set_of_many_equal_experts():
    active = routing.active_set(torch.zeros(2, 1000), 7)
    assert active[:, :7].all() and active.sum().item() == 14


# --- the order of a tie -----------------------------------------------------


@pytest.mark.parametrize(
    ("row", "k", "order"),
    [
        ([3.0, 2.0, 1.0], 1, 0),
        ([2.0, 2.0, 1.0], 1, 1),
        ([2.0, 2.0, 1.0], 2, 0),  # ranks 1 and 2 tie, both active: no jump
        ([3.0, 1.0, 1.0], 1, 0),  # ranks 2 and 3 tie, both idle: no jump
        ([3.0, 1.0, 1.0], 2, 1),
        ([1.0, 1.0, 1.0], 1, 2),
        ([1.0, 1.0, 1.0], 2, 2),
        ([1.0, 1.0, 1.0], 3, 0),  # all active
        ([5.0, 1.0, 1.0, 1.0, 0.0], 2, 2),
        ([5.0, 1.0, 1.0, 1.0, 0.0], 3, 2),
        ([5.0, 1.0, 1.0, 1.0, 0.0], 4, 0),
        ([1.0], 1, 0),
        ([0.0, -0.0], 1, 1),
    ],
)
def test_tie_order_counts_experts_tied_across_the_threshold(row, k, order):
    found = routing.tie_order(torch.tensor([row]), k)
    assert found.dtype == torch.int64
    assert found.tolist() == [order]


@pytest.mark.parametrize("k", range(1, 6))
def test_tie_order_is_positive_exactly_where_the_active_set_is_ambiguous(k):
    logits = integers(300, 5, levels=3)
    order = routing.tie_order(logits, k)
    # Reversing the experts sends ties to the highest index: another choice.
    other = routing.active_set(logits.flip(1), k).flip(1)
    ambiguous = (other != routing.active_set(logits, k)).any(dim=1)
    assert torch.equal(order > 0, ambiguous)
    assert torch.equal(order > 0, routing.gap(logits, k) == 0)


def test_tie_order_is_the_number_of_ways_to_choose():
    """An order-n tie with c places left among n+1 experts has C(n+1, c) choices."""
    logits = integers(200, 5, levels=2)
    for k in range(1, 6):
        orders = routing.tie_order(logits, k).tolist()
        for row, order in zip(logits.tolist(), orders, strict=True):
            best = max(sum(c) for c in itertools.combinations(row, k))
            sets = itertools.combinations(range(5), k)
            choices = sum(sum(row[j] for j in chosen) == best for chosen in sets)
            above = sum(value > sorted(row)[-k] for value in row)
            assert choices == (math.comb(order + 1, k - above) if order else 1)


def test_tie_order_with_tolerance_looks_both_ways_from_the_kth_logit():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    assert routing.tie_order(logits, 2, tol=0.5).tolist() == [0]
    assert routing.tie_order(logits, 2, tol=1.0).tolist() == [2]
    assert routing.tie_order(logits, 1, tol=1.0).tolist() == [1]
    assert routing.tie_order(logits, 2, tol=INF).tolist() == [3]
    assert routing.tie_order(logits, 4, tol=INF).tolist() == [0]


def test_tie_order_with_tolerance_needs_someone_on_the_idle_side():
    logits = torch.tensor([[1.0, 1.0, 0.0]])
    assert routing.tie_order(logits, 2, tol=0.5).tolist() == [0]


def test_tie_order_grows_with_the_tolerance():
    logits = draw(200, 6)
    orders = [routing.tie_order(logits, 3, tol=tol) for tol in (0, 0.01, 0.1, 1, 10)]
    for smaller, larger in itertools.pairwise(orders):
        assert (smaller <= larger).all()


@pytest.mark.parametrize("tol", [-1.0, math.nan, None, "0"])
def test_tie_order_refuses_a_bad_tolerance(tol):
    with pytest.raises(ValueError, match="tol must be a number >= 0"):
        routing.tie_order(torch.zeros(1, 2), 1, tol=tol)


# --- refusals shared by all -------------------------------------------------

functions = pytest.mark.parametrize(
    "function", [routing.gap, routing.active_set, routing.tie_order]
)


@functions
@pytest.mark.parametrize(
    ("logits", "error", "words"),
    [
        (torch.zeros(3), ValueError, r"shape \(n, K\), got \(3,\).*\[None, :\]"),
        (torch.zeros(1, 2, 3), ValueError, r"got \(1, 2, 3\)"),
        (torch.zeros(3, 0), ValueError, "at least one expert"),
        (torch.tensor([[0.0, math.nan]]), ValueError, r"got nan at \(0, 1\)"),
        (torch.tensor([[INF, 0.0]]), ValueError, r"got inf at \(0, 0\)"),
        (torch.tensor([[INF, -INF]]), ValueError, "2 such value"),
        (torch.zeros(1, 2, dtype=torch.int32), TypeError, "int32"),
        (torch.zeros(1, 2, dtype=torch.complex64), TypeError, "complex64"),
        ([[0.0, 1.0]], TypeError, "list"),
    ],
)
def test_bad_logits_are_refused(function, logits, error, words):
    with pytest.raises(error, match=words):
        function(logits, 1)


@functions
@pytest.mark.parametrize(
    ("k", "error", "words"),
    [
        (0, ValueError, "from 1 to K = 3, got 0"),
        (4, ValueError, "from 1 to K = 3, got 4"),
        (-1, ValueError, "got -1"),
        (1.0, TypeError, "got 1.0 of type float"),
        (True, TypeError, "got True of type bool"),
        ("2", TypeError, "got '2' of type str"),
        (None, TypeError, "NoneType"),
        (torch.tensor(2.0), TypeError, "Tensor"),
        (torch.tensor([1, 2]), TypeError, "Tensor"),
    ],
)
def test_bad_k_is_refused(function, k, error, words):
    with pytest.raises(error, match=words):
        function(torch.zeros(2, 3), k)


@functions
def test_whole_numbers_of_other_libraries_pass(function):
    logits = draw(4, 3)
    assert torch.equal(function(logits, torch.tensor(2)), function(logits, 2))


@functions
@pytest.mark.parametrize("k", [1, 3])
def test_no_rows_give_no_rows(function, k):
    assert len(function(torch.zeros(0, 3), k)) == 0


def test_finite_numbers_whose_sum_overflows_pass():
    logits = torch.full((2, 3), 3e38)
    assert logits.sum().isinf()
    assert routing.margin(logits).tolist() == [0.0, 0.0]
    mixed = torch.tensor([[3e38, 3e38, -3e38, -3e38]])
    assert routing.gap(mixed, 1).tolist() == [0.0]

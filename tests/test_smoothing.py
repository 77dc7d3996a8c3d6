"""Smoothing: windows, their cost in slope and in experts, and the search for eps."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats
from truths import INF, generator, refuted

from moebook import gating, smoothing

torch.set_num_threads(1)
DOUBLE = torch.float64
NAMES = ["paper", "cubic", "optimal"]


def points(*values):
    return torch.tensor(values, dtype=DOUBLE)


def logits_of(law, n, E, seed=0):
    uniform = torch.rand(n, E, generator=generator(seed), dtype=DOUBLE)
    return torch.special.ndtri(uniform) if law == "normal" else -(-uniform.log()).log()


def extras(logits, k, eps):
    """Counted directly: all that lie less than eps below the k-th, the k left out."""
    threshold = logits.topk(k, dim=1).values[:, -1:]
    return (logits > threshold - eps).sum(1) - k


# --- windows ----------------------------------------------------------------


def test_log_smoothstep_has_exact_ends_and_the_right_inside():
    u = points(-INF, -1, 0, 1, 2, INF)
    assert smoothing.log_smoothstep(u).tolist() == [-INF] * 3 + [0.0] * 3
    for a, b in [(1, 50), (2, 2), (0.5, 3)]:
        for v in (0.01, 0.3, 0.9):
            exact = math.log(v**a / (v**a + (1 - v) ** b))
            assert smoothing.log_smoothstep(v, a, b).item() == pytest.approx(exact)


def test_log_smoothstep_is_true_to_float64_near_entry_and_near_the_tie():
    """At u = 1e-8 the log is -18.42, where a clamp at 1e-6 would say -13.8155."""
    u = 1e-8
    exact = math.log(u) - math.log(u + math.exp(50 * math.log1p(-u)))
    found = smoothing.log_smoothstep(u).item()
    assert found == pytest.approx(exact, rel=1e-15)
    assert abs(found + 13.8155) > 4
    # Beyond 20 a softplus drops e^-20; near one, -(1-u)^2 is all that is left.
    assert smoothing.log_smoothstep(math.exp(-30.0), 1, 1).item() == pytest.approx(
        -30, rel=1e-15
    )
    near = smoothing.log_smoothstep(1 - 2.0**-20, 2, 2).item()
    assert near == pytest.approx(-(2.0**-40), rel=1e-5)


def test_log_smoothstep_gradients_are_finite_everywhere():
    u = points(-1, 0, 1e-300, 1e-8, 0.5, 1 - 1e-16, 1, 2).requires_grad_()
    smoothing.log_smoothstep(u)[2:6].sum().backward()
    assert u.grad.isfinite().all()
    assert u.grad[[0, 1, 6, 7]].tolist() == [0.0] * 4
    inside = points(0.1, 0.4, 0.9).requires_grad_()
    assert torch.autograd.gradcheck(smoothing.log_smoothstep, (inside,))
    assert torch.autograd.gradgradcheck(smoothing.log_smoothstep, (inside,))


def test_half_weight_of_the_paper_window_comes_early():
    half = optimize.brentq(lambda u: u - (1 - u) ** 50, 0, 1)
    assert half == pytest.approx(0.0560133850)
    assert smoothing.window("paper")(points(half)).item() == pytest.approx(0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_windows_rise_from_zero_to_one(name, k):
    sigma = smoothing.window(name, k)
    u = torch.linspace(-0.5, 1.5, 2001, dtype=DOUBLE)
    values = sigma(u)
    assert (values[u <= 0] == 0).all() and (values[u >= 1] == 1).all()
    assert (values.diff() >= 0).all()
    assert sigma(u.float()).dtype == torch.float32


def test_the_optimal_window_makes_the_gate_linear():
    u = torch.linspace(0, 1, 101, dtype=DOUBLE)
    for k in (1, 2, 8):
        q = smoothing.optimal_window(u, k)
        torch.testing.assert_close(q / (k + q), u / (k + 1))
        cubic = smoothing.cubic_window(u)
        assert (cubic / (k + cubic) - u / (k + 1)).abs().max() > 0.009


def test_a_window_of_your_own_must_reach_its_ends():
    mine = smoothing.window(lambda u: u.clamp(0, 1) ** 3)
    assert mine(points(0.5)).item() == 0.125
    with pytest.raises(ValueError, match=r"0 at u = 0 and 1 at u = 1.*0\.9"):
        smoothing.window(lambda u: 0.9 * u)
    with pytest.raises(ValueError, match=r"paper, cubic, optimal.*'cosine'"):
        smoothing.window("cosine")


@pytest.mark.parametrize(("a", "b"), [(0, 1), (1, -2), (math.nan, 1)])
def test_exponents_that_do_not_rise_are_refused(a, b):
    with pytest.raises(ValueError, match="a, b > 0"):
        smoothing.log_smoothstep(0.5, a, b)


@pytest.mark.parametrize("k", [0, -1, INF, True, "2"])
def test_a_window_beside_no_leader_is_refused(k):
    with pytest.raises(ValueError, match="at least 1"):
        smoothing.optimal_window(0.5, k)
    with pytest.raises(ValueError, match="at least 1"):
        smoothing.lipschitz("cubic", k)


# --- slopes -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cubic", [0.852907394, 0.524706, 0.167386]),
        ("paper", [9.303202298, 6.069608, 1.986280]),
        ("optimal", [1 / 2, 1 / 3, 1 / 9]),
    ],
)
def test_the_largest_slope_of_a_gate(name, expected):
    found = [smoothing.lipschitz(name, k) for k in (1, 2, 8)]
    assert found == pytest.approx(expected, rel=4e-6)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 2, 8])
def test_no_window_is_flatter_than_the_optimal_one(name, k):
    """The gate must climb to 1/(k+1) within eps: its mean slope is that."""
    least = 1 / (k + 1)
    assert smoothing.lipschitz(name, k) >= least * (1 - 1e-12)
    assert (smoothing.lipschitz(name, k) > 1.4 * least) == (name != "optimal")


@pytest.mark.parametrize("eps", [1.0, 0.1, 0.01])
def test_the_slope_at_a_finite_width_is_that_of_the_gates(eps):
    for name in NAMES:
        s = torch.linspace(0, eps, 20001, dtype=DOUBLE)
        z = torch.stack((torch.zeros_like(s), -s), 1).requires_grad_()
        gating.smooth_top_k(z, 1, eps, name)[:, 1].sum().backward()
        steepest = eps * z.grad[:, 1].abs().max().item()
        assert smoothing.lipschitz(name, 1, eps) == pytest.approx(steepest, rel=1e-4)


def test_max_slope_of_known_windows():
    assert smoothing.max_slope("cubic") == pytest.approx(1.5)
    assert smoothing.max_slope("paper") == pytest.approx(17.7563907566)
    assert smoothing.max_slope("optimal", 2) == pytest.approx(1.5)
    assert smoothing.max_slope(lambda u: u**2) == pytest.approx(2)


def test_no_slope_of_an_infinite_window():
    with pytest.raises(ValueError, match="finite"):
        smoothing.lipschitz("cubic", 1, INF)


# --- extra experts ----------------------------------------------------------

TABLE = [
    (2, 1, 0.953872552409, 0.5641895835),
    (8, 1, 0.3050114420, 1.4236003060),
    (8, 2, 0.2075367891, 2.2758251686),
    (16, 2, 0.1515806539, 3.0507356163),
    (64, 8, 0.0379025776, 12.9148866881),
    (128, 8, 0.0314840220, 15.5087998691),
    (256, 8, 0.0273803815, 17.8071304873),
]


@pytest.mark.parametrize(("E", "k", "eps", "slope"), TABLE)
def test_the_budget_table(E, k, eps, slope):
    assert smoothing.budget_eps(E, k) == pytest.approx(eps, rel=1e-8)
    zero = torch.zeros((), dtype=DOUBLE, requires_grad=True)
    (found,) = torch.autograd.grad(smoothing.extra_experts(E, k, zero), zero)
    assert found.item() == pytest.approx(slope, rel=1e-8)


def mean_by_quad(E, k, eps):
    """The integral as first written, on few standard deviations round its peak."""
    peak = stats.norm.ppf(1 - k / E) if k < E else 0.0
    constant = math.exp(special.gammaln(E + 1) - special.gammaln(E - k))

    def inside(x):
        both = special.ndtr(x) - special.ndtr(x - eps)
        rest = special.ndtr(x) ** (E - k - 1) * special.ndtr(-x) ** (k - 1)
        return stats.norm.pdf(x) * rest * both / math.factorial(k - 1)

    pieces = np.linspace(peak - 9, peak + 9, 37)
    parts = [integrate.quad(inside, *ends)[0] for ends in pairwise(pieces)]
    return constant * sum(parts)


@pytest.mark.parametrize(
    ("E", "k", "eps"), [(3, 1, 0.1), (3, 2, 0.1), (64, 8, 0.2), (16, 15, 3.0)]
)
def test_extra_experts_are_the_integral_over_pairs(E, k, eps):
    found = smoothing.extra_experts(E, k, eps)
    assert found == pytest.approx(mean_by_quad(E, k, eps), rel=1e-9)


def test_two_experts_and_the_asymmetry_in_k():
    for eps in (0.01, 0.5, 4.0):
        exact = math.erf(eps / 2)
        assert smoothing.extra_experts(2, 1, eps) == pytest.approx(exact, rel=1e-13)
    first, second = (smoothing.extra_experts(3, k, 0.1) for k in (1, 2))
    assert (first, second) == pytest.approx((0.085934376, 0.083181557))


@pytest.mark.parametrize("law", ["normal", "gumbel"])
@pytest.mark.parametrize(("E", "k"), [(2, 1), (8, 2), (8, 7), (64, 8)])
def test_half_an_extra_expert_is_seen_in_draws(law, E, k):
    """The budget by simulation; the other law, both sides and the slope are refuted."""
    eps = smoothing.budget_eps(E, k, law=law)
    logits = logits_of(law, 2**21 // E, E)
    count = extras(logits, k, eps).double()
    assert not refuted(count, 0.5)
    other = "gumbel" if law == "normal" else "normal"
    assert refuted(count, smoothing.extra_experts(E, k, eps, other))
    threshold = logits.topk(k, dim=1).values[:, -1:]
    assert refuted(((logits - threshold).abs() < eps).sum(1).double() - 1, 0.5) or (
        k == 1
    )


@pytest.mark.parametrize("law", ["normal", "gumbel"])
@pytest.mark.parametrize(("E", "k"), [(4, 2), (8, 1), (64, 8)])
def test_the_law_of_extra_experts_is_seen_in_draws(law, E, k):
    eps = smoothing.budget_eps(E, k, law=law)
    tails = smoothing.extra_law(E, k, eps, law)
    assert tails.shape == (E - k + 1,) and tails[0] == 1
    count = extras(logits_of(law, 2**21 // E, E, seed=1), k, eps)
    if (E, k) == (8, 1):
        assert refuted((count >= 1).double(), stats.poisson.sf(0, 0.5))
    for n in (1, 2):
        seen = (count >= n).double()
        assert not refuted(seen, tails[n].item())
        assert refuted(seen, 1.15 * tails[n].item())


@pytest.mark.parametrize("law", ["normal", "gumbel"])
@pytest.mark.parametrize(
    ("E", "k"), [(1, 1), (2, 1), (3, 2), (8, 2), (64, 8), (64, 63), (1024, 2)]
)
def test_the_law_has_the_mean(law, E, k):
    for eps in (0.0, 0.01, 0.3, 5.0, INF):
        tails = smoothing.extra_law(E, k, eps, law)
        mean = smoothing.extra_experts(E, k, eps, law)
        assert tails[1:].sum().item() == pytest.approx(mean, rel=1e-11, abs=1e-14)
        assert (tails.diff() <= 1e-15).all()


def test_gumbel_closed_forms():
    for E in (2, 3, 8, 64):
        exact = math.log(1 + E / (2 * E - 3))
        assert smoothing.budget_eps(E, 1, law="gumbel") == pytest.approx(exact)
    growth = math.expm1(0.1)
    none = math.prod((8 - j) / (8 - j + 6 * growth) for j in range(2))
    tails = smoothing.extra_law(8, 2, 0.1, "gumbel")
    assert tails[1].item() == pytest.approx(1 - none, rel=1e-12)
    assert smoothing.extra_experts(8, 2, 0.1, "gumbel") == pytest.approx(0.165514426)


def test_at_a_fixed_budget_second_extras_do_not_vanish():
    """Many Gumbel experts: negative binomial with q = 2k/(2k+1), not Poisson(1/2)."""
    for k in (1, 2, 5):
        E = 4000
        tails = smoothing.extra_law(
            E, k, smoothing.budget_eps(E, k, law="gumbel"), "gumbel"
        )
        q = 2 * k / (2 * k + 1)
        limit = [1 - q**k, 1 - q**k - k * q**k * (1 - q)]
        assert tails[1:3].tolist() == pytest.approx(limit, rel=2e-3)
        poisson = [stats.poisson.sf(0, 0.5), stats.poisson.sf(1, 0.5)]
        assert tails[1:3].tolist() != pytest.approx(poisson, rel=5e-3)
    law = smoothing.extra_law(64, 1, smoothing.budget_eps(64, 1))
    assert (law[2] / law[1]).item() == pytest.approx(0.309, abs=5e-4)


def test_extra_experts_take_tensors_and_are_differentiable():
    eps = points(0.0, 0.1, 2.0)
    for law in ("normal", "gumbel"):
        both = smoothing.extra_experts(8, 2, eps, law)
        assert both.dtype == DOUBLE and both.shape == (3,)
        one = [smoothing.extra_experts(8, 2, e, law) for e in eps.tolist()]
        assert both.tolist() == pytest.approx(one, rel=1e-14)
        assert isinstance(one[0], float) and one[0] == 0.0
        assert torch.autograd.gradcheck(
            lambda e, law=law: smoothing.extra_experts(8, 2, e, law),
            (points(0.1, 2.0).requires_grad_(),),
        )


def test_all_active_leaves_no_extra_and_a_wide_window_leaves_all():
    for law in ("normal", "gumbel"):
        assert smoothing.extra_experts(5, 5, 0.3, law) == 0
        assert smoothing.extra_experts(5, 2, INF, law) == pytest.approx(3)
        assert smoothing.extra_experts(5, 2, 900.0, law) == pytest.approx(3)


def test_a_million_experts_are_no_trouble():
    E = 10**6
    eps = smoothing.budget_eps(E, 100)
    assert smoothing.extra_experts(E, 100, eps) == pytest.approx(0.5, rel=1e-9)
    # Near the k-th largest the hazard is about its quantile: k (e^(hazard eps) - 1).
    hazard = -stats.norm.ppf(100 / E)
    assert 100 * math.expm1(hazard * eps) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2, 3, 0.1), ValueError, "k must be from 1 to 2, got 3"),
        ((2, 0, 0.1), ValueError, "k must be from 1 to 2, got 0"),
        ((2.0, 1, 0.1), TypeError, "E must be an int, got 2.0"),
        ((2, True, 0.1), TypeError, "True"),
        ((2, 1, -0.1), ValueError, "eps must be a number >= 0"),
        ((2, 1, math.nan), ValueError, "nan"),
        ((2, 1, 0.1, "cauchy"), ValueError, "normal, gumbel, got 'cauchy'"),
    ],
)
def test_bad_requests_are_refused(arguments, error, words):
    for function in (smoothing.extra_experts, smoothing.extra_law):
        with pytest.raises(error, match=words):
            function(*arguments)


@pytest.mark.parametrize("budget", [0.0, -1.0, 6.0, math.nan])
def test_a_budget_out_of_reach_is_refused(budget):
    with pytest.raises(ValueError, match="between 0 and E - k = 6"):
        smoothing.budget_eps(8, 2, budget)


def test_one_law_for_one_width():
    with pytest.raises(ValueError, match=r"one number, got shape \(2,\)"):
        smoothing.extra_law(8, 2, points(0.1, 0.2))


@pytest.mark.parametrize(
    ("eps", "error", "words"),
    [
        (torch.ones(2), TypeError, r"shape \(2,\)"),
        ("0.1", TypeError, "'0.1'"),
        (True, TypeError, "bool"),
        (-1.0, ValueError, ">= 0"),
        (math.nan, ValueError, "nan"),
    ],
)
def test_bad_widths_are_refused(eps, error, words):
    with pytest.raises(error, match=words):
        smoothing.check_width(eps)


# --- the search for eps -----------------------------------------------------


def test_the_gradient_of_the_boundary_loss_is_the_excess():
    eps = points(0.3)[0].requires_grad_()
    active = torch.tensor([2, 2, 3, 5])
    loss = smoothing.boundary_loss(active, eps, 2, budget=0.5, alpha=4)
    assert loss.item() == pytest.approx(0.3 * 4 * (3 - 2.5))
    loss.backward()
    assert eps.grad.item() == 4 * (3 - 2.5)


@pytest.mark.parametrize("active", [torch.zeros(0), torch.zeros(2, 3)])
def test_a_loss_without_counts_is_refused(active):
    with pytest.raises(ValueError, match=r"gates > 0"):
        smoothing.boundary_loss(active, torch.tensor(0.1), 2)


def settle(count, start=0.05):
    """Robbins and Monro: eps after 3000 batches of 256 and falling steps."""
    eps = points(start)[0].requires_grad_()
    source, late = generator(3), []
    for t in range(3000):
        logits = torch.randn(256, 8, generator=source, dtype=DOUBLE)
        loss = smoothing.boundary_loss(count(logits, eps.detach()), eps, 2)
        (slope,) = torch.autograd.grad(loss, eps)
        with torch.no_grad():
            eps -= 0.05 / (1 + t / 100) * slope
        late.append(eps.item())
    return np.mean(late[1500:])


def test_descent_on_the_boundary_loss_finds_the_budget():
    """The leaders count: without them the same search settles at 2.5 extra experts."""
    root = smoothing.budget_eps(8, 2)
    found = settle(
        lambda z, eps: (gating.smooth_top_k(z, 2, eps) > 0).sum(1), start=0.6
    )
    assert found == pytest.approx(root, rel=0.02)
    wrong = settle(lambda z, eps: extras(z, 2, eps))
    assert wrong == pytest.approx(smoothing.budget_eps(8, 2, 2.5), rel=0.02)

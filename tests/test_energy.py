"""energy: quadratures against fractions, other integrals and simulated modules."""

import itertools
import math

import pytest
import sympy as sp
import torch
from scipy import integrate, special, stats
from truths import DOUBLE, assert_mean, generator, refuted

from moebook.energy import (
    energy_samples,
    hard_router_risk,
    routing_accuracy,
    soft_router_risk,
)
from moebook.isotropic import isotropic_dense, isotropic_sparse
from moebook.modular import block_features
from moebook.rationals import exact_router

EVEN = [(1, 2, "1/3"), (2, 4, "1/2"), (4, 2, "1"), (4, 8, "1/4"), (8, 16, "1/2")]


@pytest.mark.parametrize(("K", "p", "nu"), EVEN)
def test_fractions_and_quadratures(K, p, nu):
    accuracy, risk = exact_router(K, p, sp.Rational(nu))
    nu = float(sp.Rational(nu))
    assert float(routing_accuracy(K, p, nu)) == pytest.approx(
        float(accuracy), abs=1e-13
    )
    assert float(hard_router_risk(K, p, nu)) == pytest.approx(float(risk), abs=1e-13)


def test_fractions_by_hand():
    # Two exponential energies, means 1 + nu and nu: chance and mean of the larger.
    nu = sp.Rational(1, 3)
    u, v = sp.symbols("u v", positive=True)
    law = sp.exp(-u / (2 + 2 * nu)) / (2 + 2 * nu) * sp.exp(-v / 2 / nu) / 2 / nu
    inner = sp.integrate(law, (v, 0, u))
    accuracy = sp.integrate(sp.expand(inner), (u, 0, sp.oo))
    right = sp.integrate(sp.expand(u * inner), (u, 0, sp.oo))
    wrong = sp.integrate(sp.expand(sp.integrate(law, (u, 0, v)) * v), (v, 0, sp.oo))
    risk = 1 + (wrong - right) / (1 + nu) ** 2 / 2
    assert exact_router(2, 2, nu) == (accuracy, sp.nsimplify(risk))
    assert exact_router(2, 4, sp.Rational(1, 2))[0] == sp.Rational(27, 32)


@pytest.mark.parametrize(("K", "p", "nu"), [(2, 1, 1.0), (5, 3, 0.2), (3, 40, 2.0)])
def test_accuracy_by_another_integral(K, p, nu):
    law = stats.chi2(p)

    def inside(z):  # over the chance of the live block, whose root is smooth
        u = law.ppf(z**2)
        return 2 * z * law.cdf(u * (1 + nu) / nu) ** (K - 1)

    truth, error = integrate.quad(inside, 0, 1, epsabs=1e-12, limit=200)
    assert abs(float(routing_accuracy(K, p, nu)) - truth) < 1e-9 + 5 * error


def test_a_pair_of_single_features():
    # |N(0, 2)| > |N(0, 1)|: the angle of a Gaussian pair.
    truth = 2 / math.pi * math.atan(math.sqrt(2))
    assert float(routing_accuracy(2, 1, 1.0)) == pytest.approx(truth, abs=1e-13)


def soft_by_nesting(nu):
    """K = 2, p = 2: exponential energies, in two nested integrals."""
    c = 1 / (2 * nu * (1 + nu))

    def pieces(f, *ends):
        pairs = itertools.pairwise(ends)
        return sum(integrate.quad(f, *p, epsabs=1e-13, epsrel=1e-11)[0] for p in pairs)

    def live(u):
        def lost(v):
            return math.exp(-v / (2 * nu)) / (2 * nu) * special.expit(c * (v - u))

        gate = 1 - pieces(lost, 0, u, u + 4 * nu, u + 60 * nu)
        return u * math.exp(-u / (2 + 2 * nu)) / (2 + 2 * nu) * gate

    ends = [(1 + nu) * end for end in (0, 0.1, 0.5, 2, 8, 24, 70)]
    return 1 - pieces(live, *ends) / (2 * (1 + nu) ** 2)


@pytest.mark.parametrize("nu", [0.1, 0.5, 3.0])
def test_soft_risk_by_nested_integrals(nu):
    truth = soft_by_nesting(nu)
    assert float(soft_router_risk(2, 2, nu)) == pytest.approx(truth, abs=1e-9)


CASES = [(2, 4, 0.5), (4, 8, 0.25), (2, 1, 1.0), (4, 2, 1.0), (8, 2, 0.125)]


@pytest.mark.parametrize(("K", "p", "nu"), CASES)
def test_the_chain_of_risks(K, p, nu):
    """Oracle <= soft <= hard and dense; hard above dense where routing is poor."""
    oracle, dense = float(isotropic_sparse(nu)), float(isotropic_dense(K, nu))
    soft, hard = float(soft_router_risk(K, p, nu)), float(hard_router_risk(K, p, nu))
    assert oracle < soft < min(hard, dense)
    assert (hard > dense) == ((K, p) in ((2, 1), (4, 2)))


@pytest.mark.parametrize(("K", "p", "nu"), CASES)
def test_samples_have_these_means(K, p, nu):
    found = energy_samples(K, p, nu, 150_000, generator(K + p))
    assert_mean(found.soft, float(soft_router_risk(K, p, nu)), off=0.03)
    assert_mean(found.hard, float(hard_router_risk(K, p, nu)), off=0.05)
    assert_mean(found.correct, float(routing_accuracy(K, p, nu)), off=0.03)


def test_simulated_modules_and_labels():
    """Nothing averaged out: labels, experts, router and posterior on drawn features."""
    K, p, nu, n = 4, 2, 0.5, 400_000
    draw = block_features(n, generator(7), [1 / K] * K, [torch.eye(p)] * K, nu)
    y = draw.clean.view(n, K, p)[..., 0].sum(1)
    seen = draw.seen.view(n, K, p)
    energy = (seen**2).sum(2)
    answers = seen[..., 0] / (1 + nu)
    chosen = energy.argmax(1)
    hard = (y - answers.gather(1, chosen[:, None])[:, 0]) ** 2
    gates = torch.softmax((1 / nu - 1 / (1 + nu)) / 2 * energy, 1)
    soft = (y - (gates * answers).sum(1)) ** 2
    assert_mean(hard, float(hard_router_risk(K, p, nu)))
    assert_mean(soft, float(soft_router_risk(K, p, nu)))
    assert_mean((chosen == draw.module), float(routing_accuracy(K, p, nu)), off=0.01)
    assert refuted(hard, float(isotropic_sparse(nu)))
    # A wrong expert adds its noise; it is not a silent one.
    right = float(routing_accuracy(K, p, nu))
    silent = right * float(isotropic_sparse(nu)) + 1 - right
    assert refuted(hard, silent)


def test_another_noise_in_use():
    K, p, nu, test, n = 3, 2, 0.25, 1.0, 400_000
    draw = block_features(n, generator(3), [1 / K] * K, [torch.eye(p)] * K, test)
    y = draw.clean.view(n, K, p)[..., 0].sum(1)
    seen = draw.seen.view(n, K, p)
    chosen = (seen**2).sum(2).argmax(1)
    answers = seen[..., 0] / (1 + nu)
    loss = (y - answers.gather(1, chosen[:, None])[:, 0]) ** 2
    assert_mean(loss, float(hard_router_risk(K, p, nu, test)))
    assert refuted(loss, float(hard_router_risk(K, p, test)))
    same = hard_router_risk(K, p, nu, [nu, test])
    assert float(same[0]) == float(hard_router_risk(K, p, nu))


def test_limits():
    assert float(routing_accuracy(4, 8, 1e-9)) == pytest.approx(1, abs=1e-12)
    assert float(routing_accuracy(4, 8, 1e9)) == pytest.approx(1 / 4, abs=1e-7)
    assert float(routing_accuracy(1, 3, 0.5)) == pytest.approx(1, abs=1e-13)
    for risk in (hard_router_risk, soft_router_risk):
        alone = float(risk(1, 3, 0.5))
        assert alone == pytest.approx(1 / 3, abs=1e-12)
        # Many features tell the module: the oracle's risk.
        assert float(risk(2, 500, 0.5)) == pytest.approx(1 / 3, abs=1e-9)
    assert float(soft_router_risk(4, 2, 1e4)) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("call", [routing_accuracy, hard_router_risk, soft_router_risk])
def test_shapes_and_gradients(call):
    nu = torch.tensor([[0.3, 1.0]], dtype=DOUBLE, requires_grad=True)
    found = call(3, 3, nu)
    assert found.shape == (1, 2) and found.dtype == DOUBLE
    (slope,) = torch.autograd.grad(found.sum(), nu)
    step = (call(3, 3, nu.detach() + 1e-5) - call(3, 3, nu.detach() - 1e-5)) / 2e-5
    assert torch.allclose(slope, step, rtol=1e-6, atol=1e-9)
    assert call(3, 3, torch.empty(0)).shape == (0,)


def test_samples_shapes():
    none = energy_samples(3, 2, 0.5, 0, generator())
    assert {name: tuple(v.shape) for name, v in none._asdict().items()} == {
        "soft": (0,),
        "hard": (0,),
        "correct": (0,),
    }
    single = energy_samples(3, 2, 0.5, 9, generator(), dtype=torch.float32)
    assert all(v.dtype == torch.float32 for v in single)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: routing_accuracy(0, 2, 1.0), ValueError, "K must be at least 1"),
        (lambda: routing_accuracy(2, 0, 1.0), ValueError, "p must be at least 1"),
        (lambda: hard_router_risk(2.5, 2, 1.0), TypeError, "K must be an int, got 2.5"),
        (lambda: hard_router_risk(2, True, 1.0), TypeError, "p must be an int"),
        (lambda: soft_router_risk(2, 2, 0.0), ValueError, "nu must be positive"),
        (lambda: soft_router_risk(2, 2, -1.0), ValueError, "nu must be >= 0"),
        (lambda: hard_router_risk(2, 2, 1.0, float("inf")), ValueError, "finite"),
        (lambda: exact_router(2, 3, 1), ValueError, "p must be even"),
        (lambda: energy_samples(2, 2, 1.0, -1, generator()), ValueError, "at least 0"),
        (lambda: energy_samples(2, 2, 1.0, 5, 0), TypeError, "Generator"),
        (lambda: energy_samples(2, 2, [1.0], 5, generator()), ValueError, "one number"),
    ],
)
def test_what_is_refused(call, kind, match):
    with pytest.raises(kind, match=match):
        call()

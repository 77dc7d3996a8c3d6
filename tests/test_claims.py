"""The evidence core: its truth table, its errors, and its two error rates, counted."""

import math

import pytest
import sympy as sp
import torch
from scipy.special import ndtr

from moebook import Claim, Estimate, Z, claims, estimate, wording

HALF = sp.Rational(1, 2)


def claim(relation="=", target=HALF):
    return Claim("coin", "p", relation, target)


def at(value, stderr=0.01, bias=0.0):
    return Estimate(value, stderr, bias)


@pytest.mark.parametrize(
    ("relation", "evidence", "control", "outcome"),
    [
        ("=", at(0.5), at(0.6), "holds"),
        ("=", at(0.5), at(0.52), "unresolved"),
        ("=", at(0.6), at(0.9), "refuted"),
        ("=", at(0.6), at(0.5), "refuted"),
        ("=", at(0.6, bias=0.06), at(0.9), "holds"),
        ("<=", at(0.1), at(0.6), "holds"),
        ("<=", at(0.1), at(0.4), "unresolved"),
        ("<=", at(0.6), at(0.9), "refuted"),
        (">=", at(0.9), at(0.4), "holds"),
        (">=", at(0.4), at(0.1), "refuted"),
        ("=", HALF, sp.sqrt(2), "holds"),
        ("=", HALF, HALF, "unresolved"),
        ("=", sp.sqrt(2), HALF / 3, "refuted"),
        ("<=", HALF / 2, sp.Integer(1), "holds"),
        ("=", at(0.5), sp.Integer(1), "holds"),
        ("=", at(0.5), sp.Rational(52, 100), "unresolved"),
    ],
)
def test_truth_table(relation, evidence, control, outcome):
    found = claim(relation).check(evidence, control=control)
    assert found.outcome == outcome
    assert (found.record()["outcome"], repr(found)) == (
        outcome,
        f"coin ({found.kind}): {outcome}",
    )


def test_every_control_must_be_refuted():
    controls = {"near": at(0.6), "far": at(0.5)}
    assert claim().check(at(0.5), control=controls).outcome == "unresolved"


def test_kinds():
    def kind(evidence):
        return claim().check(evidence, control=at(0.9)).kind

    assert kind(HALF) == "exact"
    assert kind(Estimate(0.5, 0, bias=1e-9)) == "computed"
    assert kind(at(0.5)) == kind(estimate.proportion(0, 10)) == "sampled"


def test_resolution_is_five_standard_errors_and_the_bias():
    assert at(0.3, 0.01, 0.2).resolution == pytest.approx(Z * 0.01 + 0.2, rel=1e-12)


def test_algebra_proves_a_zero_that_digits_cannot():
    identity = sp.sin(1) ** 2 + sp.cos(1) ** 2
    found = claim(target=sp.Integer(1)).check(identity, control=sp.cos(1))
    assert found.outcome == "holds"
    # Equal to 40 digits, yet different: neither digits to 30 nor algebra say so.
    near = HALF + sp.Integer(10) ** -40
    assert claim().check(near, control=sp.Integer(1)).outcome == "unresolved"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: claim("<"), ValueError, "is one of"),
        (
            lambda: Claim("c", "p", "=", HALF, stance="likes"),
            ValueError,
            "stance",
        ),
        (lambda: claim(target=0.5), TypeError, "SymPy number"),
        (lambda: claim(target=1 / sp.Symbol("a")), ValueError, r"depends on \['a'\]"),
        (lambda: claim(target=sp.oo), ValueError, "finite"),
        (lambda: claim(target=sp.nan), ValueError, "finite"),
        (lambda: claim(target=sp.I), ValueError, "finite real"),
        (lambda: claim(target=sp.true), TypeError, "SymPy number"),
        (lambda: claim().check(0.5, control=HALF), TypeError, "bare float"),
        (lambda: claim().check(sp.Float(0.5), control=HALF), TypeError, "not exact"),
        (lambda: claim().check(at(0.5), control={}), ValueError, "without a control"),
        (lambda: claim().check(at(0.5)), TypeError, "control"),
        (lambda: Estimate(math.nan, 1), ValueError, "finite value"),
        (lambda: Estimate(0, math.inf), ValueError, "finite stderr"),
        (lambda: Estimate(0, -1), ValueError, "negative"),
        (lambda: Estimate(0, 0), ValueError, "no error"),
    ],
)
def test_errors_teach(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_verdict_has_no_truth_value_by_accident():
    found = claim().check(at(0.5), control=at(0.9))
    assert "__bool__" not in type(found).__dict__
    data, metadata = found._repr_mimebundle_()
    assert data["text/plain"] == "coin (sampled): holds"
    assert metadata["moebook"]["controls"][0]["value"] == 0.9


def test_advice_names_the_factor_by_which_the_sample_must_grow():
    # Error bar 0.05 against a control 0.02 away: (0.05 / 0.02)^2 = 6.25.
    found = claim().check(at(0.5), control={"near": at(0.52)})
    assert "about 6.2 times" in found.table()
    biased = claim().check(at(0.5, bias=0.03), control={"near": at(0.52, bias=0.03)})
    assert "bias bound" in biased.table()


def test_pipes_do_not_break_the_table():
    norm = Claim("norm", r"P(|s|\le 1)/\|u\|", "=", HALF)
    table = norm.check(at(0.5), control={"|s| for s": at(0.9)}).table()
    assert r"$P(\vert s\vert \le 1)/\Vert u\Vert  = \frac{1}{2}$" in table
    assert r"control: \|s\| for s" in table


# --- calibration: the two error rates ---------------------------------------------

SIMULATIONS, SIZE = 10_000, 1_000


def simulated_means(mean, seed):
    generator = torch.Generator().manual_seed(seed)
    shape = (SIMULATIONS, SIZE)
    samples = mean + torch.rand(shape, generator=generator) - 0.5
    return [estimate.mean(row) for row in samples]


def share(truths, evidence):
    refuted = sum(claim(target=truths).judge(one) == "refuted" for one in evidence)
    return estimate.proportion(refuted, len(evidence))


@pytest.mark.parametrize("z", [1.0, 2.0])
def test_true_claims_are_refuted_at_the_nominal_rate(monkeypatch, z):
    """Counted at a lower Z, where 10^4 claims suffice to see the rate.

    The nominal rate is that of a normal. A uniform sample has no skewness and excess
    kurtosis -6/5, so the studentised mean differs from it by the 1/n term of its
    Edgeworth expansion, at most phi(z) (z^3 + z) / n here.
    """
    evidence = simulated_means(0.5, seed=1)
    assert not any(one.warning for one in evidence)
    monkeypatch.setattr(claims, "Z", z)
    refuted = sum(claim().judge(one) == "refuted" for one in evidence)
    monkeypatch.undo()
    density = math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    found = estimate.proportion(
        refuted, len(evidence), bias=density * (z**3 + z) / SIZE
    )
    nominal = 2 * float(ndtr(-z))
    check = Claim("false-alarm", "share", "=", sp.Float(nominal))
    mistakes = {
        "one-sided": sp.Float(nominal / 2),
        "half again": sp.Float(1.5 * nominal),
    }
    assert check.check(found, control=mistakes).outcome == "holds"


def test_claims_off_by_twice_the_resolution_are_refuted():
    """Missed only where the sample itself strays by five standard errors."""
    missed = sum(
        claim(target=sp.Float(0.5 + 2 * one.resolution)).judge(one) != "refuted"
        for one in simulated_means(0.5, seed=3)
    )
    assert missed == 0


def test_an_all_equal_sample_is_refused_with_advice():
    with pytest.raises(ValueError, match=r"estimate\.proportion"):
        estimate.mean(torch.zeros(1000))


def test_a_cauchy_sample_never_yields_a_confident_verdict():
    generator = torch.Generator().manual_seed(4)
    for n in (1_000, 10_000, 100_000):
        for _ in range(200):
            sample = torch.empty(n, dtype=torch.float64).cauchy_(generator=generator)
            found = claim(target=sp.Integer(0)).check(
                estimate.mean(sample), control=sp.Integer(100)
            )
            assert found.outcome == "unresolved"
            assert "variance" in found.table() or "spread" in found.table()


def test_an_ordinary_sample_is_trusted():
    generator = torch.Generator().manual_seed(5)
    for n in (1_000, 10_000, 100_000):
        for _ in range(100):
            assert estimate.mean(torch.rand(n, generator=generator)).warning == ""


@pytest.mark.parametrize("n", [2, 999])
def test_a_small_sample_is_not_trusted_at_five_sigma(n):
    found = estimate.mean(torch.rand(n, generator=torch.Generator().manual_seed(6)))
    assert "draw at least" in found.warning
    assert claim().check(found, control=sp.Integer(9)).outcome == "unresolved"


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (919.12, 662.4, "900 ± 3300"),
        (0.1234567, 0.0003, "0.1235 ± 0.0015"),
        (12.3, 0.2, "12.3 ± 1.0"),
        (3.0, 1e-9, "3 ± 5.0e-09"),
    ],
)
def test_no_digit_is_shown_that_the_bar_does_not_carry(value, stderr, text):
    assert wording.shown(Estimate(value, stderr)) == text

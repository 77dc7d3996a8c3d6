"""surface: integrals over curved interfaces against closed forms."""

import math

import pytest
import torch
from scipy import special, stats
from truths import assert_mean, normals, random_router, refuted

from moebook import boundary


def directions(n, d, seed=9):
    return torch.nn.functional.normalize(normals(n, d, seed), dim=1)


def ellipse(y):
    return y[:, 0] ** 2 + 0.25 * y[:, 1] ** 2 - 1


def steep(y):
    return (1 + y[:, 0] ** 2) * y[:, 1]


def parabola(y):
    return y[:, 1] - y[:, 0] ** 2 / 2


INTERFACES = {
    "ellipse": (ellipse, 2, 0.32823329741703),
    "steep": (steep, 2, 0.26157829186512),
    "parabola": (parabola, 2, 0.33453746999371),
    "circle": (lambda y: (y**2).sum(1) - 2.25, 2, math.exp(-1.125) / 2),
    "sphere": (lambda y: (y**2).sum(1) - 2.25, 5, stats.chi2(5).pdf(2.25)),
    "hyperbola": (lambda y: y[:, 0] * y[:, 1] - 0.5, 2, special.k0(0.5) / math.pi),
    "affine": (
        lambda y: y @ y.new_tensor([1.0, 2, 2]) - 1,
        3,
        stats.norm.pdf(1 / 3) / 3,
    ),
    "two points": (lambda y: y[:, 0] ** 2 - 1, 1, stats.norm.pdf(1)),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_interface_against_closed_forms(name):
    score, d, truth = INTERFACES[name]
    x, e = normals(8000, d, seed=4), directions(8000, d)
    axes, lines = (
        boundary.interface(score, x),
        boundary.interface(score, x, directions=e),
    )
    for values in (axes, lines):
        if values.std() > 1e-12:
            assert_mean(values, truth, off=0.15)
        assert values.mean().item() == pytest.approx(truth, rel=0.05)
    if d > 1:
        assert lines.max() / lines.mean() < 6
        assert axes.var() < lines.var()
        assert refuted(lines / d, truth)  # a cosine squared is 1/d on average


def test_interface_in_float32():
    values = boundary.interface(ellipse, normals(20_000, 2, dtype=torch.float32))
    assert_mean(values, INTERFACES["ellipse"][2])


def test_flat_interfaces_across_an_axis_are_exact():
    values = boundary.interface(lambda y: 3 * y[:, 1] - 1.5, normals(50, 4))
    assert torch.allclose(values, torch.full_like(values, stats.norm.pdf(0.5) / 3))


def test_plain_weights_have_no_variance():
    x, e = normals(60_000, 2, seed=2), directions(60_000, 2)
    cosine = boundary.interface(ellipse, x, directions=e)
    plain = boundary.interface(ellipse, x, directions=e, weighting="plain")
    assert plain.max() / plain.mean() > 40 > 3 > cosine.max() / cosine.mean()
    assert plain.var() > 4 * cosine.var()
    with pytest.raises(ValueError, match=r"plain.*may miss a flat interface"):
        boundary.interface(ellipse, x, weighting="plain")


def test_interface_carries_its_integrand():
    x = normals(20_000, 2, seed=3)
    # On a circle the mean of x1^2 is R^2 / 2; on {x2 = 0}, |grad s| undoes the weight.
    circle, _, q = INTERFACES["circle"]
    values = boundary.interface(circle, x, lambda y: y[:, 0] ** 2)
    assert_mean(values, q * 2.25 / 2, off=0.05)
    area = boundary.interface(steep, x, lambda y: 1 + y[:, 0] ** 2)
    assert area.mean().item() == pytest.approx(stats.norm.pdf(0), rel=1e-12)
    assert refuted(
        boundary.interface(steep, x), stats.norm.pdf(0)
    )  # area is not enough


def test_missed_pairs_shrink_with_the_cells():
    def wave(y):  # zeros half a unit apart: a coarse cell holds several
        return (2 * math.pi * y[:, 0]).sin() + 0.9 * y[:, 1].cos()

    x = normals(3000, 2, seed=6)
    fine = boundary.interface(wave, x, cells=800).mean()
    usual, coarse = (boundary.interface(wave, x, cells=c).mean() for c in (192, 12))
    assert abs(usual - fine) < 1e-3 * fine
    assert abs(coarse - fine) > 1e-1 * fine


def test_the_unit_of_the_score_only_scales():
    x, e = normals(50, 2), directions(50, 2)
    for kind in ({}, {"directions": e}, {"directions": e, "weighting": "plain"}):
        one = boundary.interface(ellipse, x, **kind)
        for unit in (1e-30, 1e30):
            other = boundary.interface(lambda y, u=unit: u * ellipse(y), x, **kind)
            assert torch.allclose(unit * other, one, rtol=1e-9)


def test_twice_the_interface_is_the_slope():
    router, x = random_router(2, 3), normals(4000, 3)
    values = boundary.interface(lambda y: router(y)[:, 0] - router(y)[:, 1], x)
    assert_mean(2 * values, boundary.slope(router, x)[0].item(), off=0.05)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda y: y, r"score must map \(n, d\) to \(n,\).*returned"),
        (lambda y: 1.0, "returned float"),
        (lambda y: y[:, 0].log(), "score is NaN at"),
        (lambda y: y[:, 0] ** 3, r"grad score\| = .* where score = 0"),
    ],
)
def test_scores_that_cannot_be_used(score, words):
    with pytest.raises(ValueError, match=words):
        boundary.interface(score, normals(40, 2))


def test_directions_are_unit_vectors():
    x = normals(40, 2)
    with pytest.raises(ValueError, match="unit vectors, got norms"):
        boundary.interface(ellipse, x, directions=2 * directions(40, 2))
    with pytest.raises(ValueError, match="shape and dtype of x"):
        boundary.interface(ellipse, x, directions=directions(39, 2))

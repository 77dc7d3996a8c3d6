"""facets: slopes against exact truths, and the facets found by walking every line."""

import itertools
import math

import pytest
import torch
from scipy import stats
from truths import (
    DOUBLE,
    assert_mean,
    generator,
    identity,
    iid_slope,
    normals,
    random_router,
    refuted,
    star,
)

from moebook import boundary, laws
from moebook.routing import Affine


@pytest.mark.parametrize("by", ["facet", "stein"])
@pytest.mark.parametrize(
    ("K", "k"), [(2, 1), (3, 1), (3, 2), (8, 1), (8, 2), (8, 3), (8, 6), (64, 1)]
)
def test_slope_of_iid_logits(K, k, by):
    x = normals(20_000, K, seed=K + k, dtype=torch.float32)
    samples, truth = boundary.slope(identity(K), x, k, by=by), iid_slope(K, k)
    if K == 2 and by == "facet":
        assert torch.allclose(samples, torch.full_like(samples, truth), rtol=1e-12)
    else:
        assert_mean(samples, truth, off=0.05)
        assert refuted(samples / 2, truth)  # one side of the facet


def test_slope_is_the_expected_sum_of_winners():
    """Independent logits: BM'(0) = E[sum of the k largest], g_K is a mean maximum."""
    for K, k in [(3, 1), (8, 1), (8, 3), (64, 2)]:
        largest = normals(40_000, K, seed=K).topk(k, dim=1).values.sum(1)
        assert_mean(largest, iid_slope(K, k), off=0.04)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_slope_by_facets_and_by_parts_agree(k):
    router, x = random_router(6, 9, seed=3), normals(60_000, 9, seed=k)
    facet, stein = (boundary.slope(router, x, k, by=by) for by in ("facet", "stein"))
    assert_mean(facet - stein + facet.mean(), facet.mean().item(), off=0.03)
    narrow = boundary.mass(router, x, 1e-5, k) / 1e-5
    assert not refuted(narrow - facet, 0.0)
    assert refuted(narrow - facet / 2, 0.0)


def test_slope_of_mercedes_in_both_laws():
    values = boundary.slope(star(3), normals(20_000, 2))
    assert_mean(values, math.sqrt(3 / (2 * math.pi)))
    values = boundary.slope(star(3), laws.ball(20_000, 2, generator()), law="ball")
    assert_mean(values, 2 * math.sqrt(3) / math.pi)


@pytest.mark.parametrize(("d", "b"), [(2, 0.3), (3, 0.0), (7, 0.4)])
def test_slope_in_the_ball(d, b):
    weight = torch.zeros(2, d, dtype=DOUBLE)
    weight[0, 0] = 1
    router = Affine(weight, torch.tensor([-b, 0], dtype=DOUBLE))
    x = laws.ball(40_000, d, generator(d))
    density = math.gamma(d / 2 + 1) / math.sqrt(math.pi) / math.gamma((d + 1) / 2)
    truth = 2 * density * (1 - b * b) ** ((d - 1) / 2)
    assert_mean(boundary.slope(router, x, law="ball"), truth, off=0.03)


def facets_by_scan(router, x, k):
    """The facet terms of one x by walking every line on a grid."""
    t = torch.linspace(-9, 9, 60_001, dtype=DOUBLE)
    active = set(router(x[None]).topk(k, dim=1).indices[0].tolist())
    total = 0.0
    for i in active:
        for j in set(range(len(router.bias))) - active:
            step = router.weight[i] - router.weight[j]
            normal = step / step.norm()
            place = t - x @ normal
            sets = router(x + place[:, None] * normal).topk(k, dim=1).indices
            code = (2**sets).sum(1)
            mates = sum(2**m for m in active - {i})
            above, below = code == mates + 2**i, code == mates + 2**j
            meet = (above[1:] & below[:-1]).nonzero()
            if len(meet):  # the two stretches touch: the tie is on the facet
                density = torch.exp(-(t**2) / 2)
                chord = (density * (above | below)).sum() * (t[1] - t[0])
                total += 2 * density[meet[0, 0]].item() / (step.norm() * chord).item()
    return total


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_slope_sums_the_facets_of_the_cell(k):
    router, x = random_router(6, 3, seed=7), normals(25, 3, seed=k)
    ours = boundary.slope(router, x, k)
    scanned = torch.tensor([facets_by_scan(router, row, k) for row in x]).double()
    assert torch.allclose(ours, scanned, rtol=5e-3)


def test_slope_has_a_variance_and_the_narrow_line_has_not():
    router = random_router(8, 16, seed=11)
    x = normals(200_000, 16, seed=8, dtype=torch.float32)
    for k in (1, 2):
        for by in ("facet", "stein"):
            values = boundary.slope(router, x, k, by=by)
            assert values.max() / values.mean() < 30
            assert values.var() / values.mean() ** 2 < 1
        line = boundary.mass(router, x, 1e-6, k) / 1e-6
        assert line.max() / line.mean() > 60
        assert line.var() > 3 * values.var()


def test_slope_refuses_ties_it_cannot_sum():
    x = normals(10, 2)
    with pytest.raises(ValueError, match="infinite variance"):
        boundary.slope(star(4), x)
    shifted = Affine(
        star(5).weight, star(5).weight @ torch.tensor([0.3, -1.0], dtype=DOUBLE)
    )
    with pytest.raises(ValueError, match="infinite variance"):
        boundary.slope(shifted, x, 2)
    line = torch.tensor([[1.0, 2], [0, 0], [-1, -2]], dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] tie on one hyperplane"):
        boundary.slope(Affine(line), x)
    assert (
        boundary.slope(Affine(line, torch.tensor([0, 1.0, 0], dtype=DOUBLE)), x).min()
        > 0
    )
    moved = Affine(star(5).weight, torch.arange(5).double())
    assert boundary.slope(moved, x).isfinite().all()


def test_refused_slopes_come_from_interfaces():
    router, k, x = star(5), 2, normals(4000, 2)
    total = 0.0
    for i, j in itertools.combinations(range(5), 2):

        def ranked(y, i=i, j=j):
            z = router(y)
            above = (z > z[:, [i]] + 1e-9).sum(1) - (z[:, j] > z[:, i] + 1e-9).long()
            return (above == k - 1).double()

        total = total + 2 * boundary.interface(
            lambda y, i=i, j=j: router(y)[:, i] - router(y)[:, j], x, ranked
        )
    # Each ray from the origin counts 2 / |w_i - w_j| times half of phi(0).
    truth = sum(
        stats.norm.pdf(0) / (router.weight[i] - router.weight[j]).norm().item()
        for i, j in rays(router, k)
    )
    assert_mean(total, truth, off=0.03)


def rays(router, k):
    """Pairs that trade ranks k and k+1 once around the circle, ray by ray."""
    angle = torch.linspace(0.1, 0.1 + 2 * math.pi, 100_001, dtype=DOUBLE)
    order = router(torch.stack((angle.cos(), angle.sin()), 1)).argsort(
        1, descending=True
    )
    sets = order[:, :k].sort(1).values
    change = (sets[1:] != sets[:-1]).any(1).nonzero()[:, 0]
    return [tuple(order[m, k - 1 : k + 1].tolist()) for m in change]

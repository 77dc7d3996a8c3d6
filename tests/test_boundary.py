"""boundary: every estimator against an exact truth, and a mistake that it notices."""

import itertools
import math

import pytest
import torch
from scipy import stats
from truths import (
    DOUBLE,
    INF,
    assert_mean,
    generator,
    identity,
    iid_mass,
    iid_slope,
    normals,
    random_router,
    refuted,
    star,
)

from moebook import boundary, laws
from moebook.routing import Affine, gap


def genz_mass(router, w, k, points=40_000):
    """P(gap_k <= w): one minus the orthants in which a set leads the rest by w."""
    weight, bias = router.weight.numpy(), router.bias.numpy()
    K, leads = len(bias), 0.0
    for active in itertools.combinations(range(K), k):
        pairs = [(i, j) for i in active for j in range(K) if j not in active]
        rows = [weight[j] - weight[i] for i, j in pairs]
        level = [bias[i] - bias[j] - w for i, j in pairs]
        cov = [[float(a @ b) for b in rows] for a in rows]
        leads += stats.multivariate_normal(
            cov=cov, allow_singular=True, maxpts=points, abseps=1e-7, seed=1
        ).cdf(level)
    return 1 - leads


def planar_mass(router, w, k, law):
    """Routers through the origin of the plane: the radius integrates in closed form."""
    angle = (torch.arange(200_000, dtype=DOUBLE) + 0.5) * (2 * math.pi / 200_000)
    ratio = (w / gap(router(torch.stack((angle.cos(), angle.sin()), 1)), k)) ** 2
    inside = -torch.expm1(-ratio / 2) if law == "gaussian" else ratio.clamp_max(1)
    return inside.mean().item()


@pytest.mark.parametrize("by", ["line", "stein"])
@pytest.mark.parametrize(
    ("K", "k", "w"),
    [(2, 1, 0.1), (3, 1, 0.5), (3, 2, 0.1), (8, 1, 0.1), (8, 2, 0.01), (8, 3, 0.3)]
    + [(8, 7, 0.1), (64, 1, 0.01), (64, 1, 1e-6), (64, 2, 0.1)],
)
def test_mass_of_iid_logits(K, k, w, by):
    x = normals(30_000, K, seed=K + k)
    samples = boundary.mass(identity(K), x, w, k, by=by)
    truth = iid_mass(w, K, k) if w > 1e-4 else w * iid_slope(K, k)
    if K == 2 and by == "line":  # nothing is left to chance
        assert torch.allclose(samples, torch.full_like(samples, truth), rtol=1e-12)
    else:
        assert_mean(samples, truth, bias=1e-10, off=0.1 if by == "line" else 0.04)


@pytest.mark.parametrize(("K", "k", "d"), [(3, 1, 4), (3, 2, 5), (8, 1, 10)])
def test_mass_agrees_with_genz(K, k, d):
    router = random_router(K, d, seed=K)
    truth = genz_mass(router, 0.2, k)
    x = normals(60_000, d, seed=5)
    bias = 1e-9 if K == 3 else 1e-3 * truth  # the integration error of scipy at K = 8
    assert_mean(boundary.mass(router, x, 0.2, k), truth, bias=bias, off=0.1)
    stein = boundary.mass(router, x, 0.2, k, by="stein")
    assert_mean(stein, truth, bias=bias, off=0.1)


@pytest.mark.parametrize("law", ["gaussian", "ball"])
@pytest.mark.parametrize(("K", "k"), [(3, 1), (5, 1), (5, 2), (8, 3), (8, 5)])
def test_mass_in_the_plane(K, k, law):
    router = Affine(normals(K, 2, seed=K))
    draw = {"gaussian": laws.gaussian, "ball": laws.ball}[law]
    x = draw(60_000, 2, generator(k))
    for w in (0.05, 0.3):
        truth = planar_mass(router, w, k, law)
        assert_mean(boundary.mass(router, x, w, k, law), truth, bias=2e-6, off=0.1)


def test_mass_of_mercedes():
    x = normals(50_000, 2, seed=1)
    values = boundary.mass(star(3), x, torch.tensor([0.1, 0.5]))
    assert_mean(values[:, 0], 0.068142429636621, off=0.03)
    assert_mean(values[:, 1], 0.31830655834858)
    union = 3 * math.erf(0.1 / math.sqrt(6))  # pairs counted with the third on top
    assert refuted(values[:, 0], union)


@pytest.mark.parametrize("b", [0.0, 0.3])
def test_mass_in_the_ball_is_a_polynomial(b):
    router = Affine(
        torch.tensor([[1.0, 0, 0], [0, 0, 0]], dtype=DOUBLE),
        -b * torch.eye(2)[0].double(),
    )
    x = laws.ball(40_000, 3, generator(3))
    low, high = b - 0.2, b + 0.2
    truth = 0.75 * (high - low - (high**3 - low**3) / 3)
    values = boundary.mass(router, x, 0.2, law="ball")
    assert torch.allclose(values.mean(), torch.tensor(truth).double(), rtol=0.02)
    assert_mean(values, truth, off=0.02)


@pytest.mark.parametrize("by", ["line", "stein"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_ladder_of_widths_is_one_pass(by, k):
    router, x = random_router(7, 9), normals(500, 9)
    widths = torch.tensor([0.0, 1e-300, 1e-3, 0.1, 2.0, INF], dtype=DOUBLE)
    ladder = boundary.mass(router, x, widths, k, by=by)
    assert ladder.shape == (500, 6) and ladder.dtype == DOUBLE
    for m, w in enumerate(widths.tolist()):
        assert torch.equal(ladder[:, m], boundary.mass(router, x, w, k, by=by))
    if by == "line":
        assert (ladder.diff(dim=1) >= 0).all() and (ladder <= 1).all()
        assert (ladder[:, 0] == 0).all() and (ladder[:, -1] == 1).all()


def test_identical_experts_are_a_mass_at_zero():
    weight = torch.tensor([[2.0, 0.1], [2.0, 0.1], [-1, 0.7], [-2, 1.4]], dtype=DOUBLE)
    router, x = Affine(weight), normals(4000, 2)
    twins = router(x).argmax(1) <= 1
    values = boundary.mass(router, x, 0.0)
    assert torch.equal(values, twins.double())
    for dtype in (DOUBLE, torch.float32):
        values = boundary.mass(router, x.to(dtype), 0.1)
        assert_mean(values, planar_mass(router, 0.1, 1, "gaussian"), bias=1e-5, off=0.1)
    with pytest.raises(ValueError, match=r"\[0, 1\] are identical"):
        boundary.slope(router, x)


@pytest.mark.parametrize("k", [1, 2])
def test_float32_inputs_give_the_float64_answer(k):
    router, x = random_router(8, 16), normals(20_000, 16)
    for w in (1e-12, 1e-3, 0.3):
        double, single = (boundary.mass(router, t, w, k) for t in (x, x.float()))
        assert single.dtype == DOUBLE
        assert (single - double).mean().abs() <= 1e-4 * double.mean()
    double, single = (boundary.slope(router, t, k) for t in (x, x.float()))
    assert (single - double).mean().abs() <= 1e-4 * double.mean()


@pytest.mark.parametrize("k", [1, 2, 4])
def test_renaming_experts_changes_nothing(k):
    router, x = random_router(7, 8), normals(3000, 8)
    order = torch.randperm(7, generator=generator(1))
    renamed = Affine(router.weight[order], router.bias[order])
    for call in (
        lambda r: boundary.mass(r, x, 0.1, k),
        lambda r: boundary.mass(r, x, 0.1, k, by="stein"),
        lambda r: boundary.slope(r, x, k),
        lambda r: boundary.slope(r, x, k, by="stein"),
    ):
        assert torch.allclose(call(router), call(renamed), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("K", "k"), [(1, 1), (4, 4)])
def test_all_experts_active_means_no_boundary(K, k):
    router, x = random_router(K, 3), normals(5, 3)
    values = boundary.mass(router, x, torch.tensor([0.0, 9.0, INF]), k)
    assert torch.equal(values, torch.tensor([0.0, 0.0, 1.0], dtype=DOUBLE).expand(5, 3))
    assert torch.equal(boundary.slope(router, x, k), torch.zeros(5).double())
    hits = boundary.brute_force(router, 10, [9.0, INF], generator(), k)
    assert hits.tolist() == [0, 10]


def test_one_sample_and_no_sample():
    router = random_router(5, 6)
    for n in (0, 1):
        x = normals(n, 6)
        assert boundary.mass(router, x, 0.1).shape == (n,)
        assert boundary.mass(router, x, [0.1, 0.2], 2, by="stein").shape == (n, 2)
        assert boundary.slope(router, x).shape == (n,)
        assert boundary.interface(lambda y: y[:, 0], x).shape == (n,)
    long = normals(50_000, 6)
    last = boundary.mass(router, long, 0.1)[-1:]  # in whatever chunk it falls
    assert torch.allclose(last, boundary.mass(router, long[-1:], 0.1), rtol=1e-10)


def test_inputs_are_left_alone():
    router, x = random_router(5, 6), normals(50, 6)
    copy = x.clone()
    for call in (boundary.slope, lambda r, x: boundary.mass(r, x, 0.1, 2)):
        call(router, x)
        assert torch.equal(x, copy)
    assert not boundary.mass(router, x.requires_grad_(), 0.1).requires_grad


def test_parts_need_independent_weights():
    with pytest.raises(ValueError, match="8 weights in d = 3 span 3 directions"):
        boundary.mass(random_router(8, 3), normals(4, 3), 0.1, by="stein")
    x = laws.ball(4, 8, generator())
    with pytest.raises(ValueError, match="law='ball' use by='line'"):
        boundary.mass(random_router(8, 8), x, 0.1, law="ball", by="stein")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"w": -0.1}, ValueError, "w must be a width >= 0.*-0.1"),
        ({"w": math.nan}, ValueError, "w must be"),
        ({"w": [[0.1]]}, ValueError, "row of them"),
        ({"k": 0}, ValueError, "from 1 to K = 5, got 0"),
        ({"k": 6}, ValueError, "from 1 to K = 5, got 6"),
        ({"k": 1.5}, TypeError, "must be an int"),
        ({"x": normals(4, 2)}, ValueError, r"shape \(n, 3\).*\(4, 2\)"),
        ({"x": normals(4, 3)[0]}, ValueError, r"\(3,\)"),
        ({"x": torch.tensor([[0.0, math.nan, 1.0]])}, ValueError, "finite, got 1 NaN"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "float32 or float64"),
        ({"law": "cube"}, ValueError, "'gaussian' or 'ball'.*law='cube'"),
        ({"by": "hope"}, ValueError, "'line' or 'stein'.*by='hope'"),
        ({"law": "ball", "x": 9 * torch.ones(1, 3)}, ValueError, "norm 15.59"),
        ({"router": lambda x: x}, TypeError, "routing.Affine.*boundary.interface"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"router": random_router(5, 3), "x": normals(4, 3), "w": 0.1} | arguments
    with pytest.raises(error, match=words):
        boundary.mass(**call)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("k", [1, 2])
def test_no_sampler_takes_what_is_not_finite(value, k):
    router, x = random_router(5, 6), normals(30, 6)
    x[17, 2] = value
    for call in (
        lambda: boundary.mass(router, x, 0.1, k),
        lambda: boundary.mass(router, x, 0.1, k, by="stein"),
        lambda: boundary.slope(router, x, k),
        lambda: boundary.interface(lambda y: y[:, 0], x),
    ):
        with pytest.raises(ValueError, match="x must be finite, got 1 NaN or inf"):
            call()


@pytest.mark.parametrize(("K", "d", "k"), [(8, 8, 1), (8, 8, 3), (8, 8, 6), (5, 40, 2)])
def test_brute_force_counts(K, d, k):
    weight = torch.linalg.qr(normals(d, K))[0].T.contiguous()
    n, widths = 50_001, [0.05, 0.5]
    hits = boundary.brute_force(Affine(weight), n, widths, generator(k), k)
    assert hits.dtype == torch.int64 and hits.shape == (2,)
    for count, w in zip(hits.tolist(), widths, strict=True):
        p = iid_mass(w, K, k)
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))
        assert abs(count - n * p / 2) > 5 * math.sqrt(n * p)


def test_brute_force_agrees_with_the_line():
    router, n = random_router(6, 4, bias=1.0), 100_000
    hits = boundary.brute_force(router, n, 0.2, generator(1), 2)
    again = boundary.brute_force(router, n, 0.2, generator(1), 2)
    assert hits.shape == () and hits == again
    values = boundary.mass(router, normals(n, 4), 0.2, 2)
    p = values.mean().item()
    error = math.sqrt((p * (1 - p) + values.var().item()) / n)
    assert abs(hits.item() / n - p) <= 5 * error
    assert boundary.brute_force(router, 0, 0.2, generator()).item() == 0

"""bridges: survival weights against closed forms, Euler as the control."""

import math

import pytest
import torch
from scipy import special
from truths import DOUBLE, INF, assert_mean, generator, normals, random_router, refuted

from moebook.bridges import bridge_bounds, bridge_survival, euler_survival, overshoot
from moebook.diffusion import halfspace_cdf, union_bounds, wedge_survival
from moebook.routing import Affine
from moebook.walks import walk_on_spheres, wedge

SIXTY = math.pi / 3


def bisector(n, angle, radius=1.0):
    x = torch.tensor([[math.cos(angle / 2), math.sin(angle / 2)]], dtype=DOUBLE)
    return (radius * x).expand(n, 2)


def halfspace(d):
    """Two experts at the tie x_0 = 0, with a slope that must not matter."""
    return Affine(3 * torch.eye(2, d, dtype=DOUBLE) * torch.tensor([[1.0], [0.0]]))


@pytest.mark.parametrize("steps", [1, 7])
@pytest.mark.parametrize("drift", [None, 0.5, -0.5])
def test_one_face_is_exact_with_any_steps(steps, drift):
    d, n, sigma = 4, 60_000, 0.8
    x = torch.zeros(n, d)
    x[:, 0], x[:, 1] = 1.0, -3.0
    push = None if drift is None else torch.tensor([-drift, 9.0, 0, 0])
    weights = bridge_survival(
        halfspace(d), x, 1.5, generator(steps), steps=steps, sigma=sigma, drift=push
    )
    assert weights.dtype == DOUBLE and ((weights >= 0) & (weights <= 1)).all()
    truth = 1 - halfspace_cdf(1.5, distance=1, drift=drift or 0.0, sigma=sigma).item()
    assert_mean(weights, truth, off=0.04)
    one = 1 - halfspace_cdf(1.5, distance=1, drift=drift or 0.0).item()
    assert refuted(weights, one)  # sigma forgotten


@pytest.mark.parametrize("steps", [1, 5])
def test_orthogonal_faces_are_exact(steps):
    x = bisector(60_000, math.pi / 2)
    weights = bridge_survival(wedge(math.pi / 2), x, 1.0, generator(steps), steps=steps)
    assert_mean(weights, math.erf(0.5) ** 2, off=0.05)


@pytest.mark.parametrize(("degrees", "t"), [(60, 0.3), (120, 1.0)])
def test_bounds_enclose_a_wedge(degrees, t):
    angle, n = math.radians(degrees), 60_000
    truth = wedge_survival(t, angle=angle, radius=1, theta=angle / 2).item()
    x, router = bisector(n, angle), wedge(angle)
    for steps in (1, 8, 16):
        bounds = bridge_bounds(router, x, t, generator(steps), steps=steps)
        weights = bridge_survival(router, x, t, generator(steps), steps=steps)
        assert bounds.shape == (n, 2)
        inside = torch.stack((bounds[:, 0], weights, bounds[:, 1])).diff(dim=0)
        assert (inside >= -1e-12).all()
        low, high = bounds.mean(0).tolist()
        error = weights.std().item() / math.sqrt(n)
        assert low - 5 * error <= truth <= high + 5 * error
        if steps == 1:  # Slepian: the sign of the product's error
            miss = weights.mean().item() - truth
            assert abs(miss) > 5 * error and (miss > 0) == (degrees < 90)
    assert high - low < 2e-3
    assert_mean(weights, truth, bias=high - low, off=0.05)


def test_euler_is_blind_between_its_points():
    x = bisector(40_000, SIXTY)
    truth = wedge_survival(0.3, angle=SIXTY, radius=1, theta=SIXTY / 2).item()
    misses = []
    for steps in (40, 160):
        hits = euler_survival(wedge(SIXTY), x, 0.3, generator(steps), steps=steps)
        assert ((hits == 0) | (hits == 1)).all() and refuted(hits, truth)
        misses.append(hits.mean().item() - truth)
    assert misses[1] > 0 and 1.6 < misses[0] / misses[1] < 2.5  # sqrt(dt), not dt
    moved = euler_survival(wedge(SIXTY), x, 0.3, generator(1), steps=160, shifted=True)
    assert_mean(moved, truth, bias=2e-3, off=0.06)


def test_overshoot():
    """The constant by an alternating series, and what it says of Euler's bias."""
    n = 10**5
    eta = sum((-1) ** (m + 1) / math.sqrt(m) for m in range(1, n)) - 0.5 / math.sqrt(n)
    zeta = eta / (1 - math.sqrt(2))  # eta(s) = (1 - 2^(1 - s)) zeta(s)
    assert abs(overshoot() + zeta / math.sqrt(2 * math.pi)) < 1e-6
    x = torch.full((100_000, 1), 1.0, dtype=DOUBLE)
    router = Affine(torch.tensor([[1.0], [0.0]], dtype=DOUBLE))
    hits = euler_survival(router, x, 1.0, generator(), steps=100)
    shifted = special.erf((1 + overshoot() * 0.1) / math.sqrt(2))
    assert_mean(hits, shifted, bias=1e-3, off=0.02)
    assert refuted(hits, special.erf(1 / math.sqrt(2)))


@pytest.mark.parametrize("k", [1, 3])
def test_many_cells_and_experts(k):
    """Starts of several cells at once, each row against its own union bounds."""
    router, x, n, t = random_router(6, 12), normals(5, 12), 9000, 3.0
    steps = {"t": t, "k": k, "steps": 8}
    mixed = bridge_survival(router, x.repeat(n, 1), generator=generator(k), **steps)
    means = []
    for row, z, together in zip(x, router(x), mixed.view(n, 5).T, strict=True):
        place = z.argsort(descending=True)
        far = [
            (z[i] - z[j]) / (router.weight[i] - router.weight[j]).norm()
            for i in place[:k]
            for j in place[k:]
        ]
        low, high = union_bounds(torch.stack(far), t)
        start = row.expand(n, 12)
        alone = bridge_survival(router, start, generator=generator(9), **steps)
        error = ((alone.var() + together.var()) / n).sqrt()
        assert (alone.mean() - together.mean()).abs() <= 5 * error
        assert 1 - high - 5 * error <= alone.mean() <= 1 - low + 5 * error
        means.append(alone.mean())
    assert max(means) - min(means) > 0.02  # rows of other starts would show


def test_edges():
    router, x = random_router(5, 3), normals(30, 3)
    for call in (bridge_survival, euler_survival):
        assert (call(router, x, 0.0, generator()) == 1).all()
        assert (call(router, x, 1e-300, generator()) == 1).all()
        assert (call(router, x, 1.0, generator(), 5) == 1).all()  # k = K: no boundary
        assert call(router, x[:0], 1.0, generator()).shape == (0,)
        tie = torch.zeros(3, 2, dtype=DOUBLE)
        for t in (0.0, 0.5):
            assert (call(wedge(1.0), tie, t, generator()) == 0).all()
        parallel = Affine(torch.ones(2, 3), torch.arange(2.0))
        assert (call(parallel, x, 9.0, generator()) == 1).all()
        single = random_router(5, 3, dtype=torch.float32)
        values = [
            call(single, t, 0.3, generator()) for t in (x.float(), x.float().double())
        ]
        assert torch.equal(*values)
    assert bridge_bounds(router, x[:0], 1.0, generator()).shape == (0, 2)


def test_orthonormal_leaders_are_caught():
    """E = 3, k = 1: the wedge of 120 degrees, whatever the ambient dimension."""
    x = torch.zeros(60_000, 7)
    x[:, 0] = 1.0
    router = Affine(torch.eye(3, 7, dtype=DOUBLE))
    radius = math.sqrt(2 / 3)  # from (1, 0, 0) to the line of equal coordinates
    angle = 2 * SIXTY
    truth = wedge_survival(1.0, angle=angle, radius=radius, theta=angle / 2).item()
    weights = bridge_survival(router, x, 1.0, generator(2), steps=16)
    bounds = bridge_bounds(router, x, 1.0, generator(2), steps=16).mean(0)
    assert_mean(weights, truth, bias=bounds.diff().item(), off=0.06)
    walk = walk_on_spheres(router, x[:500].double(), generator(3))
    assert (walk.pair[:, 0] == 0).all() and (walk.pair[:, 1] > 0).all()


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"t": -1.0}, ValueError, "t must be a finite number >= 0"),
        ({"t": INF}, ValueError, "t must be a finite"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        ({"sigma": 0.0}, ValueError, "sigma must"),
        (
            {"drift": torch.ones(2)},
            ValueError,
            r"drift must have shape \(d,\) = \(3,\)",
        ),
        ({"drift": torch.full((3,), math.nan)}, ValueError, "drift must"),
        ({"k": 0}, ValueError, "from 1 to K = 5"),
        ({"router": lambda y: y}, TypeError, "routing.Affine"),
        ({"generator": 1}, TypeError, "torch.Generator"),
        ({"x": torch.full((2, 3), INF)}, ValueError, "x must be finite"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"router": random_router(5, 3), "x": normals(4, 3), "t": 1.0}
    call |= {"generator": generator()} | arguments
    for sampler in (bridge_survival, bridge_bounds, euler_survival):
        with pytest.raises(error, match=words):
            sampler(**call)

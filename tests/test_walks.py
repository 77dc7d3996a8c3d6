"""walks: exit places and mean exit times, against closed forms."""

import math

import pytest
import torch
from truths import DOUBLE, assert_mean, generator, normals, random_router, refuted

from moebook.routing import Affine, active_set, tie_order
from moebook.walks import walk_on_spheres, wedge
from moebook.wedges import wedge_corner_probability, wedge_mean_exit


def polar(n, radius, theta):
    x = radius * torch.tensor([[math.cos(theta), math.sin(theta)]], dtype=DOUBLE)
    return x.expand(n, 2)


@pytest.mark.parametrize(
    ("degrees", "share", "r"), [(60, 0.5, 0.5), (60, 0.25, 0.7), (120, 0.5, 0.5)]
)
def test_corner_probability(degrees, share, r):
    angle = math.radians(degrees)
    start = polar(60_000, 1.0, share * angle)
    walk = walk_on_spheres(wedge(angle), start, generator(degrees))
    near = walk.place.norm(dim=1) < r
    truth = wedge_corner_probability(r, angle=angle, radius=1, theta=share * angle)
    assert_mean(near, truth.item(), off=0.15)
    # The r^2 law of a smooth density, from where both laws are 1.
    assert refuted(near.double(), truth.item() * r ** (2 - 180 / degrees))
    mirror = wedge_corner_probability(1 / r, angle=angle, radius=1, theta=share * angle)
    assert_mean(walk.place.norm(dim=1) > 1 / r, 1 - mirror.item(), off=0.15)


def test_mean_exit_time():
    angle = math.pi / 6
    start = polar(60_000, 2.0, angle / 3)
    walk = walk_on_spheres(wedge(angle), start, generator(), sigma=0.5)
    truth = wedge_mean_exit(angle=angle, radius=2.0, theta=angle / 3, sigma=0.5).item()
    assert_mean(walk.time, truth, bias=1e-5, off=0.06)
    assert refuted(walk.time, truth / 2)  # rho^2 / d for rho^2 / (d sigma^2), d = 2


@pytest.mark.parametrize("d", [1, 2, 5])
def test_a_slab_in_any_dimension(d):
    """Expert 1 of three parallel scores leads on |x_0| < 1."""
    weight = torch.zeros(3, d, dtype=DOUBLE)
    weight[0, 0], weight[2, 0] = -1.0, 1.0
    router = Affine(weight, torch.tensor([-1.0, 0.0, -1.0], dtype=DOUBLE))
    x = 5 * normals(40_000, d)
    x[:, 0] = 0.5
    walk = walk_on_spheres(router, x, generator(d))
    assert_mean(walk.time, 1 - 0.25, bias=1e-5, off=0.05)
    up = walk.place[:, 0] > 0
    assert_mean(up, 0.75)
    assert torch.equal(walk.pair[:, 1] == 2, up) and (walk.pair[:, 0] == 1).all()
    assert torch.allclose(walk.place[:, 0].abs(), torch.ones(()).double(), atol=1e-14)


def test_exits_from_many_cells_have_order_one():
    router, x = random_router(6, 4), normals(3000, 4)
    for k in (1, 2, 5):
        walk = walk_on_spheres(router, x, generator(k), k)
        logits = router(walk.place)
        assert (tie_order(logits, k, 1e-9) == 1).all()
        i, j = walk.pair.T
        z_i, z_j = (logits.gather(1, e[:, None]) for e in (i, j))
        assert torch.allclose(z_i, z_j, atol=1e-12)
        active = active_set(router(x), k)
        assert active.gather(1, i[:, None]).all()
        assert not active.gather(1, j[:, None]).any()


def test_a_distance_function():
    """The unit disc: E tau = (1 - r^2) / 2, the mean exit place is the start."""
    x = torch.tensor([[0.6, 0.0]], dtype=DOUBLE).expand(40_000, 2)
    walk = walk_on_spheres(lambda y: 1 - y.norm(dim=1), x, generator(), shell=1e-4)
    assert walk.pair is None and (walk.place.norm(dim=1) >= 1 - 1e-4).all()
    assert_mean(walk.time, 0.32, bias=1e-4, off=0.05)
    assert_mean(walk.place[:, 0], 0.6, bias=1e-4, off=0.06)
    fine = walk_on_spheres(lambda y: 1 - y.norm(dim=1), x, generator(), shell=1e-8)
    extra = (fine.steps.double().mean() - walk.steps.double().mean()).item()
    assert 1 < extra < 30  # logarithmic in the shell


def test_edges():
    router, x = random_router(5, 3), normals(20, 3)
    empty = walk_on_spheres(router, x[:0], generator())
    assert empty.place.shape == (0, 3) and empty.pair.shape == (0, 2)
    short = walk_on_spheres(router, x, generator(), max_steps=1)
    left = short.time.isnan()
    assert left.any() and (short.pair[left] == -1).all()
    assert short.place[left].isnan().all() and (short.steps <= 1).all()
    on_tie = torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=DOUBLE)
    walk = walk_on_spheres(wedge(1.0), on_tie, generator())
    assert (walk.time == 0).all() and (walk.steps == 0).all()
    assert torch.allclose(walk.place, on_tie, atol=1e-15)
    single = random_router(5, 3, dtype=torch.float32)
    places = [
        walk_on_spheres(single, t, generator()).place
        for t in (x.float(), x.float().double())
    ]
    assert places[0].dtype == DOUBLE and torch.equal(*places)
    copy = x.clone()
    walk_on_spheres(router, x, generator())
    assert torch.equal(x, copy)


@pytest.mark.parametrize("angle", [0.1, 1.0, 2.0, math.pi])
def test_wedge_router(angle):
    theta = torch.linspace(-3.1, 3.1, 400, dtype=DOUBLE)
    leads = wedge(angle)(torch.stack((theta.cos(), theta.sin()), 1)).argmax(1) == 0
    assert torch.equal(leads, (theta >= 0) & (theta < angle))
    assert len(wedge(angle).bias) == (2 if angle == math.pi else 3)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"k": 5}, ValueError, "no boundary"),
        ({"k": 6}, ValueError, "from 1 to K = 5"),
        (
            {"domain": Affine(torch.ones(2, 3), torch.arange(2.0))},
            ValueError,
            "parallel",
        ),
        ({"domain": Affine(torch.ones(2, 3))}, ValueError, r"\[0, 1\] are identical"),
        ({"domain": 3}, TypeError, "routing.Affine or a function.*int"),
        ({"domain": lambda y: y}, ValueError, r"distances \(n,\) = \(4,\)"),
        ({"domain": lambda y: y[:, 0] / 0}, ValueError, "4 not finite"),
        ({"shell": 0.0}, ValueError, "shell must be a finite number > 0"),
        ({"sigma": -1.0}, ValueError, "sigma must"),
        ({"max_steps": 0}, ValueError, "max_steps must be at least 1"),
        ({"generator": None}, TypeError, "torch.Generator"),
        ({"x": torch.full((2, 3), math.nan)}, ValueError, "x must be finite"),
        ({"x": torch.ones(2, 4)}, ValueError, r"shape \(n, 3\)"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "float32 or float64"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"domain": random_router(5, 3), "x": normals(4, 3), "generator": generator()}
    with pytest.raises(error, match=words):
        walk_on_spheres(**(call | arguments))


def test_a_wide_wedge_is_no_cell():
    with pytest.raises(ValueError, match=r"at most pi, got 4\.0"):
        wedge(4.0)
    with pytest.raises(ValueError, match="angle must be a finite number > 0"):
        wedge(0.0)

"""wedges: closed forms against products, images, equations and other roads."""

import math
import warnings

import numpy as np
import pytest
import torch
from scipy import integrate
from truths import DOUBLE, INF

from moebook.wedges import (
    wedge_corner_probability,
    wedge_mean_exit,
    wedge_survival,
    wedge_tail,
)

RIGHT = math.pi / 2


def survival(t, angle, theta, radius=1.0, sigma=1.0):
    return wedge_survival(t, angle=angle, radius=radius, theta=theta, sigma=sigma)


def by_images(t, count, theta):
    """Survival for the angle pi / count, by 2 count reflections of the start.

    The mass that a Gaussian about each image leaves in the wedge, by slices of radius.
    """
    angle = math.pi / count
    total = 0.0
    for n in range(count):
        for sign, place in ((1, theta), (-1, -theta)):
            x, y = math.cos(place + 2 * n * angle), math.sin(place + 2 * n * angle)

            def inside(phi, x=x, y=y):
                along = x * math.cos(phi) + y * math.sin(phi)
                off = x * math.sin(phi) - y * math.cos(phi)
                z = along / math.sqrt(2 * t)
                radial = math.exp(-z * z) / 2 + math.sqrt(math.pi) / 2 * z * (
                    1 + math.erf(z)
                )
                return math.exp(-off * off / (2 * t)) * radial / math.pi

            total += sign * integrate.quad(inside, 0, angle, epsabs=1e-13)[0]
    return total


@pytest.mark.parametrize("t", [0.02, 0.3, 1.0, 30.0])
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_survival_by_images(t, count):
    theta = 0.4 * math.pi / count
    value = survival(t, math.pi / count, theta)
    truth = by_images(t, count, theta)
    assert abs(value - truth) < 1e-10
    if 1e-4 < truth < 1 - 1e-4:
        assert abs(survival(t / 2, math.pi / count, theta) - truth) > 1e-5  # q off by 2


@pytest.mark.parametrize("t", [1e-4, 0.05, 1.0, 50.0])
def test_survival_of_one_and_two_independent_faces(t):
    theta = torch.linspace(0.01, 1.5, 7, dtype=DOUBLE)
    height, side = theta.sin() / math.sqrt(2 * t), theta.cos() / math.sqrt(2 * t)
    half = torch.erf(height)
    assert torch.allclose(survival(t, math.pi, theta), half, atol=1e-13, rtol=0)
    right = survival(t, RIGHT, theta)
    assert torch.allclose(right, half * torch.erf(side), atol=1e-13, rtol=0)


@pytest.mark.parametrize("angle", [1e-3, 0.02, 0.3, 1.0, 2.0, 4.0, 2 * math.pi])
def test_both_roads_meet(angle):
    """The series and the faces one by one, at the time where they change over."""
    q = 30 / math.sin(min(angle, RIGHT)) ** 2
    t = torch.tensor([1 / (4 * q * f) for f in (1 - 1e-9, 1 + 1e-9)], dtype=DOUBLE)
    for share in (0.02, 0.1, 0.3, 0.5, 0.9):
        before, after = survival(t, angle, share * angle).tolist()
        assert abs(before - after) < 1e-9
        assert 0 < before < 1 or share * angle > 0.1


def test_a_thin_wedge_is_a_strip():
    t, angle, share = 2.5e-7, 1e-3, 0.3
    strip = sum(
        4
        / (j * math.pi)
        * math.sin(j * math.pi * share)
        * math.exp(-((j * math.pi / angle) ** 2) * t / 2)
        for j in range(1, 40, 2)
    )
    assert abs(survival(t, angle, share * angle) - strip) < 1e-5
    assert abs(survival(1.1 * t, angle, share * angle) - strip) > 1e-2


def test_survival_solves_the_heat_equation():
    angle, x, y, t, h = 2.0, 0.5, 0.6, 0.7, 1e-3

    def at(x, y, t):
        polar = {"radius": math.hypot(x, y), "theta": math.atan2(y, x)}
        return wedge_survival(t, angle=angle, sigma=1.5, **polar).item()

    here = at(x, y, t)
    laplace = at(x + h, y, t) + at(x - h, y, t) + at(x, y + h, t) + at(x, y - h, t)
    laplace = (laplace - 4 * here) / h**2
    rate = (at(x, y, t + h) - at(x, y, t - h)) / (2 * h)
    assert abs(rate - 1.5**2 / 2 * laplace) < 1e-5
    assert abs(rate - 1.5**2 * laplace) > 1e-2


def test_edges_of_time_and_place():
    t = torch.tensor([0.0, 5e-324, 1e-300, 1e-12, 1.0, 1e300, INF], dtype=DOUBLE)
    for angle in (0.1, 1.0, RIGHT, 3.0, 2 * math.pi):
        value = survival(t, angle, angle / 3)
        assert ((value >= 0) & (value <= 1)).all() and (value.diff() <= 0).all()
        assert (value[:3] == 1).all() and value[-1] == 0
        assert (survival(t, angle, 0.0) == 0).all()
        assert (survival(t, angle, angle) == 0).all()
        mirror = survival(t, angle, angle - angle / 3)
        assert torch.allclose(value, mirror, atol=1e-13)
    assert survival(torch.ones(0), 1.0, 0.5).shape == (0,)
    grid = survival(torch.ones(3, 1), 1.0, torch.linspace(0, 1, 4))
    assert grid.shape == (3, 4) and grid.dtype == DOUBLE


def test_scaling():
    value = survival(0.3, 1.0, 0.4)
    assert torch.allclose(survival(0.3 * 4, 1.0, 0.4, radius=2.0), value, rtol=1e-13)
    assert torch.allclose(survival(0.3 / 9, 1.0, 0.4, sigma=3.0), value, rtol=1e-13)


@pytest.mark.parametrize("angle", [0.3, math.pi / 3, 2 * math.pi / 3, 5.0])
def test_tail(angle):
    tail = wedge_tail(angle=angle, radius=2.0, theta=angle / 4, sigma=0.5)
    assert tail.exponent == math.pi / (2 * angle)
    t = 1e7
    ratio = survival(t, angle, angle / 4, 2.0, 0.5) * t**tail.exponent / tail.constant
    assert abs(ratio - 1) < 1e-4
    thin = wedge_tail(angle=1e-3, radius=1.0, theta=5e-4)
    assert thin.constant.isfinite()


@pytest.mark.parametrize("angle", [0.3, 0.7, 1.2])
def test_mean_exit_solves_its_equation(angle):
    x, y, h, sigma = 0.9, 0.2, 1e-3, 1.7

    def at(x, y):
        polar = {"radius": math.hypot(x, y), "theta": math.atan2(y, x)}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return wedge_mean_exit(angle=angle, sigma=sigma, **polar).item()

    laplace = at(x + h, y) + at(x - h, y) + at(x, y + h) + at(x, y - h) - 4 * at(x, y)
    assert abs(sigma**2 / 2 * laplace / h**2 + 1) < 1e-6
    assert at(1.0, 0.0) == 0
    edge = (math.cos(angle), math.sin(angle))
    assert abs(at(*edge)) < 1e-15


@pytest.mark.parametrize("degrees", [30, 40])
def test_mean_exit_integrates_the_survival(degrees):
    angle = math.radians(degrees)
    s, weight = np.polynomial.legendre.leggauss(400)
    log_t = torch.as_tensor(s * 14)  # t from e^-14 to e^14, what lies beyond is tiny
    late = survival(log_t.exp(), angle, angle / 3) * log_t.exp()
    found = 14 * float(late @ torch.as_tensor(weight)) + math.exp(-14)
    truth = wedge_mean_exit(angle=angle, radius=1.0, theta=angle / 3).item()
    assert abs(found / truth - 1) < 1e-5


def test_mean_exit_refuses_and_warns():
    polar = {"radius": 1.0, "theta": 0.3}
    for angle in (RIGHT, 2.0):
        with pytest.raises(ValueError, match=r"infinite.*>= pi / 2"):
            wedge_mean_exit(angle=angle, **polar)
    with pytest.warns(UserWarning, match="infinite variance"):
        wedge_mean_exit(angle=math.pi / 4, **polar)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wedge_mean_exit(angle=0.78, **polar)


def test_corner_probability():
    """The Cauchy law of the exit from a half-plane, as a difference of angles."""
    for angle in (0.5, 1.0, RIGHT, 3.0, 6.0):
        for share in (0.1, 0.5, 0.8):
            r, m = 0.6, math.pi / angle
            start = 2.0**m * complex(
                math.cos(m * share * angle), math.sin(m * share * angle)
            )
            ends = [(e * r**m - start.real) / start.imag for e in (-1, 1)]
            truth = (math.atan(ends[1]) - math.atan(ends[0])) / math.pi
            found = wedge_corner_probability(
                r, angle=angle, radius=2.0, theta=share * angle
            )
            assert abs(found - truth) < 1e-14
    polar = {"angle": 1.0, "radius": 1.0, "theta": 0.3}
    r = torch.tensor([0.0, 1e-200, 1e-4, 1e-3, 1.0, 1e200, INF], dtype=DOUBLE)
    value = wedge_corner_probability(r, **polar)
    assert value[0] == 0 and value[-1] == 1 and (value.diff() >= 0).all()
    power = (value[3] / value[2]).log10().item()
    assert abs(power - math.pi) < 1e-6  # pi / angle, where r^2 would be 2


def test_gradients():
    theta = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    for call in (
        lambda th: wedge_mean_exit(angle=0.7, radius=1.0, theta=th),
        lambda th: wedge_corner_probability(0.4, angle=0.7, radius=1.0, theta=th),
        lambda th: wedge_tail(angle=0.7, radius=1.0, theta=th).constant,
    ):
        assert torch.autograd.gradcheck(call, theta)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"angle": 0.0}, ValueError, "angle must be a finite number > 0"),
        ({"angle": -1.0}, ValueError, "angle must"),
        ({"angle": 6.3}, ValueError, r"\(0, 2 pi\], got 6.3"),
        ({"angle": torch.ones(2)}, ValueError, "one number"),
        ({"angle": 1e-4, "theta": 5e-5}, ValueError, "at least .001"),
        ({"radius": 0.0}, ValueError, "radius must.*> 0"),
        ({"radius": INF}, ValueError, "radius must be a finite"),
        ({"theta": -0.1}, ValueError, "theta must.*>= 0"),
        ({"theta": 1.1}, ValueError, r"\[0, angle\] = \[0, 1\], got 1.1"),
        ({"theta": math.nan}, ValueError, "theta must"),
        ({"t": -1.0}, ValueError, "t must be a number >= 0, got -1"),
        ({"t": math.nan}, ValueError, "t must"),
        ({"t": None}, TypeError, "t must be a real number.*NoneType"),
        ({"sigma": 0.0}, ValueError, "sigma must"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"t": 1.0, "angle": 1.0, "radius": 1.0, "theta": 0.5} | arguments
    with pytest.raises(error, match=words):
        wedge_survival(**call)

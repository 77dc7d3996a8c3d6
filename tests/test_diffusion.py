"""diffusion: the half-space laws and the bounds of several faces."""

import math

import pytest
import torch
from scipy import integrate, special
from truths import DOUBLE, INF

from moebook import diffusion
from moebook.diffusion import halfspace_cdf, halfspace_density, union_bounds


def test_every_name_is_there():
    for name in diffusion.__all__:
        assert getattr(diffusion, name).__doc__


@pytest.mark.parametrize(
    ("t", "a", "m", "s"),
    [(1, 1, 0, 1), (1, 1, 0.5, 1), (3, 1, -0.5, 2), (0.2, 2, 3, 1)],
)
def test_cdf_is_the_integral_of_the_density(t, a, m, s):
    def density(u):
        return halfspace_density(u, distance=a, drift=m, sigma=s).item()

    truth = integrate.quad(density, 0, t, epsabs=1e-13, limit=200)[0]
    value = halfspace_cdf(t, distance=a, drift=m, sigma=s)
    assert value.dtype == DOUBLE and abs(value - truth) < 1e-11
    if m:
        away = halfspace_cdf(t, distance=a, drift=-m, sigma=s)
        assert abs(away - truth) > 1e-3  # the drift points the other way


def test_density_solves_the_backward_equation():
    """u_t = -m u_a + s^2/2 u_aa, the distance a shrinking at the speed m."""
    m, s, h = 0.7, 1.3, 1e-3
    t = torch.tensor([0.5, 2.0], dtype=DOUBLE)

    def u(t, a):
        return halfspace_cdf(t, distance=a, drift=m, sigma=s)

    first = (u(t, 1 + h) - u(t, 1 - h)) / (2 * h)
    second = (u(t, 1 + h) - 2 * u(t, 1.0) + u(t, 1 - h)) / h**2
    rate = halfspace_density(t, distance=1.0, drift=m, sigma=s)
    assert torch.allclose(rate, -m * first + s**2 / 2 * second, atol=1e-6)
    assert not torch.allclose(rate, m * first + s**2 / 2 * second, atol=1e-3)


def test_forever():
    for m, truth in ((0.0, 1.0), (2.0, 1.0), (-0.5, math.exp(-1))):
        value = halfspace_cdf(INF, distance=1, drift=m)
        assert abs(value - truth) < 1e-15
        if m:
            assert abs(halfspace_cdf(1e4, distance=1, drift=m) - truth) < 1e-12
    found = diffusion.halfspace_mean(distance=3.0, drift=torch.tensor([2.0, 0.0, -1.0]))
    assert found.tolist() == [1.5, INF, INF]

    def late(u):
        return 1 - halfspace_cdf(u, distance=3, drift=2).item()

    assert abs(integrate.quad(late, 0, 60, limit=200)[0] - 1.5) < 1e-8


def test_nothing_overflows():
    t = torch.tensor([0, 5e-324, 1e-300, 1e-3, 1e300, INF], dtype=DOUBLE)
    for m in (-1e6, -1.0, 0.0, 1.0, 1e6):
        for a in (0.0, 1e-200, 1.0, 1e8):
            value = halfspace_cdf(t, distance=a, drift=m)
            assert ((value >= 0) & (value <= 1)).all()
            assert (value.diff() >= 0).all()
            assert value[0] == (a == 0)
    # Where exp(2 m a) alone is exp(2000): both terms are half of one and small.
    value = halfspace_cdf(1.0, distance=1000.0, drift=1000.0)
    assert abs(value - 0.5 - special.erfcx(2000 / 2**0.5) / 2) < 1e-15


def test_gradients_and_shapes():
    t = torch.tensor([[0.5], [1.0]], dtype=DOUBLE, requires_grad=True)
    a = torch.tensor([0.3, 1.0, 2.0], requires_grad=True)
    value = halfspace_cdf(t, distance=a, drift=-0.4)
    assert value.shape == (2, 3)
    (rate,) = torch.autograd.grad(value.sum(), t)
    truth = halfspace_density(t, distance=a, drift=-0.4).sum(1, keepdim=True)
    assert torch.allclose(rate, truth, rtol=1e-12)
    assert halfspace_cdf(torch.ones(0), distance=1).shape == (0,)
    assert halfspace_density(torch.tensor([0, 1e-300, INF]), distance=1).sum() == 0


def test_union_bounds():
    distances = torch.tensor([0.5, 0.5], dtype=DOUBLE)  # 60 degrees, on the bisector
    low, high = union_bounds(distances, 0.3)
    one = math.erfc(0.5 / math.sqrt(0.6))
    assert abs(low - one) < 1e-15 and abs(high - 2 * one) < 1e-15
    survival = diffusion.wedge_survival(
        0.3, angle=math.pi / 3, radius=1, theta=math.pi / 6
    )
    assert low < 1 - survival < high - 0.05  # the sum is not the probability
    low, high = union_bounds(torch.tensor([[0.0, 1.0], [INF, 2.0]]), torch.ones(3, 1))
    assert low.shape == (3, 2) and high.max() == 1
    assert torch.equal(low[:, 1], high[:, 1])  # one face only


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: halfspace_cdf(-1, distance=1),
            ValueError,
            "t must be a number >= 0.*-1",
        ),
        (lambda: halfspace_cdf(math.nan, distance=1), ValueError, "t must.*nan"),
        (lambda: halfspace_cdf(1, distance=-1), ValueError, "distance must.*>= 0"),
        (
            lambda: halfspace_cdf(1, distance=INF),
            ValueError,
            "distance must be a finite",
        ),
        (lambda: halfspace_cdf(1, distance=1, sigma=0), ValueError, "sigma must.*> 0"),
        (lambda: halfspace_cdf(1, distance=1, drift=INF), ValueError, "drift must"),
        (lambda: halfspace_cdf("1", distance=1), TypeError, "t must be a real number"),
        (lambda: halfspace_cdf(True, distance=1), TypeError, "real number.*bool"),
        (lambda: halfspace_cdf(1j, distance=1), TypeError, "real number"),
        (lambda: halfspace_density(1, distance=0), ValueError, "distance must.*> 0"),
        (lambda: union_bounds(torch.ones(2, 0), 1), ValueError, r"\(\.\.\., F\)"),
        (lambda: union_bounds(torch.tensor([-1.0]), 1), ValueError, "distances must"),
    ],
)
def test_errors_teach(call, error, words):
    with pytest.raises(error, match=words):
        call()

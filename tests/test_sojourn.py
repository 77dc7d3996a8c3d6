"""sojourn: expected times near a flat, by a second road for each."""

import math

import pytest
import torch
from scipy import integrate, special
from truths import DOUBLE, INF

from moebook.sojourn import exit_occupation, numbers, occupation


def over_time(eps, T, a, n, sigma=1.0):
    """int_0^T P(|X_t| < eps) dt by the noncentral chi-square, in log t."""
    t0 = math.log(T)

    def inside(u):
        v = sigma**2 * math.exp(u)
        if a * a > 1e9 * v:  # where scipy gives up the law is that of a plane
            return math.exp(u) * special.ndtr((eps - a) / math.sqrt(v))
        return math.exp(u) * special.chndtr(eps * eps / v, n, a * a / v)

    points = [t0 - k for k in (1, 2, 3, 5, 8, 12, 20)]
    value = integrate.quad(
        inside, t0 - 60, t0, epsabs=0, epsrel=1e-12, limit=500, points=points
    )
    return value[0]


@pytest.mark.filterwarnings("ignore::scipy.integrate.IntegrationWarning")
@pytest.mark.parametrize(
    ("n", "a", "eps", "T"),
    [(1, 0.5, 0.1, 1.0), (1, 0.05, 0.1, 1.0), (1, 0.0, 0.1, 1.0), (2, 0.0, 0.1, 1.0)]
    + [(2, 0.5, 0.1, 1.0), (2, 0.09999, 0.1, 1.0), (2, 0.1, 0.1, 1.0)]
    + [(2, 1e-6, 0.1, 1.0), (3, 0.0, 0.1, 1.0), (3, 0.5, 0.1, 1.0), (3, 1.0, 0.2, 0.02)]
    + [(5, 0.05, 0.1, 0.3), (6, 0.1, 0.1, 5.0), (8, 1.0, 0.4, 0.1), (30, 0.5, 0.5, 1.0)]
    + [(64, 0.3, 0.5, 0.1), (64, 1.0, 0.5, 0.02), (64, 8.0, 0.5, 1.0)],
)
def test_occupation_by_the_time_integral(n, a, eps, T):
    value = occupation(eps, T, distance=a, codimension=n)
    truth = over_time(eps, T, a, n)
    assert value.dtype == DOUBLE and abs(value / truth - 1) < 1e-10
    other = occupation(eps, T, distance=a, codimension=n + 1)
    assert abs(other / truth - 1) > 0.01


def test_occupation_in_closed_form():
    eps, T = 0.1, 2.0
    q = eps**2 / (2 * T)
    found = occupation(eps, T, distance=0, codimension=2)
    truth = -T * math.expm1(-q) + eps**2 / 2 * special.exp1(q)
    assert abs(found / truth - 1) < 1e-14

    def local_time(y):
        y = abs(y)
        rest = y * math.erfc(y / math.sqrt(2 * T))
        return math.sqrt(2 * T / math.pi) * math.exp(-y * y / (2 * T)) - rest

    for a in (0.0, 0.07, 0.5):
        truth = integrate.quad(local_time, a - eps, a + eps, points=[0], epsabs=1e-14)[
            0
        ]
        found = occupation(eps, T, distance=a, codimension=1)
        assert abs(found / truth - 1) < 1e-12
    leading = 2 * eps * local_time(0)
    assert abs(occupation(eps, T, distance=0, codimension=1) / leading - 1) > 0.02


@pytest.mark.parametrize("n", [3, 4, 7, 64])
def test_forever(n):
    for a in (0.0, 0.05, 0.1, 0.1001, 0.5):
        value = occupation(0.1, INF, distance=a, codimension=n)
        late = occupation(0.1, 1e22, distance=a, codimension=n)
        assert abs(late / value - 1) < 1e-8
    value = occupation(0.1, INF, distance=0, codimension=n)
    assert abs(value - 0.01 / (n - 2)) < 1e-15
    for recurrent in (1, 2):
        assert occupation(0.1, INF, distance=1, codimension=recurrent) == INF


def test_powers_of_eps():
    """eps^n from afar; from the flat itself eps, eps^2 with a logarithm, eps^2."""

    def power(n, a):
        eps = torch.tensor([1e-5, 1e-4], dtype=DOUBLE)
        low, high = occupation(eps, 1.0, distance=a, codimension=n)
        return (high / low).log10().item()

    for n in (1, 2, 3, 5):
        assert abs(power(n, 0.5) - n) < 1e-4
    assert abs(power(1, 0.0) - 1) < 1e-3
    assert 1.9 < power(2, 0.0) < 1.99
    assert abs(power(3, 0.0) - 2) < 1e-3 and abs(power(5, 0.0) - 2) < 1e-3


def test_scaling_shapes_and_edges():
    value = occupation(0.1, 0.7, distance=0.3, codimension=3, sigma=2.0)
    slow = occupation(0.1, 0.7 * 4, distance=0.3, codimension=3) / 4
    large = occupation(0.1 / 2, 0.7, distance=0.3 / 2, codimension=3)
    assert torch.allclose(value, slow) and torch.allclose(value, large)
    eps = torch.tensor([[0.0], [0.1]], dtype=torch.float32)
    T = torch.tensor([0.0, 1e-300, 1.0, 1e300], dtype=DOUBLE)
    for n in (1, 2, 3, 64):
        for a in (0.0, 1e-200, 0.05, 0.1, 3.0):
            value = occupation(eps, T, distance=a, codimension=n)
            assert value.shape == (2, 4) and value.dtype == DOUBLE
            assert (value[0] == 0).all() and (value[:, 0] == 0).all()
            assert ((value >= 0) & (value <= T * (1 + 1e-12))).all()
            assert (value[1].diff() >= -1e-16).all()
            if a < 0.1:
                assert value[1, 1] == 1e-300
    assert occupation(torch.ones(0), 1, distance=1, codimension=2).shape == (0,)


@pytest.mark.parametrize("eps", [1e-4, 0.2, 0.9])
def test_exit_occupation_in_closed_form(eps):
    R, e = 2.0, eps
    small = math.sqrt(1 - e * e)
    disc = 2 * (1 - e * e) * math.acos(e) + 3 * e * small + 3 * math.asin(e) - math.pi
    truth = {
        (1, 1): 2 * e - e**2,
        (2, 1): disc / math.pi,
        (3, 1): e - e**2 + e**3 / 3,
        (2, 2): -(e**2) * math.log(e) + e**2 / 2,
        (3, 3): e**2 - 2 * e**3 / 3,
    }
    tube = integrate.quad(
        lambda r: 2 * r * (math.asinh(math.sqrt(1 - r * r) / r) - math.sqrt(1 - r * r)),
        0, e, epsabs=1e-14,
    )  # fmt: skip
    truth[3, 2] = tube[0]
    for (d, n), value in truth.items():
        found = exit_occupation(eps * R, R, d, n)
        assert abs(found / (R * R * value) - 1) < 1e-9, (d, n)
        fast = exit_occupation(eps * R, R, d, n, sigma=3.0)
        assert torch.allclose(found / 9, fast)


@pytest.mark.parametrize(("d", "n"), [(4, 2), (5, 3), (64, 1), (64, 32), (64, 63)])
def test_exit_occupation_by_the_radius(d, n):
    def spent(r, e):
        share = special.betainc(n / 2, (d - n) / 2, min(1, (e / r) ** 2))
        return 2 * (r - r ** (d - 1)) / (d - 2) * share

    for e in (1e-2, 0.2, 0.9):
        points = sorted({e, min(2 * e, 0.99), min(5 * e, 0.98)})
        truth = integrate.quad(spent, 0, 1, args=(e,), points=points, epsabs=0)[0]
        assert abs(exit_occupation(e, 1, d, n) / truth - 1) < 1e-8


def test_exit_occupation_of_the_whole_ball():
    for d in (1, 2, 3, 10):
        for n in range(1, d + 1):
            for eps in (2.0, 2.5):
                found = exit_occupation(eps, 2.0, d, n)
                assert abs(found - 4 / d) < 1e-13
            assert exit_occupation(0.0, 2.0, d, n) == 0
    assert exit_occupation(torch.ones(2, 1), torch.ones(3), 2, 1).shape == (2, 3)


def test_numbers_keep_gradients():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    assert numbers("x", x).dtype == DOUBLE and numbers("x", x).requires_grad
    assert numbers("x", [1, 2]).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"eps": -0.1}, ValueError, "eps must be a finite number >= 0, got -0.1"),
        ({"eps": math.nan}, ValueError, "eps must"),
        ({"T": -1.0}, ValueError, "T must be a number >= 0"),
        ({"distance": INF}, ValueError, "distance must be a finite"),
        ({"codimension": 0}, ValueError, "codimension must be at least 1, got 0"),
        ({"codimension": 1.5}, TypeError, "codimension must be an int, got 1.5"),
        ({"codimension": True}, TypeError, "codimension must be an int"),
        ({"sigma": 0}, ValueError, "sigma must be a finite number > 0"),
        ({"T": "long"}, TypeError, "T must be a real number"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"eps": 0.1, "T": 1.0, "distance": 1.0, "codimension": 2} | arguments
    with pytest.raises(error, match=words):
        occupation(**call)


def test_a_flat_needs_its_space():
    with pytest.raises(ValueError, match="d = 2 dimensions has a codimension up to 2"):
        exit_occupation(0.1, 1.0, 2, 3)
    with pytest.raises(ValueError, match="R must be a finite number > 0"):
        exit_occupation(0.1, 0.0, 2, 1)


@pytest.mark.parametrize("codimension", [1, 2, 3])
def test_a_width_whose_square_underflows_holds_no_time(codimension):
    found = occupation(1e-300, 1.0, distance=0.0, codimension=codimension)
    assert 0 <= found < 1e-150

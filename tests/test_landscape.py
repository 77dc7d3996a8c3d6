"""Landscape: closed forms against sums of draws, known curvatures, and bad input."""

import math

import pytest
import torch
from scipy import integrate
from truths import DOUBLE, assert_mean, normals, refuted

from moebook import landscape

PI = math.pi


def turned(angle, d=3):
    """The unit vector at this angle from the first axis, in the first plane."""
    vector = torch.zeros(d, dtype=DOUBLE)
    vector[0], vector[1] = math.cos(angle), math.sin(angle)
    return vector


V = turned(0.0)
SIDE = torch.tensor([0.0, 0.0, 1.0], dtype=DOUBLE)


def hard(a):
    return lambda u: landscape.hard_profiled(u, V, a)


def soft(a, tau):
    return lambda u: landscape.soft_profiled(u, V, a, tau)


def on_circle(theta, chi):
    """The risk in the plane of v and a, |a| = 1, u turned from v towards a."""
    level, tilt = 1 - 2 * theta / PI, 2 * math.sin(theta) / PI
    cross = 2 * level * tilt * math.cos(2 * chi - theta)
    return 1 - (level**2 + cross + tilt**2)


@pytest.mark.parametrize("chi", [0.0, 0.5, 1.0, PI / 2])
@pytest.mark.parametrize("theta", [0.01, 0.4, 1.2, PI / 2, 2.5, 3.1])
def test_the_plane_has_a_closed_form(theta, chi):
    found = landscape.hard_profiled(turned(theta), V, turned(chi))
    assert found.item() == pytest.approx(on_circle(theta, chi), abs=1e-14)


def test_the_profiled_experts_are_the_mean_of_draws():
    u, v, a = normals(3, 4, seed=3)
    x = normals(2**20, 4, seed=4)
    draws = (torch.sign(x @ u) * torch.sign(x @ v) * (x @ a))[:, None] * x
    best = landscape.hard_contrast(u, v, a)
    direction = best
    assert_mean(draws @ direction, (best @ direction).item())
    flipped = landscape.hard_contrast(u, -v, a)
    assert refuted(draws @ direction, (flipped @ direction).item())


def test_the_risk_is_that_of_the_profiled_experts_and_no_others_do_better():
    u, v, a = normals(3, 4, seed=6)
    x = normals(2**20, 4, seed=7)
    y, side = torch.sign(x @ v) * (x @ a), torch.sign(x @ u)
    best = landscape.hard_contrast(u, v, a)
    risk = landscape.hard_profiled(u, v, a).item()
    assert_mean((y - side * (x @ best)) ** 2, risk)
    assert refuted((y - side * (x @ a)) ** 2, risk)


def test_only_directions_count_and_sides_have_no_name():
    u, v, a = normals(3, 5, seed=8)
    risk = landscape.hard_profiled(u, v, a)
    for other in (
        landscape.hard_profiled(3 * u, v, a),
        landscape.hard_profiled(-u, v, a),
        landscape.hard_profiled(u, -2 * v, a),
        landscape.hard_profiled(u, v, 2 * a) / 4,
    ):
        assert other.item() == pytest.approx(risk.item(), rel=1e-13)


def test_rows_are_answered_one_by_one():
    u, (v, a) = normals(6, 3, seed=9), normals(2, 3, seed=10)
    for f in (hard(a), soft(a, 0.3)):
        assert torch.allclose(f(u), torch.stack([f(row) for row in u]), atol=1e-14)
    assert landscape.hard_profiled(u[:0], v, a).shape == (0,)
    assert landscape.soft_profiled(u[:0], v, a, 0.3).shape == (0,)
    assert landscape.hard_contrast(u, v, a).shape == (6, 3)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("distance", [1e-2, 1e-7, 1e-12])
def test_the_cone_keeps_its_slope_down_to_the_tip(distance, sign):
    a = turned(1.0)
    u = sign * V + distance * turned(PI / 2)
    slope = 8 / PI * math.sin(1.0) ** 2
    gradient = landscape.sphere_gradient(hard(a), u)
    assert gradient.norm().item() == pytest.approx(slope, rel=3 * distance + 1e-9)
    assert abs(gradient.norm().item() - slope / 2) > 0.5
    risk = hard(a)(u).item()
    assert risk == pytest.approx(slope * distance, rel=2 * distance, abs=1e-15)


def test_at_the_tip_the_gradient_is_zero_and_not_nan():
    for u in (V, -V):
        assert hard(turned(1.0))(u).item() == 0.0
        assert landscape.sphere_gradient(hard(turned(1.0)), u).tolist() == [0, 0, 0]


def test_a_contrast_along_the_separator_makes_the_minimum_cubic():
    theta = 1e-3
    risk = hard(V)(turned(theta)).item()
    next_term = 4 / PI**2 * theta**4
    assert risk == pytest.approx(8 / (3 * PI) * theta**3 - next_term, rel=1e-4)
    assert risk != pytest.approx(theta**2, rel=0.5)


@pytest.mark.parametrize("chi", [0.2, 0.8, PI / 2])
@pytest.mark.parametrize("length", [1.0, 3.0])
def test_the_contrast_is_a_second_strict_minimum(chi, length):
    a = torch.tensor([math.cos(chi), math.sin(chi), 0, 0], dtype=DOUBLE) * length
    v = turned(0.0, 4)

    def f(u):
        return landscape.hard_profiled(u, v, a)

    assert landscape.sphere_gradient(f, a).abs().max() < 1e-13
    hessian = landscape.sphere_hessian(f, a)
    unit = length**2 * math.sin(chi) ** 2 / PI**2
    towards = turned(chi + PI / 2, 4)
    assert (towards @ hessian @ towards).item() == pytest.approx(16 * unit, rel=1e-10)
    for axis in (2, 3):
        assert hessian[axis, axis].item() == pytest.approx(8 * unit, rel=1e-10)
    assert torch.allclose(hessian @ a, torch.zeros_like(a), atol=1e-12)


def test_the_equator_of_an_aligned_teacher_is_a_ridge():
    hessian = landscape.sphere_hessian(hard(V), turned(PI / 2))
    assert hessian[0, 0].item() == pytest.approx(-16 / PI**2, rel=1e-10)
    assert abs(hessian[2, 2].item()) < 1e-12


def test_soft_agrees_with_least_squares_on_draws():
    u, v, a = normals(3, 3, seed=11)
    x, tau = normals(2**20, 3, seed=12), 0.4
    y = torch.sign(x @ v) * (x @ a)
    gate = torch.tanh(x @ (u / u.norm()) / (2 * tau))[:, None]
    table = torch.cat([x, gate * x], 1)
    fit = torch.linalg.lstsq(table, y[:, None]).solution
    residual = (y - (table @ fit)[:, 0]).square()
    assert_mean(residual, landscape.soft_profiled(u, v, a, tau).item())
    assert refuted(residual, landscape.soft_profiled(u, v, a, 2 * tau).item())
    c = normals(1, 3, seed=13)[0]
    residual = (y - gate[:, 0] * (x @ c)).square()
    assert_mean(residual, landscape.soft_risk(u, v, a, tau, c).item())
    own = landscape.soft_risk(u, v, a, tau)
    assert own.item() == landscape.soft_risk(u, v, a, tau, a).item()


def test_soft_risk_against_a_plane_integral():
    """E[(sgn V - T(Z))^2] for a contrast across both separators."""
    tau, theta = 0.3, 0.5

    def inside(r, t):
        z = t * math.cos(theta) + r * math.sin(theta)
        weight = math.exp(-(t * t + r * r) / 2) / (2 * PI)
        return (1 - math.tanh(z / (2 * tau))) ** 2 * weight

    truth = 2 * integrate.dblquad(inside, 0, 9, -9, 9, epsabs=1e-10)[0]
    found = landscape.soft_risk(turned(theta), V, SIDE, tau).item()
    assert found == pytest.approx(truth, abs=1e-8)


def test_soft_tends_to_hard():
    u, v, a = normals(3, 3, seed=14)
    limit = landscape.hard_profiled(u, v, a)
    misses = [
        (landscape.soft_profiled(u, v, a, tau) - limit).abs().item()
        for tau in (1e-2, 1e-3, 1e-6)
    ]
    assert misses[0] > 5 * misses[1] > 25 * misses[2]
    assert misses[2] < 1e-5


def test_no_scale_escapes_the_quadrature(monkeypatch):
    u, v, a = normals(40, 3, seed=15), V, turned(1.0)
    u = torch.cat([u, V + 1e-5 * u[:5], -V + 1e-9 * u[:5]])
    scales = (1e-6, 1e-3, 0.1, 10.0)
    before = [landscape.soft_profiled(u, v, a, tau) for tau in scales]
    rule = landscape.roots_legendre
    monkeypatch.setattr(landscape, "roots_legendre", lambda n: rule(2 * n))
    landscape._rule.cache_clear()
    after = [landscape.soft_profiled(u, v, a, tau) for tau in scales]
    landscape._rule.cache_clear()
    for one, two in zip(before, after, strict=True):
        assert (one - two).abs().max() < 1e-12


def test_heat_rounds_the_cone_exactly():
    """Fixed experts across the plane: curvature sqrt(2/pi) / tau at every tau."""
    for tau in (0.01, 0.3, 2.0):

        def f(u, tau=tau):
            return landscape.soft_risk(u, V, 2 * SIDE, tau)

        curvature = landscape.sphere_hessian(f, V)[1, 1].item() * tau
        assert curvature == pytest.approx(4 * math.sqrt(2 / PI), rel=1e-6)


def test_soft_derivatives_at_the_teacher_agree_with_differences():
    f, h = soft(turned(1.0), 0.2), 1e-3
    low, middle, high = (f(turned(t)).item() for t in (-h, 0.0, h))
    gradient = landscape.sphere_gradient(f, V)[1].item()
    assert gradient == pytest.approx((high - low) / (2 * h), rel=1e-3)
    assert gradient < -0.01
    curvature = landscape.sphere_hessian(f, V)[1, 1].item()
    assert curvature == pytest.approx((high - 2 * middle + low) / h**2, rel=1e-3)


@pytest.mark.parametrize("tau", [0.01, 0.1, 0.5])
def test_across_the_trap_curves_like_the_smooth_label(tau):
    """At u = a across v, sideways: (4/pi) B^2 / A."""
    hessian = landscape.sphere_hessian(soft(turned(PI / 2), tau), turned(PI / 2))
    A, B = landscape.gate_moments(tau)
    assert hessian[2, 2].item() == pytest.approx((4 / PI * B**2 / A).item(), rel=1e-9)
    assert hessian[0, 0] > 1.9 * hessian[2, 2]


def test_gate_moments_against_quadrature():
    for tau in (0.05, 0.7, 4.0):

        def mean(g, tau=tau):
            def inside(z):
                return g(z) * math.exp(-z * z / 2) * math.sqrt(2 / PI)

            return integrate.quad(inside, 0, 12, epsabs=1e-12, points=[tau, 3])[0]

        A, B = landscape.gate_moments(tau)
        assert A.item() == pytest.approx(
            mean(lambda z, t=tau: math.tanh(z / (2 * t)) ** 2), abs=1e-11
        )
        assert B.item() == pytest.approx(
            mean(lambda z, t=tau: z * math.tanh(z / (2 * t))), abs=1e-11
        )


def test_smooth_label_is_least_at_its_best_contrast():
    A, B = landscape.gate_moments(0.3)
    best = landscape.smooth_label(0.4, 0.3)
    c = B / A * math.cos(0.4)
    assert landscape.smooth_label(0.4, 0.3, c).item() == pytest.approx(best.item())
    assert landscape.smooth_label(0.4, 0.3, 1.1 * c) > best + 1e-3
    theta = torch.tensor([0.0, PI / 2], dtype=DOUBLE)
    assert landscape.smooth_label(theta, 0.3).shape == (2,)
    assert landscape.smooth_label(theta, 0.3)[1].item() == pytest.approx(1.0)


def test_descent_finds_the_trap_and_the_teacher():
    a = turned(1.0)
    starts = torch.stack([turned(0.9), turned(0.2), -turned(1.1)])
    ends = landscape.descend(hard(a), starts, 0.02, 800)
    assert torch.allclose(ends[0], a, atol=1e-4)
    assert torch.allclose(ends[1], V, atol=0.04)
    assert torch.allclose(ends[2], -a, atol=1e-4)
    assert torch.equal(landscape.descend(hard(a), starts, 0.02, 0), starts)
    one = landscape.descend(hard(a), turned(0.9), 0.02, 800)
    assert torch.allclose(one, a, atol=1e-4)


def test_a_large_step_leaves_the_cone():
    a, start = turned(PI / 2), turned(0.3)
    assert abs(landscape.descend(hard(a), start, 0.01, 400)[0]) > 0.99
    assert abs(landscape.descend(hard(a), start, 0.6, 400)[0]) < 0.01


def test_gradients_reach_teacher_and_temperature():
    tau = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
    v, a = V.clone().requires_grad_(), turned(1.0).requires_grad_()
    landscape.soft_profiled(turned(0.4), v, a, tau).backward()
    assert tau.grad < 0
    for grad in (v.grad, a.grad):
        assert grad.isfinite().all()
        assert grad.norm() > 0


@pytest.mark.parametrize(
    ("u", "v", "a", "error", "words"),
    [
        (torch.zeros(3), V, V, ValueError, "u must have a direction"),
        (V, torch.zeros(3), V, ValueError, "separator must have a direction"),
        (torch.ones(2), V, V, ValueError, r"separator must have shape \(2,\)"),
        (V, V, torch.ones(2), ValueError, r"contrast must have shape \(3,\)"),
        (torch.ones(1, 1, 3), V, V, ValueError, r"u must have shape \(d,\) or"),
        (V, V[None], V, ValueError, "separator must have shape"),
        (V * math.nan, V, V, ValueError, "u must be finite"),
        (V, V, V / 0.0, ValueError, "contrast must be finite"),
        ("north", V, V, TypeError, "u must be a tensor"),
        (torch.ones(2, 0), V, V, ValueError, "u must have shape"),
    ],
)
def test_bad_vectors_are_refused(u, v, a, error, words):
    with pytest.raises(error, match=words):
        landscape.hard_profiled(u, v, a)
    with pytest.raises(error, match=words):
        landscape.soft_profiled(u, v, a, 0.1)


@pytest.mark.parametrize("tau", [0, -1.0, math.nan, math.inf])
def test_bad_temperatures_are_refused(tau):
    for call in (
        lambda: landscape.soft_profiled(V, V, V, tau),
        lambda: landscape.soft_risk(V, V, V, tau),
        lambda: landscape.gate_moments(tau),
        lambda: landscape.smooth_label(0.1, tau),
    ):
        with pytest.raises(ValueError, match="tau must be positive and finite"):
            call()
    with pytest.raises(TypeError, match="tau must be one number"):
        landscape.gate_moments(torch.ones(2))


def test_other_bad_requests_are_refused():
    with pytest.raises(ValueError, match="finite angle"):
        landscape.smooth_label(math.nan, 0.1)


@pytest.mark.parametrize("tau", [1e3, 1e8, 1e160, 1e300])
def test_a_hot_gate_stays_at_its_limit(tau):
    found = landscape.soft_profiled(torch.eye(3, dtype=DOUBLE), V, turned(PI / 2), tau)
    # The contrast is across the separator: M shares its second moment with both.
    limit = torch.tensor([1 - 2 / PI, 1 - 2 / PI, 1.0], dtype=DOUBLE)
    assert (found - limit).abs().max() < 1e-5
    assert abs(landscape.smooth_label(0.3, tau) - math.sin(0.3) ** 2) < 1e-5

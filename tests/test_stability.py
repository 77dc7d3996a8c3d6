"""stability: the operator against moments, the flow against exact solutions."""

import math

import pytest
import torch
from truths import DOUBLE, assert_mean, generator, normals, refuted

from moebook import laws, stability

torch.set_num_threads(1)
ROOT = math.sqrt(2 / math.pi)


def vec(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


V, A = vec(1.0, 2.0, -1.0), vec(0.3, -0.5, 1.0)
E1, E2 = vec(1.0, 0.0, 0.0), vec(0.0, 1.0, 0.0)


def teacher(v=V, a=A):
    return lambda x: torch.sign(x @ v) * (x @ a)


def close(found, truth, atol=1e-11):
    torch.testing.assert_close(found, truth, rtol=0, atol=atol)


def grown(u, c, tau, v=V, a=A):
    """Minus the gradient of the risk, by the rule of nodes instead of by `risk`."""
    x, w = stability.quadrature(v, 24)
    z = torch.stack([u, c]).requires_grad_(True)
    F = torch.tanh(x @ z[0] / (2 * tau)) * (x @ z[1])
    return -torch.autograd.grad((w * (teacher(v, a)(x) - F) ** 2).sum(), z)[0]


# --- the operator -----------------------------------------------------------


def test_operator_in_its_own_frame():
    a = vec(0.6, 0.8, 0.0)
    truth = ROOT * vec(1.2, 0.8, 0, 0.8, 0.6, 0, 0, 0, 0.6).reshape(3, 3)
    close(stability.operator(5 * E1, a), truth)
    close(stability.operator(-E1, a), -truth)


def test_operator_is_the_integral_of_y_x_x():
    x, w = stability.quadrature(V, 4)
    direct = (x * (w * teacher()(x))[:, None]).T @ x
    close(stability.operator(V, A), direct)
    close(stability.operator_of(teacher(), x, w), direct)


def test_operator_with_a_covariance_is_the_integral_under_it():
    root = vec(1, 0.5, 0, 0, 2, 0.3, 0, 0, 0.5).reshape(3, 3)
    spread = root @ root.mT
    g, w = stability.quadrature(root.mT @ V, 4)
    truth = stability.operator_of(teacher(), g @ root.mT, w)
    close(stability.operator(V, A, spread), truth)
    assert (stability.operator(V, A) - truth).abs().max() > 0.1
    close(stability.operator(V, A, torch.eye(3)), stability.operator(V, A))


def test_a_flat_law_is_allowed_where_the_separator_varies():
    flat = torch.diag(vec(1, 4, 0))
    found = stability.operator(V, A, flat)
    assert found[2].abs().max() == 0
    smaller = stability.operator(V[:2], A[:2], flat[:2, :2])
    close(found[:2, :2], smaller)
    with pytest.raises(ValueError, match="must vary"):
        stability.operator(vec(0, 0, 1), A, flat)


def test_operator_is_differentiable():
    v, a = V.clone().requires_grad_(), A.clone().requires_grad_()
    spread = torch.diag(vec(1, 2, 3)).requires_grad_()
    symmetric = lambda v, a, s: stability.operator(v, a, (s + s.mT) / 2)  # noqa: E731
    assert torch.autograd.gradcheck(symmetric, (v, a, spread))


def test_an_intercept_takes_a_multiple_of_the_identity():
    x, w = stability.quadrature(V, 4)
    found = stability.operator_of(teacher(), x, w, intercept=True)
    level = ROOT * (V @ A) / V.norm()
    close(found, stability.operator(V, A) - level * torch.eye(3, dtype=DOUBLE))
    assert torch.linalg.matrix_rank(found, atol=1e-10) == 2


def test_a_linear_part_of_the_label_is_fitted_away():
    x, w = stability.quadrature(V, 4)
    slope = vec(3.0, -1.0, 2.0)
    found = stability.operator_of(lambda x: teacher()(x) + x @ slope, x, w)
    close(found, stability.operator(V, A))
    skew = x.clone()
    skew[:, 0] += 0.3 * (x[:, 0] ** 2 - 1)  # third moments: the fit matters now
    fitted = stability.operator_of(lambda x: x @ slope, skew, w)
    assert fitted.abs().max() < 1e-10
    assert ((skew * (w * (skew @ slope))[:, None]).T @ skew).abs().max() > 0.1


def test_an_odd_label_has_no_operator():
    x, w = stability.quadrature(V, 8)
    found = stability.operator_of(lambda x: torch.sign(x @ V), x, w)
    assert found.abs().max() < 1e-12


@pytest.mark.parametrize("intercept", [False, True])
def test_along_has_the_right_mean(intercept):
    d = 6
    v, a, q = (normals(1, d, seed)[0] for seed in (1, 2, 3))
    a = a + v
    truth = q @ stability.operator(v, a) @ q
    if intercept:
        truth = truth - ROOT * (v @ a) / v.norm() * (q @ q)
    x = laws.gaussian(2**19, d, generator(4))
    found = stability.along(teacher(v, a), x, q, intercept=intercept)
    assert_mean(found, truth.item(), off=0.1)
    assert refuted(found, 1.2 * truth.item())


def test_along_and_operator_of_agree_on_draws():
    x = laws.gaussian(2**16, 3, generator(5))
    q = vec(0.2, -1.0, 0.4)
    M = stability.operator_of(teacher(), x)
    close(
        q @ M @ q,
        stability.along(teacher(), x, q).mean(),
        atol=0.05,
    )
    assert len(stability.along(teacher(), x[:0], q)) == 0


# --- the rule of nodes ------------------------------------------------------


@pytest.mark.parametrize("order", [2, 5, 12, 40])
def test_half_range_rule_is_exact_for_polynomials(order):
    x, w = stability.quadrature(vec(2.0), order)
    assert len(x) == 2 * order
    for k in range(min(2 * order, 24)):
        half = 2 ** (k / 2) * math.gamma((k + 1) / 2) / (2 * math.sqrt(math.pi))
        found = (w * x[:, 0].clamp_min(0) ** k).sum() if k else w[x[:, 0] > 0].sum()
        assert found.item() == pytest.approx(half, rel=1e-11)
    k = 2 * order
    half = 2 ** (k / 2) * math.gamma((k + 1) / 2) / (2 * math.sqrt(math.pi))
    if order <= 5:  # and not one degree further
        assert (w * x[:, 0].clamp_min(0) ** k).sum().item() < half * (1 - 1e-6)


def test_rule_splits_where_it_says():
    for v in (V, -V, E1, -E1, E2):
        x, w = stability.quadrature(v, 6)
        assert w.sum().item() == pytest.approx(1)
        close((x * w[:, None]).T @ x, torch.eye(3, dtype=DOUBLE))
        mean = (w * (x @ v).abs()).sum() / v.norm()
        assert mean.item() == pytest.approx(ROOT, rel=1e-12)


# --- modes and flow ---------------------------------------------------------


def test_spectrum_of_the_teacher():
    a = vec(0.6, 0.8, 0.0)
    found, modes = stability.rates(stability.operator(E1, a), 0.5)
    root = math.sqrt(0.36 + 4 * 0.64)
    truth = ROOT / 0.5 * vec((1.8 + root) / 2, 0.6, (1.8 - root) / 2)
    close(found, truth)
    assert (modes.square().sum((1, 2)) - 1).abs().max() < 1e-12


def test_modes_are_eigenvectors_of_the_hessian():
    M, tau, eta = stability.operator(V, A), 0.3, (4.0, 0.5)
    found, modes = stability.rates(M, tau, *eta)
    assert (found.diff() <= 0).all()
    for rate, (u, c) in zip(found, modes, strict=True):
        close(eta[0] * M @ c / tau, rate * u, 1e-9)
        close(eta[1] * M @ u / tau, rate * c, 1e-9)


def test_linear_flow_is_the_exponential_of_the_block_matrix():
    M, tau, t = stability.operator(V, A), 0.4, 0.7
    zero = torch.zeros(3, 3, dtype=DOUBLE)
    whole = torch.cat([torch.cat([zero, M], 1), torch.cat([M, zero], 1)])
    u0, c0 = vec(1.0, 2.0, 3.0), vec(-1.0, 0.5, 0.0)
    truth = torch.linalg.matrix_exp(whole * t / tau) @ torch.cat([u0, c0])
    u, c = stability.linear_flow(M, u0, c0, t, tau)
    close(torch.cat([u, c]), truth, 1e-9)
    close(
        torch.stack(stability.linear_flow(M, u0, c0, 0.0, tau)), torch.stack([u0, c0])
    )


def test_runge_kutta_has_order_four():
    field = lambda z: z * torch.cos(z)  # noqa: E731
    times, start = vec(0.0, 1.0, 2.0), vec(0.3, 0.5)
    fine = stability.flow(field, start, times, steps=200)
    errors = [
        (stability.flow(field, start, times, steps=n) - fine).abs().max().item()
        for n in (5, 10)
    ]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.25)
    assert fine.shape == (3, 2) and torch.equal(fine[0], start)


# --- the risk ---------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.2])
def test_risk_against_nodes(tau):
    x, w = stability.quadrature(V, 40)
    u, c = vec(0.3, 0.2, 0.1), vec(0.5, -0.2, 0.7)
    F = torch.tanh(x @ u / (2 * tau)) * (x @ c)
    truth = (w * (teacher()(x) - F) ** 2).sum()
    found = stability.risk(u, c, V, A, tau)
    assert found.item() == pytest.approx(truth.item(), abs=5e-11)
    assert stability.risk(u, c, V, A, 1.02 * tau).item() != pytest.approx(
        truth.item(), abs=1e-4
    )


@pytest.mark.parametrize("angle", [0.0, 1e-12, 1e-5, 0.3, math.pi / 2, 3.0, math.pi])
def test_risk_of_a_hard_gate(angle):
    """E y F from N(u), the matrix of two half-spaces: 1 - 2 theta/pi and 2 sin/pi."""
    u = vec(math.cos(angle), math.sin(angle), 0)
    c, a = vec(0.5, -0.2, 0.7), vec(0.6, 0.8, 0.3)
    share, tilt = 1 - 2 * angle / math.pi, 2 * math.sin(angle) / math.pi
    half = angle / 2
    along = vec(math.cos(half), math.sin(half), 0)
    across = vec(-math.sin(half), math.cos(half), 0)
    N = share * torch.eye(3, dtype=DOUBLE) + tilt * (
        along.outer(along) - across.outer(across)
    )
    truth = a @ a - 2 * c @ N @ a + c @ c
    found = stability.risk(u, c, E1, a, 1e-6)
    assert found.item() == pytest.approx(truth.item(), abs=2e-5)


def test_risk_of_a_wide_gate():
    """For u = e1, c = (0, 1), v = e1, a = (0, 1): 1 - 2 E|T| + E T^2."""
    found = stability.risk(E1[:2], E2[:2], E1[:2], E2[:2], 0.5).item()
    z, w = stability.quadrature(vec(1.0), 40)
    gate = torch.tanh(z[:, 0])
    truth = (w * (1 - gate.abs()) ** 2).sum().item()
    assert found == pytest.approx(truth, abs=1e-9)


def test_risk_gradient_at_small_u_is_the_linear_flow():
    M, tau = stability.operator(V, A), 0.3
    z = 1e-6 * torch.stack([vec(1.0, 2.0, 3.0), vec(-1.0, 0.5, 0.7)])
    z.requires_grad_()
    value = stability.risk(z[0], z[1], V, A, tau)
    push = -torch.autograd.grad(value, z)[0] * 1e6
    z = z.detach() * 1e6
    close(push, torch.stack([M @ z[1], M @ z[0]]) / tau, 1e-8)
    nodes = grown(*(1e-6 * z), tau) * 1e6
    close(push, nodes, 1e-8)


def test_risk_takes_batches_and_passes_finite_differences():
    u, c = normals(4, 3, 6), normals(4, 3, 7)
    batch = stability.risk(u, c, V, A, 0.7)
    single = torch.stack(
        [stability.risk(*z, V, A, 0.7) for z in zip(u, c, strict=True)]
    )
    close(batch, single)
    inputs = [z.clone().requires_grad_() for z in (u, c, V, A)]
    assert torch.autograd.gradcheck(
        lambda *z: stability.risk(*z, 0.7), inputs, rtol=1e-5, atol=1e-7
    )


def test_flow_of_the_risk_falls_and_follows_the_top_mode():
    a, tau = vec(0.6, 0.8, 0.0), 0.5
    rate, modes = stability.rates(stability.operator(E1, a), tau)

    def field(z):
        z = z.detach().requires_grad_()
        return -torch.autograd.grad(stability.risk(z[0], z[1], E1, a, tau), z)[0]

    found = stability.flow(field, 1e-7 * modes[0], tau * vec(0.0, 3.0), steps=120)
    measured = (found[1].norm() / found[0].norm()).log() / (3 * tau)
    assert measured.item() == pytest.approx(rate[0].item(), rel=1e-7)


# --- refusals ---------------------------------------------------------------

NAN = vec(1.0, math.nan, 0.0)
EYE = torch.eye(3, dtype=DOUBLE)
X = normals(8, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: stability.operator(E1, E1[:2]), ValueError, "share one d"),
        (lambda: stability.operator(EYE, E1), ValueError, r"separator.*\(d,\)"),
        (lambda: stability.operator(NAN, E1), ValueError, "separator must be finite"),
        (lambda: stability.operator(0 * E1, E1), ValueError, "must vary"),
        (lambda: stability.operator("up", E1), TypeError, "must be numbers"),
        (lambda: stability.operator(E1 + 0j, E1), TypeError, "must be real"),
        (lambda: stability.operator(E1, E1, -EYE), ValueError, "semidefinite.*-1"),
        (lambda: stability.operator(E1, E1, X[:3]), ValueError, "symmetric"),
        (lambda: stability.operator(E1, E1, EYE[:2, :2]), ValueError, r"\(3, 3\)"),
        (lambda: stability.operator_of(teacher(), X[:2]), ValueError, "as many points"),
        (lambda: stability.operator_of(lambda x: x, X), ValueError, r"shape \(8,\)"),
        (lambda: stability.operator_of(lambda x: 1.0, X), ValueError, "got float"),
        (
            lambda: stability.operator_of(lambda x: x[:, 0] / 0, X),
            ValueError,
            "label_mean must be finite",
        ),
        (lambda: stability.operator_of(teacher(), X, E1), ValueError, "weights"),
        (lambda: stability.operator_of(teacher(), X.long()), TypeError, "float64"),
        (lambda: stability.along(teacher(), X, E1[:2]), ValueError, r"shape \(3,\)"),
        (lambda: stability.along(teacher(), X[0], E1), ValueError, r"\(n, d\)"),
        (lambda: stability.along(teacher(), X / 0, E1), ValueError, "finite"),
        (lambda: stability.quadrature(0 * E1), ValueError, "must not be zero"),
        (lambda: stability.quadrature(E1, 1), ValueError, "order must be"),
        (lambda: stability.quadrature(torch.ones(9)), ValueError, "many dimensions"),
        (lambda: stability.rates(EYE, 0), ValueError, "tau must be positive"),
        (lambda: stability.rates(EYE, math.inf), ValueError, "finite"),
        (lambda: stability.rates(EYE, 1, eta_c=-1.0), ValueError, ">= 0"),
        (lambda: stability.rates(EYE, "cold"), TypeError, "one real number"),
        (lambda: stability.rates(X, 1), ValueError, "square and symmetric"),
        (lambda: stability.linear_flow(EYE, E1, E1[:2], 1, 1), ValueError, r"\(3,\)"),
        (lambda: stability.linear_flow(EYE, E1, E1, 1, -1), ValueError, ">= 0"),
        (lambda: stability.risk(0 * E1, E1, E1, E1, 1), ValueError, "not be zero"),
        (lambda: stability.risk(E1, E1[:2], E1, E1, 1), ValueError, "share one d"),
        (lambda: stability.risk(*[vec(1.0)] * 4, 1), ValueError, "d >= 2"),
        (lambda: stability.risk(E1, E1, E1, E1, 0.0), ValueError, "tau"),
        (lambda: stability.flow(lambda z: z, E1, vec(1, 0)), ValueError, "must rise"),
        (lambda: stability.flow(lambda z: z, E1, vec(0, 1), 0), ValueError, "steps"),
        (
            lambda: stability.flow(lambda z: z**9, 9 * E1, vec(0, 9)),
            ValueError,
            "left the finite",
        ),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()

"""stability: the operator against moments, the modes against the risk."""

import math

import pytest
import torch
from truths import (
    DOUBLE,
    E1,
    A,
    V,
    assert_mean,
    close,
    generator,
    normals,
    refuted,
    teacher,
    vec,
)

from moebook import flows, laws, stability

torch.set_num_threads(1)
ROOT = math.sqrt(2 / math.pi)


def grown(u, c, tau, v=V, a=A):
    """Minus the gradient of the risk, by the rule of nodes instead of by `risk`."""
    x, w = flows.quadrature(v, 24)
    z = torch.stack([u, c]).requires_grad_(True)
    F = torch.tanh(x @ z[0] / (2 * tau)) * (x @ z[1])
    return -torch.autograd.grad((w * (teacher(v, a)(x) - F) ** 2).sum(), z)[0]


# --- the operator -------------------------------------------------------------


def test_operator_in_its_own_frame():
    a = vec(0.6, 0.8, 0.0)
    truth = ROOT * vec(1.2, 0.8, 0, 0.8, 0.6, 0, 0, 0, 0.6).reshape(3, 3)
    close(stability.operator(5 * E1, a), truth)
    close(stability.operator(-E1, a), -truth)


def test_operator_is_the_integral_of_y_x_x():
    x, w = flows.quadrature(V, 4)
    direct = (x * (w * teacher()(x))[:, None]).T @ x
    close(stability.operator(V, A), direct)
    close(stability.operator_of(teacher(), x, w), direct)


def test_operator_with_a_covariance_is_the_integral_under_it():
    root = vec(1, 0.5, 0, 0, 2, 0.3, 0, 0, 0.5).reshape(3, 3)
    spread = root @ root.mT
    g, w = flows.quadrature(root.mT @ V, 4)
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
    x, w = flows.quadrature(V, 4)
    found = stability.operator_of(teacher(), x, w, intercept=True)
    level = ROOT * (V @ A) / V.norm()
    close(found, stability.operator(V, A) - level * torch.eye(3, dtype=DOUBLE))
    assert torch.linalg.matrix_rank(found, atol=1e-10) == 2


def test_a_linear_part_of_the_label_is_fitted_away():
    x, w = flows.quadrature(V, 4)
    slope = vec(3.0, -1.0, 2.0)
    found = stability.operator_of(lambda x: teacher()(x) + x @ slope, x, w)
    close(found, stability.operator(V, A))
    skew = x.clone()
    skew[:, 0] += 0.3 * (x[:, 0] ** 2 - 1)  # third moments: the fit matters now
    fitted = stability.operator_of(lambda x: x @ slope, skew, w)
    assert fitted.abs().max() < 1e-10
    assert ((skew * (w * (skew @ slope))[:, None]).T @ skew).abs().max() > 0.1


def test_an_odd_label_has_no_operator():
    x, w = flows.quadrature(V, 8)
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


# --- modes --------------------------------------------------------------------


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


def test_risk_gradient_at_small_u_is_the_linear_flow():
    M, tau = stability.operator(V, A), 0.3
    z = 1e-6 * torch.stack([vec(1.0, 2.0, 3.0), vec(-1.0, 0.5, 0.7)])
    z.requires_grad_()
    value = flows.risk(z[0], z[1], V, A, tau)
    push = -torch.autograd.grad(value, z)[0] * 1e6
    z = z.detach() * 1e6
    close(push, torch.stack([M @ z[1], M @ z[0]]) / tau, 1e-8)
    nodes = grown(*(1e-6 * z), tau) * 1e6
    close(push, nodes, 1e-8)


def test_flow_of_the_risk_falls_and_follows_the_top_mode():
    a, tau = vec(0.6, 0.8, 0.0), 0.5
    rate, modes = stability.rates(stability.operator(E1, a), tau)

    def field(z):
        z = z.detach().requires_grad_()
        return -torch.autograd.grad(flows.risk(z[0], z[1], E1, a, tau), z)[0]

    found = flows.flow(field, 1e-7 * modes[0], tau * vec(0.0, 3.0), steps=120)
    measured = (found[1].norm() / found[0].norm()).log() / (3 * tau)
    assert measured.item() == pytest.approx(rate[0].item(), rel=1e-7)


# --- refusals -----------------------------------------------------------------

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
        (lambda: stability.rates(EYE, 0), ValueError, "tau must be positive"),
        (lambda: stability.rates(EYE, math.inf), ValueError, "finite"),
        (lambda: stability.rates(EYE, 1, eta_c=-1.0), ValueError, ">= 0"),
        (lambda: stability.rates(EYE, "cold"), TypeError, "one real number"),
        (lambda: stability.rates(X, 1), ValueError, "square and symmetric"),
        (lambda: stability.linear_flow(EYE, E1, E1[:2], 1, 1), ValueError, r"\(3,\)"),
        (lambda: stability.linear_flow(EYE, E1, E1, 1, -1), ValueError, ">= 0"),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()

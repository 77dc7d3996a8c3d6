"""flows: the rule against moments, the risk against nodes, the order of the flow."""

import math

import pytest
import torch
from truths import DOUBLE, E1, E2, A, V, close, normals, teacher, vec

from moebook import flows

torch.set_num_threads(1)
ROOT = math.sqrt(2 / math.pi)


# --- the rule of nodes --------------------------------------------------------


@pytest.mark.parametrize("order", [2, 5, 12, 40])
def test_half_range_rule_is_exact_for_polynomials(order):
    x, w = flows.quadrature(vec(2.0), order)
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
        x, w = flows.quadrature(v, 6)
        assert w.sum().item() == pytest.approx(1)
        close((x * w[:, None]).T @ x, torch.eye(3, dtype=DOUBLE))
        mean = (w * (x @ v).abs()).sum() / v.norm()
        assert mean.item() == pytest.approx(ROOT, rel=1e-12)


# --- the flow -----------------------------------------------------------------


def test_runge_kutta_has_order_four():
    field = lambda z: z * torch.cos(z)  # noqa: E731
    times, start = vec(0.0, 1.0, 2.0), vec(0.3, 0.5)
    fine = flows.flow(field, start, times, steps=200)
    errors = [
        (flows.flow(field, start, times, steps=n) - fine).abs().max().item()
        for n in (5, 10)
    ]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.25)
    assert fine.shape == (3, 2) and torch.equal(fine[0], start)


# --- the risk -----------------------------------------------------------------


@pytest.mark.parametrize("tau", [1.0, 0.5, 0.2])
def test_risk_against_nodes(tau):
    x, w = flows.quadrature(V, 40)
    u, c = vec(0.3, 0.2, 0.1), vec(0.5, -0.2, 0.7)
    F = torch.tanh(x @ u / (2 * tau)) * (x @ c)
    truth = (w * (teacher()(x) - F) ** 2).sum()
    found = flows.risk(u, c, V, A, tau)
    assert found.item() == pytest.approx(truth.item(), abs=5e-11)
    assert flows.risk(u, c, V, A, 1.02 * tau).item() != pytest.approx(
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
    found = flows.risk(u, c, E1, a, 1e-6)
    assert found.item() == pytest.approx(truth.item(), abs=2e-5)


def test_risk_of_a_wide_gate():
    """For u = e1, c = (0, 1), v = e1, a = (0, 1): 1 - 2 E|T| + E T^2."""
    found = flows.risk(E1[:2], E2[:2], E1[:2], E2[:2], 0.5).item()
    z, w = flows.quadrature(vec(1.0), 40)
    gate = torch.tanh(z[:, 0])
    truth = (w * (1 - gate.abs()) ** 2).sum().item()
    assert found == pytest.approx(truth, abs=1e-9)


def test_risk_takes_batches_and_passes_finite_differences():
    u, c = normals(4, 3, 6), normals(4, 3, 7)
    batch = flows.risk(u, c, V, A, 0.7)
    single = torch.stack([flows.risk(*z, V, A, 0.7) for z in zip(u, c, strict=True)])
    close(batch, single)
    inputs = [z.clone().requires_grad_() for z in (u, c, V, A)]
    assert torch.autograd.gradcheck(
        lambda *z: flows.risk(*z, 0.7), inputs, rtol=1e-5, atol=1e-7
    )


# --- refusals -----------------------------------------------------------------

NAN = vec(1.0, math.nan, 0.0)
EYE = torch.eye(3, dtype=DOUBLE)
X = normals(8, 3)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: flows.quadrature(0 * E1), ValueError, "must not be zero"),
        (lambda: flows.quadrature(E1, 1), ValueError, "order must be"),
        (lambda: flows.quadrature(torch.ones(9)), ValueError, "many dimensions"),
        (lambda: flows.risk(0 * E1, E1, E1, E1, 1), ValueError, "not be zero"),
        (lambda: flows.risk(E1, E1[:2], E1, E1, 1), ValueError, "share one d"),
        (lambda: flows.risk(*[vec(1.0)] * 4, 1), ValueError, "d >= 2"),
        (lambda: flows.risk(E1, E1, E1, E1, 0.0), ValueError, "tau"),
        (lambda: flows.flow(lambda z: z, E1, vec(1, 0)), ValueError, "must rise"),
        (lambda: flows.flow(lambda z: z, E1, vec(0, 1), 0), ValueError, "steps"),
        (
            lambda: flows.flow(lambda z: z**9, 9 * E1, vec(0, 9)),
            ValueError,
            "left the finite",
        ),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()

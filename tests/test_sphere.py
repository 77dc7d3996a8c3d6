"""Sphere: a quadratic form has known derivatives and known minima; bad input."""

import math

import pytest
import torch
from truths import DOUBLE, normals

from moebook import sphere


def test_riemannian_derivatives_of_a_quadratic_form():
    root = normals(4, 4, seed=16)
    form, u = root + root.T, torch.nn.functional.normalize(normals(5, 4, seed=17))

    def f(x):
        return ((x @ form) * x).sum(-1)

    tangent = torch.eye(4, dtype=DOUBLE) - u[:, :, None] * u[:, None, :]
    gradient = 2 * (tangent @ (u @ form)[:, :, None])[:, :, 0]
    assert torch.allclose(sphere.sphere_gradient(f, u), gradient, atol=1e-12)
    truth = 2 * tangent @ form @ tangent - 2 * f(u)[:, None, None] * tangent
    found = sphere.sphere_hessian(f, u)
    assert torch.allclose(found, truth, atol=1e-12)
    assert not torch.allclose(found, 2 * tangent @ form @ tangent, atol=0.1)
    assert torch.allclose(sphere.sphere_hessian(f, u[0]), truth[0], atol=1e-12)


def energy(u):
    return (torch.tensor([1.0, 2.0, 4.0], dtype=DOUBLE) * u**2).sum(-1)


def test_descent_finds_the_softest_axis():
    starts = normals(6, 3, seed=18)
    ends = sphere.descend(energy, starts, 0.1, 300)
    assert torch.allclose(ends[:, 0].abs(), torch.ones(6, dtype=DOUBLE), atol=1e-10)
    assert torch.equal(ends[:, 0].sign(), starts[:, 0].sign())
    one = sphere.descend(energy, starts[0], 0.1, 300)
    assert torch.allclose(one, ends[0], atol=1e-12)
    still = sphere.descend(energy, 2 * starts, 0.1, 0)
    assert torch.allclose(still, starts / starts.norm(dim=1, keepdim=True))


def test_a_step_follows_the_gradient():
    u = sphere.unit("u", normals(1, 3, seed=19)[0])
    moved = (sphere.descend(energy, u, 1e-6, 1) - u) / 1e-6
    assert torch.allclose(moved, -sphere.sphere_gradient(energy, u), atol=1e-4)


def test_no_rows_are_no_work():
    none = torch.ones(0, 3, dtype=DOUBLE)
    assert sphere.sphere_gradient(energy, none).shape == (0, 3)
    assert sphere.sphere_hessian(energy, none).shape == (0, 3, 3)
    assert sphere.descend(energy, none, 0.1, 2).shape == (0, 3)


def test_bad_requests_are_refused():
    V = torch.eye(3, dtype=DOUBLE)[0]
    for zero in (torch.zeros(3), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match="must have a direction"):
            sphere.sphere_gradient(energy, zero)
    with pytest.raises(ValueError, match="u must be finite"):
        sphere.sphere_hessian(energy, V * math.nan)
    with pytest.raises(ValueError, match=r"f must map \(m, d\)"):
        sphere.sphere_gradient(lambda u: u, V)
    with pytest.raises(ValueError, match=r"f must map \(m, d\)"):
        sphere.sphere_hessian(lambda u: u.sum(), torch.ones(2, 3))
    for step in (0.0, -0.1, math.inf, True):
        with pytest.raises(ValueError, match="step must be"):
            sphere.descend(energy, V, step, 1)
    with pytest.raises(ValueError, match="steps must be"):
        sphere.descend(energy, V, 0.1, -1)

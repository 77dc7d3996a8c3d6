"""visits: samples of occupation times, against closed forms and one another."""

import math

import numpy as np
import pytest
import torch
from truths import (
    DOUBLE,
    INF,
    assert_mean,
    generator,
    iid_mass,
    normals,
    random_router,
    refuted,
)

from moebook.routing import Affine, gap
from moebook.sojourn import occupation
from moebook.visits import occupation_hits, occupation_near_flat, occupation_near_tie


@pytest.mark.parametrize(
    ("n", "a", "T", "sigma"),
    [(1, 0.5, 1.0, 1.0), (2, 0.5, 2.0, 0.5), (2, 0.0, 1.0, 1.0), (3, 0.5, 1.0, 1.0)],
)
def test_near_a_flat(n, a, T, sigma):
    truth = occupation(0.3, T, distance=a, codimension=n, sigma=sigma).item()
    samples = occupation_near_flat(
        0.3, T, 60_000, generator(n), distance=a, codimension=n, sigma=sigma
    )
    assert samples.dtype == DOUBLE and ((samples >= 0) & (samples <= T)).all()
    assert_mean(samples, truth, off=0.05)
    x = torch.tensor([[a] + [0.0] * n], dtype=DOUBLE).expand(100_000, n + 1)
    hits = occupation_hits(
        lambda y: y[:, :n].norm(dim=1) < 0.3, x, T, generator(1), sigma=sigma
    )
    assert_mean(hits, truth, off=0.2)
    assert samples.var() < hits.var()


def test_a_small_eps_loses_no_sample():
    truth = occupation(1e-6, 1, distance=0.5, codimension=3).item()
    samples = occupation_near_flat(
        1e-6, 1, 50_000, generator(), distance=0.5, codimension=3
    )
    assert_mean(samples, truth)
    assert refuted(samples, truth * 2 * math.pi / 3)


def test_flat_samples_at_the_edges():
    for T in (0.0, 1e-300, 1e-6, 1.0):
        for a, eps in ((0.0, 0.1), (0.1, 0.1), (1.0, 0.1), (1e-9, 0.1), (1e6, 0.0)):
            samples = occupation_near_flat(
                eps, T, 2000, generator(), distance=a, codimension=2
            )
            assert samples.isfinite().all()
            assert ((samples >= 0) & (samples <= T)).all()
            if 0 < T < 1e-3 and a == eps:  # a plane, half of the time
                assert abs(samples.mean() / T - 0.5) < 1e-2
    near_flat = occupation_near_flat(0.1, 1, 0, generator(), distance=1, codimension=2)
    assert near_flat.shape == (0,)


@pytest.mark.parametrize("k", [1, 3])
def test_near_a_tie_of_iid_logits(k):
    """From 0 the margin at time t is sqrt(t) times that of K normal numbers."""
    K, w, T = 8, 0.1, 2.0
    router = Affine(torch.eye(K, dtype=DOUBLE))
    node, weight = np.polynomial.legendre.leggauss(40)
    root = math.sqrt(T) / 2 * (node + 1)  # s = sqrt(t), dt = 2 s ds
    masses = [2 * s * iid_mass(w / s, K, k) for s in root]
    truth = math.sqrt(T) / 2 * float(weight @ masses)
    x = torch.zeros(60_000, K)
    samples = occupation_near_tie(router, x, w, T, generator(k), k)
    assert ((samples >= 0) & (samples <= T)).all()
    assert_mean(samples, truth, off=0.06)
    assert refuted(samples, T * iid_mass(w, K, k))  # the last time for all times


@pytest.mark.parametrize("k", [1, 2, 7])
def test_near_a_tie_agrees_with_hits(k):
    router, x = random_router(8, 4, seed=3), normals(1, 4).expand(80_000, 4)
    found = occupation_near_tie(router, x, 0.2, 2.0, generator(5), k, sigma=0.7)
    hits = occupation_hits(
        lambda y: gap(router(y), k) <= 0.2, x, 2.0, generator(4), sigma=0.7
    )
    error = ((found.var() + hits.var()) / 80_000).sqrt()
    assert (found.mean() - hits.mean()).abs() < 5 * error
    assert error < 0.01 * max(found.mean(), 0.6)
    assert found.var() < hits.var()


def test_a_tie_of_two_is_a_slab():
    weight = torch.tensor([[1.5, 2.0], [0.0, 0.0]], dtype=DOUBLE)
    router, x = Affine(weight), torch.tensor([[0.6, 0.0]], dtype=DOUBLE)
    truth = occupation(0.1, 1.0, distance=0.36, codimension=1).item()
    samples = occupation_near_tie(router, x.expand(50_000, 2), 0.25, 1.0, generator())
    assert_mean(samples, truth)
    assert refuted(samples, truth * 2.5)  # the slope of the score forgotten


def test_tie_samples_at_the_edges():
    router, x = random_router(5, 3), normals(50, 3)
    for w, T, value in ((0.0, 1.0, 0.0), (INF, 2.0, 2.0), (0.1, 0.0, 0.0)):
        samples = occupation_near_tie(router, x, w, T, generator())
        assert (samples == value).all()
    assert (occupation_near_tie(router, x, 9.0, 1.0, generator(), 5) == 0).all()
    assert occupation_near_tie(router, x[:0], 0.1, 1.0, generator()).shape == (0,)
    assert occupation_hits(lambda y: y[:, 0] > 0, x[:0], 1, generator()).shape == (0,)
    twins = Affine(torch.ones(2, 3), torch.tensor([0.0, 0.5]))
    assert (occupation_near_tie(twins, x.float(), 0.6, 1.0, generator()) == 1).all()
    assert (occupation_near_tie(twins, x.float(), 0.4, 1.0, generator()) == 0).all()
    single = random_router(5, 3, dtype=torch.float32)
    values = [
        occupation_near_tie(single, t, 0.1, 1.0, generator())
        for t in (x.float(), x.float().double())
    ]
    assert torch.equal(*values)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"w": -1.0}, ValueError, "w must be a number >= 0"),
        ({"T": INF}, ValueError, "T must be a finite"),
        ({"T": -1.0}, ValueError, "T must"),
        ({"sigma": 0.0}, ValueError, "sigma must"),
        ({"k": 6}, ValueError, "from 1 to K = 5"),
        ({"x": torch.tensor([[0.0, math.nan, 1.0]])}, ValueError, "x must be finite"),
        ({"x": torch.zeros(3)}, ValueError, r"shape \(n, 3\)"),
        ({"generator": 3}, TypeError, "torch.Generator"),
        ({"router": gap}, TypeError, "routing.Affine"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"router": random_router(5, 3), "x": normals(4, 3), "w": 0.1, "T": 1.0}
    call |= {"generator": generator()} | arguments
    with pytest.raises(error, match=words):
        occupation_near_tie(**call)


def test_a_predicate_answers_row_by_row():
    with pytest.raises(ValueError, match=r"bool \(n,\) = \(4,\), got torch.float64"):
        occupation_hits(lambda y: y[:, 0], normals(4, 3), 1.0, generator())
    with pytest.raises(ValueError, match="n must be at least 0"):
        occupation_near_flat(0.1, 1, -1, generator(), distance=1, codimension=1)

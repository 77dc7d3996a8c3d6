"""modular: draws of modular features, and problems that are refused."""

import pytest
import torch
from truths import DOUBLE, assert_mean, generator

from moebook.modular import block_features, problem, root

PI = [0.5, 0.2, 0.3]
COVARIANCES = [[[2.0, 0.5], [0.5, 1.0]], [[3.0]], [[1.0, 1.0], [1.0, 1.0]]]
NOISE = 0.5


def test_moments_given_the_module():
    draw = block_features(200_000, generator(1), PI, COVARIANCES, NOISE)
    assert draw.seen.shape == draw.clean.shape == (200_000, 5)
    assert draw.seen.dtype == DOUBLE and draw.module.dtype == torch.int64
    start = 0
    for k, S in enumerate(COVARIANCES):
        S = torch.tensor(S, dtype=DOUBLE)
        own = slice(start, start + len(S))
        alive = draw.module == k
        assert_mean(alive, PI[k], off=0.05)
        assert not draw.clean[~alive][:, own].any()
        x, seen = draw.clean[alive][:, own], draw.seen[alive][:, own]
        for i in range(len(S)):
            # Noise falls on the live block too: a variance of S alone is refuted.
            assert_mean(seen[:, i] ** 2, float(S[i, i]) + NOISE, off=0.05)
            assert_mean(x[:, 0] * x[:, i], float(S[0, i]), off=0.1)
        assert_mean(draw.seen[~alive][:, own][:, 0] ** 2, NOISE, off=0.05)
        start += len(S)
    error = draw.seen - draw.clean
    cross = (error[:, 0] * draw.clean[:, 0]) / (NOISE**0.5)
    assert abs(cross.mean()) < 5 * cross.std() / 200_000**0.5


def test_a_flat_covariance_stays_flat():
    clean = block_features(1000, generator(), PI, COVARIANCES, 0.0).clean
    assert torch.allclose(clean[:, 3], clean[:, 4], atol=1e-7)
    flat = torch.tensor(COVARIANCES[2], dtype=DOUBLE)
    assert torch.allclose(root(flat) @ root(flat), flat)


def test_equal_generators_equal_draws_and_no_samples():
    first = block_features(50, generator(3), PI, COVARIANCES, NOISE)
    again = block_features(50, generator(3), PI, COVARIANCES, NOISE)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    none = block_features(0, generator(), PI, COVARIANCES)
    assert [tuple(t.shape) for t in none] == [(0, 5), (0, 5), (0,)]


def test_float32():
    draw = block_features(100, generator(), PI, COVARIANCES, NOISE, dtype=torch.float32)
    assert draw.seen.dtype == draw.clean.dtype == torch.float32


GOOD = {
    "pi": [0.5, 0.5],
    "covariances": [[[1.0]], [[2.0, 0.0], [0.0, 1.0]]],
    "coefficients": [[1.0], [1.0, 2.0]],
    "noise": 0.5,
}


def test_numbers_keep_their_digits_and_gradients():
    noise = torch.tensor(0.1, requires_grad=True)
    found = problem([0.1, 0.9], [[[0.1]], [[0.2]]], [[0.3], [noise]], 0.7)
    assert found.pi[0].item() == 0.1 and found.noise.item() == 0.7
    assert found.coefficients[1].requires_grad


@pytest.mark.parametrize(
    ("bad", "kind", "match"),
    [
        ({"pi": [0.5, 0.4]}, ValueError, "sum 0.9: divide them by their sum"),
        ({"pi": [1.5, -0.5]}, ValueError, "not negative"),
        ({"pi": 1.0}, ValueError, r"pi must have shape \(K,\)"),
        ({"pi": [1.0]}, ValueError, "got 1, 2 and 2"),
        ({"pi": ["a", "b"]}, TypeError, "pi must be a number"),
        ({"covariances": [[[1.0]], [[1.0]]]}, ValueError, r"coefficients\[1\] must"),
        ({"covariances": [[[-1.0]], [[1, 0], [0, 1]]]}, ValueError, "semi-definite"),
        ({"covariances": [[[1.0]], [[1, 2], [2, 1]]]}, ValueError, "eigenvalue -1"),
        ({"covariances": [[[1.0]], [[1, 1], [0, 1]]]}, ValueError, "symmetric"),
        ({"covariances": [[1.0], [[1, 0], [0, 1]]]}, ValueError, r"shape \(p, p\)"),
        ({"covariances": [[[1.0]]]}, ValueError, "got 2, 1 and 2"),
        ({"coefficients": [[1.0]]}, ValueError, "got 2, 2 and 1"),
        ({"noise": -0.1}, ValueError, "noise must be >= 0, got -0.1"),
        ({"noise": float("nan")}, ValueError, "finite"),
        ({"noise": "loud"}, TypeError, "noise must be a number"),
    ],
)
def test_what_is_refused(bad, kind, match):
    problem(**GOOD)
    with pytest.raises(kind, match=match):
        problem(**{**GOOD, **bad})


def test_draws_that_are_refused():
    with pytest.raises(TypeError, match="Generator"):
        block_features(3, 0, PI, COVARIANCES)
    with pytest.raises(ValueError, match="n must be at least 0"):
        block_features(-1, generator(), PI, COVARIANCES)
    with pytest.raises(ValueError, match="noise must be one number"):
        block_features(1, generator(), PI, COVARIANCES, [0.1, 0.2])

"""regression: risks against simulated fits, algebra, and the nearest mistakes."""

import pytest
import sympy as sp
import torch
from truths import DOUBLE, assert_mean, generator, refuted

from moebook import regression
from moebook.regression import (
    block_features,
    conditional_gap,
    dense_predictor,
    dense_risk,
    dense_sensitivity,
    risk_rise,
    sparse_predictor,
    sparse_risk,
    sparse_sensitivity,
)

PI = [0.5, 0.3, 0.2]
COVARIANCES = [[[2, 0.5], [0.5, 1]], [[1, 0], [0, 3]], [[1.5, -0.5], [-0.5, 1.5]]]
COEFFICIENTS = [[1, -1], [0.5, 1], [2, 0]]
NOISE = 0.5
SAME = (PI, COVARIANCES, COEFFICIENTS, NOISE)


def close(a, b, atol=1e-12):
    b = torch.as_tensor(b, dtype=DOUBLE)
    return torch.allclose(torch.as_tensor(a), b, atol=atol, rtol=0)


def rational_risks():
    """Both risks as bias and variance of the predictors, in fractions."""
    noise, total = sp.Rational(1, 2), [0, 0]
    blocks = []
    for p, S, b in zip(PI, COVARIANCES, COEFFICIENTS, strict=True):
        S, b, p = (
            sp.nsimplify(sp.Matrix(S)),
            sp.nsimplify(sp.Matrix(b)),
            sp.nsimplify(p),
        )
        flat = noise * sp.eye(2)
        dense, sparse = (p * S + flat).inv() * p * S * b, (S + flat).inv() * S * b
        blocks.append((p, S, b, dense, sparse))
    norm = sum((d.T * d)[0] for *_, d, _ in blocks)
    for p, S, b, dense, sparse in blocks:
        total[0] += p * (((b - dense).T * S * (b - dense))[0] + noise * norm)
        bias = ((b - sparse).T * S * (b - sparse))[0]
        total[1] += p * (bias + noise * (sparse.T * sparse)[0])
    return total


def test_risks_are_bias_and_variance_of_the_predictors():
    dense, sparse = rational_risks()
    assert close(dense_risk(*SAME), float(dense))
    assert close(sparse_risk(*SAME), float(sparse))


@pytest.fixture(scope="module")
def sample():
    draw = block_features(400_000, generator(4), PI, COVARIANCES, NOISE)
    beta = torch.tensor(COEFFICIENTS, dtype=DOUBLE).flatten()
    return draw, draw.clean @ beta


def test_risks_by_simulation(sample):
    draw, y = sample
    dense = (y - draw.seen @ torch.cat(dense_predictor(*SAME))) ** 2
    experts = torch.block_diag(*[a[None] for a in sparse_predictor(*SAME)])
    answers = draw.seen @ experts.mT
    sparse = (y - answers.gather(1, draw.module[:, None])[:, 0]) ** 2
    assert_mean(dense, float(dense_risk(*SAME)))
    assert_mean(sparse, float(sparse_risk(*SAME)))
    # Interference forgotten: the noise of the other modules' blocks.
    interference = conditional_gap(*SAME)[0] @ torch.tensor(PI, dtype=DOUBLE)
    assert refuted(dense, float(dense_risk(*SAME) - interference))
    # Equal inflation K for every module is right for equal pi only.
    inflated = sparse_risk(PI, COVARIANCES, COEFFICIENTS, 3 * NOISE)
    assert refuted(dense, float(inflated))
    # pi_k S_k in the place of S_k in the bias of the experts.
    triples = zip(PI, COVARIANCES, sparse_predictor(*SAME), strict=True)
    wrong = sum(p * NOISE * float((a**2).sum()) for p, _, a in triples)
    pairs = zip(PI, COVARIANCES, COEFFICIENTS, sparse_predictor(*SAME), strict=True)
    for p, S, b, a in pairs:
        miss = torch.tensor(b, dtype=DOUBLE) - a
        wrong += p * p * float(miss @ torch.tensor(S, dtype=DOUBLE) @ miss)
    assert refuted(sparse, wrong)
    for k in range(3):
        here = draw.module == k
        gap = sum(float(part[k]) for part in conditional_gap(*SAME))
        assert_mean((dense - sparse)[here], gap, off=0.1)


def test_the_predictors_are_the_population_fits(sample):
    draw, y = sample
    fit = torch.linalg.lstsq(draw.seen, y[:, None]).solution[:, 0]
    assert close(fit, torch.cat(dense_predictor(*SAME)), atol=0.015)
    own = draw.module == 1
    fit = torch.linalg.lstsq(draw.seen[own][:, 2:4], y[own][:, None]).solution[:, 0]
    assert close(fit, sparse_predictor(*SAME)[1], atol=0.015)
    # A dense block is not the expert: the attenuation is that of noise / pi.
    assert not close(dense_predictor(*SAME)[1], sparse_predictor(*SAME)[1], atol=0.1)


def test_dense_is_sparse_with_inflated_noise():
    parts = [
        p * float(sparse_risk([1.0], [S], [b], NOISE / p))
        for p, S, b in zip(PI, COVARIANCES, COEFFICIENTS, strict=True)
    ]
    assert close(dense_risk(*SAME), sum(parts))


def test_conditional_gaps_add_up():
    parts = conditional_gap(PI, COVARIANCES, COEFFICIENTS, [0.1, NOISE, 9.0])
    assert all(part.shape == (3, 3) and bool((part >= 0).all()) for part in parts)
    noise = torch.tensor([0.1, NOISE, 9.0], dtype=DOUBLE)
    gap = dense_risk(*SAME[:3], noise) - sparse_risk(*SAME[:3], noise)
    assert close(sum(parts) @ torch.tensor(PI, dtype=DOUBLE), gap)


def test_the_envelope():
    noise = torch.tensor(NOISE, dtype=DOUBLE, requires_grad=True)
    for risk, sensitivity in (
        (dense_risk, dense_sensitivity),
        (sparse_risk, sparse_sensitivity),
    ):
        (slope,) = torch.autograd.grad(risk(*SAME[:3], noise), noise)
        assert close(slope, sensitivity(*SAME))
    dense, sparse = risk_rise(*SAME, [0.0, 2.0])
    assert close(dense, [0, 2 * float(dense_sensitivity(*SAME))])
    assert close(sparse, [0, 2 * float(sparse_sensitivity(*SAME))])


def test_risk_rise_by_simulation():
    extra = 0.7
    draw = block_features(300_000, generator(8), PI, COVARIANCES, NOISE + extra)
    y = draw.clean @ torch.tensor(COEFFICIENTS, dtype=DOUBLE).flatten()
    dense = (y - draw.seen @ torch.cat(dense_predictor(*SAME))) ** 2
    assert_mean(dense, float(dense_risk(*SAME) + risk_rise(*SAME, extra)[0]))
    # A predictor fitted to the greater noise would do better.
    refit = dense_risk(PI, COVARIANCES, COEFFICIENTS, NOISE + extra)
    assert refuted(dense, float(refit))


def test_noise_zero_one_module_and_flat_covariances():
    flat = [[[1, 1], [1, 1]]] * 2
    same = ([0.5, 0.5], flat, [[1, 0], [0, 2]])
    assert close(dense_risk(*same, [0.0, 1e-9])[0], 0)
    assert close(dense_risk(*same, [0.0, 1e-9]), [0, 1e-9 * (0.5 + 2)], atol=1e-15)
    assert close(sparse_predictor(*same, 0.0)[0], [0.5, 0.5])
    alone = ([1.0], COVARIANCES[:1], COEFFICIENTS[:1], NOISE)
    assert close(dense_risk(*alone), sparse_risk(*alone))
    never = ([1.0, 0.0], COVARIANCES[:2], COEFFICIENTS[:2], [0.0, NOISE])
    assert close(dense_risk(*never), sparse_risk(*never))
    assert not dense_predictor(*never)[1].any()
    silent = ([0.5, 0.5], COVARIANCES[:2], [[0, 0], [0, 0]], NOISE)
    assert close(dense_risk(*silent), 0)


def test_gradients_at_equal_eigenvalues():
    beta = torch.ones(2, dtype=DOUBLE, requires_grad=True)
    S = torch.eye(2, dtype=DOUBLE, requires_grad=True)
    risk = dense_risk([0.5, 0.5], [S, S], [beta, beta], 0.25)
    grads = torch.autograd.grad(risk, (S, beta))
    assert all(bool(g.isfinite().all()) for g in grads)
    # rho = b^2 t S / (S + t), twice pi rho(t / pi): d/dS = b^2 t^2 / (S + t)^2.
    assert close(grads[0].diagonal(), [(0.5 / 1.5) ** 2] * 2)


def test_errors_reach_the_user():
    with pytest.raises(ValueError, match="divide them by their sum"):
        dense_risk([0.5, 0.6, 0.1], *SAME[1:])
    with pytest.raises(ValueError, match="noise must be >= 0"):
        sparse_risk(*SAME[:3], -1.0)
    with pytest.raises(ValueError, match="extra must be >= 0"):
        risk_rise(*SAME, -0.1)
    with pytest.raises(ValueError, match="got 3, 2 and 3"):
        conditional_gap(PI, COVARIANCES[:2], COEFFICIENTS, NOISE)


def test_the_names_that_one_looks_for():
    assert all(hasattr(regression, name) for name in regression.__all__)
    assert float(regression.isotropic_gap(4, 0.25)) == pytest.approx(0.3)
    assert float(regression.routing_accuracy(2, 4, 0.5)) == pytest.approx(27 / 32)

"""wishart and excess: simulated fits against drawn data and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from truths import DOUBLE, assert_mean, generator, refuted

from moebook import wishart
from moebook.excess import (
    dense_rate,
    minimum_norm_excess,
    ols_excess,
    ridge_excess,
    sparse_rate,
)
from moebook.regression import dense_predictor, sparse_predictor
from moebook.wishart import bartlett, excess_samples, regression_samples

PI = [0.5, 0.5]
COVARIANCES = [[[2.0, 0.5], [0.5, 1.0]], [[1.0, 0, 0], [0, 2, 0.3], [0, 0.3, 1]]]
COEFFICIENTS = [[1.0, -1.0], [0.5, 1.0, 0.0]]
NOISE, LABEL = 0.5, 0.2
SAME = (PI, COVARIANCES, COEFFICIENTS, NOISE, LABEL)
DIM = 5


def same_law(a, b):
    """Two-sample Kolmogorov-Smirnov, at five standard errors."""
    return stats.ks_2samp(a.numpy(), b.numpy()).pvalue > 5.7e-7


def equal_modules(K, p, nu, label=0.1):
    beta = torch.eye(p, dtype=DOUBLE)[0]
    return ([1 / K] * K, [torch.eye(p)] * K, [beta] * K, nu, label)


@pytest.mark.parametrize("dof", [9, 4, 3])
def test_bartlett_is_the_gram_law(dof):
    n, p = 20_000, 4
    R = bartlett(n, p, dof, generator(1))
    assert not R.tril(-1).any()
    X = torch.randn(n, dof, p, generator=generator(2), dtype=DOUBLE)
    for i in range(p):
        for j in range(i + 1):
            assert same_law((R.mT @ R)[:, i, j], (X.mT @ X)[:, i, j])
    # Degrees of freedom one off, or no chi on the diagonal, would be seen.
    other = bartlett(n, p, dof + 1, generator(3))
    assert not same_law((R**2).sum(1)[:, 3], (other**2).sum(1)[:, 3])


def test_bartlett_of_few_rows_and_of_each_its_own():
    R = bartlett(3, 4, torch.tensor([0, 2, 9]), generator())
    assert not R[0].any() and not R[1, 2:].any() and bool(R[1, :2, 2:].all())
    assert bool((R[2].diagonal() > 0).all())
    assert bartlett(0, 3, 5, generator()).shape == (0, 3, 3)
    assert bartlett(7, 1, 5, generator()).shape == (7, 1, 1)
    # One square of normals makes two matrices: they are not alike.
    R = bartlett(40_000, 2, 9, generator(4))[:, 0, 1]
    product = R[:20_000] * R[20_000:]
    assert abs(product.mean()) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize(("m", "p"), [(15, 10), (24, 3)])
def test_one_fit_against_the_closed_form(m, p):
    found = regression_samples(100_000, p, m, generator(m), 0.7)
    truth = float(ols_excess(m, p, 0.7))
    assert_mean(found, truth, off=0.03)
    assert refuted(found, 0.7 * p / (m - p))  # the -1 forgotten


def test_one_fit_against_drawn_data():
    n, p, m = 5000, 3, 8
    g = generator(8)
    x = torch.randn(n, m, p, generator=g, dtype=DOUBLE)
    y = torch.randn(n, m, 1, generator=g, dtype=DOUBLE)
    drawn = (torch.linalg.lstsq(x, y).solution ** 2).sum((1, 2))
    assert same_law(drawn, regression_samples(n, p, m, g))
    assert not same_law(drawn, regression_samples(n, p, m + 1, g))


def drawn(counts, n, g):
    """The same excess risks from explicit data and a general least squares."""
    dense_truth = torch.cat(dense_predictor(*SAME[:4]))
    experts = sparse_predictor(*SAME[:4])
    mean = torch.block_diag(
        *[
            p * torch.tensor(S, dtype=DOUBLE)
            for p, S in zip(PI, COVARIANCES, strict=True)
        ]
    ) + NOISE * torch.eye(DIM, dtype=DOUBLE)
    rows, labels, sparse, start = [], [], 0, 0
    for k, S in enumerate(COVARIANCES):
        S, m = torch.tensor(S, dtype=DOUBLE), counts[k]
        x = torch.randn(n, m, len(S), generator=g, dtype=DOUBLE)
        x = x @ torch.linalg.cholesky(S).mT
        y = x @ torch.tensor(COEFFICIENTS[k], dtype=DOUBLE)
        y = y + math.sqrt(LABEL) * torch.randn(n, m, generator=g, dtype=DOUBLE)
        seen = math.sqrt(NOISE) * torch.randn(n, m, DIM, generator=g, dtype=DOUBLE)
        own = seen[..., start : start + len(S)]
        own += x
        miss = (torch.linalg.pinv(own) @ y[..., None])[..., 0] - experts[k]
        design = S + NOISE * torch.eye(len(S), dtype=DOUBLE)
        sparse = sparse + PI[k] * ((miss @ design) * miss).sum(1)
        rows.append(seen)
        labels.append(y)
        start += len(S)
    X, y = torch.cat(rows, 1), torch.cat(labels, 1)
    miss = (torch.linalg.pinv(X) @ y[..., None])[..., 0] - dense_truth
    return sparse, ((miss @ mean) * miss).sum(1)


@pytest.mark.parametrize(
    "counts", [(8, 9), (20, 6), (3, 7), (1, 2), (2, 0), (0, 0), (2, 3)]
)
def test_excess_against_drawn_data(counts):
    """Enough samples, few, and too few, where the fit of smallest norm is taken."""
    n = 6000
    found = excess_samples(n, generator(1), counts, *SAME)
    truth = drawn(counts, n, generator(2))
    if counts == (0, 0):  # nothing but rounding between them
        assert torch.allclose(torch.stack(found), torch.stack(truth))
        return
    for ours, theirs in zip(found, truth, strict=True):
        assert same_law(ours, theirs)
    gap = [found.dense - found.sparse, truth[1] - truth[0]]
    assert same_law(*gap)  # the pair, not only its two laws
    if counts == (8, 9):
        other = excess_samples(n, generator(1), (7, 8), *SAME)
        assert not same_law(other.sparse, truth[0])
        assert not same_law(other.dense, truth[1])


def test_sparse_means_are_closed():
    K, p, nu, label = 3, 4, 0.25, 0.1
    variance, counts = nu / (1 + nu) + label, [12, 20, 30]
    found = excess_samples(30_000, generator(3), counts, *equal_modules(K, p, nu))
    truth = float(ols_excess(torch.tensor(counts), p, variance).mean())
    assert_mean(found.sparse, truth, off=0.03)
    # About beta_k in the place of the shrunk a_k the fit has a bias that stays.
    attenuation = (nu / (1 + nu)) ** 2 * (1 + nu)
    assert refuted(found.sparse, truth + attenuation)
    few = excess_samples(12_000, generator(4), [2, 2], *equal_modules(2, 10, nu))
    signal = 1 / (1 + nu)
    assert_mean(
        few.sparse, float(minimum_norm_excess(2, 10, signal, variance)), off=0.03
    )
    assert refuted(few.sparse, signal + variance * 2 / 7)  # the projection forgotten


@pytest.mark.parametrize("labels", ["fixed", "random"])
def test_the_dense_rate(labels):
    K, n, draws = 8, 1600, 25_000
    same = equal_modules(K, 1, 0.25, 0.0)
    counts = [n // K] * K
    if labels == "random":
        rng = np.random.default_rng(5)
        counts = torch.tensor(rng.multinomial(n, [1 / K] * K, size=draws))
    found = excess_samples(draws, generator(5), counts, *same)
    truth = float(dense_rate(*same, labels))
    # The next order is a share of order d / n.
    assert_mean(n * found.dense, truth, bias=2 * K / n * truth, off=0.08)
    other = "fixed" if labels == "random" else "random"
    assert abs(float(dense_rate(*same, other)) - truth) > 0.1 * truth
    residual = 2 / 3  # the residual taken for independent of the features
    assert abs(n * found.dense.mean() - residual * K) > 0.1 * truth
    assert float(sparse_rate(*same)) == pytest.approx(K * 0.2)


def test_the_rates_in_numbers():
    same = equal_modules(4, 10, 0.25)
    fixed, drawn_ = (float(dense_rate(*same, kind)) for kind in ("fixed", "random"))
    assert (fixed, drawn_) == pytest.approx((24.375, 24.75))
    assert float(sparse_rate(*same)) == pytest.approx(12)
    # K nu^2 r^3 K (K - 1) by hand, K = 8 and nu = 1/4: r = 1/3.
    T = 64 * 7 / 16 / 27
    same = equal_modules(8, 1, 0.25, 0.0)
    assert float(dense_rate(*same)) == pytest.approx(16 / 3 + T)
    assert float(dense_rate(*same, "random")) == pytest.approx(16 / 3 + 2 * T)


def test_the_dense_rate_of_unequal_modules():
    n, draws = 4000, 20_000
    found = excess_samples(draws, generator(6), [n // 2] * 2, *SAME)
    truth = float(dense_rate(*SAME))
    assert_mean(n * found.dense, truth, bias=0.004 * truth, off=0.05)
    truth = float(sparse_rate(*SAME))
    assert_mean(n * found.sparse, truth, bias=0.004 * truth, off=0.05)


def test_best_ridge_by_simulation():
    p, m, nu, label = 100, 200, 0.25, 0.1
    scale, variance = 1 + nu, nu / (1 + nu) + label
    signal = scale / (1 + nu) ** 2
    g = generator(7)
    x = math.sqrt(scale) * torch.randn(300, m, p, generator=g, dtype=DOUBLE)
    a = torch.zeros(p, dtype=DOUBLE)
    a[0] = 1 / (1 + nu)
    w = math.sqrt(variance) * torch.randn(300, m, generator=g, dtype=DOUBLE)
    ridge = p / m * variance / signal * scale * m
    gram = x.mT @ x + ridge * torch.eye(p, dtype=DOUBLE)
    fit = torch.linalg.solve(gram, x.mT @ (x @ a + w)[..., None])[..., 0]
    loss = scale * ((fit - a) ** 2).sum(1)
    truth = float(ridge_excess(p / m, signal, variance))
    assert_mean(loss, truth, bias=0.02 * truth, off=0.08)
    assert truth < float(ols_excess(m, p, variance))
    assert truth == pytest.approx(0.186545993132812)


def test_ridge_where_samples_are_few():
    # gamma -> infinity: nothing is learned. Both sides of gamma = 1 + ridge agree.
    assert float(ridge_excess(1e6, 0.8, 0.3)) == pytest.approx(0.8, rel=1e-5)
    edge = 1 / (1 - 0.3 / 0.8)
    sides = ridge_excess([edge * (1 - 1e-9), edge * (1 + 1e-9)], 0.8, 0.3)
    assert float(sides[0]) == pytest.approx(float(sides[1]), rel=1e-7)
    small = float(ridge_excess(1e-4, 0.8, 0.3))
    assert small == pytest.approx(0.3e-4, rel=1e-3)


def test_thin_data_are_factored_by_qr(monkeypatch):
    """Noise of variance 1e-14 beside signal of variance 1: normal equations fail."""
    same = (PI, [[[1.0]], [[1.0, 0], [0, 1e-16]]], [[1.0], [1.0, 0.0]], 1e-14, 1e-16)
    found = excess_samples(20_000, generator(9), [20, 20], *same)
    # Exact for sparse, whose triangle is never squared: v_k p_k / (m - p_k - 1).
    residual = 1e-14 + 1e-16
    truth = 0.5 * residual * (1 / 18 + 2 / 17)
    assert_mean(found.sparse, truth, off=0.05)
    wishart_rate = float(dense_rate(*same))
    assert 0.5 < float(found.dense.mean()) * 40 / wishart_rate < 2
    calls = []
    qr = torch.linalg.qr
    monkeypatch.setattr(
        wishart.torch.linalg, "qr", lambda X: (calls.append(len(X)), qr(X))[1]
    )
    excess_samples(50, generator(9), [20, 20], *same)
    assert sum(calls) == 50
    calls.clear()
    excess_samples(50, generator(9), [20, 20], *SAME)
    assert not calls


def test_float32_equal_generators_and_no_draws():
    single = excess_samples(40_000, generator(2), [12, 12], *SAME, dtype=torch.float32)
    double = excess_samples(40_000, generator(3), [12, 12], *SAME)
    for a, b in zip(single, double, strict=True):
        assert a.dtype == torch.float32 and b.dtype == DOUBLE
        assert same_law(a, b)
    first = excess_samples(300, generator(2), [12, 12], *SAME)
    again = excess_samples(300, generator(2), [12, 12], *SAME)
    assert torch.equal(first.dense, again.dense)
    assert [v.shape for v in excess_samples(0, generator(), [9, 9], *SAME)] == [
        (0,)
    ] * 2
    assert regression_samples(0, 3, 9, generator()).shape == (0,)
    assert ols_excess(torch.empty(0), 3, 1.0).shape == (0,)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: ols_excess(11, 10, 1.0), ValueError, r"m > p \+ 1 only, got m = 11"),
        (lambda: ols_excess(20, 10, -1.0), ValueError, "variance must be >= 0"),
        (lambda: minimum_norm_excess(9, 10, 1.0, 1.0), ValueError, "m < p - 1 only"),
        (lambda: ridge_excess(0.0, 1.0, 1.0), ValueError, "gamma must be positive"),
        (lambda: dense_rate(*SAME, "drawn"), ValueError, "got 'drawn'"),
        (lambda: sparse_rate(*SAME[:3], 0.0), ValueError, "noise must be one number"),
        (lambda: sparse_rate([0.9, 0.2], *SAME[1:]), ValueError, "divide them"),
        (lambda: bartlett(2, 2, 2.5, generator()), TypeError, "dof must be ints"),
        (lambda: bartlett(2, 2, -1, generator()), ValueError, "dof must be >= 0"),
        (lambda: bartlett(2, 2, 3, 0), TypeError, "Generator"),
        (lambda: regression_samples(2, 4, 3, generator()), ValueError, "needs m >= 4"),
        (
            lambda: excess_samples(2, generator(), [3, 3, 3], *SAME),
            ValueError,
            r"counts must have shape \(2, 2\)",
        ),
        (
            lambda: excess_samples(2, generator(), [3, -3], *SAME),
            ValueError,
            "counts must be >= 0",
        ),
        (lambda: excess_samples(-1, generator(), [3, 3], *SAME), ValueError, "n must"),
        (lambda: regression_samples(2, 3, 4.5, generator()), TypeError, "m must be"),
    ],
)
def test_what_is_refused(call, kind, match):
    with pytest.raises(kind, match=match):
        call()

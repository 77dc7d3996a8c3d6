"""isotropic: closed forms against the general risks, algebra and simulated fits."""

import math

import pytest
import sympy as sp
import torch
from truths import DOUBLE, INF, assert_mean, generator, refuted

from moebook.isotropic import (
    breakeven,
    dragged_risks,
    extra_noise_breakeven,
    gap_peak,
    isotropic_dense,
    isotropic_gap,
    isotropic_sensitivities,
    isotropic_sparse,
    leakage_breakeven,
    leakage_risks,
    misrouted_risk,
    overlap_gap,
)
from moebook.regression import (
    dense_risk,
    dense_sensitivity,
    sparse_risk,
    sparse_sensitivity,
)

CASES = [(2, 1.0), (4, 0.25), (8, 0.5), (64, 0.2)]


@pytest.mark.parametrize(("K", "nu"), CASES)
def test_the_general_risks_at_isotropic_modules(K, nu):
    s2 = 1.7
    S, beta = s2 * torch.eye(2), torch.tensor([0.6, 0.8], dtype=DOUBLE)
    same = ([1 / K] * K, [S.double()] * K, [beta] * K, nu * s2)
    assert float(isotropic_dense(K, nu) * s2) == pytest.approx(float(dense_risk(*same)))
    assert float(isotropic_sparse(nu) * s2) == pytest.approx(float(sparse_risk(*same)))
    gap = float(isotropic_dense(K, nu) - isotropic_sparse(nu))
    assert float(isotropic_gap(K, nu)) == pytest.approx(gap)
    dense, sparse = isotropic_sensitivities(K, nu)
    assert float(dense) == pytest.approx(float(dense_sensitivity(*same)))
    assert float(sparse) == pytest.approx(float(sparse_sensitivity(*same)))


def test_the_peak_of_the_gap():
    K = torch.tensor([2.0, 4, 8, 16, 64], dtype=DOUBLE)
    nu, height = gap_peak(K)
    assert torch.allclose(isotropic_gap(K, nu), height)
    assert torch.allclose(height, torch.tanh(K.log() / 4))
    for factor in (0.9, 1.1):
        assert bool((isotropic_gap(K, nu * factor) < height).all())
    # Not at 1 / K; and the bell is symmetric in log nu about 1 / sqrt K.
    assert bool((isotropic_gap(K, 1 / K) < height * 0.99).all())
    assert torch.allclose(isotropic_gap(K, nu * 3), isotropic_gap(K, nu / 3))
    dense, sparse = isotropic_sensitivities(K, nu)
    assert torch.allclose(dense, sparse)
    # Sparse is not always the less sensitive one.
    dense, sparse = isotropic_sensitivities(4, 1.0)
    assert (float(dense), float(sparse)) == pytest.approx((0.16, 0.25))


@pytest.mark.parametrize(("K", "nu"), CASES)
def test_extra_noise_that_makes_dense_win(K, nu):
    extra = float(extra_noise_breakeven(K, nu))
    if nu <= 1 / math.sqrt(K):
        assert extra == INF
        return
    dense, sparse = (float(s) for s in isotropic_sensitivities(K, nu))
    total = [float(isotropic_dense(K, nu)) + extra * dense]
    assert total[0] == pytest.approx(float(isotropic_sparse(nu)) + extra * sparse)
    assert float(extra_noise_breakeven(4, 1.0)) == pytest.approx(10 / 3)


def test_no_extra_noise_for_one_module_and_a_finite_gradient():
    assert extra_noise_breakeven(1, 5.0) == INF
    nu = torch.tensor([0.2, 0.5, 1.0], dtype=DOUBLE, requires_grad=True)
    extra = extra_noise_breakeven(4, nu)
    (slope,) = torch.autograd.grad(extra[2], nu)
    assert bool(slope.isfinite().all()) and slope[2] < 0


def fit(X, y, rows):
    half = rows.nonzero()[: int(rows.sum()) // 2, 0]
    return torch.linalg.lstsq(X[half], y[half, None]).solution[:, 0]


@pytest.fixture(scope="module")
def misrouted():
    """K = 4 modules of two features, a wrong expert with probability .3, nu = .25."""
    n, K, p, nu, q = 240_000, 4, 2, 0.25, 0.3
    g = generator(2)
    z = torch.randint(K, (n,), generator=g)
    other = (z + torch.randint(1, K, (n,), generator=g)) % K
    route = torch.where(torch.rand(n, generator=g) < q, other, z)
    x = torch.randn(n, K, p, generator=g, dtype=DOUBLE)
    x *= torch.nn.functional.one_hot(z, K)[..., None]
    y = x[..., 0].sum(1)
    seen = x + math.sqrt(nu) * torch.randn(n, K, p, generator=g, dtype=DOUBLE)
    errors = {kind: [] for kind in ("clean", "retrained", "full")}
    for k in range(K):
        rows = route == k
        test = rows.nonzero()[int(rows.sum()) // 2 :, 0]
        own = seen[:, k]
        fits = {
            "clean": (own, fit(own, y, z == k)),
            "retrained": (own, fit(own, y, rows)),
            "full": (seen.flatten(1), fit(seen.flatten(1), y, rows)),
        }
        for kind, (X, b) in fits.items():
            errors[kind].append((y[test] - X[test] @ b) ** 2)
    return {kind: torch.cat(parts) for kind, parts in errors.items()}


@pytest.mark.parametrize("kind", ["clean", "retrained", "full"])
def test_misrouting_by_simulation(misrouted, kind):
    risk = float(misrouted_risk(0.3, 4, 0.25, kind))
    assert_mean(misrouted[kind], risk, off=0.04)
    if kind == "clean":  # a wrong expert adds its noise: it is not the null predictor
        assert refuted(misrouted[kind], 0.7 * 0.2 + 0.3 * 1)
        assert float(misrouted_risk(1.0, 4, 0.25)) > 1


@pytest.mark.parametrize(("K", "nu"), CASES)
def test_breakeven_is_where_the_risks_meet(K, nu):
    dense = float(isotropic_dense(K, nu))
    for retrained, kind in ((False, "clean"), (True, "retrained")):
        q = breakeven(K, nu, retrained=retrained)
        assert float(misrouted_risk(q, K, nu, kind)) == pytest.approx(dense)
        assert float(misrouted_risk(0.9 * q, K, nu, kind)) < dense
    q = torch.linspace(0, 1, 101, dtype=DOUBLE)
    full = misrouted_risk(q, K, nu, "full")
    assert bool((full <= dense + 1e-12).all())
    chance = misrouted_risk(1 - 1 / K, K, nu, "full")
    assert float(chance) == pytest.approx(dense)


def test_breakeven_numbers_and_limits():
    assert float(breakeven(4, 0.25)) == pytest.approx(5 / 16, abs=1e-15)
    root = sp.nsolve
    r = sp.Symbol("r")
    quadratic = r**2 * 2 - r - sp.Rational(1, 4)  # K = 4, nu = 1/4
    share = 1 - float(root(quadratic, r, 0.7))
    assert float(breakeven(4, 0.25, retrained=True)) == pytest.approx(share)
    # Tiny errors kill the advantage at low noise; half of chance at high noise.
    assert float(breakeven(8, 1e-6)) == pytest.approx(7e-6, rel=1e-4)
    assert float(breakeven(8, 1e6)) == pytest.approx(7 / 16, rel=1e-4)
    assert float(breakeven(9, 1e8, retrained=True)) == pytest.approx(2 / 3, rel=1e-3)
    assert float(breakeven(8, 0.0)) == float(breakeven(8, 0.0, retrained=True)) == 0
    K = 8
    peak = 1 / (math.sqrt(K - 1) - 1)
    top = (K - 1) ** 1.5 / (K * math.sqrt(K - 1) + 2 * K - 2)
    assert float(breakeven(K, peak)) == pytest.approx(top)
    assert float(breakeven(K, 1.1 * peak)) < top > float(breakeven(K, 0.9 * peak))


def test_dragged_by_simulation():
    n, K, p, nu, eta = 400_000, 4, 2, 0.5, 0.7
    g = generator(5)
    x, drag = torch.randn(2, n, p, generator=g, dtype=DOUBLE)
    noise = math.sqrt(nu) * torch.randn(n, K, p, generator=g, dtype=DOUBLE)
    seen = noise.clone()
    seen[:, 0] += x
    seen[:, 1] += eta * drag
    y = x[:, 0]
    dense, sparse = dragged_risks(eta, K, nu)
    assert_mean((y - seen[:, 1, 0] / (1 + nu)) ** 2, float(sparse))
    assert_mean((y - seen[..., 0].sum(1) / (1 + K * nu)) ** 2, float(dense))
    grid = torch.linspace(0, 9, 50, dtype=DOUBLE)
    dense, sparse = dragged_risks(grid, torch.tensor([[2.0], [64.0]]), 0.1)
    assert bool((sparse > dense).all())


def overlap_by_moments(w, K, nu, cosine):
    """Gap of the best linear fits, by the moments of features and label."""
    gram = (1 - cosine) * torch.eye(K, dtype=DOUBLE) + cosine
    values, vectors = torch.linalg.eigh(w * gram)
    common = vectors * values.clamp_min(0).sqrt()  # row k: the coefficients of k
    # The common features are always alive: E x y is the mean of the coefficients.
    mean = common.mean(0)
    shared = w - float(mean @ mean) / (1 + nu) - (w - w / (1 + nu))
    own = K * nu / (1 + K * nu) - nu / (1 + nu)
    return (1 - w) * own + shared


@pytest.mark.parametrize("w", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("cosine", [1.0, 0.5, 0.0, -1 / 3])
def test_overlap(w, cosine):
    K, nu = 4, 0.25
    truth = overlap_by_moments(w, K, nu, cosine)
    assert float(overlap_gap(w, K, nu, cosine)) == pytest.approx(truth)


def test_overlap_is_flat_at_the_dense_shrinkage_only():
    w, K, nu = torch.linspace(0, 1, 11, dtype=DOUBLE), 4, 0.25
    flat = overlap_gap(w, K, nu, 1 / (1 + K * nu))
    assert torch.allclose(flat, isotropic_gap(K, nu).expand(11))
    tilted = overlap_gap(w, K, nu, 1 / (1 + nu))
    assert float(tilted[0] - tilted[-1]) > 0.1
    assert float(overlap_gap(1.0, K, nu)) == 0
    # Task conflict, not noise: without noise a gap of (1 - 1/K) (1 - c) is left.
    assert float(overlap_gap(1.0, K, 0.0, 0.2)) == pytest.approx(0.75 * 0.8)
    with pytest.raises(ValueError, match=r"cosine must be in \[-0.3333, 1\]"):
        overlap_gap(0.5, K, nu, -0.5)


def test_overlap_by_simulation():
    n, K, nu, cosine = 300_000, 3, 0.25, -0.5
    g = generator(6)
    angle = 2 * math.pi / 3 * torch.arange(3, dtype=DOUBLE)
    coefficients = torch.stack((angle.cos(), angle.sin()), 1)
    z = torch.randint(K, (n,), generator=g)
    x = torch.randn(n, 2, generator=g, dtype=DOUBLE)
    y = (x * coefficients[z]).sum(1)
    seen = x + math.sqrt(nu) * torch.randn(n, 2, generator=g, dtype=DOUBLE)
    dense = (y - seen @ coefficients.mean(0)) ** 2  # the mean is 0
    sparse = (y - (seen * coefficients[z]).sum(1) / (1 + nu)) ** 2
    assert_mean(dense - sparse, float(overlap_gap(1.0, K, nu, cosine)), off=0.05)


@pytest.mark.parametrize("signal", [False, True])
def test_leakage_by_simulation(signal):
    n, K, nu, alpha = 300_000, 4, 0.5, 0.7
    g = generator(9)
    z = torch.randint(K, (n,), generator=g)
    alive = torch.nn.functional.one_hot(z, K).double()
    x = torch.randn(n, K, generator=g, dtype=DOUBLE) * (alpha + (1 - alpha) * alive)
    y = (x * (1 if signal else alive)).sum(1)
    seen = x + math.sqrt(nu) * torch.randn(n, K, generator=g, dtype=DOUBLE)
    sparse = (y - (seen * alive).sum(1) / (1 + nu)) ** 2
    half = n // 2
    fit = torch.linalg.lstsq(seen[:half], y[:half, None]).solution[:, 0]
    dense = (y[half:] - seen[half:] @ fit) ** 2
    truth = leakage_risks(alpha, K, nu, signal=signal)
    assert_mean(dense, float(truth[0]), off=0.03)
    assert_mean(sparse, float(truth[1]), off=0.03)
    # The two dense risks are the same where K nu = 1, whatever alpha; here they differ.
    other = leakage_risks(alpha, K, nu, signal=not signal)
    assert refuted(dense, float(other[0]))
    same = [float(leakage_risks(alpha, 4, 0.25, signal=kind)[0]) for kind in (0, 1)]
    assert same[0] == pytest.approx(same[1])


@pytest.mark.parametrize(("K", "nu"), CASES)
def test_leakage_breakeven(K, nu):
    alpha = leakage_breakeven(K, nu)
    dense, sparse = leakage_risks(alpha, K, nu, signal=True)
    assert float(dense) == pytest.approx(float(sparse))
    dense, sparse = leakage_risks(1.1 * alpha, K, nu, signal=True)
    assert dense < sparse
    assert float(leakage_breakeven(8, 0.5)) == pytest.approx(1 / math.sqrt(7))


def test_shapes_and_zero_noise():
    K = torch.tensor([[2.0], [4.0]])
    nu = torch.tensor([0.0, 0.5, 2.0])
    for found in (
        isotropic_dense(K, nu),
        isotropic_gap(K, nu),
        *isotropic_sensitivities(K, nu),
        *leakage_risks(0.1, K, nu),
        misrouted_risk(0.1, K, nu),
        misrouted_risk(0.1, K, nu, "full"),
        breakeven(K, nu, retrained=True),
    ):
        assert found.shape == (2, 3) and found.dtype == DOUBLE
    assert isotropic_gap(1, nu).tolist() == [0, 0, 0]
    assert misrouted_risk([0.0, 1.0], 4, 0.0, "full").tolist() == [0, 0]
    assert isotropic_gap(4, torch.empty(0)).shape == (0,)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (lambda: isotropic_gap(0.5, 1.0), ValueError, "K counts modules"),
        (lambda: isotropic_gap(4, -1.0), ValueError, "nu must be >= 0, got -1"),
        (lambda: isotropic_gap(4, float("nan")), ValueError, "nu must be finite"),
        (lambda: isotropic_gap("four", 1.0), TypeError, "K must be a number"),
        (lambda: misrouted_risk(1.2, 4, 1.0), ValueError, r"q must be in \[0, 1\]"),
        (lambda: misrouted_risk(0.2, 1, 1.0), ValueError, "needs K >= 2"),
        (lambda: misrouted_risk(0.2, 4, 1.0, "wide"), ValueError, "got 'wide'"),
        (lambda: overlap_gap(-0.1, 4, 1.0), ValueError, r"w must be in \[0, 1\]"),
        (lambda: leakage_breakeven(1, 1.0), ValueError, "needs K >= 2"),
        (lambda: leakage_risks(-1.0, 4, 1.0), ValueError, "alpha must be >= 0"),
    ],
)
def test_what_is_refused(call, kind, match):
    with pytest.raises(kind, match=match):
        call()

"""descent: spectra against assembled Hessians, counts against running the descent."""

import math
from fractions import Fraction

import pytest
import torch
from truths import DOUBLE, normals

from moebook.descent import (
    dense_spectrum,
    expert_spectra,
    gd_excess,
    gd_rate,
    gd_step,
    iterations,
    joint_spectrum,
)

TWO = [torch.diag(torch.tensor([1.0, 4.0]))] * 4
SCALES = [scale * torch.eye(2) for scale in (1.0, 4.0, 16.0, 64.0)]
EQUAL = [0.25] * 4


def test_spectra_are_those_of_the_hessians():
    pi, noise = [0.5, 0.3, 0.2], 0.3
    blocks = [A @ A.mT for A in (normals(2, 2), normals(3, 3, 1), normals(1, 1, 2))]
    pairs = list(zip(pi, blocks, strict=True))
    whole = torch.block_diag(*[p * S for p, S in pairs])
    dense = torch.linalg.eigvalsh(whole + noise * torch.eye(6, dtype=DOUBLE))
    assert torch.allclose(dense_spectrum(pi, blocks, noise), dense)
    joint = torch.block_diag(
        *[p * (S + noise * torch.eye(len(S), dtype=DOUBLE)) for p, S in pairs]
    )
    found = joint_spectrum(pi, blocks, noise)
    assert torch.allclose(found, torch.linalg.eigvalsh(joint))
    for S, values in zip(blocks, expert_spectra(blocks, noise), strict=True):
        assert torch.allclose(values, torch.linalg.eigvalsh(S) + noise)


def test_dense_may_be_faster():
    dense = gd_rate(dense_spectrum(EQUAL, TWO, 0.25))
    sparse = gd_rate(expert_spectra(TWO, 0.25)[0])
    assert float(dense) == pytest.approx(3 / 7)
    assert float(sparse) == pytest.approx(6 / 11)
    assert iterations(torch.stack((dense, sparse)), 1e-6).tolist() == [17, 23]
    # Without noise they tie.
    dense = gd_rate(dense_spectrum(EQUAL, TWO, 0.0))
    assert float(dense) == pytest.approx(float(gd_rate(expert_spectra(TWO, 0.0)[0])))
    assert int(iterations(dense, 1e-6)) == 28


def test_experts_may_be_faster_if_each_has_its_step():
    dense = gd_rate(dense_spectrum(EQUAL, SCALES, 0.25))
    assert float(dense) == pytest.approx(63 / 67)
    assert int(iterations(dense, 1e-6)) == 225
    assert [float(gd_rate(v)) for v in expert_spectra(SCALES, 0.25)] == [0.0] * 4
    assert int(iterations(0.0, 1e-6)) == 1
    # One step for all of them: at equal pi never faster than dense,
    joint = gd_rate(joint_spectrum(EQUAL, SCALES, 0.25))
    assert float(joint) > float(dense)
    # but at unequal pi it may be, as its eigenvalues are pi_k (S_k + noise).
    pi, blocks = [0.9, 0.1], [torch.zeros(1, 1), 8 * torch.eye(1)]
    assert float(gd_rate(joint_spectrum(pi, blocks, 1.0))) == pytest.approx(0)
    assert float(gd_rate(dense_spectrum(pi, blocks, 1.0))) == pytest.approx(2 / 7)


@pytest.mark.parametrize("rate", [Fraction(3, 7), Fraction(6, 11), Fraction(63, 67)])
@pytest.mark.parametrize("delta", [Fraction(1, 10), Fraction(1, 10**6)])
def test_iterations_by_counting(rate, delta):
    t, left = 0, Fraction(1)
    while left > delta:
        t, left = t + 1, left * rate
    assert int(iterations(float(rate), float(delta))) == t


def test_iterations_at_exact_powers_and_at_the_start():
    assert iterations(0.5, [1.0, 0.5, 2.0**-20, 0.49]).tolist() == [0, 1, 20, 2]
    assert int(iterations(0.1, 1e-6)) == 6
    assert int(iterations(0.0, 1.0)) == 0


def test_excess_by_running_the_descent():
    A = normals(4, 4, 5)
    H, start = A @ A.mT + 0.1 * torch.eye(4, dtype=DOUBLE), normals(1, 4, 6)[0]
    for step in (None, 0.05):
        eta = float(gd_step(torch.linalg.eigvalsh(H))) if step is None else step
        error, truth = start.clone(), []
        for _ in range(21):
            truth.append(float(error @ H @ error))
            error = error - eta * (H @ error)
        found = gd_excess(H, start, 20, step)
        assert torch.allclose(found, torch.tensor(truth, dtype=DOUBLE))
    assert gd_excess(H, start, 0).shape == (1,)


def test_the_rate_is_the_worst_of_the_best_step():
    values = torch.tensor([0.3, 1.0, 5.0], dtype=DOUBLE)
    eta = gd_step(values)
    assert float((1 - eta * values).abs().max()) == pytest.approx(
        float(gd_rate(values))
    )
    for factor in (0.95, 1.05):
        worst = float((1 - factor * eta * values).abs().max())
        assert worst > float(gd_rate(values))
    assert float(gd_rate([0.0, 1.0])) == 1  # a flat direction is never learned
    assert gd_rate(values.expand(2, 3)).shape == (2,)
    assert math.isclose(float(gd_rate([2.0])), 0.0)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: gd_rate([-1.0, 2.0]), "eigenvalues must be >= 0"),
        (lambda: gd_rate([0.0]), "nothing to learn"),
        (lambda: gd_rate(3.0), "shape"),
        (lambda: iterations(1.0, 0.1), "at 1 the error stays"),
        (lambda: iterations(0.5, 0.0), r"delta must be in \(0, 1\]"),
        (lambda: iterations(0.5, 2.0), r"delta must be in \(0, 1\]"),
        (lambda: dense_spectrum([0.5], TWO[:1], 0.1), "divide them by their sum"),
        (lambda: dense_spectrum(EQUAL, TWO, [0.1, 0.2]), "one number"),
        (lambda: expert_spectra([], 0.1), "at least one module"),
        (lambda: gd_excess(TWO[0], [1.0], 3), "coefficients"),
        (lambda: gd_excess(TWO[0], [1.0, 1.0], -3), "steps must be at least 0"),
    ],
)
def test_what_is_refused(call, match):
    with pytest.raises(ValueError, match=match):
        call()

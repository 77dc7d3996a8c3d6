"""Regression under feature noise: the best dense and the best sparse predictors.

The setting is `modular`: pi (K,), covariances K of (p_k, p_k), coefficients K of
(p_k,), noise = sigma^2 (...) of any shape. Dense is one linear predictor of all d noisy
features; sparse is one for each module, told which module it is. Noise is there when
they are fitted and when they are used, and a risk is the mean squared error less the
label noise. Functions return float64 on the device of the tensors, are differentiable,
and raise TypeError or ValueError as `modular.problem`.

At equal isotropic modules see `isotropic`, with the router that reads the features
`energy`, by gradient descent `descent`, from finite samples `excess` and `wishart`; the
names that one looks for first are here too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebook.descent import (
    dense_spectrum,
    expert_spectra,
    gd_excess,
    gd_rate,
    iterations,
    joint_spectrum,
)
from moebook.energy import (
    energy_samples,
    hard_router_risk,
    routing_accuracy,
    soft_router_risk,
)
from moebook.excess import (
    dense_rate,
    minimum_norm_excess,
    ols_excess,
    ridge_excess,
    sparse_rate,
)
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
from moebook.modular import (
    Numbers,
    Problem,
    block_features,
    nonnegative,
    problem,
    shrunk,
)
from moebook.rationals import exact_router
from moebook.wishart import excess_samples, regression_samples

__all__ = [
    "block_features",
    "breakeven",
    "conditional_gap",
    "dense_predictor",
    "dense_rate",
    "dense_risk",
    "dense_sensitivity",
    "dense_spectrum",
    "dragged_risks",
    "energy_samples",
    "exact_router",
    "excess_samples",
    "expert_spectra",
    "extra_noise_breakeven",
    "gap_peak",
    "gd_excess",
    "gd_rate",
    "hard_router_risk",
    "isotropic_dense",
    "isotropic_gap",
    "isotropic_sensitivities",
    "isotropic_sparse",
    "iterations",
    "joint_spectrum",
    "leakage_breakeven",
    "leakage_risks",
    "minimum_norm_excess",
    "misrouted_risk",
    "ols_excess",
    "overlap_gap",
    "regression_samples",
    "ridge_excess",
    "risk_rise",
    "routing_accuracy",
    "soft_router_risk",
    "sparse_predictor",
    "sparse_rate",
    "sparse_risk",
    "sparse_sensitivity",
]


def dense_predictor(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> list[Tensor]:
    """Blocks (pi_k S_k + noise)^-1 pi_k S_k beta_k of the dense predictor, (..., p_k).

    Where the matrix is singular, which needs noise = 0, the one of smallest norm.
    Source: arXiv:2601.14792, Theorem 4.2.
    """
    return _dense(problem(pi, covariances, coefficients, noise))


def sparse_predictor(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> list[Tensor]:
    """Experts (S_k + noise)^-1 S_k beta_k, one a module, (..., p_k); free of pi.

    Where the matrix is singular, the one of smallest norm.
    Source: arXiv:2601.14792, Theorem 4.2.
    """
    return _sparse(problem(pi, covariances, coefficients, noise))


def dense_risk(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> Tensor:
    """Risk of the dense predictor, sum of noise beta_k . b_k, noise (...) -> (...).

    Equal to the sparse risk with noise / pi_k in the place of noise.
    Source: arXiv:2601.14792, Theorem 4.2.
    """
    given = problem(pi, covariances, coefficients, noise)
    pairs = zip(given.coefficients, _dense(given), strict=True)
    return given.noise * sum(b @ beta for beta, b in pairs)


def sparse_risk(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> Tensor:
    """Risk of the sparse predictor, sum of pi_k noise beta_k . a_k, (...) -> (...).

    The experts are told the module, when fitted and when used.
    Source: arXiv:2601.14792, Theorem 4.2.
    """
    given = problem(pi, covariances, coefficients, noise)
    triples = zip(given.pi, given.coefficients, _sparse(given), strict=True)
    return given.noise * sum(p * (a @ beta) for p, beta, a in triples)


def conditional_gap(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> tuple[Tensor, Tensor]:
    """Interference and over-shrinkage in each module, two of (..., K).

    Their sum is the dense less the sparse risk given the module, and its mean under pi
    the gap. Interference is noise times the squared norm of the other modules' blocks;
    over-shrinkage (b_k - a_k) . (S_k + noise) (b_k - a_k) is the price on the own
    block. None is negative. Source: ours.
    """
    given = problem(pi, covariances, coefficients, noise)
    blocks, experts, noise = _dense(given), _sparse(given), given.noise
    square = torch.stack([(b**2).sum(-1) for b in blocks], -1)
    others = square @ (1 - torch.eye(len(blocks)).to(square))
    shrunk = []
    for S, a, b in zip(given.covariances, experts, blocks, strict=True):
        miss = b - a
        shrunk.append(((miss @ S + noise[..., None] * miss) * miss).sum(-1))
    return noise[..., None] * others, torch.stack(shrunk, -1)


def dense_sensitivity(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> Tensor:
    """Squared norm of the dense predictor, (...) -> (...): d dense_risk / d noise.

    Also the rise of its risk for each unit of test noise it was not fitted for.
    Source: ours; the envelope theorem.
    """
    blocks = dense_predictor(pi, covariances, coefficients, noise)
    return sum((b**2).sum(-1) for b in blocks)


def sparse_sensitivity(
    pi: Numbers, covariances: Sequence, coefficients: Sequence, noise: Numbers
) -> Tensor:
    """Mean squared norm of the experts, (...) -> (...): d sparse_risk / d noise.

    Also the rise of the risk for each unit of extra test noise, with the routing kept.
    Source: ours; the envelope theorem.
    """
    given = problem(pi, covariances, coefficients, noise)
    pairs = zip(given.pi, _sparse(given), strict=True)
    return sum(p * (a**2).sum(-1) for p, a in pairs)


def risk_rise(
    pi: Numbers,
    covariances: Sequence,
    coefficients: Sequence,
    noise: Numbers,
    extra: Numbers,
) -> tuple[Tensor, Tensor]:
    """Rise of the dense and the sparse risk under extra test noise, broadcast.

    Predictors fitted at this noise meet noise + extra, a variance >= 0, in use; the
    routing is kept. Source: ours.
    """
    extra = nonnegative("extra", extra)
    same = (pi, covariances, coefficients, noise)
    return extra * dense_sensitivity(*same), extra * sparse_sensitivity(*same)


def _dense(given: Problem) -> list[Tensor]:
    triples = zip(given.pi, given.covariances, given.coefficients, strict=True)
    return [shrunk(p * S, beta, given.noise) for p, S, beta in triples]


def _sparse(given: Problem) -> list[Tensor]:
    pairs = zip(given.covariances, given.coefficients, strict=True)
    return [shrunk(S, beta, given.noise) for S, beta in pairs]

"""Excess: what finite samples cost over the best predictor of their kind.

With Gaussian features, y = a_k . xbar_k + w given the module, w independent of xbar_k:
feature noise makes an ordinary regression around the shrunk a_k. Its w has variance
v_k, the conditional risk plus the label noise. An excess is the mean risk less that of
the best predictor. Functions take floats or tensors, which broadcast, and return
float64; each raises TypeError or ValueError for NaN, inf or a negative number.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from moebook.modular import Numbers, nonnegative, problem, shrunk


class Blocks(NamedTuple):
    """What feature noise makes of a problem: module by module, then all features.

    Experts a_k, covariances of their blocks, variances of w, expert less dense
    predictor on all features; then the dense predictor and the mean covariance.
    """

    experts: list[Tensor]
    design: list[Tensor]
    residual: list[Tensor]
    contrast: list[Tensor]
    dense: Tensor
    mean: Tensor


def ols_excess(m: Numbers, p: Numbers, variance: Numbers) -> Tensor:
    """Mean excess variance p / (m - p - 1) of least squares, broadcast.

    m Gaussian samples of p features with any covariance, residual variance given.
    ValueError for m <= p + 1, where the mean is infinite. Source: textbook; the inverse
    Wishart mean.
    """
    m, p = nonnegative("m", m), nonnegative("p", p)
    variance = nonnegative("variance", variance)
    if bool((m <= p + 1).any()):
        raise ValueError(
            f"the mean excess is finite for m > p + 1 only, got m = {m.tolist()} and "
            f"p = {p.tolist()}: take more samples, a ridge, or the median of samples"
        )
    return variance * p / (m - p - 1)


def minimum_norm_excess(
    m: Numbers, p: Numbers, signal: Numbers, variance: Numbers
) -> Tensor:
    """Mean excess of the minimum-norm fit, m < p - 1 isotropic samples, broadcast.

    signal (1 - m / p) + variance m / (p - m - 1), signal = |a|^2 times the variance of
    a feature. ValueError for m >= p - 1. Source: textbook.
    """
    m, p = nonnegative("m", m), nonnegative("p", p)
    signal = nonnegative("signal", signal)
    variance = nonnegative("variance", variance)
    if bool((m >= p - 1).any()):
        raise ValueError(
            f"the mean excess is finite for m < p - 1 only, got m = {m.tolist()} and "
            f"p = {p.tolist()}: from m = p + 2 on ask ols_excess"
        )
    return signal * (1 - m / p) + variance * m / (p - m - 1)


def ridge_excess(gamma: Numbers, signal: Numbers, variance: Numbers) -> Tensor:
    """Excess of the best ridge where p / m -> gamma, isotropic features, broadcast.

    variance gamma M with M the Stieltjes transform of the Marchenko-Pastur law at minus
    the best ridge, gamma variance / signal, in units of the feature variance.
    ValueError for gamma, signal or variance 0. Source: Dobriban and Wager (2018).
    """
    gamma, signal = _positive("gamma", gamma), _positive("signal", signal)
    variance = _positive("variance", variance)
    ridge = gamma * variance / signal
    inner = 1 - gamma + ridge
    # The positive root of gamma ridge M^2 + inner M = 1, from its stable side.
    root = torch.sqrt(inner**2 + 4 * gamma * ridge)
    far = 2 / (inner + root).clamp_min(torch.finfo(torch.float64).tiny)
    stieltjes = torch.where(inner > 0, far, (root - inner) / (2 * gamma * ridge))
    return variance * gamma * stieltjes


def sparse_rate(
    pi: Numbers,
    covariances: Sequence,
    coefficients: Sequence,
    noise: Numbers,
    label_noise: Numbers = 0.0,
) -> Tensor:
    """Limit of n times the sparse excess, sum of v_k p_k, -> ().

    Free of pi but for the samples that a module gets, n pi_k. Raises as
    `modular.problem`. Source: ours.
    """
    found = blocks(pi, covariances, coefficients, noise, label_noise)
    return sum(v * len(a) for v, a in zip(found.residual, found.experts, strict=True))


def dense_rate(
    pi: Numbers,
    covariances: Sequence,
    coefficients: Sequence,
    noise: Numbers,
    label_noise: Numbers = 0.0,
    labels: Literal["fixed", "random"] = "fixed",
) -> Tensor:
    """Limit of n times the dense excess -> (), Gaussian features.

    labels "fixed": n pi_k samples of each module; "random": drawn, which costs once
    more the part of the score that differs between modules. The residual depends on
    the features, so this is not v d. Raises as `modular.problem`; ValueError for other
    labels. Source: ours; the sandwich of least squares.
    """
    if labels not in ("fixed", "random"):
        raise ValueError(f"labels must be 'fixed' or 'random', got {labels!r}")
    found = blocks(pi, covariances, coefficients, noise, label_noise)
    given = problem(pi, covariances, coefficients, noise)
    weight = 2 if labels == "random" else 1
    idle = [given.noise * torch.eye(len(C)).to(C) for C in found.design]
    total = found.mean.new_zeros(())
    for k, p in enumerate(given.pi):
        covariance = torch.block_diag(*idle[:k], found.design[k], *idle[k + 1 :])
        score = covariance @ found.contrast[k]
        variance = found.contrast[k] @ score + found.residual[k]
        solved = torch.linalg.solve(found.mean, covariance)
        between = score @ torch.linalg.solve(found.mean, score)
        total = total + p * (variance * solved.trace() + weight * between)
    return total


def blocks(
    pi: Numbers,
    covariances: Sequence,
    coefficients: Sequence,
    noise: Numbers,
    label_noise: Numbers,
) -> Blocks:
    """The regression that feature noise makes of each module, for one noise > 0.

    TypeError or ValueError as `modular.problem`, and for noise 0 or of several numbers.
    """
    given = problem(pi, covariances, coefficients, noise)
    label_noise = nonnegative("label_noise", label_noise)
    if given.noise.ndim or label_noise.ndim or float(given.noise) == 0:
        raise ValueError(
            "noise must be one number > 0 and label_noise one number >= 0, got "
            f"{given.noise.tolist()} and {label_noise.tolist()}"
        )
    experts, dense, design, residual, mean = [], [], [], [], []
    for p, S, beta in zip(given.pi, given.covariances, given.coefficients, strict=True):
        flat = given.noise * torch.eye(len(S)).to(S)
        experts.append(shrunk(S, beta, given.noise))
        dense.append(shrunk(p * S, beta, given.noise))
        design.append(S + flat)
        residual.append(given.noise * (beta @ experts[-1]) + label_noise)
        mean.append(p * S + flat)
    zeros, whole = [a * 0 for a in experts], torch.cat(dense)
    contrast = [
        torch.cat([*zeros[:k], a, *zeros[k + 1 :]]) - whole
        for k, a in enumerate(experts)
    ]
    return Blocks(experts, design, residual, contrast, whole, torch.block_diag(*mean))


def _positive(name: str, value: Numbers) -> Tensor:
    value = nonnegative(name, value)
    if bool((value == 0).any()):
        raise ValueError(f"{name} must be positive, got 0")
    return value

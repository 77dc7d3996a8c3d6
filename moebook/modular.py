"""Modular regression: K blocks of features of which one is alive, and feature noise.

A sample has a module z = k with probability pi_k. Its block x_k (p_k,) has mean 0 and
covariance S_k, all other blocks are 0, and y = beta_k . x_k + label noise. Seen is xbar
= x + e with e ~ N(0, noise I) on all d = p_1 + ... + p_K coordinates: `noise` is the
variance sigma^2. Here are the problem, checked once, and its draws.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from moebook import laws

Numbers = float | Tensor | Sequence


class Problem(NamedTuple):
    """pi (K,), covariances K of (p_k, p_k), coefficients K of (p_k,), noise (...)."""

    pi: Tensor
    covariances: list[Tensor]
    coefficients: list[Tensor]
    noise: Tensor


class Features(NamedTuple):
    """Noisy features seen (n, d), clean features (n, d), modules z (n,) in int64."""

    seen: Tensor
    clean: Tensor
    module: Tensor


def block_features(
    n: int,
    generator: Generator,
    pi: Numbers,
    covariances: Sequence,
    noise: float = 0.0,
    *,
    dtype: torch.dtype = torch.float64,
) -> Features:
    """Gaussian modular features -> seen (n, d), clean (n, d), module (n,).

    pi (K,), covariances K of (p_k, p_k), d the sum of the p_k. n = 0 gives empty
    tables. Raises as `laws.gaussian` and `problem`. Source: ours.
    """
    laws.gaussian(0, 1, generator, dtype=dtype)  # refuses a bad generator and dtype
    pi, covariances, _, noise = problem(pi, covariances, None, noise)
    if noise.ndim:
        raise ValueError(f"noise must be one number, got shape {tuple(noise.shape)}")
    device, sizes = generator.device, [len(S) for S in covariances]
    level = laws.cube(n, 1, generator)[:, 0] + 0.5
    # The last edge is one by meaning; its rounding must not open a further module.
    module = torch.bucketize(level, pi.to(device).cumsum(0)[:-1], right=True)
    clean = laws.gaussian(n, sum(sizes), generator, dtype=dtype)
    for k, block in enumerate(clean.split(sizes, dim=1)):
        alive = (module == k)[:, None]
        block.copy_(block @ root(covariances[k]).to(device, dtype).mT * alive)
    error = laws.gaussian(n, sum(sizes), generator, dtype=dtype)
    return Features(clean + math.sqrt(noise) * error, clean, module)


def root(covariance: Tensor) -> Tensor:
    """Symmetric root of a positive semi-definite matrix, (p, p) -> (p, p)."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt() @ vectors.mT


def problem(
    pi: Numbers, covariances: Sequence, coefficients: Sequence | None, noise: Numbers
) -> Problem:
    """The problem in float64, or an error that says what does not fit.

    coefficients None stands for zeros. TypeError for what holds no numbers. ValueError
    for pi that are not probabilities with sum 1, blocks that do not match, a covariance
    that is not symmetric positive semi-definite, noise that is negative, NaN or inf.
    """
    pi = _tensor("pi", pi)
    if pi.ndim != 1 or not len(pi):
        raise ValueError(f"pi must have shape (K,), got {tuple(pi.shape)}")
    total = float(pi.sum())
    # Probabilities typed or computed in float32 miss one by up to about 1e-7.
    if not bool((pi >= 0).all()) or not math.isclose(total, 1.0, rel_tol=1e-6):
        raise ValueError(
            "pi must be probabilities, not negative with sum 1, got "
            f"{pi.tolist()} with sum {total:.6g}: divide them by their sum"
        )
    squares = [_covariance(k, S) for k, S in enumerate(covariances)]
    if coefficients is None:
        coefficients = [S.new_zeros(len(S)) for S in squares]
    vectors = [_tensor(f"coefficients[{k}]", b) for k, b in enumerate(coefficients)]
    if not len(pi) == len(squares) == len(vectors):
        raise ValueError(
            f"pi, covariances and coefficients must name the same modules, got "
            f"{len(pi)}, {len(squares)} and {len(vectors)} of them"
        )
    for k, (S, b) in enumerate(zip(squares, vectors, strict=True)):
        if b.shape != S.shape[:1]:
            raise ValueError(
                f"coefficients[{k}] must have shape ({len(S)},) like covariances[{k}], "
                f"got {tuple(b.shape)}"
            )
    return Problem(pi / total, squares, vectors, nonnegative("noise", noise))


def shrunk(S: Tensor, beta: Tensor, noise: Tensor) -> Tensor:
    """(S + noise)^-1 S beta, (p, p), (p,), (...) -> (..., p); of smallest norm."""
    matrix = S + noise[..., None, None] * torch.eye(len(S)).to(S)
    moment = (S @ beta).expand(*noise.shape, len(S))
    values = torch.linalg.eigvalsh(matrix.detach())
    # Noise = 0 may leave a flat covariance flat; a solve would divide by rounding.
    if bool((values[..., 0] <= 1e-13 * values[..., -1]).any()):
        inverse = torch.linalg.pinv(matrix, hermitian=True, rtol=1e-13)
        return (inverse @ moment[..., None])[..., 0]
    return torch.linalg.solve(matrix, moment)


def nonnegative(name: str, value: Numbers) -> Tensor:
    """The numbers in float64; ValueError for a negative one, NaN or inf."""
    value = _tensor(name, value)
    if not bool((value >= 0).all()):
        raise ValueError(
            f"{name} must be >= 0, got {float(value.min()):.6g}: variances, risks and "
            "ratios of variances are never negative"
        )
    return value


def modules(K: Numbers) -> Tensor:
    """The number of modules K in float64; ValueError below 1."""
    K = _tensor("K", K)
    if not bool((K >= 1).all()):
        raise ValueError(f"K counts modules and must be >= 1, got {float(K.min()):.6g}")
    return K


def share(name: str, value: Numbers, least: float | Tensor = 0.0) -> Tensor:
    """Numbers in [least, 1] in float64, or ValueError."""
    value = _tensor(name, value)
    if not bool(((value >= least) & (value <= 1)).all()):
        raise ValueError(
            f"{name} must be in [{float(torch.as_tensor(least).max()):.4g}, 1], got "
            f"values from {float(value.min()):.6g} to {float(value.max()):.6g}"
        )
    return value


def _covariance(k: int, S: Numbers) -> Tensor:
    S = _tensor(f"covariances[{k}]", S)
    if S.ndim != 2 or S.shape[0] != S.shape[1] or not len(S):
        raise ValueError(
            f"covariances[{k}] must have shape (p, p), got {tuple(S.shape)}: one "
            "square matrix a module"
        )
    scale = float(S.detach().abs().max())
    # Products summed in float32 miss symmetry by up to about 1e-7 of the largest.
    if float((S - S.mT).detach().abs().max()) > 1e-6 * scale:
        raise ValueError(f"covariances[{k}] must be symmetric: use (S + S.mT) / 2")
    least = float(torch.linalg.eigvalsh(S.detach())[0])
    if least < -1e-7 * scale:
        raise ValueError(
            f"covariances[{k}] must be positive semi-definite, got smallest eigenvalue "
            f"{least:.3g}: a variance is never negative"
        )
    return S


def _tensor(name: str, value: Numbers) -> Tensor:
    try:
        if isinstance(value, bool | str | complex):
            raise TypeError
        if isinstance(value, Tensor):
            tensor = value
        elif isinstance(value, list | tuple) and value:
            # Lists of tensors keep their gradients; numbers never pass float32.
            tensor = torch.stack([_tensor(name, part) for part in value])
        else:
            tensor = torch.as_tensor(value, dtype=torch.float64)
        if tensor.is_complex() or tensor.dtype == torch.bool:
            raise TypeError
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a number, a tensor or nested lists of numbers, got "
            f"{value!r} of type {type(value).__name__}"
        ) from error
    tensor = tensor.double()
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {tensor.tolist()}")
    return tensor

"""Descent: how fast gradient descent finds the dense and the sparse predictors.

The losses are quadratic; on one with Hessian H a fixed step eta leaves the error (I -
eta H)^t of the start, exactly. The setting is `modular`. Functions take floats or
tensors and return float64; each raises TypeError or ValueError as `modular.problem`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebook.checks import check_count
from moebook.modular import Numbers, nonnegative, problem


def dense_spectrum(pi: Numbers, covariances: Sequence, noise: Numbers) -> Tensor:
    """Eigenvalues of blockdiag(pi_k S_k + noise I), ascending, noise () -> (d,).

    Source: ours.
    """
    pi, covariances, _, noise = problem(pi, covariances, None, _one(noise))
    pairs = zip(pi, covariances, strict=True)
    blocks = [p * torch.linalg.eigvalsh(S).clamp_min(0) for p, S in pairs]
    return torch.cat(blocks).sort().values + noise


def expert_spectra(covariances: Sequence, noise: Numbers) -> list[Tensor]:
    """Eigenvalues of S_k + noise I, an expert on its own samples, K of (p_k,).

    Source: ours.
    """
    covariances = list(covariances)
    if not covariances:
        raise ValueError("covariances must name at least one module, got none")
    pi = [1 / len(covariances)] * len(covariances)
    _, covariances, _, noise = problem(pi, covariances, None, _one(noise))
    return [torch.linalg.eigvalsh(S).clamp_min(0) + noise for S in covariances]


def joint_spectrum(pi: Numbers, covariances: Sequence, noise: Numbers) -> Tensor:
    """Eigenvalues pi_k (S_k + noise) of all experts under one step, ascending, (d,).

    The Hessian of sum pi_k L_k: what one global step sees. Source: ours.
    """
    pi = problem(pi, covariances, None, _one(noise)).pi
    pairs = zip(pi, expert_spectra(covariances, noise), strict=True)
    return torch.cat([p * values for p, values in pairs]).sort().values


def gd_step(eigenvalues: Numbers) -> Tensor:
    """The fixed step 2 / (least + largest) with the best rate, (..., m) -> (...).

    ValueError for eigenvalues that are negative, or all 0. Source: textbook.
    """
    least, largest = _ends(eigenvalues)
    return 2 / (least + largest)


def gd_rate(eigenvalues: Numbers) -> Tensor:
    """Factor (kappa - 1) / (kappa + 1) of the error a step, (..., m) -> (...).

    At the best fixed step, kappa = largest over least; 1 where the least is 0, as a
    flat direction is never learned. Raises as `gd_step`. Source: textbook.
    """
    least, largest = _ends(eigenvalues)
    return (largest - least) / (largest + least)


def iterations(rate: Numbers, delta: Numbers) -> Tensor:
    """Least t >= 0 with rate^t <= delta, broadcast, in int64.

    rate in [0, 1), delta in (0, 1]. A ratio of logarithms within 1e-12 of an integer is
    taken as that integer. ValueError outside. Source: textbook.
    """
    rate, delta = nonnegative("rate", rate), nonnegative("delta", delta)
    if bool((rate >= 1).any()):
        raise ValueError(
            f"rate must be below 1, got {float(rate.max()):.6g}: at 1 the error stays"
        )
    if not bool(((delta > 0) & (delta <= 1)).all()):
        raise ValueError(
            f"delta must be in (0, 1], got {float(delta.min()):.6g} to "
            f"{float(delta.max()):.6g}: it is the share of the error that may be left"
        )
    count = torch.ceil(delta.log() / rate.log() * (1 - 1e-12))
    return torch.where(delta < 1, count.clamp_min(1), 0.0).long()


def gd_excess(
    hessian: Numbers, error: Numbers, steps: int, step: float | None = None
) -> Tensor:
    """Excess risk after 0, 1, ... steps, (d, d) and (d,) -> (steps + 1,).

    error is the start less the optimum; the excess is error . H error. step None is the
    best fixed step. ValueError for shapes that do not fit or steps < 0. Source: ours.
    """
    H = problem([1.0], [hessian], None, 0.0).covariances[0]
    start = problem([1.0], [hessian], [error], 0.0).coefficients[0]
    steps = check_count("steps", steps, 0)
    values, vectors = torch.linalg.eigh(H)
    eta = gd_step(values.clamp_min(0)) if step is None else nonnegative("step", step)
    t = torch.arange(steps + 1).to(values)[:, None]
    left = (1 - eta * values).abs() ** t * (start @ vectors)
    return (values * left**2).sum(1)


def _ends(eigenvalues: Numbers) -> tuple[Tensor, Tensor]:
    values = nonnegative("eigenvalues", eigenvalues)
    if not values.ndim or not values.shape[-1]:
        raise ValueError(
            f"eigenvalues must have shape (..., m), got {tuple(values.shape)}"
        )
    least, largest = values.amin(-1), values.amax(-1)
    if bool((largest == 0).any()):
        raise ValueError("eigenvalues must not all be 0: there is nothing to learn")
    return least, largest


def _one(noise: Numbers) -> Tensor:
    noise = nonnegative("noise", noise)
    if noise.ndim:
        raise ValueError(f"noise must be one number, got shape {tuple(noise.shape)}")
    return noise

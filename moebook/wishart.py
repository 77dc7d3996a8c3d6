"""Wishart: excess risks of finite samples, simulated without drawing the samples.

The setting is `modular` with Gaussian features and n_k samples of module k. Least
squares sees its data only through Gram matrices, and that of n_k standard normal rows
is R^T R with Bartlett's triangular R: n does not enter the cost. Dense and sparse fits
are computed on the same draw.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from moebook import laws
from moebook.checks import check_count
from moebook.excess import blocks
from moebook.modular import Numbers, nonnegative, problem

#: Problems at a time: their matrices stay in the cache.
CHUNK = 128


class Excess(NamedTuple):
    """Excess risks (n,) of the sparse and the dense fit on the same draws."""

    sparse: Tensor
    dense: Tensor


def bartlett(
    n: int,
    p: int,
    dof: int | Tensor,
    generator: Generator,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Upper triangular R with R^T R of the Wishart law (dof, I) -> (n, p, p).

    dof is an int >= 0 or an int tensor (n,); for dof < p the rows from dof on are 0.
    Raises as `laws.gaussian`; TypeError or ValueError for another dof.
    Source: Bartlett (1933).
    """
    # One square of normals holds the triangles of two matrices.
    squares = laws.gaussian((n + 1) // 2, p * p, generator, dtype=dtype).view(-1, p, p)
    R = torch.cat((squares.triu(1), squares[: n // 2].mT.triu(1)))
    rows = _counts("dof", dof, (n,), R.device)[:, None] - torch.arange(p).to(R.device)
    shape = rows.clamp_min(1).double() / 2
    # What torch.distributions.Gamma calls, which takes no generator.
    chi = (2 * torch._standard_gamma(shape, generator=generator)).sqrt()
    R.diagonal(dim1=1, dim2=2).copy_(chi)
    if bool((rows <= 0).any()):
        R *= (rows > 0)[..., None]
    return R


def regression_samples(
    n: int,
    p: int,
    m: int,
    generator: Generator,
    variance: float = 1.0,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Excess risks of n least squares fits to m Gaussian samples of p features, (n,).

    Any covariance of the features; variance is that of the residual. The mean is
    `excess.ols_excess`, finite for m > p + 1. ValueError for m < p. Source: ours.
    """
    n, p, m = check_count("n", n, 0), check_count("p", p, 1), check_count("m", m, 0)
    variance = float(nonnegative("variance", variance))
    laws.gaussian(0, 1, generator, dtype=dtype)  # refuses a bad generator and dtype
    if m < p:
        raise ValueError(
            f"least squares on {p} features needs m >= {p} samples, got m = {m}: for "
            "fewer samples excess_samples takes the solution of smallest norm"
        )
    excess = torch.empty(n, dtype=dtype, device=generator.device)
    for here in excess.split(CHUNK):
        R = bartlett(len(here), p, m, generator, dtype=dtype)
        score = laws.gaussian(len(here), p, generator, dtype=dtype)
        miss = torch.linalg.solve_triangular(R, score[..., None], upper=True)
        here.copy_(variance * (miss**2).sum((1, 2)))
    return excess


def excess_samples(
    n: int,
    generator: Generator,
    counts: Sequence | Tensor,
    pi: Numbers,
    covariances: Sequence,
    coefficients: Sequence,
    noise: float,
    label_noise: float = 0.0,
    *,
    dtype: torch.dtype = torch.float64,
) -> Excess:
    """Excess risks of n draws, two of (n,): sparse and dense fits on the same data.

    counts (K,) are the samples of each module, or (n, K) those of each draw. A fit is
    least squares, of smallest norm where the samples do not determine it; the risk is
    that under pi less the best predictor's. An ill-conditioned Gram matrix is replaced
    by a QR factorisation. label_noise is a variance. Cost independent of the counts.
    Raises as `laws.gaussian` and `modular.problem`; ValueError for noise 0 or counts of
    another shape or below 0. Source: ours.
    """
    n = check_count("n", n, 0)
    laws.gaussian(0, 1, generator, dtype=dtype)  # refuses a bad generator and dtype
    law = _law(pi, covariances, coefficients, noise, label_noise, generator, dtype)
    counts = _counts("counts", counts, (n, len(law.pi)), generator.device)
    sparse = torch.empty(n, dtype=dtype, device=generator.device)
    dense = torch.empty_like(sparse)
    for part in range(0, n, CHUNK):
        here = slice(part, part + CHUNK)
        sparse[here], dense[here] = _draw(law, counts[here], generator, dtype)
    return Excess(sparse, dense)


class _Law(NamedTuple):
    """What the draws of a problem share; roots are upper, C = root^T root."""

    pi: list[float]
    sizes: list[int]
    experts: list[Tensor]
    root: list[Tensor]
    spread: list[float]
    contrast: list[Tensor]
    optimum: Tensor
    mean_root: Tensor
    sigma: float


def _law(pi, covariances, coefficients, noise, label_noise, generator, dtype) -> _Law:
    given = problem(pi, covariances, coefficients, noise)
    found = blocks(pi, covariances, coefficients, noise, label_noise)
    to = {"device": generator.device, "dtype": dtype}
    roots = [torch.linalg.cholesky(C).mT for C in [*found.design, found.mean]]
    return _Law(
        given.pi.tolist(),
        [len(a) for a in found.experts],
        [a.to(**to) for a in found.experts],
        [R.to(**to) for R in roots[:-1]],
        [float(v) ** 0.5 for v in found.residual],
        [c.to(**to) for c in found.contrast],
        found.dense.to(**to),
        roots[-1].to(**to),
        float(given.noise) ** 0.5,
    )


def _draw(
    law: _Law, counts: Tensor, generator: Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """One chunk: the triangular data of every module, both fits, both excess risks."""
    size, d = len(counts), sum(law.sizes)
    data = torch.empty(size, len(law.sizes), d, d, dtype=dtype, device=counts.device)
    target, sparse, start = data.new_empty(data.shape[:3]), data.new_zeros(size), 0
    for k, p in enumerate(law.sizes):
        # Own block first: its triangle is the data of the sparse fit.
        R = bartlett(size, d, counts[:, k], generator, dtype=dtype)
        score = laws.gaussian(size, d, generator, dtype=dtype) * law.spread[k]
        score *= R.diagonal(dim1=1, dim2=2) > 0
        own = R[:, :, :p] @ law.root[k]
        miss = _triangular(own[:, :p], score[:, :p], law.experts[k], counts[:, k])
        sparse += law.pi[k] * ((miss @ law.root[k].mT) ** 2).sum(1)
        end, rows = start + p, data[:, k]
        rows[..., start:end] = own
        torch.mul(R[..., p:end], law.sigma, out=rows[..., :start])
        torch.mul(R[..., end:], law.sigma, out=rows[..., end:])
        target[:, k] = rows @ law.contrast[k] + score
        start = end
    rank = counts.clamp_max(d).sum(1)
    miss = _least_squares(data.flatten(1, 2), target.flatten(1), law.optimum, rank)
    return sparse, ((miss @ law.mean_root.mT) ** 2).sum(1)


def _triangular(X: Tensor, y: Tensor, optimum: Tensor, rank: Tensor) -> Tensor:
    """Fit less optimum of triangular data, X (n, p, p), y - X optimum (n, p)."""
    short = rank < X.shape[2]
    if not bool(short.any()):
        return torch.linalg.solve_triangular(X, y[..., None], upper=True)[..., 0]
    miss = torch.empty_like(y)
    miss[short] = _smallest(X[short], y[short], optimum)
    full = ~short
    miss[full] = torch.linalg.solve_triangular(X[full], y[full][..., None], upper=True)[
        ..., 0
    ]
    return miss


def _least_squares(X: Tensor, y: Tensor, optimum: Tensor, rank: Tensor) -> Tensor:
    """Fit less optimum, data X (n, r, d), residuals at the optimum y (n, r)."""
    d = X.shape[2]
    factor, failed = torch.linalg.cholesky_ex(X.mT @ X)
    miss = torch.cholesky_solve(X.mT @ y[..., None], factor)[..., 0]
    pivots = factor.diagonal(dim1=1, dim2=2)
    # Squared in the Gram matrix: half of the digits would be gone.
    thin = pivots.amin(1) < torch.finfo(X.dtype).eps ** 0.25 * pivots.amax(1)
    short = rank < d
    again = (thin | (failed > 0)) & ~short
    if bool(again.any()):
        Q, R = torch.linalg.qr(X[again])
        moment = Q.mT @ y[again][..., None]
        miss[again] = torch.linalg.solve_triangular(R, moment, upper=True)[..., 0]
    if bool(short.any()):
        miss[short] = _smallest(X[short], y[short], optimum)
    return miss


def _smallest(X: Tensor, y: Tensor, optimum: Tensor) -> Tensor:
    """Solution of smallest norm less the optimum."""
    total = (X @ optimum + y)[..., None]
    alive = (X != 0).any(2)
    kept = alive.any(0)
    if bool(alive[:, kept].all()):
        Q, R = torch.linalg.qr(X[:, kept].mT)
        inner = torch.linalg.solve_triangular(R.mT, total[:, kept], upper=False)
        return (Q @ inner)[..., 0] - optimum
    return (torch.linalg.pinv(X) @ total)[..., 0] - optimum


def _counts(name: str, counts, shape: tuple, device: torch.device) -> Tensor:
    """Counts of samples >= 0 in int64, broadcast to this shape."""
    values = torch.as_tensor(counts, device=device)
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        raise TypeError(f"{name} must be ints, got {counts!r}: convert with int(...)")
    fits = values.ndim <= len(shape) and all(
        came == want
        for came, want in zip(values.shape[::-1], shape[::-1], strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} must have shape {shape} or that of one draw, got "
            f"{tuple(values.shape)}"
        )
    if bool((values < 0).any()):
        raise ValueError(f"{name} must be >= 0, got {int(values.min())}")
    return values.long().expand(shape)

"""Boundary: how much probability lies near a routing tie.

Samplers: each takes inputs x (n, d), one row a sample, and returns one float64 number a
row whose mean is the quantity named; averages and verdicts are made elsewhere. gap_k is
the k-th less the (k+1)-th largest logit, +inf for k = K; BM(w) = P(gap_k <= w) is the
boundary mass, BM'(0) the coarea constant.
"""

import math

import torch
from torch import Generator, Tensor

from moebook.checks import (
    check_choices,
    check_finite,
    check_input,
    check_router,
    check_widths,
)
from moebook.facets import check_ties, facet_sum
from moebook.lines import WORK, Frame, chunks, frame_of, line_share, take_largest
from moebook.routing import Affine
from moebook.surface import interface

__all__ = ["brute_force", "interface", "mass", "slope"]


def mass(
    router: Affine,
    x: Tensor,
    w: float | Tensor,
    k: int = 1,
    law: str = "gaussian",
    *,
    by: str = "line",
) -> Tensor:
    """Samples with mean P(gap_k <= w), x (n, d) -> (n,), or (n, m) for m widths w.

    x comes from N(0, I), or for law="ball" uniformly from the unit ball.
    by="line": the share of {gap_k <= w} on the line through x normal to the tie of
    ranks k and k+1, as far as these two keep their ranks below the same experts. In
    [0, 1], with never more variance than counting hits.
    by="stein": min(gap_k, w) u_S . x, where u_S sums over the active set the vectors
    with u_i . (w_j - w_l) = [i = j] - [i = l]. Gaussian law and affinely independent
    weights only, hence K <= d + 1; not confined to [0, 1]. For small w it is best where
    no weight is near an affine combination of the others: relative variance .035
    against 4.4 at w = .001 for 64 orthonormal rows, yet 5 to 25 for 64 random rows of
    64 numbers.
    Logits have the dtype of x; from there on float64, so that a tiny w loses nothing.
    w = 0 gives 0 unless experts are identical, and k = K gives [w = inf].
    Raises TypeError or ValueError that says what was expected.
    Source: ours. Line: the expectation given all but the place on the line. Stein:
    E[x . F] = E[div F] for F = u_S min(gap_k, w), continuous, div F = [gap_k < w].
    """
    k = check_router(router, k)
    check_input(x, router.weight.shape[1])
    check_choices(x, law, by, "line")
    widths = check_widths(w, x.device)
    frame, x = frame_of(router, x)
    ladder = widths.reshape(-1)
    out = x.new_empty((len(x), len(ladder)), dtype=torch.float64)
    if k == len(frame.bias):
        out[:] = ladder == math.inf
        return out.reshape(len(x), *widths.shape)
    dual = _dual(frame) if by == "stein" else None
    for rows in chunks(len(x), len(frame.bias)):
        if by == "stein":
            score, gap = _stein(frame, dual, x[rows], k)
            out[rows] = score * torch.minimum(gap, ladder)
        else:
            out[rows] = line_share(frame, x[rows], ladder, k, law)
    return out.reshape(len(x), *widths.shape)


def slope(
    router: Affine, x: Tensor, k: int = 1, law: str = "gaussian", *, by: str = "facet"
) -> Tensor:
    """Samples with mean BM'(0), the slope of P(gap_k <= w) at w = 0, (n, d) -> (n,).

    by="facet": 2 p(tie) / (|w_i - w_j| P(chord)), summed over the facets of the routing
    cell of x that x projects into. Finite variance unless four or more experts tie on
    one flat of codimension two.
    by="stein": u_S . x as in `mass`; Gaussian tails, no division.
    For K = 2 all facet samples are equal: that number is exact.
    Raises as `mass`; ValueError for identical experts, whose tie has a probability, and
    for three experts that tie on one hyperplane.
    Source: ours; twice the interface integral of `coarea-binary`, for every k.
    """
    k = check_router(router, k)
    check_input(x, router.weight.shape[1])
    check_choices(x, law, by, "facet")
    frame, x = frame_of(router, x)
    check_ties(frame, by)
    out = x.new_zeros(len(x), dtype=torch.float64)
    if k == len(frame.bias):
        return out
    dual = _dual(frame) if by == "stein" else None
    for rows in chunks(len(x), len(frame.bias), WORK // 2):
        if by == "stein":
            out[rows] = _stein(frame, dual, x[rows], k)[0].squeeze(1)
        else:
            out[rows] = facet_sum(frame, x[rows], k, law)
    return out


def _dual(frame: Frame) -> Tensor:
    """Vectors u with u_i . (w_j - w_l) = [i = j] - [i = l], (d, K)."""
    left, size, right = torch.linalg.svd(frame.exact[:, :-1], full_matrices=False)
    K, rank = len(left), int((size > 1e-6 * size[0]).sum())
    if rank < K - 1:
        raise ValueError(
            f"by='stein' needs affinely independent weights: {K} weights in d = "
            f"{right.shape[1]} span {rank} directions (to 1e-6), not {K - 1}: leave by "
            "at its default, which has no such condition"
        )
    dual = right[: K - 1].T / size[: K - 1] @ left[:, : K - 1].T
    return dual.to(frame.weight.dtype)


def _stein(frame: Frame, dual: Tensor, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Score u_S . x and gap_k, each (n, 1)."""
    value, place = take_largest(frame.logits(x), k + 1)
    score = (x @ dual).gather(1, place[:, :k]).double().sum(1, keepdim=True)
    return score, check_finite(value[:, k - 1 : k] - value[:, k:], x)


def brute_force(
    router: Affine, n: int, w: float | Tensor, generator: Generator, k: int = 1
) -> Tensor:
    """Hits gap_k <= w among n draws of N(0, I), int64 (), or (m,) for m widths w.

    The peer of `mass` and the contrast to it: the relative variance of a draw is about
    1/P(gap_k <= w). Float32, so not for w below 1e-5; draws on the generator's device.
    Raises as `mass`. Source: ours.
    """
    k = check_router(router, k)
    device, K = generator.device, len(router.bias)
    widths = check_widths(w, device)
    if k == K:
        return n * (widths == math.inf).long()
    weight = _shortened(router.weight.detach().to(device))
    bias = router.bias.detach().to(device, torch.float32)[:, None]
    biased = bool(bias.any())
    hits = torch.zeros(widths.shape, dtype=torch.int64, device=device)
    x, z = weight.new_empty(2**14, weight.shape[1]), weight.new_empty(K, 2**14)
    for start in range(0, n, 2**14):
        size = min(n - start, 2**14)
        part, logits = x[:size].normal_(generator=generator), z[:, :size]
        torch.mm(weight, part.T, out=logits)
        gap = _running_gap(logits.add_(bias) if biased else logits, k)
        for total, width in zip(hits.view(-1), widths.view(-1).tolist(), strict=True):
            total += torch.count_nonzero(gap <= width)
    return hits


def _shortened(weight: Tensor) -> Tensor:
    """Float32 weight, at most K long, whose logits of N(0, I) have the same law."""
    if weight.shape[1] > len(weight):  # W x and R'y, y in K dimensions, have one law
        weight = torch.linalg.qr(weight.double().T, mode="r").R.T
    return weight.float().contiguous()


def _running_gap(z: Tensor, k: int) -> Tensor:
    """gap_k in one pass over the experts, (K, n) -> (n,): far cheaper than topk."""
    if 2 * k > len(z):
        z, k = -z, len(z) - k
    top = [torch.full_like(z[0], -math.inf) for _ in range(k + 1)]
    spare = torch.empty_like(z[0]), torch.empty_like(z[0])
    for loser in z:
        for m in range(k):
            torch.minimum(top[m], loser, out=spare[m % 2])
            torch.maximum(top[m], loser, out=top[m])
            loser = spare[m % 2]
        torch.maximum(top[k], loser, out=top[k])
    return top[k - 1] - top[k]

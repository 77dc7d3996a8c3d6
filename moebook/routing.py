"""Routing: from logits to margin, gap, active set and tie order.

Logits have shape (n, K): n inputs, K experts. Of K experts k are active, those with
the k largest logits. A routing decision can jump only where the k-th and the
(k+1)-th largest logit are equal; everything here measures how near that is.
"""

import math
import operator
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Affine:
    """Affine router, weight (K, d) and bias (K,): x (n, d) -> logits (n, K).

    The logit of expert j is weight[j] . x + bias[j]; a missing bias is zero, and then
    all ties pass through the origin. Routers compare by identity. Raises TypeError
    where the tensors are not floating point or differ in dtype, ValueError for a
    wrong shape or a value that is not finite.
    Source: the gate of Shazeer et al. (2017), without its noise.
    """

    weight: Tensor
    bias: Tensor | None = None

    def __post_init__(self) -> None:
        _check_matrix("the router's weight", self.weight, "(K, d)")
        K, d = self.weight.shape
        if K == 0 or d == 0:
            raise ValueError(
                "a router needs an expert and an input: weight (K, d) with K, d >= 1, "
                f"got shape {(K, d)}: give one row an expert"
            )
        if self.bias is None:
            # Frozen for users; a missing field is completed once, at birth.
            object.__setattr__(self, "bias", self.weight.new_zeros(K))
            return
        _check_floating("the router's bias", self.bias)
        if self.bias.shape != (K,):
            raise ValueError(
                f"the router's bias must have shape (K,) = ({K},), one number an "
                f"expert, got {tuple(self.bias.shape)}: try bias.reshape({K})"
            )
        _check_finite("the router's bias", self.bias)
        _check_same_dtype("the router's bias", self.bias, self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits weight x + bias, (n, d) -> (n, K)."""
        _check_matrix("the router's input x", x, "(n, d)")
        d = self.weight.shape[1]
        if x.shape[1] != d:
            raise ValueError(
                f"the router's input x must have shape (n, {d}) for a weight of shape "
                f"{tuple(self.weight.shape)}, got {tuple(x.shape)}: one row an input"
            )
        _check_same_dtype("the router's input x", x, self.weight)
        return torch.nn.functional.linear(x, self.weight, self.bias)


def margin(logits: Tensor) -> Tensor:
    """Gap between the two largest logits, (n, K) -> (n,).

    In units of the logits, zero exactly at ties of the first place, +inf for K = 1:
    an expert without rivals never loses. Raises as `check_logits`.
    Source: ours; the Delta of the book, |s| for two experts with score s.
    """
    return gap(logits, 1)


def gap(logits: Tensor, k: int) -> Tensor:
    """Gap between the k-th and the (k+1)-th largest logit, (n, K) -> (n,).

    In units of the logits; zero exactly where the active set is not unique, +inf for
    k = K, where every expert is active and nothing can change. A difference too large
    for the dtype is +inf as well. Differentiable off ties.
    Raises as `check_logits` and `check_active`.
    """
    check_logits(logits)
    k = check_active(logits, k)
    if k == logits.shape[1]:
        return logits.new_full(logits.shape[:1], math.inf)
    largest = logits.topk(k + 1, dim=1).values
    return largest[:, k - 1] - largest[:, k]


def active_set(logits: Tensor, k: int) -> Tensor:
    """Mask of the k active experts, (n, K) -> bool (n, K), exactly k true a row.

    At a tie across the k-th place the experts of lowest index win, on every device
    (the order in which `torch.topk` returns equal values is not promised).
    Raises as `check_logits` and `check_active`.
    """
    check_logits(logits)
    k = check_active(logits, k)
    threshold = logits.topk(k, dim=1).values[:, -1:]
    above = logits > threshold
    tied = logits == threshold
    places = k - above.sum(dim=1, keepdim=True)
    return above | (tied & (tied.cumsum(dim=1) <= places))


def tie_order(logits: Tensor, k: int, tol: float = 0.0) -> Tensor:
    """Order of the tie between the active and the idle, (n, K) -> int64 (n,).

    Zero where the gap at the k-th place exceeds tol: ties that stay on one side of the
    threshold are no discontinuity, and for k = K there is no other side. Otherwise the
    number of experts within tol of the k-th largest logit, above or below, minus one:
    two experts meet at order 1, three at order 2. In floating point an exact tie is
    rare; a tol of a few roundings of the largest logit finds those that were meant.
    Raises as `check_logits` and `check_active`; ValueError for tol NaN or negative.
    Source: order-n points of arXiv:2606.19036; for tol > 0 this is the cube
    |s_j - s_(k)| <= tol, one of three sets in use (the spread and the one-sided set
    have other volumes).
    """
    check_logits(logits)
    k = check_active(logits, k)
    if not isinstance(tol, Real) or not tol >= 0:
        raise ValueError(
            "tol must be a number >= 0 in units of the logits (0 asks for exact ties), "
            f"got {tol!r}"
        )
    if k == logits.shape[1]:
        return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    largest = logits.topk(k + 1, dim=1).values
    threshold, rival = largest[:, k - 1, None], largest[:, k, None]
    tied = (logits - threshold).abs() <= float(tol)
    crosses = threshold - rival <= float(tol)
    return (tied.sum(dim=1) - 1) * crosses[:, 0]


def check_logits(logits: Tensor) -> None:
    """Refuse what is not a table of finite logits, (n, K) with K >= 1.

    TypeError for anything but a floating-point tensor; ValueError for a wrong number
    of dimensions, no expert, NaN or infinity. n = 0 is a table without rows.
    """
    _check_matrix("logits", logits, "(n, K)")
    if logits.shape[1] == 0:
        raise ValueError(
            "logits (n, K) need at least one expert, K >= 1, got shape "
            f"{tuple(logits.shape)}: give one column an expert"
        )


def check_active(logits: Tensor, k: int) -> int:
    """The number of active experts as an int, if 1 <= k <= K for logits (n, K).

    TypeError if k is not a whole number, ValueError if it is out of range.
    """
    K = logits.shape[1]
    try:
        k = operator.index(None if isinstance(k, bool) else k)
    except TypeError as error:
        raise TypeError(
            f"k, the number of active experts, must be an int from 1 to K = {K}, "
            f"got {k!r} of type {type(k).__name__}: choose a whole number"
        ) from error
    if not 1 <= k <= K:
        raise ValueError(
            f"k, the number of active experts, must be from 1 to K = {K}, got {k}: "
            f"logits of shape {tuple(logits.shape)} have one column an expert"
        )
    return k


def _check_matrix(name: str, values: Tensor, shape: str) -> None:
    _check_floating(name, values)
    if values.ndim != 2:
        raise ValueError(
            f"{name} must have shape {shape}, got {tuple(values.shape)}: "
            "a single row is written values[None, :]"
        )
    _check_finite(name, values)


def _check_floating(name: str, values: Tensor) -> None:
    if not isinstance(values, Tensor):
        raise TypeError(
            f"{name} must be a floating-point torch.Tensor, got "
            f"{type(values).__name__}: convert with torch.as_tensor(values)"
        )
    if not values.is_floating_point():
        raise TypeError(
            f"{name} must be a floating-point torch.Tensor, got dtype "
            f"{values.dtype}: convert with values.double()"
        )


def _check_finite(name: str, values: Tensor) -> None:
    # One sum is several times cheaper than a mask; it is finite only if all terms
    # are. If it is not, the terms may still be: large numbers can overflow it.
    if values.detach().sum().isfinite():
        return
    bad = ~values.detach().isfinite()
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} must be finite, got {values[place].item()} at {place} and "
            f"{int(bad.sum())} such value(s) in all: look for it where {name} comes "
            "from; to mask an expert, leave its column out"
        )


def _check_same_dtype(name: str, values: Tensor, weight: Tensor) -> None:
    if values.dtype != weight.dtype:
        raise TypeError(
            f"{name} must have the dtype of the router's weight, {weight.dtype}, got "
            f"{values.dtype}: convert with .to({weight.dtype})"
        )

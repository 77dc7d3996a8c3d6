"""Thresholds: the k-th largest of E independent logits, and who lies just below it.

Given s_(k) = x the E - k idle logits are independent, each with the law of a logit that
is known to lie below x. So a mean over inputs is one integral over the law of s_(k).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

from moebook.checks import check_count


class Law(NamedTuple):
    """A law of logits: logarithms of cdf, survival and density, and two quantiles."""

    log_cdf: Callable
    log_sf: Callable
    log_pdf: Callable
    below: Callable  # x with cdf(x) = p
    above: Callable  # x with survival(x) = p


LAWS = {
    "normal": Law(
        torch.special.log_ndtr,
        lambda x: torch.special.log_ndtr(-x),
        lambda x: -(x**2) / 2,
        special.ndtri,
        lambda p: -special.ndtri(p),
    ),
    "gumbel": Law(
        lambda x: -torch.exp(-x),
        lambda x: torch.log(-torch.expm1(-torch.exp(-x))),
        lambda x: -x - torch.exp(-x),
        lambda p: -math.log(-math.log(p)),
        lambda p: -math.log(-math.log1p(-p)),
    ),
}


def named(name: str) -> Law:
    """The law of independent logits of that name: "normal" or "gumbel", standard."""
    if name not in LAWS:
        raise ValueError(f"law must be one of {', '.join(LAWS)}, got {name!r}")
    return LAWS[name]


def rule(E: int, k: int, law: Law) -> tuple[Tensor, Tensor]:
    """Nodes and weights for means over the law of s_(k), each (400,).

    Only the quantiles from 1e-18 on each side are covered: on a fixed wide interval the
    peak at the (1 - k/E)-quantile is narrow, and an adaptive rule can miss it.
    """
    start = law.below(special.betaincinv(E - k + 1, k, 1e-18))
    stop = law.above(special.betaincinv(k, E - k + 1, 1e-18))
    node, size = np.polynomial.legendre.leggauss(20)
    panel = np.linspace(start, stop, 21)
    x = (panel[:-1, None] + (stop - start) / 40 * (1 + node)).ravel()
    x, size = torch.from_numpy(x), torch.from_numpy(np.tile(size, 20))
    density = (E - k) * law.log_cdf(x) + (k - 1) * law.log_sf(x) + law.log_pdf(x)
    return x, torch.softmax(density + size.log(), 0)


def share(law: Law, x: Tensor, eps: Tensor) -> Tensor:
    """Chance that a logit below x lies within eps of it."""
    return -torch.expm1(law.log_cdf(x - eps) - law.log_cdf(x))


def check_counts(E: int, k: int) -> tuple[int, int]:
    """Numbers of experts and of active ones as ints, if 1 <= k <= E.

    TypeError unless both are whole numbers, ValueError if they are out of range.
    """
    E = check_count("E", E)
    return E, check_count("k", k, 1, E)


def check_widths(eps: float | Tensor) -> Tensor:
    """Widths in float64, of any shape; ValueError for NaN or a negative number."""
    width = torch.as_tensor(eps, dtype=torch.float64)
    if not bool((width >= 0).all()):
        raise ValueError(
            "the width eps must be a number >= 0 in units of the logits (0 is hard "
            f"top-k, inf the softmax over all), got {eps!r}"
        )
    return width

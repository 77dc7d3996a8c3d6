"""Arrangement: ties of an affine router counted, and the volume of what lies near them.

A tie of order n: n + 1 of E experts share one score, some of them active, some idle.
The set of such x consists of strata, open polyhedra of codimension n. Counts hold for
generic weights and bias; volumes are exact, or per eps^n as eps -> 0 where so named.
"""

import math
from collections.abc import Sequence

import torch
from scipy import special
from torch import Tensor

from moebook.checks import check_count
from moebook.regions import cells, orderings
from moebook.tubes import thickened, tie_samples

__all__ = [
    "cells",
    "gram_volume",
    "ordering_count",
    "orderings",
    "slab_fraction",
    "star_fraction",
    "strata_count",
    "thickened",
    "tie_samples",
    "topk_cell_count_planar",
    "tube_fraction",
]

Number = float | Tensor


def strata_count(E: int, k: int, n: int) -> int:
    """Number of order-n strata of top-k routing with E experts, all orders feasible.

    A stratum is the n + 1 experts that tie and the set of a experts above them, with
    a < k < a + n + 1: C(E, n + 1) sets times C(E - n - 1, a), summed over a. All
    orders are feasible where the weights are affinely independent, hence d >= E - 1;
    otherwise this is an upper bound, and 0 for n > d and generic bias. Zero for k = E
    and for n >= E. Raises TypeError for no int, ValueError for E, n < 1, k not in
    1..E. Source: ours, for arXiv:2606.19036.
    """
    E, n = check_count("E", E, 1), check_count("n", n, 1)
    k = check_count("k", k, 1, E)
    above = range(max(0, k - n), min(k - 1, E - n - 1) + 1)
    return math.comb(E, n + 1) * sum(math.comb(E - n - 1, a) for a in above)


def ordering_count(E: int, d: int, central: bool = False) -> int:
    """Number of orders of E generic affine scores over R^d; central: without bias.

    With c(E, j) the unsigned Stirling numbers of the first kind: the sum of c(E, E - j)
    over j <= d; for central scores twice the sum over j = d - 1, d - 3, ... (the one
    order of E = 1 counts once). Raises TypeError for no int, ValueError for E, d < 1.
    Source: Good and Tideman (1977), for distances to points; Zaslavsky (1975).
    """
    E, d = check_count("E", E, 1), check_count("d", d, 1)
    stirling = [1]  # c(m, m - j) for j = 0, ..., m - 1
    for m in range(1, E):
        ahead, behind = stirling + [0], [0] + stirling
        stirling = [a + m * b for a, b in zip(ahead, behind, strict=True)]
    if not central:
        return sum(stirling[: d + 1])
    # From d = E - 1 on the E - 1 differences are free, and more inputs add nothing.
    j = min(d, E - 1) - 1
    return 2 * sum(stirling[j::-2]) if E > 1 else 1


def topk_cell_count_planar(E: int, k: int, unbounded: Sequence[int]) -> int:
    """Number of top-k cells of E generic affine scores in the plane.

    (2k - 1) E - (k^2 - 1) - (e_1 + ... + e_(k-1)), where unbounded = (e_1, e_2, ...)
    counts the unbounded top-i cells, which are the cells of the same weights without
    bias. Only where every expert is somewhere first: a hidden expert can break it.
    Raises TypeError for no int, ValueError for k not in 1..E - 1 or fewer than k - 1
    numbers. Source: Lee (1982), order-k Voronoi diagrams, here of powers.
    """
    E = check_count("E", E, 2)
    k = check_count("k", k, 1, E - 1)
    known = [check_count("a number of unbounded cells", e, 1) for e in unbounded]
    if len(known) < k - 1:
        raise ValueError(
            f"unbounded must list e_1 to e_(k-1), {k - 1} numbers for k = {k}, got "
            f"{known}: count them by len(arrangement.cells(weight, None, i))"
        )
    return (2 * k - 1) * E - (k * k - 1) - sum(known[: k - 1])


def tube_fraction(d: int, n: int, ratio: Number) -> Number:
    """Share of a ball of R^d within eps of a flat through its centre, float64.

    n is the codimension of the flat, ratio = eps / radius, a number or a tensor of
    any shape; 1 from ratio = 1 on. Exact, for n = d as well, where the flat is the
    centre. Raises TypeError or ValueError for n not in 1..d or ratio < 0 or NaN.
    Source: ours; I_(ratio^2)(n/2, (d - n)/2 + 1), I the regularised incomplete beta.
    """
    d = check_count("d", d, 1)
    n = check_count("n", n, 1, d)
    at = _numbers("ratio", ratio, 0.0).clamp_max(1.0)
    return _like(ratio, _beta(n / 2, (d - n) / 2 + 1, at.square()))


def slab_fraction(d: int, centre: Number, half: Number) -> Number:
    """Share of the unit ball of R^d with |a . x - centre| < half, |a| = 1, float64.

    Lengths in units of the radius; numbers or tensors that broadcast. Exact to about
    1e-16, so not to many digits for half below 1e-10. Raises as `tube_fraction`.
    Source: ours; P(a . x < t) = (1 + sign(t) I_(t^2)(1/2, (d + 1)/2)) / 2.
    """
    d = check_count("d", d, 1)
    centre_at, half_at = _numbers("centre", centre), _numbers("half", half, 0.0)

    def odd(t: Tensor) -> Tensor:
        t = t.clamp(-1.0, 1.0)
        return t.sign() * _beta(0.5, (d + 1) / 2, t.square())

    share = (odd(centre_at + half_at) - odd(centre_at - half_at)) / 2
    return _like(half if isinstance(half, Tensor) else centre, share)


def star_fraction(rays: int, ratio: Number) -> Number:
    """Share of a disc within eps of rays from its centre at equal angles, float64.

    ratio = eps / radius, a number or a tensor. Three rays are the ties of three
    experts with weights at equal angles, top-1, no bias: with e = ratio the share is
    (3/pi) (asin e + e sqrt(1 - e^2) - e^2 cot(pi/3)), and 1 from e = sin(pi/3) on.
    Raises as `tube_fraction`; ValueError for fewer than two rays.
    Source: ours; in each half sector a sector of angle asin e and a triangle.
    """
    rays = check_count("rays", rays, 2)
    half = math.pi / rays
    e = _numbers("ratio", ratio, 0.0).clamp_max(math.sin(half))
    cot = math.cos(half) / math.sin(half)
    share = (e.asin() + e * (1 - e * e).sqrt() - e * e * cot) / half
    return _like(ratio, share)


def gram_volume(rows: Tensor, kind: str = "spread") -> Tensor:
    """Volume per eps^n of a set of nearly tied scores in its normal space, () float64.

    rows (n, d) are the weights of n experts less that of the first of the n + 1 that
    tie. kind="spread": largest less smallest score below eps, (n + 1) / sqrt(det G)
    with G = rows rows'. "one_sided": all less than eps below a given one of them,
    1 / sqrt(det G). "cube": all within eps of a given one, 2^n / sqrt(det G). The
    spread does not depend on which expert is the first; differentiable.
    Raises TypeError or ValueError for another shape, NaN, or dependent rows.
    Source: ours; the volume element of x is that of the scores over sqrt(det G).
    """
    share = {
        "spread": lambda n: n + 1,
        "one_sided": lambda n: 1,
        "cube": lambda n: 2**n,
    }
    if kind not in share:
        raise ValueError(f"kind must be spread, one_sided or cube, got {kind!r}")
    if not isinstance(rows, Tensor) or not rows.is_floating_point():
        raise TypeError(f"rows must be a floating-point tensor (n, d), got {rows!r}")
    if rows.ndim != 2 or not 1 <= rows.shape[0] <= rows.shape[1]:
        raise ValueError(
            "rows must have shape (n, d) with 1 <= n <= d, one difference of weights a "
            f"row, got {tuple(rows.shape)}"
        )
    if not rows.isfinite().all():
        raise ValueError("rows must be finite: look for NaN where they come from")
    size = torch.linalg.svdvals(rows.double())
    if size[-1] <= 1e-12 * size[0]:
        raise ValueError(
            f"the {len(rows)} rows are dependent: these experts do not tie on a flat "
            f"of codimension {len(rows)}; leave out the row that others determine"
        )
    return share[kind](len(rows)) / size.prod()


def _numbers(name: str, value: Number, least: float = -math.inf) -> Tensor:
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise TypeError(f"{name} must be a number or a tensor, got {value!r}")
    numbers = torch.as_tensor(value, dtype=torch.float64)
    if not bool((numbers >= least).all()):
        bound = "a number" if least == -math.inf else f"at least {least:g}"
        raise ValueError(f"{name} must be {bound}, got {value!r}")
    return numbers


def _beta(a: float, b: float, x: Tensor) -> Tensor:
    share = special.betainc(a, b, x.detach().cpu().numpy())
    return torch.as_tensor(share, dtype=torch.float64, device=x.device)


def _like(asked: Number, answer: Tensor) -> Number:
    return answer if isinstance(asked, Tensor) else float(answer)

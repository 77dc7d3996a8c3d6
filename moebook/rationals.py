"""Rationals: the energy router's accuracy and risk as fractions, for even p.

The setting is `energy`. The chi-square law F with an even number p of degrees of
freedom is 1 less a polynomial times an exponential, so the integrals are sums.
"""

import math
from fractions import Fraction
from functools import reduce

import sympy as sp

from moebook.energy import check_request


def exact_router(
    K: int, p: int, nu: sp.Rational | Fraction | int
) -> tuple[sp.Rational, sp.Rational]:
    """Routing accuracy and hard risk as rational numbers, for even p, rational nu.

    F is then 1 less a polynomial times an exponential. Slow for large K p. ValueError
    for an odd p; raises as `routing_accuracy`. Source: ours.
    """
    K, p, _ = check_request(K, p, float(nu))
    if p % 2:
        raise ValueError(f"p must be even for a rational answer, got {p}")
    half, nu = p // 2, Fraction(nu)
    ratio = (1 + nu) / nu
    beaten = _power(_exact_law(half, ratio), K - 1)
    accuracy = _exact_mean(half, 0, beaten)
    energy = 2 * (1 + nu) * _exact_mean(half, 1, beaten)
    if K > 1:
        others = _power(_exact_law(half, Fraction(1)), K - 2)
        below = _product(others, _exact_law(half, 1 / ratio))
        energy -= 2 * (K - 1) * nu * _exact_mean(half, 1, below)
    risk = 1 - energy / (p * (1 + nu) ** 2)
    return tuple(sp.Rational(x.numerator, x.denominator) for x in (accuracy, risk))


def _exact_law(half: int, c: Fraction) -> dict:
    """F(2 c y) as {rate: coefficients}, a sum of polynomials times exp(-rate y)."""
    tail = [-(c**i) / math.factorial(i) for i in range(half)]
    return {Fraction(0): [Fraction(1)], c: tail}


def _product(left: dict, right: dict) -> dict:
    out = {}
    for a, xs in left.items():
        for b, ys in right.items():
            row = out.setdefault(a + b, [])
            row += [Fraction(0)] * (len(xs) + len(ys) - 1 - len(row))
            for i, x in enumerate(xs):
                for j, y in enumerate(ys):
                    row[i + j] += x * y
    return out


def _power(law: dict, n: int) -> dict:
    return reduce(_product, [law] * n, {Fraction(0): [Fraction(1)]})


def _exact_mean(half: int, power: int, law: dict) -> Fraction:
    """E y^power law(y) for y of the Gamma law with this half of the degrees."""
    total = Fraction(0)
    for rate, row in law.items():
        for i, x in enumerate(row):
            n = half + power + i
            rise = Fraction(math.factorial(n - 1), math.factorial(half - 1))
            total += x * rise / (1 + rate) ** n
    return total

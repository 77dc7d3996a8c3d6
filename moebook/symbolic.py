"""Symbolic: exact Gaussian moments, sigmoid integrals, and coarea over a hyperplane.

SymPy only. Everything is read from tables and closed forms; `sympy.integrate` is slow
on these integrals and leaves most of them unevaluated.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from math import prod

import sympy as sp


def gaussian_moment(indices: Sequence[int], covariance: sp.Matrix) -> sp.Expr:
    """E[x_i x_j ...] over the indices (i, j, ...) for x ~ N(0, covariance (d, d)).

    Indices count from 0 and may repeat: (0, 0, 1) is E[x_0^2 x_1]. The covariance may
    hold symbols; that it is positive semidefinite is not checked. TypeError for an
    index that is no int; ValueError for one out of range and for a covariance that is
    not square, symmetric and of non-negative diagonal.
    Source: Isserlis (1918), the sum over all pairings.
    """
    covariance = _covariance(covariance)
    d = covariance.rows
    powers = [0] * d
    for index in indices:
        try:
            index = operator.index(None if isinstance(index, bool) else index)
        except TypeError as error:
            raise TypeError(f"indices must be ints >= 0, got {index!r}") from error
        if not 0 <= index < d:
            raise ValueError(
                f"indices must be from 0 to {d - 1} for a covariance {covariance.shape}"
                f", got {index}: coordinates count from 0"
            )
        powers[index] += 1
    return _correlated_moments(covariance)(tuple(powers))


def gaussian_expectation(
    polynomial: sp.Expr,
    symbols: Sequence[sp.Symbol],
    covariance: sp.Matrix | None = None,
) -> sp.Expr:
    """E[polynomial] when the d symbols are N(0, covariance (d, d)) -> expression.

    Without covariance the symbols are independent standard normals. Other symbols are
    constants. For a mean, write polynomial.subs(x, x + mean). ValueError for an
    expression that is no polynomial in the symbols, for a covariance of another size,
    and for a symbol declared of one sign; TypeError for symbols that are not distinct
    SymPy symbols.
    Source: Isserlis (1918), term by term through a table of moments.
    """
    symbols = _distinct(symbols)
    if covariance is None:
        moment = _standard_moment
    else:
        covariance = _covariance(covariance)
        if covariance.rows != len(symbols):
            raise ValueError(
                f"{len(symbols)} symbols need a covariance of that size, got "
                f"{covariance.shape}: one row and one column a symbol"
            )
        moment = _correlated_moments(covariance)
    polynomial = sp.sympify(polynomial)
    _check_namesakes(polynomial, symbols)
    try:
        terms = sp.Poly(polynomial, *symbols).terms()
    except (sp.PolynomialError, sp.CoercionFailed) as error:
        raise ValueError(
            f"{polynomial} is not a polynomial in {list(symbols)}: Gaussian moments "
            "are for polynomials; use sympy.integrate for the rest"
        ) from error
    return sp.Add(*(coefficient * moment(powers) for powers, coefficient in terms))


def eta(s: sp.Expr) -> sp.Expr:
    """Dirichlet eta(s) = sum_{m>=1} (-1)^(m+1) m^(-s), continued to all s, exact.

    eta(2) = pi^2/12, eta(1) = log 2, eta(0) = 1/2, eta(-1) = 1/4; no pole anywhere.
    TypeError for a float.
    """
    return sp.dirichlet_eta(_exact("s", s))


def sigmoid_moment(alpha: sp.Expr) -> sp.Expr:
    """Integral of u^alpha / (1 + e^u) over u > 0, Gamma(alpha+1) eta(alpha+1).

    1/(1 + e^u) is sigma(-u), the smaller of two gates at margin u = Delta/tau. For
    alpha > -1; ValueError otherwise, TypeError for a float.
    Source: ours; the geometric series in e^(-u), term by term.
    """
    alpha = _exponent(alpha)
    return sp.gamma(alpha + 1) * eta(alpha + 1)


def sigmoid_square_moment(alpha: sp.Expr) -> sp.Expr:
    """Integral of u^alpha / (1 + e^u)^2, Gamma(alpha+1) [eta(alpha+1) - eta(alpha)].

    Over u > 0, for alpha > -1; ValueError otherwise, TypeError for a float.
    Source: ours; sigma(-u)^2 = sigma(-u) - sigma'(u), hence the difference of
    `sigmoid_moment` and `logistic_density_moment`; positive, since eta increases.
    """
    alpha = _exponent(alpha)
    return sp.gamma(alpha + 1) * (eta(alpha + 1) - eta(alpha))


def logistic_density_moment(alpha: sp.Expr) -> sp.Expr:
    """Integral of u^alpha sigma'(u) over u > 0, Gamma(alpha+1) eta(alpha).

    sigma'(u) = sigma(u) sigma(-u) = e^u / (1 + e^u)^2, the logistic density. For
    alpha > -1; ValueError otherwise, TypeError for a float.
    Source: ours; `sigmoid_moment` at alpha - 1 by parts, continued to alpha > -1.
    """
    alpha = _exponent(alpha)
    return sp.gamma(alpha + 1) * eta(alpha)


def coarea_hyperplane(
    direction: Sequence,
    offset: sp.Expr,
    *,
    mean: Sequence | None = None,
    covariance: sp.Matrix | None = None,
) -> sp.Expr:
    """Integral of p / |u| over the hyperplane {u.x + b = 0}, u (d,), b a number.

    p is the density of N(mean (d,), covariance (d, d)), standard where not given; u is
    the direction, b the offset. The answer is phi(m/s)/s with m = u.mean + b and
    s^2 = u' covariance u: the density of the score u.x + b at zero. One side, once:
    the boundary mass has slope twice this. ValueError for shapes that do not fit and
    for s^2 not positive.
    Source: ours; the coarea formula for an affine score, which is itself Gaussian.
    """
    u = sp.Matrix(list(direction))
    d = u.rows
    center = sp.zeros(d, 1) if mean is None else sp.Matrix(list(mean))
    spread = sp.eye(d) if covariance is None else _covariance(covariance)
    if d == 0 or u.cols != 1 or center.shape != (d, 1) or spread.rows != d:
        raise ValueError(
            "direction (d,), mean (d,) and covariance (d, d) must share one d >= 1, "
            f"got {u.shape}, {center.shape} and {spread.shape}: flat lists of numbers"
        )
    m = (u.T * center)[0] + sp.sympify(offset)
    variance = sp.expand((u.T * spread * u)[0])
    if variance.is_zero or variance.is_negative:
        raise ValueError(
            f"the score u.x + b must vary, but its variance u' covariance u is "
            f"{variance}: give a direction that is not zero, within the law's support"
        )
    return sp.exp(-(m**2) / (2 * variance)) / sp.sqrt(2 * sp.pi * variance)


def _standard_moment(powers: tuple[int, ...]) -> sp.Expr:
    if any(power % 2 for power in powers):
        return sp.S.Zero
    return sp.Integer(prod(prod(range(1, power, 2)) for power in powers))


def _correlated_moments(covariance: sp.Matrix) -> Callable:
    @cache
    def moment(powers: tuple[int, ...]) -> sp.Expr:
        # Pair one factor with each other factor; equal factors give equal terms, so
        # the table has one entry a monomial, not one a pairing.
        if sum(powers) % 2:
            return sp.S.Zero
        first = next((i for i, power in enumerate(powers) if power), None)
        if first is None:
            return sp.S.One
        rest = _lowered(powers, first)
        pairs = (
            power * covariance[first, j] * moment(_lowered(rest, j))
            for j, power in enumerate(rest)
            if power and covariance[first, j] != 0
        )
        return sp.expand(sp.Add(*pairs))

    return moment


def _lowered(powers: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*powers[:place], powers[place] - 1, *powers[place + 1 :])


def _covariance(covariance: sp.Matrix) -> sp.Matrix:
    covariance = sp.Matrix(covariance)
    if covariance.rows != covariance.cols or not covariance.is_symmetric():
        raise ValueError(
            "a covariance must be square and symmetric, got shape "
            f"{covariance.shape}: {covariance.tolist()}"
        )
    negative = [v for v in covariance.diagonal() if v.is_negative]
    if negative:
        raise ValueError(
            f"a covariance has variances on its diagonal, got {negative[0]} < 0: "
            "variances, not standard deviations or logarithms"
        )
    return covariance


def _distinct(symbols: Sequence[sp.Symbol]) -> tuple[sp.Symbol, ...]:
    symbols = (symbols,) if isinstance(symbols, sp.Symbol) else tuple(symbols)
    proper = all(isinstance(symbol, sp.Symbol) for symbol in symbols)
    if not symbols or not proper or len(set(symbols)) < len(symbols):
        raise TypeError(
            f"symbols must be distinct SymPy symbols, at least one, got {symbols}: "
            'make them with sympy.symbols("x y")'
        )
    for symbol in symbols:
        if symbol.is_extended_nonnegative or symbol.is_extended_nonpositive:
            raise ValueError(
                f"a Gaussian takes both signs, but {symbol} is declared of one, and "
                f"SymPy has used that already: declare {symbol} real"
            )
    return symbols


def _check_namesakes(polynomial: sp.Expr, symbols: tuple[sp.Symbol, ...]) -> None:
    # SymPy tells x from x declared real; taken for a constant, x^2 would have mean x^2.
    names = {symbol.name for symbol in symbols}
    strangers = [s for s in polynomial.free_symbols - set(symbols) if s.name in names]
    if strangers:
        raise ValueError(
            f"{polynomial} holds a {strangers[0]} with other assumptions than the "
            f"{strangers[0]} among the symbols: use one and the same symbol"
        )


def _exact(name: str, value: sp.Expr) -> sp.Expr:
    value = sp.sympify(value)
    if value.has(sp.Float):
        exact = sp.srepr(sp.nsimplify(value, rational=True))
        raise TypeError(
            f"{name} must be exact, got the float {value}: write sympy.{exact}, and "
            "evaluate the result with .evalf()"
        )
    if value.has(sp.nan, sp.oo, -sp.oo, sp.zoo):
        raise ValueError(f"{name} must be finite, got {value}")
    return value


def _exponent(alpha: sp.Expr) -> sp.Expr:
    alpha = _exact("alpha", alpha)
    if (sp.re(alpha) + 1).is_positive is False:
        raise ValueError(
            f"u^alpha is integrable at 0 only for alpha > -1, got alpha = {alpha}: "
            "the closed form continues further, the integral does not"
        )
    return alpha

"""Symbolic: each closed form against quadrature, enumeration or another derivation."""

import itertools
import subprocess
import sys

import mpmath
import pytest
import sympy as sp

from moebook import symbolic

R = sp.Rational
x, y, z = sp.symbols("x y z", real=True)
a = sp.symbols("a", positive=True)
# Entries c_ij with c_ij = c_ji, nothing else assumed.
GENERAL = sp.Matrix(3, 3, lambda i, j: sp.Symbol(f"c{min(i, j)}{max(i, j)}"))
ALPHAS = [R(-9, 10), R(-1, 2), 0, R(1, 4), R(1, 2), 1, R(3, 2), 2, R(7, 2), 5]


@pytest.fixture(autouse=True)
def thirty_digits():
    with mpmath.workdps(30):
        yield


def assert_digits(expression, value):
    """25 of 30 digits agree."""
    exact = mpmath.mpmathify(sp.N(expression, 30))
    assert mpmath.almosteq(exact, value, rel_eps=mpmath.mpf(10) ** -25), (exact, value)


def half_line(integrand):
    """Integral over u > 0; u = v^10 takes the sting from u^alpha at the origin."""
    substituted = lambda v: integrand(v**10) * 10 * v**9  # noqa: E731
    return mpmath.quad(substituted, [0, 0.5, 1, 1.3, 1.6, mpmath.root(200, 10)])


# --- Gaussian moments -------------------------------------------------------


def pairings(items):
    """All ways to split a list into pairs, by plain enumeration."""
    if not items:
        yield []
        return
    head, *rest = items
    for j, partner in enumerate(rest):
        for others in pairings(rest[:j] + rest[j + 1 :]):
            yield [(head, partner), *others]


@pytest.mark.parametrize(
    "indices",
    [(), (0,), (0, 1), (0, 0, 1, 1), (0, 0, 0, 1, 2, 2), (2, 1, 0, 0, 1, 2), (1,) * 8],
)
def test_gaussian_moment_is_the_sum_over_all_pairings(indices):
    by_hand = sum(
        sp.prod(GENERAL[i, j] for i, j in pairing)
        for pairing in pairings(list(indices))
    )
    by_hand = by_hand if len(indices) % 2 == 0 else 0
    assert sp.expand(symbolic.gaussian_moment(indices, GENERAL) - by_hand) == 0


@pytest.mark.parametrize(
    "powers", [(2, 1, 1), (4, 2, 0), (2, 2, 2), (1, 1, 2), (3, 2, 1)]
)
def test_gaussian_moment_is_a_derivative_of_the_generating_function(powers):
    t = sp.symbols("t0:3")
    vector = sp.Matrix(t)
    generating = sp.exp((vector.T * GENERAL * vector)[0] / 2)
    for symbol, power in zip(t, powers, strict=True):
        generating = sp.diff(generating, symbol, power)
    by_hand = sp.expand(generating.subs(dict.fromkeys(t, 0)))
    indices = [i for i, power in enumerate(powers) for _ in range(power)]
    assert sp.expand(symbolic.gaussian_moment(indices, GENERAL) - by_hand) == 0


def test_gaussian_moment_of_one_variable_is_a_double_factorial():
    for power in range(0, 21, 2):
        moment = symbolic.gaussian_moment([0] * power, sp.Matrix([[a]]))
        assert moment == sp.factorial2(power - 1) * a ** (power // 2)
    assert symbolic.gaussian_moment([0] * 7, sp.Matrix([[a]])) == 0


def test_gaussian_moment_does_not_depend_on_the_order_of_indices():
    moments = {
        symbolic.gaussian_moment(indices, GENERAL)
        for indices in itertools.permutations((0, 0, 1, 2))
    }
    assert len(moments) == 1


@pytest.mark.parametrize(
    ("indices", "covariance", "error", "words"),
    [
        ((0, 3), GENERAL, ValueError, "from 0 to 2.*got 3"),
        ((-1,), GENERAL, ValueError, "got -1"),
        ((0.0, 1), GENERAL, TypeError, "got 0.0"),
        ((0,), sp.Matrix([[1, 2]]), ValueError, "square"),
        ((0,), sp.Matrix([[1, 2], [0, 1]]), ValueError, "symmetric"),
        ((0, 0), sp.Matrix([[-1]]), ValueError, "-1 < 0"),
    ],
)
def test_gaussian_moment_refuses_bad_input(indices, covariance, error, words):
    with pytest.raises(error, match=words):
        symbolic.gaussian_moment(indices, covariance)


def test_gaussian_expectation_agrees_with_integrate():
    density = sp.exp(-(x**2) / 2) / sp.sqrt(2 * sp.pi)
    for polynomial in (sp.Integer(3), x, x**2, (1 + a * x) ** 4, x**6 - x**3):
        by_hand = sp.integrate(sp.expand(polynomial) * density, (x, -sp.oo, sp.oo))
        found = symbolic.gaussian_expectation(polynomial, [x])
        assert sp.simplify(found - by_hand) == 0


def test_gaussian_expectation_agrees_with_a_quadrature_in_the_plane():
    """Correlated, mixed and of degree six: nine nodes a side are exact to degree 17."""
    covariance = sp.Matrix([[2, R(1, 2)], [R(1, 2), 1]])
    polynomial = (x + 2 * y) ** 4 * x * y + x**2 * y**3 + 7
    root = mpmath.cholesky(mpmath.matrix([[2, 0.5], [0.5, 1]]))
    nodes = mpmath.polyroots(
        [
            sp.Poly(sp.hermite_prob(9, x), x).coeff_monomial(x**k)
            for k in range(9, -1, -1)
        ],
        maxsteps=200,
        extraprec=200,
    )
    weights = [
        mpmath.factorial(9) / (9 * sp.hermite_prob(8, node)) ** 2 for node in nodes
    ]
    evaluate = sp.lambdify((x, y), polynomial, "mpmath")
    total = mpmath.fsum(
        wi * wj * evaluate(root[0, 0] * p, root[1, 0] * p + root[1, 1] * q)
        for (p, wi), (q, wj) in itertools.product(
            list(zip(nodes, weights, strict=True)), repeat=2
        )
    )
    found = symbolic.gaussian_expectation(polynomial, (x, y), covariance=covariance)
    assert_digits(found, total)


def test_gaussian_expectation_of_a_power_of_a_sum_is_closed():
    """x1 + ... + x4 is N(0, 1'C1): the table, all 1820 entries of it, must agree."""
    symbols = sp.symbols("x1:5", real=True)
    covariance = sp.eye(4) + sp.ones(4, 4) / 2
    found = symbolic.gaussian_expectation(
        sum(symbols) ** 12, symbols, covariance=covariance
    )
    assert found == sp.factorial2(11) * 12**6


def test_gaussian_expectation_of_a_quadratic_form_is_a_trace():
    form = sp.Matrix(3, 3, sp.symbols("q:9"))
    vector = sp.Matrix([x, y, z])
    found = symbolic.gaussian_expectation(
        (vector.T * form * vector)[0], (x, y, z), covariance=GENERAL
    )
    assert sp.expand(found - (form * GENERAL).trace()) == 0


def test_gaussian_expectation_without_covariance_is_the_identity():
    polynomial = (a * x + y**2 - 1) ** 4 * (x - y)
    plain = symbolic.gaussian_expectation(polynomial, (x, y))
    explicit = symbolic.gaussian_expectation(polynomial, (x, y), covariance=sp.eye(2))
    assert sp.expand(plain - explicit) == 0


def test_gaussian_expectation_of_a_degenerate_law():
    ones = sp.ones(2, 2)
    assert symbolic.gaussian_expectation((x - y) ** 4, (x, y), covariance=ones) == 0


@pytest.mark.parametrize(
    ("polynomial", "symbols", "error", "words"),
    [
        (sp.exp(x), [x], ValueError, "not a polynomial"),
        (1 / x, [x], ValueError, "not a polynomial"),
        (sp.Abs(x), [x], ValueError, "not a polynomial"),
        (sp.sqrt(x), [x], ValueError, "not a polynomial"),
        (x**a, [x], ValueError, "not a polynomial"),
        (x * sp.sin(x), [x], ValueError, "not a polynomial"),
        (x, [], TypeError, "at least one"),
        (x, [x, x], TypeError, "distinct"),
        (x, [x**2], TypeError, "SymPy symbols"),
        (a**2, [a], ValueError, "both signs.*declare a real"),
        (sp.Symbol("x") ** 2, [x], ValueError, "other assumptions"),
        ("x**2", [x], ValueError, "other assumptions"),
    ],
)
def test_gaussian_expectation_refuses_bad_input(polynomial, symbols, error, words):
    with pytest.raises(error, match=words):
        symbolic.gaussian_expectation(polynomial, symbols)


def test_gaussian_expectation_refuses_a_covariance_of_another_size():
    with pytest.raises(ValueError, match="2 symbols"):
        symbolic.gaussian_expectation(x * y, (x, y), covariance=sp.eye(3))


# --- eta and the sigmoid integrals ------------------------------------------


def test_eta_at_the_places_the_book_uses():
    assert symbolic.eta(2) == sp.pi**2 / 12
    assert symbolic.eta(1) == sp.log(2)
    assert symbolic.eta(0) == R(1, 2)
    assert symbolic.eta(-1) == R(1, 4)
    assert symbolic.eta(-2) == 0


@pytest.mark.parametrize("s", [R(-7, 2), -3, R(-1, 2), R(1, 3), 3, R(9, 2), 2 + sp.I])
def test_eta_is_the_alternating_series(s):
    value = mpmath.mpmathify(s)
    series = mpmath.nsum(
        lambda m: (-1) ** (int(m) + 1) * m ** (-value), [1, mpmath.inf]
    )
    if sp.re(s) > 0:  # below, the series does not converge
        assert_digits(symbolic.eta(s), series)
    assert_digits(symbolic.eta(s), mpmath.altzeta(value))


def test_eta_of_a_symbol_has_no_pole_at_one():
    s = sp.Symbol("s")
    assert symbolic.eta(s).subs(s, 1) == sp.log(2)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_sigmoid_integrals_agree_with_quadrature(alpha):
    power = mpmath.mpmathify(alpha)

    def loser(u):
        return 1 / (1 + mpmath.exp(u))

    assert_digits(
        symbolic.sigmoid_moment(alpha), half_line(lambda u: u**power * loser(u))
    )
    assert_digits(
        symbolic.sigmoid_square_moment(alpha),
        half_line(lambda u: u**power * loser(u) ** 2),
    )
    assert_digits(
        symbolic.logistic_density_moment(alpha),
        half_line(lambda u: u**power * loser(u) * loser(-u)),
    )


@pytest.mark.parametrize("alpha", ALPHAS)
def test_the_swapped_eta_is_no_answer(alpha):
    """The control: with eta(alpha) and eta(alpha + 1) exchanged the sign is wrong."""
    square = symbolic.sigmoid_square_moment(alpha)
    swapped = sp.gamma(alpha + 1) * (symbolic.eta(alpha) - symbolic.eta(alpha + 1))
    assert sp.N(square) > 0 > sp.N(swapped)


def test_sigmoid_integrals_agree_with_integrate_where_it_succeeds():
    u = sp.symbols("u", positive=True)
    # u = -log(v) turns each into a rational integrand over 0 < v < 1.
    loser = sp.exp(-u) / (1 + sp.exp(-u))
    v = sp.symbols("v", positive=True)
    for found, integrand in (
        (symbolic.sigmoid_moment(0), loser),
        (symbolic.sigmoid_square_moment(0), loser**2),
        (symbolic.logistic_density_moment(0), loser * (1 - loser)),
    ):
        rational = sp.simplify(integrand.subs(u, -sp.log(v))) / v
        assert sp.simplify(sp.integrate(sp.cancel(rational), (v, 0, 1)) - found) == 0


def test_the_three_integrals_obey_their_pointwise_identity():
    alpha = sp.Symbol("alpha", positive=True)
    total = symbolic.sigmoid_square_moment(alpha)
    total += symbolic.logistic_density_moment(alpha) - symbolic.sigmoid_moment(alpha)
    assert sp.expand(total) == 0


@pytest.mark.parametrize(
    ("alpha", "symmetric", "hard_teacher"),
    [
        (R(1, 4), "-1.145243682376", "0.8651112779785"),
        (R(1, 2), "-1.347436477716", "0.7968733821649"),
        (1, "-2.000000000000", "0.7725887222398"),
        (2, "-5.54517744448", "1.034558822913"),
        (R(7, 2), "-40.34813429809", "2.808070861631"),
    ],
)
def test_the_risk_gaps_of_constant_experts_follow(alpha, symmetric, hard_teacher):
    """Margin density alpha t^(alpha-1), experts +-1: printed quadratures."""
    square = 4 * alpha * symbolic.sigmoid_square_moment(alpha - 1)
    density = 4 * alpha * symbolic.logistic_density_moment(alpha - 1)
    for found, printed in ((-density, symmetric), (square, hard_teacher)):
        decimals = len(printed.partition(".")[2])
        assert f"{sp.N(found, 30):.{decimals}f}" == printed


sigmoids = pytest.mark.parametrize(
    "integral",
    [
        symbolic.sigmoid_moment,
        symbolic.sigmoid_square_moment,
        symbolic.logistic_density_moment,
    ],
)


@sigmoids
@pytest.mark.parametrize(
    ("alpha", "error", "words"),
    [
        (-1, ValueError, "alpha > -1, got alpha = -1"),
        (-3, ValueError, "got alpha = -3"),
        (sp.oo, ValueError, "finite"),
        (sp.nan, ValueError, "finite"),
        (0.5, TypeError, r"sympy.Rational\(1, 2\)"),
    ],
)
def test_sigmoid_integrals_refuse_bad_exponents(integral, alpha, error, words):
    with pytest.raises(error, match=words):
        integral(alpha)


@sigmoids
def test_a_symbolic_exponent_may_be_filled_later(integral):
    alpha = sp.Symbol("alpha")
    for value in (0, R(1, 2), 2):
        assert sp.simplify(integral(alpha).subs(alpha, value) - integral(value)) == 0


# --- coarea over a hyperplane -----------------------------------------------


def line_integral(u, b, mean, covariance):
    """Surface integral over |u| by quadrature along the line u.x + b = 0."""
    u, mean = mpmath.matrix(u), mpmath.matrix(mean)
    covariance = mpmath.matrix(covariance)
    precision, volume = covariance**-1, mpmath.sqrt(mpmath.det(covariance))
    norm = mpmath.norm(u)
    foot = u * (-mpmath.mpf(b) / norm**2)
    along = mpmath.matrix([-u[1], u[0]]) / norm

    def density(t):
        offset = foot + along * t - mean
        form = (offset.T * precision * offset)[0]
        return mpmath.exp(-form / 2) / (2 * mpmath.pi * volume)

    return mpmath.quad(density, mpmath.linspace(-30, 30, 25)) / norm


@pytest.mark.parametrize(
    ("u", "b", "mean", "covariance"),
    [
        ([1, 0], 0, [0, 0], [[1, 0], [0, 1]]),
        ([3, 4], 5, [0, 0], [[1, 0], [0, 1]]),
        ([3, -4], 1, [1, 2], [[2, 1], [1, 2]]),
        ([R(1, 10), R(1, 5)], R(-1, 3), [-1, 1], [[R(1, 2), 0], [0, 3]]),
    ],
)
def test_coarea_agrees_with_a_quadrature_along_the_line(u, b, mean, covariance):
    exact = symbolic.coarea_hyperplane(
        u, b, mean=mean, covariance=sp.Matrix(covariance)
    )
    # mpmath takes SymPy rationals only one by one.
    numbers = [[mpmath.mpmathify(v) for v in row] for row in covariance]
    value = line_integral(
        [mpmath.mpmathify(v) for v in u], mpmath.mpmathify(b), mean, numbers
    )
    assert_digits(exact, value)


def test_coarea_agrees_with_integrate_over_a_plane_in_space():
    """{a x + b = 0} in three dimensions: y and z integrate out, |u| = a divides."""
    b = sp.symbols("b", real=True)
    density = sp.exp(-(x**2 + y**2 + z**2) / 2) / (2 * sp.pi) ** R(3, 2)
    over_plane = sp.integrate(
        density.subs(x, -b / a), (y, -sp.oo, sp.oo), (z, -sp.oo, sp.oo)
    )
    found = symbolic.coarea_hyperplane([a, 0, 0], b)
    assert sp.simplify(over_plane / a - found) == 0


def test_coarea_is_half_the_slope_of_the_boundary_mass():
    w = sp.symbols("w", positive=True)
    b = sp.symbols("b", real=True)
    mass = (sp.erf((w - b) / (a * sp.sqrt(2))) + sp.erf((w + b) / (a * sp.sqrt(2)))) / 2
    slope = sp.diff(mass, w).subs(w, 0)
    assert sp.simplify(slope - 2 * symbolic.coarea_hyperplane([a], b)) == 0


def test_coarea_does_not_depend_on_the_dimension():
    for d in (1, 2, 5):
        found = symbolic.coarea_hyperplane([3, *[0] * (d - 1)], 2)
        assert found == symbolic.coarea_hyperplane([3], 2)


def test_coarea_scales_against_the_score():
    """Twice the score: the same hyperplane, half the answer. Area alone misses it."""
    u = sp.symbols("u1:3", real=True)
    b = sp.Symbol("b", real=True)
    double = symbolic.coarea_hyperplane([2 * v for v in u], 2 * b)
    assert sp.simplify(double - symbolic.coarea_hyperplane(u, b) / 2) == 0


def test_coarea_takes_rows_columns_and_lists():
    expected = symbolic.coarea_hyperplane([3, 4], 5)
    assert symbolic.coarea_hyperplane(sp.Matrix([3, 4]), 5) == expected
    assert symbolic.coarea_hyperplane(sp.Matrix([[3, 4]]), 5) == expected


@pytest.mark.parametrize(
    ("arguments", "more", "words"),
    [
        (([0, 0], 1), {}, "variance .* is 0"),
        (([1, -1], 1), {"covariance": sp.ones(2, 2)}, "variance .* is 0"),
        (([], 1), {}, "one d >= 1"),
        (([[1, 2]], 1), {}, "flat lists"),
        (([1, 2], 1), {"mean": [0]}, r"\(2, 1\), \(1, 1\)"),
        (([1, 2], 1), {"covariance": sp.eye(3)}, r"\(3, 3\)"),
        (([1, 2], 1), {"covariance": sp.Matrix([[1, 2], [0, 1]])}, "symmetric"),
    ],
)
def test_coarea_refuses_bad_input(arguments, more, words):
    with pytest.raises(ValueError, match=words):
        symbolic.coarea_hyperplane(*arguments, **more)


# --- the import -------------------------------------------------------------


def test_symbolic_does_not_pay_for_torch():
    code = "import sys, moebook.symbolic; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

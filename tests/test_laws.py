"""Laws: exact distribution functions and moments, at five standard errors."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from moebook import laws

torch.set_num_threads(1)
N = 40_000


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def assert_mean(values, target):
    """The mean is within five of its own standard errors of the target."""
    values = values.double()
    stderr = values.std() / math.sqrt(len(values))
    assert abs(values.mean() - target) <= 5 * stderr, (values.mean(), target, stderr)


def assert_share(hits, probability):
    """The share of hits is within five exact standard errors of the probability."""
    stderr = math.sqrt(probability * (1 - probability) / len(hits))
    share = hits.double().mean()
    assert abs(share - probability) <= 5 * stderr, (share, probability, stderr)


MEAN = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
COVARIANCE = torch.tensor(
    [[2.0, 0.6, -0.3], [0.6, 1.0, 0.2], [-0.3, 0.2, 0.5]], dtype=torch.float64
)
MIXED = {
    "weights": [0.25, 0.75],
    "means": [[-2.0, 0.0], [1.0, 3.0]],
    "covariances": [[[1.0, 0.5], [0.5, 1.0]], [[0.25, 0.0], [0.0, 4.0]]],
}
LAWS = {
    "gaussian": lambda n, g, **more: laws.gaussian(n, 3, g, **more),
    "correlated": lambda n, g, **more: laws.gaussian(
        n, 3, g, mean=MEAN, covariance=COVARIANCE, **more
    ),
    "ball": lambda n, g, **more: laws.ball(n, 3, g, radius=2.0, **more),
    "cube": lambda n, g, **more: laws.cube(n, 3, g, **more),
    "student_t": lambda n, g, **more: laws.student_t(n, 3, g, dof=3.5, **more),
    "mixture": lambda n, g, **more: laws.mixture(n, g, **MIXED, **more),
}
every_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


# --- what all laws share ----------------------------------------------------


@every_law
def test_equal_generators_give_equal_draws(law):
    assert torch.equal(law(50, generator(4)), law(50, generator(4)))
    assert not torch.equal(law(50, generator(4)), law(50, generator(5)))


@every_law
def test_a_draw_advances_the_generator_and_leaves_the_global_one_alone(law):
    state, own = torch.get_rng_state(), generator()
    assert not torch.equal(law(50, own), law(50, own))
    assert torch.equal(torch.get_rng_state(), state)


@every_law
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_device_and_shape(law, dtype):
    for n in (0, 1, 17):
        samples = law(n, generator(), dtype=dtype)
        assert samples.dtype == dtype and samples.device == generator().device
        assert len(samples) == n and samples.ndim == 2
        assert samples.isfinite().all()
    assert law(3, generator()).dtype == torch.float64


@every_law
def test_float32_draws_have_the_same_law(law):
    single, double = law(N, generator(1), dtype=torch.float32), law(N, generator(2))
    for statistic in (lambda x: x[:, 0] > 0.3, lambda x: x.square().sum(1) < 1):
        a, b = statistic(single).double(), statistic(double).double()
        assert abs(a.mean() - b.mean()) <= 5 * math.sqrt((a.var() + b.var()) / N)


@every_law
@pytest.mark.parametrize(
    ("n", "error", "words"),
    [
        (-1, ValueError, "n must be at least 0, got -1"),
        (1.0, TypeError, "n must be an int, got 1.0"),
        (True, TypeError, "n must be an int, got True"),
        (None, TypeError, "NoneType"),
    ],
)
def test_bad_sample_counts_are_refused(law, n, error, words):
    with pytest.raises(error, match=words):
        law(n, generator())


def test_a_refused_request_draws_nothing():
    own = generator()
    before = own.get_state()
    for law, more in (
        (laws.gaussian, {"covariance": [[0.0, 0.0], [0.0, 0.0]]}),
        (laws.ball, {"radius": -1.0}),
        (laws.student_t, {"dof": -1.0}),
    ):
        with pytest.raises(ValueError, match="must be"):
            law(5, 2, own, **more)
    assert torch.equal(own.get_state(), before)


@every_law
@pytest.mark.parametrize("own", [None, 21, torch.Generator])
def test_a_seed_is_no_generator(law, own):
    with pytest.raises(TypeError, match=r"torch\.Generator\(\)\.manual_seed"):
        law(5, own)


@every_law
@pytest.mark.parametrize("dtype", [torch.float16, torch.int64, "float32", None])
def test_other_dtypes_are_refused(law, dtype):
    with pytest.raises(TypeError, match=r"float64 or torch\.float32"):
        law(5, generator(), dtype=dtype)


@pytest.mark.parametrize(
    "law",
    [
        laws.gaussian,
        laws.ball,
        laws.cube,
        lambda n, d, own: laws.student_t(n, d, own, dof=3),
    ],
)
@pytest.mark.parametrize(("d", "error"), [(0, ValueError), (2.0, TypeError)])
def test_bad_dimensions_are_refused(law, d, error):
    with pytest.raises(error, match="d must be"):
        law(5, d, generator())


# --- Gaussian ---------------------------------------------------------------


def test_gaussian_has_its_mean_and_covariance():
    x = laws.gaussian(N, 3, generator(), mean=MEAN, covariance=COVARIANCE)
    for i in range(3):
        assert_mean(x[:, i], MEAN[i])
        for j in range(3):
            assert_mean((x[:, i] - MEAN[i]) * (x[:, j] - MEAN[j]), COVARIANCE[i, j])


def test_gaussian_whitened_has_a_chi_square_radius():
    x = laws.gaussian(N, 3, generator(), mean=MEAN, covariance=COVARIANCE) - MEAN
    radius = (x @ torch.linalg.inv(COVARIANCE) * x).sum(1)
    for level in (0.5, 2.0, 8.0):
        assert_share(radius < level, scipy.stats.chi2.cdf(level, 3))


def test_standard_gaussian_is_the_special_case():
    x = laws.gaussian(100, 2, generator())
    explicit = laws.gaussian(
        100, 2, generator(), mean=[0, 0], covariance=[[1, 0], [0, 1]]
    )
    torch.testing.assert_close(x, explicit, atol=0, rtol=0)
    moved = laws.gaussian(100, 2, generator(), mean=[3.0, -1.0])
    assert torch.equal(moved, x + torch.tensor([3.0, -1.0]))


def test_gaussian_lets_gradients_through_to_its_parameters():
    mean = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    covariance = torch.eye(2, dtype=torch.float64, requires_grad=True)
    laws.gaussian(5, 2, generator(), mean=mean, covariance=covariance).sum().backward()
    assert mean.grad.tolist() == [5.0, 5.0]
    assert covariance.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"mean": [0.0]}, ValueError, r"mean must have shape \(2\), got \(1,\)"),
        ({"mean": [0.0, math.nan]}, ValueError, "mean must be finite"),
        ({"mean": "ab"}, TypeError, "numbers"),
        ({"covariance": torch.eye(3)}, ValueError, r"\(2, 2\), got \(3, 3\)"),
        ({"covariance": [1.0, 1.0]}, ValueError, r"got \(2,\)"),
        ({"covariance": [[1, 0.5], [0, 1]]}, ValueError, "symmetric"),
        ({"covariance": [[1e-12, 5e-13], [0, 1e-12]]}, ValueError, "symmetric"),
        ({"covariance": [[1, 2], [2, 1]]}, ValueError, "smallest eigenvalue -1"),
        ({"covariance": [[1, 1], [1, 1]]}, ValueError, "fewer dimensions"),
        ({"covariance": [[1, 0], [0, math.inf]]}, ValueError, "finite"),
    ],
)
def test_gaussian_refuses_bad_parameters(more, error, words):
    with pytest.raises(error, match=words):
        laws.gaussian(5, 2, generator(), **more)


# --- ball and cube ----------------------------------------------------------


@pytest.mark.parametrize("d", [1, 2, 3, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ball_has_its_radial_law_and_stays_inside(d, dtype):
    x = laws.ball(N, d, generator(), radius=2.0, dtype=dtype)
    ratio = torch.linalg.vector_norm(x, dim=1) / 2.0
    assert ratio.max() <= 1 + 4 * torch.finfo(dtype).eps
    for level in (0.3, 0.5, 0.9):
        assert_share(ratio**d < level, level)


@pytest.mark.parametrize("d", [1, 2, 3, 16])
def test_ball_projects_to_a_beta_law(d):
    """(1 + e.x)/2 is Beta((d+1)/2, (d+1)/2) for a unit vector e."""
    x = laws.ball(N, d, generator())
    direction = torch.ones(d, dtype=torch.float64) / math.sqrt(d)
    for b in (-0.4, 0.0, 0.2, 0.5):
        half = (d + 1) / 2
        assert_share(x @ direction < b, scipy.special.betainc(half, half, (1 + b) / 2))


def test_ball_scales_with_its_radius():
    unit = laws.ball(100, 3, generator())
    assert torch.equal(laws.ball(100, 3, generator(), radius=4.0), 4.0 * unit)


def test_ball_survives_a_normal_that_is_exactly_zero(monkeypatch):
    """In float32 that can happen, and 0/0 is NaN."""
    monkeypatch.setattr(torch, "randn", lambda n, d, **more: torch.zeros(n, d))
    assert laws.ball(2, 1, generator(), dtype=torch.float32).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("radius", [0.0, -1.0, math.inf, math.nan, "1", None])
def test_ball_refuses_a_bad_radius(radius):
    with pytest.raises(ValueError, match="radius must be a positive finite number"):
        laws.ball(5, 2, generator(), radius=radius)


def test_cube_is_centred_with_volume_one():
    x = laws.cube(N, 3, generator())
    assert x.min() >= -0.5 and x.max() < 0.5
    for i in range(3):
        assert_mean(x[:, i], 0)
        assert_mean(x[:, i].square(), 1 / 12)
        for level in (-0.3, 0.1, 0.4):
            assert_share(x[:, i] < level, level + 0.5)
    assert_share((x > 0).all(dim=1), 1 / 8)


def test_the_diagonal_strip_of_the_square_has_its_kinked_mass():
    """P(|x1 - x2|/sqrt(2) <= w) = 2 sqrt(2) w - 2 w^2, exactly."""
    x = laws.cube(N, 2, generator())
    for w in (0.1, 0.5):
        inside = (x[:, 0] - x[:, 1]).abs() / math.sqrt(2) <= w
        assert_share(inside, 2 * math.sqrt(2) * w - 2 * w**2)


# --- Student t --------------------------------------------------------------


@pytest.mark.parametrize("dof", [0.7, 1, 3, 12.5])
@pytest.mark.parametrize("d", [1, 2, 7])
def test_student_t_has_t_marginals_and_an_f_radius(dof, d):
    """|x|^2 / d is F(d, dof): independent t coordinates would fail for d > 1."""
    x = laws.student_t(N, d, generator(), dof=dof)
    direction = torch.ones(d, dtype=torch.float64) / math.sqrt(d)
    for level in (-1.5, 0.0, 0.4, 3.0):
        assert_share(x @ direction < level, scipy.stats.t.cdf(level, dof))
    for level in (0.2, 1.0, 5.0):
        radius = x.square().sum(1) / d
        assert_share(radius < level, scipy.stats.f.cdf(level, d, dof))


def test_independent_t_coordinates_are_told_apart():
    """The control of the test above: the same marginals, another radius."""
    x = torch.cat([laws.student_t(N, 1, generator(s), dof=3) for s in range(7)], dim=1)
    inside = (x.square().sum(1) / 7 < 0.2).double().mean()
    probability = scipy.stats.f.cdf(0.2, 7, 3)
    assert abs(inside - probability) > 5 * math.sqrt(probability / N)


def test_student_t_of_many_degrees_is_gaussian():
    dof = 1e12
    x = laws.student_t(N, 2, generator(), dof=dof)
    # The divisor is one up to 1/sqrt(2 dof); 4e4 of them stay within seven of these.
    rtol = 7 / math.sqrt(2 * dof)
    torch.testing.assert_close(x, laws.gaussian(N, 2, generator()), rtol=rtol, atol=0)


@pytest.mark.parametrize("dof", [0, -1, math.nan, math.inf, None])
def test_student_t_refuses_a_bad_dof(dof):
    with pytest.raises(ValueError, match=r"dof must be.*laws\.gaussian"):
        laws.student_t(5, 2, generator(), dof=dof)


# --- mixture ----------------------------------------------------------------


def test_mixture_has_the_sum_of_its_marginals():
    x = laws.mixture(N, generator(), **MIXED)
    for i in range(2):
        for level in (-2.0, 0.5, 2.0):
            probability = sum(
                weight
                * scipy.stats.norm.cdf(level, mean[i], math.sqrt(covariance[i][i]))
                for weight, mean, covariance in zip(*MIXED.values(), strict=True)
            )
            assert_share(x[:, i] < level, probability)


def test_mixture_has_its_second_moments():
    x = laws.mixture(N, generator(), **MIXED)
    # E[x0 x1] = 1/4 (-2*0 + .5) + 3/4 (1*3 + 0): variances within, means between.
    assert_mean(x[:, 0] * x[:, 1], 0.25 * 0.5 + 0.75 * 3.0)
    assert_mean(x[:, 0].square(), 0.25 * (4 + 1) + 0.75 * (1 + 0.25))


def test_mixture_of_one_is_the_gaussian():
    one = laws.mixture(
        N, generator(), weights=[1.0], means=MEAN[None], covariances=COVARIANCE[None]
    )
    same = laws.gaussian(N, 3, generator(), mean=MEAN, covariance=COVARIANCE)
    torch.testing.assert_close(one, same)


def test_mixture_never_draws_a_component_of_weight_zero():
    for weights in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        x = laws.mixture(
            N,
            generator(),
            weights=weights,
            means=[[0.0], [1000.0], [2000.0]],
            covariances=[[[1.0]]] * 3,
        )
        drawn = (x / 1000).round().unique().tolist()
        assert drawn == [float(weights.index(1.0))]


def test_mixture_takes_weights_rounded_to_float32():
    third = torch.full((3,), 1 / 3, dtype=torch.float32)
    ones = torch.ones(3, 1, 1)
    x = laws.mixture(10, generator(), weights=third, means=ones[:, 0], covariances=ones)
    assert x.shape == (10, 1)


def test_mixture_takes_lists_of_tensors_and_arrays():
    plain = laws.mixture(10, generator(), **MIXED)
    for convert in (torch.tensor, np.array):
        rows = {name: [convert(row) for row in MIXED[name]] for name in MIXED}
        assert torch.equal(laws.mixture(10, generator(), **rows), plain)
        assert torch.equal(
            laws.mixture(10, generator(), *(convert(v) for v in MIXED.values())), plain
        )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weights": [0.3, 0.6]}, ValueError, "sum 1.*divide"),
        ({"weights": [-0.3, 1.3]}, ValueError, "not negative"),
        ({"weights": []}, ValueError, "weights must have shape"),
        ({"weights": [[0.3, 0.7]]}, ValueError, r"got \(1, 2\)"),
        ({"means": [[0.0, 0.0]]}, ValueError, r"means must have shape \(2, any\)"),
        ({"means": [0.0, 0.0]}, ValueError, r"got \(2,\)"),
        ({"means": [[0.0, 0.0], [0.0]]}, TypeError, "same length"),
        ({"covariances": torch.ones(2, 3, 3)}, ValueError, r"\(2, 2, 2\).*\(2, 3, 3\)"),
        ({"covariances": -torch.ones(2, 2, 2)}, ValueError, "positive definite"),
    ],
)
def test_mixture_refuses_bad_parameters(change, error, words):
    with pytest.raises(error, match=words):
        laws.mixture(5, generator(), **{**MIXED, **change})

"""risk: gaps and their limits against quadrature, closed forms and plain samples."""

import itertools
import math

import pytest
import torch
from scipy import integrate, stats
from truths import (
    DOUBLE,
    assert_mean,
    normals,
    random_router,
    refuted,
    star,
)

from moebook import gating, layers, risk
from moebook.routing import Affine

LN2 = math.log(2)
LADDER = (1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)

LINE = Affine(
    torch.tensor([[1.0], [0.0]], dtype=DOUBLE), torch.tensor([-0.4, 0.0], dtype=DOUBLE)
)
ONE = torch.zeros(1, 1, dtype=DOUBLE)  # on a line of two experts every x gives the mean


def curved(x):
    return torch.cat((1 + x / 2, x**2 / 4 - 0.5), 1)


def wave(x):
    return (torch.sin(x) + x / 2)[:, 0]


def teacher(x):
    """The label mean of the hard router itself."""
    return torch.where(x[:, 0] > 0.4, *curved(x).unbind(1))


def steps(x):
    return x.new_tensor([1.0, 0.0, -1.0]).expand(len(x), 3)


def tilt(x):
    return 0.3 * x[:, 0] + 0.2 * x[:, 1]


def signs(x):
    return x.new_tensor([1.0, -1.0]).expand(len(x), 2)


def nothing(x):
    return x.new_zeros(len(x))


def mixture(K, d, seed=0, dtype=DOUBLE):
    """A random router, curved experts and a label mean."""
    slopes = normals(d, K, seed + 50, dtype) / math.sqrt(d)
    label = normals(1, d, seed + 51, dtype)[0] / math.sqrt(d)

    def experts(x):
        return torch.sin(x @ slopes) + 0.3 * (x @ slopes) ** 2

    return random_router(K, d, seed, dtype=dtype), experts, lambda x: (x @ label).cos()


def by_quad(experts, label_mean, tie, tau):
    """L_tau - L_0 of the scores t - tie and 0 under N(0, 1), by scipy."""

    def inside(t):
        x = torch.tensor([[t]], dtype=DOUBLE)
        (first, second), m = experts(x)[0].tolist(), label_mean(x).item()
        best, rest = (first, second) if t > tie else (second, first)
        gate = 1 / (1 + math.exp(min(abs(t - tie) / tau, 700)))
        change = gate * (rest - best)
        return change * (change + 2 * (best - m)) * stats.norm.pdf(t)

    edges = {tie + side * width * tau for side in (-1, 1) for width in (0, 4, 12, 40)}
    edges = sorted({-9.0, 9.0} | {t for t in edges if abs(t) < 9})
    parts = itertools.pairwise(edges)
    return sum(integrate.quad(inside, *part, epsrel=1e-11)[0] for part in parts)


@pytest.mark.parametrize(
    ("label_mean", "tau", "truth"),
    [
        (wave, 0.1, -0.07921792126425),
        (wave, 0.05, -0.04531634874168),
        (wave, 0.0125, -0.01235842589311),
        (teacher, 0.05, 0.01956736725212),
    ],
)
def test_gap_on_the_line(label_mean, tau, truth):
    x = normals(50, 1)
    samples = risk.gap(LINE, curved, label_mean, x, tau)
    torch.testing.assert_close(
        samples, torch.full_like(samples, truth), rtol=2e-8, atol=0
    )
    plain = risk.soft(LINE, curved, label_mean, x, tau)
    plain = plain - risk.hard(LINE, curved, label_mean, x)
    assert plain.std() > 1e-3


@pytest.mark.parametrize("tie", [0.0, 1.0, -3.0, 5.0])
def test_gap_agrees_with_scipy(tie):
    bias = torch.tensor([-tie, 0.0], dtype=DOUBLE)
    router, taus = Affine(LINE.weight, bias), [10.0, 1.0, 0.3, 0.05, 0.011, 0.008, 1e-4]
    found = risk.gap(router, curved, wave, ONE, taus)[0]
    truth = [by_quad(curved, wave, tie, tau) for tau in taus]
    torch.testing.assert_close(found, found.new_tensor(truth), rtol=1e-7, atol=0)


def test_first_order_on_the_line():
    flat = risk.first_order(LINE, curved, wave, ONE).item()
    assert flat == pytest.approx(-1.01480519862, rel=1e-11)

    def jump(x, i, j):
        f = curved(x)
        return (f.gather(1, i[:, None]) - f.gather(1, j[:, None])).squeeze(1)

    steep = risk.first_order(LINE, curved, teacher, ONE, jump=jump).item()
    assert steep == pytest.approx(0.392013525862, rel=1e-11)
    # The gap finds the same limits; 1/2 for ln 2 would leave no first order at all.
    for label_mean, limit in ((wave, flat), (teacher, steep)):
        near = risk.gap(LINE, curved, label_mean, ONE, 1e-6).item() / 1e-6
        assert near == pytest.approx(limit, rel=2e-5)
    assert (2 * LN2 - 1) * -flat == pytest.approx(steep, rel=1e-11)


def test_opposite_experts():
    """4 int k (k - 1) over N(0, 1), and 4 int k^2 where the label is the sign."""
    tau = 0.1
    router = Affine(LINE.weight)

    def moment(power):
        def inside(t):
            return stats.norm.pdf(t) / (1 + math.exp(t / tau)) ** power

        return 8 * integrate.quad(inside, 0, 9, points=[0.4, 2], epsrel=1e-12)[0]

    first, second = moment(1), moment(2)
    found = risk.gap(router, signs, nothing, ONE, tau).item()
    assert found == pytest.approx(second - first, rel=1e-8)
    found = risk.gap(router, signs, lambda x: x[:, 0].sign(), ONE, tau).item()
    assert found == pytest.approx(second, rel=1e-8)


def test_mercedes():
    """Three experts at 120 degrees; whole lines for rays would double the limit."""
    x, taus = normals(40_000, 2), [0.1, 0.05, 0.025]
    truths = (-0.6632108242, -0.6781078934, -0.6848132738)
    samples = risk.gap(star(3), steps, tilt, x, taus)
    for column, tau, truth in zip(samples.unbind(1), taus, truths, strict=True):
        assert_mean(column / tau, truth, off=0.03)
        assert refuted(column / tau, 2 * truth)
    limit = -6 * math.sqrt(math.pi / 2) / (2 * math.pi * math.sqrt(3))
    samples = risk.first_order(star(3), steps, tilt, x)
    assert_mean(samples, limit, off=0.03)
    assert refuted(samples, 2 * limit)
    # The second order is there: its absence would be seen.
    difference = risk.gap(star(3), steps, tilt, x, 0.1) / 0.1 - samples
    assert_mean(difference, -0.6632108242 - limit, off=0.5)


@pytest.mark.parametrize(
    ("K", "d", "tau"), [(2, 4, 0.5), (3, 2, 0.3), (5, 3, 0.5), (8, 6, 0.1)]
)
def test_gap_agrees_with_paired_losses(K, d, tau):
    router, experts, label_mean = mixture(K, d, seed=K)
    x = normals(200_000, d, seed=3)
    plain = risk.soft(router, experts, label_mean, x, tau)
    plain = plain - risk.hard(router, experts, label_mean, x)
    samples = risk.gap(router, experts, label_mean, x[:20_000], tau)
    error = math.hypot(plain.std() / len(x) ** 0.5, samples.std() / 20_000**0.5)
    assert abs(plain.mean() - samples.mean()) < 5 * error
    assert 8 * error < abs(plain.mean())


@pytest.mark.parametrize(("K", "d"), [(2, 16), (8, 16), (5, 2)])
def test_relative_variance_is_flat(K, d):
    router, experts, label_mean = mixture(K, d, seed=2)
    x = normals(8_000, d)
    samples = risk.gap(router, experts, label_mean, x, LADDER)
    scaled = samples / torch.tensor(LADDER, dtype=DOUBLE)
    assert scaled.var(0).max() < 1.5 * scaled.var(0)[-1]
    rate = scaled.mean(0)
    spread = scaled.var(0) / rate.square()
    assert spread[2:].max() < 1.5 * spread[2:].min() < 8
    plain = risk.soft(router, experts, label_mean, x, 1e-2)
    plain = plain - risk.hard(router, experts, label_mean, x)
    assert plain.var() > 10 * samples.var(0)[2]
    limit = risk.first_order(router, experts, label_mean, x).mean()
    torch.testing.assert_close(rate[-1], limit, rtol=1e-4, atol=0)
    assert (rate[0] / limit - 1).abs() > 0.05


def test_parallel_and_identical_experts_count_as_they_are():
    """No line leads across their ties: there the samples are those of paired losses."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], dtype=DOUBLE)
    router = Affine(weight, torch.tensor([0.3, 0.3, 0.0], dtype=DOUBLE))
    x = normals(50, 2)
    samples = risk.gap(router, steps, tilt, x, 0.7)
    plain = risk.soft(router, steps, tilt, x, 0.7) - risk.hard(router, steps, tilt, x)
    torch.testing.assert_close(samples, plain)


def test_a_pair_of_near_twins_beside_a_third():
    """The third gate is far steeper along the line of the twins than theirs."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.02], [-1.0, 0.0]], dtype=DOUBLE)
    router, x = Affine(weight), normals(8_000, 2)
    found = risk.gap(router, steps, tilt, x, 0.01)
    fine = risk.gap(router, steps, tilt, x, 0.01, nodes=96)
    torch.testing.assert_close(found, fine, rtol=1e-6, atol=1e-9)
    plain = risk.soft(router, steps, tilt, x, 0.01) - risk.hard(router, steps, tilt, x)
    error = math.hypot(plain.std(), found.std()) / math.sqrt(len(x))
    assert abs(plain.mean() - found.mean()) < 5 * error < 0.2 * abs(plain.mean())


@pytest.mark.parametrize("tau", [5e-3, 1e-3, 2e-4])
def test_thin_layers_agree_with_plain_quadrature(tau, monkeypatch):
    """Few nodes, and outputs interpolated beside a third expert, lose no digit."""
    router, experts, label_mean = mixture(6, 3, seed=4)
    x = normals(3_000, 3, seed=5)
    found = risk.gap(router, experts, label_mean, x, tau)
    direct = [(0.0, *rule[1:]) for rule in layers.GATE_RULES]
    monkeypatch.setattr(layers, "GATE_RULES", direct)
    plain = risk.gap(router, experts, label_mean, x, tau, nodes=36)
    assert (found != plain).any()
    mean = plain.mean().abs().item()
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-6 * mean)
    assert abs(found.mean() - plain.mean()) < 1e-7 * mean


def test_extreme_temperatures():
    router, experts, label_mean = mixture(4, 3)
    x = normals(20, 3)
    taus = torch.tensor([0.0, 5e-324, 1e-300, math.inf], dtype=DOUBLE)
    zero, least, tiny, equal = risk.gap(router, experts, label_mean, x, taus).unbind(1)
    assert (zero == 0).all() and least.isfinite().all()
    limit = risk.first_order(router, experts, label_mean, x)
    met = limit != 0
    torch.testing.assert_close(tiny[met] / 1e-300, limit[met])
    plain = (experts(x).mean(1) - label_mean(x)).square()
    plain = plain - risk.hard(router, experts, label_mean, x)
    error = math.hypot(plain.std(), equal.std()) / math.sqrt(len(x))
    assert abs(equal.mean() - plain.mean()) < 5 * error
    assert risk.gap(router, experts, label_mean, x, 0).abs().sum() == 0


def test_shapes_and_dtypes():
    router, experts, label_mean = mixture(3, 2, dtype=torch.float32)
    x = normals(400, 2, dtype=torch.float32)
    whole = risk.gap(router, experts, label_mean, x, (0.2, 1e-4))
    assert whole.shape == (400, 2) and whole.dtype == DOUBLE
    one = risk.gap(router, experts, label_mean, x[:1], 0.2)
    torch.testing.assert_close(one, whole[:1, 0])
    assert risk.gap(router, experts, label_mean, x[:0], 0.2).shape == (0,)
    assert risk.gap(router, experts, label_mean, x[:0], [0.2, 0.1]).shape == (0, 2)
    assert risk.gap(router, experts, label_mean, x, []).shape == (400, 0)
    for name in ("hard", "first_order"):
        result = getattr(risk, name)(router, experts, label_mean, x[:0])
        assert result.shape == (0,) and result.dtype == DOUBLE
    exact = mixture(3, 2)
    exact = Affine(router.weight.double(), router.bias.double()), *exact[1:]
    slopes = risk.gap(router, steps, tilt, x, 1e-4)
    torch.testing.assert_close(
        slopes, risk.gap(exact[0], steps, tilt, x.double(), 1e-4), rtol=1e-3, atol=1e-9
    )


def test_many_rows_in_several_parts():
    router, experts, label_mean = mixture(8, 6)
    x = normals(80_000, 6, dtype=torch.float32)
    router = Affine(router.weight.float(), router.bias.float())

    def single(function):
        return lambda points: function(points.double()).float()

    whole = risk.gap(router, single(experts), single(label_mean), x, 1e-3)
    rows = [0, 41_234, 79_999]
    few = risk.gap(router, single(experts), single(label_mean), x[rows], 1e-3)
    torch.testing.assert_close(whole[rows], few, rtol=1e-4, atol=1e-8)


def test_one_expert_has_no_gap():
    router = Affine(torch.ones(1, 2, dtype=DOUBLE))
    x = normals(4, 2)
    assert risk.gap(router, lambda x: x[:, :1], tilt, x, [0.1, 1.0]).abs().sum() == 0
    assert risk.first_order(router, lambda x: x[:, :1], tilt, x).tolist() == [0.0] * 4
    assert risk.ambiguity(router, lambda x: x[:, :1], x, 0.3).tolist() == [0.0] * 4


@pytest.mark.parametrize(("K", "tau"), [(2, 0.3), (4, 0.3), (4, 1e-3)])
def test_gradients_reach_experts_and_label(K, tau):
    router, *_ = mixture(K, 3, seed=1)
    x = normals(300, 3)
    start = normals(4, K, seed=9)

    def mean(parameters, functional=risk.gap):
        def experts(x):
            return torch.tanh(x @ parameters[:3]) + parameters[3]

        return functional(router, experts, lambda x: (x @ parameters[:3, 0]).sin(), x)

    def gap(*args):
        return risk.gap(*args, tau).mean() / tau

    def limit(*args):
        return risk.first_order(*args).mean()

    for functional in (gap, limit):
        parameters = start.clone().requires_grad_()
        (slope,) = torch.autograd.grad(mean(parameters, functional), parameters)
        step = 1e-5 * normals(4, K, seed=10)
        with torch.no_grad():
            rise = mean(start + step, functional) - mean(start - step, functional)
        torch.testing.assert_close(
            2 * (slope * step).sum(), rise, rtol=1e-6, atol=1e-11
        )


def test_ambiguity_is_what_the_mixture_gains():
    router, experts, label_mean = mixture(5, 3)
    x, tau = normals(40, 3), 0.4
    f, m = experts(x), label_mean(x)
    gates = gating.softmax(router(x), tau)
    found = risk.ambiguity(router, experts, x, tau)
    pairs = gates[:, :, None] * gates[:, None] * (f[:, :, None] - f[:, None]).square()
    torch.testing.assert_close(found, pairs.sum((1, 2)) / 2)
    single = (gates * (f - m[:, None]).square()).sum(1)
    torch.testing.assert_close(
        single - found, risk.soft(router, experts, label_mean, x, tau)
    )


def test_ambiguity_keeps_tiny_gates():
    x = torch.tensor([[40.4]], dtype=DOUBLE)

    def far(x):
        return x.new_tensor([1e3, 1e3 - 1]).expand(len(x), 2)

    found = risk.ambiguity(LINE, far, x, 1.0).item()
    assert found == pytest.approx(math.exp(-40), rel=1e-12)


def test_hard_and_soft():
    x = normals(5, 1)
    f, m = curved(x), wave(x)
    expected = torch.where(x[:, 0] > 0.4, f[:, 0] - m, f[:, 1] - m).square()
    torch.testing.assert_close(risk.hard(LINE, curved, wave, x), expected)
    gate = torch.sigmoid((x[:, 0] - 0.4) / 0.2)
    expected = (gate * f[:, 0] + (1 - gate) * f[:, 1] - m).square()
    torch.testing.assert_close(risk.soft(LINE, curved, wave, x, 0.2), expected)


@pytest.mark.parametrize(
    ("error", "words", "change"),
    [
        (ValueError, "tau must be", {"tau": -1.0}),
        (ValueError, "tau must be", {"tau": [0.1, math.nan]}),
        (ValueError, "tau must be", {"tau": [[0.1]]}),
        (TypeError, "tau must be", {"tau": "warm"}),
        (ValueError, "nodes must be at least 3", {"nodes": 1}),
        (TypeError, r"routing\.Affine is needed", {"router": torch.nn.Linear(2, 3)}),
        (ValueError, r"experts must map .* expected \(\d+, 3\)", {"experts": tilt}),
        (ValueError, r"experts must map .* got \(\d+, 2\)", {"experts": signs}),
        (ValueError, "experts must map .* got float", {"experts": lambda x: 1.0}),
        (ValueError, "label_mean must map", {"label_mean": steps}),
        (
            ValueError,
            "label_mean is NaN",
            {"label_mean": lambda x: x[:, 0].where(x[:, 0] < 0, math.nan)},
        ),
        (ValueError, r"shape \(n, 2\)", {"x": normals(4, 3)}),
        (TypeError, "float32 or float64", {"x": [[0.0, 1.0]]}),
        (ValueError, "x must be finite", {"x": torch.tensor([[0.0, math.nan]])}),
    ],
)
def test_bad_input_is_refused(error, words, change):
    call = {"router": star(3), "experts": steps, "label_mean": tilt, "tau": 0.1}
    call = call | {"x": normals(20, 2)} | change
    with pytest.raises(error, match=words):
        risk.gap(**call)


def test_first_order_refuses_ties_without_a_limit():
    twins = Affine(torch.tensor([[1.0], [1.0]], dtype=DOUBLE))
    with pytest.raises(ValueError, match="identical"):
        risk.first_order(twins, curved, wave, ONE)
    with pytest.raises(ValueError, match=r"jump must map .*\(r,\)"):
        risk.first_order(LINE, curved, wave, ONE, jump=lambda x, i, j: x)


def test_threads_change_nothing():
    router, experts, label_mean = mixture(4, 3)
    x, before = normals(3_000, 3), torch.get_num_threads()
    torch.set_num_threads(1)
    one = risk.gap(router, experts, label_mean, x, 0.01)
    torch.set_num_threads(2)
    two = risk.gap(router, experts, label_mean, x, 0.01)
    torch.set_num_threads(before)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)

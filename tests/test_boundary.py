"""boundary: every estimator against an exact truth, and a mistake that it notices."""

import itertools
import math

import pytest
import torch
from scipy import integrate, special, stats

from moebook import boundary, laws
from moebook.routing import Affine, gap

INF = math.inf
DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normals(n, d, seed=0, dtype=DOUBLE):
    return torch.randn(n, d, generator=generator(seed), dtype=dtype)


def random_router(K, d, seed=0, bias=0.5, dtype=DOUBLE):
    weight = normals(K, d, seed, dtype) / math.sqrt(d)
    return Affine(weight, bias * normals(1, K, seed + 1, dtype)[0])


def identity(K, dtype=DOUBLE):
    return Affine(torch.eye(K, dtype=dtype))


def star(K, dtype=DOUBLE):
    """K unit vectors at equal angles in the plane."""
    angle = torch.arange(K, dtype=dtype) * (2 * math.pi / K)
    return Affine(torch.stack((angle.cos(), angle.sin()), 1))


def assert_mean(samples, truth, *, bias=0.0, off=0.02):
    """Five standard errors of the sample, and a truth `off` away is refuted."""
    samples = samples.double()
    error = samples.std().item() / math.sqrt(len(samples))
    allowed = 5 * error + bias
    miss = samples.mean().item() - truth
    assert abs(miss) <= allowed, f"{samples.mean():.8g} +- {error:.2g}, not {truth:.8g}"
    assert abs(miss - off * truth) > allowed, "the sample could not notice a mistake"
    assert abs(miss + off * truth) > allowed, "the sample could not notice a mistake"


def refuted(samples, truth):
    error = samples.std().item() / math.sqrt(len(samples))
    return abs(samples.mean().item() - truth) > 5 * error


def iid_mass(w, K, k=1):
    """P(gap_k <= w) of K independent logits: integrate the k-th largest, one by one."""

    def inside(y):
        below = special.ndtr(y) ** (K - k) - special.ndtr(y - w) ** (K - k)
        return stats.norm.pdf(y) * special.ndtr(-y) ** (k - 1) * below

    return K * math.comb(K - 1, k - 1) * integrate.quad(inside, -9, 9, epsabs=1e-13)[0]


def iid_slope(K, k=1):
    def inside(y):
        ranks = special.ndtr(-y) ** (k - 1) * special.ndtr(y) ** (K - k - 1)
        return stats.norm.pdf(y) ** 2 * ranks

    count = K * math.comb(K - 1, k - 1) * (K - k)
    return count * integrate.quad(inside, -9, 9, epsabs=1e-13)[0]


def genz_mass(router, w, k, points=40_000):
    """P(gap_k <= w): one minus the orthants in which a set leads the rest by w."""
    weight, bias = router.weight.numpy(), router.bias.numpy()
    K, leads = len(bias), 0.0
    for active in itertools.combinations(range(K), k):
        pairs = [(i, j) for i in active for j in range(K) if j not in active]
        rows = [weight[j] - weight[i] for i, j in pairs]
        level = [bias[i] - bias[j] - w for i, j in pairs]
        cov = [[float(a @ b) for b in rows] for a in rows]
        leads += stats.multivariate_normal(
            cov=cov, allow_singular=True, maxpts=points, abseps=1e-7, seed=1
        ).cdf(level)
    return 1 - leads


def planar_mass(router, w, k, law):
    """Routers through the origin of the plane: the radius integrates in closed form."""
    angle = (torch.arange(200_000, dtype=DOUBLE) + 0.5) * (2 * math.pi / 200_000)
    ratio = (w / gap(router(torch.stack((angle.cos(), angle.sin()), 1)), k)) ** 2
    inside = -torch.expm1(-ratio / 2) if law == "gaussian" else ratio.clamp_max(1)
    return inside.mean().item()


# --- mass ---------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["line", "stein"])
@pytest.mark.parametrize(
    ("K", "k", "w"),
    [(2, 1, 0.1), (3, 1, 0.5), (3, 2, 0.1), (8, 1, 0.1), (8, 2, 0.01), (8, 3, 0.3)]
    + [(8, 7, 0.1), (64, 1, 0.01), (64, 1, 1e-6), (64, 2, 0.1)],
)
def test_mass_of_iid_logits(K, k, w, by):
    x = normals(30_000, K, seed=K + k)
    samples = boundary.mass(identity(K), x, w, k, by=by)
    truth = iid_mass(w, K, k) if w > 1e-4 else w * iid_slope(K, k)
    if K == 2 and by == "line":  # nothing is left to chance
        assert torch.allclose(samples, torch.full_like(samples, truth), rtol=1e-12)
    else:
        assert_mean(samples, truth, bias=1e-10, off=0.1 if by == "line" else 0.04)


@pytest.mark.parametrize(("K", "k", "d"), [(3, 1, 4), (3, 2, 5), (8, 1, 10)])
def test_mass_agrees_with_genz(K, k, d):
    router = random_router(K, d, seed=K)
    truth = genz_mass(router, 0.2, k)
    x = normals(60_000, d, seed=5)
    bias = 1e-9 if K == 3 else 1e-3 * truth  # the integration error of scipy at K = 8
    assert_mean(boundary.mass(router, x, 0.2, k), truth, bias=bias, off=0.1)
    stein = boundary.mass(router, x, 0.2, k, by="stein")
    assert_mean(stein, truth, bias=bias, off=0.1)


@pytest.mark.parametrize("law", ["gaussian", "ball"])
@pytest.mark.parametrize(("K", "k"), [(3, 1), (5, 1), (5, 2), (8, 3), (8, 5)])
def test_mass_in_the_plane(K, k, law):
    router = Affine(normals(K, 2, seed=K))
    draw = {"gaussian": laws.gaussian, "ball": laws.ball}[law]
    x = draw(60_000, 2, generator(k))
    for w in (0.05, 0.3):
        truth = planar_mass(router, w, k, law)
        assert_mean(boundary.mass(router, x, w, k, law), truth, bias=2e-6, off=0.1)


def test_mass_of_mercedes():
    x = normals(50_000, 2, seed=1)
    values = boundary.mass(star(3), x, torch.tensor([0.1, 0.5]))
    assert_mean(values[:, 0], 0.068142429636621, off=0.03)
    assert_mean(values[:, 1], 0.31830655834858)
    union = 3 * math.erf(0.1 / math.sqrt(6))  # pairs counted with the third on top
    assert refuted(values[:, 0], union)


@pytest.mark.parametrize("b", [0.0, 0.3])
def test_mass_in_the_ball_is_a_polynomial(b):
    router = Affine(
        torch.tensor([[1.0, 0, 0], [0, 0, 0]], dtype=DOUBLE),
        -b * torch.eye(2)[0].double(),
    )
    x = laws.ball(40_000, 3, generator(3))
    low, high = b - 0.2, b + 0.2
    truth = 0.75 * (high - low - (high**3 - low**3) / 3)
    values = boundary.mass(router, x, 0.2, law="ball")
    assert torch.allclose(values.mean(), torch.tensor(truth).double(), rtol=0.02)
    assert_mean(values, truth, off=0.02)


def scan(router, x, k, held=True, steps=24_001):
    """Along each row's line on a grid: the share of gap_k <= w by plain counting."""
    weight, logits = router.weight, router(x)
    order = logits.argsort(1, descending=True)
    i, j = order[:, k - 1], order[:, k]
    normal = torch.nn.functional.normalize(weight[i] - weight[j], dim=1)
    place = (x * normal).sum(1)
    t = torch.linspace(-9, 9, steps, dtype=DOUBLE)
    rows = []
    for m in range(len(x)):
        line = router(x[m] + (t - place[m])[:, None] * normal[m])
        ranks = line.argsort(1, descending=True)
        same = (
            ranks[:, k - 1 : k + 1].sort(1).values
            == order[m, k - 1 : k + 1].sort().values
        )
        keep = same.all(1)
        if held:
            above = ranks[:, : k - 1].sort(1).values == order[m, : k - 1].sort().values
            keep &= above.all(1)
        rows.append(keep * torch.exp(-(t**2) / 2))
        rows[-1] = (rows[-1], gap(line, k))
    return rows


@pytest.mark.parametrize("k", [1, 2, 3])
def test_mass_is_the_share_of_the_line(k):
    router, x, w = random_router(6, 3, seed=4), normals(60, 3, seed=k), 0.2
    ours = boundary.mass(router, x, w, k)
    share = [(d * (g <= w)).sum() / d.sum() for d, g in scan(router, x, k)]
    assert torch.allclose(ours, torch.stack(share), atol=6e-3)


def test_the_experts_above_are_held():
    """The same pair at ranks 2 and 3 below another expert is another interval."""
    weight = torch.tensor([[0.5], [-0.5], [2.0], [-4.0]], dtype=DOUBLE)
    router = Affine(weight, torch.tensor([0.6, 0.6, 0.0, 0.0], dtype=DOUBLE))
    x = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
    assert (
        router(x).topk(3, dim=1).indices == torch.tensor([[2, 0, 1], [3, 1, 0]])
    ).all()
    ours = boundary.mass(router, x, 0.7, 2)
    held, loose = (scan(router, x, 2, flag) for flag in (True, False))
    held, loose = (
        [(d * (g <= 0.7)).sum() / d.sum() for d, g in t] for t in (held, loose)
    )
    assert torch.allclose(ours, torch.stack(held), atol=2e-3)
    assert (ours - torch.stack(loose)).abs().min() > 0.05


def test_forgetting_the_interval_is_noticed():
    router, x, w = identity(3), normals(400, 3, seed=2), 0.5
    total = math.sqrt(2 * math.pi) * 24_000 / 18
    whole = [(d * (g <= w)).sum() / total for d, g in scan(router, x, 1)]
    assert refuted(torch.stack(whole), iid_mass(w, 3))
    assert not refuted(boundary.mass(router, x, w), iid_mass(w, 3))


@pytest.mark.parametrize("by", ["line", "stein"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_ladder_of_widths_is_one_pass(by, k):
    router, x = random_router(7, 9), normals(500, 9)
    widths = torch.tensor([0.0, 1e-300, 1e-3, 0.1, 2.0, INF], dtype=DOUBLE)
    ladder = boundary.mass(router, x, widths, k, by=by)
    assert ladder.shape == (500, 6) and ladder.dtype == DOUBLE
    for m, w in enumerate(widths.tolist()):
        assert torch.equal(ladder[:, m], boundary.mass(router, x, w, k, by=by))
    if by == "line":
        assert (ladder.diff(dim=1) >= 0).all() and (ladder <= 1).all()
        assert (ladder[:, 0] == 0).all() and (ladder[:, -1] == 1).all()


def test_tiny_widths_lose_no_digits():
    router = Affine(
        torch.tensor([[3.0, 0], [0, 0]], dtype=DOUBLE),
        torch.tensor([1.0, 0], dtype=DOUBLE),
    )
    x = normals(3, 2)
    for w in (1e-300, 1e-12, 1e-5):
        truth = 2 * w / 3 * stats.norm.pdf(1 / 3)
        assert boundary.mass(router, x, w)[0].item() == pytest.approx(truth, rel=1e-9)
    # Where one formula for a mass hands over to the other.
    for w in torch.logspace(-4, 1, 60, dtype=DOUBLE).tolist():
        ends = stats.norm.cdf([(-1 - w) / 3, (w - 1) / 3])
        truth = ends[1] - ends[0]
        assert boundary.mass(router, x, w)[0].item() == pytest.approx(truth, rel=1e-11)


@pytest.mark.parametrize("shift", [6.0, 30.0])
def test_far_tails_keep_their_digits(shift):
    weight = torch.tensor([[1.0, 0], [0, 0]], dtype=DOUBLE)
    for sign in (1, -1):
        router = Affine(weight, torch.tensor([sign * shift, 0], dtype=DOUBLE))
        for w in (0.01, 1.0):
            log = special.log_ndtr([w - shift, -w - shift])
            truth = math.exp(log[0]) * -math.expm1(log[1] - log[0])
            values = boundary.mass(router, normals(5, 2), w)
            assert values[0].item() == pytest.approx(truth, rel=1e-11)


@pytest.mark.parametrize("shift", [40.0, 1e4])
def test_hopeless_experts_make_no_nan(shift):
    router = random_router(5, 3)
    router = Affine(router.weight, router.bias + shift * torch.eye(5)[0].double())
    x = torch.cat((normals(200, 3), 60 * normals(50, 3)))  # and inputs no law draws
    for k in (1, 2):
        values = boundary.mass(router, x, torch.tensor([1e-3, 1.0, INF]), k)
        assert ((values >= 0) & (values <= 1)).all()
        assert boundary.slope(router, x, k).isfinite().all()


def test_identical_experts_are_a_mass_at_zero():
    weight = torch.tensor([[2.0, 0.1], [2.0, 0.1], [-1, 0.7], [-2, 1.4]], dtype=DOUBLE)
    router, x = Affine(weight), normals(4000, 2)
    twins = router(x).argmax(1) <= 1
    values = boundary.mass(router, x, 0.0)
    assert torch.equal(values, twins.double())
    for dtype in (DOUBLE, torch.float32):
        values = boundary.mass(router, x.to(dtype), 0.1)
        assert_mean(values, planar_mass(router, 0.1, 1, "gaussian"), bias=1e-5, off=0.1)
    with pytest.raises(ValueError, match=r"\[0, 1\] are identical"):
        boundary.slope(router, x)


def test_parallel_experts_keep_their_distance():
    weight = torch.tensor([[1.0, 0], [1.0, 0], [-1, 0]], dtype=DOUBLE)
    router, x = (
        Affine(weight, torch.tensor([0.3, 0.0, 0.0], dtype=DOUBLE)),
        normals(9000, 2),
    )
    values = boundary.mass(router, x, torch.tensor([0.29, 0.31, 5.0]))
    hits = gap(router(x), 1)[:, None] <= torch.tensor([0.29, 0.31, 5.0])
    for m in range(3):
        error = (hits[:, m].double() - values[:, m]).std() / math.sqrt(9000)
        assert abs(hits[:, m].double().mean() - values[:, m].mean()) <= 5 * error
    truth = stats.norm.pdf(0.15)  # 2 / 2 of it: the lower twin is never first
    assert boundary.slope(router, x).mean() == pytest.approx(truth, rel=1e-12)
    assert torch.equal(
        boundary.slope(Affine(router.weight[:2], router.bias[:2]), x),
        torch.zeros(len(x), dtype=DOUBLE),
    )


def test_a_common_offset_costs_no_float32_digits():
    router = random_router(8, 16, dtype=torch.float32)
    shifted = Affine(router.weight + 300.0, router.bias + 1e3)
    moved = Affine(shifted.weight - 300.0, shifted.bias - 1e3)  # the same roundings
    x = normals(2000, 16, dtype=torch.float32)
    one, two = (boundary.mass(r, x, 0.1) for r in (shifted, moved))
    assert torch.allclose(one, two, atol=1e-4)
    assert (shifted(x) - shifted.bias - (moved(x) - moved.bias)).diff(
        dim=1
    ).abs().max() > 1e-4


@pytest.mark.parametrize(("twin", "unit"), [(1e-5, 1.0), (1.0, 1e20), (1.0, 1e-20)])
def test_hard_routers_leave_float32(twin, unit):
    weight = unit * random_router(6, 8).weight
    weight[1] = weight[0] + twin * (weight[1] - weight[0])
    router, x = Affine(weight), normals(2000, 8, dtype=torch.float32)
    for call in (
        lambda x: boundary.mass(router, x, 0.1 * unit),
        lambda x: boundary.slope(router, x),
    ):
        assert torch.equal(call(x), call(x.double()))


@pytest.mark.parametrize("k", [1, 2])
def test_float32_inputs_give_the_float64_answer(k):
    router, x = random_router(8, 16), normals(20_000, 16)
    for w in (1e-12, 1e-3, 0.3):
        double, single = (boundary.mass(router, t, w, k) for t in (x, x.float()))
        assert single.dtype == DOUBLE
        assert (single - double).mean().abs() <= 1e-4 * double.mean()
    double, single = (boundary.slope(router, t, k) for t in (x, x.float()))
    assert (single - double).mean().abs() <= 1e-4 * double.mean()


# --- slope --------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["facet", "stein"])
@pytest.mark.parametrize(
    ("K", "k"), [(2, 1), (3, 1), (3, 2), (8, 1), (8, 2), (8, 3), (8, 6), (64, 1)]
)
def test_slope_of_iid_logits(K, k, by):
    x = normals(20_000, K, seed=K + k, dtype=torch.float32)
    samples, truth = boundary.slope(identity(K), x, k, by=by), iid_slope(K, k)
    if K == 2 and by == "facet":
        assert torch.allclose(samples, torch.full_like(samples, truth), rtol=1e-12)
    else:
        assert_mean(samples, truth, off=0.05)
        assert refuted(samples / 2, truth)  # one side of the facet


def test_slope_is_the_expected_sum_of_winners():
    """Independent logits: BM'(0) = E[sum of the k largest], g_K is a mean maximum."""
    for K, k in [(3, 1), (8, 1), (8, 3), (64, 2)]:
        largest = normals(40_000, K, seed=K).topk(k, dim=1).values.sum(1)
        assert_mean(largest, iid_slope(K, k), off=0.04)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_slope_by_facets_and_by_parts_agree(k):
    router, x = random_router(6, 9, seed=3), normals(60_000, 9, seed=k)
    facet, stein = (boundary.slope(router, x, k, by=by) for by in ("facet", "stein"))
    assert_mean(facet - stein + facet.mean(), facet.mean().item(), off=0.03)
    narrow = boundary.mass(router, x, 1e-5, k) / 1e-5
    assert not refuted(narrow - facet, 0.0)
    assert refuted(narrow - facet / 2, 0.0)


def test_slope_of_mercedes_in_both_laws():
    values = boundary.slope(star(3), normals(20_000, 2))
    assert_mean(values, math.sqrt(3 / (2 * math.pi)))
    values = boundary.slope(star(3), laws.ball(20_000, 2, generator()), law="ball")
    assert_mean(values, 2 * math.sqrt(3) / math.pi)


@pytest.mark.parametrize(("d", "b"), [(2, 0.3), (3, 0.0), (7, 0.4)])
def test_slope_in_the_ball(d, b):
    weight = torch.zeros(2, d, dtype=DOUBLE)
    weight[0, 0] = 1
    router = Affine(weight, torch.tensor([-b, 0], dtype=DOUBLE))
    x = laws.ball(40_000, d, generator(d))
    density = math.gamma(d / 2 + 1) / math.sqrt(math.pi) / math.gamma((d + 1) / 2)
    truth = 2 * density * (1 - b * b) ** ((d - 1) / 2)
    assert_mean(boundary.slope(router, x, law="ball"), truth, off=0.03)


def facets_by_scan(router, x, k):
    """The facet terms of one x by walking every line on a grid."""
    t = torch.linspace(-9, 9, 60_001, dtype=DOUBLE)
    active = set(router(x[None]).topk(k, dim=1).indices[0].tolist())
    total = 0.0
    for i in active:
        for j in set(range(len(router.bias))) - active:
            step = router.weight[i] - router.weight[j]
            normal = step / step.norm()
            place = t - x @ normal
            sets = router(x + place[:, None] * normal).topk(k, dim=1).indices
            code = (2**sets).sum(1)
            mates = sum(2**m for m in active - {i})
            above, below = code == mates + 2**i, code == mates + 2**j
            meet = (above[1:] & below[:-1]).nonzero()
            if len(meet):  # the two stretches touch: the tie is on the facet
                density = torch.exp(-(t**2) / 2)
                chord = (density * (above | below)).sum() * (t[1] - t[0])
                total += 2 * density[meet[0, 0]].item() / (step.norm() * chord).item()
    return total


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_slope_sums_the_facets_of_the_cell(k):
    router, x = random_router(6, 3, seed=7), normals(25, 3, seed=k)
    ours = boundary.slope(router, x, k)
    scanned = torch.tensor([facets_by_scan(router, row, k) for row in x]).double()
    assert torch.allclose(ours, scanned, rtol=5e-3)


def test_slope_has_a_variance_and_the_narrow_line_has_not():
    router = random_router(8, 16, seed=11)
    x = normals(200_000, 16, seed=8, dtype=torch.float32)
    for k in (1, 2):
        for by in ("facet", "stein"):
            values = boundary.slope(router, x, k, by=by)
            assert values.max() / values.mean() < 30
            assert values.var() / values.mean() ** 2 < 1
        line = boundary.mass(router, x, 1e-6, k) / 1e-6
        assert line.max() / line.mean() > 60
        assert line.var() > 3 * values.var()


def test_slope_refuses_ties_it_cannot_sum():
    x = normals(10, 2)
    with pytest.raises(ValueError, match="infinite variance"):
        boundary.slope(star(4), x)
    shifted = Affine(
        star(5).weight, star(5).weight @ torch.tensor([0.3, -1.0], dtype=DOUBLE)
    )
    with pytest.raises(ValueError, match="infinite variance"):
        boundary.slope(shifted, x, 2)
    line = torch.tensor([[1.0, 2], [0, 0], [-1, -2]], dtype=DOUBLE)
    with pytest.raises(ValueError, match=r"\[0, 1, 2\] tie on one hyperplane"):
        boundary.slope(Affine(line), x)
    assert (
        boundary.slope(Affine(line, torch.tensor([0, 1.0, 0], dtype=DOUBLE)), x).min()
        > 0
    )
    moved = Affine(star(5).weight, torch.arange(5).double())
    assert boundary.slope(moved, x).isfinite().all()


def test_refused_slopes_come_from_interfaces():
    router, k, x = star(5), 2, normals(4000, 2)
    total = 0.0
    for i, j in itertools.combinations(range(5), 2):

        def ranked(y, i=i, j=j):
            z = router(y)
            above = (z > z[:, [i]] + 1e-9).sum(1) - (z[:, j] > z[:, i] + 1e-9).long()
            return (above == k - 1).double()

        total = total + 2 * boundary.interface(
            lambda y, i=i, j=j: router(y)[:, i] - router(y)[:, j], x, ranked
        )
    # Each ray from the origin counts 2 / |w_i - w_j| times half of phi(0).
    truth = sum(
        stats.norm.pdf(0) / (router.weight[i] - router.weight[j]).norm().item()
        for i, j in rays(router, k)
    )
    assert_mean(total, truth, off=0.03)


def rays(router, k):
    """Pairs that trade ranks k and k+1 once around the circle, ray by ray."""
    angle = torch.linspace(0.1, 0.1 + 2 * math.pi, 100_001, dtype=DOUBLE)
    order = router(torch.stack((angle.cos(), angle.sin()), 1)).argsort(
        1, descending=True
    )
    sets = order[:, :k].sort(1).values
    change = (sets[1:] != sets[:-1]).any(1).nonzero()[:, 0]
    return [tuple(order[m, k - 1 : k + 1].tolist()) for m in change]


# --- both ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
def test_renaming_experts_changes_nothing(k):
    router, x = random_router(7, 8), normals(3000, 8)
    order = torch.randperm(7, generator=generator(1))
    renamed = Affine(router.weight[order], router.bias[order])
    for call in (
        lambda r: boundary.mass(r, x, 0.1, k),
        lambda r: boundary.mass(r, x, 0.1, k, by="stein"),
        lambda r: boundary.slope(r, x, k),
        lambda r: boundary.slope(r, x, k, by="stein"),
    ):
        assert torch.allclose(call(router), call(renamed), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("K", "k"), [(1, 1), (4, 4)])
def test_all_experts_active_means_no_boundary(K, k):
    router, x = random_router(K, 3), normals(5, 3)
    values = boundary.mass(router, x, torch.tensor([0.0, 9.0, INF]), k)
    assert torch.equal(values, torch.tensor([0.0, 0.0, 1.0], dtype=DOUBLE).expand(5, 3))
    assert torch.equal(boundary.slope(router, x, k), torch.zeros(5).double())
    hits = boundary.brute_force(router, 10, [9.0, INF], generator(), k)
    assert hits.tolist() == [0, 10]


def test_one_sample_and_no_sample():
    router = random_router(5, 6)
    for n in (0, 1):
        x = normals(n, 6)
        assert boundary.mass(router, x, 0.1).shape == (n,)
        assert boundary.mass(router, x, [0.1, 0.2], 2, by="stein").shape == (n, 2)
        assert boundary.slope(router, x).shape == (n,)
        assert boundary.interface(lambda y: y[:, 0], x).shape == (n,)
    long = normals(50_000, 6)
    last = boundary.mass(router, long, 0.1)[-1:]  # in whatever chunk it falls
    assert torch.allclose(last, boundary.mass(router, long[-1:], 0.1), rtol=1e-10)


def test_inputs_are_left_alone():
    router, x = random_router(5, 6), normals(50, 6)
    copy = x.clone()
    for call in (boundary.slope, lambda r, x: boundary.mass(r, x, 0.1, 2)):
        call(router, x)
        assert torch.equal(x, copy)
    assert not boundary.mass(router, x.requires_grad_(), 0.1).requires_grad


def test_parts_need_independent_weights():
    with pytest.raises(ValueError, match="8 weights in d = 3 span 3 directions"):
        boundary.mass(random_router(8, 3), normals(4, 3), 0.1, by="stein")
    x = laws.ball(4, 8, generator())
    with pytest.raises(ValueError, match="law='ball' use by='line'"):
        boundary.mass(random_router(8, 8), x, 0.1, law="ball", by="stein")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"w": -0.1}, ValueError, "w must be a width >= 0.*-0.1"),
        ({"w": math.nan}, ValueError, "w must be"),
        ({"w": [[0.1]]}, ValueError, "row of them"),
        ({"k": 0}, ValueError, "from 1 to K = 5, got 0"),
        ({"k": 6}, ValueError, "from 1 to K = 5, got 6"),
        ({"k": 1.5}, TypeError, "must be an int"),
        ({"x": normals(4, 2)}, ValueError, r"shape \(n, 3\).*\(4, 2\)"),
        ({"x": normals(4, 3)[0]}, ValueError, r"\(3,\)"),
        ({"x": torch.tensor([[0.0, math.nan, 1.0]])}, ValueError, "finite, got 1 NaN"),
        ({"x": torch.ones(2, 3, dtype=torch.int64)}, TypeError, "float32 or float64"),
        ({"law": "cube"}, ValueError, "'gaussian' or 'ball'.*law='cube'"),
        ({"by": "hope"}, ValueError, "'line' or 'stein'.*by='hope'"),
        ({"law": "ball", "x": 9 * torch.ones(1, 3)}, ValueError, "norm 15.59"),
        ({"router": lambda x: x}, TypeError, "routing.Affine.*boundary.interface"),
    ],
)
def test_errors_teach(arguments, error, words):
    call = {"router": random_router(5, 3), "x": normals(4, 3), "w": 0.1} | arguments
    with pytest.raises(error, match=words):
        boundary.mass(**call)


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
@pytest.mark.parametrize("k", [1, 2])
def test_no_sampler_takes_what_is_not_finite(value, k):
    router, x = random_router(5, 6), normals(30, 6)
    x[17, 2] = value
    for call in (
        lambda: boundary.mass(router, x, 0.1, k),
        lambda: boundary.mass(router, x, 0.1, k, by="stein"),
        lambda: boundary.slope(router, x, k),
        lambda: boundary.interface(ellipse, x),
    ):
        with pytest.raises(ValueError, match="x must be finite, got 1 NaN or inf"):
            call()


# --- interface ----------------------------------------------------------------------


def directions(n, d, seed=9):
    return torch.nn.functional.normalize(normals(n, d, seed), dim=1)


def ellipse(y):
    return y[:, 0] ** 2 + 0.25 * y[:, 1] ** 2 - 1


def steep(y):
    return (1 + y[:, 0] ** 2) * y[:, 1]


def parabola(y):
    return y[:, 1] - y[:, 0] ** 2 / 2


INTERFACES = {
    "ellipse": (ellipse, 2, 0.32823329741703),
    "steep": (steep, 2, 0.26157829186512),
    "parabola": (parabola, 2, 0.33453746999371),
    "circle": (lambda y: (y**2).sum(1) - 2.25, 2, math.exp(-1.125) / 2),
    "sphere": (lambda y: (y**2).sum(1) - 2.25, 5, stats.chi2(5).pdf(2.25)),
    "hyperbola": (lambda y: y[:, 0] * y[:, 1] - 0.5, 2, special.k0(0.5) / math.pi),
    "affine": (
        lambda y: y @ y.new_tensor([1.0, 2, 2]) - 1,
        3,
        stats.norm.pdf(1 / 3) / 3,
    ),
    "two points": (lambda y: y[:, 0] ** 2 - 1, 1, stats.norm.pdf(1)),
}


@pytest.mark.parametrize("name", INTERFACES)
def test_interface_against_closed_forms(name):
    score, d, truth = INTERFACES[name]
    x, e = normals(8000, d, seed=4), directions(8000, d)
    axes, lines = (
        boundary.interface(score, x),
        boundary.interface(score, x, directions=e),
    )
    for values in (axes, lines):
        if values.std() > 1e-12:
            assert_mean(values, truth, off=0.15)
        assert values.mean().item() == pytest.approx(truth, rel=0.05)
    if d > 1:
        assert lines.max() / lines.mean() < 6
        assert axes.var() < lines.var()
        assert refuted(lines / d, truth)  # a cosine squared is 1/d on average


def test_interface_in_float32():
    values = boundary.interface(ellipse, normals(20_000, 2, dtype=torch.float32))
    assert_mean(values, INTERFACES["ellipse"][2])


def test_flat_interfaces_across_an_axis_are_exact():
    values = boundary.interface(lambda y: 3 * y[:, 1] - 1.5, normals(50, 4))
    assert torch.allclose(values, torch.full_like(values, stats.norm.pdf(0.5) / 3))


def test_plain_weights_have_no_variance():
    x, e = normals(60_000, 2, seed=2), directions(60_000, 2)
    cosine = boundary.interface(ellipse, x, directions=e)
    plain = boundary.interface(ellipse, x, directions=e, weighting="plain")
    assert plain.max() / plain.mean() > 40 > 3 > cosine.max() / cosine.mean()
    assert plain.var() > 4 * cosine.var()
    with pytest.raises(ValueError, match=r"plain.*may miss a flat interface"):
        boundary.interface(ellipse, x, weighting="plain")


def test_interface_carries_its_integrand():
    x = normals(20_000, 2, seed=3)
    # On a circle the mean of x1^2 is R^2 / 2; on {x2 = 0}, |grad s| undoes the weight.
    circle, _, q = INTERFACES["circle"]
    values = boundary.interface(circle, x, lambda y: y[:, 0] ** 2)
    assert_mean(values, q * 2.25 / 2, off=0.05)
    area = boundary.interface(steep, x, lambda y: 1 + y[:, 0] ** 2)
    assert area.mean().item() == pytest.approx(stats.norm.pdf(0), rel=1e-12)
    assert refuted(
        boundary.interface(steep, x), stats.norm.pdf(0)
    )  # area is not enough


def test_missed_pairs_shrink_with_the_cells():
    def wave(y):  # zeros half a unit apart: a coarse cell holds several
        return (2 * math.pi * y[:, 0]).sin() + 0.9 * y[:, 1].cos()

    x = normals(3000, 2, seed=6)
    fine = boundary.interface(wave, x, cells=800).mean()
    usual, coarse = (boundary.interface(wave, x, cells=c).mean() for c in (192, 12))
    assert abs(usual - fine) < 1e-3 * fine
    assert abs(coarse - fine) > 1e-1 * fine


def test_the_unit_of_the_score_only_scales():
    x, e = normals(50, 2), directions(50, 2)
    for kind in ({}, {"directions": e}, {"directions": e, "weighting": "plain"}):
        one = boundary.interface(ellipse, x, **kind)
        for unit in (1e-30, 1e30):
            other = boundary.interface(lambda y, u=unit: u * ellipse(y), x, **kind)
            assert torch.allclose(unit * other, one, rtol=1e-9)


def test_twice_the_interface_is_the_slope():
    router, x = random_router(2, 3), normals(4000, 3)
    values = boundary.interface(lambda y: router(y)[:, 0] - router(y)[:, 1], x)
    assert_mean(2 * values, boundary.slope(router, x)[0].item(), off=0.05)


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (lambda y: y, r"score must map \(n, d\) to \(n,\).*returned"),
        (lambda y: 1.0, "returned float"),
        (lambda y: y[:, 0].log(), "score is NaN at"),
        (lambda y: y[:, 0] ** 3, r"grad score\| = .* where score = 0"),
    ],
)
def test_scores_that_cannot_be_used(score, words):
    with pytest.raises(ValueError, match=words):
        boundary.interface(score, normals(40, 2))


def test_directions_are_unit_vectors():
    x = normals(40, 2)
    with pytest.raises(ValueError, match="unit vectors, got norms"):
        boundary.interface(ellipse, x, directions=2 * directions(40, 2))
    with pytest.raises(ValueError, match="shape and dtype of x"):
        boundary.interface(ellipse, x, directions=directions(39, 2))


# --- brute force --------------------------------------------------------------------


@pytest.mark.parametrize(("K", "d", "k"), [(8, 8, 1), (8, 8, 3), (8, 8, 6), (5, 40, 2)])
def test_brute_force_counts(K, d, k):
    weight = torch.linalg.qr(normals(d, K))[0].T.contiguous()
    n, widths = 50_001, [0.05, 0.5]
    hits = boundary.brute_force(Affine(weight), n, widths, generator(k), k)
    assert hits.dtype == torch.int64 and hits.shape == (2,)
    for count, w in zip(hits.tolist(), widths, strict=True):
        p = iid_mass(w, K, k)
        assert abs(count - n * p) <= 5 * math.sqrt(n * p * (1 - p))
        assert abs(count - n * p / 2) > 5 * math.sqrt(n * p)


def test_brute_force_agrees_with_the_line():
    router, n = random_router(6, 4, bias=1.0), 100_000
    hits = boundary.brute_force(router, n, 0.2, generator(1), 2)
    again = boundary.brute_force(router, n, 0.2, generator(1), 2)
    assert hits.shape == () and hits == again
    values = boundary.mass(router, normals(n, 4), 0.2, 2)
    p = values.mean().item()
    error = math.sqrt((p * (1 - p) + values.var().item()) / n)
    assert abs(hits.item() / n - p) <= 5 * error
    assert boundary.brute_force(router, 0, 0.2, generator()).item() == 0

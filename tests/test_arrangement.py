"""arrangement: counts against enumeration, volumes and masses against exact laws."""

import itertools
import math

import pytest
import torch
from scipy import integrate, special, stats
from truths import (
    DOUBLE,
    assert_mean,
    generator,
    identity,
    iid_mass,
    normals,
    random_router,
    refuted,
    star,
)

from moebook import arrangement, laws, routing
from moebook.routing import Affine

KINDS = ("one_sided", "spread", "cube", "tube")


def strata(E, k, n):
    """Every way to put experts above, in or below a tie of n + 1 that moves the top."""
    found = 0
    for places in itertools.product("<=>", repeat=E):
        above, tied, below = ([i for i in range(E) if places[i] == p] for p in ">=<")
        one, other = above + tied + below, above + tied[::-1] + below
        found += len(tied) == n + 1 and set(one[:k]) != set(other[:k])
    return found


@pytest.mark.parametrize("E", range(1, 8))
def test_strata_by_brute_force(E):
    for k, n in itertools.product(range(1, E + 1), range(1, E + 1)):
        assert arrangement.strata_count(E, k, n) == strata(E, k, n)


def test_strata_counts():
    assert [arrangement.strata_count(4, 2, n) for n in (1, 2, 3, 4)] == [12, 8, 1, 0]
    eight = [arrangement.strata_count(8, 2, n) for n in range(1, 8)]
    assert eight == [168, 336, 350, 224, 84, 16, 1]
    assert arrangement.strata_count(3, 1, 1) == 3  # three rays in the plane
    assert arrangement.strata_count(5, 5, 1) == 0
    # The experts above the tie belong to the stratum; ties alone would be too few.
    assert math.comb(4, 2) != arrangement.strata_count(4, 2, 1)


@pytest.mark.parametrize(("n", "count"), [(1, 12), (2, 8)])
def test_strata_are_there(n, count):
    router, found = random_router(4, 3, seed=5), set()
    for tied in itertools.combinations(range(4), n + 1):
        rest = [i for i in range(4) if i not in tied]
        rows = router.weight[list(tied[1:])] - router.weight[tied[0]]
        step = router.bias[list(tied[1:])] - router.bias[tied[0]]
        x = 30 * normals(20_000, 3, seed=n)
        pinv = torch.linalg.pinv(rows)
        scores = router(x - (x @ rows.T + step) @ pinv.T)
        above = scores[:, rest] > scores[:, tied[:1]]
        for row in set(map(tuple, above.tolist())):
            if sum(row) < 2 < sum(row) + n + 1:
                found.add((tied, row))
    assert len(found) == arrangement.strata_count(4, 2, n) == count


@pytest.mark.parametrize(
    ("E", "d", "affine", "central"),
    [(1, 1, 1, 1), (2, 1, 2, 2), (3, 1, 4, 2), (4, 1, 7, 2), (4, 2, 18, 12)]
    + [(4, 3, 24, 24), (4, 5, 24, 24), (5, 2, 46, 20), (5, 3, 96, 72)],
)
def test_orderings(E, d, affine, central):
    assert arrangement.ordering_count(E, d) == affine
    assert arrangement.ordering_count(E, d, central=True) == central
    router = random_router(E, d, seed=3)
    listed = arrangement.orderings(router.weight, router.bias)
    assert len(listed) == affine
    assert len(arrangement.orderings(router.weight)) == central
    # Sampling finds only orders of the list, and for some arrangements not all.
    seen = router(5 * normals(20_000, d)).argsort(1, descending=True)
    assert set(map(tuple, seen.tolist())) <= set(map(tuple, listed.tolist()))
    assert listed.tolist() == sorted(map(list, set(map(tuple, listed.tolist()))))


def test_orderings_without_interior_do_not_count():
    weight = torch.tensor([[1.0], [0.0], [-1.0]])  # all three tie at one point
    assert arrangement.orderings(weight).tolist() == [[0, 1, 2], [2, 1, 0]]
    assert arrangement.cells(weight, None, 1).tolist() == [[0], [2]]
    twins = torch.ones(2, 1)
    assert len(arrangement.orderings(twins)) == 0
    # Three parallel ties of a hexagon cross at once: no two neighbours of one swap.
    assert len(arrangement.orderings(star(6).weight)) == 12


@pytest.mark.parametrize("E", [2, 4, 6])
def test_cells_on_the_line(E):
    router = random_router(E, 1, seed=E)
    counts = [
        len(arrangement.cells(router.weight, router.bias, k + 1)) for k in range(E)
    ]
    assert sum(count - 1 for count in counts) == math.comb(E, 2)


def test_cells_of_affinely_independent_weights():
    router = random_router(5, 4, seed=2)
    for k in range(1, 6):
        listed = arrangement.cells(router.weight, router.bias, k).tolist()
        assert listed == [list(c) for c in itertools.combinations(range(5), k)]
    assert all(len(arrangement.cells(star(7).weight, None, k)) == 7 for k in (1, 3, 6))


def planar(router):
    E = len(router.bias)
    cells = [len(arrangement.cells(router.weight, router.bias, k)) for k in range(1, E)]
    ends = [len(arrangement.cells(router.weight, None, k)) for k in range(1, E)]
    formula = [arrangement.topk_cell_count_planar(E, k, ends) for k in range(1, E)]
    return cells, formula


def test_cells_in_the_plane():
    points = normals(6, 2, seed=4)  # nearest points: every expert is first at its own
    cells, formula = planar(Affine(points, -points.square().sum(1) / 2))
    assert cells == formula and cells[0] == 6
    bias = -points.square().sum(1) / 2
    bias[points.norm(dim=1).argmin()] -= 5  # and one that is first nowhere
    cells, formula = planar(Affine(points, bias))
    assert cells != formula and cells[0] == 5


@pytest.mark.parametrize(
    ("d", "n", "ratio", "known"),
    [(6, 2, 0.2, 0.115264), (8, 3, 0.3, 0.127819242), (3, 1, 0.1, 0.1495)]
    + [(3, 2, 0.1, 0.014962437), (4, 4, 0.5, 0.0625), (1, 1, 0.3, 0.3)],
)
def test_tube_fraction(d, n, ratio, known):
    def shell(r):
        return n * r ** (n - 1) * (1 - r * r) ** ((d - n) / 2)

    def omega(m):
        return math.pi ** (m / 2) / math.gamma(m / 2 + 1)

    scale = omega(n) * omega(d - n) / omega(d)
    share = arrangement.tube_fraction(d, n, ratio)
    assert math.isclose(share, known, rel_tol=5e-8)
    exact = scale * integrate.quad(shell, 0, ratio, epsabs=1e-13)[0]
    assert math.isclose(share, exact, rel_tol=1e-10)
    x = laws.ball(200_000, d, generator(d))
    hits = (x[:, :n].norm(dim=1) < ratio).double()
    assert not refuted(hits, share)
    if d == 8:  # the leading term is a different number
        assert refuted(hits, scale * ratio**n)


def test_tube_fraction_of_tensors():
    ratio = torch.tensor([[0.0, 0.5], [1.0, 3.0]])
    share = arrangement.tube_fraction(5, 2, ratio)
    assert share.dtype == DOUBLE and share.shape == (2, 2)
    assert share[0, 0] == 0 and share[1, 0] == share[1, 1] == 1
    assert share[0, 1] == arrangement.tube_fraction(5, 2, 0.5)
    assert isinstance(arrangement.tube_fraction(5, 2, 1), float)


def test_slab_fraction():
    c, h = 0.3, 0.2
    exact = 2 * math.pi * h / 3 * (3 - 3 * c * c - h * h) / (4 * math.pi / 3)
    assert math.isclose(arrangement.slab_fraction(3, c, h), exact, rel_tol=1e-12)
    assert math.isclose(arrangement.slab_fraction(3, -c, h), exact, rel_tol=1e-12)

    def area(t):
        return math.asin(t) + t * math.sqrt(1 - t * t)

    exact = (area(c + h) - area(c - h)) / math.pi
    assert math.isclose(arrangement.slab_fraction(2, c, h), exact, rel_tol=1e-12)
    tube = arrangement.tube_fraction(7, 1, 0.4)
    assert math.isclose(arrangement.slab_fraction(7, 0.0, 0.4), tube, rel_tol=1e-12)
    assert arrangement.slab_fraction(4, 0.5, 2) == 1
    assert arrangement.slab_fraction(4, 2, 0.5) == 0
    ladder = arrangement.slab_fraction(3, 0.3, torch.tensor([0.1, 0.2], dtype=DOUBLE))
    assert ladder.shape == (2,) and ladder[1] == arrangement.slab_fraction(3, c, h)


def test_star_fraction():
    assert math.isclose(
        arrangement.star_fraction(3, 0.1) * math.pi, 0.581677987, rel_tol=1e-9
    )
    assert arrangement.star_fraction(3, 0.9) == pytest.approx(1.0, abs=1e-15)
    two = arrangement.star_fraction(2, 0.3)  # two rays are one line
    assert math.isclose(two, arrangement.tube_fraction(2, 1, 0.3), rel_tol=1e-12)
    x = laws.ball(200_000, 2, generator(1))
    hits = arrangement.thickened(star(3), x, 0.5, kind="tube").double()
    assert_mean(hits, arrangement.star_fraction(3, 0.5), off=0.01)
    assert refuted(hits, (6 * 0.5 - math.sqrt(3) * 0.25) / math.pi)


def test_gram_volume():
    weight = normals(4, 6)
    volumes = []
    for first in range(4):
        others = [i for i in range(4) if i != first]
        volumes.append(arrangement.gram_volume(weight[others] - weight[first]))
    assert torch.allclose(torch.stack(volumes), volumes[0], rtol=1e-12)
    rows = weight[1:] - weight[0]
    side, cube = (arrangement.gram_volume(rows, kind) for kind in ("one_sided", "cube"))
    # Whoever is largest: the spread is four one-sided sets; the cube is another set.
    assert torch.isclose(volumes[0], 4 * side) and torch.isclose(cube, 8 * side)
    assert torch.isclose(side, 1 / torch.linalg.det(rows @ rows.T).sqrt())
    for n in range(1, 6):
        eye = torch.eye(n + 1)
        spread = arrangement.gram_volume(eye[1:] - eye[0])
        assert math.isclose(spread, math.sqrt(n + 1), rel_tol=1e-6)
    rows.requires_grad_()
    assert torch.autograd.gradcheck(arrangement.gram_volume, rows)


def test_the_hexagon_about_the_vertex():
    weight, eps = star(3).weight, 0.3
    spread = arrangement.gram_volume(weight[1:] - weight[0]).item() * eps**2 / math.pi
    assert math.isclose(spread, 0.033079734, rel_tol=1e-7)
    x = laws.ball(400_000, 2, generator(2))
    hits = arrangement.thickened(star(3), x, eps, 2).double()
    assert_mean(hits, spread, off=0.1)
    assert refuted(hits, 4 / 3 * spread)  # the constant of the cube


def by_definition(router, x, eps, n, k, kind):
    """Some n + 1 experts, active and idle ones among them, are close."""
    scores, active = router(x), routing.active_set(router(x), k)
    edge = scores.topk(k, dim=1).values[:, -1]
    inside = torch.zeros(len(x), dtype=torch.bool)
    for tied in itertools.combinations(range(len(router.bias)), n + 1):
        part, on = scores[:, tied], active[:, tied].sum(1)
        high, low = part.amax(1), part.amin(1)
        if kind == "tube":
            rows = router.weight[list(tied[1:])] - router.weight[tied[0]]
            foot = (part[:, 1:] - part[:, :1]) @ torch.linalg.pinv(rows).T
            close = foot.norm(dim=1) < eps
        elif kind == "spread":
            close = high - low < eps
        elif kind == "one_sided":
            close = (high == edge) & (high - low < eps)
        else:
            close = ((part - edge[:, None]).abs() < eps).all(1)
            close &= (part == edge[:, None]).any(1)
        inside |= close & (on > 0) & (on <= n)
    return inside


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_thickened_by_definition(kind, n):
    for E, k in ((6, 1), (6, 2), (6, 5), (4, 3), (3, 1)):
        router, x = random_router(E, 4, seed=E), normals(4_000, 4, seed=k)
        for eps in (0.3, 1.0):
            found = arrangement.thickened(router, x, eps, n, k, kind)
            wanted = by_definition(router, x, eps, n, k, kind)
            assert torch.equal(found, wanted)


def test_thickened_agrees_with_routing():
    router, x, eps, k = random_router(7, 5), normals(4_000, 5), 0.4, 3
    scores = router(x)
    order = routing.tie_order(scores, k, eps)
    extra = (scores > scores.topk(k, dim=1).values[:, -1:] - eps).sum(1) - k
    active = routing.active_set(scores, k)
    far = (scores[:, :, None] - scores[:, None]) / torch.cdist(*2 * [router.weight])
    far[~(active[:, :, None] & ~active[:, None])] = math.inf
    tube = arrangement.thickened(router, x, eps, 1, k, "tube")
    assert torch.equal(tube, far.amin((1, 2)) < eps)  # the distance to the cell's edge
    for n in (1, 2, 3):
        cube = arrangement.thickened(router, x, eps, n, k, "cube")
        side = arrangement.thickened(router, x, eps, n, k, "one_sided")
        assert torch.equal(cube, order >= n) and torch.equal(side, extra >= n)
        assert cube.any() and side.any() and not side.all()


@pytest.mark.parametrize("law", ["gaussian", "ball"])
@pytest.mark.parametrize("kind", KINDS)
def test_tie_samples_agree_with_plain_sampling(kind, law):
    draw = {"gaussian": laws.gaussian, "ball": laws.ball}[law]
    for E, d, k, orders in ((6, 4, 2, (1, 2, 3)), (4, 3, 3, (1, 2)), (5, 5, 1, (2,))):
        router = random_router(E, d, seed=E, bias=0.2)
        for n in orders:
            if kind == "one_sided" and k + n > E:
                continue
            x = draw(200_000, d, generator(n))
            hits = arrangement.thickened(router, x, 0.3, n, k, kind).double()
            samples = arrangement.tie_samples(
                router, x[:60_000], 0.3, n, k, kind, law, generator=generator(9)
            )
            error = samples.std().item() / math.sqrt(len(samples))
            both = math.hypot(error, hits.std().item() / math.sqrt(len(hits)))
            miss = samples.mean().item() - hits.mean().item()
            assert abs(miss) < 5 * both < 0.4 * hits.mean().item()


def iid_share(eps, E, k, n):
    """P(s_(k) - s_(k+n) < eps) of independent logits, given the k-th."""

    def inside(y):
        below = special.ndtr(y)
        near = integrate.quad(stats.norm.pdf, y - eps, y, epsabs=0)[0]
        share = special.betainc(n, E - k - n + 1, near / below)  # n or more of E - k
        rest = stats.norm.pdf(y) * special.ndtr(-y) ** (k - 1) * below ** (E - k)
        return rest * share

    return E * math.comb(E - 1, k - 1) * integrate.quad(inside, -8, 8, epsabs=0)[0]


@pytest.mark.parametrize("eps", [0.3, 1e-3, 1e-6])
@pytest.mark.parametrize(("E", "k"), [(3, 1), (8, 2), (5, 4)])
def test_tie_samples_of_iid_logits(E, k, eps):
    x = normals(150_000, E, seed=E)
    sample = {
        kind: arrangement.tie_samples(
            identity(E), x, eps, 1, k, kind, generator=generator(4)
        )
        for kind in KINDS
    }
    truth = iid_share(eps, E, k, 1)
    if eps == 0.3:
        assert math.isclose(truth, iid_mass(eps, E, k), rel_tol=1e-8)
    # Weights are sqrt(2) apart, so the tube is the spread of a wider window.
    truths = dict.fromkeys(KINDS, truth) | {
        "tube": iid_share(math.sqrt(2) * eps, E, k, 1)
    }
    for kind in KINDS:
        assert_mean(sample[kind], truths[kind], off=0.07)
        assert refuted(sample[kind], 2 * truths[kind])


@pytest.mark.parametrize("eps", [1e-3, 1e-6])
@pytest.mark.parametrize(("E", "k", "n"), [(8, 2, 2), (5, 2, 3), (4, 3, 2), (3, 1, 2)])
def test_higher_orders_of_iid_logits(E, k, n, eps):
    x = normals(60_000, E, seed=n, dtype=torch.float32)

    def sample(kind):
        return arrangement.tie_samples(
            identity(E), x, eps, n, k, kind, generator=generator(4)
        )

    if k + n <= E:
        side = iid_share(eps, E, k, n)  # for E = n + 1 the samples differ by eps only
        assert_mean(sample("one_sided"), side, bias=1e-8 * side, off=0.07)
    ranks = range(max(0, k - n), min(k - 1, E - n - 1) + 1)
    spread = sum(iid_share(eps, E, a + 1, n) for a in ranks)
    # n + 2 experts tie with a probability smaller by about eps.
    assert_mean(sample("spread"), spread, bias=20 * eps * spread, off=0.07)
    ball = math.pi ** (n / 2) / math.gamma(n / 2 + 1)
    tube = spread * ball / math.sqrt(n + 1)
    assert_mean(sample("tube"), tube, bias=20 * eps * tube, off=0.07)


def test_tie_samples_in_the_ball_are_exact():
    g = generator(3)
    for eps in (0.2, 1e-5):
        x = laws.ball(100_000, 2, generator(1))
        rays = arrangement.tie_samples(
            star(3), x, eps, kind="tube", law="ball", generator=g
        )
        assert_mean(rays, arrangement.star_fraction(3, eps))
        router = Affine(normals(3, 7), torch.zeros(3, dtype=DOUBLE))
        x = laws.ball(20_000, 7, generator(2))
        flat = arrangement.tie_samples(
            router, x, eps, 2, kind="tube", law="ball", generator=g
        )
        assert_mean(flat, arrangement.tube_fraction(7, 2, eps))
        slab = Affine(torch.eye(2, 5, dtype=DOUBLE)[:1].repeat(2, 1), None).weight
        slab[1] = 0
        pair = Affine(slab, torch.tensor([-0.4, 0.0], dtype=DOUBLE))
        x = laws.ball(20_000, 5, generator(2))
        side = arrangement.tie_samples(pair, x, eps, law="ball", generator=g)
        assert_mean(side, arrangement.slab_fraction(5, 0.4, eps))


def test_relative_variance_is_flat():
    router, x = random_router(8, 16, seed=1), normals(60_000, 16)
    for n in (1, 2):
        spread = []
        for eps in (1e-2, 1e-4, 1e-8):
            values = arrangement.tie_samples(
                router, x, eps, n, 2, "one_sided", generator=generator(1)
            )
            spread.append((values.var() / values.mean() ** 2).item())
        assert max(spread) < 1.1 * min(spread) < 20


def test_what_is_empty_has_no_mass():
    router, x, g = random_router(4, 3), normals(10, 3), generator()
    for n, k, kind in ((1, 4, "spread"), (4, 1, "cube"), (2, 3, "one_sided")):
        samples = arrangement.tie_samples(router, x, 0.1, n, k, kind, generator=g)
        assert torch.equal(samples, torch.zeros(10, dtype=DOUBLE))
        assert not arrangement.thickened(router, x, 9.0, n, k, kind).any()
    for kind in KINDS:
        samples = arrangement.tie_samples(router, x, 0.0, kind=kind, generator=g)
        assert not samples.any()
        assert arrangement.thickened(router, x[:0], 0.1, kind=kind).shape == (0,)
        none = arrangement.tie_samples(router, x[:0], 0.1, kind=kind, generator=g)
        assert none.shape == (0,) and none.dtype == DOUBLE


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: arrangement.strata_count(4, 5, 1), ValueError, "from 1 to 4"),
        (lambda: arrangement.strata_count(4, 2, 0), ValueError, "at least 1"),
        (lambda: arrangement.strata_count(4.0, 2, 1), TypeError, "E must be an int"),
        (lambda: arrangement.ordering_count(4, True), TypeError, "d must be an int"),
        (
            lambda: arrangement.topk_cell_count_planar(5, 3, [5]),
            ValueError,
            "2 numbers",
        ),
        (lambda: arrangement.tube_fraction(3, 4, 0.1), ValueError, "from 1 to 3"),
        (lambda: arrangement.tube_fraction(3, 1, math.nan), ValueError, "at least 0"),
        (lambda: arrangement.tube_fraction(3, 1, "1"), TypeError, "a number or a"),
        (lambda: arrangement.slab_fraction(3, 0.0, -1.0), ValueError, "half must be"),
        (lambda: arrangement.slab_fraction(3, math.nan, 1), ValueError, "centre must"),
        (lambda: arrangement.star_fraction(1, 0.1), ValueError, "rays must be"),
        (lambda: arrangement.gram_volume(torch.eye(2), "box"), ValueError, "kind must"),
        (lambda: arrangement.gram_volume(torch.ones(2, 3)), ValueError, "dependent"),
        (lambda: arrangement.gram_volume(torch.ones(3, 2)), ValueError, "n <= d"),
        (lambda: arrangement.gram_volume([[1.0]]), TypeError, "floating-point"),
        (lambda: arrangement.gram_volume(torch.eye(2) / 0), ValueError, "finite"),
        (lambda: arrangement.cells(torch.eye(3), None, 4), ValueError, "from 1 to K"),
        (lambda: arrangement.orderings(torch.ones(3)), ValueError, r"\(K, d\)"),
    ],
)
def test_bad_numbers_are_refused(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"eps": -1.0}, ValueError, "eps must be"),
        ({"eps": math.inf}, ValueError, "eps must be"),
        ({"eps": torch.ones(2)}, ValueError, "eps must be"),
        ({"n": 0}, ValueError, "at least 1"),
        ({"n": 1.0}, TypeError, "must be an int"),
        ({"k": 6}, ValueError, "from 1 to K"),
        ({"kind": "ring"}, ValueError, "kind must be one of"),
        ({"law": "cube"}, ValueError, "law must be"),
        ({"law": "ball"}, ValueError, "unit ball"),
        ({"n": 3}, ValueError, "n <= d"),
        ({"x": normals(5, 3)}, ValueError, "shape"),
        ({"x": normals(5, 2) / 0}, ValueError, "finite"),
        ({"x": [1.0]}, TypeError, "float32 or float64"),
        ({"router": torch.eye(2)}, TypeError, "Affine"),
        ({"router": Affine(torch.eye(5, 2))}, ValueError, "codimension 1"),
        ({"router": Affine(torch.eye(400, 2))}, ValueError, "65536 sets"),
        ({"generator": 3}, TypeError, "torch.Generator"),
    ],
)
def test_bad_requests_are_refused(change, error, match):
    asked = {"router": random_router(5, 2), "x": normals(50, 2), "eps": 0.1}
    asked |= {"generator": generator()} | change
    with pytest.raises(error, match=match):
        arrangement.tie_samples(**asked)

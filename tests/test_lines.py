"""lines: the share of a line by walking it, and digits that are easily lost."""

import math

import pytest
import torch
from scipy import special, stats
from truths import DOUBLE, INF, identity, iid_mass, normals, random_router, refuted

from moebook import boundary
from moebook.routing import Affine, gap


def scan(router, x, k, held=True, steps=24_001):
    """Along each row's line on a grid: the density where ranks are kept, and gap_k."""
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
        rows.append((keep * torch.exp(-(t**2) / 2), gap(line, k)))
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

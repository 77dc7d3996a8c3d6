"""layers: the rules are exact where they say so, and lines know their logits."""

import math

import pytest
import torch
from mpmath import altzeta
from truths import DOUBLE, normals, random_router, star

from moebook.layers import GATE_RULES, gaps, layer_of, quadrature
from moebook.lines import frame_of


@pytest.mark.parametrize(("limit", "nodes", "weights"), GATE_RULES)
def test_gate_rules_are_exact(limit, nodes, weights):
    """int rho^m k = m! eta(m + 1), and int rho^m k^2 = m! (eta(m + 1) - eta(m))."""
    rho, weight = (torch.tensor(t, dtype=DOUBLE) for t in (nodes, weights))
    gate = torch.sigmoid(-rho)
    for m in range(len(nodes) + 1):
        first = math.factorial(m) * float(altzeta(m + 1))
        second = first - math.factorial(m) * float(altzeta(m))
        found = [(weight * gate**p * rho**m).sum().item() for p in (1, 2)]
        exact = found == pytest.approx([first, second], rel=1e-13)
        assert exact == (m < len(nodes))


@pytest.mark.parametrize("tau", [3.0, 0.3, 0.01, 0.008, 1e-3, 1e-5])
def test_weights_sum_gates_against_the_chord(tau):
    """Weights on the gate of the pair: int k phi over the chord, by a fine rule."""
    router, x = random_router(4, 3), normals(40, 3)
    frame, x = frame_of(router, x)
    layer, normal = layer_of(frame, x)
    found = torch.zeros(len(layer.row), dtype=DOUBLE)
    for nodes in (24, 200):
        total = torch.zeros(len(x), dtype=DOUBLE)
        for part in quadrature(layer, tau, nodes, 7, 2**20):
            gate = torch.sigmoid(-part.t * part.layer.rate[:, None, None] / tau)
            torch.testing.assert_close(part.gate.expand_as(gate), gate)
            total.index_add_(0, part.layer.row, (gate * part.weight).sum((1, 2)))
        if nodes == 24:
            found = total
    torch.testing.assert_close(found, total, rtol=1e-8, atol=0)
    assert len(normal) <= 12 and (found > 0).any()


def test_outputs_in_thin_layers_are_interpolated():
    """Near a third expert: cubics along the line are exact, a quartic is not."""
    frame, x = frame_of(star(3), normals(4_000, 2))
    layer, _ = layer_of(frame, x)
    tau = 1e-3
    parts = [p for p in quadrature(layer, tau, 24, 5, 2**20) if p.blend is not None]
    assert sum(len(p.layer.row) for p in parts) > 20
    for part in parts:
        scale = part.layer.rate[:, None, None] / tau
        assert not part.alone and part.ask.shape[2] == part.blend.shape[3]
        for power in range(5):
            known, wanted = ((t * scale) ** power for t in (part.ask, part.t))
            found = (part.blend @ known[..., None]).squeeze(3)
            near = torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)
            assert near == (power < 4)


def test_gaps_are_those_of_the_router():
    router, x = random_router(5, 3), normals(30, 3)
    frame, x = frame_of(router, x)
    layer, normals_ = layer_of(frame, x)
    t = normals(len(layer.row), 4, seed=3) * 0.1
    e = normals_[layer.axis]
    points = x[layer.row][:, None] + (t - layer.at[:, None])[:, :, None] * e[:, None]
    z = router(points.flatten(0, 1)).reshape(*t.shape, 5)
    ahead = z.gather(2, layer.pair[:, None].expand(-1, 4, -1))
    lead = torch.where(t > 0, ahead[:, :, 0], ahead[:, :, 1])
    torch.testing.assert_close(gaps(layer, t), lead[:, :, None] - z)


def test_every_facet_before_x_is_there_once():
    """In the star of three, x projects into one ray or two: 3/2 on average."""
    frame, x = frame_of(star(3), normals(20_000, 2))
    layer, normal = layer_of(frame, x)
    assert len(layer.row) / len(x) == pytest.approx(1.5, abs=0.02)
    assert len(normal) == 6
    torch.testing.assert_close(normal.norm(dim=1), torch.ones(6, dtype=DOUBLE))
    # The chord is a whole line beyond the far expert's wedge: no side ends at the tie.
    assert (layer.span > 0).all() and (layer.at >= 0).all()

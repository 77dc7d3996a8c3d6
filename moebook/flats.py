"""Flats: where n + 1 scores of an affine router agree, all sets of experts at once.

Tables of samples have one sample a column. u are n normal coordinates of x, its
projection on an orthonormal basis of the normal space of a flat.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from moebook.routing import Affine

#: Most sets of n + 1 experts that are tabulated.
MOST = 2**16


class Flats(NamedTuple):
    """The tie flats of all m sets of n + 1 experts, in float64.

    Scores of a set less that of its first expert are root (u - foot).
    """

    sets: Tensor  # (m, n + 1)
    root: Tensor  # (m, n, n)
    inverse: Tensor  # (m, n, n)
    foot: Tensor  # (m, n) normal coordinates of the flat
    lift: Tensor  # (m, E, n) change of all scores by one unit of each u


def flats_of(router: Affine, n: int, device: torch.device) -> Flats:
    """The tie flats of all sets of n + 1 experts."""
    weight = router.weight.detach().to(device, torch.float64)
    bias = router.bias.detach().to(device, torch.float64)
    E, d = weight.shape
    if n > d or math.comb(E, n + 1) > MOST:
        raise ValueError(
            f"ties of order n need n <= d and at most {MOST} sets of n + 1 experts, "
            f"got n = {n}, d = {d} and {math.comb(E, n + 1)} sets: for a flat less "
            "thin, or many experts, count plain draws with arrangement.thickened"
        )
    sets = torch.combinations(torch.arange(E, device=device), n + 1)
    rows = weight[sets[:, 1:]] - weight[sets[:, :1]]
    step = bias[sets[:, 1:]] - bias[sets[:, :1]]
    size = torch.linalg.svdvals(rows)
    if (flat := size[:, -1] <= 1e-10 * weight.abs().max()).any():
        raise ValueError(
            f"experts {sets[flat][0].tolist()} do not tie on a flat of codimension "
            f"{n}: their weights are affinely dependent (to 1e-10), so count plain "
            "draws with arrangement.thickened, or perturb the weights"
        )
    basis, upper = torch.linalg.qr(rows.mT)
    inverse = torch.linalg.inv(upper).mT
    foot = -(inverse @ step[..., None]).squeeze(-1)
    return Flats(sets, upper.mT.contiguous(), inverse, foot, weight @ basis)


def apply(table: Tensor, pick: Tensor, vector: Tensor) -> Tensor:
    """Matrices table[pick] (m, a, b) times a vector (b, m) -> (a, m)."""
    parts = zip(table.permute(2, 1, 0), vector, strict=True)
    return sum(part.index_select(1, pick) * v for part, v in parts)


def cell(flats: Flats) -> Tensor:
    """Volume of u for a unit of tied scores, 1 / sqrt(det A A'), (m,)."""
    return flats.inverse.diagonal(dim1=1, dim2=2).prod(1).abs()


def chances(flats: Flats, law: str, d: int) -> Tensor:
    """Odds to pick each set: the density of its tie, and a tenth spread evenly."""
    mass = density(flats.foot.T, law, d) * cell(flats)
    even = torch.full_like(mass, 1 / len(mass))
    total = mass.sum()
    return 0.9 * mass / total + 0.1 * even if total > 0 else even


def density(u: Tensor, law: str, d: int) -> Tensor:
    """Density of n normal coordinates of x, (n, m) -> (m,)."""
    n, square = len(u), u.square().sum(0)
    if law == "gaussian":
        return torch.exp(-square / 2) / (2 * math.pi) ** (n / 2)
    log = math.lgamma(d / 2 + 1) - math.lgamma((d - n) / 2 + 1)
    scale = math.exp(log - n / 2 * math.log(math.pi))
    inside = (1 - square).clamp_min(0) ** ((d - n) / 2)
    return scale * inside * (square < 1)


def double_on(t: Tensor) -> dict:
    """Options for float64 numbers on the device of t."""
    return {"dtype": torch.float64, "device": t.device}

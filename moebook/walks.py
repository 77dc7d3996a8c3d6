"""Walks: Brownian motion until its routing changes, by simulation.

X_t = x + sigma B_t runs until it meets the boundary of its cell, the inputs with the
same k active experts; tau is the time when it does. A cell is convex, the intersection
of the half-spaces z_i >= z_j for i active and j not. Work is in float64 on the device
of the generator, whatever the dtype of x.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from moebook import laws
from moebook.checks import check_count, check_input, check_router, check_starts
from moebook.routing import Affine, active_set
from moebook.sojourn import numbers


class Walk(NamedTuple):
    """Where and when n walkers left, and what changed there.

    A walker that has not arrived within max_steps has NaN and -1.
    """

    place: Tensor  # (n, d) exit places
    time: Tensor  # (n,) sums with mean E tau, not exit times
    pair: Tensor | None  # (n, 2) the active and the idle expert that meet
    steps: Tensor  # (n,) int64 spheres used


class Faces(NamedTuple):
    """Half-spaces {normal . x + offset >= 0}, unit normals (F, d)."""

    normal: Tensor
    offset: Tensor
    pair: Tensor

    def distances(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x, self.normal.T)


def wedge(angle: float) -> Affine:
    """Router of three experts in the plane, of which 0 leads on 0 < theta < angle.

    angle in (0, pi]; at pi two experts do, for one face.
    Raises TypeError or ValueError for another angle. Source: ours.
    """
    angle = numbers("angle", angle, zero=False).item()
    if angle > math.pi:
        raise ValueError(
            f"a cell is convex, so angle must be at most pi, got {angle}: a wider "
            "wedge takes a distance function in walk_on_spheres"
        )
    rows = [[0.0, 0.0], [0.0, -1.0], [-math.sin(angle), math.cos(angle)]]
    count = 2 if angle == math.pi else 3
    return Affine(torch.tensor(rows[:count], dtype=torch.float64))


def walk_on_spheres(
    domain: Affine | Callable[[Tensor], Tensor],
    x: Tensor,
    generator: Generator,
    k: int = 1,
    *,
    sigma: float = 1.0,
    shell: float = 1e-6,
    max_steps: int = 10_000,
) -> Walk:
    """Exit places of a Brownian motion without drift, starts x (n, d) -> Walk.

    domain is a router, whose cell of k active experts x must leave, or a function
    (n, d) -> (n,): a lower bound of the distance to the boundary, 0 only there. A step
    goes to a uniform point of the largest sphere; a walker within `shell`, in units of
    x, has arrived, and on a router's cell is set on the nearest face. `time` has mean
    E tau less the time to leave the shell; the exit time itself is not sampled. The
    variance of `time` is finite only where that of tau is. The order of the exit is
    routing.tie_order(router(place), k, tol).
    Steps grow like log(1 / shell): 20 at the default in the plane, and like d in high
    dimension. Starts are grouped by cell.
    Raises TypeError or ValueError that says what was expected; ValueError for a cell
    without boundary: k = K, or parallel logits.
    Source: Muller (1956); the sum of rho^2 / (d sigma^2) by the strong Markov property.
    """
    x = check_starts(x, generator)
    sigma = numbers("sigma", sigma, zero=False).item()
    shell = numbers("shell", shell, zero=False).item()
    max_steps = check_count("max_steps", max_steps)
    if not isinstance(domain, Affine):
        place, time, steps = _wander(_checked(domain), x, generator, shell, max_steps)
        return Walk(place, time / sigma**2, None, steps)
    steps = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    pair = torch.zeros(len(x), 2, dtype=torch.int64, device=x.device)
    found = Walk(torch.empty_like(x), x.new_empty(len(x)), pair, steps)
    for rows, faces in cells_of(domain, x, k):
        if not len(faces.pair):
            raise ValueError(
                "the cell of x has no boundary: all experts are active, or logits are "
                "parallel. Such a walk never ends; choose k < K and distinct weights"
            )

        def distance(x: Tensor, faces: Faces = faces) -> Tensor:
            return faces.distances(x).amin(1)

        place, time, steps = _wander(distance, x[rows], generator, shell, max_steps)
        rest, face = faces.distances(place).min(1)
        found.place[rows] = place - rest[:, None] * faces.normal[face]
        found.time[rows], found.steps[rows] = time / sigma**2, steps
        found.pair[rows] = faces.pair[face].where(time.isfinite()[:, None], -1)
    return found


def _wander(
    distance: Callable, x: Tensor, generator: Generator, shell: float, max_steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Places, times for sigma = 1 and numbers of steps of all walkers."""
    n, d = x.shape
    place, time = torch.full_like(x, math.nan), x.new_full((n,), math.nan)
    steps = torch.full((n,), max_steps, dtype=torch.int64, device=x.device)
    row, spent = torch.arange(n, device=x.device), x.new_zeros(n)
    for step in itertools.count():
        rho = distance(x)
        done = rho <= shell
        if done.any():  # finished walkers cost nothing more
            place[row[done]], time[row[done]] = x[done], spent[done]
            steps[row[done]] = step
            x, row, spent, rho = (t[~done] for t in (x, row, spent, rho))
        if not len(row) or step == max_steps:
            return place, time, steps
        noise = laws.gaussian(*x.shape, generator)
        x = torch.addcmul(x, noise, (rho / noise.norm(dim=1))[:, None])
        spent = spent + rho.square() / d


def cells_of(router: Affine, x: Tensor, k: int) -> Iterator[tuple[Tensor, Faces]]:
    """The cells of the starts: row numbers (m,) and faces."""
    k = check_router(router, k)
    check_input(x, router.weight.shape[1])
    weight, bias = (t.detach().to(x) for t in (router.weight, router.bias))
    active = active_set(torch.addmm(bias, x, weight.T), k)
    kinds, kind = active.unique(dim=0, return_inverse=True)
    for m, mask in enumerate(kinds):
        i, j = (
            t.flatten()
            for t in torch.meshgrid(
                mask.nonzero()[:, 0], (~mask).nonzero()[:, 0], indexing="ij"
            )
        )
        across, level = weight[i] - weight[j], bias[i] - bias[j]
        length = across.norm(dim=1)
        if (same := (length == 0) & (level == 0)).any():
            twins = [i[same][0].item(), j[same][0].item()]
            raise ValueError(
                f"experts {twins} are identical and tie everywhere: merge them, or a "
                "cell has no inside"
            )
        met = length > 0  # parallel logits never meet
        yield (
            (kind == m).nonzero()[:, 0],
            Faces(
                across[met] / length[met, None],
                level[met] / length[met],
                torch.stack((i[met], j[met]), 1),
            ),
        )


def _checked(domain: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not callable(domain):
        raise TypeError(
            "domain must be a routing.Affine or a function x (n, d) -> distances (n,), "
            f"got {type(domain).__name__}"
        )

    def distance(x: Tensor) -> Tensor:
        rho = domain(x)
        if rho.shape != x.shape[:1] or not rho.isfinite().all():
            raise ValueError(
                f"domain must give finite distances (n,) = ({len(x)},), got shape "
                f"{tuple(rho.shape)} with {int((~rho.isfinite()).sum())} not finite: "
                "an infinite distance is a boundary that is never met"
            )
        return rho.to(x)

    return distance

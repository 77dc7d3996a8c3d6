"""Diffusion: time to a stated error, against named peers. CPU, one thread.

    python benchmarks/diffusion.py [--rows 16384] [--repeats 3]

Wedge survival: CPU seconds to an rms error of 1e-3. Euler's bias c sqrt(dt) is measured
on grids that can be run; its step and its paths follow from it at the best split of the
error, half bias, half noise. Occupation: seconds to 1e-3 relative error. Peer and ours
are timed in turn, the fastest of the repeats counts. Before anything is timed every
estimator must agree with its truth within five standard errors.
"""

import argparse
import math
from collections.abc import Callable

import torch
from timing import agree, in_turn, mean, show
from torch import Generator, Tensor

from moebook import diffusion
from moebook.routing import Affine, gap

ERROR = 1e-3


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rows", type=int, default=2**14, help="samples a timing")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--variance-rows", type=int, default=2**19)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    print(f"{'case':36}{'peer':26}{'peer':>9}{'ours':>13}{'ratio':>13}")
    compare_survival(args, generator)
    compare_occupation(args, generator)
    compare_flat(args, generator)


def compare_survival(args, generator: Generator) -> None:
    """P(tau > .3) in the wedge of 60 degrees, from its bisector: Euler over bridges."""
    angle, t, steps = math.pi / 3, 0.3, 16
    truth = diffusion.wedge_survival(t, angle=angle, radius=1, theta=angle / 2).item()
    router, n = diffusion.wedge(angle), args.variance_rows
    x = torch.tensor([[math.cos(angle / 2), math.sin(angle / 2)]]).double()

    def bridge(n: int, part: Callable = diffusion.bridge_survival) -> Tensor:
        return part(router, x.expand(n, 2), t, generator, steps=steps)

    def euler(n: int, steps: int = 2000) -> Tensor:
        return diffusion.euler_survival(
            router, x.expand(n, 2), t, generator, steps=steps
        )

    values, bounds = bridge(n), bridge(n, diffusion.bridge_bounds)
    width, error = mean(bounds.diff(dim=1))  # encloses the bias of the product
    bias = width + 5 * error
    agree(mean(values), (truth, 0.0), bias=bias)
    constants = []
    for grid in (160, 640):
        found, error = mean(euler(n // 8, grid))
        agree((found, error), (truth, 0.0), bias=math.sqrt(t / grid))
        constants.append((found - truth) / math.sqrt(t / grid))
    c = sum(constants) / 2
    needed = t * 2 * c**2 / ERROR**2
    seconds = in_turn([lambda: euler(args.rows), lambda: bridge(args.rows)], args)
    paths = 2 * truth * (1 - truth) / ERROR**2
    peer = paths * needed * seconds[0] / 2000
    ours = values.var().item() / (ERROR**2 - bias**2) * seconds[1]
    print(f"  Euler's bias / sqrt(dt): {', '.join(f'{c:.3f}' for c in constants)}")
    print(
        f"  hence {needed:.3g} steps; the bridge takes {steps}, its bias < {bias:.2g}"
    )
    show("P(tau > .3), 60 degrees, to .001", f"Euler, {needed:.2g} steps", peer, ours)


def compare_occupation(args, generator: Generator) -> None:
    """Time of [0, 1] with margin <= .01, d = E = 64: paths over random times."""
    router, w, n = Affine(torch.eye(64, dtype=torch.float64)), 1e-2, args.rows
    x = torch.randn(1, 64, generator=generator, dtype=torch.float64) / 2

    def near_tie(n: int) -> Tensor:
        return diffusion.occupation_near_tie(router, x.expand(n, 64), w, 1, generator)

    def hits(n: int) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            return gap(router(y), 1) <= w

        return diffusion.occupation_hits(inside, x.expand(n, 64), 1, generator)

    def paths(n: int) -> Tensor:
        return path_loop(router, x.expand(n, 64), w, 1000, generator)

    small = n // 16
    runs = [lambda: paths(small), lambda: hits(n), lambda: near_tie(n)]
    found = [
        mean(run(m)) for run, m in ((paths, 8192), (hits, n * 16), (near_tie, n * 8))
    ]
    for value, error in found[:2]:
        # A grid of 1000 steps is unbiased but for its first and last half step.
        agree((value, error), found[2], bias=1e-3 * found[2][0])
    relvar = [
        (error / value) ** 2 * m
        for (value, error), m in zip(found, (8192, n * 16, n * 8), strict=True)
    ]
    seconds = in_turn(runs, args)
    seconds[0] *= n / small
    cost = [v * s / ERROR**2 for v, s in zip(relvar, seconds, strict=True)]
    show("time near a tie, d = E = 64", "path, 1000 steps", cost[0], cost[2])
    show("  by hits at random times", "path, 1000 steps", cost[0], cost[1])


def compare_flat(args, generator: Generator) -> None:
    """Time of [0, 1] within .01 of a flat of codimension 2, from distance 1/2."""
    eps, a, n = 1e-2, 0.5, args.rows
    truth = diffusion.occupation(eps, 1, distance=a, codimension=2).item()
    x = torch.tensor([[a, 0.0]], dtype=torch.float64)

    def near_flat(n: int) -> Tensor:
        return diffusion.occupation_near_flat(
            eps, 1, n, generator, distance=a, codimension=2
        )

    def hits(n: int) -> Tensor:
        def inside(y: Tensor) -> Tensor:
            return y.norm(dim=1) < eps

        return diffusion.occupation_hits(inside, x.expand(n, 2), 1, generator)

    values = near_flat(args.variance_rows)
    agree(mean(values), (truth, 0.0))
    relvar = values.var().item() / truth**2
    seconds = in_turn([lambda: hits(n), lambda: near_flat(n)], args)
    cost = (1 / truth * seconds[0], relvar * seconds[1])
    show("time near a flat, codimension 2", "hits", *(c / ERROR**2 for c in cost))


def path_loop(
    router: Affine, x: Tensor, w: float, steps: int, generator: Generator
) -> Tensor:
    """Share of the grid points of a path with margin <= w, plain torch."""
    total = torch.zeros(len(x), dtype=torch.float64)
    for _ in range(steps):
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        x = x + noise * steps**-0.5
        top = (x @ router.weight.T).topk(2, dim=1).values
        total += top[:, 0] - top[:, 1] <= w
    return total / steps


if __name__ == "__main__":
    main()

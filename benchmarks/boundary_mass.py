"""Boundary mass: time to a stated error, against named peers. CPU, one thread.

    python benchmarks/boundary_mass.py [--widths .01 .001] [--rows 65536] [--repeats 15]

A row is a time to 1e-3 relative error: relative variance of a sample times 1e6 times
CPU seconds a sample, draws of x included. Peer and ours are timed in turn, the fastest
of the repeats counts, and the ratio is what to read. Before anything is timed every
estimator must agree with its truth within five standard errors.
"""

import argparse
import math
from collections.abc import Callable

import torch
from timing import agree, in_turn, mean, show
from torch import Tensor

from moebook import boundary
from moebook.routing import Affine


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--widths", type=float, nargs="+", default=[1e-2, 1e-3])
    options.add_argument("--rows", type=int, default=2**16, help="samples a timing")
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--variance-rows", type=int, default=2**21)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    print(f"{'case':36}{'peer':26}{'peer':>9}{'ours':>13}{'ratio':>13}")
    iid = Affine(torch.eye(64))
    random = Affine(torch.randn(64, 64, generator=generator) / 8)
    x = torch.randn(args.variance_rows // 2, 64, generator=generator)
    for w in args.widths:
        for by, other in (("line", "stein"), ("stein", "line")):
            exact = (iid_mass(w, 64), 0.0)
            compare_mass("iid", iid, w, by, exact, args, generator)
            sampled = mean(boundary.mass(random, x, w, by=other))
            compare_mass("random", random, w, by, sampled, args, generator)
    compare_brute_force(iid, args, generator)
    random = Affine(torch.randn(8, 16, generator=generator) / 4)
    compare_slopes(random, 1e-4, args, generator)


def compare_mass(
    name: str, router: Affine, w: float, by: str, truth: tuple, args, generator
) -> None:
    """BM(w) at d = K = 64: plain torch over a conditional estimator."""
    draw = drawer(router, args.rows, generator)

    def ours() -> Tensor:
        return boundary.mass(router, draw(), w, by=by)

    relvar, _ = spread(ours, truth, args.variance_rows)
    seconds = in_turn([lambda: plain(router, w, args.rows, generator), ours], args)
    peer = (1 - truth[0]) / truth[0] * seconds[0] * 1e6
    case = f"BM({w:g}), K = 64 {name}, {by}"
    show(case, "plain torch", peer, relvar * seconds[1] * 1e6, "s")


def compare_brute_force(router: Affine, args, generator) -> None:
    """Samples a second: counting in chunks over plain torch."""
    w, n = 1e-2, args.variance_rows
    truth = iid_mass(w, len(router.bias))
    hits = int(boundary.brute_force(router, n, w, generator))
    agree((hits / n, math.sqrt(truth * (1 - truth) / n)), (truth, 0.0))
    seconds = in_turn(
        [
            lambda: plain(router, w, args.rows, generator),
            lambda: boundary.brute_force(router, args.rows, w, generator),
        ],
        args,
    )
    show("hits, d = K = 64", "plain torch", *(1e9 * s for s in seconds), "ns")


def compare_slopes(router: Affine, w: float, args, generator) -> None:
    """BM'(0) of a random router: the line estimator at a small w over ours."""
    draw = drawer(router, args.rows, generator)
    runs = {
        "line": lambda: boundary.mass(router, draw(), w) / w,
        "facet": lambda: boundary.slope(router, draw()),
        "stein": lambda: boundary.slope(router, draw(), by="stein"),
    }
    # Two estimators of finite variance are the truth for each other and for the line.
    x = torch.randn(args.variance_rows, router.weight.shape[1], generator=generator)
    truth = {by: mean(boundary.slope(router, x, by=by)) for by in ("facet", "stein")}
    against = {"line": truth["facet"], "facet": truth["stein"], "stein": truth["facet"]}
    # The line's rare large samples decide its variance: look longer for them.
    rows = {by: args.variance_rows * (4 if by == "line" else 1) for by in runs}
    found = {by: spread(runs[by], against[by], rows[by]) for by in runs}
    seconds = dict(zip(runs, in_turn(list(runs.values()), args), strict=True))
    cost = {by: found[by][0] * seconds[by] * 1e6 for by in runs}
    for by in ("facet", "stein"):
        show(
            f"BM'(0), d = 16, K = 8, {by}",
            f"line at w = {w:g}",
            cost["line"],
            cost[by],
            "s",
        )
        show("  largest sample / mean", "", found["line"][1], found[by][1], "")


def plain(router: Affine, w: float, n: int, generator: torch.Generator) -> Tensor:
    """Plain torch, as one would write it first."""
    x = torch.randn(n, router.weight.shape[1], generator=generator)
    top = (x @ router.weight.T + router.bias).topk(2, dim=1).values
    return (top[:, 0] - top[:, 1] <= w).double().mean()


def drawer(router: Affine, n: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """Draws of x (n, d) into one buffer, float32."""
    x = torch.empty(n, router.weight.shape[1])
    return lambda: x.normal_(generator=generator)


def iid_mass(w: float, K: int) -> float:
    """K (K - 1) int phi Phi^(K - 2) [Phi(y + w) - Phi(y)] dy, trapezoid rule."""
    y = torch.linspace(-14, 14, 40001, dtype=torch.float64)
    phi = torch.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    step = torch.special.ndtr(y + w) - torch.special.ndtr(y)
    inside = phi * torch.special.ndtr(y) ** (K - 2) * step
    return K * (K - 1) * float(torch.trapezoid(inside, y))


def spread(sample: Callable, truth: tuple, n: int) -> tuple[float, float]:
    """Relative variance and largest sample over mean, once the mean is right."""
    parts = [sample()]
    while sum(map(len, parts)) < n:
        parts.append(sample())
    values = torch.cat(parts)
    found, error = mean(values)
    agree((found, error), truth)
    return (values.var() / found**2).item(), values.max().item() / found


if __name__ == "__main__":
    main()

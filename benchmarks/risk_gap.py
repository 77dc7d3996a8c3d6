"""Soft-to-hard gap: time to a stated error, against paired losses. CPU, one thread.

    python benchmarks/risk_gap.py [--tau .001] [--rows 16384] [--repeats 15]

A row is a time to 1e-3 relative error: relative variance of a sample times 1e6 times
CPU seconds a sample, draws of x included. The peer takes both losses at the same x, in
float32, all rows at once, by the fastest calls of torch that we know, and subtracts.
The fastest of the repeats counts, and the ratio is what to read. Before anything is
timed the samplers must agree within five standard errors; for two experts ours must
also agree with an exact value. Variances come from many more rows, since few of the
peer's see the layer. Ours is taken at 10 tau: it hardly depends on tau, and samples
within a few tau of a tie of three, up to half of it for K = 8, are 100 times as many.
"""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from timing import agree, in_turn, show
from torch import Tensor

from moebook import risk
from moebook.routing import Affine


class Problem(NamedTuple):
    """A router with linear experts and a linear label mean, float32."""

    router: Affine
    slopes: Tensor  # (K, d), as torch.nn.Linear keeps them: the faster product
    label: Tensor  # (d,)

    def experts(self, x: Tensor) -> Tensor:
        return x @ self.slopes.T

    def label_mean(self, x: Tensor) -> Tensor:
        return x @ self.label


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tau", type=float, default=1e-3)
    options.add_argument("--rows", type=int, default=2**14, help="samples a timing")
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--variance-rows", type=int, default=2**20)
    options.add_argument("--peer-rows", type=int, default=2**23)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    print(f"{'case':36}{'peer':26}{'peer':>9}{'ours':>13}{'ratio':>13}")
    for case in [problem(K, 64, generator) for K in (2, 8)]:
        compare(case, args, generator)


def problem(K: int, d: int, generator: torch.Generator) -> Problem:
    weight, slopes = torch.randn(2, K, d, generator=generator) / math.sqrt(d)
    label = torch.randn(d, generator=generator) / math.sqrt(d)
    return Problem(Affine(weight), slopes, label)


def compare(case: Problem, args, generator: torch.Generator) -> None:
    K, d = case.router.weight.shape
    x = torch.empty(args.rows, d)

    def draw() -> Tensor:
        return x.normal_(generator=generator)

    def ours(tau: float) -> Tensor:
        return risk.gap(case.router, case.experts, case.label_mean, draw(), tau)

    def peer() -> Tensor:
        return paired(case, draw(), args.tau)

    theirs = sample(peer, args.peer_rows)
    for tau in (1.0, args.tau):
        found = sample(lambda tau=tau: ours(tau), 2**17)
        check = lambda tau=tau: paired(case, draw(), tau)  # noqa: E731
        agree(found, theirs if tau == args.tau else sample(check, 2**17))
    if K == 2:
        exact = limit(case) * args.tau
        agree(found, (exact, 3 * args.tau**2 * abs(exact), 0.0))
    spread = sample(lambda: ours(10 * args.tau), args.variance_rows)
    runs = [peer, lambda: ours(args.tau), lambda: ours(1.0), lambda: ours(1e-4)]
    seconds = in_turn(runs, args)
    cost = [one[2] * s * 1e6 for one, s in zip((theirs, spread), seconds, strict=False)]
    show(f"gap, tau = {args.tau:g}, d = {d}, K = {K}", "paired losses", *cost, "s")
    show("  relative variance", "", theirs[2], spread[2], "")
    show("  time, tau = 1e-4 over 1", "", seconds[3] * 1e6, seconds[2] * 1e6, "us")


def paired(case: Problem, x: Tensor, tau: float) -> Tensor:
    """Both losses at the same x; the softmax by hand takes less time on short rows."""
    logits, f, m = case.router(x), case.experts(x), case.label_mean(x)
    top, winner = logits.max(1, keepdim=True)
    odds = logits.sub(top).div_(tau).exp_()
    soft = (odds * f).sum(1) / odds.sum(1)
    hard = f.gather(1, winner).squeeze(1)
    return (soft - m).square() - (hard - m).square()


def limit(case: Problem) -> float:
    """-E[(f_1 - f_2)^2 on the tie] p / |w_1 - w_2|, for two routers without bias."""
    normal = (case.router.weight[0] - case.router.weight[1]).double()
    contrast = (case.slopes[0] - case.slopes[1]).double()
    length = normal.norm()
    along = contrast @ normal / length
    beside = contrast.square().sum() - along.square()
    return float(-beside / length / math.sqrt(2 * math.pi))


def sample(run: Callable, n: int) -> tuple[float, float, float]:
    """Mean, standard error and relative variance of at least n samples."""
    count, first, second = 0, 0.0, 0.0
    while count < n:
        values = run().double()
        count += len(values)
        first += values.sum().item()
        second += values.square().sum().item()
    mean = first / count
    variance = second / count - mean**2
    return mean, math.sqrt(variance / count), variance / mean**2


if __name__ == "__main__":
    main()

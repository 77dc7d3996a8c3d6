"""Finite-sample regression: time a problem, against named peers. CPU, one thread.

    python benchmarks/regression.py [--problems 4096] [--repeats 5]

A row is CPU seconds a problem, draws included, in float64: ours simulates the data
through their Wishart law, the peers draw them. "lstsq" is a loop of NumPy least squares
(scikit-learn's LinearRegression without its overhead), "Cholesky" batched normal
equations in torch. "one fit" is a regression on d = 32 features; "paired" is dense and
K = 4 sparse fits on the same modular data. Peer and ours are timed in turn, the fastest
of the repeats counts, and the ratio is what to read. Before anything is timed all agree
within five standard errors with each other, and with the closed form where one exists.
"""

import argparse
import math
import time
from collections.abc import Callable

import numpy as np
import torch
from timing import agree, mean, show
from torch import Tensor

from moebook import excess, wishart

D, K, NOISE, LABEL = 32, 4, 0.25, 0.1
P = D // K


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--problems", type=int, default=4096)
    options.add_argument("--peer-problems", type=int, default=256, help="a timing")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    print(f"{'case':36}{'peer':26}{'peer':>11}{'ours':>13}{'ratio':>11}")
    for n, peer in ((256, "lstsq"), (2048, "Cholesky")):
        source = rng if peer == "lstsq" else generator
        for case, ours, theirs in (
            ("one fit", one_ours, ONE[peer]),
            ("paired", paired_ours, PAIRED[peer]),
        ):
            compare(
                f"{case}, n = {n}",
                peer,
                lambda count, f=theirs, s=source, n=n: f(count, n, s),
                lambda count, f=ours, n=n: f(count, n, generator),
                truths(case, n),
                args,
            )


def compare(case: str, peer: str, theirs: Callable, ours: Callable, truth, args):
    """Agree first, then time in turn."""
    found, other = ours(args.problems), theirs(2 * args.peer_problems)
    for mine, peers, exact in zip(found, other, truth, strict=True):
        agree(mean(mine), mean(peers), name=case)
        if exact is not None:
            agree(mean(mine), (exact, 0.0), name=case)
    best = [math.inf, math.inf]
    sizes = (args.peer_problems, args.problems)
    for _ in range(args.repeats):
        for m, (run, count) in enumerate(zip((theirs, ours), sizes, strict=True)):
            start = time.process_time()
            run(count)
            best[m] = min(best[m], (time.process_time() - start) / count)
    show(case, peer, *(1e6 * seconds for seconds in best), "us")


def truths(case: str, n: int) -> list[float | None]:
    """Closed forms of the mean excess; the dense fit of modules has none."""
    if case == "one fit":
        return [float(excess.ols_excess(n, D, 1.0))]
    residual = NOISE / (1 + NOISE) + LABEL
    return [float(excess.ols_excess(n // K, P, residual)), None]


def one_ours(count: int, n: int, generator: torch.Generator) -> list[Tensor]:
    return [wishart.regression_samples(count, D, n, generator)]


def paired_ours(count: int, n: int, generator: torch.Generator) -> list[Tensor]:
    pi, beta = [1 / K] * K, [torch.eye(P)[0]] * K
    same = (pi, [torch.eye(P)] * K, beta, NOISE, LABEL)
    return list(wishart.excess_samples(count, generator, [n // K] * K, *same))


def one_lstsq(count: int, n: int, rng: np.random.Generator) -> list[Tensor]:
    """True coefficients 0: the fit is the miss."""
    fits = []
    for _ in range(count):
        x, y = rng.standard_normal((n, D)), rng.standard_normal(n)
        fits.append(np.sum(np.linalg.lstsq(x, y, rcond=None)[0] ** 2))
    return [torch.tensor(np.array(fits))]


def paired_lstsq(count: int, n: int, rng: np.random.Generator) -> list[Tensor]:
    fits = np.empty((count, D)), np.empty((count, D))
    m = n // K
    for i in range(count):
        x = math.sqrt(NOISE) * rng.standard_normal((n, D))
        y = math.sqrt(LABEL) * rng.standard_normal(n)
        for k in range(K):
            rows, columns = slice(m * k, m * (k + 1)), slice(P * k, P * (k + 1))
            clean = rng.standard_normal((m, P))
            x[rows, columns] += clean
            y[rows] += clean[:, 0]
            fit = np.linalg.lstsq(x[rows, columns], y[rows], rcond=None)[0]
            fits[0][i, columns] = fit
        fits[1][i] = np.linalg.lstsq(x, y, rcond=None)[0]
    return losses(*map(torch.tensor, fits))


def one_cholesky(count: int, n: int, generator: torch.Generator) -> list[Tensor]:
    parts = []
    for size in chunks(count):
        x = torch.randn(size, n, D, generator=generator, dtype=torch.float64)
        y = torch.randn(size, n, generator=generator, dtype=torch.float64)
        parts.append((solve(x, y) ** 2).sum(1))
    return [torch.cat(parts)]


def paired_cholesky(count: int, n: int, generator: torch.Generator) -> list[Tensor]:
    fits = [], []
    for size in chunks(count):
        x = torch.randn(size, n, D, generator=generator, dtype=torch.float64)
        x *= math.sqrt(NOISE)
        y = torch.randn(size, n, generator=generator, dtype=torch.float64)
        y *= math.sqrt(LABEL)
        clean = torch.randn(size, n, P, generator=generator, dtype=torch.float64)
        y += clean[..., 0]
        experts = []
        for k in range(K):
            rows = slice(n // K * k, n // K * (k + 1))
            own = x[:, rows, P * k : P * (k + 1)]
            own += clean[:, rows]
            experts.append(solve(own, y[:, rows]))
        fits[0].append(torch.cat(experts, 1))
        fits[1].append(solve(x, y))
    return losses(torch.cat(fits[0]), torch.cat(fits[1]))


def solve(x: Tensor, y: Tensor) -> Tensor:
    factor = torch.linalg.cholesky(x.mT @ x)
    return torch.cholesky_solve(x.mT @ y[..., None], factor)[..., 0]


def losses(sparse: Tensor, dense: Tensor) -> list[Tensor]:
    """Excess risks of fits (count, d), by the population covariances."""
    signal = torch.zeros(D, dtype=torch.float64)
    signal[::P] = 1
    miss = sparse - signal / (1 + NOISE)
    own = (1 + NOISE) / K * (miss**2).sum(1)
    miss = dense - signal / (1 + K * NOISE)
    return [own, (1 / K + NOISE) * (miss**2).sum(1)]


def chunks(count: int, size: int = 16) -> list[int]:
    """Data of 16 problems at a time: the fastest for the peer."""
    return [min(size, count - i) for i in range(0, count, size)]


ONE = {"lstsq": one_lstsq, "Cholesky": one_cholesky}
PAIRED = {"lstsq": paired_lstsq, "Cholesky": paired_cholesky}

if __name__ == "__main__":
    main()

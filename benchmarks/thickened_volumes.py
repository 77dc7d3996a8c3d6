"""Thickened sets of ties: time to a stated error, against plain sampling. One thread.

    python benchmarks/thickened_volumes.py [--eps .001] [--rows 65536] [--repeats 15]

A row is a time to 1e-2 relative error: relative variance of a sample times 1e4 times
CPU seconds a sample, draws of x included, for d = 16 inputs, E = 8 experts, top-2 and
x ~ N(0, I). Plain sampling has relative variance 1/P - 1; it would wait too long for
its own P, so it gets ours. Peer and ours are timed in turn, the fastest of the repeats
counts, and the ratio is what to read. Before anything is timed every estimator must
agree within five standard errors with plain sampling at a width of 0.3, and at the
width in question with quadrature for independent logits and, at order one, with
boundary.mass.
"""

import argparse
import math
from collections.abc import Callable

import torch
from timing import agree, in_turn, mean
from torch import Tensor

from moebook import arrangement, boundary
from moebook.routing import Affine

K = 2
CASES = [(1, "spread"), (1, "tube"), (2, "one_sided"), (2, "spread"), (2, "tube")]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--eps", type=float, default=1e-3)
    options.add_argument("--rows", type=int, default=2**16, help="samples a timing")
    options.add_argument("--repeats", type=int, default=15)
    options.add_argument("--variance-rows", type=int, default=2**20)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    router = Affine(torch.randn(8, 16, generator=generator) / 4)
    check_iid(args, generator)
    print(f"{'case':28}{'P':>11}{'relvar':>8}{'plain':>11}{'ours':>11}{'ratio':>11}")
    for n, kind in CASES:
        compare(router, n, kind, args, generator)


def compare(router: Affine, n: int, kind: str, args, generator) -> None:
    """One thickened set: plain torch over samples in the coordinates of the tie."""
    x = torch.randn(args.variance_rows, 16, generator=generator)

    def ours(x: Tensor, eps: float = args.eps) -> Tensor:
        return arrangement.tie_samples(router, x, eps, n, K, kind, generator=generator)

    agree(mean(ours(x, 0.3)), mean(plain(router, x, 0.3, n, kind).double()), name=kind)
    values = ours(x)
    if (n, kind) == (1, "spread"):
        agree(mean(values), mean(boundary.mass(router, x, args.eps, K)), name=kind)
    share = values.mean().item()
    relvar = (values.var() / share**2).item()
    draw = drawer(args.rows, generator)
    seconds = in_turn(
        [lambda: plain(router, draw(), args.eps, n, kind), lambda: ours(draw())], args
    )
    peer, cost = (1 / share - 1) * seconds[0] * 1e4, relvar * seconds[1] * 1e4
    case = f"order {n}, {kind}, eps = {args.eps:g}"
    numbers = f"{share:>11.4g}{relvar:>8.3g}{peer:>9.4g} s{cost:>9.4g} s"
    print(f"{case:28}{numbers}{peer / cost:>11.4g}", flush=True)


def check_iid(args, generator) -> None:
    """P(s_(k) - s_(k+n) < eps) of independent logits is an integral on the line."""
    router = Affine(torch.eye(8))
    for n in (1, 2):
        x = torch.randn(args.variance_rows, 8, generator=generator)
        values = arrangement.tie_samples(
            router, x, args.eps, n, K, "one_sided", generator=generator
        )
        agree(mean(values), (iid_share(args.eps, 8, K, n), 0.0), name=f"order {n}, iid")


def plain(router: Affine, x: Tensor, eps: float, n: int, kind: str) -> Tensor:
    """Hits (m,), plain torch, as one would write it first."""
    scores = x @ router.weight.T + router.bias
    if kind == "tube":
        return plain_tube(router, scores, eps, n)
    top = scores.topk(K + n, dim=1).values
    if kind == "one_sided":
        return top[:, K - 1] - top[:, K + n - 1] < eps
    first = range(max(0, K - n), K)
    return torch.stack([top[:, a] - top[:, a + n] < eps for a in first]).any(0)


def plain_tube(router: Affine, scores: Tensor, eps: float, n: int) -> Tensor:
    """Sets of n + 1 with active and idle experts, and the distance to their tie."""
    top, place = scores.topk(K + 1, dim=1)
    hit = torch.zeros(len(scores), dtype=torch.bool)
    longest = torch.cdist(router.weight, router.weight).max()
    near = (top[:, K - 1] - top[:, K] < eps * longest).nonzero().squeeze(1)
    scores, found = scores[near], hit[near]
    active = torch.zeros_like(scores, dtype=torch.bool)
    active.scatter_(1, place[near, :K], True)
    for tied in torch.combinations(torch.arange(scores.shape[1]), n + 1):
        rows = router.weight[tied[1:]] - router.weight[tied[0]]
        apart = scores[:, tied[1:]] - scores[:, tied[:1]]
        far = (apart @ torch.linalg.pinv(rows).T).norm(dim=1)
        count = active[:, tied].sum(1)
        found |= (far < eps) & (count > 0) & (count <= n)
    hit[near] = found
    return hit


def iid_share(eps: float, E: int, k: int, n: int) -> float:
    """Some score is the k-th and at least n follow it within eps, trapezoid rule."""
    y = torch.linspace(-10, 10, 40001, dtype=torch.float64)
    phi = torch.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    ndtr, total = torch.special.ndtr, 0.0
    # The density of y averages over the window, where a difference would round.
    node = eps * (torch.arange(32, dtype=torch.float64) + 0.5) / 32
    near = torch.exp(-((y[:, None] - node) ** 2) / 2).mean(1) * eps
    near /= math.sqrt(2 * math.pi)
    for m in range(n, E - k + 1):
        ways = math.comb(E - k, m) * near**m * ndtr(y - eps) ** (E - k - m)
        total = total + ways
    inside = phi * ndtr(-y) ** (k - 1) * total
    return E * math.comb(E - 1, k - 1) * float(torch.trapezoid(inside, y))


def drawer(n: int, generator: torch.Generator) -> Callable[[], Tensor]:
    """Draws of x (n, 16) into one buffer, float32."""
    x = torch.empty(n, 16)
    return lambda: x.normal_(generator=generator)


if __name__ == "__main__":
    main()

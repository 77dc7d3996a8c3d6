"""Sparse layer: forward and backward, against an eager loop over the experts. CPU.

    python benchmarks/sparse_layer.py [--tokens 4096] [--experts 64] [--threads 1]

Equal weights and equal tokens; gradients reach tokens, router and experts. Peers and
ours are timed in turn, the fastest of the repeats counts, and the ratio is what to
read: peer over ours, or routing over plain top-k. Before anything is timed outputs must
agree within 1e-5 and gradients within 1e-4 of their largest entry.
"""

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from moebook import smoothing
from moebook.mixture import MixtureOfExperts


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, default=4096)
    options.add_argument(
        "--width", type=int, default=64, help="inputs and hidden units"
    )
    options.add_argument("--experts", type=int, default=64)
    options.add_argument("--active", type=int, default=2)
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--repeats", type=int, default=25)
    options.add_argument("--seed", type=int, default=2026)
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    generator = torch.Generator().manual_seed(args.seed)
    shape = args.tokens, args.width
    x = torch.randn(shape, generator=generator).requires_grad_()
    slope = torch.randn(shape, generator=generator)
    layers = {routing: build(routing, args) for routing in ("top_k", "smooth")}
    fit_width(layers["smooth"], x, args)
    plain = layers["top_k"]
    runs = {f"ours, {name}": (layer, layer) for name, layer in layers.items()}
    runs["loop, expert by expert"] = (plain, lambda x: eager_loop(plain, x))
    runs["loop, experts unbound"] = (plain, plain.forward_by_expert)
    seconds = in_turn(runs, x, slope, args.repeats)
    for name, (layer, _) in runs.items():
        active = (layer.gates(x) != 0).sum(1).double().mean().item()
        print(f"{name:26}{active:6.3f} active{seconds[name] * 1e3:9.4g} ms", flush=True)
    ours = seconds["ours, top_k"]
    for name in runs:
        peer = name.startswith("loop")
        words = "over ours, top_k" if peer else "over top_k"
        if name != "ours, top_k":
            print(f"{name:26}{words:18}{seconds[name] / ours:8.3f}")


def build(routing: str, args) -> MixtureOfExperts:
    generator = torch.Generator().manual_seed(args.seed)
    d, E, k = args.width, args.experts, args.active
    layer = MixtureOfExperts(d, d, E, k, generator, routing=routing)
    for run in (eager_loop, MixtureOfExperts.forward_by_expert):
        check(layer, lambda x, run=run: run(layer, x))
    return layer


def check(layer: MixtureOfExperts, run: Callable[[Tensor], Tensor]) -> None:
    """Outputs and all gradients of the layer against those of a loop."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, layer.router.shape[1], generator=generator).requires_grad_()
    slope = torch.randn(x.shape, generator=generator)
    ours, theirs = layer(x), run(x)
    pairs = [(ours, theirs, 1e-5)]
    wanted = [x, layer.router, layer.inner, layer.outer]
    for a, b in zip(
        *(torch.autograd.grad(y, wanted, slope) for y in (ours, theirs)), strict=True
    ):
        pairs.append((a, b, 1e-4 * b.abs().max().item()))
    for a, b, allowed in pairs:
        if not (a - b).abs().max().item() <= allowed:
            raise SystemExit(f"wrong before fast: off by {(a - b).abs().max():.3g}")


def eager_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """As one would write it first, and as libraries do without a fused kernel."""
    gates, out = layer.gates(x), torch.zeros_like(x)
    for j in range(len(layer.inner)):
        (token,) = gates[:, j].detach().nonzero(as_tuple=True)
        spoken = layer.activation(x[token] @ layer.inner[j]) @ layer.outer[j]
        out.index_add_(0, token, spoken * gates[token, j, None])
    return out


def fit_width(layer: MixtureOfExperts, x: Tensor, args) -> None:
    """The width at which tokens have k + 1/2 experts, from the Gaussian formula."""
    spread = (x.detach() @ layer.router.detach().T).std().item()
    eps = spread * smoothing.budget_eps(args.experts, args.active)
    with torch.no_grad():
        layer.eta.fill_(math.log(math.expm1(eps)))


def in_turn(runs: dict, x: Tensor, slope: Tensor, repeats: int) -> dict[str, float]:
    """Seconds a forward and backward pass of each run, the fastest of the repeats."""
    # Time on the wall counts threads; that of one thread is not disturbed by others.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    best = dict.fromkeys(runs, math.inf)
    for _ in range(repeats):
        for name, (layer, run) in runs.items():
            wanted = [x, layer.router, layer.inner, layer.outer]
            start = clock()
            torch.autograd.grad(run(x), wanted, slope)
            best[name] = min(best[name], clock() - start)
    return best


if __name__ == "__main__":
    main()

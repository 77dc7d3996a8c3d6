"""What the benchmarks share: averages, agreement before speed, times taken in turn."""

import math
import time
from collections.abc import Callable, Sequence

from torch import Tensor


def mean(values: Tensor) -> tuple[float, float]:
    """Mean and standard error, (n,) -> two numbers."""
    return values.mean().item(), (values.var() / len(values)).sqrt().item()


def agree(
    found: tuple[float, float],
    truth: tuple[float, float],
    *,
    bias: float = 0.0,
    name: str = "",
) -> None:
    """Stop unless two (value, standard error) lie within five errors and the bias."""
    error = math.hypot(found[1], truth[1])
    if not abs(found[0] - truth[0]) <= 5 * error + bias:
        message = f"{found[0]:.8g} +- {error:.2g}, not {truth[0]:.8g}"
        raise SystemExit(f"wrong before fast: {name + ': ' if name else ''}{message}")


def in_turn(runs: Sequence[Callable], args) -> list[float]:
    """CPU seconds a sample of each run, the fastest of the repeats."""
    best = [math.inf] * len(runs)
    for _ in range(args.repeats):
        for m, run in enumerate(runs):
            start = time.process_time()
            run()
            best[m] = min(best[m], time.process_time() - start)
    return [seconds / args.rows for seconds in best]


def show(case: str, peer: str, theirs: float, ours: float, unit: str = "s") -> None:
    """One row: what, against whom, both costs, their ratio."""
    cells = f"{theirs:>9.4g} {unit:2}{ours:>10.4g} {unit:2}"
    print(f"{case:36}{peer:26}{cells}{theirs / ours:>10.4g}", flush=True)

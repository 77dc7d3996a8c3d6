"""Samples in, `Estimate` out. Sums are float64, counts are int64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from scipy.special import betaincinv, ndtr
from torch import Tensor

from moebook.blocks import Blocks, Moments, default_device
from moebook.claims import Estimate, Z

#: A mean is not trusted when one sample carries this share of the spread.
LARGEST_SHARE = 0.01
#: Nor when the spreads of two halves differ by this factor.
HALVES_DIFFER = 4.0
#: Fewer samples than this do not carry a five-sigma bar.
FEWEST = 1000


def mean(samples: Tensor, *, bias: float = 0.0) -> Estimate:
    """Mean of samples with its standard error, (n,) -> Estimate.

    The estimate carries a warning, and no verdict is confident with it, where the
    variance looks infinite. Raises ValueError for a wrong shape, fewer than two
    samples, NaN, or samples that are all equal. Source: ours.
    """
    values = torch.as_tensor(samples)
    if values.ndim != 1 or len(values) < 2:
        raise ValueError(
            "a mean needs one value a sample and at least two samples, shape (n,); "
            f"got shape {tuple(values.shape)}"
        )
    half = len(values) // 2
    halves = [Moments.of(part, "the sample") for part in (values[:half], values[half:])]
    return _from_moments([row[0] for row in halves], bias)


def proportion(hits: int, n: int, *, bias: float = 0.0) -> Estimate:
    """Share of hits among n draws, with the exact (Clopper-Pearson) interval at Z.

    Right at 0 and at n hits, where the spread of the sample is zero.
    Raises ValueError unless 0 <= hits <= n and n >= 1.
    Source: Clopper and Pearson (1934).
    """
    hits, n = int(hits), int(n)
    if n < 1 or not 0 <= hits <= n:
        raise ValueError(
            f"a proportion needs 0 <= hits <= n and n >= 1; got {hits} hits of {n}"
        )
    tail = float(ndtr(-Z))
    low = float(betaincinv(hits, n - hits + 1, tail)) if hits else 0.0
    # The upper end from the misses: a quantile near 1 would lose its digits.
    high = 1 - float(betaincinv(n - hits, hits + 1, tail)) if hits < n else 1.0
    share = hits / n
    return Estimate(share, math.sqrt(share * (1 - share) / n), bias, (low, high))


def paired(first: Tensor, second: Tensor, *, bias: float = 0.0) -> Estimate:
    """Mean of first - second on the same draws, (n,), (n,) -> Estimate.

    Raises ValueError when the shapes differ or the difference never varies.
    Source: common random numbers.
    """
    first, second = torch.as_tensor(first), torch.as_tensor(second)
    if first.shape != second.shape:
        raise ValueError(
            "paired samples come from the same draws, so their shapes agree; got "
            f"{tuple(first.shape)} and {tuple(second.shape)}"
        )
    return mean(first.double() - second.double(), bias=bias)


def slope(scales: Sequence[float], values, *, bias: float = 0.0) -> Estimate:
    """Rate of a power law: least-squares slope of log value on log scale.

    `values` is a sample (n, m) whose columns share their draws, or m independent
    Estimates. The error is that of the logarithms to first order; the second order,
    half a relative variance of each mean, and the bias of each Estimate are added to
    `bias`, which must bound what a finite ladder adds to the limit.
    Raises ValueError for fewer than two scales, a scale that is not positive, or a
    mean that is not positive. Source: ours.
    """
    x = torch.log(torch.as_tensor(scales, dtype=torch.float64))
    if x.ndim != 1 or len(x) < 2 or not x.isfinite().all() or x.min() == x.max():
        raise ValueError(
            f"a slope needs at least two different positive scales; got {scales}"
        )
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    if isinstance(values, Tensor):
        return _slope_of_samples(weights, values.double(), bias)
    return _slope_of_estimates(weights, list(values), bias)


def _slope_of_samples(weights: Tensor, values: Tensor, bias: float) -> Estimate:
    if values.ndim != 2 or values.shape[1] != len(weights):
        raise ValueError(
            f"a slope over {len(weights)} scales needs samples of shape "
            f"(n, {len(weights)}); got {tuple(values.shape)}"
        )
    centre = values.mean(0)
    _require_positive(centre)
    # First order of the logarithm of each mean: its relative deviation.
    found = mean((values / centre - 1) @ weights + float(weights @ centre.log()))
    relative = values.var(0) / centre**2 / len(values)
    second = float((weights.abs() * relative).sum()) / 2
    return Estimate(found.value, found.stderr, bias + second, warning=found.warning)


def _slope_of_estimates(weights: Tensor, values: list, bias: float) -> Estimate:
    if len(values) != len(weights):
        raise ValueError(f"{len(weights)} scales need as many values; got {values}")
    centre = torch.tensor([v.value for v in values], dtype=torch.float64)
    _require_positive(centre)
    relative = torch.tensor([v.stderr for v in values]).double() / centre
    shift = torch.tensor([v.bias for v in values]).double() / centre + relative**2 / 2
    return Estimate(
        float(weights @ centre.log()),
        float((weights * relative).square().sum().sqrt()),
        bias + float(weights.abs() @ shift),
        warning=" ".join(sorted({v.warning for v in values if v.warning})),
    )


def _require_positive(centre: Tensor) -> None:
    if not (centre > 0).all():
        raise ValueError(
            "the logarithm of a mean needs positive means; got "
            f"{[float(c) for c in centre]}: enlarge the sample or the scales"
        )


def monte_carlo(
    sampler: Callable[[torch.Generator, int], Tensor],
    *,
    seed: int,
    label: str = "",
    rel: float | None = None,
    absolute: float | None = None,
    budget: int = 2**24,
    block: int = 2**14,
    bias: float = 0.0,
    device: str | torch.device | None = None,
    checkpoint: str | Path | None = None,
) -> Estimate | tuple[Estimate, ...]:
    """Mean of `sampler(generator, n) -> (n,) or (n, m)` to a wanted precision.

    Draws keyed blocks until the standard error is at most `rel` times the value (or
    `absolute`), for every column, or `budget` samples are spent. Block b has its own
    generator, made from (seed, label, b): threads, ranks and order of work do not
    change a bit of the answer. With `checkpoint`, a folder, finished blocks are kept
    there and a rerun goes on from them. Under `torchrun` the ranks share the blocks.
    Returns one Estimate, or m of them.
    Raises ValueError for a sampler of the wrong shape, values that are not finite, or
    a checkpoint of another run. Source: ours; merging by Chan, Golub and LeVeque.
    """
    for name, wanted in (("rel", rel), ("absolute", absolute)):
        if wanted is not None and not wanted > 0:
            raise ValueError(f"a precision is positive; got {name}={wanted}")
    if block < 2 or budget < block:
        raise ValueError(
            f"a run needs budget >= block >= 2; got budget={budget}, block={block}"
        )
    blocks = Blocks(sampler, seed, label, block, default_device(device), checkpoint)
    most = budget // block
    done, goal = 0, min(most, 8)
    with blocks.progress(most) as advance:
        while True:
            blocks.fill(done, goal, advance)
            done = goal
            found = [_from_moments(column, bias) for column in blocks.columns()]
            worst = max(_excess(estimate, rel, absolute) for estimate in found)
            if done == most or worst <= 1:
                return tuple(found) if blocks.vector else found[0]
            # Aim at the blocks that the present spread asks for, never far ahead of it.
            goal = min(most, max(done + 1, math.ceil(done * min(worst**2, 4))))


def _excess(found: Estimate, rel: float | None, absolute: float | None) -> float:
    """By what factor the standard error exceeds the wanted one; no wish: infinity."""
    wanted = max((rel or 0) * abs(found.value), absolute or 0)
    return found.stderr / wanted if wanted > 0 else math.inf


def _from_moments(parts: Sequence[Moments], bias: float) -> Estimate:
    whole = Moments.merge(parts)
    if whole.m2 <= 1e-24 * whole.n * whole.mean**2:
        raise ValueError(
            f"all {whole.n} samples equal {whole.mean:g}, so their spread says nothing "
            "about the error: for a frequency use estimate.proportion(hits, n); for a "
            "number known without sampling pass it exactly, with its proved bias"
        )
    stderr = math.sqrt(whole.m2 / (whole.n - 1) / whole.n)
    return Estimate(whole.mean, stderr, bias, warning=_distrust(parts, whole))


def _distrust(parts: Sequence[Moments], whole: Moments) -> str:
    """Why this error bar cannot be trusted; empty where nothing speaks against it."""
    if whole.n < FEWEST:
        return f"{whole.n} samples carry no five-sigma bar: draw at least {FEWEST}"
    largest = max(whole.high - whole.mean, whole.mean - whole.low) ** 2 / whole.m2
    # Up to 2500 samples even a Gaussian may put five sigmas on one of them.
    if largest > max(LARGEST_SHARE, Z**2 / whole.n):
        return (
            "one sample carries too much of the spread to trust its error bar: "
            "the variance may be infinite, or the event rarer than the sample can show"
        )
    first, second = (Moments.merge(parts[i::2]) for i in (0, 1))
    spreads = sorted(half.m2 / half.n for half in (first, second))
    if spreads[1] > HALVES_DIFFER * spreads[0]:
        return "two halves of the sample disagree about its spread: it may be infinite"
    return ""

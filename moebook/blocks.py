"""Keyed blocks: who computes a block, on what and when changes no bit of the answer.

Block b draws from its own generator, made from (seed, label, b). A finished block is
five float64 numbers a column; they are merged in block order.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

#: Rows that are summed at once, on one thread.
CHUNK = 2**14


class Moments(NamedTuple):
    """Count, mean, sum of squared deviations, smallest and largest of a sample."""

    n: int
    mean: float
    m2: float
    low: float
    high: float

    @staticmethod
    def of(values: Tensor, what: str) -> list[Moments]:
        """Moments of each column, (n,) or (n, m) -> m Moments."""
        bad = int((~values.isfinite()).sum())
        if bad:
            raise ValueError(
                f"{bad} of {values.numel()} values of {what} are not finite: "
                "mend the sampler, a NaN has no mean"
            )
        if len(values) > CHUNK:
            # One long sum would be split over threads, and its last bits with it.
            parts = [Moments.of(part, what) for part in values.split(CHUNK)]
            return [Moments.merge(column) for column in zip(*parts, strict=True)]
        columns = values.double().reshape(len(values), -1)
        centre = columns.mean(0)
        m2 = (columns - centre).square().sum(0)
        low, high = columns.aminmax(dim=0)
        rows = torch.stack([centre, m2, low, high], 1).tolist()
        return [Moments(len(values), *row) for row in rows]

    @staticmethod
    def merge(parts: Sequence[Moments]) -> Moments:
        """Moments of the union, in the given order (Chan, Golub and LeVeque 1983)."""
        n, mean, m2 = 0, 0.0, 0.0
        for part in parts:
            total = n + part.n
            step = part.mean - mean
            mean += step * part.n / total
            m2 += part.m2 + step**2 * n * part.n / total
            n = total
        low, high = min(p.low for p in parts), max(p.high for p in parts)
        return Moments(n, mean, m2, low, high)


def default_device(device: str | torch.device | None = None) -> torch.device:
    """The argument, else MOEBOOK_DEVICE, else CUDA if there, else CPU."""
    found = device or os.environ.get("MOEBOOK_DEVICE")
    return torch.device(found or ("cuda" if torch.cuda.is_available() else "cpu"))


def block_generator(
    seed: int, label: str, block: int, device: str | torch.device = "cpu"
) -> torch.Generator:
    """The generator of one block, from (seed, label, block)."""
    key = hashlib.blake2b(f"{seed}/{label}/{block}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "big") >> 1)


class Blocks:
    """The table of finished blocks of one run; its only state is what is finished."""

    def __init__(self, sampler: Callable, seed, label, size, device, checkpoint):
        self.sampler, self.seed, self.label = sampler, seed, label
        self.size, self.device = size, device
        self.rank, self.world = _ranks()
        self.vector: bool | None = None
        self.rows: list[list[Moments]] = []
        self.file = Path(checkpoint) / f"rank{self.rank}.txt" if checkpoint else None
        self.kept = self._load() if self.file else {}

    @property
    def _key(self) -> str:
        return f"{self.seed} {self.label!r} {self.size} {self.device.type}"

    def fill(self, start: int, stop: int, advance: Callable[[int], None]) -> None:
        """Finish the blocks start..stop-1: compute this rank's, then exchange."""
        mine = {}
        for b in range(start, stop):
            if b % self.world == self.rank:
                mine[b] = self.kept.get(b) or self._compute(b)
            advance(1)
        self.rows += _exchange(mine, start, stop, self.world)
        if self.vector is None:
            self.vector = len(self.rows[0]) > 1

    def columns(self) -> list[list[Moments]]:
        """The finished blocks, column by column, in block order."""
        return [list(column) for column in zip(*self.rows, strict=True)]

    def _compute(self, b: int) -> list[Moments]:
        generator = block_generator(self.seed, self.label, b, self.device)
        values = self.sampler(generator, self.size)
        if values.ndim not in (1, 2) or len(values) != self.size:
            raise ValueError(
                f"the sampler was asked for {self.size} samples, shape (n,) or (n, m); "
                f"got shape {tuple(values.shape)}"
            )
        row = Moments.of(values, f"block {b}")
        if self.file:
            self._keep(b, row)
        return row

    def _keep(self, b: int, row: list[Moments]) -> None:
        numbers = [float(x).hex() for column in row for x in column]
        new = not self.file.exists()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a") as file:
            if new:
                file.write(f"{self._key}\n")
            file.write(" ".join([str(b), *numbers]) + "\n")

    def _load(self) -> dict[int, list[Moments]]:
        """Finished blocks of any earlier run of the same key, by any rank."""
        kept = {}
        for path in sorted(self.file.parent.glob("rank*.txt")):
            # A killed run may leave half a line: only what ends in a newline counts.
            lines = [x for x in path.read_text().splitlines(True) if x.endswith("\n")]
            if lines and lines[0].strip() != self._key:
                raise ValueError(
                    f"the checkpoint {path} is of the run {lines[0].strip()!r}, not of "
                    f"{self._key!r}: name another folder, or delete this one"
                )
            for line in lines[1:]:
                b, *numbers = line.split()
                x = [float.fromhex(number) for number in numbers]
                groups = [x[i : i + 5] for i in range(0, len(x), 5)]
                kept[int(b)] = [Moments(int(g[0]), *g[1:]) for g in groups]
        return kept

    @contextmanager
    def progress(self, total: int):
        """A bar on a terminal, silence elsewhere and on all ranks but the first."""
        silent = None if self.rank == 0 and "CI" not in os.environ else True
        name = self.label or "samples"
        with tqdm(total=total, desc=name, unit="block", disable=silent) as bar:
            yield bar.update


def _ranks() -> tuple[int, int]:
    """Rank and world size; joins the group that torchrun announces."""
    if not dist.is_available():
        return 0, 1
    if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The exchanged tables live on the CPU, whatever device drew the samples.
        dist.init_process_group("gloo")
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _exchange(mine: dict, start: int, stop: int, world: int) -> list[list[Moments]]:
    """Give every rank every block. Each row has one owner, so the sum adds zeros."""
    if world == 1:
        return [mine[b] for b in range(start, stop)]
    width = torch.tensor(max((len(row) for row in mine.values()), default=0))
    dist.all_reduce(width, dist.ReduceOp.MAX)
    table = torch.zeros(stop - start, int(width), 5, dtype=torch.float64)
    for b, row in mine.items():
        table[b - start] = torch.tensor(row, dtype=torch.float64)
    dist.all_reduce(table)
    return [[Moments(int(r[0]), *r[1:]) for r in row] for row in table.tolist()]

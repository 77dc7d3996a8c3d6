"""Estimates: coverage on laws with known answers, refusals, keyed blocks, ranks."""

import math
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from scipy import stats

from moebook import Z, estimate
from moebook.blocks import Moments, block_generator, default_device


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def square(g, n):
    """A sampler with mean 1 and variance 2."""
    return torch.randn(n, generator=g, dtype=torch.float64) ** 2


def two(g, n):
    x = torch.randn(n, generator=g)
    return torch.stack([x**2, x**4], 1)


# --- mean, proportion, paired ------------------------------------------------------


def test_mean_and_its_error_are_the_textbook_ones():
    x = torch.rand(5_000, generator=generator(), dtype=torch.float64)
    found = estimate.mean(x, bias=0.25)
    assert found.value == pytest.approx(float(x.mean()), rel=1e-12)
    assert found.stderr == pytest.approx(float(x.std()) / math.sqrt(5_000), rel=1e-12)
    assert found.resolution == pytest.approx(Z * found.stderr + 0.25, rel=1e-12)


def test_mean_of_float32_and_of_booleans_is_summed_in_float64():
    big = torch.tensor([1e8, 1e8 + 8] * 1_000, dtype=torch.float32)
    assert estimate.mean(big).value == 1e8 + 4
    assert estimate.mean(torch.arange(2_000) % 4 == 0).value == 0.25


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        (torch.zeros(0), "at least two"),
        (torch.zeros(1), "at least two"),
        (torch.zeros(4, 2), r"shape \(4, 2\)"),
        (torch.ones(10), "all 10 samples equal 1"),
        (torch.full((10,), 1e-200, dtype=torch.float64), "samples equal"),
        (torch.tensor([1.0, math.nan, 2.0]), "not finite"),
        (torch.tensor([1.0, math.inf, 2.0]), "not finite"),
    ],
)
def test_mean_refuses(samples, words):
    with pytest.raises(ValueError, match=words):
        estimate.mean(samples)


@pytest.mark.parametrize(("hits", "n"), [(0, 1), (0, 1000), (3, 7), (1000, 1000)])
def test_proportion_has_the_exact_interval(hits, n):
    """At either end the law of the hits has the tail Z prescribes, by definition."""
    found, tail = estimate.proportion(hits, n), stats.norm.sf(Z)
    if hits:
        beyond = stats.binom.sf(hits - 1, n, found.low)
        assert beyond == pytest.approx(tail, rel=1e-6)
    else:
        assert found.low == 0
    if hits < n:
        assert stats.binom.cdf(hits, n, found.high) == pytest.approx(tail, rel=1e-6)
    else:
        assert found.high == 1


@pytest.mark.parametrize(("hits", "n"), [(-1, 5), (6, 5), (0, 0)])
def test_proportion_refuses(hits, n):
    with pytest.raises(ValueError, match="0 <= hits <= n"):
        estimate.proportion(hits, n)


def test_pairing_removes_the_common_part():
    x = torch.randn(10_000, generator=generator(1))
    y = x + 0.1 * torch.rand(10_000, generator=generator(2))
    apart = math.hypot(estimate.mean(x).stderr, estimate.mean(y).stderr)
    assert estimate.paired(y, x).stderr < apart / 20
    with pytest.raises(ValueError, match="shapes agree"):
        estimate.paired(x, y[:10])
    with pytest.raises(ValueError, match="samples equal 0"):
        estimate.paired(x, x)


# --- slope -------------------------------------------------------------------------


def test_slope_recovers_a_rate_from_shared_draws_and_from_estimates():
    scales = [0.1, 0.2, 0.4]
    noise = 1 + 0.1 * torch.randn(100_000, generator=generator(3)).double()
    samples = torch.stack([noise * s**1.5 for s in scales], 1)
    jitter = 1e-3 * torch.randn(100_000, 3, generator=generator(4)).double()
    together = estimate.slope(scales, samples * (1 + jitter))
    alone = estimate.slope(scales, [estimate.mean(c) for c in samples.T])
    for found in (together, alone):
        assert found.low < 1.5 < found.high
    # Shared draws cancel in the slope; independent estimates cannot know that.
    assert together.stderr < alone.stderr / 10


def test_slope_adds_the_bias_of_its_points():
    points = [estimate.Estimate(s, 1e-6, bias=0.01 * s) for s in (1.0, math.e)]
    assert estimate.slope([1, math.e], points).bias == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(
    ("scales", "values", "words"),
    [
        ([1.0], torch.ones(5, 1), "two different positive scales"),
        ([0.0, 1.0], torch.ones(5, 2), "two different positive scales"),
        ([2.0, 2.0], torch.ones(5, 2), "two different positive scales"),
        ([1.0, 2.0], torch.ones(5, 3), r"shape \(n, 2\)"),
        ([1.0, 2.0], -torch.ones(5, 2), "positive means"),
        ([1.0, 2.0], [], "as many values"),
    ],
)
def test_slope_refuses(scales, values, words):
    with pytest.raises(ValueError, match=words):
        estimate.slope(scales, values)


# --- monte_carlo -------------------------------------------------------------------


def test_it_stops_at_the_wanted_precision():
    found = estimate.monte_carlo(square, seed=1, rel=3e-3)
    assert found.stderr <= 3e-3 * found.value
    assert found.low < 1 < found.high
    wide = estimate.monte_carlo(square, seed=1, absolute=0.02)
    assert 0.003 < wide.stderr <= 0.02


def test_it_stops_at_the_budget_and_says_the_error_it_has():
    found = estimate.monte_carlo(square, seed=1, rel=1e-9, budget=2**15)
    assert found.stderr == pytest.approx(math.sqrt(2 / 2**15), rel=0.1)


def test_columns_share_their_draws_and_all_reach_the_precision():
    second, fourth = estimate.monte_carlo(two, seed=2, rel=5e-3)
    assert second.low < 1 < second.high
    assert fourth.low < 3 < fourth.high
    assert fourth.stderr <= 5e-3 * fourth.value
    assert isinstance(
        estimate.monte_carlo(square, seed=2, budget=2**15), estimate.Estimate
    )


def test_another_seed_and_another_label_are_other_streams():
    runs = {
        estimate.monte_carlo(square, seed=s, label=label, budget=2**15).value
        for s in (1, 2)
        for label in ("", "a")
    }
    assert len(runs) == 4


def test_a_block_is_the_same_alone_and_in_a_run():
    found = estimate.monte_carlo(square, seed=5, label="x", budget=2**14, block=2**12)
    alone = [square(block_generator(5, "x", b), 2**12) for b in range(4)]
    parts = [Moments.of(values, "b")[0] for values in reversed(alone)]
    assert Moments.merge(parts[::-1]).mean == found.value


def test_merging_keeps_digits_that_a_running_sum_of_squares_loses():
    x = 1e9 + torch.rand(10_000, generator=generator(7), dtype=torch.float64)
    parts = [Moments.of(part, "b")[0] for part in x.split(100)]
    whole = Moments.merge(parts)
    exact = float((x - 1e9).var(correction=0))
    # A float64 near 1e9 has a step of 1e-7, against a spread of 0.3.
    assert whole.m2 / whole.n == pytest.approx(exact, rel=1e-5)
    naive = float((x**2).mean() - x.mean() ** 2)
    assert abs(naive - exact) > exact / 2


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        (lambda g, n: torch.zeros(n, 2, 2), "shape"),
        (lambda g, n: torch.zeros(n - 1), "asked for"),
        (lambda g, n: torch.full((n,), math.nan), "not finite"),
        (lambda g, n: torch.ones(n), "samples equal 1"),
    ],
)
def test_it_refuses_a_bad_sampler(sampler, words):
    with pytest.raises(ValueError, match=words):
        estimate.monte_carlo(sampler, seed=0, budget=2**15)


@pytest.mark.parametrize(
    "options", [{"rel": 0}, {"rel": -1}, {"absolute": 0}, {"budget": 10}, {"block": 1}]
)
def test_it_refuses_bad_options(options):
    with pytest.raises(ValueError, match="got"):
        estimate.monte_carlo(square, seed=0, **options)


def test_device_is_the_argument_then_the_environment(monkeypatch):
    monkeypatch.setenv("MOEBOOK_DEVICE", "meta")
    assert default_device().type == "meta"
    assert default_device("cpu").type == "cpu"


def test_silent_when_not_a_terminal(capfd):
    estimate.monte_carlo(square, seed=1, budget=2**16)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("n", [2**14, 2**20])
def test_one_thread_and_two_give_the_same_bits(n):
    x = torch.rand(n, generator=generator(9))
    threads, found = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        found.append(estimate.mean(x))
    torch.set_num_threads(threads)
    assert found[0] == found[1]


# --- interrupt, resume, ranks ------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupted_after(count):
    left = [count]

    def sampler(g, n):
        left[0] -= 1
        if left[0] < 0:
            raise Interrupted
        return square(g, n)

    return sampler


def test_an_interrupted_run_goes_on_without_loss(tmp_path):
    plain = estimate.monte_carlo(square, seed=3, budget=2**18)
    options = {"seed": 3, "budget": 2**18, "checkpoint": tmp_path}
    with pytest.raises(Interrupted):
        estimate.monte_carlo(interrupted_after(11), **options)
    # Only the five missing blocks are drawn again, and every bit agrees.
    assert estimate.monte_carlo(interrupted_after(5), **options) == plain
    assert estimate.monte_carlo(interrupted_after(0), **options) == plain


def test_any_order_of_blocks_gives_the_same_bits(tmp_path):
    options = {"seed": 3, "budget": 2**17, "checkpoint": tmp_path}
    first = estimate.monte_carlo(two, **options)
    file = tmp_path / "rank0.txt"
    head, *lines = file.read_text().splitlines(True)
    order = torch.randperm(len(lines), generator=generator(1)).tolist()
    file.write_text(head + "".join(lines[i] for i in order) + "7 0x1.0p")
    assert estimate.monte_carlo(two, **options) == first


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    estimate.monte_carlo(square, seed=3, budget=2**15, checkpoint=tmp_path)
    with pytest.raises(ValueError, match="another folder"):
        estimate.monte_carlo(square, seed=4, budget=2**15, checkpoint=tmp_path)


RANKED = """
import sys, time, torch, torch.distributed as dist
from moebook import estimate
torch.set_num_threads(1)
pause = float(sys.argv[2])
def sampler(g, n):
    time.sleep(pause)
    x = torch.randn(n, generator=g)
    return torch.stack([x**2, x**4], 1)
found = estimate.monte_carlo(
    sampler, seed=8, label="ranks", rel=4e-3, block=2**12,
    checkpoint=sys.argv[1] or None,
)
if not dist.is_initialized() or dist.get_rank() == 0:
    print(*[f"{e.value.hex()} {e.stderr.hex()}" for e in found])
if dist.is_initialized():
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranked(tmp_path_factory):
    script = tmp_path_factory.mktemp("ranks") / "run.py"
    script.write_text(RANKED)

    def command(ranks, checkpoint="", pause="0"):
        launch = ["-m", "torch.distributed.run", "--standalone"]
        launch += [f"--nproc-per-node={ranks}"]
        start = [sys.executable, *(launch if ranks > 1 else [])]
        return [*start, str(script), str(checkpoint), pause]

    return command


def output(command):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "CI": "true"}


def test_ranks_give_the_same_bits(ranked):
    """Value and error are bit-identical for 1, 2 and 3 ranks."""
    alone = output(ranked(1))
    assert len(alone.split()) == 4
    assert output(ranked(2)) == alone
    assert output(ranked(3)) == alone


def test_finished_blocks_survive_a_kill(ranked, tmp_path):
    """A killed pair of ranks leaves blocks; the rerun uses them, with the same bits."""
    slow = subprocess.Popen(
        ranked(2, tmp_path, "0.1"),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 100
    while finished_blocks(tmp_path) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(slow.pid, signal.SIGKILL)
    slow.wait()
    kept = finished_blocks(tmp_path)
    assert kept >= 4
    # One rank finishes what two ranks began.
    assert output(ranked(1, tmp_path)) == output(ranked(1))
    assert finished_blocks(tmp_path) > kept


def finished_blocks(folder):
    texts = [path.read_text() for path in folder.glob("rank*.txt")]
    return sum(max(0, text.count("\n") - 1) for text in texts)

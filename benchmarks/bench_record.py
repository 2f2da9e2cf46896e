"""What `record` costs at 1 and at 4 ranks (gloo), against a bare all_reduce of the same payload.

python benchmarks/bench_record.py

Both run once in each round, in turn and in the same processes. Times are medians of the calling
thread of rank 0.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tokrate import ThroughputMeter, TokenCounts
from tokrate.window import Report

ROWS, LENGTH = 8, 4096
ROUNDS, SETTLE_ROUNDS = 1000, 100
Call = Callable[[], object]


def interleaved(calls: dict[str, Call], before_each: Call) -> dict[str, float]:
    """Median microseconds of each call."""
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + SETTLE_ROUNDS):
        for name, call in calls.items():
            before_each()
            start_ns = time.perf_counter_ns()
            call()
            spent_ns = time.perf_counter_ns() - start_ns
            if number >= SETTLE_ROUNDS:
                times_us[name].append(spent_ns / 1000)
    return {name: statistics.median(times) for name, times in times_us.items()}


def show(title: str, medians: dict[str, float], unit: str) -> None:
    """A table of ratios; the first row is the baseline."""
    baseline = next(iter(medians.values()))
    print(f"\n{title:66}{unit:>12}{'ratio':>8}")
    for name, median in medians.items():
        print(f"  {name:64}{median:12.1f}{median / baseline:8.2f}")


def settled_meter() -> ThroughputMeter:
    """A meter whose first window, which is checked in full, lies behind it."""
    meter = ThroughputMeter()
    meter.record(0)
    return meter


def bench_record(rank: int, ranks: int, meeting_point: str) -> None:
    """Run by each of the ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting_point}", rank=rank, world_size=ranks)
    payload = torch.zeros(len(Report._fields), dtype=torch.int64)
    meter = settled_meter()
    counts = TokenCounts(ROWS * LENGTH, 13_000, 8192)

    def before_each() -> None:
        meter.add(counts)
        dist.barrier()  # so that nobody waits for a late rank

    baseline = f"all_reduce of the same {payload.nbytes} bytes"
    calls: dict[str, Call] = {
        baseline: lambda: dist.all_reduce(payload),
        "meter.record(step): gather, combine, make the record": lambda: meter.record(1),
    }
    medians = interleaved(calls, before_each)
    if rank == 0:
        show(f"record, {ranks} rank{'s' if ranks > 1 else ''}, gloo", medians, "median us")
    dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, {ROUNDS} rounds, interleaved")
    for ranks in (1, 4):
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(bench_record, args=(ranks, str(Path(folder) / "meet")), nprocs=ranks)


if __name__ == "__main__":
    main()

"""What closing a window costs at 8, 512 and 16,384 ranks, by simulation.

python benchmarks/bench_scale.py

Measured: our side of `record` on one rank, with a process group of that size whose all_gather
takes no time and hands back a table of different reports. Worked out: what goes over the wire. The
table in docs/explanation/scale.md is this output.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tokrate import RankLayout, ThroughputMeter, TokenCounts, ranks
from tokrate.window import Report, combine

SIZES = (8, 512, 16_384)
ROUNDS = 50
PAYLOAD_BYTES = 8 * len(Report._fields)
HOP_US = 5.0
"""Assumed: one small message from rank to rank over the network."""
LINK_BYTES_PER_US = 25_000.0
"""Assumed: 200 Gbit/s for each rank."""


def make_table(size: int, *, first_window: bool) -> torch.Tensor:
    """Reports of ranks that all differ, as one flat tensor."""
    counts = torch.zeros(size, 8, dtype=torch.int64)
    counts[:, 0] = 2**20 + torch.arange(size)  # raw
    counts[:, 1] = 2**18 + torch.arange(size)  # active
    counts[:, 2] = 2**16  # padded
    counts[:, 6] = (torch.arange(size) + 1) * 2**40 if first_window else 0  # checksum
    counts[:, 7] = 1  # step
    seconds = torch.rand(size, 3, dtype=torch.float64) + 1
    return torch.cat((counts, seconds.view(torch.int64)), dim=1).flatten()


def median_ms(call: Callable[[], object]) -> float:
    """Median of some calls, in milliseconds."""
    times_ms = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times_ms.append((time.perf_counter() - start) * 1000)
    return statistics.median(times_ms)


def measure(size: int, *, first_window: bool) -> tuple[float, float]:
    """Milliseconds of `record`, and of combining the gathered reports alone."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    table = make_table(size, first_window=first_window)
    ranks._all_gather = lambda mine, size, group: table  # type: ignore[assignment]
    meter = ThroughputMeter()

    def record() -> None:
        meter.add(TokenCounts(2**20, 2**18, 2**16))
        meter.record(1)

    record_ms = median_ms(record)
    reports = RankLayout().gather(Report(*[1] * 8, 1.0, 0.0, -1.0))
    combine_ms = median_ms(lambda: combine(reports, 1))
    dist.destroy_process_group()
    return record_ms, combine_ms


def ring_gather_ms(size: int) -> float:
    """A ring passes each report on size - 1 times (NCCL before 2.23 has no other all_gather)."""
    return (size - 1) * (HOP_US + PAYLOAD_BYTES / LINK_BYTES_PER_US) / 1000


def log_gather_ms(size: int) -> float:
    """In log2(size) rounds, as PAT (arXiv:2506.20252) or recursive doubling do."""
    received = (size - 1) * PAYLOAD_BYTES
    return (math.log2(size) * HOP_US + received / LINK_BYTES_PER_US) / 1000


def tree_reduce_ms(size: int) -> float:
    """Two all_reduces (sums, maxima), each up a tree and down again."""
    return 2 * 2 * math.log2(size) * HOP_US / 1000


def main() -> None:
    torch.set_num_threads(1)
    rows: dict[str, Callable[[int], str]] = {
        "bytes that a rank sends of its own": lambda n: f"{PAYLOAD_BYTES}",
        "bytes that a rank receives": lambda n: f"{(n - 1) * PAYLOAD_BYTES:,}",
        "record, first window, measured": lambda n: f"{measure(n, first_window=True)[0]:.2f} ms",
        "record, later windows, measured": lambda n: f"{measure(n, first_window=False)[0]:.2f} ms",
        "  of that: combining the reports": lambda n: f"{measure(n, first_window=False)[1]:.2f} ms",
        "all_gather in a ring, model": lambda n: f"{ring_gather_ms(n):.2f} ms",
        "all_gather in log2(n) rounds, model": lambda n: f"{log_gather_ms(n):.2f} ms",
        "two all_reduces in trees, model": lambda n: f"{tree_reduce_ms(n):.2f} ms",
    }
    print("| one window | " + " | ".join(f"{size:,} ranks" for size in SIZES) + " |")
    print("|---|" + "---:|" * len(SIZES))
    for name, cell in rows.items():
        print(f"| {name.strip()} | " + " | ".join(cell(size) for size in SIZES) + " |")


if __name__ == "__main__":
    main()

"""What counting costs, against the one line that people write instead.

python benchmarks/bench_count.py

Every contender runs once in each round, in an order that changes from round to round, so that
what the machine does meanwhile falls on all of them alike. Times are of the calling thread.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

import torch

from tokrate import ThroughputMeter, count_tokens

ROWS, LENGTH = 8, 4096
ROUNDS = 4000
IGNORE_INDEX = -100
SETTLE_ROUNDS = 200


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and mask of 8 x 4096 int64: a quarter of each row padding, a third of it prompt."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50_000, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(labels)
    labels[:, : LENGTH // 3] = IGNORE_INDEX
    labels[:, 3 * LENGTH // 4 :] = IGNORE_INDEX
    mask[:, 3 * LENGTH // 4 :] = 0
    return labels, mask


def contenders(labels: torch.Tensor, mask: torch.Tensor) -> dict[str, Callable[[], object]]:
    """What is timed, the baseline first."""
    meter = ThroughputMeter(labels_aligned=True)
    meter.update(labels=labels, attention_mask=mask)
    meter.record(1)  # the first window is checked in full; those after it are the hot path
    return {
        "torch: (labels != -100).sum().item(), one class": lambda: (
            (labels != IGNORE_INDEX).sum().item()
        ),
        "torch: the same for labels and mask, two classes": lambda: (
            (labels != IGNORE_INDEX).sum().item(),
            (mask == 0).sum().item(),
        ),
        "tokrate: count_tokens, three classes, full check": lambda: count_tokens(
            labels=labels, attention_mask=mask, labels_aligned=True
        ),
        "tokrate: ThroughputMeter.update, three classes": lambda: meter.update(
            labels=labels, attention_mask=mask
        ),
    }


def measure(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Microseconds of every call, round by round."""
    times_us: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for number in range(rounds + SETTLE_ROUNDS):
        for name in order.sample(list(calls), len(calls)):
            call = calls[name]
            start_ns = time.perf_counter_ns()
            call()
            spent_ns = time.perf_counter_ns() - start_ns
            if number >= SETTLE_ROUNDS:
                times_us[name].append(spent_ns / 1000)
    return times_us


def main() -> None:
    labels, mask = make_batch()
    times_us = measure(contenders(labels, mask), ROUNDS)
    medians = {name: statistics.median(times) for name, times in times_us.items()}
    baseline = next(iter(medians.values()))
    print(
        f"labels and mask of {ROWS} x {LENGTH} int64 on the CPU, torch {torch.__version__} with "
        f"{torch.get_num_threads()} threads, {ROUNDS} rounds, interleaved\n"
    )
    print(f"{'':50}  median us     p90 us   ratio")
    for name, median in medians.items():
        p90 = statistics.quantiles(times_us[name], n=10)[-1]
        print(f"{name:50}  {median:9.1f}  {p90:9.1f}  {median / baseline:6.2f}")


if __name__ == "__main__":
    main()

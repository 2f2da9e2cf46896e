"""What counting a batch costs: all three classes, against what frameworks count, and the floor.

python benchmarks/performance/count.py [OUT.json]

Labels and mask lie on the CPU, a quarter of each row padding and a third of it prompt. All
contenders of a table run once in each round, in an order that changes. torch has one thread. The
floor is one pass over the same memory that computes next to nothing: numpy's maximum.
"""

from __future__ import annotations

import numpy as np
import torch
from common import Call, Part, Table, interleave, main, rows_of, versions_of

from tokrate import ThroughputMeter, count_tokens

SHAPES = ((1, 512), (8, 4096), (64, 4096))
DTYPES = (torch.int64, torch.int32)
ROUNDS = 2000
IGNORE_INDEX = -100

BY_HAND = "by hand, as much as tokrate's: two such lines"
BASELINE = "torchtune: (labels != -100).sum().item()"
FLOOR = "floor: one pass over labels and mask"
FLOOR_LABELS = "floor: one pass over labels"
UPDATE = "tokrate: update(labels, attention_mask=mask)"
UPDATE_LABELS = "tokrate: update(labels)"
LACKS = {
    BASELINE: "one class of three: neither padding nor slots; no check; one rank",
    BY_HAND: "no check; one rank; no shift",
    "Hugging Face: attention_mask.sum().item()": "counts real tokens, not targets of the loss",
    "torchtitan: labels.numel()": "counts slots only: nothing is read",
    FLOOR: "counts nothing: what reading the memory takes",
    FLOOR_LABELS: "counts nothing: what reading the memory takes",
}


def make_batch(rows: int, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and mask."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 50_000, (rows, length), generator=generator).to(dtype)
    mask = torch.ones_like(labels)
    labels[:, : length // 3] = IGNORE_INDEX
    labels[:, 3 * length // 4 :] = IGNORE_INDEX
    mask[:, 3 * length // 4 :] = 0
    return labels, mask


def settled_meter() -> ThroughputMeter:
    """A meter whose first window, which is checked in full, lies behind it."""
    meter = ThroughputMeter(labels_aligned=True)
    meter.record(0)
    return meter


def contenders(labels: torch.Tensor, mask: torch.Tensor) -> dict[str, Call]:
    """What is timed."""
    meter = settled_meter()
    label_values, mask_values = labels.numpy(), mask.numpy()
    return {
        BASELINE: lambda: (labels != IGNORE_INDEX).sum().item(),
        BY_HAND: lambda: (
            (labels != IGNORE_INDEX).sum().item(),
            (mask == 0).sum().item(),
        ),
        "Hugging Face: attention_mask.sum().item()": lambda: mask.sum().item(),
        "torchtitan: labels.numel()": labels.numel,
        UPDATE: lambda: meter.update(labels, attention_mask=mask),
        UPDATE_LABELS: lambda: meter.update(labels),
        "tokrate: count_tokens, with the full check": lambda: count_tokens(
            labels, attention_mask=mask, labels_aligned=True
        ),
        FLOOR: lambda: (np.max(label_values), np.max(mask_values)),
        FLOOR_LABELS: lambda: np.max(label_values),
    }


def measure_batch(rows: int, length: int, dtype: torch.dtype) -> Table:
    """One table."""
    labels, mask = make_batch(rows, length, dtype)
    times = interleave(contenders(labels, mask), ROUNDS)
    medians = {name: float(np.median(found)) for name, found in times.items()}
    fast = {name: medians[BASELINE] / median for name, median in medians.items()}
    as_much = medians[BY_HAND] / medians[UPDATE]
    of_floor = medians[UPDATE] / medians[FLOOR]
    numpy_us = bare_numpy(labels, mask)
    return Table(
        title=f"Count, {rows} × {length} {str(dtype).removeprefix('torch.')}",
        about="one call on one batch, µs",
        columns={"median": "µs", "p99": "µs"},
        rows=rows_of(times, LACKS),
        baseline=BASELINE,
        ratio_of="median",
        aim="twice as fast as torchtune's one class; within twice the floor",
        result=(
            f"Three classes are counted {fast[UPDATE]:.2f} times as fast as torchtune's one, "
            f"{as_much:.1f} times as fast as two such lines, in {of_floor:.1f} times the floor; "
            f"from labels alone (slots and targets) {fast[UPDATE_LABELS]:.2f} times as fast. Of "
            f"the {medians[UPDATE]:.1f} µs numpy's own work takes {numpy_us:.1f} µs"
        ),
        reached=fast[UPDATE] >= 2 and of_floor <= 2,
    )


def bare_numpy(labels: torch.Tensor, mask: torch.Tensor) -> float:
    """Microseconds of what numpy must do for the three classes, without any of our code."""
    times = interleave(
        {
            "numpy": lambda: (
                np.count_nonzero(labels.numpy() != IGNORE_INDEX),
                np.count_nonzero(mask.numpy() == 0),
            )
        },
        ROUNDS // 2,
    )
    return float(np.median(times["numpy"]))


def measure() -> Part:
    """All shapes."""
    torch.set_num_threads(1)
    tables = [measure_batch(*shape, dtype) for dtype in DTYPES for shape in SHAPES]
    return Part(name="count", tables=tables, versions=versions_of("torch", "numpy"))


if __name__ == "__main__":
    main(measure)

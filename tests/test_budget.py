"""The hot path's budget: how many calls, instructions and kernels one step may take.

Counted, not timed, so that it is the same on every machine. Each budget has a twin, something that
really does more, which must break it. What a budget means in time: docs/reference/performance.md.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from driving import Clock
from stalls import Watch, as_if_on_a_device
from tokrate import (
    CountingCollator,
    Logger,
    RunInfo,
    ThroughputMeter,
    ThroughputRecord,
    TokenCounts,
    open_logger,
)

LABELS = torch.tensor([[-100, 5, 6, -100]])
MASK = torch.tensor([[1, 1, 1, 0]])
ROOM = 1.3
"""Instructions differ from one version of Python to the next; calls hardly do."""

Action = Callable[[], object]


class Work:
    """What an action took on the thread that called it."""

    def __init__(self, action: Action) -> None:
        self.calls: Counter[str] = Counter()
        self.instructions = 0
        action()  # what is looked up once has been looked up
        before = sys.getprofile(), sys.gettrace()
        sys.setprofile(self._note_call)
        try:
            action()
        finally:
            sys.setprofile(before[0])
        sys.settrace(self._note_frame)
        try:
            action()
        finally:
            sys.settrace(before[1])

    @property
    def total_calls(self) -> int:
        """Calls of functions, be they written in Python or in C."""
        return self.calls.total()

    def _note_call(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code.co_qualname] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            self.calls[argument.__qualname__] += 1

    def _note_frame(self, frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_opcodes = True
        self.instructions += event == "opcode"
        return self._note_frame


def settled_meter(**options: Any) -> ThroughputMeter:
    """A meter whose first window, which is checked in full, lies behind it."""
    clock = Clock()

    def tick() -> float:
        clock.now += 1
        return clock.now

    meter = ThroughputMeter(clock=tick, labels_aligned=True, **options)
    meter.record(0)
    return meter


def update(**options: Any) -> Action:
    """A micro-batch of labels and mask on the host."""
    meter = settled_meter(**options)
    return lambda: meter.update(LABELS, attention_mask=MASK)


def update_labels() -> Action:
    """A micro-batch of labels alone."""
    meter = settled_meter()
    return lambda: meter.update(LABELS)


def add() -> Action:
    """A micro-batch that a worker has counted."""
    meter = settled_meter()
    collate = CountingCollator(lambda rows: {"labels": LABELS, "attention_mask": MASK})
    counts = collate([]).counts
    return lambda: meter.add(counts)


def record() -> Action:
    """The record of a window, on one rank."""
    meter = settled_meter()

    def window() -> None:
        meter.add(TokenCounts(4, 2, 1))
        meter.record(1)

    return window


BUDGETS: dict[str, tuple[Callable[[], Action], int, int]] = {
    "update, labels and mask": (update, 36, 520),
    "update, labels": (update_labels, 29, 455),
    "add, counted by a worker": (add, 8, 165),
    "record": (record, 105, 1520),
}
"""What → what makes the action, most calls, most instructions."""


@pytest.mark.parametrize("what", BUDGETS)
def test_meter_stays_within_its_budget(what: str) -> None:
    """So many calls, and so many instructions of Python."""
    make, most_calls, most_instructions = BUDGETS[what]
    work = Work(make())
    assert work.total_calls <= most_calls, work.calls
    assert work.instructions <= most_instructions * ROOM


def test_a_meter_that_does_more_breaks_the_budget() -> None:
    """The twin: `strict=True` checks every batch in full."""
    _, most_calls, most_instructions = BUDGETS["update, labels and mask"]
    work = Work(update(strict=True))
    assert work.total_calls > most_calls
    assert work.instructions > most_instructions * ROOM


# --- logging -------------------------------------------------------------------------------------

LOG_CALLS, LOG_INSTRUCTIONS = 44, 660


@pytest.fixture
def logger(tmp_path: Path) -> Iterator[Logger]:
    """With one tracker open."""
    spec = {"tensorboard": {}, "console": False}
    with open_logger(spec, run=RunInfo("budget"), dir=tmp_path) as logger:
        yield logger


def make_record() -> ThroughputRecord:
    """A record whose numbers are all known."""
    meter = settled_meter()
    meter.add(TokenCounts(4, 2, 1))
    return meter.record(1)


def test_log_stays_within_its_budget(logger: Logger) -> None:
    """One line, one write, one wake-up, and nothing that waits for a tracker or a disk."""
    record = make_record()
    work = Work(lambda: logger.log(record))
    assert work.total_calls <= LOG_CALLS, work.calls
    assert work.instructions <= LOG_INSTRUCTIONS * ROOM
    assert work.calls["keeping_write.<locals>.keep_and_write"] == 1
    assert work.calls["SimpleQueue.put"] <= 1
    assert not {"write", "fsync", "open", "sleep", "SimpleQueue.get", "dumps"} & work.calls.keys()


def test_a_record_that_needs_more_breaks_the_budget(logger: Logger) -> None:
    """The twin: NaN goes through the slow encoder, which keeps it."""
    record = replace(make_record(), rank_imbalance=math.nan)
    work = Work(lambda: logger.log(record))
    assert work.total_calls > LOG_CALLS
    assert work.instructions > LOG_INSTRUCTIONS * ROOM
    assert work.calls["dumps"] == 1


# --- devices -------------------------------------------------------------------------------------

MOST_KERNELS = 6
"""For three classes, summed on the device: two comparisons, two counts, two additions."""


def kernels_of(action: Action) -> list[str]:
    """What a device would have to run, as if the batch lay on one."""
    with as_if_on_a_device():
        action()
        with Watch() as watch:
            action()
    assert not watch.stalls
    return watch.kernels


def test_update_stays_within_its_kernels() -> None:
    """Few of them, and no wait."""
    kernels = kernels_of(update())
    assert len(kernels) <= MOST_KERNELS, kernels


def test_a_full_check_breaks_the_kernel_budget() -> None:
    """The twin: looking for targets on padding takes more of them."""
    assert len(kernels_of(update(strict=True))) > MOST_KERNELS

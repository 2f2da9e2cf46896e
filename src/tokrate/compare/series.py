"""The one shape of a run that was read back, wherever it was read from.

    points per column ──► newest wins ──► rows by step ──► Series

Everything is kept in float32, the precision of the poorest tracker (TensorBoard): what is worked
out of a run is then the same to the last bit from every source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

RATES = ("active_tps", "raw_tps", "active_tps_per_device", "raw_tps_per_device")
COLUMNS = (
    *RATES,
    "padded_frac",
    "masked_frac",
    "elapsed_s",
    "data_wait_frac",
    "rank_imbalance",
    "mfu",
)
"""What every tracker has of a run that tokrate logged (`metrics: standard`)."""
TOTAL = "total_active_tokens"
SLACK = 1e-6
"""Relative rounding of a token total that was kept as float32, with room."""


class Points(NamedTuple):
    """The points of one metric, in any order."""

    step: Ints
    time_ms: Ints
    value: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a source says of a run as a whole."""

    name: str
    """What people call the run."""
    run_id: str | None
    """tokrate's id of the run; None when the source does not tell."""
    source: str
    """`journal`, `tensorboard`, `mlflow` or `wandb`."""
    where: str
    """Path or address, for messages."""
    outcome: str | None = None
    """`finished`, `failed`, `killed`, `open` (no end was written); None when unknown."""
    schema_version: int | None = None
    """Of the records; only the journal tells."""
    starts_ms: tuple[tuple[int, int], ...] = ()
    """When each session began, at the earliest and at the latest, as far as the source tells."""
    knows_sessions: bool = True
    """Whether `starts_ms` has all sessions."""
    written_by: str = "tokrate"
    """The framework whose metric names were found."""
    notes: tuple[str, ...] = ()
    """What a reader of the numbers should know, such as what is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A run read back: one row for each window that counts, by step. Unknown is NaN."""

    facts: Facts
    step: Ints
    """Optimizer step that closed the window, strictly increasing."""
    time_ms: Ints
    """When the window closed, in milliseconds since 1970-01-01 UTC."""
    columns: Mapping[str, Floats]
    """`COLUMNS`, in float32."""
    total_active_tokens: Floats
    """Active tokens of the run so far."""
    first: Bools
    """The first window of a session: start-up, compilation, cold caches."""
    warmup: Bools
    """Windows that the run itself marked as warm-up; only the journal knows."""
    sessions: int
    """How many sessions were seen in the rows."""

    def __len__(self) -> int:
        return len(self.step)

    def knows(self, column: str) -> bool:
        """Whether at least one window has the number."""
        return bool(np.isfinite(self.columns[column]).any())


def build_series(
    facts: Facts, points: Mapping[str, Points], warmup: Points | None = None
) -> Series:
    """Put the points of a run's columns side by side, the newest for each step.

    Args:
        facts: Of the run as a whole.
        points: Column to its points; `TOTAL` among them where it is known.
        warmup: Points that are 1 where the window was marked as warm-up.
    """
    kept = {column: newest(found) for column, found in points.items()}
    leading = [kept[rate] for rate in RATES if rate in kept] or [
        Points(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
    ]
    step = np.unique(np.concatenate([rate.step for rate in leading]))
    time_ms = np.full(len(step), -1, np.int64)
    for rate in reversed(leading):
        time_ms[np.searchsorted(step, rate.step)] = rate.time_ms
    columns = {column: _aligned(step, kept.get(column)) for column in COLUMNS}
    total = _aligned(step, kept.get(TOTAL))
    active = columns["active_tps"] * columns["elapsed_s"]
    keep, restarts = _not_redone(total, active)
    fell_back = [*_went_back(points), *time_ms[restarts].tolist()]
    starts = [*facts.starts_ms, *((at, at) for at in fell_back)]
    step, time_ms = step[keep], time_ms[keep]
    first = _first_of_session(time_ms, columns["elapsed_s"][keep], starts)
    marked = _aligned(step, None if warmup is None else newest(warmup)) > 0
    return Series(
        facts=facts,
        step=step,
        time_ms=time_ms,
        columns={column: v[keep].astype(np.float32) for column, v in columns.items()},
        total_active_tokens=total[keep],
        first=first,
        warmup=marked,
        sessions=int(first.sum()),
    )


def newest(points: Points) -> Points:
    """The points that count: one is void when a later one has its step or a smaller one.

    After a restart from a checkpoint steps are done anew; what came first is void from there on.
    """
    points = _by_time(points)
    later = np.minimum.accumulate(points.step[::-1])[::-1]
    keep = np.ones(len(points.step), bool)
    keep[:-1] = points.step[:-1] < later[1:]
    return Points(points.step[keep], points.time_ms[keep], points.value[keep])


def _by_time(points: Points) -> Points:
    """In order of time, and what was written twice (a retry) once."""
    order = np.lexsort((points.step, points.time_ms))
    step, time_ms = points.step[order], points.time_ms[order]
    last = np.ones(len(step), bool)
    last[:-1] = (step[1:] != step[:-1]) | (time_ms[1:] != time_ms[:-1])
    return Points(step[last], time_ms[last], points.value[order][last])


def _went_back(points: Mapping[str, Points]) -> list[int]:
    """Times at which the steps went back: a session began there, whether it was told or not."""
    found: list[int] = []
    for rate in RATES:
        if rate in points:
            step, time_ms, _ = _by_time(points[rate])
            found += time_ms[1:][step[1:] <= step[:-1]].tolist()
    return found


def _aligned(step: Ints, points: Points | None) -> Floats:
    """The points' values in the rows of `step`; NaN where there is none."""
    found = np.full(len(step), np.nan)
    if points is not None and len(step):
        place = np.minimum(np.searchsorted(step, points.step), len(step) - 1)
        fits = step[place] == points.step
        found[place[fits]] = points.value[fits]
    return found


def _not_redone(total: Floats, active: Floats) -> tuple[Bools, list[int]]:
    """Which rows count by the running total, and before which rows it fell back.

    A resumed session goes on from the total of its checkpoint. Where windows close at other steps
    than before, only this tells that rows behind the checkpoint were done anew.
    """
    keep = np.ones(len(total), bool)
    begun = total - active
    slack = np.maximum(0.5, SLACK * np.abs(total))
    with np.errstate(invalid="ignore"):
        fell = (begun[1:] + slack[1:] < total[:-1]) & (begun[1:] > slack[1:])
    rows = (np.flatnonzero(fell) + 1).tolist()
    for row in rows:
        keep[:row] &= ~(total[:row] > begun[row] + slack[row])
    return keep, rows


def _first_of_session(
    time_ms: Ints, elapsed_s: Floats, starts_ms: Sequence[tuple[int, int]]
) -> Bools:
    """The first row of each session: behind the longest gap where a start is not known exactly."""
    first = np.zeros(len(time_ms), bool)
    if not len(time_ms):
        return first
    gap_ms = np.full(len(time_ms), np.inf)
    gap_ms[1:] = np.maximum(np.diff(time_ms) - 1000 * np.nan_to_num(elapsed_s[1:]), 0)
    first[0] = True
    for bounds in starts_ms:
        low, high = np.searchsorted(time_ms, bounds)
        if high < len(time_ms):  # else nothing came after it: delivered later, by `tokrate sync`
            first[low + int(gap_ms[low : high + 1].argmax())] = True
    return first

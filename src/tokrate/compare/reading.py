"""From the metrics of a tracker, by key, to a series: names, scales, and what can be derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from tokrate.compare.keys import PER_STEP, SEEN, Reading
from tokrate.compare.series import (
    COLUMNS,
    RATES,
    TOTAL,
    Facts,
    Points,
    Series,
    build_series,
    newest,
)

WALL_CLOCK = (
    "the time between two points is taken for the window's time, pauses for evaluation included"
)


def series_of(facts: Facts, reading: Reading, points: Callable[[str], Points]) -> Series:
    """Read the points that are wanted and derive what the framework does not write.

    Args:
        facts: Of the run as a whole.
        reading: What `tokrate.compare.keys.understand` made of the run's keys.
        points: Gives the points of a key.
    """
    found = {column: _scaled(points(key), factor) for key, (column, factor) in reading.keys.items()}
    notes = [*facts.notes, *reading.notes]
    if SEEN in found:
        found |= _growth(found.pop(SEEN))
        notes.append(WALL_CLOCK)
    if PER_STEP in found:
        found["elapsed_s"] = _window_time(found.pop(PER_STEP))
    if "elapsed_s" not in found:
        found["elapsed_s"] = _between(found)
        notes.append(WALL_CLOCK)
    facts = replace(facts, written_by=reading.written_by, notes=tuple(dict.fromkeys(notes)))
    return build_series(facts, {c: p for c, p in found.items() if c in (*COLUMNS, TOTAL)})


def _scaled(points: Points, factor: float) -> Points:
    return points if factor == 1.0 else points._replace(value=points.value * factor)


def _growth(seen: Points) -> Mapping[str, Points]:
    """The raw rate between the points of a running total."""
    seen = newest(seen)
    seconds = np.diff(seen.time_ms, prepend=np.nan) / 1000
    tokens = np.diff(seen.value, prepend=np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(seconds > 0, tokens / seconds, np.nan)
    return {"raw_tps": seen._replace(value=rate), "elapsed_s": seen._replace(value=seconds)}


def _window_time(per_step: Points) -> Points:
    per_step = newest(per_step)
    steps = np.diff(per_step.step, prepend=np.nan)
    return per_step._replace(value=per_step.value * steps)


def _between(found: Mapping[str, Points]) -> Points:
    """Seconds of the wall clock between the points of a rate."""
    rate = newest(next(found[rate] for rate in RATES if rate in found))
    return rate._replace(value=np.diff(rate.time_ms, prepend=np.nan) / 1000)

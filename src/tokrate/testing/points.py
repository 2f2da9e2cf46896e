"""What the conformance tests are made of: runs, entries, threads, and series to compare."""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tokrate.backends.base import Backend
from tokrate.run import Entry, RunInfo

Row = tuple[int, Mapping[str, float]]
"""A step, and the values that the tracker shows for it by metric key."""
Series = dict[str, list[tuple[int, float]]]
"""The points of each metric key, in the order in which the tracker shows them."""
_T = TypeVar("_T")

START_MS = 1_700_000_000_000
PATIENCE_S = 60.0
"""No single call of a backend may take longer, whatever happened to the tracker."""
SLACK_S = 5.0
"""What a deadline may be missed by on a machine that does much else."""


def new_run(
    folder: Path,
    *,
    name: str = "conformance",
    config: Mapping[str, Any] | None = None,
    tags: tuple[str, ...] = (),
    resume_step: int | None = None,
) -> RunInfo:
    """A run as `open_logger` would hand it to a backend; the same name gives the same run."""
    run_folder = folder / name
    run_folder.mkdir(exist_ok=True)
    return RunInfo(
        name=name,
        id=f"{folder.name}-{name}".encode("ascii", "ignore").decode().replace(" ", ""),
        config={"lr": 0.1} if config is None else config,
        tags=tags,
        resume_step=resume_step,
        folder=run_folder,
    )


def entries(
    metrics: Iterable[Mapping[str, int | float]],
    steps: Sequence[int] | None = None,
    *,
    after_ms: int = 0,
) -> list[Entry]:
    """Entries with the given metrics, at the given steps (0, 1, 2 …), one per second."""
    rows = list(metrics)
    return [
        Entry(time_unix_ms=START_MS + after_ms + 1000 * i, step=step, metrics=row)
        for i, (step, row) in enumerate(zip(steps or range(len(rows)), rows, strict=True))
    ]


def in_thread(work: Callable[[], _T]) -> _T:
    """Do it in a thread of its own, as delivery does; what it raises is raised here."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(work).result(timeout=PATIENCE_S)


def raised(work: Callable[[], object]) -> BaseException | None:
    """What the work raises, done in a thread; None when it succeeds."""
    try:
        in_thread(work)
    except Exception as error:  # noqa: BLE001 - which one it is is what the caller asks
        return error
    return None


def write_until_noticed(
    backend: Backend, later: Sequence[Entry]
) -> tuple[int, BaseException | None]:
    """Write one entry after the other until one fails; its number, and what was raised.

    Between two processes a death is seen by whoever speaks next, or next but one.
    """
    for number, entry in enumerate(later):
        error = raised(partial(backend.write, [entry]))
        if error is not None:
            return number, error
        time.sleep(0.1)
    return len(later), None


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for another thread, but not for ever."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, f"waited {seconds:.0f} s in vain"
        time.sleep(0.02)


def series_of(rows: Iterable[Row]) -> Series:
    """The rows regrouped by metric key."""
    series: Series = {}
    for step, values in rows:
        for key, value in values.items():
            series.setdefault(key, []).append((step, value))
    return series


def each_once(series: Series) -> Series:
    """Every point once, where it came first."""
    return {key: list(dict.fromkeys(points)) for key, points in series.items()}


def newest_of_step(series: Series) -> Series:
    """The last point of each step, by step."""
    return {key: sorted(dict(points).items()) for key, points in series.items()}


def as_float32(value: float) -> float:
    """The nearest number that float32 has."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def as_text(value: float) -> str:
    """A form in which NaN equals NaN, and an int its float."""
    return (
        repr(float(value)) if abs(value) < 1e308 or value in (math.inf, -math.inf) else str(value)
    )


class _Odd:
    """An object that JSON has no form for and that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("not to be shown")

    __repr__ = __str__


HOSTILE_CONFIG: dict[Any, Any] = {
    "nested": {"deep": {"list": [1, {"a": None}], "none": None, "empty": {}}},
    "nan": math.nan,
    "path": Path("/tmp"),  # noqa: S108 - only a value
    "bytes": b"\xff",
    "set": {1, "two"},
    "object": _Odd(),
    "type": Path,
    "long": "x" * 10_000,
    "umlaut ä%(/": "wert",
    "a//b/../c": 1,
    "": "no name",
    1: "a number as name",
    **{f"key{i}": i for i in range(300)},
}
HOSTILE_TAGS = ("baseline", "team=nlp", "größer 🚀", "t" * 300, "", "baseline")

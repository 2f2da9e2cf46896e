"""Makes runs to compare: journals line by line, and real runs with every tracker."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tokrate import RunInfo, ThroughputRecord, open_logger
from tokrate.compare.series import COLUMNS, TOTAL, Facts, Points, Series, build_series

START_MS = 1_700_000_000_000


@dataclass(frozen=True)
class Window:
    """What one window of a run did."""

    elapsed_s: float = 1.0
    raw: int = 1000
    active: int = 400
    padded: int | None = 500
    wait_s: float | None = None
    devices: int = 1
    warmup: bool = False
    imbalance: float | None = 1.0


def records(
    windows: Iterable[Window],
    *,
    first_step: int = 1,
    every: int = 1,
    total: int = 0,
    **changes: Any,
) -> list[ThroughputRecord]:
    """The records of windows that follow each other, one optimizer step each."""
    found, clock_ms = [], changes.pop("start_ms", START_MS)
    for number, w in enumerate(windows):
        clock_ms += round(1000 * w.elapsed_s)
        total += w.active
        masked = None if w.padded is None else w.raw - w.active - w.padded
        fields: dict[str, Any] = {
            "step": first_step + every * number,
            "active_tps": w.active / w.elapsed_s,
            "raw_tps": w.raw / w.elapsed_s,
            "padded_frac": None if w.padded is None else w.padded / w.raw,
            "masked_frac": None if masked is None else masked / w.raw,
            "active_tps_per_device": w.active / w.elapsed_s / w.devices,
            "raw_tps_per_device": w.raw / w.elapsed_s / w.devices,
            "raw_tokens": w.raw,
            "active_tokens": w.active,
            "padded_tokens": w.padded,
            "steps": every,
            "elapsed_s": w.elapsed_s,
            "paused_s": 0.0,
            "data_wait_s": w.wait_s,
            "devices": w.devices,
            "rank_imbalance": w.imbalance,
            "total_raw_tokens": 0,
            "total_active_tokens": total,
            "total_elapsed_s": 0.0,
            "session": 1,
            "mfu": None,
            "warmup": w.warmup,
            "time_unix_ms": clock_ms,
        }
        found.append(ThroughputRecord(**(fields | changes)))
    return found


def noisy(count: int, seed: int = 0, *, speed: float = 1.0, **fields: Any) -> list[Window]:
    """Windows whose time varies by 2 percent."""
    draw = np.random.default_rng(seed)
    return [
        Window(elapsed_s=float(np.exp(0.02 * draw.standard_normal())) / speed, **fields)
        for _ in range(count)
    ]


def write_journal(
    folder: Path,
    found: Sequence[ThroughputRecord],
    *,
    run_id: str | None = "id",
    outcome: str | None = "finished",
    resume_step: int | None = None,
) -> Path:
    """A session's lines, as the logger writes them; appended where there is a journal."""
    folder.mkdir(parents=True, exist_ok=True)
    began_ms = found[0].time_unix_ms - 1 if found else START_MS
    lines: list[dict[str, Any]] = [
        {"kind": "run", "time_unix_ms": began_ms, "id": run_id, "name": folder.name}
        | {"resume_step": resume_step}
    ]
    lines += [
        {"kind": "entry", "time_unix_ms": r.time_unix_ms, "step": r.step, "metrics": {}}
        | {"record": r.to_dict()}
        for r in found
    ]
    lines += [] if outcome is None else [{"kind": "end", "outcome": outcome}]
    with (folder / "journal.jsonl").open("a") as file:
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    return folder


def series(found: Sequence[ThroughputRecord], name: str = "a", **facts: Any) -> Series:
    """Records as a series, without a file."""
    step = np.array([r.step for r in found], np.int64)
    time_ms = np.array([r.time_unix_ms for r in found], np.int64)
    columns = {
        column: Points(step, time_ms, np.array([getattr(r, column) for r in found], float))
        for column in (*COLUMNS, TOTAL, "warmup")
    }
    warmup = columns.pop("warmup")
    defaults: dict[str, Any] = {"run_id": name, "source": "journal", "where": name}
    return build_series(Facts(name=name, **(defaults | facts)), columns, warmup)


def log_run(
    root: Path, name: str, found: Sequence[ThroughputRecord], trackers: dict[str, Any], **run: Any
) -> None:
    """A real run: the logger, its journal, and the trackers."""
    spec = {**trackers, "console": False}
    with open_logger(spec, run=RunInfo(name, **run), dir=root) as logger:
        for record in found:
            logger.log_metrics({"train/loss": 1.0}, step=record.step)
            logger.log(record)

"""Reads journals: each line by itself, so that a damaged one costs one line and no more."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokrate.compare.progress import Progress
from tokrate.compare.series import COLUMNS, TOTAL, Facts, Points, Series, build_series
from tokrate.compare.sources._files import files_below
from tokrate.errors import CompareError
from tokrate.journal import ENTRY_START, JOURNAL_NAME

TELL_EVERY = 1 << 23
"""Bytes between two words on how far reading is."""
LOOKED_AT = 10_000
"""Files that are looked at for a hint on what a folder holds instead."""


class _Record(msgspec.Struct, gc=False):
    """What is compared of a record; all else is skipped by the decoder."""

    active_tps: float | None = None
    raw_tps: float | None = None
    active_tps_per_device: float | None = None
    raw_tps_per_device: float | None = None
    padded_frac: float | None = None
    masked_frac: float | None = None
    elapsed_s: float | None = None
    data_wait_s: float | None = None
    rank_imbalance: float | None = None
    mfu: float | None = None
    total_active_tokens: float | None = None
    warmup: bool = False
    schema_version: int | None = None


class _Entry(msgspec.Struct, gc=False):
    time_unix_ms: int
    step: int
    record: _Record


FIELDS = tuple(_Record.__struct_fields__)
_row = attrgetter(*FIELDS)
_decode = msgspec.json.Decoder(_Entry).decode


def read_journals(folder: Path, progress: Progress) -> list[Series]:
    """The run in a folder, or all runs below it.

    Raises:
        CompareError: There is no journal.
    """
    if folder.name == JOURNAL_NAME:
        folder = folder.parent
    if (folder / JOURNAL_NAME).is_file():
        return [read_journal(folder / JOURNAL_NAME, progress)]
    found = [
        read_journal(path, progress)
        for path in files_below(folder, lambda name: name == JOURNAL_NAME, progress)
    ]
    if not found:
        raise CompareError(_hint(folder))
    return found


def read_journal(path: Path, progress: Progress) -> Series:
    """The run that a journal tells of."""
    reader = _JournalRun(path)
    with path.open("rb") as file:
        reader.take(_told(file, path, progress))
    return reader.series()


class _JournalRun:
    """Takes in the lines of a journal and makes a series of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._run: dict[str, Any] = {}
        self._outcome = "open"
        self._starts: list[tuple[int, int]] = []
        self._resumes: list[tuple[int, int]] = []  # rows before it, step
        self._rows: list[tuple[Any, ...]] = []
        self._at: list[tuple[int, int]] = []
        self._damaged = 0

    def take(self, lines: Iterator[bytes]) -> None:
        for raw in lines:
            if not raw.startswith(ENTRY_START):
                self._take_other(raw)
            elif b'"record":' in raw:
                self._take_entry(raw)

    def _take_entry(self, raw: bytes) -> None:
        try:
            entry = _decode(raw)
        except msgspec.DecodeError:  # NaN is no JSON, or a foreign hand
            found = _lenient(raw)
            if found is None:
                self._damaged += 1
                return
            entry = found
        self._at.append((entry.step, entry.time_unix_ms))
        self._rows.append(_row(entry.record))

    def _take_other(self, raw: bytes) -> None:
        try:
            line = json.loads(raw)
            kind = line["kind"]
        except (ValueError, TypeError, KeyError):
            self._damaged += bool(raw.strip())
            return
        if kind == "end":
            self._outcome = str(line.get("outcome"))
        elif kind == "run":
            self._run, self._outcome = line, "open"
            began_ms = line.get("time_unix_ms")
            if isinstance(began_ms, int):
                self._starts.append((began_ms, began_ms))
            if isinstance(step := line.get("resume_step"), int):
                self._resumes.append((len(self._rows), step))

    def series(self) -> Series:
        """What came of it."""
        at = np.array(self._at, np.int64).reshape(-1, 2)
        table = np.array(self._rows, float).reshape(-1, len(FIELDS))
        keep = np.ones(len(at), bool)
        for rows, step in self._resumes:
            keep[:rows] &= at[:rows, 0] <= step
        at, table = at[keep], table[keep]
        values = {name: table[:, i] for i, name in enumerate(FIELDS)}
        with np.errstate(divide="ignore", invalid="ignore"):
            wait = values["data_wait_s"] / values["elapsed_s"]
        values["data_wait_frac"] = np.where(values["elapsed_s"] > 0, wait, np.nan)
        points = {c: Points(at[:, 0], at[:, 1], values[c]) for c in (*COLUMNS, TOTAL)}
        warmup = Points(at[:, 0], at[:, 1], values["warmup"])
        return build_series(self._facts(values["schema_version"]), points, warmup)

    def _facts(self, schema_versions: Any) -> Facts:
        run, folder = self._run, self._path.parent
        run_id = run.get("id")
        damaged = f"{self._damaged} damaged lines of {self._path} were left out"
        return Facts(
            name=str(run.get("name", folder.name)),
            run_id=None if run_id is None else str(run_id),
            source="journal",
            where=str(folder),
            outcome=self._outcome,
            schema_version=int(np.nanmax(schema_versions)) if len(schema_versions) else None,
            starts_ms=tuple(self._starts),
            notes=(damaged,) if self._damaged else (),
        )


def _lenient(raw: bytes) -> _Entry | None:
    """An entry that is no standard JSON; None when it is none at all."""
    try:
        line = json.loads(raw)
        record = line["record"]
        if record is None:
            return None
        known = {name: _number(record[name]) for name in FIELDS if name in record}
        return _Entry(int(line["time_unix_ms"]), int(line["step"]), _Record(**known))
    except (ValueError, TypeError, KeyError):
        return None


def _number(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


def _told(file: Any, path: Path, progress: Progress) -> Iterator[bytes]:
    """The whole lines of a journal; a torn last one is being written just now."""
    size, done, next_word = path.stat().st_size, 0, 0
    for raw in file:
        if not raw.endswith(b"\n"):
            return
        if done >= next_word:
            progress(f"reading {path}", done, size)
            next_word = done + TELL_EVERY
        done += len(raw)
        yield raw


def _hint(folder: Path) -> str:
    """What to say of a folder without a journal, with what lies in it instead."""
    below = [path.name for path in islice(folder.rglob("*"), LOOKED_AT)] if folder.is_dir() else []
    for kind, mark in (("tensorboard", "tfevents"), ("wandb", ".wandb"), ("mlflow", "mlflow.db")):
        if any(mark in name for name in below):
            place = f"sqlite:///{folder}/mlflow.db" if kind == "mlflow" else folder
            return f"{folder}: no {JOURNAL_NAME} in it or below; read it as {kind}:{place}"
    return (
        f"{folder}: no {JOURNAL_NAME} in it or below: expected the folder of a run, or one that "
        "holds folders of runs"
    )

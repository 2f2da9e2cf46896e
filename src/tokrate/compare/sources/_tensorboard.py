"""Reads the runs below a TensorBoard log folder: each folder with event files is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tokrate.compare.keys import understand
from tokrate.compare.progress import Progress
from tokrate.compare.reading import series_of
from tokrate.compare.series import Facts, Points, Series
from tokrate.compare.sources._events import Event, EventFile, Table, read_events
from tokrate.compare.sources._files import files_below
from tokrate.errors import CompareError

MARK = "tfevents"


class _Note(NamedTuple):
    """An event that says more than values: its file, its place there, and what it says."""

    file: int
    place: int
    event: Event


def read_tensorboard(folder: str, progress: Progress) -> list[Series]:
    """All runs below a folder that have a speed in them.

    Raises:
        CompareError: There are no event files, or none with names that we know.
    """
    paths = list(files_below(Path(folder), lambda name: MARK in name, progress))
    if not paths:
        raise CompareError(
            f"tensorboard:{folder}: no event files in it or below: expected the folder that "
            "tensorboard --logdir is given"
        )
    sizes = [path.stat().st_size for path in paths]
    found, seen, done = [], set[str](), 0
    for where, group in groupby(zip(paths, sizes, strict=True), key=lambda pair: pair[0].parent):
        files = []
        for path, size in group:
            progress(f"reading {path.parent}", done, sum(sizes))
            files.append(read_events(path))
            done += size
        tags = {tag for file in files for table in file.tables for tag in table.values}
        seen |= tags
        if (series := _read_run(where, files, tags)) is not None:
            found.append(series)
    if not found:
        raise CompareError(_no_names(f"tensorboard:{folder}", seen))
    return found


def _no_names(source: str, seen: Iterable[str]) -> str:
    names = ", ".join(sorted(seen)[:5]) or "no scalars at all"
    return (
        f"{source}: no run with names that we know (found {names}): expected "
        "throughput/active_tps, or the tokens per second of torchtune, torchtitan, composer or "
        "the Trainer of transformers"
    )


def _read_run(where: Path, files: Sequence[EventFile], tags: set[str]) -> Series | None:
    reading = understand(tags)
    if reading is None:
        return None
    notes = [_Note(i, *other) for i, file in enumerate(files) for other in file.others]
    notes.sort(key=lambda note: note[:2])
    facts = {key: v for note in notes for key, v in note.event.facts.items()}
    purges = [note for note in notes if note.event.is_purge]
    tables = [_without_purged(table, i, purges) for i, f in enumerate(files) for table in f.tables]

    def points(tag: str) -> Points:
        mine = [table for table in tables if tag in table.values]
        return Points(
            np.concatenate([table.step for table in mine]),
            np.concatenate([_ms(table) for table in mine]),
            np.concatenate([table.values[tag] for table in mine]).astype(float),
        )

    greetings = [note for note in notes if note.event.facts]
    greetings = greetings or [note for note in notes if note.event.starts_file]
    return series_of(
        Facts(
            name=facts.get("run", where.name),
            run_id=facts.get("id"),
            source="tensorboard",
            where=str(where),
            starts_ms=tuple(_starts(greetings, files, set(reading.keys))),
        ),
        reading,
        points,
    )


def _ms(table: Table) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.rint(table.time_s * 1000).astype(np.int64)


def _without_purged(table: Table, file: int, purges: Sequence[_Note]) -> Table:
    """The events without those that a resumed session declared void."""
    keep = np.ones(len(table.step), bool)
    for purge in purges:
        if file <= purge.file:
            before = table.order < (purge.place if file == purge.file else np.inf)
            keep &= ~(before & (table.step >= purge.event.step))
    if keep.all():
        return table
    values = {tag: v[keep] for tag, v in table.values.items()}
    return Table(table.order[keep], table.time_s[keep], table.step[keep], values)


def _starts(
    greetings: Sequence[_Note], files: Sequence[EventFile], tags: set[str]
) -> Iterable[tuple[int, int]]:
    """When each session began: between its first point in the file and the greeting before it."""
    for note in greetings:
        tables = [t for t in files[note.file].tables if not tags.isdisjoint(t.values)]
        behind = [t.time_s[t.order > note.place] for t in tables]
        times = np.concatenate(behind) if behind else np.empty(0)
        if len(times):
            at_ms = round(note.event.wall_s * 1000)
            first_ms = round(float(times.min()) * 1000)
            yield min(first_ms, at_ms), max(at_ms, min(first_ms, at_ms))

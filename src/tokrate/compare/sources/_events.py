"""Reads TensorBoard event files fast: events of one layout at a time, as columns.

A writer writes the same event over and over, in which only the time, the step and the values
differ, each at the same place. So one event of each layout is read field by field; all others that
agree with it in every other byte are cut into columns by numpy.

    length (8) | its checksum (4) | Event | its checksum (4) | length …      (TFRecord framing)
    Event: wall_time 1 · step 2 · summary 5 { value 1 { tag 1, simple_value 2, tensor 8 } }
           session_log 7 { status 1 }

Field numbers are those of tensorflow/core/util/event.proto and framework/summary.proto. Checksums
are not looked at.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tokrate.compare.series import Bools, Floats, Ints
from tokrate.compare.wire import fields, text, varint

WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
VALUE_TAG, SIMPLE_VALUE, TENSOR = 1, 2, 8
TENSOR_CONTENT, FLOAT_VAL, STRING_VAL = 4, 5, 8
SESSION_START = 1
ROWS_AT_ONCE = 16_384
MOST_LAYOUTS = 32
"""Layouts of one length; what is left then is read field by field."""
LARGEST = 1 << 16
"""Bytes of an event; larger ones hold pictures or graphs."""
FACTS = re.compile(rb"\| (run|id) \| ([^|\n]+?) \|")
"""Rows of the table that tokrate writes at the start of a session."""


@dataclass(slots=True)
class Event:
    """One event, read field by field; places are counted from its beginning."""

    wall_s: float = 0.0
    wall_place: int = 0
    step: int = 0
    step_place: tuple[int, int] = (0, 0)
    scalars: list[tuple[str, int, float]] = field(default_factory=list)
    """Tag, place of the value's four bytes, value."""
    is_plain: bool = True
    """Nothing but time, step and simple values."""
    starts_file: bool = False
    is_purge: bool = False
    """Points from this step on that came before are void."""
    facts: dict[str, str] = field(default_factory=dict)
    """`run` and `id`, where the event holds tokrate's table of facts."""


@dataclass(frozen=True, slots=True)
class Table:
    """Events of one layout."""

    order: Ints
    """Places in the file, which are the order in which they were written."""
    time_s: Floats
    step: Ints
    values: dict[str, Floats]
    """Tag to its values."""


@dataclass(frozen=True, slots=True)
class EventFile:
    """What an event file holds."""

    tables: list[Table] = field(default_factory=list)
    others: list[tuple[int, Event]] = field(default_factory=list)
    """Place and event, for all that say more than values."""


def read_events(path: Path) -> EventFile:
    """Read a file; a torn end is left out."""
    found = EventFile()
    with path.open("rb") as file:
        if not path.stat().st_size:
            return found
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    starts, lengths = _frames(data)
    for length in np.unique(lengths).tolist():
        places = starts[lengths == length]
        if length <= LARGEST:
            places = _read_alike(data, places, length, found)
        for place in places.tolist():
            _keep(parse(data[place : place + length]), place, found)
    return found


def _frames(data: mmap.mmap) -> tuple[Ints, Ints]:
    """Where the events begin, and how long they are."""
    starts, lengths = [], []
    place, size = 0, len(data)
    length_at = struct.Struct("<Q").unpack_from
    while place + 12 <= size:
        (length,) = length_at(data, place)
        behind = place + length + 16
        if behind > size:
            break
        starts.append(place + 12)
        lengths.append(length)
        place = behind
    return np.array(starts, np.int64), np.array(lengths, np.int64)


def _read_alike(data: mmap.mmap, places: Ints, length: int, found: EventFile) -> Ints:
    """Cut events of one length into tables, layout by layout; returns what is left."""
    windows = sliding_window_view(np.frombuffer(data, np.uint8), length)
    for _ in range(MOST_LAYOUTS):
        if not len(places):
            break
        first = int(places[0])
        model = parse(data[first : first + length])
        if model is None or not model.is_plain:
            _keep(model, first, found)
            places = places[1:]
            continue
        left = []
        for begin in range(0, len(places), ROWS_AT_ONCE):
            some = places[begin : begin + ROWS_AT_ONCE]
            rows = windows[some]
            same = _same_layout(rows, windows[first], model)
            found.tables.append(_table(rows[same], some[same], model))
            left.append(some[~same])
        places = np.concatenate(left)
    return places


def _same_layout(rows: NDArray[np.uint8], pattern: NDArray[np.uint8], model: Event) -> Bools:
    """Which events agree with the model in all but time, step and values."""
    fixed = np.ones(len(pattern), bool)
    begin, end = model.step_place
    fixed[begin:end] = False
    fixed[model.wall_place : model.wall_place + 8] = False
    for _, place, _ in model.scalars:
        fixed[place : place + 4] = False
    goes_on = np.arange(begin, end) < end - 1
    same: Bools = (rows[:, fixed] == pattern[fixed]).all(axis=1)
    same &= ((rows[:, begin:end] >= 0x80) == goes_on).all(axis=1)
    return same


def _table(rows: NDArray[np.uint8], places: Ints, model: Event) -> Table:
    def column(place: int, kind: str) -> Floats:
        size = np.dtype(kind).itemsize
        cut: Floats = np.ascontiguousarray(rows[:, place : place + size]).view(kind)[:, 0]
        return cut

    begin, end = model.step_place
    shifts = np.uint64(7) * np.arange(end - begin, dtype=np.uint64)
    step = ((rows[:, begin:end] & 0x7F).astype(np.uint64) << shifts).sum(axis=1)
    return Table(
        order=places,
        time_s=column(model.wall_place, "<f8"),
        step=step.astype(np.int64),
        values={tag: column(place, "<f4") for tag, place, _ in model.scalars},
    )


def _keep(event: Event | None, place: int, found: EventFile) -> None:
    """Put away an event that was read field by field."""
    if event is None:
        return
    if event.scalars:
        values = {tag: np.array([value]) for tag, _, value in event.scalars}
        at = np.array([place], np.int64), np.array([event.wall_s]), np.array([event.step], np.int64)
        found.tables.append(Table(*at, values))
    if event.starts_file or event.is_purge or event.facts:
        found.others.append((place, event))


def parse(data: bytes) -> Event | None:
    """Read one event field by field; None when it is damaged."""
    event = Event()
    try:
        for number, _, place, behind in fields(data, 0, len(data)):
            if number == WALL_TIME:
                (event.wall_s,) = struct.unpack_from("<d", data, place)
                event.wall_place = place
            elif number == STEP:
                event.step, _ = varint(data, place)
                event.step_place = (place, behind)
            elif number == SUMMARY:
                _parse_summary(data, place, behind, event)
            else:
                event.is_plain = False
                event.starts_file |= number == FILE_VERSION
                if number == SESSION_LOG:
                    event.is_purge = _is_session_start(data, place, behind)
    except (ValueError, IndexError, struct.error):
        return None
    event.is_plain &= bool(event.wall_place and event.scalars)
    return event


def _parse_summary(data: bytes, begin: int, end: int, event: Event) -> None:
    for _, _, value_begin, value_end in fields(data, begin, end):
        tag = ""
        for number, _, place, behind in fields(data, value_begin, value_end):
            if number == VALUE_TAG:
                tag = text(data, place, behind)
            elif number == SIMPLE_VALUE:
                (value,) = struct.unpack_from("<f", data, place)
                event.scalars.append((tag, place, value))
            else:
                event.is_plain = False
                if number == TENSOR:
                    _parse_tensor(data, place, behind, tag, event)


def _parse_tensor(data: bytes, begin: int, end: int, tag: str, event: Event) -> None:
    """A number in the newer way of keeping scalars, or tokrate's table of facts."""
    for number, _, place, behind in fields(data, begin, end):
        if number in (TENSOR_CONTENT, FLOAT_VAL) and behind - place == 4:
            (value,) = struct.unpack_from("<f", data, place)
            event.scalars.append((tag, -1, value))
        elif number == STRING_VAL and behind - place < LARGEST:
            for key, fact in FACTS.findall(data[place:behind]):
                event.facts.setdefault(key.decode(), fact.decode("utf-8", "replace"))


def _is_session_start(data: bytes, begin: int, end: int) -> bool:
    return any(
        number == 1 and varint(data, place)[0] == SESSION_START
        for number, _, place, _ in fields(data, begin, end)
    )

"""Reads W&B runs: offline files by themselves, and runs on a server through `wandb.Api`.

    file: 7 bytes | block of 32 KiB | block …           (LevelDB's log format)
    block: checksum (4) length (2) kind (1) data | …    kind: whole, first, middle, last piece
    Record: history 2 { item 1 { key 1, nested_key 2, value_json 16 } step 2 { num 1 } }
            run 17 { run_id 1, project 3, display_name 8, start_time 17 } · exit 18 { exit_code 1 }

Field numbers are those of wandb/proto/wandb_internal.proto, 0.31. Checksums are not looked at.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tokrate.compare.keys import understand
from tokrate.compare.progress import Progress
from tokrate.compare.reading import series_of
from tokrate.compare.series import Facts, Points, Series
from tokrate.compare.sources._files import files_below
from tokrate.compare.wire import FIXED64, VARINT, fields, text, varint
from tokrate.errors import CompareError, MissingPackageError

BLOCK, FILE_HEADER, PIECE_HEADER = 32 * 1024, 7, 7
WHOLE, FIRST, LAST = 1, 2, 4
MAGIC = b":W&B"
PROJECT = re.compile(r"[\w.-]+/[\w. -]+")
HISTORY, RUN, EXIT = 2, 17, 18
OUTCOME_OF_STATE = {"finished": "finished", "failed": "failed", "crashed": "killed"}


@dataclass(slots=True)
class _Run:
    """A run under way: its rows, from all its sessions."""

    name: str
    where: str
    run_id: str | None = None
    outcome: str | None = "open"
    sessions: list[tuple[int | None, int]] = field(default_factory=list)
    """When each session's file was begun, and the rows before it."""
    rows: list[Mapping[str, float]] = field(default_factory=list)


def read_wandb(place: str, progress: Progress) -> list[Series]:
    """All runs in the offline files below a folder, or of a project on the server.

    Raises:
        CompareError: There are none, or none with names that we know.
        MissingPackageError: The server is asked, and wandb is not installed.
    """
    if Path(place).is_dir():
        runs: Iterable[_Run] = _offline(Path(place), progress)
    elif PROJECT.fullmatch(place):
        runs = _online(place, progress)
    else:
        raise CompareError(
            f"wandb:{place}: no such folder, and no entity/project: expected one of the two"
        )
    found = [series for run in runs if (series := _series(run)) is not None]
    if not found:
        raise CompareError(
            f"wandb:{place}: no run with a metric such as throughput/active_tps, or the tokens "
            "per second of a framework that we know"
        )
    return found


def _series(run: _Run) -> Series | None:
    keys = {key for row in run.rows for key in row}
    reading = understand(keys)
    if reading is None:
        return None
    step_key = _step_key(keys, reading.keys)
    lead = [reading.keys.keys() & row.keys() != set() for row in run.rows]
    rows = [row for row, wanted in zip(run.rows, lead, strict=True) if wanted]
    columns: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for row in rows:
        at = row.get(step_key, row.get("_step", 0)), 1000 * row.get("_timestamp", 0)
        for key in reading.keys.keys() & row.keys():
            columns[key].append((*at, row[key]))
    facts = Facts(
        name=run.name,
        run_id=run.run_id,
        source="wandb",
        where=run.where,
        outcome=run.outcome,
        starts_ms=tuple(_starts(run, lead)),
        knows_sessions=bool(run.sessions),
    )
    return series_of(facts, reading, lambda key: _points(columns[key]))


def _step_key(keys: set[str], wanted: Iterable[str]) -> str:
    """The step metric: tokrate's own, the Trainer's, or W&B's."""
    own = {f"{key.rpartition('/')[0]}/step" for key in wanted}
    return next(iter(own & keys), "train/global_step" if "train/global_step" in keys else "_step")


def _starts(run: _Run, lead: Sequence[bool]) -> Iterator[tuple[int, int]]:
    for begun_ms, rows_before in run.sessions:
        ours = (row for row, is_ours in zip(run.rows, lead, strict=True) if is_ours)
        behind = list(ours)[sum(lead[:rows_before]) :]
        if behind and begun_ms is not None:
            first_ms = round(1000 * behind[0].get("_timestamp", 0))
            yield min(first_ms, begun_ms), begun_ms


def _points(rows: Sequence[tuple[float, float, float]]) -> Points:
    table = np.array(rows, float).reshape(-1, 3)
    step, time_ms = (np.rint(table[:, i]).astype(np.int64) for i in (0, 1))
    return Points(step, time_ms, table[:, 2])


# --- offline files -------------------------------------------------------------------------------


def _offline(folder: Path, progress: Progress) -> list[_Run]:
    paths = list(files_below(folder, lambda name: name.endswith(".wandb"), progress))
    if not paths:
        raise CompareError(
            f"wandb:{folder}: no .wandb file in it or below: expected the folder of offline runs"
        )
    runs: dict[str, _Run] = {}
    # Date, time and id of the session, behind `offline-run-` or `run-`.
    for done, path in enumerate(sorted(paths, key=lambda p: p.parent.name.partition("run-")[2])):
        progress(f"reading {path}", done, len(paths))
        _read_file(path, runs)
    return list(runs.values())


def _read_file(path: Path, runs: dict[str, _Run]) -> None:
    if path.stat().st_size <= FILE_HEADER:
        return  # begun, and never written
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if data[: len(MAGIC)] != MAGIC:
        raise CompareError(f"wandb:{path}: this is no W&B file, or one of a format to come")
    run = _Run(path.parent.name, str(path.parent))
    for record in log_records(data):
        try:
            for number, _, place, behind in fields(record, 0, len(record)):
                if number == HISTORY:
                    run.rows.append(_row(record, place, behind))
                elif number == RUN:
                    run = _take_run(record, place, behind, path, runs)
                elif number == EXIT:
                    run.outcome = _outcome(record, place, behind)
        except (ValueError, IndexError, struct.error):
            continue  # one damaged record costs one row


def log_records(data: bytes | mmap.mmap) -> Iterator[bytes]:
    """The records of a LevelDB log; a torn last one is left out."""
    place, record = FILE_HEADER, b""
    while place + PIECE_HEADER <= len(data):
        left_in_block = BLOCK - place % BLOCK
        if left_in_block < PIECE_HEADER:
            place += left_in_block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += PIECE_HEADER
        piece = data[place : place + length]
        place += length
        if len(piece) < length or not length:
            continue
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST):
            yield record


def _take_run(record: bytes, begin: int, end: int, path: Path, runs: dict[str, _Run]) -> _Run:
    """What the file says of the run; a later session goes on with the same one."""
    found: dict[int, str] = {}
    begun_ms = None
    for number, _, place, behind in fields(record, begin, end):
        if number in (1, 3, 8):
            found[number] = text(record, place, behind)
        elif number == 17:
            begun_ms = _timestamp_ms(record, place, behind)
    run_id = found.get(1)
    key = f"{found.get(3)}/{run_id}"
    run = runs.setdefault(key, _Run(found.get(8) or path.parent.name, str(path.parent), run_id))
    run.outcome = "open"
    run.sessions.append((begun_ms, len(run.rows)))
    return run


def _timestamp_ms(record: bytes, begin: int, end: int) -> int:
    parts = {n: varint(record, place)[0] for n, _, place, _ in fields(record, begin, end)}
    return parts.get(1, 0) * 1000 + parts.get(2, 0) // 1_000_000


def _outcome(record: bytes, begin: int, end: int) -> str:
    codes = [varint(record, place)[0] for n, _, place, _ in fields(record, begin, end) if n == 1]
    code = codes[0] if codes else 0
    if code == 0:
        return "finished"
    return "killed" if 128 < code < 160 or code == 255 else "failed"


def _row(record: bytes, begin: int, end: int) -> dict[str, float]:
    """The numbers of a history record."""
    row: dict[str, float] = {}
    for number, _, place, behind in fields(record, begin, end):
        if number == 1:
            key, value = _item(record, place, behind)
            if value is not None:
                row[key] = value
        elif number == 2:
            steps = [
                varint(record, at)[0] for n, _, at, _ in fields(record, place, behind) if n == 1
            ]
            row.setdefault("_step", float(steps[0] if steps else 0))
    return row


def _item(record: bytes, begin: int, end: int) -> tuple[str, float | None]:
    key: list[str] = []
    value: float | None = None
    for number, kind, place, behind in fields(record, begin, end):
        if number in (1, 2):
            key.append(text(record, place, behind))
        elif number == 16:
            value = _number(record[place:behind])
        elif number == 5 and kind == VARINT:  # zigzag
            whole = varint(record, place)[0]
            value = float((whole >> 1) ^ -(whole & 1))
        elif number == 6 and kind == FIXED64:
            (value,) = struct.unpack_from("<d", record, place)
    return "/".join(key), value


def _number(value_json: bytes) -> float | None:
    try:
        return float(value_json)
    except ValueError:  # text, a mapping, a picture
        return None


# --- the server ----------------------------------------------------------------------------------


def _online(project: str, progress: Progress) -> list[_Run]:
    try:
        import wandb
    except ImportError as error:
        raise MissingPackageError(
            f"wandb:{project}: reading from the server needs the package 'wandb': run  "
            "pip install 'tokrate[wandb]'"
        ) from error
    try:
        return list(runs_of_api(wandb.Api(), project, progress))
    except Exception as error:  # wandb raises CommError, UsageError, ValueError, requests' errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CompareError(
            f"wandb:{project}: the server cannot be asked ({reason}); log in with `wandb login`, "
            "and look whether the project is there"
        ) from error


def runs_of_api(api: Any, project: str, progress: Progress) -> Iterator[_Run]:
    """The runs of a project.

    Args:
        api: A `wandb.Api`.
        project: `entity/project`.
        progress: Told after each run.
    """
    for done, run in enumerate(api.runs(project)):
        progress(f"reading wandb:{project}", done, None)
        rows: list[Mapping[str, float]] = [
            {key: float(v) for key, v in row.items() if isinstance(v, (int, float))}
            for row in run.scan_history()
        ]
        yield _Run(
            run.name,
            f"{project}/{run.id}",
            run.id,
            OUTCOME_OF_STATE.get(run.state, "open"),
            [],
            rows,
        )

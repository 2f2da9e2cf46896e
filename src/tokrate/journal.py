"""The journal: the run's own append-only file, one JSON line for each thing that happened.

    {"kind": "run", ...}     once for each session
    {"kind": "entry", ...}   one for each log call that was accepted
    {"kind": "summary", ...} the session's steady values, delivered like an entry, counted as none
    {"kind": "end", ...}     how the session ended

An entry is in the file before `log` returns: it survives `kill -9`. NaN and inf are kept as
Python's `json` writes and reads them (`NaN`, `Infinity`), an extension of the JSON standard.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from tokrate.errors import JournalError
from tokrate.record import ThroughputRecord
from tokrate.run import Entry, Outcome
from tokrate.writing import keeping_write

JOURNAL_NAME = "journal.jsonl"
CHUNK_BYTES = 1 << 20
ENTRY_START = b'{"kind":"entry"'
RUN_START = b'{"kind":"run"'
DELIVERED = (ENTRY_START, b'{"kind":"summary"')


class Place(NamedTuple):
    """A place in the journal: behind so many bytes, and so many entries."""

    offset: int = 0
    entries: int = 0


class Resume(NamedTuple):
    """A session that goes on from a checkpoint: what came after that step is void."""

    offset: int
    """Place of the session's first line in the journal."""
    step: int
    """Step of the checkpoint."""


class Journal:
    """Writes a run's journal. One process at a time: the file is locked until `close`.

    Args:
        folder: The run's folder.
        fsync: Wait after each line until the disk has it: safe from a power cut, and slow.

    Raises:
        JournalError: Another process writes it, or it cannot be opened.
    """

    def __init__(self, folder: Path, *, fsync: bool = False) -> None:
        import msgspec  # these two not at import: `import tokrate` stays light
        from filelock import FileLock, Timeout

        self._encode = msgspec.json.Encoder().encode
        self._write = os.write if fsync else keeping_write()  # a disk is worth changing threads
        self._fsync = fsync
        self.path = folder / JOURNAL_NAME
        self._lock = FileLock(folder / "journal.lock", thread_local=False)
        try:
            self._lock.acquire(blocking=False)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except Timeout:
            raise JournalError(
                f"{self.path} is being written by {_writer(self.path)}: expected one process for "
                "each run; end it, or open this run with another name or id"
            ) from None
        except OSError as error:
            raise JournalError(
                f"{self.path} cannot be opened ({error.strerror or error}): expected a file that "
                "this process may write to; pass another dir="
            ) from error
        self._cut_torn_line()
        self.place, self.sessions, self.resumes = survey(self.path)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line with one `write`. Not for two threads at once.

        Raises:
            OSError: The disk is full, or gone; what was written of the line is cut off again.
        """
        self._append(_encoded(line), line["kind"] == "entry")

    def _append(self, data: bytes, is_entry: bool) -> None:
        data += b"\n"
        try:
            if self._write(self._file, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._fsync:
                os.fsync(self._file)
        except OSError:  # the disk is full, or broken: take the half line back
            os.ftruncate(self._file, self.place.offset)
            raise
        self.place = Place(self.place.offset + len(data), self.place.entries + is_entry)

    def append_entry(self, entry: Entry, kind: str = "entry") -> None:
        """Write an entry, or a summary, which has the same form; raises as `append`."""
        line: dict[str, Any] = {
            "kind": kind,
            "time_unix_ms": entry.time_unix_ms,
            "step": entry.step,
            "metrics": entry.metrics,
        }
        record = entry.record
        if record is not None:
            line["record"] = record
        try:
            # A third of the time that `json` takes, but NaN and inf would silently become null.
            if all(map(isfinite, entry.metrics.values())) and (record is None or record.is_finite):
                self._append(self._encode(line), kind == "entry")
                return
        except OverflowError:  # a whole number of more than 64 bits
            pass
        if record is not None:
            line["record"] = record.to_dict()
        self.append(line)

    def append_end(self, outcome: Outcome) -> None:
        """Write how the session ended; raises as `append`."""
        self.append(
            {
                "kind": "end",
                "time_unix_ms": time.time_ns() // 1_000_000,
                "outcome": outcome.status,
                "exit_code": outcome.exit_code,
            }
        )

    def close(self) -> None:
        """Let the file and the lock go; calling it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._lock.release()

    def _cut_torn_line(self) -> None:
        """Take back the half line of a process that died within a write, before `log` returned."""
        size = os.fstat(self._file).st_size
        end = size
        with self.path.open("rb") as file:
            while end:
                start = max(0, end - CHUNK_BYTES)
                file.seek(start)
                newline = file.read(end - start).rfind(b"\n")
                end = start + newline + 1
                if newline >= 0:
                    break
        if end != size:
            os.ftruncate(self._file, end)


class Batch(NamedTuple):
    """Entries read from a journal, and the place behind them."""

    entries: list[Entry]
    place: Place
    unreadable: int
    """Entry lines that are no entries (a foreign hand, a damaged disk)."""
    superseded: int
    """Entries that a later session wrote anew: it went on from an earlier checkpoint."""


class JournalReader:
    """Reads entries on from a place, while the journal is being written.

    Args:
        path: The journal.
        place: Where to begin.
        resumes: Resumes that may supersede entries, as `Journal.resumes` gives them.
    """

    def __init__(
        self,
        path: Path,
        place: Place = Place(),  # noqa: B008 - immutable
        resumes: Sequence[Resume] = (),
    ) -> None:
        self._path = path
        self._resumes = resumes
        self.place = place

    def read(self, limit: int) -> Batch:
        """The next entries; does not move on by itself (set `place` when they are delivered).

        Args:
            limit: Most entries to return.

        Raises:
            OSError: The journal is gone.
        """
        found: list[Entry] = []
        offset, entries = self.place
        unreadable = superseded = 0
        with self._path.open("rb") as file:
            file.seek(offset)
            for raw in file:
                if not raw.endswith(b"\n"):  # being written just now
                    break
                offset += len(raw)
                if not raw.startswith(DELIVERED):
                    continue
                is_entry = raw.startswith(ENTRY_START)
                entries += is_entry
                try:
                    entry = _entry(json.loads(raw))
                except (ValueError, KeyError, TypeError):
                    unreadable += is_entry
                    continue
                if any(offset <= r.offset and entry.step > r.step for r in self._resumes):
                    superseded += is_entry
                    continue
                found.append(entry)
                if len(found) >= limit:
                    break
        return Batch(found, Place(offset, entries), unreadable, superseded)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """All lines of a journal that can be read, in order.

    Raises:
        JournalError: There is no journal.
    """
    try:
        with path.open("rb") as file:
            for raw in file:
                line = _parse(raw)
                if line is not None:
                    yield line
    except OSError as error:
        raise JournalError(
            f"{path} cannot be read ({error.strerror or error}): expected the journal of a run; "
            "pass the folder that holds journal.jsonl"
        ) from error


def first_line(path: Path) -> dict[str, Any] | None:
    """The first line of a journal; None when there is no journal or no line."""
    return next(read_lines(path), None) if path.exists() else None


def started_unix_ms(path: Path) -> int:
    """When the journal was begun, in milliseconds since 1970-01-01 UTC; now if that is yet to come.

    Raises:
        JournalError: The journal cannot be read.
    """
    found = (first_line(path) or {}).get("time_unix_ms")
    return found if isinstance(found, int) else time.time_ns() // 1_000_000


def survey(path: Path) -> tuple[Place, int, list[Resume]]:
    """The end of a journal, the number of its sessions, and their resumes.

    Fast, since `kind` always stands first: only the first line of each session is parsed.
    """
    offset = entries = sessions = 0
    resumes = []
    with path.open("rb") as file:
        for raw in file:
            if raw.startswith(ENTRY_START):
                entries += 1
            elif raw.startswith(RUN_START):
                sessions += 1
                step = (_parse(raw) or {}).get("resume_step")
                if isinstance(step, int):
                    resumes.append(Resume(offset, step))
            offset += len(raw)
    return Place(offset, entries), sessions, resumes


def _encoded(line: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a path of an option that is no UTF-8: as an escape it comes back
        return json.dumps(line, separators=(",", ":")).encode()


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _entry(line: dict[str, Any]) -> Entry:
    record = line.get("record")
    return Entry(
        time_unix_ms=line["time_unix_ms"],
        step=line["step"],
        metrics=line["metrics"],
        record=None if record is None else ThroughputRecord.from_dict(record),
    )


def _writer(path: Path) -> str:
    pids = [line.get("pid") for line in read_lines(path) if line.get("kind") == "run"]
    return f"process {pids[-1]}" if pids else "another process"

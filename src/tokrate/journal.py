"""The journal: the run's own append-only file, one JSON line for each thing that happened.

    {"kind": "run", ...}     once for each session
    {"kind": "entry", ...}   one for each log call that was accepted
    {"kind": "end", ...}     how the session ended

An entry is in the file before `log` returns: it survives `kill -9`. NaN and inf are kept as
Python's `json` writes and reads them (`NaN`, `Infinity`), an extension of the JSON standard.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from tokrate.errors import JournalError
from tokrate.record import ThroughputRecord
from tokrate.run import Entry

JOURNAL_NAME = "journal.jsonl"
CHUNK_BYTES = 1 << 20
ENTRY_START = b'{"kind":"entry"'
RUN_START = b'{"kind":"run"'


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
        self._fsync = fsync
        self.path = folder / JOURNAL_NAME
        self._lock = FileLock(folder / "journal.lock", thread_local=False)
        try:
            self._lock.acquire(blocking=False)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except Timeout:
            raise JournalError(
                f"{self.path} is being written by process {_last_pid(self.path)}: expected one "
                "process for each run; end it, or open this run with another name or id"
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
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"))
        data = text.encode("utf-8", "surrogatepass") + b"\n"
        written = os.write(self._file, data)
        if written != len(data):  # the disk is full: take the half line back
            os.ftruncate(self._file, self.place.offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._fsync:
            os.fsync(self._file)
        entries = self.place.entries + (line["kind"] == "entry")
        self.place = Place(self.place.offset + len(data), entries)

    def append_entry(self, entry: Entry) -> None:
        """Write an entry; raises as `append`."""
        line = {
            "kind": "entry",
            "time_unix_ms": entry.time_unix_ms,
            "step": entry.step,
            "metrics": entry.metrics,
        }
        if entry.record is not None:
            line["record"] = entry.record.to_dict()
        self.append(line)

    def close(self) -> None:
        """Let the file and the lock go; calling it again does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            self._lock.release()

    def _cut_torn_line(self) -> None:
        """Take back the half line of a process that died within a write, before `log` returned."""
        size = os.fstat(self._file).st_size
        with self.path.open("rb") as file:
            file.seek(max(0, size - CHUNK_BYTES))
            tail = file.read()
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._file, size - len(tail) + tail.rfind(b"\n") + 1)


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
                if not raw.startswith(ENTRY_START):
                    continue
                entries += 1
                try:
                    entry = _entry(json.loads(raw))
                except (ValueError, KeyError, TypeError):
                    unreadable += 1
                    continue
                if any(offset <= r.offset and entry.step > r.step for r in self._resumes):
                    superseded += 1
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


def _last_pid(path: Path) -> Any:
    runs = [line for line in read_lines(path) if line.get("kind") == "run"]
    return runs[-1].get("pid", "?") if runs else "?"

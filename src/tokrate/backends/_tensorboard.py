"""Writes TensorBoard event files: one event holds all values of an entry, flushed per batch.

    run.folder/events.out.tfevents.<second>.<host>.<pid>.<nanosecond>

TensorBoard keeps float32 values; exact counts are in the journal. Neither torch nor TensorFlow
is imported.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokrate.backends import _tensorboard_pages as pages
from tokrate.backends.base import Entry, Outcome
from tokrate.errors import BackendError, ConfigError
from tokrate.run import RunInfo

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary


class TensorBoardBackend:
    """One event file per session, in the run's own folder.

    Args:
        run: The run that is written.
        dir: Log root that `tensorboard --logdir` is given; the run gets a folder of its name in
            it. None puts the event files into the run's folder, next to the journal.
    """

    def __init__(self, run: RunInfo, *, dir: str | os.PathLike[str] | None = None) -> None:  # noqa: A002
        self._run = run
        self._folder = _log_folder(run, dir)
        self._file: EventFile | None = None
        self._greeted = False
        self._first = False
        self.left_out: Counter[str] = Counter()

    def write(self, entries: Sequence[Entry]) -> None:
        """Append one event per entry and flush. After an outage a new file is opened."""
        try:
            if self._file is None:
                self._first = self._first or not _is_begun(self._folder)
                self._file = EventFile(self._folder)
            self._greet(self._file)
            events, left_out = _events(entries)
            self._file.append(events)
            self.left_out += left_out
        except OSError as error:
            if self._file is not None and not self._file.is_whole():
                self._drop_file()
            raise BackendError(
                f"tensorboard: cannot write event files in {self._folder}: {error}",
                retryable=True,
            ) from error
        except ImportError as error:
            raise BackendError(
                f"tensorboard is installed but fails to import: {error}", retryable=False
            ) from error

    def close(self, outcome: Outcome) -> None:
        """Say that the run finished, if it did, and close the file."""
        try:
            if self._file is not None and outcome.status == "finished":
                self._file.append([_page([pages.row_end()], self._run.resume_step or 0)])
        except OSError as error:
            raise BackendError(f"tensorboard: {error}", retryable=True) from error
        finally:
            self._drop_file()

    def _greet(self, file: EventFile) -> None:
        """What opens a session: the cut behind which old points are void, and the run's facts.

        What concerns the run as a whole is in its first file only.
        """
        run, events = self._run, []
        if not self._greeted and run.resume_step is not None:
            events.append(_cut(run.resume_step))
        values = [] if self._greeted else [pages.facts(run)]
        values += [pages.layout(run.prefix), *pages.row(run)] if self._first else []
        if values:
            file.append([*events, _page(values, run.resume_step or 0)])
        self._greeted, self._first = True, False

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class EventFile:
    """An event file under way: what `append` returned from is on disk, whole or not at all.

    TensorBoard's own `EventFileWriter` writes from a thread, which dies loudly on a full disk and
    never notices that its folder was removed; here every error reaches the caller.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        now_ns = time.time_ns()
        second, nanosecond = divmod(now_ns, 10**9)
        # Readers take the files in the order of their names.
        name = f"{second:010d}.{socket.gethostname()}.{os.getpid()}.{nanosecond:09d}"
        self._path = folder / f"events.out.tfevents.{name}"
        self._file = self._path.open("xb", buffering=0)
        self._good_bytes = 0
        try:
            self.append([Event(wall_time=now_ns / 1e9, file_version="brain.Event:2")])
        except OSError:
            self.close()
            self._path.unlink(missing_ok=True)
            raise

    def append(self, events: Iterable[Event]) -> None:
        """Write the events with one system call where the disk allows it.

        Raises:
            OSError: the disk is full, or the file is no longer where it was.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        buffer = io.BytesIO()
        records = RecordWriter(buffer)
        for event in events:
            records.write(event.SerializeToString())
        try:
            self._write(buffer.getbuffer())
            if not self._is_in_place():  # writing to a removed file succeeds, and is lost
                raise FileNotFoundError(f"{self._path} was removed or replaced")
        except OSError:
            self._undo()
            raise
        self._good_bytes += buffer.tell()

    def is_whole(self) -> bool:
        """Whether the file is in its place and ends where the last good `append` ended."""
        in_place = self._is_in_place()
        return in_place and os.fstat(self._file.fileno()).st_size == self._good_bytes

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        """Let the file go."""
        self._file.close()

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[self._file.write(data) :]

    def _undo(self) -> None:
        """Cut off what was written by halves: the same entries come again."""
        # Where this fails too, readers stop at the torn record and go on with the next file.
        with contextlib.suppress(OSError):
            self._file.truncate(self._good_bytes)
            self._file.seek(self._good_bytes)


def _events(entries: Sequence[Entry]) -> tuple[list[Event], Counter[str]]:
    """One event per entry, and how many values it cannot hold, by reason."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    events, left_out = [], Counter[str]()
    for entry in entries:
        shown = {key: v for key, v in entry.metrics.items() if _fits_float32(v)}
        left_out["too large for float32"] += len(entry.metrics) - len(shown)
        values = [Summary.Value(tag=key, simple_value=value) for key, value in shown.items()]
        summary = Summary(value=values)
        wall_time_s = entry.time_unix_ms / 1000
        events.append(Event(wall_time=wall_time_s, step=entry.step, summary=summary))
    return events, left_out


def _is_begun(folder: Path) -> bool:
    """Whether an earlier session, or an earlier file of this one, is there."""
    return any(folder.glob("events.out.tfevents.*"))


def _log_folder(run: RunInfo, root: str | os.PathLike[str] | None) -> Path:
    if run.folder is None:
        raise ConfigError("tensorboard: the run has no folder; open it with tokrate.open_logger")
    if root is None:
        return run.folder
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise ConfigError(f"tensorboard: dir is the path of a folder, not {root!r}")
    if "://" in os.fspath(root):
        raise ConfigError(f"tensorboard: dir must be a local folder, found {os.fspath(root)!r}")
    return Path(root).absolute() / run.folder.name


def _cut(resume_step: int) -> Event:
    """Readers drop all points behind the checkpoint's step, which itself stays."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    start = SessionLog(status=SessionLog.START)
    return Event(wall_time=time.time(), step=resume_step + 1, session_log=start)


def _page(values: Sequence[Summary.Value], step: int) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Event(wall_time=time.time(), step=step, summary=Summary(value=values))


def _fits_float32(number: int | float) -> bool:
    """Whether float32 can tell the number from infinity (which would be another value)."""
    try:
        struct.pack("<f", number)
    except (OverflowError, struct.error):  # the latter for a whole number beyond float64
        return False
    return True

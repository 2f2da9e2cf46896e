"""Writes TensorBoard event files: one event holds all values of an entry, flushed per batch.

    run.folder/events.out.tfevents.<second>.<host>.<pid>.<nanosecond>

TensorBoard keeps float32 values; exact counts are in the journal. Neither torch nor TensorFlow
is imported.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokrate.backends.base import Entry, Outcome
from tokrate.errors import BackendError, ConfigError
from tokrate.plain import flat
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
        self.left_out: Counter[str] = Counter()

    def write(self, entries: Sequence[Entry]) -> None:
        """Append one event per entry and flush. After an outage a new file is opened."""
        try:
            if self._file is None:
                self._file = EventFile(self._folder)
            if not self._greeted:
                self._file.append(_greeting(self._run))
                self._greeted = True
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
        """Close the file; event files have no place for the outcome."""
        self._drop_file()

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


def _greeting(run: RunInfo) -> list[Event]:
    """What opens a session: the cut behind which old points are void, and the run's facts."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary

    events = []
    if run.resume_step is not None:
        # Readers drop all points from this step on. The point of the checkpoint's step stays.
        start = SessionLog(status=SessionLog.START)
        events.append(Event(wall_time=time.time(), step=run.resume_step + 1, session_log=start))
    values = [
        _value("run/text_summary", "text", _facts(run).encode(), dims=[1]),
        _value("custom_scalars__config__", "custom_scalars", _layout(run.prefix), dims=[]),
    ]
    summary = Summary(value=values)
    events.append(Event(wall_time=time.time(), step=run.resume_step or 0, summary=summary))
    return events


def _value(tag: str, plugin: str, content: bytes, dims: Sequence[int]) -> Summary.Value:
    """What a page of TensorBoard shows, by hand: its own helpers import TensorFlow."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in dims])
    tensor = TensorProto(dtype=DT_STRING, string_val=[content], tensor_shape=shape)
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin))
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def _layout(prefix: str) -> bytes:
    """The page "custom scalars": both rates in one chart, and both shares in another."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import (
        Category,
        Chart,
        Layout,
        MultilineChartContent,
    )

    charts = {
        "tokens per second": ["active_tps", "raw_tps"],
        "share of raw tokens": ["padded_frac", "masked_frac"],
    }
    chart = [
        Chart(title=title, multiline=MultilineChartContent(tag=[f"^{prefix}/{n}$" for n in names]))
        for title, names in charts.items()
    ]
    return bytes(Layout(category=[Category(title=prefix, chart=chart)]).SerializeToString())


def _facts(run: RunInfo) -> str:
    """The run's identity, tags and configuration as a Markdown table."""
    rows = {"run": run.name, "id": run.id, "tags": ", ".join(run.tags), **flat(run.config or {})}
    lines = [f"| {_cell(key)} | {_cell(value)} |" for key, value in rows.items()]
    return "\n".join(["| | |", "|-|-|", *lines])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.replace("|", "\\|").replace("\n", " ")


def _fits_float32(number: int | float) -> bool:
    """Whether float32 can tell the number from infinity (which would be another value)."""
    try:
        struct.pack("<f", number)
    except (OverflowError, struct.error):  # the latter for a whole number beyond float64
        return False
    return True

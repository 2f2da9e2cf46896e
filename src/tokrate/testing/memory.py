"""A real backend whose tracker is this process: for tests of loops, and as the shortest example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tokrate.backends.base import Entry, Outcome
from tokrate.run import RunInfo


@dataclass(slots=True)
class MemoryRun:
    """What the tracker knows of one run."""

    info: RunInfo
    """The run as the last session gave it."""
    entries: list[Entry] = field(default_factory=list)
    """Everything that was written, each entry once."""
    outcome: Outcome | None = None
    """How the run ended; None while it runs."""
    seen: set[tuple[int, int, str]] = field(default_factory=set, repr=False)
    """What tells entries apart, so that a replay adds nothing."""


class MemoryBackend:
    """Keeps what is written in `MemoryBackend.runs`, by run id.

    In a test, `logger={"tokrate.testing:MemoryBackend": {}}` puts the production path into use and
    the result into reach:

    >>> from tokrate.run import Entry, Outcome, RunInfo
    >>> backend = MemoryBackend(RunInfo("demo", id="a1"))
    >>> backend.write([Entry(time_unix_ms=0, step=1, metrics={"loss": 0.5})])
    >>> backend.close(Outcome.FINISHED)
    >>> [(entry.step, entry.metrics) for entry in MemoryBackend.runs["a1"].entries]
    [(1, {'loss': 0.5})]

    Args:
        run: The run that is written.
    """

    runs: ClassVar[dict[str, MemoryRun]] = {}
    """All runs of this process by id; clear it between tests."""

    def __init__(self, run: RunInfo) -> None:
        self._info = run
        self._run: MemoryRun | None = None

    def write(self, entries: Sequence[Entry]) -> None:
        """Keep the entries, those written before only once."""
        run = self._connected()
        for entry in entries:
            identity = (entry.time_unix_ms, entry.step, repr(entry.metrics))
            if identity not in run.seen:
                run.seen.add(identity)
                run.entries.append(entry)

    def close(self, outcome: Outcome) -> None:
        """Note how the run ended."""
        run, self._run = self._run, None
        if run is not None:
            run.outcome = outcome

    def _connected(self) -> MemoryRun:
        if self._run is None:
            self._run = self.runs.setdefault(str(self._info.id), MemoryRun(self._info))
            self._run.info = self._info
            self._run.outcome = None
        return self._run

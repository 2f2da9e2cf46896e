"""Delivery: carries journal entries to one backend, at that backend's pace.

    journal ──► reader ──► batch ──► Backend.write ──► cursor moves on

The cursor moves only after a write, so nothing is lost when a tracker or the process dies; what
was written twice is the same twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokrate import ends
from tokrate.backends.base import Backend, CountsLeftOut
from tokrate.errors import BackendError
from tokrate.journal import Batch, JournalReader, Place, Resume
from tokrate.redact import redact_text
from tokrate.run import Entry, Outcome

log = logging.getLogger("tokrate")

BATCH_ENTRIES = 1000
LINGER_S = 0.2
"""How long a thread lets entries gather once it is awake: fewer requests, fewer wake-ups."""
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
"""Wait after a failed try, doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryStats:
    """What became of a run's entries at one backend. `accepted` is the sum of the others."""

    accepted: int
    """Entries in the journal, those of earlier sessions included."""
    delivered: int
    """Entries that the tracker took."""
    waiting: int
    """Entries still to be delivered."""
    refused: int
    """Entries that the tracker will never take, or that could not be read."""
    superseded: int
    """Entries of an earlier session that a resumed one writes anew: they are not delivered."""
    values_left_out: Mapping[str, int]
    """Reason to number of values that the tracker cannot show, such as `{"inf": 3}`."""
    problem: str | None
    """Why entries are waiting, in words, as long as the tracker fails."""


class Cursor:
    """How far a backend has come, kept in a small file beside the journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.place = Place()
        self.refused = 0
        self.superseded = 0
        self.ended_session = 0
        """Session whose end the tracker was told."""
        if path.exists():
            try:
                saved = json.loads(path.read_text())
                self.place = Place(int(saved["offset"]), int(saved["entries"]))
                self.refused = int(saved["refused"])
                self.superseded = int(saved["superseded"])
                self.ended_session = int(saved["ended_session"])
            except (ValueError, KeyError, TypeError):
                # Better twice than never: trackers keep equal points once.
                log.warning(f"{path} cannot be read; delivering the run from its first entry")

    def move(self, place: Place, refused: int = 0, superseded: int = 0) -> None:
        """Remember that everything before the place was dealt with; raises OSError."""
        self.place = place
        self.refused += refused
        self.superseded += superseded
        self._save()

    def end(self, session: int) -> None:
        """Remember that the tracker was told how the session ended; raises OSError."""
        self.ended_session = session
        self._save()

    def _save(self) -> None:
        state = {
            "offset": self.place.offset,
            "entries": self.place.entries,
            "refused": self.refused,
            "superseded": self.superseded,
            "ended_session": self.ended_session,
        }
        self._path.parent.mkdir(exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(state))
        fresh.replace(self._path)


class Delivery:
    """Carries the entries of one run to one backend.

    Args:
        name: What the backend is called in messages.
        backend: Opened by its factory.
        journal: The run's `journal.jsonl`.
        cursor: How far earlier sessions came.
        session: Number of the session that is being delivered.
        resumes: Resumes that supersede entries of earlier sessions.
        clock: Returns seconds.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        journal: Path,
        cursor: Cursor,
        session: int = 1,
        resumes: Sequence[Resume] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._backend = backend
        self._reader = JournalReader(journal, cursor.place, resumes)
        self._cursor = cursor
        self._session = session
        self._clock = clock
        self._connected = False
        self._problem: str | None = None
        self._given_up = False
        self._wait_s = FIRST_WAIT_S
        self._outcome = Outcome.FINISHED
        self._deadline: float | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # --- from the loop's thread ------------------------------------------------------------------

    def connect(self) -> None:
        """Reach the tracker now, in this thread; for backends that are required.

        Raises:
            BackendError: It cannot be reached.
        """
        self._backend.write(())
        self._connected = True
        ends.come_first()  # before the exit handlers that the tracker has just registered

    def start(self) -> None:
        """Begin to deliver in a thread of its own."""
        # A daemon: a tracker that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=f"tokrate-{self.name}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Say that there is something new in the journal."""
        if not self._wake.is_set():
            self._wake.set()

    def begin_close(self, outcome: Outcome, deadline: float) -> None:
        """Ask the thread to deliver the rest and end the run, by the deadline on the clock."""
        self._outcome, self._deadline = outcome, deadline
        self._closing.set()
        self._wake.set()

    def join(self) -> None:
        """Wait for the thread until the deadline."""
        if self._thread is not None and self._deadline is not None:
            self._thread.join(max(0.0, self._deadline - self._clock()))

    def stats(self, accepted: int) -> DeliveryStats:
        """Where things stand.

        Args:
            accepted: Entries in the journal.
        """
        done, refused = self._cursor.place.entries, self._cursor.refused
        superseded = self._cursor.superseded
        left_out = self._backend.left_out if isinstance(self._backend, CountsLeftOut) else {}
        return DeliveryStats(
            accepted=accepted,
            delivered=done - refused - superseded,
            waiting=max(0, accepted - done),
            refused=refused,
            superseded=superseded,
            values_left_out=dict(left_out),
            problem=self._problem,
        )

    # --- in the delivery thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._deliver_until_closed()
        finally:
            self.finish(self._outcome)

    def _deliver_until_closed(self) -> None:
        while True:
            closing = self._closing.is_set()  # asked first: entries before it must be read below
            if self.deliver_some():
                continue
            if self._problem is None:
                if closing:
                    return
                self._wake.wait()
                self._wake.clear()
                self._closing.wait(LINGER_S)
            elif not closing:
                self._closing.wait(None if self._given_up else self._next_wait())
            elif self._given_up or self._out_of_time():
                return
            else:
                time.sleep(min(self._next_wait(), FIRST_WAIT_S))

    def deliver_some(self) -> bool:
        """Deliver one batch. True when there may be more to do at once."""
        if self._given_up:
            return False
        try:
            batch = self._reader.read(BATCH_ENTRIES)
        except OSError as error:
            self._failed(f"the journal cannot be read: {error}")
            return False
        if batch.place.entries == self._reader.place.entries and self._connected:
            self._reader.place = batch.place
            return False
        refused = self._write(batch.entries)
        if refused is None:
            return False
        self._recovered()
        self._move(batch, refused)
        return True

    def _write(self, entries: list[Entry]) -> int | None:
        """Write entries; the number that was refused for good, or None when the tracker fails."""
        try:
            if not self._connected:
                self.connect()
            if entries:
                self._backend.write(entries)
        except BackendError as error:
            if self._connected and not error.retryable:
                return self._refused(entries, error)
            self._given_up = not error.retryable
            self._failed(str(error))
            return None
        except Exception as error:  # noqa: BLE001 - a backend's bug must not lose points
            self._failed(f"{type(error).__name__}: {error}")
            return None
        return 0

    def _refused(self, entries: list[Entry], error: BackendError) -> int | None:
        """A batch that will never be taken: find the entries that are to blame."""
        if len(entries) > 1:
            return self._write_one_by_one(entries)
        log.warning(
            f"{self.name} refused the entry of step {entries[0].step}: {redact_text(str(error))}"
        )
        return 1

    def _write_one_by_one(self, entries: list[Entry]) -> int | None:
        """One bad entry must not take its batch with it."""
        refused = 0
        for entry in entries:
            result = self._write([entry])
            if result is None:
                return None
            refused += result
        return refused

    def _move(self, batch: Batch, refused: int) -> None:
        self._reader.place = batch.place
        try:
            self._cursor.move(batch.place, refused + batch.unreadable, batch.superseded)
        except OSError as error:
            self._cursor.place = batch.place
            self._failed(f"the place in the journal cannot be kept: {error}")

    def _failed(self, problem: str) -> None:
        problem = redact_text(problem)
        if self._problem is None:
            ending = "not tried again" if self._given_up else "tried again until it works"
            log.warning(
                f"{self.name}: {problem}. Entries wait in the journal and nothing is lost; {ending}"
            )
        self._problem = problem

    def _recovered(self) -> None:
        if self._problem is not None:
            log.warning(f"{self.name}: works again; delivering what waited")
        self._problem = None
        self._wait_s = FIRST_WAIT_S

    def _next_wait(self) -> float:
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, LONGEST_WAIT_S)
        return wait_s

    def _out_of_time(self) -> bool:
        return self._deadline is not None and self._clock() >= self._deadline

    def finish(self, outcome: Outcome) -> None:
        """Tell the tracker how the run ended and let it go."""
        try:
            self._backend.close(outcome)
            if self._connected and self._problem is None:
                self._cursor.end(self._session)
        except Exception as error:  # noqa: BLE001 - an end that cannot be told loses no point
            self._problem = redact_text(f"the end of the run could not be told: {error}")
            log.warning(f"{self.name}: {self._problem}; `tokrate sync` tells it later")

    def has_work(self, accepted: int) -> bool:
        """Whether anything waits, be it only the end of the session."""
        return self.stats(accepted).waiting > 0 or self._cursor.ended_session != self._session

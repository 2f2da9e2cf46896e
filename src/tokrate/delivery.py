"""Delivery: carries journal entries to one backend, at that backend's pace.

    journal ──► reader ──► batch ──► Backend.write ──► cursor moves on

The cursor moves only after a write, so nothing is lost when a tracker or the process dies; what
was written twice is the same twice.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tokrate import ends
from tokrate.backends.base import Backend, CountsLeftOut, Settles
from tokrate.cursor import Cursor
from tokrate.errors import BackendError
from tokrate.journal import Batch, Journal, JournalReader
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

    def __str__(self) -> str:
        counts = {"waiting": self.waiting, "refused": self.refused, "superseded": self.superseded}
        parts = [f"{self.delivered} delivered", *(f"{n} {what}" for what, n in counts.items() if n)]
        parts += [f"{n} x {reason} left out" for reason, n in self.values_left_out.items() if n]
        return ", ".join(parts)


class Delivery:
    """Carries the entries of one run to one backend.

    Args:
        name: What the backend is called in messages.
        backend: Opened by its factory.
        journal: The run's journal, whose resumes may supersede entries of earlier sessions.
        cursor: How far earlier sessions came.
        session: Number of the session that is being delivered.
        clock: Returns seconds.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        journal: Journal,
        cursor: Cursor,
        session: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._backend = backend
        self._journal = journal
        self._reader = JournalReader(journal.path, cursor.reached.place, journal.resumes)
        self._cursor = cursor
        self._session = session
        self._clock = clock
        self._connected = False
        self._problem: str | None = None
        self._said: set[str] = set()
        self._given_up = False
        self._wait_s = FIRST_WAIT_S
        self._outcome = Outcome.FINISHED
        self._deadline: float | None = None
        # Not events: these calls may come from a signal handler that interrupts one of themselves.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._hurry: queue.SimpleQueue[None] = queue.SimpleQueue()
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
        if self._wake.empty():
            self._wake.put(None)

    def begin_close(self, outcome: Outcome, deadline: float) -> None:
        """Ask the thread to deliver the rest and end the run, by the deadline on the clock."""
        self._outcome, self._deadline = outcome, deadline
        self._hurry.put(None)
        self._wake.put(None)

    def join(self) -> None:
        """Wait for the thread until the deadline."""
        if self._thread is not None and self._deadline is not None:
            self._thread.join(max(0.0, self._deadline - self._clock()))

    def stats(self, accepted: int) -> DeliveryStats:
        """Where things stand.

        Args:
            accepted: Entries in the journal.
        """
        (_, done), refused, superseded = self._cursor.reached
        accepted = max(accepted, done)  # some may have been delivered since they were counted
        left_out = self._backend.left_out if isinstance(self._backend, CountsLeftOut) else {}
        return DeliveryStats(
            accepted=accepted,
            delivered=done - refused - superseded,
            waiting=accepted - done,
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
            closing = self._deadline is not None  # asked first: entries before it are read below
            if closing and self._out_of_time():
                return
            if self.deliver_some():
                continue
            if closing and (self._problem is None or self._given_up):
                return
            if closing:
                time.sleep(min(self._next_wait(), FIRST_WAIT_S))
            elif self._problem is None:
                self._wait_for_entries()
            else:
                self._pause(None if self._given_up else self._next_wait())

    def _wait_for_entries(self) -> None:
        self._wake.get()
        with suppress(queue.Empty):
            while True:
                self._wake.get_nowait()
        self._pause(LINGER_S)

    def _pause(self, seconds: float | None) -> None:
        """Wait, but no longer than until the logger is closed."""
        with suppress(queue.Empty):
            self._hurry.get(timeout=seconds)

    def deliver_some(self) -> bool:
        """Deliver one batch. True when there may be more to do at once."""
        if self._given_up:
            return False
        try:
            batch = self._reader.read(BATCH_ENTRIES)
        except OSError as error:
            self._failed(f"the journal cannot be read: {error}", "delivery goes on when it is back")
            return False
        nothing_new = batch.place.entries == self._reader.place.entries and not batch.entries
        if nothing_new and self._connected:
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
            self._outage(str(error))
            return None
        except Exception as error:  # noqa: BLE001 - a backend's bug must not lose points
            self._outage(f"{type(error).__name__}: {error}")
            return None
        return 0

    def _refused(self, entries: list[Entry], error: BackendError) -> int | None:
        """A batch that will never be taken: find the entries that are to blame."""
        if len(entries) > 1:
            return self._write_one_by_one(entries)
        self._say_once(
            f"refused the entry of step {entries[0].step}: {redact_text(str(error))} "
            "(said once; further ones are counted in stats())",
            about="refused",
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
        refused += batch.unreadable
        settle_s = self._backend.settle_s if isinstance(self._backend, Settles) else 0.0
        self._keep(
            lambda: self._cursor.move(
                batch.place, refused, batch.superseded, now_s=self._clock(), settle_s=settle_s
            )
        )

    def _keep(self, save: Callable[[], None]) -> None:
        """Save the cursor; where that fails the run goes on, and the next session repeats some."""
        try:
            save()
        except OSError as error:
            self._say_once(
                f"the place in the journal cannot be kept ({error}): a restart or a sync would "
                "deliver again what was delivered since",
                about="place",
            )

    def _say_once(self, message: str, *, about: str) -> None:
        if about not in self._said:
            self._said.add(about)
            log.warning(f"{self.name}: {message}")

    def _outage(self, problem: str) -> None:
        again = "not tried again" if self._given_up else "tried again until it works"
        waiting = self._what_waits()
        self._failed(problem, f"{waiting} in the journal and nothing is lost; {again}")

    def _failed(self, problem: str, what_follows: str) -> None:
        problem = redact_text(" ".join(problem.split())).removeprefix(f"{self.name}: ")
        if self._problem is None:  # once for each outage
            log.warning(f"{self.name}: {problem}. {what_follows}")
        self._problem = problem

    def _recovered(self) -> None:
        if self._problem is not None:
            waiting = self._what_waits()
            log.warning(f"{self.name}: works again; {waiting} and will be delivered now")
            ends.come_first()
        self._problem = None
        self._wait_s = FIRST_WAIT_S

    def _what_waits(self) -> str:
        number = self._journal.place.entries - self._cursor.reached.place.entries
        return f"{number} {'entry waits' if number == 1 else 'entries wait'}"

    def _next_wait(self) -> float:
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, LONGEST_WAIT_S)
        return wait_s

    def _out_of_time(self) -> bool:
        return self._deadline is not None and self._clock() >= self._deadline

    def finish(self, outcome: Outcome) -> None:
        """Tell the tracker how the run ended and let it go."""
        try:
            self._backend.close(outcome)
        except Exception as error:  # noqa: BLE001 - an end that cannot be told loses no point
            problem = f"the end of the run could not be told: {error}"
            self._failed(problem, "`tokrate sync` tells it later")
        if self._connected and self._problem is None:
            self._keep(lambda: self._cursor.end(self._session))

    def abandon(self) -> None:
        """Let the tracker go before the run has begun; what it says no longer matters."""
        with suppress(Exception):
            self._backend.close(Outcome.FAILED)

    def has_work(self, accepted: int) -> bool:
        """Whether anything waits, be it only the end of the session."""
        return self.stats(accepted).waiting > 0 or self._cursor.ended_session != self._session

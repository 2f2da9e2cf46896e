"""The logger: what a training loop holds.

log(record) ──► names, values ──► journal ──► (delivery threads) ──► backends
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from tokrate import ends
from tokrate.delivery import Delivery, DeliveryStats
from tokrate.errors import ConfigError, MetricNameError, TokrateError, ValueRefused
from tokrate.journal import Journal
from tokrate.names import MetricNames, NameGate, legal_name
from tokrate.record import ThroughputRecord
from tokrate.run import Entry, Outcome, RunInfo
from tokrate.steady import SteadyWindows
from tokrate.values import to_number, to_step

log = logging.getLogger("tokrate")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerStats:
    """What became of everything that was logged."""

    entries: int
    """Entries in the run's journal, those of earlier sessions included."""
    left_out: Mapping[str, int]
    """Reason to number of values, names or whole calls that did not get into the journal."""
    renamed: Mapping[str, str]
    """Names from outside → the legal form under which they are written."""
    backends: Mapping[str, DeliveryStats]
    """Backend to what became of the entries there."""

    def __str__(self) -> str:
        parts = [f"journal: {self.entries} entries"]
        parts += [f"{name}: {stats}" for name, stats in self.backends.items()]
        if self.left_out:
            reasons = ", ".join(f"{n} x {reason}" for reason, n in self.left_out.items())
            parts.append(f"left out: {reasons}")
        return "; ".join(parts)


class Logger:
    """Writes records and metrics to the journal; the backends read on from there.

    Made by `open_logger`. Ranks that do not write hold one that does nothing. `log` and
    `log_metrics` may be called from any thread and, after a fork, do nothing in the child.
    """

    def __init__(
        self,
        *,
        run: RunInfo,
        names: MetricNames,
        journal: Journal | None,
        deliveries: Iterable[Delivery] = (),
        strict: bool = False,
        close_timeout_s: float = 30.0,
    ) -> None:
        self.run = run
        self._names = names
        self._journal = journal
        self._deliveries = tuple(deliveries)
        self._strict = strict
        self._close_timeout_s = close_timeout_s
        self._gate = NameGate()
        self._gate.declare([*names.reserved, *names.aliases])
        self._left_out: Counter[str] = Counter()
        self._renamed: dict[str, str] = {}
        self._said: set[str] = set()
        self._steady = SteadyWindows()
        self._lock = threading.RLock()  # re-entered when a signal arrives within a log call
        self._pid = os.getpid()
        self._ending: tuple[Outcome, float] | None = None
        """How the run ends, and the deadline on the clock, once `close` has begun."""
        self._report: LoggerStats | None = None
        if journal is not None:
            ends.watch(id(self), self.close)
        for delivery in self._deliveries:
            delivery.start()

    # --- what a loop calls -----------------------------------------------------------------------

    def log(self, record: ThroughputRecord) -> None:
        """Log a record. Returns in microseconds and never raises because of a tracker."""
        self._write(record.step, record.metrics(self._names), record)

    def log_metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers of your own beside the records.

        Args:
            metrics: Name to number. Tensors and numpy values of one element are numbers too.
                Illegal names are written under their nearest legal form.
            step: Optimizer step.

        Raises:
            TokrateError: A name, value or step is no good; only with `strict=True`. Otherwise it
                is left out, counted in `stats()`, and said once.
        """
        if self._idle():
            return
        numbers: dict[str, int | float] = {}
        for name, value in metrics.items():
            try:
                numbers[self._admit(name)] = to_number(value)
            except TokrateError as error:
                self._leave_out(name, error)
        try:
            step = to_step(step)
        except ValueRefused as error:
            self._leave_out("step", error)
            return
        if numbers or not metrics:
            self._write(step, numbers, None)

    def stats(self) -> LoggerStats:
        """What became of everything so far; after `close`, how it ended."""
        if self._report is not None:
            return self._report
        entries = 0 if self._journal is None else self._journal.place.entries
        return LoggerStats(
            entries=entries,
            left_out=dict(self._left_out),
            renamed=dict(self._renamed),
            backends={delivery.name: delivery.stats(entries) for delivery in self._deliveries},
        )

    def close(self, outcome: Outcome | str | None = None) -> LoggerStats:
        """Deliver what is waiting, within `close_timeout_s`, and end the run in every tracker.

        Args:
            outcome: `"finished"` (also None), `"failed"`, `"killed"`, or an `Outcome`.

        Returns:
            What was accepted, delivered, and is waiting for `tokrate sync`. Calling it again
            returns the same.
        """
        if self._report is None and not self._idle():
            found = _outcome(outcome)
            self._close(ends.killed() or found if found == Outcome.FINISHED else found)
        return self.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(ends.outcome_of(error))

    # --- inside ----------------------------------------------------------------------------------

    def _idle(self) -> bool:
        return self._journal is None or os.getpid() != self._pid

    def _write(
        self, step: int, metrics: Mapping[str, int | float], record: ThroughputRecord | None
    ) -> None:
        if self._idle() or self._journal is None:
            return
        entry = Entry(
            time_unix_ms=time.time_ns() // 1_000_000, step=step, metrics=metrics, record=record
        )
        try:
            with self._lock:
                if self._report is not None:
                    raise ValueRefused("the logger is closed: expected log calls before close()")
                self._journal.append_entry(entry)
                if record is not None:
                    self._steady.add(record)
        except (OSError, ValueRefused) as error:
            self._leave_out("journal", error)
            return
        for delivery in self._deliveries:
            delivery.wake()

    def _admit(self, name: Any) -> str:
        """The name under which a metric from outside is written."""
        text = name if isinstance(name, str) else repr(name)
        with self._lock:
            legal = self._gate.admit(text)
        if legal is None:
            raise MetricNameError(
                f"metric name {text[:80]!r} collides, as {legal_name(text)!r}, with another name "
                "or with a group of names: expected names that differ in letters, digits and _"
            )
        if legal != text:
            if self._strict:
                raise MetricNameError(f"metric name {text[:80]!r} is not legal: use {legal!r}")
            if text not in self._renamed:
                self._renamed[text] = legal
                log.warning(f"metric {text[:80]!r} is written as {legal!r} in every tracker")
        return legal

    def _leave_out(self, name: Any, error: Exception) -> None:
        if self._strict:
            raise error
        reason = _reason(error)
        about = f"{reason} {name}"
        with self._lock:
            self._left_out[reason] += 1
            said = about in self._said
            self._said.add(about)
        if not said:
            log.warning(f"{name!s:.80} left out: {error} (said once, counted in stats())")

    def _close(self, outcome: Outcome) -> None:
        # A signal may come within, and end the process once it has been here as well. The end that
        # was found first is the true one: whoever sends SIGTERM then is clearing up.
        if self._ending is None:
            self._ending = outcome, time.monotonic() + self._close_timeout_s
        outcome, deadline = self._ending
        try:
            self._write_steady()
            for delivery in self._deliveries:
                delivery.begin_close(outcome, deadline)
            for delivery in self._deliveries:
                delivery.join()
        finally:  # a second Ctrl-C cuts the wait short, and the journal is complete all the same
            self._end_journal(outcome)
            ends.unwatch(id(self))

    def _end_journal(self, outcome: Outcome) -> None:
        with self._lock:
            if self._report is not None:
                return
            if self._journal is not None:
                with suppress(OSError):
                    self._journal.append_end(outcome)
                self._journal.close()
            self._report = self.stats()
        self._say_what_waits(self._report)

    def _write_steady(self) -> None:
        """What this session was like as a whole, for the trackers' run tables."""
        windows, self._steady = self._steady, SteadyWindows()
        if windows.last_step is None or self._journal is None:
            return
        summary = Entry(
            time_unix_ms=time.time_ns() // 1_000_000,
            step=windows.last_step,
            metrics=self._names.steady(windows.values()),
        )
        with self._lock, suppress(OSError):  # a full disk has been said
            self._journal.append_entry(summary, kind="summary")

    def _say_what_waits(self, report: LoggerStats) -> None:
        waiting = [name for name, stats in report.backends.items() if stats.waiting]
        if waiting:
            log.warning(
                f"{report}. {', '.join(waiting)} did not take everything in time; "
                f"nothing is lost: run `tokrate sync {self.run.folder}` when the tracker is back"
            )
        else:
            log.info(str(report))

    def __getstate__(self) -> dict[str, Any]:
        """A pickled logger is one that does nothing: files and threads stay in this process."""
        return {"run": replace(self.run, config=None), "names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state, journal=None)  # type: ignore[misc]


def _outcome(outcome: Outcome | str | None) -> Outcome:
    if isinstance(outcome, Outcome):
        return outcome
    known = {"finished": Outcome.FINISHED, "failed": Outcome.FAILED, "killed": Outcome.KILLED}
    if (found := known.get(outcome or "finished")) is None:
        raise ConfigError(f"outcome {outcome!r}: expected one of {', '.join(known)}")
    return found


def _reason(error: Exception) -> str:
    """Under which word something left out is counted."""
    if isinstance(error, MetricNameError):
        return "name"
    if isinstance(error, ValueRefused):
        return "step" if str(error).startswith("step") else "value"
    return "journal"

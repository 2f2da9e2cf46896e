"""The suite that every backend has to pass, ours and anybody's; it reads back past the backend.

    class TestGraphite(BackendConformance):
        def make(self, run):
            return GraphiteBackend(run, host="127.0.0.1")

        def read(self, run):
            return [(step, {"loss": value}), ...]    # by the tracker's own means

Collected by pytest like any test class. What a tracker cannot do is said by an attribute.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Lock
from typing import ClassVar, Literal

from tokrate.backends.base import Backend, CountsLeftOut
from tokrate.config import BackendChoice
from tokrate.errors import BackendError
from tokrate.journal import Journal
from tokrate.logger import Logger
from tokrate.names import MetricNames
from tokrate.opening import make_delivery
from tokrate.run import Entry, Outcome, RunInfo
from tokrate.testing.points import (
    HOSTILE_CONFIG,
    HOSTILE_TAGS,
    PATIENCE_S,
    SLACK_S,
    Row,
    Series,
    as_float32,
    as_text,
    each_once,
    entries,
    in_thread,
    new_run,
    newest_of_step,
    raised,
    series_of,
    wait_for,
    write_until_noticed,
)


class BackendConformance:
    """Subclass it, name the subclass `Test…`, and provide `make` and `read`."""

    numbers: ClassVar[Literal["exact", "float64", "float32"]] = "exact"
    """How the tracker stores a number; whole numbers are kept whole only by `exact`."""
    replay_is_once: ClassVar[bool] = True
    """Entries that are written again are shown once. False: twice, with equal values."""
    resume_drops_overlap: ClassVar[bool] = False
    """After a resume, points behind `resume_step` of the session before are gone. False: they
    stay, and the newer point of a step comes last."""
    keeps_backward_steps: ClassVar[bool] = True
    """A point whose step is below that of the point before it is shown."""

    patience_s: ClassVar[float] = PATIENCE_S
    """Longest time that a few entries may take to arrive, in seconds."""

    def make(self, run: RunInfo) -> Backend:
        """Open the backend under test for the run."""
        raise NotImplementedError

    def read(self, run: RunInfo) -> list[Row] | None:
        """What the tracker shows of the run, in its order, without using the backend.

        None for a backend that keeps nothing to read back: then only its conduct is tested.
        """
        raise NotImplementedError

    def is_created(self, run: RunInfo) -> bool | None:
        """Whether the tracker knows the run; None where that cannot be told."""
        return None

    def read_outcome(self, run: RunInfo) -> str | None:
        """How the run ended, as `finished`, `failed` or `killed`; None where none is kept."""
        return None

    def break_target(self, run: RunInfo) -> None:
        """Make the tracker unusable under an open backend, as an outage would."""
        _skip("break_target is not provided")

    def mend_target(self, run: RunInfo) -> None:
        """Undo `break_target`."""
        _skip("mend_target is not provided")

    def test_values_and_steps_arrive_in_order(self, tmp_path: Path) -> None:
        """Every value arrives under its step, in the order in which it was written."""
        run = new_run(tmp_path)
        written = entries({"train/loss": 1.0 / step} for step in range(1, 6))
        self.deliver(run, written[:2], written[2:])
        self.check(run, written)

    def test_names_are_kept(self, tmp_path: Path) -> None:
        """Metric keys arrive letter by letter, several in one entry and with digits."""
        run = new_run(tmp_path)
        written = entries([{"throughput/active_tps": 1.5, "throughput/raw_tps": 2.5, "lr_2": 3.5}])
        self.deliver(run, written)
        self.check(run, written)

    def test_numbers_are_as_exact_as_the_tracker_can(self, tmp_path: Path) -> None:
        """Whole numbers beyond float32 and float64, tiny and negative ones are not distorted."""
        run = new_run(tmp_path)
        values = [0, -1, 2**24 + 1, 2**53 + 1, 2**62, 1e-30, -0.1, 1 / 3]
        written = entries({"x": value} for value in values)
        self.deliver(run, written)
        self.check(run, written)

    def test_numbers_without_a_place_are_counted(self, tmp_path: Path) -> None:
        """NaN, infinities and numbers too large are shown as they are or counted as left out."""
        run = new_run(tmp_path)
        odd = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 10**400, "e": 1e300}
        backend = self.deliver(run, entries([{**odd, "f": 1.0}]))
        shown = self.series(run)
        if shown is None:
            return
        assert shown.pop("f") == [(0, 1.0)], "a value next to an odd one is missing"
        for key, points in shown.items():
            assert [as_text(value) for _, value in points] == [as_text(odd[key])], (
                f"{key} was {odd[key]!r} and is shown as {points}: another value"
            )
        counted = sum(backend.left_out.values()) if isinstance(backend, CountsLeftOut) else 0
        assert counted == len(odd) - len(shown), (
            f"shown {sorted(shown)} of {sorted(odd)}, but {counted} counted in left_out"
        )

    def test_large_steps_arrive(self, tmp_path: Path) -> None:
        """Steps up to 2**63 - 1 arrive unchanged."""
        run = new_run(tmp_path)
        steps = [0, 1, 2**31, 2**53 + 1, 2**63 - 1]
        written = entries(({"x": 1.0} for _ in steps), steps)
        self.deliver(run, written)
        self.check(run, written)

    def test_backward_steps_survive(self, tmp_path: Path) -> None:
        """A step below the one before it is a point like any other."""
        run = new_run(tmp_path)
        written = entries(({"x": float(step)} for step in (5, 3, 4)), [5, 3, 4])
        self.deliver(run, written)
        self.check(run, written if self.keeps_backward_steps else written[:1])

    def test_many_entries_in_one_write(self, tmp_path: Path) -> None:
        """A backlog of 1,200 entries in one call arrives whole."""
        run = new_run(tmp_path)
        written = entries({"x": float(step), "y": -float(step)} for step in range(1200))
        self.deliver(run, written)
        self.check(run, written)

    def test_empty_write_connects(self, tmp_path: Path) -> None:
        """Writing nothing makes the connection: the tracker then knows the run."""
        run = new_run(tmp_path)
        backend = self.make(run)
        in_thread(lambda: backend.write([]))
        assert self.is_created(run) is not False, "the tracker does not know the run"
        in_thread(lambda: backend.close(Outcome.FINISHED))
        self.check(run, [])

    def test_closing_unused_creates_nothing(self, tmp_path: Path) -> None:
        """A backend that was opened and closed leaves no trace in the tracker."""
        run = new_run(tmp_path)
        backend = self.make(run)
        in_thread(lambda: backend.close(Outcome.FINISHED))
        assert self.is_created(run) is not True, "a run was created without a write"

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        """The second close does nothing, and what was written stays."""
        run = new_run(tmp_path)
        written = entries([{"x": 1.0}])
        backend = self.deliver(run, written)
        in_thread(lambda: backend.close(Outcome.FAILED))
        self.check(run, written)
        assert self.read_outcome(run) in (None, "finished"), "the second close changed the outcome"

    def test_threads(self, tmp_path: Path) -> None:
        """Opened in one thread, written and closed in others, one after the other."""
        run = new_run(tmp_path)
        written = entries({"x": float(step)} for step in range(3))
        backend = self.make(run)
        for entry in written:
            in_thread(partial(backend.write, [entry]))
        in_thread(lambda: backend.close(Outcome.FINISHED))
        self.check(run, written)

    def test_outcomes_are_told(self, tmp_path: Path) -> None:
        """The tracker says how the run ended: finished, failed or killed."""
        for outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.KILLED):
            run = new_run(tmp_path, name=f"ended-{outcome.status}")
            self.deliver(run, entries([{"x": 1.0}]), outcome=outcome)
            assert self.read_outcome(run) in (None, outcome.status)

    def test_replay_loses_nothing(self, tmp_path: Path) -> None:
        """Entries that come again, in this session and the next, are shown once where possible."""
        run = new_run(tmp_path)
        written = entries({"x": float(step)} for step in range(3))
        self.deliver(run, written, written[1:])
        self.deliver(run, written)
        if self.replay_is_once:
            self.check(run, written)
        else:
            self.check(run, written, seen=each_once)

    def test_resume_continues_the_curves(self, tmp_path: Path) -> None:
        """A restarted run goes on in the tracker's same run, over the steps that it repeats."""
        run = new_run(tmp_path)
        first = entries({"x": float(step)} for step in range(5))
        second = entries(({"x": step + 100.0} for step in (3, 4, 5)), [3, 4, 5], after_ms=60_000)
        self.deliver(run, first, outcome=Outcome.FAILED)
        again = new_run(tmp_path, resume_step=2, config={"lr": 0.2, "new": 1})
        self.deliver(again, second)
        kept = first[:3] + second
        self.check(again, kept, seen=None if self.resume_drops_overlap else newest_of_step)
        assert self.read_outcome(again) in (None, "finished")

    def test_any_name_and_config_is_taken(self, tmp_path: Path) -> None:
        """Names, tags and configurations of every kind do not keep the values from arriving."""
        run = new_run(tmp_path, name="größer – 速い 🚀", config=HOSTILE_CONFIG, tags=HOSTILE_TAGS)
        written = entries([{"x": 1.0}])
        self.deliver(run, written)
        self.check(run, written)

    def test_an_outage_is_a_backend_error(self, tmp_path: Path) -> None:
        """With the tracker gone, `write` raises a chained BackendError; `close` nothing else."""
        run = new_run(tmp_path)
        backend = self.make(run)
        first, *later = entries({"x": float(step)} for step in range(6))
        in_thread(partial(backend.write, [first]))
        self.break_target(run)
        _, error = write_until_noticed(backend, later)
        assert isinstance(error, BackendError), f"write raised {error!r}; expected a BackendError"
        assert error.__cause__ is not None, "the tracker's own error is not chained (raise … from)"
        error = raised(lambda: backend.close(Outcome.FAILED))
        assert error is None or isinstance(error, BackendError), f"close raised {error!r}"

    def test_an_outage_ends(self, tmp_path: Path) -> None:
        """After an outage the entries that failed are taken, and none is missing."""
        run = new_run(tmp_path)
        backend = self.make(run)
        first, *later = entries({"x": float(step)} for step in range(6))
        in_thread(partial(backend.write, [first]))
        self.break_target(run)
        number, error = write_until_noticed(backend, later)
        assert error is not None, "the outage was not noticed"
        self.mend_target(run)
        for _ in range(4):
            error = raised(partial(backend.write, later[number:]))
            if error is None:
                break
        assert error is None, f"still failing after the outage: {error!r}"
        in_thread(lambda: backend.close(Outcome.FINISHED))
        self.check(run, [first, *later], seen=each_once)

    def test_the_account_of_a_whole_run(self, tmp_path: Path) -> None:
        """Logged from several threads through journal and delivery: all arrives, all is counted."""
        logger, run = self.open(tmp_path)
        steps, one_at_a_time = iter(range(200)), Lock()

        def work(_: int) -> None:
            for _ in range(50):
                with one_at_a_time:
                    log_step(logger, next(steps))

        with logger, ThreadPoolExecutor(4) as executor:
            list(executor.map(work, range(4)))
        stats = logger.stats().backends["tested"]
        assert (stats.accepted, stats.delivered, stats.waiting) == (200, 200, 0), stats
        assert (stats.refused, stats.superseded, stats.problem) == (0, 0, None), stats
        assert self.read_outcome(run) in (None, "finished")
        self.check_steps(run, range(200))

    def test_an_outage_that_does_not_end(self, tmp_path: Path) -> None:
        """`log` goes on, `close` keeps its deadline, and a later session delivers the rest."""
        logger, run = self.open(tmp_path, close_timeout_s=1.0)
        with logger:
            log_step(logger, 0)
            wait_for(lambda: logger.stats().backends["tested"].delivered == 1, self.patience_s)
            self.break_target(run)
            for step in range(1, 60):
                log_step(logger, step)
                if logger.stats().backends["tested"].problem:
                    break
                time.sleep(0.1)
            begin_s = time.monotonic()
        assert time.monotonic() - begin_s < 1.0 + SLACK_S, "close took longer than its deadline"
        stats = logger.stats().backends["tested"]
        assert stats.accepted == stats.delivered + stats.waiting == step + 1, stats
        self.mend_target(run)
        again, _ = self.open(tmp_path)
        stats = again.close().backends["tested"]
        assert (stats.accepted, stats.delivered, stats.waiting) == (step + 1, step + 1, 0), stats
        self.check_steps(run, range(step + 1))

    def open(self, folder: Path, *, close_timeout_s: float | None = None) -> tuple[Logger, RunInfo]:
        """A logger that delivers to the backend under test alone, as `open_logger` makes it."""
        run = new_run(folder)
        assert run.folder is not None
        journal = Journal(run.folder)
        session = journal.sessions + 1
        choice = BackendChoice("tested")
        delivery = make_delivery(choice, lambda run: self.make(run), run, journal, session)
        journal.append({"kind": "run", "id": run.id, "session": session, "pid": os.getpid()})
        logger = Logger(
            run=run,
            names=MetricNames(),
            journal=journal,
            deliveries=[delivery],
            strict=True,
            close_timeout_s=self.patience_s if close_timeout_s is None else close_timeout_s,
        )
        return logger, run

    def check_steps(self, run: RunInfo, steps: range) -> None:
        """Every step of `x` is shown, whatever the order, and those that came again only once."""
        shown = self.series(run)
        if shown is not None:
            found = sorted(each_once(shown)["x"])
            assert found == [(step, float(step)) for step in steps], f"x: shown {found}"

    def deliver(
        self, run: RunInfo, *batches: Sequence[Entry], outcome: Outcome = Outcome.FINISHED
    ) -> Backend:
        """Open the backend here, then write the batches and close it in another thread."""
        backend = self.make(run)

        def work() -> None:
            for batch in ([], *batches):
                backend.write(batch)
            backend.close(outcome)

        in_thread(work)
        return backend

    def series(self, run: RunInfo) -> Series | None:
        """What the tracker shows, by metric key."""
        rows = self.read(run)
        return None if rows is None else series_of(rows)

    def check(
        self,
        run: RunInfo,
        written: Iterable[Entry],
        seen: Callable[[Series], Series] | None = None,
    ) -> None:
        """Compare what the tracker shows, seen through `seen`, with what was written."""
        shown = self.series(run)
        if shown is None:
            return
        expected = series_of(
            (e.step, {k: self._stored(v) for k, v in e.metrics.items()}) for e in written
        )
        shown = seen(shown) if seen else shown
        assert sorted(shown) == sorted(expected), "other metric keys than were written"
        for key, points in expected.items():
            assert shown[key] == points, f"{key}: shown {shown[key]}, written {points}"

    def _stored(self, value: float) -> float:
        """The value after a stay in the tracker."""
        if self.numbers == "float32":
            return as_float32(value)
        return float(value) if self.numbers == "float64" else value


def log_step(logger: Logger, step: int) -> None:
    """Log one point."""
    logger.log_metrics({"x": float(step)}, step=step)


def _skip(reason: str) -> None:
    import pytest

    pytest.skip(reason)

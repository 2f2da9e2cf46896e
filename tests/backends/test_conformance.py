"""Every backend of ours passes the suite, and the suite fails whoever deserves it."""

from __future__ import annotations

import inspect
import os
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.readers import (
    mlflow_run,
    read_mlflow,
    read_tensorboard,
    read_wandb,
    wandb_records,
)
from tokrate.backends._console import ConsoleBackend
from tokrate.backends._mlflow import MLflowBackend
from tokrate.backends._tensorboard import TensorBoardBackend
from tokrate.backends._wandb import WandbBackend
from tokrate.backends.base import Backend, Entry, Outcome
from tokrate.errors import BackendError
from tokrate.run import RunInfo
from tokrate.testing import BackendConformance, MemoryBackend
from tokrate.testing.points import Row


class TestConsole(BackendConformance):
    """The console keeps nothing; only its conduct can be tested."""

    def make(self, run: RunInfo) -> Backend:
        return ConsoleBackend(run)

    def read(self, run: RunInfo) -> None:
        return None


class TestTensorBoard(BackendConformance):
    """Read back by TensorBoard's EventAccumulator."""

    numbers = "float32"
    replay_is_once = False
    resume_drops_overlap = True

    def make(self, run: RunInfo) -> Backend:
        return TensorBoardBackend(run)

    def read(self, run: RunInfo) -> list[Row]:
        return read_tensorboard(_folder(run))

    def is_created(self, run: RunInfo) -> bool:
        return any(_folder(run).glob("*tfevents*"))

    def break_target(self, run: RunInfo) -> None:
        _folder(run).rename(_folder(run).with_name("away"))
        _folder(run).touch()  # a file where the folder was: it cannot be made again

    def mend_target(self, run: RunInfo) -> None:
        _folder(run).unlink()
        _folder(run).with_name("away").rename(_folder(run))


class TestMLflow(BackendConformance):
    """Read back by MlflowClient on a SQLite store."""

    numbers = "float64"

    @pytest.fixture(autouse=True)
    def _store(self, store_uri: str) -> None:
        self.uri = store_uri

    def make(self, run: RunInfo) -> Backend:
        return MLflowBackend(run, tracking_uri=self.uri)

    def read(self, run: RunInfo) -> list[Row]:
        return read_mlflow(self.uri, str(run.id))

    def is_created(self, run: RunInfo) -> bool:
        return mlflow_run(self.uri, str(run.id)) is not None

    def read_outcome(self, run: RunInfo) -> str:
        return str(mlflow_run(self.uri, str(run.id)).info.status).lower()

    def break_target(self, run: RunInfo) -> None:
        self._sql("ALTER TABLE latest_metrics RENAME TO away")

    def mend_target(self, run: RunInfo) -> None:
        self._sql("ALTER TABLE away RENAME TO latest_metrics")

    def _sql(self, statement: str) -> None:
        connection = sqlite3.connect(self.uri.removeprefix("sqlite:///"))
        connection.execute(statement)
        connection.close()


class TestWandb(BackendConformance):
    """Read back from the `.wandb` files themselves."""

    replay_is_once = False

    def make(self, run: RunInfo) -> Backend:
        return WandbBackend(run, mode="offline")

    def read(self, run: RunInfo) -> list[Row]:
        return read_wandb(_folder(run))

    def is_created(self, run: RunInfo) -> bool:
        return any(_folder(run).glob("wandb/*run-*/*.wandb"))

    def read_outcome(self, run: RunInfo) -> str:
        ends = [r.exit for r in wandb_records(_folder(run)) if r.HasField("exit")]
        code = ends[-1].exit_code
        return {0: "finished", 130: "killed", 143: "killed"}.get(code, "failed")

    def break_target(self, run: RunInfo) -> None:
        own = ["pgrep", "-P", str(os.getpid()), "-f", "wandb-core"]
        for pid in subprocess.run(own, capture_output=True, text=True, check=False).stdout.split():
            os.kill(int(pid), signal.SIGKILL)

    def mend_target(self, run: RunInfo) -> None:
        pass  # W&B starts another service


class TestMemory(BackendConformance):
    """The suite can be passed by a backend of ten lines."""

    backend: type[MemoryBackend] = MemoryBackend

    def make(self, run: RunInfo) -> Backend:
        return self.backend(run)

    def read(self, run: RunInfo) -> list[Row]:
        known = MemoryBackend.runs.get(str(run.id))
        return [(entry.step, entry.metrics) for entry in known.entries] if known else []

    def is_created(self, run: RunInfo) -> bool:
        return str(run.id) in MemoryBackend.runs

    def read_outcome(self, run: RunInfo) -> str | None:
        outcome = MemoryBackend.runs[str(run.id)].outcome
        return outcome.status if outcome else None


def _folder(run: RunInfo) -> Path:
    assert run.folder is not None
    return run.folder


# Backends with one fault each --------------------------------------------------------------------


def _changed(entry: Entry, metrics: dict[str, Any], step: int | None = None) -> Entry:
    return Entry(
        time_unix_ms=entry.time_unix_ms,
        step=entry.step if step is None else step,
        metrics=metrics,
    )


class LosesTheLast(MemoryBackend):
    """Drops the last entry of each batch."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write(entries[:-1])


class Renames(MemoryBackend):
    """Cleans names that need no cleaning."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write(
            [_changed(e, {k.replace("/", "_"): v for k, v in e.metrics.items()}) for e in entries]
        )


class MakesFloats(MemoryBackend):
    """Claims to be exact, and is a float64."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write([_changed(e, {k: _float(v) for k, v in e.metrics.items()}) for e in entries])


class ReplacesNaN(MemoryBackend):
    """Shows 0 for NaN."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write(
            [_changed(e, {k: v if v == v else 0 for k, v in e.metrics.items()}) for e in entries]
        )


class DropsInfinityInSilence(MemoryBackend):
    """Leaves infinity out and does not count it."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write(
            [
                _changed(e, {k: v for k, v in e.metrics.items() if abs(v) != float("inf")})
                for e in entries
            ]
        )


class TruncatesSteps(MemoryBackend):
    """Keeps 32 bits of a step."""

    def write(self, entries: Sequence[Entry]) -> None:
        super().write([_changed(e, dict(e.metrics), e.step % 2**32) for e in entries])


class OnlyForward(MemoryBackend):
    """Drops steps that go back."""

    highest = -1

    def write(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            if entry.step >= self.highest:
                self.highest = entry.step
                super().write([entry])
        super().write([])


class Repeats(MemoryBackend):
    """Shows a replay twice."""

    def write(self, entries: Sequence[Entry]) -> None:
        self._connected().entries.extend(entries)


class CreatesEarly(MemoryBackend):
    """Reaches its tracker when it is made."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self._connected()


class ConnectsLate(MemoryBackend):
    """Waits for the first entry."""

    def write(self, entries: Sequence[Entry]) -> None:
        if entries:
            super().write(entries)


class ClosesTwice(MemoryBackend):
    """Takes the second close for the end."""

    def close(self, outcome: Outcome) -> None:
        if str(self._info.id) in self.runs:
            self.runs[str(self._info.id)].outcome = outcome


class AlwaysFinished(MemoryBackend):
    """Tells a good end of every run."""

    def close(self, outcome: Outcome) -> None:
        super().close(Outcome.FINISHED)


class ForgetsOnResume(MemoryBackend):
    """Begins from nothing in every session."""

    def __init__(self, run: RunInfo) -> None:
        super().__init__(run)
        self.runs.pop(str(run.id), None)


class WantsJson(MemoryBackend):
    """Chokes on a configuration that is not JSON."""

    def write(self, entries: Sequence[Entry]) -> None:
        import json

        json.dumps(dict(self._info.config or {}))
        super().write(entries)


class StaysInOneThread(MemoryBackend):
    """Works only in the thread that wrote first."""

    def write(self, entries: Sequence[Entry]) -> None:
        if not hasattr(self, "of_this_thread"):
            self.of_this_thread = threading.local()
            self.of_this_thread.connected = True
        if not hasattr(self.of_this_thread, "connected"):
            raise RuntimeError("another thread")
        super().write(entries)


FAULTS: list[tuple[type[MemoryBackend], set[str]]] = [
    (MemoryBackend, set()),
    (
        LosesTheLast,
        {
            "values_and_steps_arrive_in_order",
            "names_are_kept",
            "numbers_are_as_exact_as_the_tracker_can",
            "numbers_without_a_place_are_counted",
            "large_steps_arrive",
            "backward_steps_survive",
            "many_entries_in_one_write",
            "closing_twice_is_harmless",
            "threads",
            "replay_loses_nothing",
            "resume_continues_the_curves",
            "any_name_and_config_is_taken",
            "the_account_of_a_whole_run",
        },
    ),
    (Renames, {"values_and_steps_arrive_in_order", "names_are_kept"}),
    (MakesFloats, {"numbers_are_as_exact_as_the_tracker_can"}),
    (ReplacesNaN, {"numbers_without_a_place_are_counted"}),
    (DropsInfinityInSilence, {"numbers_without_a_place_are_counted"}),
    (TruncatesSteps, {"large_steps_arrive"}),
    (OnlyForward, {"backward_steps_survive"}),
    (Repeats, {"replay_loses_nothing"}),
    (CreatesEarly, {"closing_unused_creates_nothing"}),
    (ConnectsLate, {"empty_write_connects"}),
    (ClosesTwice, {"closing_twice_is_harmless"}),
    (AlwaysFinished, {"outcomes_are_told"}),
    (ForgetsOnResume, {"resume_continues_the_curves"}),
    (WantsJson, {"any_name_and_config_is_taken"}),
    (StaysInOneThread, {"threads"}),
]


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return value


@pytest.mark.parametrize(("faulty", "expected"), FAULTS, ids=lambda v: getattr(v, "__name__", ""))
def test_the_suite_finds_each_fault(
    faulty: type[MemoryBackend], expected: set[str], tmp_path: Path
) -> None:
    """A backend with one fault fails the tests that are about it, and no other."""
    assert _failing(lambda: _suite_for(faulty), tmp_path) == expected


class Unreachable:
    """A tracker that is never there: the deliberately failing backend."""

    def __init__(self, run: RunInfo) -> None:
        self.raises: Exception = BackendError("nobody answers", retryable=True)

    def write(self, entries: Sequence[Entry]) -> None:
        raise self.raises from OSError("connection refused")

    def close(self, outcome: Outcome) -> None:
        pass


class UnreachableSuite(BackendConformance):
    """What a backend of an unreachable tracker would claim."""

    patience_s = 0.5
    backend: type[Unreachable] = Unreachable

    def make(self, run: RunInfo) -> Backend:
        return self.backend(run)

    def read(self, run: RunInfo) -> list[Row]:
        return []


def test_a_failing_backend_fails_everything_that_writes(tmp_path: Path) -> None:
    """Only what needs no tracker passes with a backend that always fails."""
    every = {name.removeprefix("test_") for name, _ in _tests(UnreachableSuite())}
    outages = {"an_outage_is_a_backend_error", "an_outage_ends", "an_outage_that_does_not_end"}
    expected = every - {"closing_unused_creates_nothing"}
    assert outages < expected
    assert _failing(UnreachableSuite, tmp_path) == expected


class LeaksForeignErrors(MemoryBackend):
    """Lets its tracker's own exceptions out during an outage, and forgets what it was given."""

    down = False

    def write(self, entries: Sequence[Entry]) -> None:
        if LeaksForeignErrors.down:
            raise ConnectionResetError("Connection lost")
        super().write(entries)


class Unchained(LeaksForeignErrors):
    """Says BackendError, but not why."""

    def write(self, entries: Sequence[Entry]) -> None:
        if LeaksForeignErrors.down:
            raise BackendError("something failed", retryable=True)
        super().write(entries)


class Swallows(LeaksForeignErrors):
    """Pretends that all went well."""

    def write(self, entries: Sequence[Entry]) -> None:
        if not LeaksForeignErrors.down:
            super().write(entries)


class OutageSuite(TestMemory):
    """Memory with an outage that can be switched."""

    __test__ = False

    def break_target(self, run: RunInfo) -> None:
        LeaksForeignErrors.down = True

    def mend_target(self, run: RunInfo) -> None:
        LeaksForeignErrors.down = False


@pytest.mark.parametrize(
    ("faulty", "expected"),
    [
        (LeaksForeignErrors, {"an_outage_is_a_backend_error"}),
        (Unchained, {"an_outage_is_a_backend_error"}),
        (
            Swallows,
            {"an_outage_is_a_backend_error", "an_outage_ends", "an_outage_that_does_not_end"},
        ),
    ],
)
def test_the_suite_finds_faults_in_an_outage(
    faulty: type[MemoryBackend], expected: set[str], tmp_path: Path
) -> None:
    """Foreign, unchained and swallowed errors are told apart from a proper BackendError."""

    def suite() -> BackendConformance:
        LeaksForeignErrors.down = False
        made = OutageSuite()
        made.backend = faulty
        return made

    outages = {"an_outage_is_a_backend_error", "an_outage_ends", "an_outage_that_does_not_end"}
    assert _failing(suite, tmp_path, only=outages) == expected


def _suite_for(backend: type[MemoryBackend]) -> BackendConformance:
    suite = TestMemory()
    suite.backend = backend
    return suite


def _tests(suite: BackendConformance) -> list[tuple[str, Callable[[Path], None]]]:
    return [pair for pair in inspect.getmembers(suite, callable) if pair[0].startswith("test_")]


def _failing(
    make: Callable[[], BackendConformance], tmp_path: Path, only: set[str] | None = None
) -> set[str]:
    """Names of the tests that fail, each run on a suite and a folder of its own."""
    failing = set()
    for name, _ in _tests(make()):
        short = name.removeprefix("test_")
        if only is not None and short not in only:
            continue
        MemoryBackend.runs.clear()
        folder = tmp_path / name
        folder.mkdir()
        try:
            dict(_tests(make()))[name](folder)
        except pytest.skip.Exception:
            continue
        except Exception:
            failing.add(short)
        except AssertionError:
            failing.add(short)
    return failing

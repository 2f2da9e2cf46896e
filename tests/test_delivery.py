"""Delivery and sync: outages delay, and lose nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tokrate import RunInfo, open_logger
from tokrate.cli import cli
from tokrate.errors import JournalError
from tokrate.sync import sync_run
from toys import read_tracker


def spec(tmp_path: Path, **options: Any) -> dict[str, Any]:
    """A `logger` key with the file tracker alone."""
    return {"console": False, "toys:FileTracker": {"path": str(tmp_path / "out"), **options}}


def log_steps(logger: Any, steps: range) -> None:
    """Log one metric at each step."""
    for step in steps:
        logger.log_metrics({"loss": float(step)}, step=step)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait for another thread, with a bound."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.01)


def test_all_entries_arrive_in_order_and_in_batches(tmp_path: Path) -> None:
    """Entries gather while the thread lingers: far fewer writes than entries."""
    with open_logger(spec(tmp_path), run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(2500))
    steps, others = read_tracker(tmp_path / "out")
    stats = logger.stats().backends["toys:FileTracker"]
    assert steps == list(range(2500))
    assert len([line for line in others if line.get("batch")]) < 250
    assert (stats.accepted, stats.delivered, stats.waiting) == (2500, 2500, 0)


def test_outage_and_recovery(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tracker that is down and comes back gets every point once; both are said once."""
    down = tmp_path / "out.down"
    with open_logger(spec(tmp_path), run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(10))
        wait_for(lambda: logger.stats().backends["toys:FileTracker"].waiting == 0)
        down.touch()
        log_steps(logger, range(10, 20))
        wait_for(lambda: logger.stats().backends["toys:FileTracker"].problem)
        assert logger.stats().backends["toys:FileTracker"].waiting == 10
        down.unlink()
        wait_for(lambda: logger.stats().backends["toys:FileTracker"].waiting == 0)
    assert read_tracker(tmp_path / "out")[0] == list(range(20))
    assert [("is down" in r.message, "works again" in r.message) for r in caplog.records] == [
        (True, False),
        (False, True),
    ]


def test_close_keeps_its_deadline_and_sync_delivers_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is waiting at close is delivered by `tokrate sync`, twice if you like."""
    (tmp_path / "out.down").touch()
    logger = open_logger(spec(tmp_path), run=RunInfo("a"), dir=tmp_path, close_timeout_s=0.3)
    log_steps(logger, range(10))
    before = time.monotonic()
    report = logger.close("failed")
    assert time.monotonic() - before < 20.0  # by default it would be 30 s
    assert report.backends["toys:FileTracker"].waiting == 10
    assert f"tokrate sync {tmp_path / 'a'}" in caplog.text
    (tmp_path / "out.down").unlink()
    (tmp_path / "out").unlink(missing_ok=True)
    for _ in range(2):
        done = CliRunner().invoke(cli, ["sync", str(tmp_path / "a")])
        assert done.exit_code == 0, done.output
        assert "10 delivered; nothing waits" in done.output
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(10))
    assert {"outcome": "failed", "exit_code": 1} in others


def test_sync_of_a_tracker_that_is_still_down(tmp_path: Path) -> None:
    """Sync says what still waits and exits with 3."""
    (tmp_path / "out.down").touch()
    logger = open_logger(spec(tmp_path), run=RunInfo("a"), dir=tmp_path, close_timeout_s=0.1)
    log_steps(logger, range(3))
    logger.close()
    done = CliRunner().invoke(cli, ["sync", str(tmp_path / "a")])
    assert done.exit_code == 3
    assert "3 waiting; the file tracker is down" in done.output


def test_one_refused_entry_does_not_take_its_batch_with_it(tmp_path: Path) -> None:
    """An entry that the tracker will never take is counted; the others arrive."""
    with open_logger(spec(tmp_path, refuse_step=3), run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(6))
    stats = logger.stats().backends["toys:FileTracker"]
    assert read_tracker(tmp_path / "out")[0] == [0, 1, 2, 4, 5]
    assert (stats.accepted, stats.delivered, stats.refused, stats.waiting) == (6, 5, 1, 0)


@pytest.mark.parametrize("toy", ["BrokenTracker", "ClosedAccount"])
def test_backend_that_never_works(tmp_path: Path, toy: str) -> None:
    """A bug in a backend, or a closed account, harms neither the loop nor the others."""
    both = spec(tmp_path) | {f"toys:{toy}": {}}
    with open_logger(both, run=RunInfo("a"), dir=tmp_path, close_timeout_s=0.5) as logger:
        log_steps(logger, range(5))
    stats = logger.stats().backends
    assert stats["toys:FileTracker"].delivered == 5
    assert (stats[f"toys:{toy}"].delivered, stats[f"toys:{toy}"].waiting) == (0, 5)
    assert stats[f"toys:{toy}"].problem


def test_resume_goes_on_from_the_cursor(tmp_path: Path) -> None:
    """A second session delivers what the first left waiting, then its own, in order."""
    (tmp_path / "out.down").touch()
    run = RunInfo("a", id="x")
    first = open_logger(spec(tmp_path), run=run, dir=tmp_path, close_timeout_s=0.1)
    log_steps(first, range(5))
    first.close()
    (tmp_path / "out.down").unlink()
    with open_logger(spec(tmp_path), run=run, dir=tmp_path) as second:
        log_steps(second, range(5, 8))
    assert read_tracker(tmp_path / "out")[0] == list(range(8))
    assert second.stats().backends["toys:FileTracker"].accepted == 8


def test_sync_with_another_logger_key(tmp_path: Path) -> None:
    """A run that was logged to the journal alone can be delivered anywhere later."""
    with open_logger({"console": False}, run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(4))
    found = sync_run(tmp_path / "a", spec(tmp_path))
    assert found["toys:FileTracker"].delivered == 4


def test_sync_of_no_run(tmp_path: Path) -> None:
    """A folder without a journal, or a run that is still going, is one clear error."""
    with pytest.raises(JournalError, match="expected the journal of a run"):
        sync_run(tmp_path)
    with open_logger({"console": False}, run=RunInfo("a"), dir=tmp_path):
        with pytest.raises(JournalError, match="is being written by process"):
            sync_run(tmp_path / "a")


def test_damaged_cursor_delivers_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cursor that cannot be read means twice rather than never, and is said."""
    with open_logger(spec(tmp_path), run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(3))
    (cursor,) = (tmp_path / "a" / "cursors").iterdir()
    cursor.write_text("{")
    sync_run(tmp_path / "a")
    assert read_tracker(tmp_path / "out")[0] == [0, 1, 2, 0, 1, 2]
    assert "from its first entry" in caplog.text


def test_resume_voids_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    """Entries that waited at the crash are not delivered where the new session redoes them."""
    (tmp_path / "out.down").touch()
    first = open_logger(spec(tmp_path), run=RunInfo("a", id="x"), dir=tmp_path, close_timeout_s=0.1)
    log_steps(first, range(1, 9))
    first.close("failed")
    (tmp_path / "out.down").unlink()
    run = RunInfo("a", id="x", resume_step=5)
    with open_logger(spec(tmp_path), run=run, dir=tmp_path) as second:
        log_steps(second, range(6, 11))
    stats = second.stats().backends["toys:FileTracker"]
    assert read_tracker(tmp_path / "out")[0] == list(range(1, 11))
    assert (stats.accepted, stats.delivered, stats.superseded, stats.waiting) == (13, 10, 3, 0)

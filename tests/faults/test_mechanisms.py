"""What keeps the promises, one mechanism at a time, with trackers of a few lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from faults.watching import adds_up, journal_lines, log_steps, said, wait_delivered
from tokrate import Outcome, RunInfo, open_logger
from tokrate.cursor import Cursor
from tokrate.errors import BackendError
from tokrate.folder import ID_NAME
from tokrate.journal import CHUNK_BYTES, Journal, Place
from tokrate.run import Entry
from tokrate.sync import sync_run
from toys import FileTracker, read_tracker


class Picky:
    """Connects, and refuses every entry for good."""

    def __init__(self, run: RunInfo) -> None:
        pass

    def write(self, entries: Sequence[Entry]) -> None:
        if entries:
            raise BackendError("not this one", retryable=False)

    def close(self, outcome: Outcome) -> None:
        pass


class Forgetful(FileTracker):
    """A tracker that may lose what it was given within the last minute."""

    settle_s: ClassVar[float] = 60.0


def test_refusals_are_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tracker that refuses everything costs one line, and each entry is counted."""
    spec = {"console": False, "faults.test_mechanisms:Picky": {}}
    with open_logger(spec, run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(500))
    assert logger.stats().backends["faults.test_mechanisms:Picky"].refused == 500
    adds_up(logger.stats(), tmp_path / "a")
    assert len(said(caplog, "faults.test_mechanisms:Picky")) == 1


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from faults.watching import log_steps, wait_delivered
from tokrate import RunInfo, open_logger
logger = open_logger({spec!r}, run=RunInfo("a", id="a1"), dir={dir!r})
log_steps(logger, range(20))
wait_delivered(logger)
{end}
"""


@pytest.mark.parametrize("end", ["logger.close()", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_has_not_settled_comes_again(tmp_path: Path, end: str) -> None:
    """After a sudden end, and only then, a tracker that may have lost entries gets them again."""
    spec = {
        "console": False,
        "toys:FileTracker": {"path": str(tmp_path / "sure")},
        "faults.test_mechanisms:Forgetful": {"path": str(tmp_path / "forgetful")},
    }
    tests = str(Path(__file__).parents[1])
    program = KILLED.format(tests=tests, spec=spec, dir=str(tmp_path), end=end)
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    for _ in range(2):
        found = sync_run(tmp_path / "a")
    times = 2 if "kill" in end else 1
    assert read_tracker(tmp_path / "sure")[0] == list(range(20))
    assert read_tracker(tmp_path / "forgetful")[0] == list(range(20)) * times
    adds_up(found, tmp_path / "a")


def test_a_cursor_settles_with_time(tmp_path: Path) -> None:
    """Going back leads to the last place that was old enough when the cursor was saved."""
    cursor = Cursor(tmp_path / "cursors" / "x.json")
    for second in range(10):
        cursor.move(Place(second, second), 0, 0, now_s=float(second), settle_s=3.0)
    again = Cursor(tmp_path / "cursors" / "x.json")
    assert again.reached.place == Place(9, 9)
    again.go_back()
    assert again.reached.place == Place(6, 6)
    again.end(1)
    assert Cursor(tmp_path / "cursors" / "x.json").reached.place == Place(6, 6)


def test_a_second_ctrl_c_cuts_the_wait_short(tmp_path: Path) -> None:
    """Whoever does not want to wait for a tracker at the end still gets a complete journal."""
    (tmp_path / "out.down").touch()
    spec = {"console": False, "toys:FileTracker": {"path": str(tmp_path / "out")}}
    logger = open_logger(spec, run=RunInfo("a"), dir=tmp_path, close_timeout_s=30.0)
    log_steps(logger, range(5))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        logger.close("failed")
    timer.join()
    assert journal_lines(tmp_path / "a")[-1]["outcome"] == "failed"
    assert logger.close().backends["toys:FileTracker"].waiting == 5
    (tmp_path / "out.down").unlink()
    adds_up(sync_run(tmp_path / "a"), tmp_path / "a", shown={"toys:FileTracker": 5})


def test_sync_writes_the_end_of_a_killed_run_once(tmp_path: Path) -> None:
    """The journal of a killed run says so after sync, also of a run without backends."""
    program = KILLED.format(
        tests=str(Path(__file__).parents[1]),
        spec={"console": False},
        dir=str(tmp_path),
        end="os._exit(4)",
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check=False)
    for _ in range(2):
        sync_run(tmp_path / "a")
    ends = [line for line in journal_lines(tmp_path / "a") if line["kind"] == "end"]
    assert [(end["outcome"], end["exit_code"]) for end in ends] == [("killed", 137)]


def test_a_long_torn_line_is_cut(tmp_path: Path) -> None:
    """Half a line is cut off, also when it is longer than what is read at once."""
    journal = Journal(tmp_path)
    journal.append({"kind": "run", "id": "x"})
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"entry"' + b" " * 2 * CHUNK_BYTES)
    Journal(tmp_path).close()
    assert [line["kind"] for line in journal_lines(tmp_path)] == ["run"]


def test_a_folder_of_the_users_is_given_back(tmp_path: Path) -> None:
    """A folder with checkpoints in it is used; where opening fails it is as it was before."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoint.pt").touch()
    (tmp_path / "out.down").touch()
    tracker: dict[str, Any] = {"path": str(tmp_path / "out"), "required": True}
    spec = {"console": False, "toys:FileTracker": tracker}
    with pytest.raises(BackendError, match="is required"):
        open_logger(spec, run=RunInfo("a"), dir=tmp_path)
    assert not (tmp_path / "a" / ID_NAME).exists()
    (tmp_path / "out.down").unlink()
    with open_logger(spec, run=RunInfo("a"), dir=tmp_path) as logger:
        log_steps(logger, range(3))
        wait_delivered(logger)
    assert logger.run.folder == tmp_path / "a"
    assert (tmp_path / "a" / "checkpoint.pt").exists()

"""Ends of a process: every entry is in the journal, and every tracker is told the truth."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokrate import RunInfo, open_logger
from tokrate.sync import sync_run
from toys import read_tracker

HERE = Path(__file__).parent
PROGRAM = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from tokrate import RunInfo, open_logger
{before}
spec = {{"console": False, "toys:FileTracker": {{"path": {out!r}}}}}
logger = open_logger(spec, run=RunInfo("a"), dir={dir!r})
for step in range(50):
    logger.log_metrics({{"loss": 1.0}}, step=step)
print("logged", flush=True)
{end}
"""
ENDS: dict[str, tuple[str, str, int, int]] = {
    # end → what the program does, status, exit code told, return code of the process
    "close": ("logger.close()", "finished", 0, 0),
    "close forgotten": ("", "finished", 0, 0),
    "exception": ("raise RuntimeError", "failed", 1, 1),
    "exception within with": ("with logger: raise RuntimeError", "failed", 1, 1),
    "sys.exit(3)": ("sys.exit(3)", "failed", 3, 3),
    "sys.exit(3) within with": ("with logger: sys.exit(3)", "failed", 3, 3),
    "sys.exit(3) that was caught": (
        "try: sys.exit(3)\nexcept SystemExit: logger.close()",
        "finished",
        0,
        0,
    ),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", "killed", 130, -2),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", "killed", 143, -15),
    "SIGTERM within with": (
        "with logger: os.kill(os.getpid(), signal.SIGTERM); signal.pause()",
        "killed",
        143,
        -15,
    ),
}  # fmt: skip
SUDDEN = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -9),
    "os._exit": ("os._exit(4)", 4),
}


def run_program(tmp_path: Path, end: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A process that logs 50 entries and then ends in some way."""
    program = PROGRAM.format(
        tests=str(HERE), out=str(tmp_path / "out"), dir=str(tmp_path), end=end, before=before
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )


def journal(tmp_path: Path) -> list[dict[str, Any]]:
    """All lines of the run's journal, read without our own reader."""
    return [json.loads(x) for x in (tmp_path / "a" / "journal.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("end", ENDS)
def test_end_is_told(tmp_path: Path, end: str) -> None:
    """However the process ends, all entries arrive and the end is the true one."""
    what, status, exit_code, returncode = ENDS[end]
    done = run_program(tmp_path, what)
    assert done.returncode == returncode, done.stderr
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(50))
    assert others[-1] == {"outcome": status, "exit_code": exit_code}
    assert journal(tmp_path)[-1]["outcome"] == status


def test_sigterm_while_the_end_is_told(tmp_path: Path) -> None:
    """torchrun ends the other ranks when one has failed: the word that is being said is said."""
    slow_end = """
import threading, time, toys
close = toys.FileTracker.close
toys.FileTracker.close = lambda self, outcome: (time.sleep(2), close(self, outcome))
"""
    terminate = "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()"
    done = run_program(tmp_path, f"with logger:\n    {terminate}\n    raise RuntimeError", slow_end)
    assert done.returncode == -signal.SIGTERM, done.stderr
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(50))
    assert others[-1] == {"outcome": "failed", "exit_code": 1}
    assert journal(tmp_path)[-1]["outcome"] == "failed"


@pytest.mark.parametrize("end", SUDDEN)
def test_sudden_end_is_told_by_sync(tmp_path: Path, end: str) -> None:
    """A process that had no time leaves a complete journal; sync delivers it and tells the end."""
    what, returncode = SUDDEN[end]
    assert run_program(tmp_path, what).returncode == returncode
    assert [x["step"] for x in journal(tmp_path) if x["kind"] == "entry"] == list(range(50))
    for _ in range(2):
        sync_run(tmp_path / "a")
    steps, others = read_tracker(tmp_path / "out")
    assert sorted(set(steps)) == list(range(50))
    assert [x for x in others if "outcome" in x] == [{"outcome": "killed", "exit_code": 137}]


def test_handler_of_the_users_goes_first(tmp_path: Path) -> None:
    """A SIGTERM handler that saves a checkpoint and goes on still has its logger."""
    before = "signal.signal(signal.SIGTERM, lambda *_: print('saving'))"
    end = """
os.kill(os.getpid(), signal.SIGTERM)
logger.log_metrics({"loss": 2.0}, step=50)
logger.close()
print(signal.getsignal(signal.SIGTERM).__name__)
"""
    done = run_program(tmp_path, end, before)
    assert done.stdout.splitlines() == ["logged", "saving", "<lambda>"]
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(51))
    assert others[-1]["outcome"] == "killed"


def test_ignored_sigterm_stays_ignored(tmp_path: Path) -> None:
    """A process that ignores SIGTERM goes on doing so."""
    before = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    done = run_program(tmp_path, "os.kill(os.getpid(), signal.SIGTERM); print('alive')", before)
    assert done.returncode == 0
    assert "alive" in done.stdout


def test_hooks_are_put_back(tmp_path: Path) -> None:
    """When the last logger closes, the process is as it was, and no sooner."""
    before = "hooks = lambda: (sys.excepthook, sys.exit, signal.getsignal(signal.SIGTERM))"
    before += "\nfirst = hooks()"
    end = f"""
other = open_logger({{"console": False}}, run=RunInfo("b"), dir={str(tmp_path)!r})
logger.close()
print([now is then for now, then in zip(hooks(), first)])
other.close()
print([now is then for now, then in zip(hooks(), first)])
"""
    done = run_program(tmp_path, end, before)
    assert done.stdout.splitlines() == ["logged", str([False] * 3), str([True] * 3)], done.stderr


def test_hook_put_over_ours_stays(tmp_path: Path) -> None:
    """A hook that somebody put over ours, and that calls it, stays and never goes in a circle."""
    original, seen = sys.excepthook, []
    logger = open_logger({"console": False}, run=RunInfo("a"), dir=tmp_path)
    ours = sys.excepthook

    def theirs(*about: Any) -> None:
        seen.append(about)
        ours(*about)

    sys.excepthook = theirs
    try:
        logger.close()
        assert sys.excepthook is theirs
        with open_logger({"console": False}, run=RunInfo("b"), dir=tmp_path):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "stderr", io.StringIO())
                sys.excepthook(ValueError, ValueError(), None)
        assert len(seen) == 1
    finally:
        sys.excepthook = original


def test_fork_neither_logs_nor_hangs(tmp_path: Path) -> None:
    """A forked child holds a logger that does nothing, and its end is not the run's."""
    end = """
if (child := os.fork()) == 0:
    logger.log_metrics({"loss": 3.0}, step=99)
    logger.close("failed")
    sys.exit(0)
os.waitpid(child, 0)
logger.log_metrics({"loss": 2.0}, step=50)
"""
    done = run_program(tmp_path, end)
    assert done.returncode == 0, done.stderr
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(51))
    assert [x["outcome"] for x in others if "outcome" in x] == ["finished"]


def test_children_of_a_fork_can_be_terminated(tmp_path: Path) -> None:
    """SIGTERM to a forked worker ends that worker alone, with the usual status."""
    end = """
heard, said = os.pipe()
if (child := os.fork()) == 0:
    os.write(said, b"ready"); signal.pause()
os.read(heard, 5)  # a signal that arrives within fork itself would be lost
os.kill(child, signal.SIGTERM)
print(os.waitpid(child, 0)[1], flush=True)
"""
    done = run_program(tmp_path, end)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(int(signal.SIGTERM))
    assert os.WIFSIGNALED(int(done.stdout.splitlines()[-1]))

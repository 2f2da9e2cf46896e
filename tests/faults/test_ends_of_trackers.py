"""Ends of a process with TensorBoard, MLflow and W&B open at once: each is told the truth."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from backends.readers import mlflow_run, wandb_records
from faults.watching import adds_up, each_once, journal_lines, journal_steps, show, steps_shown
from tokrate.sync import sync_run

STEPS = range(50)
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from faults.watching import log_steps, wait_delivered
from tokrate import RunInfo, open_logger
{before}
spec = {{
    "console": False,
    "tensorboard": {{}},
    "mlflow": {{"tracking_uri": {uri!r}}},
    "wandb": {{"mode": "offline"}},
}}
logger = open_logger(spec, run=RunInfo("a", id="a1"), dir={dir!r}, close_timeout_s=80.0)
log_steps(logger, range(50))
{wait}
{end}
"""
ENDS: dict[str, tuple[str, str, int, set[int]]] = {
    # end → what the program does, MLflow's status, exit code told, return codes of the process
    "normal": ("logger.close()", "FINISHED", 0, {0}),
    "close forgotten": ("", "FINISHED", 0, {0}),
    "exception": ("raise RuntimeError('as ordered')", "FAILED", 1, {1}),
    "sys.exit(3)": ("sys.exit(3)", "FAILED", 3, {3}),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); signal.pause()", "KILLED", 130, {-2, 1}),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); signal.pause()", "KILLED", 143, {-15}),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "KILLED", 137, {-9}),
    "os._exit": ("os._exit(4)", "KILLED", 137, {4}),
}
SUDDEN = {"SIGKILL", "os._exit"}


@dataclass
class Ended:
    """A process that has ended, and what it left."""

    folder: Path
    uri: str
    done: subprocess.CompletedProcess[str]

    def shown(self) -> dict[str, Any]:
        """How often each tracker shows each step."""
        return {
            name: steps_shown(name, self.folder, self.uri, "a1")
            for name in ("tensorboard", "mlflow", "wandb")
        }

    def status(self) -> str:
        """What MLflow says of the run."""
        return str(mlflow_run(self.uri, "a1").info.status)

    def exit_codes(self) -> list[int]:
        """The exit codes in the `.wandb` files."""
        records = wandb_records(self.folder)
        return [record.exit.exit_code for record in records if record.HasField("exit")]


def run_program(
    tmp_path: Path, store_uri: str, end: str, *, wait: bool = True, before: str = ""
) -> Ended:
    """A process that logs 50 entries into all three trackers and ends in some way."""
    program = PROGRAM.format(
        tests=str(Path(__file__).parents[1]),
        uri=store_uri,
        dir=str(tmp_path),
        before=before,
        wait="wait_delivered(logger)" if wait else "",
        end=end,
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        start_new_session=True,
    )
    return Ended(tmp_path / "a", store_uri, done)


@pytest.mark.parametrize("end", ENDS)
def test_every_end_is_told_to_every_tracker(tmp_path: Path, store_uri: str, end: str) -> None:
    """All entries, MLflow's status, W&B's exit code and the journal's last line are the truth."""
    what, status, exit_code, returncodes = ENDS[end]
    ended = run_program(tmp_path, store_uri, what)
    assert ended.done.returncode in returncodes, ended.done.stderr
    assert journal_steps(ended.folder) == list(STEPS)
    found: Any = None
    if end in SUDDEN:
        assert ended.status() == "RUNNING"
        assert journal_lines(ended.folder)[-1]["kind"] == "entry"
        for _ in range(2):
            found = sync_run(ended.folder)
    shown = ended.shown()
    assert [set(steps) for steps in shown.values()] == [set(STEPS)] * 3
    if end not in SUDDEN:
        assert all(steps == each_once(STEPS) for steps in shown.values())
    assert ended.status() == status
    assert ended.exit_codes()[-1] == exit_code
    last = journal_lines(ended.folder)[-1]
    assert (last["kind"], last["outcome"].upper(), last["exit_code"]) == ("end", status, exit_code)
    if found:
        repeated = {name: sum(n - 1 for n in steps.values()) for name, steps in shown.items()}
        show(f"{end}: shown twice after sync: {repeated}")
        adds_up(found, ended.folder, shown=dict.fromkeys(shown, len(STEPS)))


@pytest.mark.parametrize("end", ["close forgotten", "exception", "SIGKILL"])
def test_a_process_that_ends_before_the_trackers_are_reached(
    tmp_path: Path, store_uri: str, end: str
) -> None:
    """The trackers' packages are not even imported when the program is through."""
    what, status, exit_code, returncodes = ENDS[end]
    ended = run_program(tmp_path, store_uri, what, wait=False)
    assert ended.done.returncode in returncodes, ended.done.stderr
    if end in SUDDEN:
        sync_run(ended.folder)
    assert "left out" not in ended.done.stderr
    assert ended.shown() == dict.fromkeys(("tensorboard", "mlflow", "wandb"), each_once(STEPS))
    assert (ended.status(), ended.exit_codes()) == (status, [exit_code])


def test_the_whole_group_is_killed(tmp_path: Path, store_uri: str) -> None:
    """A container that is killed takes W&B's own process along, and what that had not written."""
    ended = run_program(tmp_path, store_uri, "os.killpg(os.getpgid(0), signal.SIGKILL)")
    assert ended.done.returncode == -signal.SIGKILL
    lost = set(STEPS) - set(ended.shown()["wandb"])
    show(f"{len(lost)} of {len(STEPS)} rows were not yet in W&B's file")
    for _ in range(2):
        found = sync_run(ended.folder)
    assert [set(steps) for steps in ended.shown().values()] == [set(STEPS)] * 3
    assert (ended.status(), ended.exit_codes()[-1]) == ("KILLED", 137)
    adds_up(found, ended.folder, shown=dict.fromkeys(found, len(STEPS)))


JOIN = """
import mlflow, wandb
mlflow.set_tracking_uri({uri!r})
theirs = mlflow.start_run()
settings = wandb.Settings(console="off", silent=True)
users = wandb.init(mode="offline", dir={users!r}, settings=settings)
"""
LEAVE_OPEN = """
logger.close("failed")
assert mlflow.active_run().info.run_id == theirs.info.run_id
assert mlflow.get_run(theirs.info.run_id).info.status == "RUNNING"
assert wandb.run is users
users.log({"mine": 1.0})
mlflow.log_metric("mine", 1.0)
users.finish()
mlflow.end_run()
"""


@pytest.mark.parametrize("end", ["close", "SIGKILL"])
def test_a_run_of_the_users_is_never_ended(tmp_path: Path, store_uri: str, end: str) -> None:
    """Active runs of MLflow and W&B are joined and left open, also by a sync after SIGKILL."""
    (tmp_path / "users").mkdir()
    before = JOIN.format(uri=store_uri, users=str(tmp_path / "users"))
    what = LEAVE_OPEN if end == "close" else ENDS[end][0]
    ended = run_program(tmp_path, store_uri, what, before=before)
    if end == "close":
        assert ended.done.returncode == 0, ended.done.stderr
        in_wandb = steps_shown("wandb", tmp_path / "users")
        assert set(in_wandb) == set(STEPS)
    else:
        sync_run(ended.folder)
    import mlflow

    client = mlflow.MlflowClient(store_uri)
    (users,) = client.search_runs(["0"])
    assert users.info.status == ("FINISHED" if end == "close" else "RUNNING")
    history = client.get_metric_history(users.info.run_id, "loss")
    assert [metric.step for metric in history] == list(STEPS)


BUSY = """
import itertools, os, sys, threading
sys.path.insert(0, {tests!r})
from tokrate import RunInfo, open_logger
spec = {{"console": False, "tensorboard": {{}}, "toys:FileTracker": {{"path": {out!r}}}}}
logger = open_logger(spec, run=RunInfo("a"), dir={dir!r})
print("ready", flush=True)
for step in itertools.count():
    logger.log_metrics({{"loss": 1.0}}, step=step)
"""


def test_signals_at_any_moment(tmp_path: Path) -> None:
    """SIGTERM and Ctrl-C within a loop that does nothing but log never hang and lose nothing."""
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        tests = str(Path(__file__).parents[1])
        program = BUSY.format(tests=tests, out=str(folder / "out"), dir=str(folder))
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            number = (signal.SIGTERM, signal.SIGINT)[attempt % 2]
            try:
                process.wait(0.05 + 0.013 * attempt)
            except subprocess.TimeoutExpired:
                process.send_signal(number)
            try:
                assert process.wait(45) in (-number, 1)
            finally:
                process.kill()
        steps = journal_steps(folder / "a")
        assert steps == list(range(len(steps)))
        assert journal_lines(folder / "a")[-1]["outcome"] == "killed"
        assert steps_shown("tensorboard", folder / "a") == each_once(steps)
        shutil.rmtree(folder)
    assert list(tmp_path.iterdir()) == []

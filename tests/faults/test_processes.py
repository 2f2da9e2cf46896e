"""Forks, spawned processes, threads, and several runs at once, with real trackers."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from backends.readers import mlflow_run, read_mlflow, wandb_records, wandb_rows
from driving import make_record
from faults.watching import (
    adds_up,
    each_once,
    journal_steps,
    log_steps,
    steps_shown,
    wait_delivered,
)
from tokrate import RunInfo, open_logger
from tokrate.journal import Journal
from tokrate.logger import Logger

TESTS = str(Path(__file__).parents[1])


def three(store_uri: str) -> dict[str, Any]:
    """A `logger` key with all three trackers."""
    return {
        "console": False,
        "tensorboard": {},
        "mlflow": {"tracking_uri": store_uri},
        "wandb": {"mode": "offline"},
    }


def check_all(logger: Logger, folder: Path, store_uri: str, steps: range) -> None:
    """Every step is in the journal and in all three trackers, once."""
    assert Counter(journal_steps(folder)) == each_once(steps)
    for name in ("tensorboard", "mlflow", "wandb"):
        shown = steps_shown(name, folder, store_uri, str(logger.run.id))
        assert shown == each_once(steps), name
        adds_up(logger.stats(), folder, shown={name: len(shown)})


DATA_LOADER = """
import sys
sys.path.insert(0, {tests!r})
from faults.test_processes import train_with_workers
train_with_workers({spec!r}, {dir!r})
"""


class Rows(Dataset[torch.Tensor]):
    """A dataset that holds the logger, and calls it, as careless ones do."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        self.logger.log_metrics({"worker": 1.0}, step=index)
        return torch.full((4,), index)


def train_with_workers(spec: dict[str, Any], directory: str) -> None:
    """Forked and spawned workers come and go while the loop logs."""
    with open_logger(spec, run=RunInfo("a", id="a1"), dir=directory) as logger:
        step = 0
        for context in ("fork", "spawn", "fork"):
            loader = DataLoader(
                Rows(logger), num_workers=2, multiprocessing_context=context, batch_size=2
            )
            for _ in loader:
                logger.log_metrics({"loss": float(step)}, step=step)
                step += 1
            wait_delivered(logger)


def test_data_loader_workers(tmp_path: Path, store_uri: str) -> None:
    """Workers forked, or spawned, after open neither log nor hang nor end the run."""
    program = DATA_LOADER.format(tests=TESTS, spec=three(store_uri), dir=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr
    folder = tmp_path / "a"
    assert journal_steps(folder) == list(range(60))
    for name in ("tensorboard", "mlflow", "wandb"):
        assert steps_shown(name, folder, store_uri, "a1") == each_once(range(60)), name
    assert "worker" not in mlflow_run(store_uri, "a1").data.metrics
    assert mlflow_run(store_uri, "a1").info.status == "FINISHED"


def test_a_worker_that_outlives_the_run_does_not_keep_it(tmp_path: Path) -> None:
    """A forked process that survives its parent's SIGKILL does not hold the journal's lock."""
    program = f"""
import os, signal, sys, time
from tokrate import RunInfo, open_logger
logger = open_logger({{"console": False}}, run=RunInfo("a", id="a1"), dir={str(tmp_path)!r})
ready, tell = os.pipe()
if (worker := os.fork()) == 0:
    os.write(tell, b"x")
    time.sleep(60)
os.read(ready, 1)
print(worker, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    with done:
        assert done.stdout is not None
        worker = int(done.stdout.readline())
        assert done.wait(60) == -signal.SIGKILL
        try:
            os.kill(worker, 0)
            Journal(tmp_path / "a").close()
        finally:
            os.kill(worker, signal.SIGKILL)


def _use(logger: Logger) -> int:
    logger.log(make_record())
    logger.log_metrics({"loss": 1.0}, step=1)
    return logger.close().entries


def test_a_pickled_logger_in_a_spawned_process(tmp_path: Path) -> None:
    """What arrives in another process takes calls and writes nothing."""
    with open_logger({"console": False, "tensorboard": {}}, run=RunInfo("a"), dir=tmp_path) as ours:
        log_steps(ours, range(3))
        assert _use(pickle.loads(pickle.dumps(ours))) == 0
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.apply(_use, (ours,)) == 0
        log_steps(ours, range(3, 5))
    assert journal_steps(tmp_path / "a") == list(range(5))
    assert steps_shown("tensorboard", tmp_path / "a") == each_once(range(5))


def test_eight_threads(tmp_path: Path, store_uri: str) -> None:
    """Eight threads log at once, good values and bad ones; nothing is lost or counted wrongly."""
    logger = open_logger(three(store_uri), run=RunInfo("a", id="a1"), dir=tmp_path)

    def work(number: int) -> None:
        for step in range(number * 250, (number + 1) * 250):
            logger.log_metrics({"loss": float(step), "bad": "no number"}, step=step)
            logger.log_metrics({"loss": 0.0}, step=-1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report = logger.close()
    assert report.left_out == {"value": 2000, "step": 2000}
    check_all(logger, tmp_path / "a", store_uri, range(2000))


EIGHT = """
import sys
sys.path.insert(0, {tests!r})
from faults.watching import log_steps
from tokrate import RunInfo, open_logger
spec = {{"console": False, "mlflow": {{"tracking_uri": {uri!r}}}}}
run = RunInfo("a", id="a" + sys.argv[1])
with open_logger(spec, run=run, dir={dir!r}, close_timeout_s=150.0) as logger:
    log_steps(logger, range(20))
print(logger.stats())
"""


def test_eight_processes_and_one_fresh_store(tmp_path: Path) -> None:
    """Eight processes of one name open a SQLite store that nobody has made: each has its run."""
    uri = f"sqlite:///{tmp_path}/fresh.db"
    program = EIGHT.format(tests=TESTS, uri=uri, dir=str(tmp_path / "runs"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    told = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, told
    assert len(list((tmp_path / "runs").iterdir())) == 8
    for number, (out, err) in enumerate(told):
        assert "mlflow: 20 delivered\n" in out, out + err
        assert steps_shown("mlflow", tmp_path, uri, f"a{number}") == each_once(range(20))


def test_two_runs_one_after_the_other(tmp_path: Path, store_uri: str) -> None:
    """The second logger of a process is a second run in every tracker."""
    for name in ("first", "second"):
        run = RunInfo(name, id=name)
        with open_logger(three(store_uri), run=run, dir=tmp_path) as logger:
            log_steps(logger, range(20))
        check_all(logger, tmp_path / name, store_uri, range(20))


def test_two_runs_at_the_same_time(tmp_path: Path, store_uri: str) -> None:
    """Two loggers at once are two runs, each with its own points and its own end."""
    one = open_logger(three(store_uri), run=RunInfo("one", id="one"), dir=tmp_path)
    two = open_logger(three(store_uri), run=RunInfo("two", id="two"), dir=tmp_path)
    for step in range(40):
        one.log_metrics({"loss": 1.0}, step=step)
        two.log_metrics({"loss": 2.0}, step=step)
    one.close("failed")
    two.close()
    for logger, status, code, value in ((one, "FAILED", 1, 1.0), (two, "FINISHED", 0, 2.0)):
        name = logger.run.name
        check_all(logger, tmp_path / name, store_uri, range(40))
        assert mlflow_run(store_uri, name).info.status == status
        assert {values["loss"] for _, values in read_mlflow(store_uri, name)} == {value}
        records = wandb_records(tmp_path / name)
        assert [r.exit.exit_code for r in records if r.HasField("exit")] == [code]
        ids = {r.run.run_id for r in records if r.WhichOneof("record_type") == "run"}
        assert ids == {name}
        assert {row["loss"] for row in wandb_rows(tmp_path / name)} == {value}

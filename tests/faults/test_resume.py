"""Resume with real trackers: one continuous curve, also when the crash left entries waiting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from backends.readers import (
    mlflow_run,
    read_mlflow,
    read_tensorboard,
    wandb_records,
    wandb_rows,
)
from faults.servers import Gate, MlflowServer
from faults.watching import adds_up, wait_delivered, wait_until
from tokrate import RunInfo, open_logger
from tokrate.sync import sync_run

FIRST, CHECKPOINT, SECOND = range(1, 9), 5, range(6, 13)
CURVE = [(step, float(step)) for step in range(1, 6)] + [(s, s + 100.0) for s in SECOND]
OVERLAP = [(step, float(step)) for step in (6, 7, 8)]


def log_first(logger: Any) -> None:
    """The session that crashes."""
    for step in FIRST:
        logger.log_metrics({"loss": float(step)}, step=step)


def log_second(logger: Any) -> None:
    """The session that goes on from the checkpoint, with other values."""
    for step in SECOND:
        logger.log_metrics({"loss": step + 100.0}, step=step)


def again(**changes: Any) -> RunInfo:
    """The run, resumed, with a changed configuration."""
    return RunInfo("a", id="a1", config={"lr": 0.2, "seed": 1}, resume_step=CHECKPOINT, **changes)


def loss(rows: list[tuple[int, Any]]) -> list[tuple[int, float]]:
    """The points of the curve, in the tracker's order."""
    return [(step, values["loss"]) for step, values in rows if "loss" in values]


def wandb_by_time(folder: Path) -> list[tuple[int, float]]:
    """W&B's rows in the order of their time."""
    rows = sorted((row for row in wandb_rows(folder)), key=lambda row: row["_timestamp"])
    return [(row["throughput/step"], row["loss"]) for row in rows]


FIRST_SESSION = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from faults.test_resume import log_first
from faults.watching import wait_delivered
from tokrate import RunInfo, open_logger
logger = open_logger({spec!r}, run=RunInfo("a", id="a1", config={{"lr": 0.1}}), dir={dir!r})
log_first(logger)
wait_delivered(logger)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_goes_on(tmp_path: Path, store_uri: str) -> None:
    """TensorBoard is purged; MLflow and W&B, which cannot delete, show the newer point last."""
    spec = {
        "console": False,
        "tensorboard": {},
        "mlflow": {"tracking_uri": store_uri},
        "wandb": {"mode": "offline"},
    }
    tests = str(Path(__file__).parents[1])
    program = FIRST_SESSION.format(tests=tests, spec=spec, dir=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], timeout=90, check=False)
    assert done.returncode == -9
    with open_logger(spec, run=again(), dir=tmp_path) as logger:
        log_second(logger)
    folder = tmp_path / "a"
    assert loss(read_tensorboard(folder)) == CURVE
    assert loss(read_mlflow(store_uri, "a1")) == CURVE[:5] + OVERLAP + CURVE[5:]
    in_wandb = wandb_by_time(folder)
    assert sorted(dict(in_wandb).items()) == CURVE
    # Whether W&B had the overlap in its file when the process was killed is W&B's secret.
    assert set(CURVE) <= set(in_wandb) <= {*CURVE, *OVERLAP}
    adds_up(logger.stats(), folder)

    found = mlflow_run(store_uri, "a1")
    assert found.info.status == "FINISHED"
    assert found.data.params == {"lr": "0.1", "seed": "1"}
    assert found.data.tags["config_changed.lr"] == "0.2"
    runs = [r.run for r in wandb_records(folder) if r.WhichOneof("record_type") == "run"]
    assert {run.run_id for run in runs} == {"a1"}
    config = {item.key: json.loads(item.value_json) for item in runs[-1].config.update}
    assert (config["lr"], config["seed"]) == (0.2, 1)


def test_what_waited_and_is_done_anew_is_not_delivered(
    tmp_path: Path, server: MlflowServer, gate: Gate
) -> None:
    """Entries that waited at the crash: those up to the checkpoint arrive, the others are void."""
    spec = {"console": False, "mlflow": {"tracking_uri": gate.url, "timeout_s": 2.0}}
    run_id = f"{tmp_path.name}-waited"
    gate.mode = "error"
    first = open_logger(spec, run=RunInfo("a", id=run_id), dir=tmp_path, close_timeout_s=0.5)
    log_first(first)
    assert first.close("failed").backends["mlflow"].waiting == len(FIRST)
    gate.mode = "open"
    run = RunInfo("a", id=run_id, resume_step=CHECKPOINT)
    with open_logger(spec, run=run, dir=tmp_path) as second:
        log_second(second)
    assert loss(read_mlflow(server.store_uri, run_id)) == CURVE
    stats = second.stats().backends["mlflow"]
    assert (stats.delivered, stats.superseded, stats.waiting) == (len(CURVE), len(OVERLAP), 0)
    adds_up(second.stats(), tmp_path / "a", shown={"mlflow": len(CURVE)})


@pytest.mark.parametrize("steps_before_the_kill", [0, 3])
def test_a_resumed_run_that_only_sync_delivers(tmp_path: Path, steps_before_the_kill: int) -> None:
    """TensorBoard is purged once, by whoever reaches it first: the resumed session, or sync."""
    root = tmp_path / "tb"
    spec = {"console": False, "tensorboard": {"dir": str(root)}}
    with open_logger(spec, run=RunInfo("a", id="a1"), dir=tmp_path) as first:
        log_first(first)
    if not steps_before_the_kill:
        (root / "a").rename(root / "away")
        (root / "a").touch()
    second = open_logger(spec, run=again(), dir=tmp_path, close_timeout_s=0.2)
    if steps_before_the_kill:
        for step in SECOND[:steps_before_the_kill]:
            second.log_metrics({"loss": step + 100.0}, step=step)
        wait_delivered(second)
        (root / "a").rename(root / "away")
        (root / "a").touch()
    for step in SECOND[steps_before_the_kill:]:
        second.log_metrics({"loss": step + 100.0}, step=step)
    wait_until(lambda: second.stats().backends["tensorboard"].problem)
    assert second.close("failed").backends["tensorboard"].waiting
    (root / "a").unlink()
    (root / "away").rename(root / "a")
    for _ in range(2):
        found = sync_run(tmp_path / "a")
    assert loss(read_tensorboard(root / "a")) == CURVE
    adds_up(found, tmp_path / "a")

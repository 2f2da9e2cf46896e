"""Many entries through three trackers in the background of a busy loop, and a large sync.

    python benchmarks/bench_soak.py             # 100,000 entries, then 20,000 that waited
    python benchmarks/bench_soak.py 1000000 100000

First the loop logs, with matrix products in between, to TensorBoard, W&B (offline) and MLflow
(SQLite): memory, what waits for each tracker, entries in a write. Then entries that waited are
synced into an MLflow server on loopback, against one `log_batch` for each step.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokrate import RunInfo, open_logger
from tokrate.backends._mlflow import MLflowBackend
from tokrate.backends._tensorboard import TensorBoardBackend
from tokrate.backends._wandb import WandbBackend
from tokrate.run import Entry
from tokrate.sync import sync_run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from faults.servers import MlflowServer

PACE_HZ = 1500
BASELINE_S = 8.0
MATRIX = np.random.default_rng(0).random((96, 96))
WRITES: Counter[str] = Counter()


class Counted:
    """Counts the writes of the backend that it is mixed into."""

    def write(self, entries: Sequence[Entry]) -> None:
        """Count, and write."""
        WRITES[type(self).__name__] += 1
        super().write(entries)  # type: ignore[misc]


class TensorBoard(Counted, TensorBoardBackend):
    """Counted."""


class MLflow(Counted, MLflowBackend):
    """Counted."""


class Wandb(Counted, WandbBackend):
    """Counted."""


def metrics(step: int) -> dict[str, float]:
    return {"train/loss": 1.0 / (step + 1), "throughput_x/tokens": step * 0.5}


def rss_mib() -> float:
    """What the process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def soak(entries: int, folder: Path) -> None:
    spec: dict[str, Any] = {
        "console": False,
        "__main__:TensorBoard": {},
        "__main__:MLflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db"},
        "__main__:Wandb": {"mode": "offline"},
    }
    logger = open_logger(spec, run=RunInfo("soak"), dir=folder, close_timeout_s=600.0)
    names = list(spec)[1:]
    print(f"{'entries':>9} {'RSS MiB':>8} {'Hz':>6}  waiting: tensorboard, mlflow, wandb")
    begin_s = time.perf_counter()
    for step in range(entries):
        logger.log_metrics(metrics(step), step=step)
        due_s = begin_s + step / PACE_HZ
        while time.perf_counter() < due_s:
            MATRIX @ MATRIX
        if (step + 1) % max(1, entries // 8) == 0:
            stats = logger.stats().backends
            pace_hz = step / (time.perf_counter() - begin_s)
            lag = "  ".join(f"{stats[name].waiting:>6}" for name in names)
            print(f"{step + 1:>9} {rss_mib():>8.0f} {pace_hz:>6.0f}  {lag}", flush=True)
    last_s = time.perf_counter()
    report = logger.close()
    print(f"closed in {time.perf_counter() - last_s:.1f} s, RSS {rss_mib():.0f} MiB; {report}")
    for name in ("TensorBoard", "MLflow", "Wandb"):
        print(f"{name}: {entries / WRITES[name]:.0f} entries in a write")


def sync_over_http(waiting: int, folder: Path) -> None:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    server = MlflowServer(folder)
    server.start()
    try:
        spec = {"console": False}
        with open_logger(spec, run=RunInfo("waiting"), dir=folder) as logger:
            for step in range(waiting):
                logger.log_metrics(metrics(step), step=step)
        begin_s = time.perf_counter()
        found = sync_run(folder / "waiting", {"mlflow": {"tracking_uri": server.url}})
        ours_hz = waiting / (time.perf_counter() - begin_s)
        assert found["mlflow"].delivered == waiting
        client = MlflowClient(server.url)
        run_id = client.create_run("0").info.run_id
        begin_s, step = time.perf_counter(), 0
        while time.perf_counter() < begin_s + BASELINE_S:
            batch = [Metric(k, v, int(time.time() * 1000), step) for k, v in metrics(step).items()]
            client.log_batch(run_id, batch)
            step += 1
        theirs_hz = step / (time.perf_counter() - begin_s)
    finally:
        server.kill()
    print(
        f"MLflow over HTTP, entries of 2 metrics per second: one log_batch each {theirs_hz:.0f}, "
    )
    print(f"tokrate sync of {waiting} that waited {ours_hz:.0f}: {ours_hz / theirs_hz:.0f} times")


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    entries, waiting = (given + [100_000, 20_000][len(given) :])[:2]
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    os.environ["WANDB_SILENT"] = "true"
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        soak(entries, Path(name))
        sync_over_http(waiting, Path(name))


if __name__ == "__main__":
    main()

"""What `logger.log` costs a loop with three trackers open, against calling the trackers directly.

python benchmarks/bench_log.py

The same records go first to the trackers' own writers, one after the other on the calling thread,
then to tokrate with the same three trackers open. Three ways to call:

    busy   200 times a second, with matrix products in between, as a training loop does
    idle   200 times a second, asleep in between: the core is cold when the call comes
    burst  as fast as the calls return

Times are of the calling thread. torch has one thread, so that the delivery threads find a core.
"""

from __future__ import annotations

import contextlib
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tokrate import RunInfo, ThroughputMeter, ThroughputRecord, TokenCounts, open_logger
from tokrate.names import MetricNames

PACE_HZ = 200
CALLS = 1000
BASELINE_CALLS = 200
"""Fewer for the direct calls: MLflow takes milliseconds for each."""
OPEN_TIMEOUT_S = 120.0

MATRIX = torch.randn(256, 256)

Log = Callable[[ThroughputRecord], object]
Times = dict[str, list[float]]
"""Way to call → microseconds of each call."""


def make_records(number: int) -> list[ThroughputRecord]:
    """Records as a loop makes them."""
    meter = ThroughputMeter()
    records = []
    for step in range(1, number + 1):
        meter.add(TokenCounts(raw=32_768, active=14_000 + step, padded=9_000))
        records.append(meter.record(step))
    return records


def wait_busy(due_s: float) -> None:
    """Multiply matrices until then."""
    while time.perf_counter() < due_s:
        MATRIX @ MATRIX


def wait_idle(due_s: float) -> None:
    """Sleep until then."""
    time.sleep(max(0.0, due_s - time.perf_counter()))


def wait_not(due_s: float) -> None:
    """Do not wait."""


WAYS = {"busy": wait_busy, "idle": wait_idle, "burst": wait_not}


def time_calls(log: Log, records: list[ThroughputRecord]) -> Times:
    """Microseconds of each call, for each way to call; every way gets its share of the records."""
    found = {}
    share = len(records) // len(WAYS)
    for place, (way, wait) in enumerate(WAYS.items()):
        times_us = []
        due_s = time.perf_counter()
        for record in records[place * share : (place + 1) * share]:
            due_s += 1 / PACE_HZ
            wait(due_s)
            start_ns = time.perf_counter_ns()
            log(record)
            times_us.append((time.perf_counter_ns() - start_ns) / 1000)
        found[way] = times_us
    return found


# --- the trackers' own writers -------------------------------------------------------------------


@contextlib.contextmanager
def direct_tensorboard(folder: Path) -> Iterator[Log]:
    """SummaryWriter, with a flush for each record."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"))
    names = MetricNames()

    def log(record: ThroughputRecord) -> None:
        for key, value in record.metrics(names).items():
            writer.add_scalar(key, value, record.step)
        writer.flush()

    yield log
    writer.close()


@contextlib.contextmanager
def direct_mlflow(folder: Path) -> Iterator[Log]:
    """MlflowClient.log_batch, one call for each record."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'direct.db'}")
    experiment = client.create_experiment("direct", str(folder / "artifacts"))
    run_id = client.create_run(experiment).info.run_id
    names = MetricNames()

    def log(record: ThroughputRecord) -> None:
        metrics = record.metrics(names).items()
        now_ms = time.time_ns() // 1_000_000
        client.log_batch(run_id, [Metric(k, float(v), now_ms, record.step) for k, v in metrics])

    yield log
    client.set_terminated(run_id)


@contextlib.contextmanager
def direct_wandb(folder: Path) -> Iterator[Log]:
    """Run.log, offline."""
    import wandb

    run = wandb.init(mode="offline", dir=str(folder), settings=wandb.Settings(silent=True))
    names = MetricNames()

    def log(record: ThroughputRecord) -> None:
        run.log({**record.metrics(names), "step": record.step})

    yield log
    run.finish()


def measure_direct(folder: Path) -> dict[str, Times]:
    """Times of each tracker's own writer, and of all three in a row."""
    records = make_records(BASELINE_CALLS * len(WAYS) + 1)
    found = {}
    with contextlib.ExitStack() as stack:
        opened = {
            "SummaryWriter.add_scalar + flush": stack.enter_context(direct_tensorboard(folder)),
            "MlflowClient.log_batch, SQLite": stack.enter_context(direct_mlflow(folder)),
            "wandb Run.log, offline": stack.enter_context(direct_wandb(folder)),
        }
        logs = list(opened.values())
        opened["all three, one after the other"] = lambda record: [log(record) for log in logs]
        for name, log in opened.items():
            log(records[0])  # the first call opens files and connections
            found[name] = time_calls(log, records[1:])
    return found


# --- tokrate -------------------------------------------------------------------------------------


def measure_tokrate(spec: object, folder: Path, name: str) -> Times:
    """Times of `logger.log`; checks that every tracker took every record."""
    records = make_records(CALLS * len(WAYS) + 1)
    run = RunInfo(name=name)
    with open_logger(spec, run=run, dir=folder, close_timeout_s=300.0) as logger:
        logger.log(records[0])
        give_up_s = time.monotonic() + OPEN_TIMEOUT_S
        while any(stats.waiting for stats in logger.stats().backends.values()):
            if time.monotonic() > give_up_s:
                raise SystemExit(f"not all trackers opened: {logger.stats()}")
            time.sleep(0.05)
        found = time_calls(logger.log, records[1:])
    delivered = {name: stats.delivered for name, stats in logger.stats().backends.items()}
    if set(delivered.values()) - {len(records)}:
        raise SystemExit(f"not everything was delivered: {logger.stats()}")
    return found


def report(found: dict[str, Times]) -> None:
    print(f"{'microseconds a call':42}" + "".join(f"{way:>20}" for way in WAYS))
    print(f"{'':42}" + f"{'median':>10}{'p99':>10}" * len(WAYS))
    for name, times in found.items():
        line = f"{name:42}"
        for times_us in times.values():
            p99 = statistics.quantiles(times_us, n=100)[-1]
            line += f"{statistics.median(times_us):10.1f}{p99:10.1f}"
        print(line)


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ["WANDB_SILENT"] = "true"
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)
        found = {f"direct: {name}": times for name, times in measure_direct(folder).items()}
        three = {
            "tensorboard": {},
            "mlflow": {"tracking_uri": f"sqlite:///{folder / 'tokrate.db'}"},
            "wandb": {"mode": "offline"},
            "console": False,
        }
        found["tokrate: journal only"] = measure_tokrate({"console": False}, folder, "journal")
        found["tokrate: tensorboard, mlflow, wandb open"] = measure_tokrate(three, folder, "three")
        report(found)
        os.chdir("/")


if __name__ == "__main__":
    main()

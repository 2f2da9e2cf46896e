"""What `logger.log` costs the training loop with three trackers open, against calling them directly.

python benchmarks/bench_log.py

The same records go first to the trackers' own writers, one after the other on the calling thread,
then to tokrate with the same three trackers open. Once at a steady pace, as a loop logs, and once
in a burst, as fast as the calls return. Times are of the calling thread.
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

from tokrate import RunInfo, ThroughputMeter, ThroughputRecord, TokenCounts, open_logger
from tokrate.names import MetricNames

PACE_HZ = 200
PACED, BURST = 1000, 1000
BASELINE_PACED, BASELINE_BURST = 200, 200
"""Fewer for the direct calls: MLflow takes milliseconds for each."""
OPEN_TIMEOUT_S = 120.0

Log = Callable[[ThroughputRecord], object]


def make_records(number: int) -> list[ThroughputRecord]:
    """Records as a loop makes them."""
    meter = ThroughputMeter()
    records = []
    for step in range(1, number + 1):
        meter.add(TokenCounts(raw=32_768, active=14_000 + step, padded=9_000))
        records.append(meter.record(step))
    return records


def time_calls(log: Log, records: list[ThroughputRecord], pace_hz: float | None) -> list[float]:
    """Microseconds of each call.

    Args:
        pace_hz: Calls per second; None calls again at once.
    """
    times_us = []
    due_s = time.perf_counter()
    for record in records:
        if pace_hz is not None:
            due_s += 1 / pace_hz
            time.sleep(max(0.0, due_s - time.perf_counter()))
        start_ns = time.perf_counter_ns()
        log(record)
        times_us.append((time.perf_counter_ns() - start_ns) / 1000)
    return times_us


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


def measure_direct(folder: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Paced and burst times of each tracker's own writer, and of all three in a row."""
    records = make_records(BASELINE_PACED + BASELINE_BURST + 1)
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
            paced = time_calls(log, records[1 : BASELINE_PACED + 1], PACE_HZ)
            found[name] = (paced, time_calls(log, records[BASELINE_PACED + 1 :], None))
    return found


# --- tokrate -------------------------------------------------------------------------------------


def measure_tokrate(spec: object, folder: Path, name: str) -> tuple[list[float], list[float]]:
    """Paced and burst times of `logger.log`; checks that every tracker took every record."""
    records = make_records(PACED + BURST + 1)
    run = RunInfo(name=name)
    with open_logger(spec, run=run, dir=folder, close_timeout_s=300.0) as logger:
        logger.log(records[0])
        give_up_s = time.monotonic() + OPEN_TIMEOUT_S
        while any(stats.waiting for stats in logger.stats().backends.values()):
            if time.monotonic() > give_up_s:
                raise SystemExit(f"not all trackers opened: {logger.stats()}")
            time.sleep(0.05)
        paced = time_calls(logger.log, records[1 : PACED + 1], PACE_HZ)
        burst = time_calls(logger.log, records[PACED + 1 :], None)
    delivered = {name: stats.delivered for name, stats in logger.stats().backends.items()}
    if set(delivered.values()) - {len(records)}:
        raise SystemExit(f"not everything was delivered: {logger.stats()}")
    return paced, burst


def report(found: dict[str, tuple[list[float], list[float]]]) -> None:
    print(f"{'':44}{f'at {PACE_HZ} Hz, us':>24}{'in a burst, us':>24}")
    print(f"{'':44}{'median':>12}{'p99':>12}{'median':>12}{'p99':>12}")
    for name, columns in found.items():
        line = f"{name:44}"
        for times_us in columns:
            p99 = statistics.quantiles(times_us, n=100)[-1]
            line += f"{statistics.median(times_us):12.1f}{p99:12.1f}"
        print(line)


def main() -> None:
    warnings.simplefilter("ignore")
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

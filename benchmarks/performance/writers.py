"""Who writes a record: the trackers' own API, the frameworks' loggers, tokrate.

Each opens what it writes to, and returns what a loop calls.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokrate import RunInfo, open_logger

SETTLE_S = 300.0
"""Longest time that tokrate is given to catch up."""

Log = Callable[..., object]
"""Takes a dictionary of numbers and a step; tokrate's takes a record."""


@dataclass(kw_only=True)
class Place:
    """Where a contender writes, and how it is let go."""

    folder: Path
    uri: str
    """MLflow's server or database."""
    stack: contextlib.ExitStack
    settle: Callable[[], object] = lambda: None
    """Waits until what is left to do in the background is done."""


# --- the trackers' own API -----------------------------------------------------------------------


def wandb_run(place: Place) -> Log:
    import wandb

    run = wandb.init(mode="offline", dir=str(place.folder))
    place.stack.callback(run.finish)
    return lambda metrics, step: run.log({**metrics, "step": step})


def mlflow_fluent(place: Place) -> Log:
    import mlflow

    mlflow.set_tracking_uri(place.uri)
    mlflow.start_run()
    place.stack.callback(mlflow.end_run)
    return lambda metrics, step: mlflow.log_metrics(metrics, step=step)


def mlflow_async(place: Place) -> Log:
    import mlflow

    mlflow_fluent(place)
    place.settle = mlflow.flush_async_logging
    return lambda metrics, step: mlflow.log_metrics(metrics, step=step, synchronous=False)


def mlflow_client(place: Place) -> Log:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient(place.uri)
    run_id = client.create_run("0").info.run_id
    place.stack.callback(client.set_terminated, run_id)

    def log(metrics: dict[str, float], step: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        client.log_batch(run_id, [Metric(k, float(v), now_ms, step) for k, v in metrics.items()])

    return log


def summary_writer(place: Place) -> Log:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(place.folder / "tensorboard"))
    place.stack.callback(writer.close)

    def log(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return log


# --- the frameworks' loggers ---------------------------------------------------------------------


def torchtune(tracker: str, place: Place) -> Log:
    from torchtune.training import metric_logging

    if tracker == "wandb":
        logger = metric_logging.WandBLogger(log_dir=str(place.folder))
    elif tracker == "mlflow":
        logger = metric_logging.MLFlowLogger(tracking_uri=place.uri)
    else:
        logger = metric_logging.TensorBoardLogger(str(place.folder))
    place.stack.callback(logger.close)
    return logger.log_dict


def lightning(tracker: str, place: Place) -> Log:
    from lightning.pytorch import loggers

    folder = str(place.folder)
    if tracker == "wandb":
        logger = loggers.WandbLogger(save_dir=folder, offline=True)
    elif tracker == "mlflow":
        logger = loggers.MLFlowLogger(tracking_uri=place.uri)
    elif tracker == "csv":
        logger = loggers.CSVLogger(folder)
    else:
        logger = loggers.TensorBoardLogger(folder)
    place.stack.callback(logger.finalize, "success")
    return logger.log_metrics


def accelerate(trackers: Sequence[str], place: Place) -> Log:
    import mlflow
    from accelerate import Accelerator

    mlflow.set_tracking_uri(place.uri)
    accelerator = Accelerator(cpu=True, log_with=list(trackers), project_dir=str(place.folder))
    accelerator.init_trackers("accelerate", init_kwargs={"wandb": {"dir": str(place.folder)}})
    place.stack.callback(accelerator.end_training)
    return accelerator.log


def in_turn(openers: Sequence[Callable[[Place], Log]], place: Place) -> Log:
    """Several of the above, one after the other."""
    logs = [opener(place) for opener in openers]

    def log(metrics: dict[str, float], step: int) -> None:
        for one in logs:
            one(metrics, step)

    return log


# --- tokrate, and the floor ----------------------------------------------------------------------


def tokrate(trackers: Sequence[str], place: Place) -> Log:
    options = {
        "wandb": {"mode": "offline"},
        "mlflow": {"tracking_uri": place.uri},
        "tensorboard": {},
    }
    spec = {"console": False, **{tracker: options[tracker] for tracker in trackers}}
    logger = open_logger(spec, run=RunInfo("log"), dir=place.folder, close_timeout_s=SETTLE_S)

    def settle() -> None:
        give_up_s = time.monotonic() + SETTLE_S
        while any(stats.waiting for stats in logger.stats().backends.values()):
            if time.monotonic() > give_up_s:
                raise SystemExit(f"tokrate does not catch up: {logger.stats()}")
            time.sleep(0.02)

    def close() -> None:
        stats = logger.close()
        delivered = {one.delivered for one in stats.backends.values()}
        if delivered != {stats.entries} or stats.left_out:
            raise SystemExit(f"not everything was delivered: {stats}")

    place.stack.callback(close)
    place.settle = settle
    return logger.log


def floor(place: Place) -> Log:
    """What is to be safe from a crash is at least encoded, and handed to the system."""
    import msgspec

    file = os.open(place.folder / "lines", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    encode = msgspec.json.encode
    place.stack.callback(os.close, file)
    return lambda metrics, step: os.write(file, encode({"step": step, "metrics": metrics}))

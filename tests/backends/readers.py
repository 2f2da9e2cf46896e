"""Read back what trackers keep, by their own means and never by ours."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokrate.testing.points import Row

BLOCK_BYTES = 32 * 1024
FILE_HEADER_BYTES = RECORD_HEADER_BYTES = 7
FULL, LAST = 1, 4


def read_tensorboard(folder: Path) -> list[Row]:
    """The scalars that TensorBoard would load from a run's folder."""
    events = accumulate(folder)
    return [
        (event.step, {tag: event.value})
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    ]


def accumulate(folder: Path) -> Any:
    """TensorBoard's own reader, with nothing thinned out."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0}).Reload()


def mlflow_run(uri: str, run_id: str) -> Any:
    """The one MLflow run of a tokrate run; None when there is none."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`tokrate.run_id` = '{run_id}'")
    assert len(found) <= 1, f"{len(found)} MLflow runs for one run"
    return found[0] if found else None


def read_mlflow(uri: str, run_id: str) -> list[Row]:
    """Every stored metric, by time."""
    from mlflow import MlflowClient

    run = mlflow_run(uri, run_id)
    if run is None:
        return []
    client = MlflowClient(uri)
    return [
        (metric.step, {key: metric.value})
        for key in run.data.metrics
        for metric in sorted(
            client.get_metric_history(run.info.run_id, key), key=lambda m: m.timestamp
        )
    ]


def read_wandb(folder: Path, step_key: str = "throughput/step") -> list[Row]:
    """The rows in a run's `.wandb` files, oldest file first."""
    rows = []
    for row in wandb_rows(folder):
        shown = {key: v for key, v in row.items() if not key.startswith("_") and key != step_key}
        rows.append((row[step_key], shown))
    return rows


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The history rows with everything in them."""
    return [
        {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for record in wandb_records(folder)
        if record.WhichOneof("record_type") == "history"
    ]


def wandb_records(folder: Path, patience_s: float = 30.0) -> list[Any]:
    """All records of a run's `.wandb` files, once W&B's service has written the run's end.

    `Run.finish` returns a little before its last records are in the file.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    deadline = time.monotonic() + patience_s
    while True:
        files = sorted(folder.glob("wandb/*run-*/*.wandb"), key=_session)
        sessions = [[Record.FromString(data) for data in leveldb_records(f)] for f in files]
        ended = not files or any(record.HasField("exit") for record in sessions[-1])
        if ended or time.monotonic() > deadline:
            return [record for session in sessions for record in session]
        time.sleep(0.02)


def _session(file: Path) -> str:
    """Orders the files of a run: date, time, id and number of their folder."""
    return file.parent.name.partition("run-")[2]


def leveldb_records(file: Path) -> Iterator[bytes]:
    """The records of a LevelDB log, as W&B frames it; a torn last one is left out."""
    data = file.read_bytes()
    place = FILE_HEADER_BYTES
    record = b""
    while place + RECORD_HEADER_BYTES <= len(data):
        left_in_block = BLOCK_BYTES - place % BLOCK_BYTES
        if left_in_block < RECORD_HEADER_BYTES:
            place += left_in_block
            continue
        _crc, length, kind = struct.unpack_from("<IHB", data, place)
        place += RECORD_HEADER_BYTES
        record += data[place : place + length]
        place += length
        if kind in (FULL, LAST) and place <= len(data):
            yield record
            record = b""

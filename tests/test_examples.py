"""The examples run as a user runs them, and what they leave is read back by other means."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parents[1] / "examples"
KEY = "throughput/active_tps"


def run_example(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `examples/finetune.py` in the folder, offline, for four steps."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / "finetune.py"), *arguments, "steps=4", "log_every=2"],
        cwd=folder,
        env={**os.environ, "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's journal."""
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def journal_points(folder: Path) -> list[tuple[int, float]]:
    """Step and active_tps of each record in the journal."""
    entries = [line for line in read_journal(folder) if line["kind"] == "entry"]
    return [(entry["step"], entry["metrics"][KEY]) for entry in entries if KEY in entry["metrics"]]


def tensorboard_points(folder: Path) -> list[tuple[int, float]]:
    """The same, as TensorBoard's own reader finds it."""
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(KEY)]


def mlflow_points(database: Path) -> list[tuple[int, float]]:
    """The same, by plain SQL."""
    connection = sqlite3.connect(database)
    query = "SELECT step, value FROM metrics WHERE key = ? ORDER BY step"
    points = connection.execute(query, (KEY,)).fetchall()
    connection.close()
    return points


def float32(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points as a tracker of float32 values has them."""
    return [(step, torch.tensor(value).item()) for step, value in points]


def test_a_yaml_file_logs_to_three_trackers(tmp_path: Path) -> None:
    """The YAML file's run is in TensorBoard, MLflow and W&B with the journal's own numbers."""
    done = run_example(tmp_path, str(EXAMPLES / "finetune.yaml"))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "finetune-packed"
    points = journal_points(run)
    assert [step for step, _ in points] == [2, 4]
    assert tensorboard_points(run) == float32(points)
    assert mlflow_points(tmp_path / "runs" / "mlflow.db") == points
    files = list(run.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    assert KEY.encode() in files[0].read_bytes()
    assert "loss" in done.stderr  # the console shows records, and standard output stays free
    assert not done.stdout


def test_keys_override_the_file(tmp_path: Path) -> None:
    """What comes later wins, another form of the logger key included."""
    yaml = tmp_path / "my.yaml"
    yaml.write_text("name: mine\nlayout: packed\nlogger:\n  wandb: {project: never}\n")
    keys = ("logger=[tensorboard,mlflow]", "layout=padded", "target=all", "batch_size=4")
    done = run_example(tmp_path, str(yaml), *keys)
    assert done.returncode == 0, done.stderr
    points = journal_points(tmp_path / "runs" / "mine")
    assert tensorboard_points(tmp_path / "runs" / "mine") == float32(points)
    assert mlflow_points(tmp_path / "mlflow.db") == points
    first, *_, last = read_journal(tmp_path / "runs" / "mine")
    assert first["config"]["batch_size"] == 4
    assert last["outcome"] == "finished"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("layout=paked", "layout: found 'paked'; expected padded or packed"),
        ("stepz=3", "unknown: stepz; expected name, steps"),
        ("logger=tensorbord", "Did you mean 'tensorboard'?"),
    ],
)
def test_a_mistake_stops_before_training(tmp_path: Path, argument: str, message: str) -> None:
    """A misspelled key or backend is one clear error, and no run is begun."""
    done = run_example(tmp_path, argument)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_example_is_short() -> None:
    """The file stays under 80 lines, and each line of tokrate is marked."""
    lines = (EXAMPLES / "finetune.py").read_text().splitlines()
    assert len(lines) < 80
    code = lines[lines.index("import sys") :]
    ours = [line for line in code if re.search(r"meter\b|Meter|logger\.|open_logger|RunInfo", line)]
    assert len(ours) == 8
    assert all("# tokrate" in line for line in ours)

"""Ray really trains here, on two workers, which fail in several ways.

Run by `make test-ray`, in an environment of its own; skipped where Ray is missing.
"""

from __future__ import annotations

import json
import logging
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="make test-ray has it")

import ray
import ray.train
from ray import cloudpickle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tokrate import integrations
from tokrate.errors import ConfigError, RunFolderError, StateError
from tokrate.integrations import ray as integration
from tokrate.integrations.ray import open_run

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Ray's own sockets and files
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
]

EXAMPLE = Path(__file__).parents[3] / "examples" / "ray_train.py"
WORKERS = 2
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this machine alone."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def fit(folder: Path, train: Callable[[Any], None], failures: int = 1, **config: Any) -> None:
    """Train on two workers, with so many failures allowed."""
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), **config},
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(
            name="alpaca",
            storage_path=str(folder),
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()


def lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of the journal on the experiment's storage."""
    path = folder / "alpaca" / "runs" / "alpaca" / "journal.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(folder: Path) -> list[dict[str, Any]]:
    """The records in the journal."""
    return [line["record"] for line in lines(folder) if "record" in line]


def train(config: dict[str, Any]) -> None:
    """Four steps: rank r trains on rows of 10 x (r + 1) slots of which 3 are padding.

    The worker of `rank` ends in the way of `end` before the record of step `fails_at`, once.
    """
    import tempfile

    import torch

    rank = ray.train.get_context().get_world_rank()
    marker = Path(config["folder"], "failed")
    with open_run({"console": False}, config={"lr": 0.1}) as run:
        for step in range(run.step + 1, 5):
            width = 10 * (rank + 1)
            mask = torch.ones(1, width, dtype=torch.long)
            mask[:, -3:] = 0
            run.meter.update(labels=mask.where(mask == 1, -100), attention_mask=mask)
            if (step, rank) == (config["fails_at"], config["rank"]) and not marker.exists():
                marker.touch()
                if config["end"] == "killed":
                    os.kill(os.getpid(), 9)
                raise RuntimeError("gone")
            run.record(step, {"train/loss": 1.0})
            if rank:
                ray.train.report({})
                continue
            with tempfile.TemporaryDirectory() as place:
                run.save(place)
                ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(place))


# By hand: 10 + 20 slots a step, the first token of a row is no target, 3 + 3 are padding.
RAW, ACTIVE, PADDED = 30, (10 - 3 - 1) + (20 - 3 - 1), 6


@pytest.mark.parametrize(
    ("rank", "end", "fails_at"), [(1, "raised", 3), (0, "killed", 4), (1, "raised", 1)]
)
@pytest.mark.usefixtures("cluster")
def test_totals_survive_a_failure(tmp_path: Path, rank: int, end: str, fails_at: int) -> None:
    """Whichever worker fails, and however: one journal, one curve, totals of four steps."""
    fit(tmp_path, train, rank=rank, end=end, fails_at=fails_at)
    assert (tmp_path / "failed").exists()
    last = records(tmp_path)[-1]
    counts = last["raw_tokens"], last["active_tokens"], last["padded_tokens"]
    assert counts == (RAW, ACTIVE, PADDED)
    assert (last["step"], last["devices"]) == (4, 2)
    assert (last["total_raw_tokens"], last["total_active_tokens"]) == (4 * RAW, 4 * ACTIVE)
    assert last["rank_imbalance"] == 20 / 15
    assert lines(tmp_path)[0]["config"] == {"lr": 0.1}
    assert lines(tmp_path)[-1]["outcome"] == "finished"
    *_, begun = (place for place, line in enumerate(lines(tmp_path)) if line["kind"] == "run")
    # A worker that is killed may take along a checkpoint that Ray was still writing.
    resumed_at = lines(tmp_path)[begun]["resume_step"]
    assert resumed_at in (fails_at - 1, fails_at - 2)
    steps = [line["step"] for line in lines(tmp_path)[begun:] if "record" in line]
    assert steps == list(range(resumed_at + 1, 5))


def unlabelled(config: dict[str, Any]) -> None:
    """A step on a batch that nobody can count."""
    with open_run({"console": False}) as run:
        run.meter.update(input_ids=[[1, 2]])
        run.record(1)
        ray.train.report({})


@pytest.mark.usefixtures("cluster")
def test_a_batch_without_labels_does_not_end_training(tmp_path: Path) -> None:
    """The window has no rates, and the workers go on."""
    fit(tmp_path, unlabelled, failures=0)
    assert records(tmp_path)[-1]["raw_tps"] is None


# --- what goes wrong -----------------------------------------------------------------------------


def test_outside_of_a_worker_is_said() -> None:
    """A call that Ray does not make is refused with the place where it belongs."""
    with pytest.raises(ConfigError, match="expected a call within train_loop_per_worker"):
        with open_run():
            pass


def test_workers_without_a_process_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers that cannot add up would each write a run of their own."""
    workers = SimpleNamespace(get_world_size=lambda: 2)
    monkeypatch.setattr(ray.train, "get_context", lambda: workers)
    with pytest.raises(ConfigError, match=r"expected a ray\.train\.torch\.TorchTrainer"):
        with open_run():
            pass


def test_a_bucket_is_no_folder() -> None:
    """Storage that cannot be appended to is refused, with what to pass."""
    bucket = SimpleNamespace(
        storage_filesystem=SimpleNamespace(type_name="s3"), experiment_fs_path="bucket/alpaca"
    )
    with pytest.raises(RunFolderError, match=r"lies on s3 storage.*expected dir="):
        integration._shared_folder(SimpleNamespace(get_storage=lambda: bucket))


def test_a_damaged_checkpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Totals that cannot be read are an error before training; a checkpoint without is none."""
    checkpoint = ray.train.Checkpoint.from_directory(tmp_path)
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: checkpoint)
    assert integration._saved_state() is None
    (tmp_path / "tokrate.json").write_text("{")
    with pytest.raises(StateError, match="expected what save wrote"):
        integration._saved_state()


def test_an_unknown_version_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A Ray that was never run with this is named."""
    monkeypatch.setattr(integrations, "version", lambda package: "1.13.0")
    monkeypatch.setattr(integrations, "_said", set())
    with caplog.at_level(logging.WARNING, "tokrate"):
        integrations.check_version("ray")
    assert "ray 1.13.0 is not known to work" in caplog.text


# --- the example ---------------------------------------------------------------------------------


def test_the_example_runs_as_a_user_runs_it(tmp_path: Path) -> None:
    """Worker 1 fails at step 5, and the totals at step 8 are those of a hand count."""
    command = [sys.executable, str(EXAMPLE), str(tmp_path)]
    variables = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    example = runpy.run_path(str(EXAMPLE))
    lengths = [len(document) for document in example["make_documents"]()]
    assert len(lengths) == 64  # 2 workers x 8 steps x 4 rows: each document once
    active = sum(lengths) - len(lengths)
    shares = [lengths[rank::WORKERS] for rank in range(WORKERS)]
    raw = sum(4 * max(share[row : row + 4]) for share in shares for row in range(0, 32, 4))
    last = records(tmp_path)[-1]
    assert (last["step"], last["session"]) == (8, 2)
    assert (last["total_raw_tokens"], last["total_active_tokens"]) == (raw, active)
    sessions = [line["resume_step"] for line in lines(tmp_path) if line["kind"] == "run"]
    assert sessions == [None, 4]

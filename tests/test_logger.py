"""The logger: nothing raises in a running loop, and nothing is dropped without being counted."""

from __future__ import annotations

import json
import logging
import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driving import make_record
from tokrate import RankLayout, RunInfo, open_logger
from tokrate.errors import (
    BackendError,
    ConfigError,
    MetricNameError,
    TokrateError,
    ValueRefused,
)
from toys import read_tracker

QUIET: dict[str, Any] = {"console": False}


def entries(folder: Path) -> list[dict[str, Any]]:
    """The journal's entries, read without our own reader."""
    lines = map(json.loads, (folder / "journal.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "entry"]


def test_record_is_in_the_journal_before_log_returns(tmp_path: Path) -> None:
    """The journal holds the record and the metrics that backends write."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        logger.log(make_record())
        (entry,) = entries(tmp_path / "a")
    assert entry["record"] == make_record().to_dict()
    assert entry["metrics"]["throughput/active_tps"] == 2.0
    assert entry["step"] == 1


def test_journal_tells_the_run_and_its_end(tmp_path: Path) -> None:
    """The first line says what the run is, the last how it ended."""
    run = RunInfo("a", config={"lr": 0.1, "path": Path("x")}, tags=("t",))
    with pytest.raises(ZeroDivisionError), open_logger(QUIET, run=run, dir=tmp_path):
        raise ZeroDivisionError
    first, last = map(json.loads, (tmp_path / "a" / "journal.jsonl").read_text().splitlines())
    assert first["config"] == {"lr": 0.1, "path": "x"}
    assert (first["kind"], first["name"], first["session"]) == ("run", "a", 1)
    assert (last["kind"], last["outcome"], last["exit_code"]) == ("end", "failed", 1)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (None, "finished", 0),
        (RuntimeError(), "failed", 1),
        (KeyboardInterrupt(), "killed", 130),
        (SystemExit(3), "failed", 3),
        (SystemExit(), "finished", 0),
        (SystemExit("words"), "failed", 1),
    ],
)
def test_outcome_is_told(
    tmp_path: Path, error: BaseException | None, status: str, code: int
) -> None:
    """However a run ends, the tracker is told the truth."""
    out = tmp_path / "out"
    logger = open_logger(
        QUIET | {"toys:FileTracker": {"path": str(out)}}, run=RunInfo("a"), dir=tmp_path
    )
    logger.__exit__(type(error) if error else None, error, None)
    assert read_tracker(out)[1][-1] == {"outcome": status, "exit_code": code}


def test_foreign_metrics_are_renamed_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Illegal names get their legal form, bad values are left out, each said once."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        for step in (1, 2):
            logger.log_metrics(
                {
                    "eval/acc@5": np.float32(0.5),
                    "eval/acc#5": 0.1,
                    "loss": torch.tensor(math.nan),
                    "words": "no number",
                    "two": torch.ones(2),
                    "throughput/raw_tps": 1.0,
                    3: 1.0,
                },
                step=step,
            )
        stats = logger.stats()
    assert [e["metrics"].keys() for e in entries(tmp_path / "a")] == [
        {"eval/acc_5", "loss", "3"}
    ] * 2
    assert stats.left_out == {"name": 4, "value": 4}
    assert stats.renamed == {"eval/acc@5": "eval/acc_5"}
    for words in ("eval/acc@5", "eval/acc#5", "words", "two", "raw_tps"):
        assert len([r for r in caplog.records if f"{words}" in r.message.split(":")[0]]) == 1, words


@pytest.mark.parametrize("step", [-1, 1.5, None, "1", 2**63])
def test_bad_step_leaves_the_call_out(tmp_path: Path, step: Any) -> None:
    """A step that some tracker would wrap or cut is counted, not written."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        logger.log_metrics({"loss": 1.0}, step=step)
        assert logger.stats().left_out == {"step": 1}
    assert entries(tmp_path / "a") == []


def test_strict_raises(tmp_path: Path) -> None:
    """With strict=True, for tests, whatever would be mended or left out raises."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path, strict=True) as logger:
        for metrics, step, error in [
            ({"eval/acc@5": 1.0}, 1, MetricNameError),
            ({"loss": "x"}, 1, ValueRefused),
            ({"loss": 1.0}, -1, ValueRefused),
        ]:
            with pytest.raises(error):
                logger.log_metrics(metrics, step)


def test_closed_logger_counts_what_comes_late(tmp_path: Path) -> None:
    """After close nothing is written, nothing raises, and closing again gives the same report."""
    logger = open_logger(QUIET, run=RunInfo("a"), dir=tmp_path)
    report = logger.close()
    logger.log(make_record())
    assert logger.close("failed") == report == logger.stats()
    assert entries(tmp_path / "a") == []


def test_unknown_outcome(tmp_path: Path) -> None:
    """An outcome that no tracker knows is refused with those that are known."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        with pytest.raises(ConfigError, match="finished, failed, killed"):
            logger.close("done")


def test_pickled_logger_does_nothing(tmp_path: Path) -> None:
    """Handles stay in their process; what arrives elsewhere takes calls and does nothing."""
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        copy = pickle.loads(pickle.dumps(logger))
        copy.log(make_record())
        copy.log_metrics({"a": 1}, step=1)
        copy.close()
    assert entries(tmp_path / "a") == []


def test_other_ranks_open_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that does not write makes no folder, and its loop needs no `if`."""
    monkeypatch.setenv("RANK", "1")
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path, ranks=RankLayout()) as logger:
        logger.log(make_record())
        logger.log_metrics({"loss": 1.0}, step=1)
    assert list(tmp_path.iterdir()) == []
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path, ranks=RankLayout(writer=1)):
        assert (tmp_path / "a").is_dir()


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("tensorbord", {}, "tensorboard"),
        ({"tensorboard": {"logdir": "x"}}, {}, "dir"),
        ({"wandb": {"project": "a/b"}}, {}, "project"),
        ("no.such.module:Thing", {}, "no.such.module"),
        (QUIET, {"prefix": "A/B"}, "prefix"),
        (QUIET, {"metrics": "some"}, "standard"),
        (QUIET, {"aliases": "megatron"}, "torchtune"),
        (QUIET, {"run": RunInfo("../x")}, "folder"),
    ],
)
def test_configuration_errors_come_first(
    tmp_path: Path, spec: Any, options: dict[str, Any], words: str
) -> None:
    """What is wrong is said in the main thread before training, and nothing is written."""
    with pytest.raises(TokrateError, match=words):
        open_logger(spec, **({"run": RunInfo("a"), "dir": tmp_path / "runs"} | options))
    left = list((tmp_path / "runs").rglob("*")) if (tmp_path / "runs").exists() else []
    assert left == []


def test_required_backend_that_is_down(tmp_path: Path) -> None:
    """`required: true` turns an outage at the start into an error; nothing stays behind."""
    (tmp_path / "out.down").touch()
    spec = {"toys:FileTracker": {"path": str(tmp_path / "out"), "required": True}}
    with pytest.raises(BackendError, match="is down"):
        open_logger(QUIET | spec, run=RunInfo("a"), dir=tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_same_id_goes_on_in_its_folder(tmp_path: Path) -> None:
    """A restarted run continues its journal; another run of the name gets a folder of its own."""
    for _ in range(2):
        with open_logger(QUIET, run=RunInfo("a", id="x"), dir=tmp_path) as logger:
            logger.log(make_record())
    with open_logger(QUIET, run=RunInfo("a"), dir=tmp_path) as logger:
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"a", "a-2"}
    lines = [json.loads(x) for x in (tmp_path / "a" / "journal.jsonl").read_text().splitlines()]
    assert [x["session"] for x in lines if x["kind"] == "run"] == [1, 2]


def test_forgotten_close(tmp_path: Path) -> None:
    """A program that never closes still delivers everything and ends as finished."""
    program = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from tokrate import open_logger, RunInfo
spec = {{"console": False, "toys:FileTracker": {{"path": {str(tmp_path / "out")!r}}}}}
logger = open_logger(spec, run=RunInfo("a"), dir={str(tmp_path)!r})
for step in range(100):
    logger.log_metrics({{"loss": 1.0}}, step=step)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    steps, others = read_tracker(tmp_path / "out")
    assert steps == list(range(100))
    assert others[-1]["outcome"] == "finished"


def test_everything_delivered_is_quiet(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that went well says nothing above INFO."""
    caplog.set_level(logging.INFO)
    spec = QUIET | {"toys:FileTracker": {"path": str(tmp_path / "out")}}
    with open_logger(spec, run=RunInfo("a"), dir=tmp_path) as logger:
        logger.log(make_record())
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "1 delivered" in caplog.text

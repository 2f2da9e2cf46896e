"""A real elastic run: a worker is killed, torchrun starts both again, and the run goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launching import torchrun

Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """The lines of the one journal that the run left."""
    out = tmp_path_factory.mktemp("elastic")
    script = Path(__file__).with_name("elastic.py")
    torchrun(script, str(out), ranks=2, options=("--max-restarts", "1"))
    (path,) = out.rglob("journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(journal: Lines) -> Lines:
    """The records in the order in which they were logged."""
    return [line["record"] for line in journal if line["kind"] == "entry"]


def test_one_run_with_two_sessions(journal: Lines) -> None:
    """Both lives are sessions of the same run; the second says from where it goes on."""
    runs = [line for line in journal if line["kind"] == "run"]
    assert [(run["id"], run["session"], run["resume_step"]) for run in runs] == [
        ("elastic-1", 1, None),
        ("elastic-1", 2, 4),
    ]


def test_first_session_is_told_truthfully(journal: Lines) -> None:
    """The life that was cut short did not finish; the second did."""
    outcomes = [line["outcome"] for line in journal if line["kind"] == "end"]
    assert len(outcomes) == 2
    assert "finished" not in str(outcomes[0])
    assert "finished" in str(outcomes[1])


def test_totals_continue(journal: Lines) -> None:
    """After 8 steps of 16 slots and 1 s the totals are those of 8 steps, not of 9 or of 4."""
    last = records(journal)[-1]
    assert last["step"] == 8
    assert last["total_raw_tokens"] == 128
    assert last["total_active_tokens"] == 64
    assert last["total_elapsed_s"] == 8.0
    assert last["session"] == 2


def test_curve_continues(journal: Lines) -> None:
    """Step 5 was done twice; each step's latest total lies on one straight line."""
    assert [record["step"] for record in records(journal)] == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    curve = {record["step"]: record["total_raw_tokens"] for record in records(journal)}
    assert curve == {step: 16 * step for step in range(1, 9)}


def test_rates_are_of_this_session(journal: Lines) -> None:
    """The first record after the restart covers its own step and second only."""
    resumed = records(journal)[5]
    assert (resumed["steps"], resumed["raw_tokens"], resumed["raw_tps"]) == (1, 16, 16.0)
    assert resumed["warmup"]

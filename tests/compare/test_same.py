"""Several sources of one run are one row, and a disagreement is said."""

from __future__ import annotations

import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np

from compare.conftest import sources_of
from compare.making import Window, noisy, records, series
from tokrate.compare import compare_runs, read_runs
from tokrate.compare.report.text import as_json
from tokrate.compare.same import disagreement, gather_runs


def test_the_table_is_the_same_from_every_source(logged: Path) -> None:
    """Every number of the comparison, intervals included, but for what only the journal knows."""
    pages = set()
    for kind, source in sources_of(logged).items():
        found = compare_runs(read_runs([source]))
        plain = [replace(run, sources=(), outcome=None) for run in found.runs]
        doubts = tuple(doubt for doubt in found.doubts if doubt.about != "sessions")
        pages.add(as_json(replace(found, runs=tuple(plain), doubts=doubts)))
        assert [run.label for run in found.runs] == ["padded", "packed", "quick", "resumed"], kind
    assert len(pages) == 1


def test_sources_of_one_run_are_one_row(logged: Path) -> None:
    """All four at once give four runs, each read four times, that agree."""
    runs = read_runs(list(sources_of(logged).values()))
    assert [run.label for run in runs] == ["padded", "packed", "quick", "resumed"]
    for run in runs:
        assert run.series.facts.source == "journal"
        assert {other.facts.source for other in run.others} == {"tensorboard", "mlflow", "wandb"}
        assert run.disagreements == ()


def test_a_number_that_differs_is_said(logged: Path, tmp_path: Path) -> None:
    """A hand in the database is found out, with the step and both numbers."""
    shutil.copy(logged / "mlflow.db", tmp_path)
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        database.execute("UPDATE metrics SET value = 7 WHERE key LIKE '%/raw_tps' AND step = 5")
    database.close()
    runs = read_runs([str(logged), f"mlflow:{tmp_path}/mlflow.db"])
    (said,) = runs[0].disagreements
    assert "differ in raw_tps of 1 windows; at step 5 they say" in said
    assert said.endswith("and 7")
    found = compare_runs(runs)
    assert any(doubt.about == "disagreement" for doubt in found.doubts)


def test_missing_windows_are_said() -> None:
    """A tracker that did not get everything, and what delivers the rest."""
    whole, part = series(records(noisy(10))), series(records(noisy(10))[:7], source="wandb")
    said = disagreement(whole, part)
    assert said is not None
    assert "3 of 10 are only in the first, 0 of 7 only in the second" in said
    assert "tokrate sync" in said


def test_rounding_is_no_disagreement() -> None:
    """The last bit of a float32 may differ."""
    ours = series(records(noisy(10)))
    columns = {c: np.nextafter(v, np.float32(np.inf)) for c, v in ours.columns.items()}
    assert disagreement(ours, replace(ours, columns=columns)) is None


def test_two_runs_of_one_name_are_told_apart() -> None:
    """By their ids, or by where they lie."""
    found = [
        series(records([Window()] * 3), "a", run_id="x"),
        series(records([Window()] * 3), "a", run_id="y"),
        series(records([Window()] * 3), "a", run_id=None, where="logs/a"),
        series(records([Window()] * 3), "b"),
    ]
    assert [run.label for run in gather_runs(found)] == ["a [x]", "a [y]", "a [logs/a]", "b"]


def test_a_run_that_is_given_twice_is_one() -> None:
    """The same folder twice, or a copy of it."""
    (run,) = gather_runs([series(records(noisy(5))), series(records(noisy(5)), where="copy")])
    assert len(run.others) == 1
    assert run.disagreements == ()

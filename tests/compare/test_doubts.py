"""Doubts: each is said when it should be, and not when nothing is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from compare.making import START_MS, Window, noisy, records, series
from tokrate.compare import compare_runs
from tokrate.compare.same import gather_runs
from tokrate.compare.series import Series


def doubts(*found: Series) -> dict[str, str]:
    """What is doubted of the runs, by what it is about."""
    return {d.about: d.text for d in compare_runs(gather_runs(found)).doubts}


def run(name: str, count: int = 30, seed: int = 1, **fields: Any) -> Series:
    """A run of noisy windows."""
    return series(records([Window(), *noisy(count, seed, **fields)]), name)


def test_nothing_is_doubted_of_good_runs() -> None:
    """Two runs alike, with enough windows."""
    assert doubts(run("a"), run("b", seed=2)) == {}


def test_different_devices() -> None:
    """Eight and four; the ratio says little about either."""
    assert "a 8, b 4" in doubts(run("a", devices=8), run("b", devices=4))["devices"]


def test_few_and_no_steady_windows() -> None:
    """One, few, warm-up only, none at all."""
    assert "one steady window" in doubts(run("a", 1))["windows"]
    assert "only 5 steady windows" in doubts(run("a", 5))["windows"]
    assert "warm-up only" in doubts(run("a"), run("b", 0))["windows"]
    marked = series(records([Window(warmup=True)] * 3), "a")
    assert "3 of them marked as warm-up" in doubts(marked)["windows"]


def test_different_sessions() -> None:
    """One run was restarted."""
    again = records(noisy(20, 2), first_step=32, start_ms=START_MS + 10**6)
    resumed = series(
        [*records([Window(), *noisy(20)]), *again], "b", starts_ms=((START_MS + 10**6,) * 2,)
    )
    assert "a 1, b 2" in doubts(run("a"), resumed)["sessions"]


def test_a_long_pause_where_restarts_are_unknown() -> None:
    """MLflow does not tell; a pause of a thousand seconds may have been a restart."""
    late = records(noisy(20, 2), first_step=32, total=21 * 400, start_ms=START_MS + 10**6)
    found = [*records([Window(), *noisy(20)]), *late]
    said = doubts(series(found, "a", source="mlflow", knows_sessions=False))["sessions"]
    assert "mlflow does not tell of restarts" in said
    assert "before step 32" in said


def test_uneven_ranks() -> None:
    """The busiest rank has a fifth more than the mean."""
    assert "1.20 times" in doubts(run("a", imbalance=1.2))["imbalance"]


def test_missing_and_nominal_padding() -> None:
    """Nothing told padding apart; or not one slot is padding beside a run that has some."""
    assert "nothing told padding apart" in doubts(run("a", padded=None))["padding"]
    assert "not one slot is padding" in doubts(run("a"), run("b", padded=0))["padding"]
    assert "padding" not in doubts(run("a", padded=0), run("b", padded=0))


def test_stalls_and_drift() -> None:
    """A window that takes a hundred times as long; a machine that gets slower."""
    stalled = series(records([Window(), *noisy(30), Window(elapsed_s=100.0)]), "a")
    assert "some windows are far off" in doubts(stalled)["stalls"]
    slower = series(records([Window(), *noisy(15), *noisy(15, 2, speed=0.8)]), "a")
    assert "not settled" in doubts(slower)["drift"]


def test_runs_that_did_not_finish_and_newer_schemas() -> None:
    """A killed run; records of a tokrate to come."""
    found = run("a")
    found = replace(found, facts=replace(found.facts, outcome="killed", schema_version=9))
    said = doubts(found, replace(run("b"), facts=replace(run("b").facts, schema_version=1)))
    assert said["outcome"] == "a: the run was killed"
    assert "9" in said["schema"]

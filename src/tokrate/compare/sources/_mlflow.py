"""Reads the runs of an MLflow experiment: SQLite files by plain SQL, all else by MLflow's store.

Plain SQL opens the file for reading only (MLflow would migrate it) and is about twenty times
faster than MLflow's client.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokrate.backends._mlflow_store import open_store, sqlite_path, without_mlflow_logs
from tokrate.compare.keys import understand
from tokrate.compare.progress import Progress
from tokrate.compare.reading import series_of
from tokrate.compare.series import Facts, Points, Series
from tokrate.errors import CompareError, MissingPackageError
from tokrate.redact import redact_text

SERVER_TIMEOUT_S = 30.0
OUTCOMES = {"FINISHED": "finished", "FAILED": "failed", "KILLED": "killed"}
TAG = "tokrate.run_id"
RUNS_OF = """
SELECT run_uuid, name, status,
       (SELECT value FROM tags WHERE tags.run_uuid = runs.run_uuid AND tags.key = ?)
FROM runs WHERE experiment_id IN ({marks}) AND lifecycle_stage = 'active' ORDER BY start_time
"""

POINTS_OF = """
SELECT key, step, timestamp, value FROM metrics
WHERE run_uuid = ? AND key IN ({marks}) AND NOT is_nan
"""


class _Run(NamedTuple):
    """A run as both ways of reading give it."""

    mlflow_id: str
    name: str
    status: str
    run_id: str | None
    keys: Sequence[str]
    points: Callable[[Sequence[str]], dict[str, Points]]


def read_mlflow(address: str, progress: Progress) -> list[Series]:
    """All runs of an experiment that have a speed in them.

    Args:
        address: `URI#experiment`; without an experiment all of them. A path of a SQLite file is
            an address, too.
        progress: Told after each run.

    Raises:
        CompareError: There is no such store or experiment, or no run with names that we know.
        MissingPackageError: mlflow is needed for this address, and not installed.
    """
    uri, _, experiment = address.partition("#")
    address = redact_text(address)  # from here on it is for messages
    path = sqlite_path(uri) or (Path(uri) if "://" not in uri else None)
    runs = (
        _by_store(uri, experiment, address) if path is None else _by_sql(path, experiment, address)
    )
    found, done = [], 0
    with closing(runs):
        for run in runs:
            progress(f"reading mlflow:{address}", done, None)
            done += 1
            reading = understand(run.keys)
            if reading is not None:
                facts = Facts(
                    name=run.name,
                    run_id=run.run_id,
                    source="mlflow",
                    where=f"{redact_text(uri)} run {run.mlflow_id}",
                    outcome=OUTCOMES.get(run.status, "open"),
                    knows_sessions=False,
                )
                found.append(series_of(facts, reading, run.points([*reading.keys]).__getitem__))
    if not found:
        raise CompareError(
            f"mlflow:{address}: none of {done} runs has a metric such as throughput/active_tps, "
            "or the tokens per second of a framework that we know"
        )
    return found


def _by_sql(path: Path, experiment: str, address: str) -> Any:
    if not path.is_file():
        raise CompareError(f"mlflow:{address}: there is no file {path}")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            yield from _sql_runs(database, experiment, address)
    except sqlite3.Error as error:
        raise CompareError(
            f"mlflow:{address}: {path} cannot be read as an MLflow store: {error}"
        ) from error


def _sql_runs(database: sqlite3.Connection, experiment: str, address: str) -> Iterable[_Run]:
    names = dict(database.execute("SELECT name, experiment_id FROM experiments"))
    _check_experiment(experiment, names, address)
    wanted = [names[experiment]] if experiment else list(names.values())
    marks = ",".join("?" * len(wanted))
    rows = database.execute(RUNS_OF.format(marks=marks), [TAG, *wanted]).fetchall()
    for mlflow_id, name, status, run_id in rows:
        # latest_metrics has one row for each key; the table of all points is large.
        keys = database.execute("SELECT key FROM latest_metrics WHERE run_uuid = ?", [mlflow_id])

        def points(wanted: Sequence[str], mlflow_id: str = mlflow_id) -> dict[str, Points]:
            marks = ",".join("?" * len(wanted))
            rows: dict[str, list[Any]] = {key: [] for key in wanted}
            for key, *row in database.execute(POINTS_OF.format(marks=marks), [mlflow_id, *wanted]):
                rows[key].append(row)
            return {key: _points(found) for key, found in rows.items()}

        yield _Run(mlflow_id, name or mlflow_id, status, run_id, [k for (k,) in keys], points)


def _by_store(uri: str, experiment: str, address: str) -> Any:
    try:
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise MissingPackageError(
            f"mlflow:{address}: reading this address needs the package 'mlflow': run  "
            "pip install 'tokrate[mlflow]'"
        ) from error
    try:
        with without_mlflow_logs():
            yield from _store_runs(open_store(uri, SERVER_TIMEOUT_S), experiment, address)
    except MlflowException as error:
        reason = redact_text(next(iter(str(error).splitlines()), type(error).__name__))
        raise CompareError(f"mlflow:{address}: the store cannot be read: {reason}") from error


def _store_runs(store: Any, experiment: str, address: str) -> Iterable[_Run]:
    names = {found.name: found.experiment_id for found in _pages(store.search_experiments)}
    _check_experiment(experiment, names, address)
    wanted = [names[experiment]] if experiment else list(names.values())

    def search(page_token: str | None = None) -> Any:
        from mlflow.entities import ViewType

        return store.search_runs(
            wanted, "", ViewType.ACTIVE_ONLY, max_results=1000, page_token=page_token
        )

    for run in _pages(search):

        def points(wanted: Sequence[str], mlflow_id: str = run.info.run_id) -> dict[str, Points]:
            histories = {key: store.get_metric_history(mlflow_id, key) for key in wanted}
            return {
                key: _points([(m.step, m.timestamp, m.value) for m in found if m.value == m.value])
                for key, found in histories.items()
            }

        yield _Run(
            run.info.run_id,
            run.info.run_name or run.info.run_id,
            run.info.status,
            run.data.tags.get(TAG),
            list(run.data.metrics),
            points,
        )


def _pages(ask: Callable[..., Any]) -> Iterable[Any]:
    """All items of an answer that comes in pages."""
    token = None
    while True:
        page = ask(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _check_experiment(experiment: str, names: Iterable[str], address: str) -> None:
    if experiment and experiment not in names:
        there = ", ".join(sorted(names)) or "none"
        raise CompareError(
            f"mlflow:{address}: there is no experiment {experiment!r}; the store has {there}"
        )


def _points(rows: Sequence[tuple[Any, ...]]) -> Points:
    step, time_ms, value = zip(*rows, strict=True) if rows else ((), (), ())
    return Points(np.array(step, np.int64), np.array(time_ms, np.int64), np.array(value, float))

"""Writes to MLflow in batches, by run id only: the fluent API and its active run stay the user's.

The same (key, timestamp, step, value) is one row in MLflow, so entries may be written again.
MLflow cannot show NaN (it breaks the run's page) nor infinity (stored as 1.8e308, another value):
both are left out and counted; the journal keeps them.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokrate.backends._mlflow_run import (
    Target,
    attach,
    may_pass,
    send_devices,
    send_facts,
)
from tokrate.backends._mlflow_store import (
    SQLITE,
    open_store,
    put_artifact,
    sqlite_path,
    without_mlflow_logs,
)
from tokrate.backends.base import Entry, Outcome
from tokrate.errors import BackendError, ConfigError
from tokrate.run import RunInfo

if TYPE_CHECKING:
    from mlflow.entities import Metric

METRICS_PER_CALL = 1000
"""The most that MLflow takes in one call."""

DEFAULT_URI = "sqlite:///mlflow.db"


class MLflowBackend:
    """One MLflow run; a run that is active already is joined and left open.

    Args:
        run: The run that is written.
        tracking_uri: Server or database. None takes MLFLOW_TRACKING_URI from the environment,
            else `sqlite:///mlflow.db` in the working directory.
        experiment: Name of the experiment; created when there is none.
        timeout_s: Limit for connecting to a server, and again for each answer, in seconds.
    """

    def __init__(
        self,
        run: RunInfo,
        *,
        tracking_uri: str | None = None,
        experiment: str = "tokrate",
        timeout_s: float = 10.0,
    ) -> None:
        _check_text("tracking_uri", tracking_uri, optional=True)
        _check_text("experiment", experiment)
        if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or timeout_s <= 0:
            raise ConfigError(
                f"mlflow: timeout_s is a number of seconds above 0, not {timeout_s!r}"
            )
        self._run = run
        self._experiment = experiment
        self._timeout_s = float(timeout_s)
        self._uri, self._joined_id = _where(tracking_uri)
        self._store: Any = None
        self._target: Target | None = None
        self._admitted = False
        self._devices: int | None = None
        self._last_time_ms: int | None = None
        self.left_out: Counter[str] = Counter()

    def write(self, entries: Sequence[Entry]) -> None:
        """Send the entries' metrics, 1000 in a call."""
        with self._translated("writing metrics"):
            target = self._connected()
            metrics, left_out = _metrics(entries)
            for start in range(0, len(metrics), METRICS_PER_CALL):
                batch = metrics[start : start + METRICS_PER_CALL]
                self._store.log_batch(target.run_id, batch, [], [])
            self.left_out += left_out
            self._tell_devices(target, entries)
        if entries:
            self._last_time_ms = entries[-1].time_unix_ms

    def close(self, outcome: Outcome) -> None:
        """Tell MLflow how the run ended, unless somebody else started it."""
        if self._target is None:
            return
        if not self._target.joined:
            from mlflow.entities import RunStatus

            status = RunStatus.from_string(outcome.status.upper())
            ended_ms = self._last_time_ms or int(time.time() * 1000)
            with self._translated("telling how the run ended"):
                self._store.update_run_info(self._target.run_id, status, ended_ms, None)
        self._forget()

    def _connected(self) -> Target:
        """The run, found or created on the first call and after an outage."""
        if self._target is None:
            self._store = open_store(self._uri, self._timeout_s)
            target = attach(
                self._store, self._run, experiment=self._experiment, joined_id=self._joined_id
            )
            if not target.joined:
                send_facts(self._store, self._run, target, self._put_artifact(target))
            self._target, self._admitted = target, True
        return self._target

    def _tell_devices(self, target: Target, entries: Sequence[Entry]) -> None:
        """Tag our own run with the number of devices, when it is known and when it changes."""
        found = next((e.record.devices for e in reversed(entries) if e.record is not None), None)
        if found not in (None, self._devices) and not target.joined:
            send_devices(self._store, target, found)
            self._devices = found

    def _put_artifact(self, target: Target) -> Any:
        def put(name: str, text: str) -> None:
            put_artifact(self._store, target.artifact_uri, name, text, self._timeout_s)

        return put

    def _forget(self) -> None:
        """Begin anew next time; a database may have been removed or replaced under its pool."""
        engine = getattr(self._store, "engine", None)
        if engine is not None:
            engine.dispose()
        self._store, self._target = None, None

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """The one place where what MLflow raises becomes a `BackendError`."""
        try:
            with without_mlflow_logs():
                yield
        except BackendError:
            raise
        except ImportError as error:
            hint = " (mlflow-skinny has no SQLite store: pip install mlflow)" * (
                SQLITE in self._uri
            )
            raise BackendError(
                f"mlflow is installed but fails to import: {error}{hint}", retryable=False
            ) from error
        except Exception as error:
            self._forget()
            reason = _reason(error).replace(self._uri, _shown(self._uri))
            message = f"mlflow: {what} failed at {_shown(self._uri)}: {reason}"
            retryable = may_pass(error, admitted=self._admitted)
            raise BackendError(message, retryable=retryable) from error


def _metrics(entries: Sequence[Entry]) -> tuple[list[Metric], Counter[str]]:
    """The metrics that MLflow can show, and how many it cannot, by reason."""
    from mlflow.entities import Metric

    metrics, left_out = [], Counter[str]()
    for entry in entries:
        for key, number in entry.metrics.items():
            reason = _unshowable(number)
            if reason is None:
                metrics.append(Metric(key, float(number), entry.time_unix_ms, entry.step))
            else:
                left_out[reason] += 1
    return metrics, left_out


def _unshowable(number: int | float) -> str | None:
    try:
        value = float(number)
    except OverflowError:
        return "too large for float64"
    if math.isnan(value):
        return "nan"
    return "inf" if math.isinf(value) else None


def _where(tracking_uri: str | None) -> tuple[str, str | None]:
    """The address to write to, and the id of the user's active run there, if any.

    Called in the main thread: MLflow keeps the active run per thread.
    """
    mlflow = sys.modules.get("mlflow")
    active = mlflow.active_run() if mlflow is not None and hasattr(mlflow, "active_run") else None
    if active is not None and mlflow is not None:
        active_uri = mlflow.get_tracking_uri()
        if tracking_uri is None or _absolute(tracking_uri) == _absolute(active_uri):
            return _absolute(active_uri), active.info.run_id
    chosen = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not chosen:
        _refuse_old_store(Path.cwd() / "mlruns")
    return _absolute(chosen or DEFAULT_URI), None


def _refuse_old_store(folder: Path) -> None:
    """A file store that MLflow used by default until 3.7: do not quietly begin a second one."""
    if any(folder.glob("[0-9]*/meta.yaml")):
        raise ConfigError(
            f"mlflow: found an old file store in {folder}, and no tracking_uri. Write "
            f"tracking_uri: {DEFAULT_URI} to begin a new store; 'mlflow migrate-filestore' "
            f"moves the old runs into one"
        )


def _absolute(uri: str) -> str:
    """The address with the path of a SQLite file made absolute: the process may change folders."""
    path = sqlite_path(uri)
    if path is None or path.is_absolute() or not path.name:
        return uri
    query = uri.partition("?")[2]
    return f"{SQLITE}{path.absolute()}" + (f"?{query}" if query else "")


def _shown(uri: str) -> str:
    """The address without a password."""
    before, at, after = uri.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if at else uri


def _reason(error: Exception) -> str:
    """What went wrong, in a line; of a database error what the database itself said."""
    said = getattr(error.__cause__, "orig", None) or error
    return next(iter(str(said).strip().splitlines()), type(error).__name__)


def _check_text(option: str, value: object, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"mlflow: {option} is a text, not {value!r}")

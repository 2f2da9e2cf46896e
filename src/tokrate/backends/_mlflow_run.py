"""The MLflow run that entries go to: found again or created, with its parameters and tags.

the user's active run          joined, never ended
run.folder/mlflow.json         the run that an earlier session wrote (resume, sync)
tag tokrate.run_id == run.id   the same, where that file is missing
otherwise                      created
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from tokrate.backends._explained import explained
from tokrate.errors import BackendError
from tokrate.plain import flat, plain
from tokrate.record import SCHEMA_VERSION
from tokrate.run import RunInfo

LONGEST_KEY = 250
LONGEST_PARAM = 6000
LONGEST_TAG = 5000
BATCH = 100
"""Parameters, and tags, that MLflow takes in one call."""

DESCRIPTION = "mlflow.note.content"
"""Tag that MLflow's page of a run shows, as Markdown, above everything else."""

_REFUSED_IN_KEYS = re.compile(r"[^/\w.\- :]")
_log = logging.getLogger("tokrate.backends.mlflow")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The MLflow run that is written."""

    run_id: str
    """MLflow's id of the run."""
    experiment_id: str
    """MLflow's id of the run's experiment."""
    artifact_uri: str
    """Where the run's artifacts lie."""
    joined: bool
    """True for a run that somebody else started: nothing but metrics and a tag goes there."""
    params: Mapping[str, str]
    """The parameters that the run has already."""
    tags: Mapping[str, str]
    """The tags that it has already."""


def attach(store: Any, run: RunInfo, *, experiment: str, joined_id: str | None) -> Target:
    """Find or create the MLflow run, and set it running if it is ours.

    Args:
        store: What `open_store` returned.
        run: The run that is written.
        experiment: Name of the experiment in which to look and create.
        joined_id: Id of the user's active run, if there is one.
    """
    if joined_id is not None:
        found, joined = store.get_run(joined_id), True
    else:
        found, joined = _remembered(store, run)
        found = found or _find_or_create(store, run, experiment)
    if not joined and found.info.status != "RUNNING":
        from mlflow.entities import RunStatus

        store.update_run_info(found.info.run_id, RunStatus.RUNNING, None, None)
    target = Target(
        run_id=found.info.run_id,
        experiment_id=found.info.experiment_id,
        artifact_uri=found.info.artifact_uri,
        joined=joined,
        params=dict(found.data.params),
        tags=dict(found.data.tags),
    )
    _remember(run, target)
    return target


def send_facts(
    store: Any, run: RunInfo, target: Target, put_artifact: Callable[[str, str], None]
) -> None:
    """Send a description, unless there is one, and the configuration.

    The configuration goes into parameters, only what is new (a changed value becomes a tag), and
    as a whole into the artifact `config.json`. A server that refuses any of this is named in the
    log and does not stop the metrics.
    """
    from mlflow.entities import Param, RunTag

    if DESCRIPTION not in target.tags:
        note = RunTag(DESCRIPTION, _description(run, target))
        _try("the description", partial(store.set_tag, target.run_id, note))
    wanted = _params(run.config or {})
    new = [Param(key, value) for key, value in wanted.items() if key not in target.params]
    changed = {key: v for key, v in wanted.items() if target.params.get(key, v) != v}
    tags = [RunTag(_key(f"config_changed.{k}"), v[:LONGEST_TAG]) for k, v in changed.items()]
    for start in range(0, len(new), BATCH):
        batch = new[start : start + BATCH]
        _try("parameters", partial(store.log_batch, target.run_id, [], batch, []))
    for start in range(0, len(tags), BATCH):
        batch_of_tags = tags[start : start + BATCH]
        _try("tags", partial(store.log_batch, target.run_id, [], [], batch_of_tags))
    if run.config:
        text = json.dumps(plain(run.config), indent=2, ensure_ascii=False)
        _try_artifact("config.json", partial(put_artifact, "config.json", text))


def send_devices(store: Any, target: Target, devices: int) -> None:
    """Tag the run with the number of its devices, which only a record tells."""
    from mlflow.entities import RunTag

    tag = RunTag("tokrate.devices", str(devices))
    _try("the number of devices", partial(store.set_tag, target.run_id, tag))


def _description(run: RunInfo, target: Target) -> str:
    """What the numbers mean, and links to what the page does not show by itself."""
    keys = [f"{run.prefix}/active_tps", f"{run.prefix}/raw_tps"]
    chart = {
        "runs": json.dumps([target.run_id]),
        "metric": json.dumps(keys[0]),
        "experiments": json.dumps([target.experiment_id]),
        "plot_metric_keys": json.dumps(keys),
        "x_axis": "step",
    }
    table = {
        "workflowType": "machine_learning",
        "orderByKey": f"metrics.`{run.prefix}/steady_active_tps`",
        "orderByAsc": "false",
    }
    runs = f"#/experiments/{target.experiment_id}/runs"
    # In one line: the page folds what follows, and one cannot click there.
    return (
        f"[Active and raw tokens per second in one chart](#/metric?{urlencode(chart)}) · "
        f"[All runs, the fastest first]({runs}?{urlencode(table)})\n\n"
        f"{explained(run.prefix)}"
    )


def _try_artifact(name: str, send: Callable[[], object]) -> None:
    """Send a file. Its store is another one, out of whose reach this machine may always be."""
    try:
        send()
    except Exception as error:  # noqa: BLE001 - each kind of store has errors of its own
        reason = str(error).strip() or type(error).__name__
        _log.warning(f"mlflow: the artifact {name} cannot be kept: {reason} (it is in the journal)")


def _try(what: str, send: Callable[[], object]) -> None:
    """Send what may be refused for good; an outage is let through and everything comes again."""
    from mlflow.exceptions import MlflowException

    try:
        send()
    except MlflowException as error:
        if may_pass(error):
            raise
        _log.warning(f"mlflow refused {what} of the run: {error} (they are in the journal)")


REFUSED = frozenset({"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"})
"""Error codes of MLflow that no repetition cures."""
LOCKED_OUT = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"})
"""Codes of a wrong account; met by a run that was let in before, of a token that has expired."""


def may_pass(error: Exception, *, admitted: bool = False) -> bool:
    """Whether the same call may succeed later.

    Args:
        error: What MLflow raised.
        admitted: Whether the server has let this run in before.
    """
    code = getattr(error, "error_code", None)
    return code not in REFUSED and (admitted or code not in LOCKED_OUT)


def _find_or_create(store: Any, run: RunInfo, experiment: str) -> Any:
    from mlflow.entities import RunTag, ViewType

    experiment_id = _experiment_id(store, experiment)
    mark = '"' if "'" in str(run.id) else "'"
    wanted = f"tags.`tokrate.run_id` = {mark}{run.id}{mark}"
    found = store.search_runs([experiment_id], wanted, ViewType.ACTIVE_ONLY, max_results=1)
    if found:
        return found[0]
    tags = [RunTag(key, value) for key, value in _tags(run).items()]
    start_ms = run.started_unix_ms or int(time.time() * 1000)
    return store.create_run(experiment_id, _user(), start_ms, tags, run.name)


def _experiment_id(store: Any, name: str) -> str:
    from mlflow.exceptions import MlflowException

    found = store.get_experiment_by_name(name)
    if found is None:
        try:
            return str(store.create_experiment(name, None, []))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = store.get_experiment_by_name(name)  # somebody else was faster
    if found.lifecycle_stage == "deleted":
        raise BackendError(
            f"mlflow: the experiment {name!r} is deleted; restore it with "
            f"'mlflow experiments restore -x {found.experiment_id}', or name another one",
            retryable=False,
        )
    return str(found.experiment_id)


def _tags(run: RunInfo) -> dict[str, str]:
    """What makes the run found again, and the user's own words."""
    words = {_key(tag): tag[:LONGEST_TAG] for tag in run.tags}
    source = {
        "mlflow.source.name": sys.argv[0],
        "mlflow.source.type": "LOCAL",
        "mlflow.user": _user(),
    }
    ours = {
        "tokrate.run_id": str(run.id),
        "tokrate.version": version("tokrate"),
        "tokrate.schema_version": str(SCHEMA_VERSION),
    }
    return {**words, **source, **ours}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        return "unknown"


def _params(config: Mapping[str, Any]) -> dict[str, str]:
    """The configuration as MLflow takes it; of two keys that become one, the first."""
    params: dict[str, str] = {}
    for name, value in flat(config).items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        key = _key(name)
        params.setdefault(key, text[:LONGEST_PARAM])
    return params


def _key(name: str) -> str:
    """The nearest name that MLflow takes for a parameter or a tag."""
    key = _REFUSED_IN_KEYS.sub("_", name)[:LONGEST_KEY]
    return os.path.normpath(key).strip("/.") or "_" if "/" in key else key or "_"


def _remembered(store: Any, run: RunInfo) -> tuple[Any, bool]:
    """The run that an earlier session wrote, and whether it had been joined."""
    from mlflow.exceptions import MlflowException

    try:
        noted = json.loads(_note(run).read_text(encoding="utf-8"))
        if noted["tokrate_id"] != run.id:
            return None, False
        return store.get_run(noted["run_id"]), bool(noted["joined"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, False
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None, False


def _remember(run: RunInfo, target: Target) -> None:
    """Note the run's id beside the journal, so that `tokrate sync` goes on with the same run."""
    noted = {"run_id": target.run_id, "joined": target.joined, "tokrate_id": run.id}
    _note(run).write_text(json.dumps(noted) + "\n", encoding="utf-8")


def _note(run: RunInfo) -> Path:
    return (run.folder or Path()) / "mlflow.json"

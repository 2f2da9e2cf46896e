"""W&B: rows with their own step, somebody else's run, no account, no server."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.readers import read_wandb, wandb_records, wandb_rows
from tokrate.backends._wandb import WandbBackend
from tokrate.errors import BackendError, ConfigError
from tokrate.run import Outcome, RunInfo
from tokrate.steady import STEADY
from tokrate.testing.points import START_MS, entries, in_thread, new_run


def deliver(backend: WandbBackend, *steps: int, outcome: Outcome = Outcome.FINISHED) -> None:
    """Write a point per step and close, in a thread as delivery does."""

    def work() -> None:
        backend.write(entries(({"throughput/x": float(step)} for step in steps), steps))
        backend.close(outcome)

    in_thread(work)


def records_of(run: RunInfo, kind: str) -> list[Any]:
    """The records of one kind in a run's file."""
    assert run.folder is not None
    found = wandb_records(run.folder)
    return [getattr(r, kind) for r in found if r.WhichOneof("record_type") == kind]


def test_rows_carry_their_own_step_and_time(tmp_path: Path) -> None:
    """The charts use our step, and a row that comes late has the time of its entry."""
    run = new_run(tmp_path)
    deliver(WandbBackend(run, mode="offline"), 5, 3)
    rows = wandb_rows(tmp_path / "conformance")
    assert [row["throughput/step"] for row in rows] == [5, 3]
    assert [row["_timestamp"] for row in rows] == [START_MS / 1000, START_MS / 1000 + 1]
    metrics = {m.glob_name or m.name: m for m in records_of(run, "metric")}
    hidden = {"throughput/step", *(f"throughput/{name}" for name in STEADY)}
    assert metrics.keys() == hidden | {"throughput/total_active_tokens", "throughput/*", "*"}
    for name, metric in metrics.items():
        assert metric.step_metric == ("" if name == "throughput/step" else "throughput/step")
        assert metric.options.hidden == (name in hidden)
        assert not metric.HasField("summary"), "a rule would change the name in the table of runs"


def test_wandbs_own_viewer_shows_the_last_values(tmp_path: Path) -> None:
    """The summary, as `wandb leet inspect` reads it, has each number's last value by its name."""
    row = {"throughput/active_tps": 9.0, "throughput/total_active_tokens": 10}
    lower = {"throughput/active_tps": 5.0, "throughput/total_active_tokens": 20}
    steady = {f"throughput/{name}": 7.5 for name in STEADY}
    backend = WandbBackend(new_run(tmp_path, config={"lr": 0.1}), mode="offline")
    backend.write(entries([row, lower, steady], [1, 2, 2]))
    backend.close(Outcome.FAILED)
    wandb_records(tmp_path / "conformance")  # waits until the file is whole
    (folder,) = (tmp_path / "conformance" / "wandb").glob("offline-run-*")
    command = ["-m", "wandb", "leet", "inspect", "--summary", "--json", str(folder)]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "WANDB_ERROR_REPORTING": "false"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "No such command" in done.stderr:
        pytest.skip("this wandb has no `leet inspect`")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    ours = {key: v for key, v in seen["summary"].items() if key.startswith("throughput/")}
    assert ours == {**lower, **steady, "throughput/step": 2}
    assert (seen["name"], seen["exit_code"]) == ("conformance", 1)
    assert "lr" in seen["config"]


def test_the_run_has_its_facts(tmp_path: Path) -> None:
    """Project, name, tags and configuration arrive; the global run of W&B is not touched."""
    import wandb

    run = new_run(tmp_path, config={"model": {"layers": 2}, "path": Path("x")}, tags=("a", "a"))
    deliver(WandbBackend(run, mode="offline", project="alpaca", group="g", notes="n"), 1)
    first = records_of(run, "run")[0]
    assert (first.project, first.display_name, first.run_id) == ("alpaca", "conformance", run.id)
    assert (first.run_group, first.notes, list(first.tags)) == ("g", "n", ["a"])
    config = {item.key: json.loads(item.value_json) for item in first.config.update}
    assert config["model"] == {"layers": 2}
    assert config["path"] == "x"
    assert wandb.run is None


def test_the_project_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WANDB_PROJECT is what W&B's users set; without it the project is ours."""
    for name, expected in (("mine", "mine"), ("", "tokrate")):
        monkeypatch.setenv("WANDB_PROJECT", name)
        run = new_run(tmp_path, name=f"in-{expected}")
        deliver(WandbBackend(run, mode="offline"), 1)
        assert records_of(run, "run")[0].project == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"project": "a/b c"}, "try 'a-b c'"),
        ({"project": "p" * 129}, "has 129 characters, W&B takes 128"),
        ({"project": 3}, "project is a text, not 3"),
        ({"entity": ""}, "entity is a text"),
        ({"mode": "off"}, "mode is one of online, offline, not 'off'"),
        ({"init_timeout_s": 0}, "init_timeout_s is a number above 0"),
        ({"init_timeout_s": "5"}, "init_timeout_s is a number above 0"),
    ],
)
def test_wrong_options_are_told_before_training(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """What W&B would refuse when training runs is an error of the configuration."""
    with pytest.raises(ConfigError, match=message):
        WandbBackend(new_run(tmp_path), **options)


@pytest.mark.parametrize("run_id", ["a/b", "a:b", "a,b", " a"])
def test_an_id_that_wandb_refuses_is_told_before_training(run_id: str, tmp_path: Path) -> None:
    """Not every id that can name a folder can be an id of W&B."""
    with pytest.raises(ConfigError, match=r"give another RunInfo\.id"):
        WandbBackend(replace(new_run(tmp_path), id=run_id))


def test_without_an_account_the_run_is_offline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody is asked for a key in the middle of training; it is said once and kept here."""
    with caplog.at_level(logging.WARNING, "tokrate"):
        deliver(WandbBackend(new_run(tmp_path)), 1, 2)
    assert read_wandb(tmp_path / "conformance") == [
        (1, {"throughput/x": 1.0}),
        (2, {"throughput/x": 2.0}),
    ]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "nobody is logged in, so the run is kept offline" in said[0]


def test_two_runs_at_once(tmp_path: Path) -> None:
    """Two loggers in one process write two runs, each with its own end."""
    first, second = new_run(tmp_path, name="first"), new_run(tmp_path, name="second")
    one, two = WandbBackend(first, mode="offline"), WandbBackend(second, mode="offline")
    for step in range(3):
        one.write(entries([{"throughput/x": 1.0}], [step]))
        two.write(entries([{"throughput/x": 2.0}], [step]))
    one.close(Outcome.FAILED)
    two.close(Outcome.FINISHED)
    assert read_wandb(tmp_path / "first") == [(s, {"throughput/x": 1.0}) for s in range(3)]
    assert read_wandb(tmp_path / "second") == [(s, {"throughput/x": 2.0}) for s in range(3)]
    assert [records_of(run, "exit")[-1].exit_code for run in (first, second)] == [1, 0]


def test_swallowed_names_are_counted(tmp_path: Path) -> None:
    """W&B hides names that begin with an underscore; they are left out and counted."""
    backend = WandbBackend(new_run(tmp_path), mode="offline")
    backend.write(entries([{"_hidden": 1.0, "throughput/x": 2.0}]))
    backend.close(Outcome.FINISHED)
    assert backend.left_out == {"name begins with _": 1}
    assert read_wandb(tmp_path / "conformance") == [(0, {"throughput/x": 2.0})]


# Somebody else's run -----------------------------------------------------------------------------


@pytest.fixture
def users_run(tmp_path: Path) -> Iterator[Any]:
    """A run that the training script has started itself."""
    import wandb

    (tmp_path / "users").mkdir()
    settings = wandb.Settings(console="off", silent=True)
    run = wandb.init(project="own", mode="offline", dir=str(tmp_path / "users"), settings=settings)
    yield run
    run.finish()


def users_rows(users_run: Any, tmp_path: Path) -> list[dict[str, Any]]:
    """The rows of the user's run, without what W&B adds."""
    users_run.finish()
    rows = wandb_rows(tmp_path / "users")
    return [{k: v for k, v in row.items() if not k.startswith("_")} for row in rows]


def test_an_active_run_is_joined_and_left_open(users_run: Any, tmp_path: Path) -> None:
    """Rows go into the user's run; only the axis of our own metrics is set, nothing is ended."""
    import wandb

    run = new_run(tmp_path, config={"lr": 0.1})
    deliver(WandbBackend(run), 1, outcome=Outcome.FAILED)
    assert wandb.run is users_run
    users_run.log({"loss": 1.0})
    assert users_rows(users_run, tmp_path) == [
        {"loss": 1.0, "throughput/x": 1.0, "throughput/step": 1}
    ]
    records = wandb_records(tmp_path / "users")
    globs = {r.metric.glob_name for r in records if r.WhichOneof("record_type") == "metric"}
    assert globs == {"", "throughput/*"}  # and none for what is not ours
    assert [r.exit.exit_code for r in records if r.HasField("exit")] == [0]
    assert not (tmp_path / "conformance" / "wandb").exists(), "no second run was made"


def test_what_the_trainer_logs_later_at_a_step_is_kept(users_run: Any, tmp_path: Path) -> None:
    """Our row does not close the step that the trainer is still filling."""
    backend = WandbBackend(new_run(tmp_path))
    for step in (10, 11):
        users_run.log({"loss": float(step)}, step=step)
        backend.write(entries([{"throughput/x": float(step)}], [step]))
        users_run.log({"accuracy": 0.5}, step=step)
    backend.close(Outcome.FINISHED)
    assert users_rows(users_run, tmp_path) == [
        {"loss": float(s), "accuracy": 0.5, "throughput/x": float(s), "throughput/step": s}
        for s in (10, 11)
    ]


def test_a_backlog_into_a_joined_run_keeps_every_row(users_run: Any, tmp_path: Path) -> None:
    """Several of our rows between two of the trainer's do not overwrite each other."""
    backend = WandbBackend(new_run(tmp_path))
    backend.write(entries({"throughput/x": float(step)} for step in range(4)))
    users_run.log({"loss": 1.0})
    backend.write(entries([{"throughput/x": 4.0}], [4]))
    backend.close(Outcome.FINISHED)
    rows = users_rows(users_run, tmp_path)
    ours = [(r["throughput/step"], r["throughput/x"]) for r in rows if "throughput/step" in r]
    assert ours == [(step, float(step)) for step in range(5)]
    assert [row["loss"] for row in rows if "loss" in row] == [1.0]


def test_a_joined_run_that_was_finished_is_told_for_good(users_run: Any, tmp_path: Path) -> None:
    """When the user ends their run before us, nothing is written and nobody waits for it."""
    backend = WandbBackend(new_run(tmp_path))
    backend.write(entries([{"throughput/x": 1.0}]))
    users_run.finish()
    with pytest.raises(BackendError, match="has been finished") as error:
        backend.write(entries([{"throughput/x": 2.0}], [1]))
    assert not error.value.retryable


# No server ---------------------------------------------------------------------------------------

UNREACHABLE = """
import json, os, sys, time
from pathlib import Path
from tokrate.backends._wandb import WandbBackend
from tokrate.errors import BackendError
from tokrate.run import Outcome
from tokrate.testing.points import entries, new_run
folder = Path(sys.argv[1])
before = dict(os.environ)
run = new_run(folder)
backend = WandbBackend(run, init_timeout_s=1)
told = []
for attempt in range(3):
    begin_s = time.monotonic()
    try:
        backend.write([])
    except BackendError as error:
        told.append([str(error), error.retryable, time.monotonic() - begin_s])
backend.close(Outcome.FAILED)
left = [str(path) for path in folder.glob("*/wandb/run-*")]
offline = WandbBackend(run, mode="offline")
offline.write(entries([{"throughput/x": 1.0}]))
offline.close(Outcome.FINISHED)
changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
print(json.dumps([told, left, sorted(changed - {"WANDB_SERVICE"})]))
"""


def test_an_unreachable_server_is_an_outage(tmp_path: Path) -> None:
    """Each try fails within its time-out and leaves nothing half open, so a later one can work."""
    ours = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}
    environment = {
        **ours,
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_MODE": "online",
    }
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    told, left, changed = json.loads(done.stdout)
    assert [retryable for _, retryable, _ in told] == [True, True, True]
    assert all("connection refused" in message for message, _, _ in told)
    assert all(took_s < 30 for _, _, took_s in told)  # W&B itself would wait for 90 s
    assert (left, changed) == ([], [])
    assert read_wandb(tmp_path / "conformance") == [(0, {"throughput/x": 1.0})]

"""MLflow: which run is written, what it shows, what stays the user's, and how outages end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from backends.readers import mlflow_run, read_mlflow
from driving import make_record
from tokrate.backends._mlflow import MLflowBackend
from tokrate.errors import BackendError, ConfigError
from tokrate.run import Outcome, RunInfo
from tokrate.testing.points import START_MS, entries, in_thread, new_run


def deliver(backend: MLflowBackend, *steps: int, outcome: Outcome = Outcome.FINISHED) -> None:
    """Write a point per step and close, in a thread as delivery does."""

    def work() -> None:
        backend.write(entries(({"x": float(step)} for step in steps), steps))
        backend.close(outcome)

    in_thread(work)


# Where to ----------------------------------------------------------------------------------------


def test_the_default_store_is_a_database_here(
    empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address it is mlflow.db in the working directory, artifacts beside it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(empty_store.read_bytes())
    backend = MLflowBackend(new_run(tmp_path, config={"long": "x" * 7000}))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)  # the address was made absolute when the backend was opened
    deliver(backend, 1)
    found = mlflow_run(f"sqlite:///{tmp_path}/mlflow.db", f"{tmp_path.name}-conformance")
    assert Path(found.info.artifact_uri).is_relative_to(tmp_path / "mlartifacts")
    assert list(elsewhere.iterdir()) == []


def test_the_environment_names_the_server(
    store_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLFLOW_TRACKING_URI is what MLflow's users set, and is taken where no option says more."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store_uri)
    run = new_run(tmp_path)
    deliver(MLflowBackend(run), 1)
    assert read_mlflow(store_uri, str(run.id)) == [(1, {"x": 1.0})]


def test_an_old_file_store_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ./mlruns of an older MLflow and no address, the user decides."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlruns" / "0").mkdir(parents=True)
    (tmp_path / "mlruns" / "0" / "meta.yaml").touch()
    with pytest.raises(ConfigError, match="mlflow migrate-filestore"):
        MLflowBackend(new_run(tmp_path))
    MLflowBackend(new_run(tmp_path), tracking_uri="sqlite:///mlflow.db")


@pytest.mark.parametrize(
    "options",
    [
        {"tracking_uri": 5000},
        {"experiment": ""},
        {"experiment": None},
        {"timeout_s": 0},
        {"timeout_s": "10"},
        {"timeout_s": True},
    ],
)
def test_wrong_options_are_told_before_training(options: dict[str, Any], tmp_path: Path) -> None:
    """A wrong type or an impossible time-out is an error of the configuration."""
    with pytest.raises(ConfigError, match=f"mlflow: {next(iter(options))} is a"):
        MLflowBackend(new_run(tmp_path), **options)


FRESH_STORE = """
import sys
from pathlib import Path
from tokrate.backends._mlflow import MLflowBackend
from tokrate.run import Outcome
from tokrate.testing.points import entries, new_run
folder = Path(sys.argv[1])
run = new_run(folder, name=sys.argv[2])
backend = MLflowBackend(run, tracking_uri=f"sqlite:///{folder}/deep/er/mlflow.db")
backend.write(entries([{"x": 1.0}]))
backend.close(Outcome.FINISHED)
"""


def test_processes_create_one_fresh_store_together(tmp_path: Path) -> None:
    """A store that nobody has made yet is made once, however many processes come at once."""
    processes = [
        subprocess.Popen([sys.executable, "-c", FRESH_STORE, str(tmp_path), f"run{i}"])
        for i in range(2)
    ]
    assert [process.wait(120) for process in processes] == [0, 0]
    uri = f"sqlite:///{tmp_path}/deep/er/mlflow.db"
    for i in range(2):
        assert read_mlflow(uri, f"{tmp_path.name}-run{i}") == [(0, {"x": 1.0})]


# What is shown -----------------------------------------------------------------------------------


def test_facts_are_given_once(store_uri: str, tmp_path: Path) -> None:
    """Name, tags and flat parameters; a later session adds new ones and notes changed ones."""
    config = {"model": {"layers": 2, "bias": None}, "lr": 0.1}
    run = new_run(tmp_path, config=config, tags=("baseline", "team=nlp"))
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    found = mlflow_run(store_uri, str(run.id))
    assert found.info.run_name == "conformance"
    assert found.data.params == {"model.layers": "2", "model.bias": "null", "lr": "0.1"}
    assert found.data.tags["baseline"] == "baseline"
    assert found.data.tags["team_nlp"] == "team=nlp"
    assert found.data.tags["tokrate.version"] == "0.1.0"

    again = new_run(tmp_path, config={**config, "lr": 0.2, "seed": 1}, resume_step=1)
    deliver(MLflowBackend(again, tracking_uri=store_uri), 2)
    found = mlflow_run(store_uri, str(run.id))
    assert found.data.params["lr"] == "0.1"
    assert found.data.params["seed"] == "1"
    assert found.data.tags["config_changed.lr"] == "0.2"
    assert "config_changed.seed" not in found.data.tags


def test_what_does_not_fit_is_in_an_artifact(store_uri: str, tmp_path: Path) -> None:
    """A parameter is cut at 6,000 characters; the whole configuration is in config.json."""
    config = {"prompt": "é" * 7000, "odd key (%)": 1}
    run = new_run(tmp_path, config=config)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    found = mlflow_run(store_uri, str(run.id))
    assert len(found.data.params["prompt"]) == 6000
    assert found.data.params["odd key ___"] == "1"
    file = Path(found.info.artifact_uri) / "config.json"
    assert json.loads(file.read_text(encoding="utf-8")) == config


def test_the_whole_configuration_is_always_an_artifact(store_uri: str, tmp_path: Path) -> None:
    """Even where it fits into parameters; those are flat and all text."""
    run = new_run(tmp_path, config={"model": {"layers": 2}, "lr": 0.1})
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    file = Path(mlflow_run(store_uri, str(run.id)).info.artifact_uri) / "config.json"
    assert json.loads(file.read_text(encoding="utf-8")) == {"model": {"layers": 2}, "lr": 0.1}


def test_artifacts_out_of_reach_keep_no_metric_from_arriving(
    store_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store of artifacts is another one, and may be closed to this machine for ever."""
    (tmp_path / "mlartifacts").write_text("no folder")
    run = new_run(tmp_path)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    assert read_mlflow(store_uri, str(run.id)) == [(1, {"x": 1.0})]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("mlflow: the artifact config.json cannot be kept: ")


def test_the_description_explains_the_numbers(store_uri: str, tmp_path: Path) -> None:
    """It has the identity and two links; what a user writes instead is kept by later sessions."""
    from mlflow import MlflowClient

    run = new_run(tmp_path)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    found = mlflow_run(store_uri, str(run.id))
    note = found.data.tags["mlflow.note.content"]
    assert "active_tps = raw_tps * (1 - padded_frac - masked_frac)" in note
    chart, table = (parse_qs(link) for link in re.findall(r"\(#/[^?]+\?([^)]*)\)", note))
    assert json.loads(chart["runs"][0]) == [found.info.run_id]
    assert json.loads(chart["plot_metric_keys"][0]) == [
        "throughput/active_tps",
        "throughput/raw_tps",
    ]
    assert table["orderByKey"] == ["metrics.`throughput/steady_active_tps`"]
    MlflowClient(store_uri).set_tag(found.info.run_id, "mlflow.note.content", "mine")
    deliver(MLflowBackend(new_run(tmp_path, resume_step=1), tracking_uri=store_uri), 2)
    assert mlflow_run(store_uri, str(run.id)).data.tags["mlflow.note.content"] == "mine"


def test_schema_and_devices_are_tags(store_uri: str, tmp_path: Path) -> None:
    """The number of devices is told with the first record, and again when it changes."""
    run = new_run(tmp_path)
    backend = MLflowBackend(run, tracking_uri=store_uri)
    seen = []
    for step, devices in enumerate((8, 8, 4)):
        (entry,) = entries([{"x": 1.0}], [step])
        backend.write([replace(entry, record=make_record(devices=devices))])
        seen.append(mlflow_run(store_uri, str(run.id)).data.tags["tokrate.devices"])
    backend.close(Outcome.FINISHED)
    assert seen == ["8", "8", "4"]
    assert mlflow_run(store_uri, str(run.id)).data.tags["tokrate.schema_version"] == "1"


def test_the_run_began_when_its_journal_did(store_uri: str, tmp_path: Path) -> None:
    """However late it is delivered, it cannot end before it began."""
    run = replace(new_run(tmp_path), started_unix_ms=START_MS - 500)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 0, 1)
    info = mlflow_run(store_uri, str(run.id)).info
    assert (info.start_time, info.end_time) == (START_MS - 500, START_MS + 1000)


def test_a_thousand_parameters(store_uri: str, tmp_path: Path) -> None:
    """More parameters than MLflow takes in one call arrive in several."""
    run = new_run(tmp_path, config={f"key{i}": i for i in range(1000)})
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    assert len(mlflow_run(store_uri, str(run.id)).data.params) == 1000


def test_nan_and_infinity_are_left_out_and_counted(store_uri: str, tmp_path: Path) -> None:
    """MLflow's page breaks on NaN and shows infinity as a number; a replay counts once more."""
    run = new_run(tmp_path)
    backend = MLflowBackend(run, tracking_uri=store_uri)
    odd = {"a": float("nan"), "b": float("inf"), "c": -float("inf"), "d": 10**400, "x": 1.0}
    backend.write(entries([odd]))
    backend.close(Outcome.FINISHED)
    assert backend.left_out == {"nan": 1, "inf": 2, "too large for float64": 1}
    assert read_mlflow(store_uri, str(run.id)) == [(0, {"x": 1.0})]


def test_the_end_is_when_the_last_entry_was(store_uri: str, tmp_path: Path) -> None:
    """A run that is synced a day later still took as long as it took."""
    run = new_run(tmp_path)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 0, 1, 2, outcome=Outcome.KILLED)
    info = mlflow_run(store_uri, str(run.id)).info
    assert (info.status, info.end_time) == ("KILLED", START_MS + 2000)


# The user's own ----------------------------------------------------------------------------------


@pytest.fixture
def users_run(store_uri: str) -> Iterator[Any]:
    """A run that the training script has started itself."""
    import mlflow

    before = dict(os.environ)
    mlflow.set_tracking_uri(store_uri)
    try:
        yield mlflow.start_run(run_name="the user's")
    finally:
        mlflow.end_run()
        mlflow.set_tracking_uri(None)
        os.environ.clear()
        os.environ.update(before)


def test_an_active_run_is_joined_and_left_open(
    users_run: Any, store_uri: str, tmp_path: Path
) -> None:
    """Metrics go into the user's run; its parameters, its end and its tags stay the user's."""
    import mlflow

    run = new_run(tmp_path, config={"lr": 0.1})
    deliver(MLflowBackend(run), 1, outcome=Outcome.FAILED)
    active = mlflow.active_run()
    assert active is not None
    assert active.info.run_id == users_run.info.run_id
    seen = mlflow.get_run(users_run.info.run_id)
    assert seen.data.metrics == {"x": 1.0}
    assert seen.info.status == "RUNNING"
    assert seen.data.params == {}
    assert mlflow_run(store_uri, str(run.id)) is None, "no second run was made"


def test_a_sync_goes_on_with_the_joined_run(users_run: Any, store_uri: str, tmp_path: Path) -> None:
    """Without the user's process the run is found again by the note in the run's folder."""
    import mlflow

    deliver(MLflowBackend(new_run(tmp_path)), 1)
    mlflow.end_run()
    deliver(MLflowBackend(new_run(tmp_path), tracking_uri=store_uri), 2)
    seen = mlflow.get_run(users_run.info.run_id)
    assert seen.data.metrics == {"x": 2.0}
    assert seen.info.status == "FINISHED"


def test_an_active_run_elsewhere_is_not_joined(
    users_run: Any, empty_store: Path, tmp_path: Path
) -> None:
    """An address that is given and differs from the active run's wins."""
    other = tmp_path / "other.db"
    other.write_bytes(empty_store.read_bytes())
    run = new_run(tmp_path)
    deliver(MLflowBackend(run, tracking_uri=f"sqlite:///{other}"), 1)
    assert read_mlflow(f"sqlite:///{other}", str(run.id)) == [(1, {"x": 1.0})]


def test_the_process_stays_as_it_is(store_uri: str, tmp_path: Path) -> None:
    """Neither the environment nor MLflow's address and active run change."""
    import mlflow

    before = dict(os.environ)
    deliver(MLflowBackend(new_run(tmp_path), tracking_uri=store_uri), 1)
    assert dict(os.environ) == before
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() != store_uri


# Outages -----------------------------------------------------------------------------------------


def test_a_deleted_experiment_is_told_for_good(store_uri: str, tmp_path: Path) -> None:
    """Nobody waits for an experiment that was thrown away."""
    from mlflow import MlflowClient

    client = MlflowClient(store_uri)
    client.delete_experiment(client.create_experiment("gone"))
    backend = MLflowBackend(new_run(tmp_path), tracking_uri=store_uri, experiment="gone")
    with pytest.raises(BackendError, match="the experiment 'gone' is deleted; restore it") as error:
        backend.write([])
    assert not error.value.retryable


def test_an_unsupported_address_is_told_for_good(tmp_path: Path) -> None:
    """An address that MLflow has no store for never begins to work."""
    backend = MLflowBackend(new_run(tmp_path), tracking_uri="carrier-pigeon://x")
    with pytest.raises(BackendError) as error:
        backend.write([])
    assert not error.value.retryable


def test_a_removed_database_is_noticed_and_made_again(
    empty_store: Path, store_uri: str, tmp_path: Path
) -> None:
    """SQLite refuses to write into a removed file, and a new connection finds the new one."""
    run = new_run(tmp_path)
    backend = MLflowBackend(run, tracking_uri=store_uri)
    backend.write(entries([{"x": 1.0}], [1]))
    file = Path(store_uri.removeprefix("sqlite:///"))
    file.unlink()
    with pytest.raises(BackendError, match="readonly database") as error:
        backend.write(entries([{"x": 2.0}], [2]))
    assert error.value.retryable
    file.write_bytes(empty_store.read_bytes())
    backend.write(entries([{"x": 2.0}], [2]))
    backend.close(Outcome.FINISHED)
    assert read_mlflow(store_uri, str(run.id)) == [(2, {"x": 2.0})]


def test_a_database_error_is_told_once(
    store_uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """MLflow's own traceback for every failed try stays out of the terminal."""
    Path(store_uri.removeprefix("sqlite:///")).write_bytes(b"this is no database" * 100)
    backend = MLflowBackend(new_run(tmp_path), tracking_uri=store_uri)
    for _ in range(2):
        with pytest.raises(BackendError, match="mlflow: writing metrics failed at sqlite"):
            in_thread(lambda: backend.write([]))
    assert "Traceback" not in capfd.readouterr().err


class Answers(BaseHTTPRequestHandler):
    """A server in trouble."""

    status = 500
    body = b"<html>bad gateway</html>"
    requests = 0

    def do_POST(self) -> None:
        """Answer with the class's status and body."""
        Answers.requests += 1
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    do_GET = do_POST  # noqa: N815 - the name that http.server calls

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def troubled_server() -> Iterator[str]:
    """The address of a server that answers with `Answers.status`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Answers.requests = 0
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "retryable"),
    [
        (500, b"<html>oops</html>", True),
        (503, b"", True),
        (429, b'{"error_code": "REQUEST_LIMIT_EXCEEDED", "message": "slower"}', True),
        (400, b'{"error_code": "INVALID_PARAMETER_VALUE", "message": "no"}', False),
        (403, b'{"error_code": "PERMISSION_DENIED", "message": "no"}', False),
        (404, b"<html>not here yet</html>", True),
    ],
)
def test_answers_are_told_apart(
    troubled_server: str,
    status: int,
    body: bytes,
    retryable: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An outage is tried again by delivery and not by MLflow; a refusal is for good."""
    monkeypatch.setattr(Answers, "status", status)
    monkeypatch.setattr(Answers, "body", body)
    backend = MLflowBackend(new_run(tmp_path), tracking_uri=troubled_server)
    with pytest.raises(BackendError) as error:
        backend.write([])
    assert error.value.retryable is retryable
    assert Answers.requests == 1


def test_a_silent_server_costs_one_time_out(tmp_path: Path) -> None:
    """A server that accepts and never answers blocks for our time-out, not for 20 minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        uri = f"http://me:secret@127.0.0.1:{server.getsockname()[1]}"
        backend = MLflowBackend(new_run(tmp_path), tracking_uri=uri, timeout_s=0.5)
        begin_s = time.monotonic()
        with pytest.raises(BackendError) as error:
            backend.write([])
        assert time.monotonic() - begin_s < 30
    assert error.value.retryable
    assert "secret" not in str(error.value)


def test_nobody_listening_fails_at_once(tmp_path: Path) -> None:
    """A refused connection is an outage, without a wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    backend = MLflowBackend(new_run(tmp_path), tracking_uri=f"http://127.0.0.1:{port}")
    with pytest.raises(BackendError, match="Connection refused") as error:
        backend.write([])
    assert error.value.retryable


# A real server -----------------------------------------------------------------------------------


@pytest.fixture
def server(store_uri: str, tmp_path: Path) -> Iterator[str]:
    """The address of an MLflow server of our own, with the smallest set of workers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = ["-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    stores = ["--backend-store-uri", store_uri, "--artifacts-destination", str(tmp_path / "art")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, *stores], env=environment, stdout=log, stderr=log
        )
        try:
            _wait_for(port, process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(20)


def test_a_real_server(server: str, store_uri: str, tmp_path: Path) -> None:
    """Metrics, parameters, artifact, resume and end arrive over HTTP as they do in a file."""
    run = new_run(tmp_path, config={"prompt": "x" * 7000, "lr": 0.1})
    deliver(MLflowBackend(run, tracking_uri=server), *range(1500), outcome=Outcome.FAILED)
    assert mlflow_run(store_uri, str(run.id)).info.status == "FAILED"
    again = new_run(tmp_path, resume_step=1499, config=run.config)
    deliver(MLflowBackend(again, tracking_uri=server), 1500)
    found = mlflow_run(server, str(run.id))
    assert found.info.status == "FINISHED"
    assert len(found.data.params["prompt"]) == 6000
    (artifact,) = (tmp_path / "art").rglob("config.json")
    assert json.loads(artifact.read_text()) == {"prompt": "x" * 7000, "lr": 0.1}
    assert sorted(step for step, _ in read_mlflow(store_uri, str(run.id))) == list(range(1501))


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        assert process.poll() is None, "the server has ended"
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server does not come up")


def test_a_run_can_be_opened_without_a_folder_note(store_uri: str, tmp_path: Path) -> None:
    """On another machine, where the note is missing or broken, the tag finds the run."""
    run = new_run(tmp_path)
    deliver(MLflowBackend(run, tracking_uri=store_uri), 1)
    note = tmp_path / "conformance" / "mlflow.json"
    note.write_text("{")
    deliver(MLflowBackend(run, tracking_uri=store_uri), 2)
    assert read_mlflow(store_uri, str(run.id)) == [(1, {"x": 1.0}), (2, {"x": 2.0})]


def test_another_runs_note_is_not_followed(store_uri: str, tmp_path: Path) -> None:
    """A note of another run in the same folder does not lead into that run."""
    first = new_run(tmp_path)
    deliver(MLflowBackend(first, tracking_uri=store_uri), 1)
    second = RunInfo("second", id="second", folder=first.folder)
    deliver(MLflowBackend(second, tracking_uri=store_uri), 2)
    assert read_mlflow(store_uri, str(first.id)) == [(1, {"x": 1.0})]
    assert read_mlflow(store_uri, "second") == [(2, {"x": 2.0})]

"""Outages of real trackers: `log` does not feel them, nothing is lost, and one message says so."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from faults.servers import Gate, MlflowServer, free_port
from faults.watching import (
    LEEWAY_S,
    adds_up,
    each_once,
    journal_steps,
    kill_wandb_service,
    log_steps,
    one_outage,
    said,
    show,
    show_times,
    steps_shown,
    wait_delivered,
    wait_until,
)
from tokrate import RunInfo, open_logger
from tokrate.cli import cli
from tokrate.errors import BackendError
from tokrate.sync import sync_run

BEFORE, DURING, AFTER = range(300), range(300, 1300), range(1300, 1400)
ALL = range(1400)


def live_through(
    logger: Any, other: str, name: str, begin: Callable[[], None], end: Callable[[], None]
) -> None:
    """Log before, during and after an outage of `name`; `other` delivers all the while."""
    without = log_steps(logger, BEFORE, pace_s=0.001)
    wait_delivered(logger)
    begin()
    during = log_steps(logger, DURING, pace_s=0.001)
    wait_until(lambda: logger.stats().backends[name].problem)
    wait_delivered(logger, other)
    assert logger.stats().backends[name].waiting > 0
    end()
    wait_delivered(logger)
    log_steps(logger, AFTER)
    show_times(f"an outage of {name}", without, during)


# MLflow ------------------------------------------------------------------------------------------


def mlflow_and_tensorboard(url: str, **options: Any) -> dict[str, Any]:
    """A `logger` key with MLflow at the address, and TensorBoard beside it."""
    return {"console": False, "mlflow": {"tracking_uri": url, **options}, "tensorboard": {}}


def check_mlflow(report: Any, folder: Path, server: MlflowServer, run_id: str) -> None:
    """Every step is in MLflow and in TensorBoard, once."""
    in_mlflow = steps_shown("mlflow", folder, server.store_uri, run_id)
    in_tensorboard = steps_shown("tensorboard", folder)
    assert in_mlflow == in_tensorboard == each_once(journal_steps(folder))
    adds_up(report, folder, shown={"mlflow": len(in_mlflow), "tensorboard": len(in_tensorboard)})


def test_mlflow_killed_and_back(
    tmp_path: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is killed in the middle and comes back many seconds later."""
    run = RunInfo("a", id=f"{tmp_path.name}-killed")
    with open_logger(mlflow_and_tensorboard(server.url), run=run, dir=tmp_path) as logger:
        live_through(logger, "tensorboard", "mlflow", server.kill, server.start)
    check_mlflow(logger.stats(), tmp_path / "a", server, str(run.id))
    one_outage(caplog, "mlflow")
    assert said(caplog, "tensorboard") == []


@pytest.mark.parametrize("mode", ["silent", "error", "locked"])
def test_mlflow_in_trouble(
    tmp_path: Path, server: MlflowServer, gate: Gate, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The server accepts and never answers, answers 500, or no longer knows the account."""

    def turn(to: Any) -> None:
        gate.mode = to

    run = RunInfo("a", id=f"{tmp_path.name}-{mode}")
    spec = mlflow_and_tensorboard(gate.url, timeout_s=1.0)
    with open_logger(spec, run=run, dir=tmp_path) as logger:
        live_through(logger, "tensorboard", "mlflow", lambda: turn(mode), lambda: turn("open"))
    check_mlflow(logger.stats(), tmp_path / "a", server, str(run.id))
    one_outage(caplog, "mlflow")


def test_mlflow_that_takes_two_seconds(
    tmp_path: Path, server: MlflowServer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow server is no outage: entries gather, each request carries more of them."""
    run = RunInfo("a", id=f"{tmp_path.name}-slow")
    with open_logger(mlflow_and_tensorboard(gate.url), run=run, dir=tmp_path) as logger:
        without = log_steps(logger, BEFORE, pace_s=0.001)
        wait_delivered(logger)
        gate.mode, gate.requests = "slow", 0
        during = log_steps(logger, DURING, pace_s=0.003)
        wait_delivered(logger, "tensorboard")
    show_times("2 s for each answer", without, during)
    check_mlflow(logger.stats(), tmp_path / "a", server, str(run.id))
    show(f"{len(DURING)} entries, {gate.requests} requests")
    assert gate.requests < len(DURING) / 20
    assert said(caplog, "mlflow") == []


def test_mlflow_down_at_the_start(
    tmp_path: Path, server: MlflowServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Training begins without the server, which gets everything when it comes."""
    port = free_port()
    run = RunInfo("a", id=f"{tmp_path.name}-late")
    begin_s = time.monotonic()
    spec = mlflow_and_tensorboard(f"http://127.0.0.1:{port}")
    with open_logger(spec, run=run, dir=tmp_path) as logger:
        assert time.monotonic() - begin_s < LEEWAY_S
        log_steps(logger, ALL)
        wait_until(lambda: logger.stats().backends["mlflow"].problem)
        with Gate(server.port, port=port):
            wait_delivered(logger)
            logger.close()
    check_mlflow(logger.stats(), tmp_path / "a", server, str(run.id))
    one_outage(caplog, "mlflow")


@pytest.mark.parametrize("trouble", ["nobody listens", "nobody answers"])
def test_mlflow_that_never_comes_back(
    tmp_path: Path, server: MlflowServer, trouble: str, caplog: pytest.LogCaptureFixture
) -> None:
    """`close` keeps its deadline; `tokrate sync` delivers later, twice without harm."""
    run = RunInfo("a", id=f"{tmp_path.name}-{trouble.split()[1]}")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        if trouble == "nobody answers":
            listening.listen()
        spec = mlflow_and_tensorboard(f"http://127.0.0.1:{port}")
        logger = open_logger(spec, run=run, dir=tmp_path, close_timeout_s=2.0)
        log_steps(logger, ALL)
        begin_s = time.monotonic()
        report = logger.close("failed")
        took_s = time.monotonic() - begin_s
    show(f"close: {took_s:.1f} s with a limit of 2 s")
    assert took_s < 2.0 + LEEWAY_S
    adds_up(report, tmp_path / "a", shown={"mlflow": 0, "tensorboard": len(ALL)})
    assert f"tokrate sync {tmp_path / 'a'}" in caplog.text
    with Gate(server.port, port=port):
        for _ in range(2):
            done = CliRunner().invoke(cli, ["sync", str(tmp_path / "a")])
            assert done.exit_code == 0, done.output
            assert f"mlflow: {len(ALL)} delivered; nothing waits" in done.output
        found = sync_run(tmp_path / "a")
    check_mlflow(found, tmp_path / "a", server, str(run.id))


def test_a_slow_mlflow_at_the_end(
    tmp_path: Path, server: MlflowServer, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that answers, but too slowly for what waits, does not stretch the deadline."""
    run = RunInfo("a", id=f"{tmp_path.name}-slow-end")
    spec = mlflow_and_tensorboard(gate.url)
    logger = open_logger(spec, run=run, dir=tmp_path, close_timeout_s=3.0)
    wait_delivered(logger)
    log_steps(logger, range(1))
    wait_delivered(logger)
    gate.mode, gate.slow_s = "slow", 10.0  # for what waits, it would take 50 s
    log_steps(logger, range(1, 5000))
    begin_s = time.monotonic()
    report = logger.close()
    assert time.monotonic() - begin_s < 3.0 + LEEWAY_S
    assert report.backends["mlflow"].waiting > 1000
    adds_up(report, tmp_path / "a", shown={"tensorboard": 5000})
    gate.mode = "open"
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "tokrate-mlflow"])
    for _ in range(2):
        found = sync_run(tmp_path / "a")
    check_mlflow(found, tmp_path / "a", server, str(run.id))
    assert f"tokrate sync {tmp_path / 'a'}" in caplog.text


# W&B ---------------------------------------------------------------------------------------------

UNREACHABLE = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from faults.watching import log_steps, wait_delivered
from tokrate import RunInfo, open_logger
spec = {{"console": False, "tensorboard": {{}}, "wandb": {{"init_timeout_s": 2}}}}
run = RunInfo("a", id="a1")
logger = open_logger(spec, run=run, dir={dir!r}, close_timeout_s=3.0)
during = log_steps(logger, range(1400), pace_s=0.002)
wait_delivered(logger, "tensorboard")
begin_s = time.monotonic()
report = logger.close()
print(json.dumps([during, time.monotonic() - begin_s, time.time(), str(report)]))
"""


def test_wandb_unreachable(tmp_path: Path) -> None:
    """No server in online mode: the others go on, the process ends, and sync delivers later."""
    program = UNREACHABLE.format(tests=str(Path(__file__).parents[1]), dir=str(tmp_path))
    environment = os.environ | {
        "WANDB_API_KEY": "a" * 40,
        "WANDB_BASE_URL": f"http://127.0.0.1:{free_port()}",
        "WANDB_MODE": "online",
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    during, close_s, closed_unix_s, report = json.loads(done.stdout.splitlines()[-1])
    exit_s = time.time() - closed_unix_s
    show(f"close: {close_s:.1f} s with a limit of 3 s; then {exit_s:.1f} s to the end; {report}")
    show_times("W&B unreachable", during, during)
    assert close_s < 3.0 + LEEWAY_S
    assert exit_s < 10.0 + LEEWAY_S
    outages = [line for line in done.stderr.splitlines() if line.startswith("wandb: ")]
    assert len(outages) == 1, done.stderr
    assert "wandb: 0 delivered, 1400 waiting" in report
    assert "tensorboard: 1400 delivered" in report
    for _ in range(2):
        found = sync_run(tmp_path / "a", {"wandb": {"mode": "offline"}})
        adds_up(found, tmp_path / "a", shown={"wandb": 1400})
    assert steps_shown("wandb", tmp_path / "a") == each_once(ALL)


def test_wandb_service_killed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """W&B's own process dies: none is lost; rows of its last seconds may be there twice."""
    spec = {"console": False, "tensorboard": {}, "wandb": {"mode": "offline"}}
    with open_logger(spec, run=RunInfo("a"), dir=tmp_path) as logger:
        without = log_steps(logger, BEFORE, pace_s=0.001)
        wait_delivered(logger)
        kill_wandb_service()
        during = log_steps(logger, DURING, pace_s=0.001)
        wait_delivered(logger)
        log_steps(logger, AFTER)
    show_times("W&B's service killed", without, during)
    shown = steps_shown("wandb", tmp_path / "a")
    show(f"{sum(shown.values()) - len(shown)} of {len(shown)} rows are there twice")
    assert set(shown) == set(ALL)
    assert max(shown.values()) <= 2
    assert steps_shown("tensorboard", tmp_path / "a") == each_once(ALL)
    adds_up(logger.stats(), tmp_path / "a", shown={"wandb": len(ALL), "tensorboard": len(ALL)})
    one_outage(caplog, "wandb")


# TensorBoard -------------------------------------------------------------------------------------


def test_tensorboard_folder_removed(
    tmp_path: Path, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Points that come after the folder was removed are in a new one; the others go on."""
    root = tmp_path / "tb"
    spec = {
        "console": False,
        "tensorboard": {"dir": str(root)},
        "mlflow": {"tracking_uri": store_uri},
    }
    run = RunInfo("a", id="a1")
    with open_logger(spec, run=run, dir=tmp_path) as logger:
        without = log_steps(logger, BEFORE, pace_s=0.001)
        wait_delivered(logger)
        shutil.rmtree(root)
        during = log_steps(logger, DURING, pace_s=0.001)
        wait_delivered(logger)
        log_steps(logger, AFTER)
    show_times("TensorBoard's folder removed", without, during)
    assert steps_shown("tensorboard", root / "a") == each_once([*DURING, *AFTER])
    assert steps_shown("mlflow", tmp_path / "a", store_uri, "a1") == each_once(ALL)
    adds_up(logger.stats(), tmp_path / "a", shown={"mlflow": len(ALL), "tensorboard": len(ALL)})
    one_outage(caplog, "tensorboard")


def test_tensorboard_disk_full(
    tmp_path: Path, small_disk: Path, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A full disk under the event files: every point is there once when there is room again."""
    ballast = small_disk / "ballast"
    spec = {
        "console": False,
        "tensorboard": {"dir": str(small_disk)},
        "mlflow": {"tracking_uri": store_uri},
    }

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(b"x" * 100)

    run = RunInfo("a", id="a1")
    with open_logger(spec, run=run, dir=tmp_path) as logger:
        live_through(logger, "mlflow", "tensorboard", fill, ballast.unlink)
    assert steps_shown("tensorboard", small_disk / "a") == each_once(ALL)
    assert steps_shown("mlflow", tmp_path / "a", store_uri, "a1") == each_once(ALL)
    adds_up(logger.stats(), tmp_path / "a", shown={"mlflow": len(ALL), "tensorboard": len(ALL)})
    one_outage(caplog, "tensorboard")


# All ---------------------------------------------------------------------------------------------

USERS_OWN = """
import json, logging, os, sys
import mlflow, wandb
sys.path.insert(0, {tests!r})
from faults.watching import log_steps, wait_delivered
from tokrate import RunInfo, open_logger

def state():
    return [
        {{k: v for k, v in sorted(os.environ.items()) if k != "WANDB_SERVICE"}},
        mlflow.get_tracking_uri(), mlflow.active_run() is None, wandb.run is None,
        logging.getLogger("mlflow").level, [str(f) for f in logging.getLogger("mlflow").filters],
        os.getcwd(), sys.excepthook is excepthook, sys.exit is exit,
    ]

mlflow.set_tracking_uri({users!r})
wandb.setup()
excepthook, exit = sys.excepthook, sys.exit
before = state()
spec = {{"console": False, "mlflow": {{"tracking_uri": {ours!r}}}, "wandb": {{"mode": "offline"}}}}
with open_logger(spec, run=RunInfo("a", id="a1"), dir={dir!r}) as logger:
    log_steps(logger, range(10))
    wait_delivered(logger)
    with mlflow.start_run() as theirs:
        mlflow.log_metric("mine", 1.0)
    users = wandb.init(mode="offline", dir={dir!r}, project="mine")
    assert wandb.run is users
    users.log({{"mine": 1.0}})
    log_steps(logger, range(10, 20))
    wait_delivered(logger)
    wandb.finish()
during = state()
print(json.dumps([before, during, mlflow.get_run(theirs.info.run_id).data.metrics]))
"""


def test_the_users_own_calls_are_not_changed(
    tmp_path: Path, empty_store: Path, store_uri: str
) -> None:
    """Settings, environment and the user's own runs beside ours are as they were without us."""
    shutil.copy(empty_store, tmp_path / "users.db")
    users = f"sqlite:///{tmp_path}/users.db"
    tests = str(Path(__file__).parents[1])
    program = USERS_OWN.format(tests=tests, users=users, ours=store_uri, dir=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    before, after, theirs = json.loads(done.stdout.splitlines()[-1])
    assert after == before
    assert theirs == {"mine": 1.0}
    assert steps_shown("mlflow", tmp_path / "a", store_uri, "a1") == each_once(range(20))
    assert steps_shown("wandb", tmp_path / "a") == each_once(range(20))


def test_required_trackers_that_are_not_there(tmp_path: Path) -> None:
    """`required: true` is an error before training, and nothing is left behind."""
    nobody = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "file").touch()
    runs = tmp_path / "runs"
    for spec in (
        {"tensorboard": {"required": True}, "mlflow": {"tracking_uri": nobody, "required": True}},
        {"tensorboard": {"dir": str(tmp_path / "file"), "required": True}},
        {
            "wandb": {"mode": "offline", "required": True},
            "mlflow": {"tracking_uri": nobody, "required": True},
        },
    ):
        with pytest.raises(BackendError, match="is required and cannot be reached"):
            open_logger({"console": False} | spec, run=RunInfo("a"), dir=runs)
        assert list(runs.iterdir()) == []


def test_required_wandb_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for W&B in online mode, within its own time-out."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    spec = {"console": False, "wandb": {"mode": "online", "required": True, "init_timeout_s": 1}}
    begin_s = time.monotonic()
    with pytest.raises(BackendError, match="wandb is required and cannot be reached"):
        open_logger(spec, run=RunInfo("a"), dir=tmp_path / "runs")
    assert time.monotonic() - begin_s < 1.0 + LEEWAY_S  # W&B itself would wait for 90 s
    assert list((tmp_path / "runs").iterdir()) == []

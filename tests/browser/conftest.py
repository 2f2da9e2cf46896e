"""Two runs in TensorBoard and in MLflow, each behind its own server, and a browser to look at them.

With TOKRATE_PICTURES=docs/images the tests renew the pictures of the documentation.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.conftest import empty_store, nobodys_account
from driving import make_record
from faults.servers import MlflowServer, free_port
from tokrate import RunInfo, open_logger

__all__ = ["empty_store", "nobodys_account"]

QUIET_CHROMIUM = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WINDOWS = 150


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's Chromium, driven by Playwright; it ends with the module, its event loop too."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on the PATH (on Debian: apt-get install chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=list(QUIET_CHROMIUM))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page, without MLflow's assistant over it."""
    context = browser.new_context(viewport={"width": 1100, "height": 640})
    context.set_default_timeout(30_000)
    context.add_init_script(
        "localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');"
        "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
    )
    yield context.new_page()
    context.close()


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """Keeps what a page looks like, where somebody asked for it."""
    folder = os.environ.get("TOKRATE_PICTURES")

    def keep(page: Any, name: str) -> None:
        if folder:
            page.wait_for_timeout(1500)  # charts are drawn in steps
            page.screenshot(path=str(Path(folder) / f"{name}.png"))

    return keep


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> Path:
    """A folder with two runs, `boards` for TensorBoard and `mlflow.db`."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(empty_store, folder / "mlflow.db")
    log_run(folder, "padded", raw_tps=98_000, padded_frac=0.55)
    log_run(folder, "packed", raw_tps=94_000, padded_frac=0.02)
    return folder


def log_run(folder: Path, name: str, *, raw_tps: float, padded_frac: float) -> None:
    """A run with one window of warm-up, one stall, and the rest around the given values."""
    spec = {
        "console": False,
        "tensorboard": {"dir": str(folder / "boards")},
        "mlflow": {"tracking_uri": f"sqlite:///{folder}/mlflow.db", "experiment": "alpaca"},
    }
    config = {"model": {"layers": 24}, "lr": 0.0003, "packing": name == "packed"}
    chance = random.Random(name)
    total = 0
    run = RunInfo(name, config=config, tags=("sft",))
    with open_logger(spec, run=run, dir=folder / "runs") as logger:
        for number in range(1, WINDOWS + 1):
            speed = raw_tps * chance.gauss(1.0, 0.015) * {1: 0.4, 100: 0.3}.get(number, 1.0)
            share = min(max(padded_frac * chance.gauss(1.0, 0.08), 0.0), 0.9)
            record = window(10 * number, speed, share, total, warmup=number == 1)
            record = replace(record, data_wait_s=abs(chance.gauss(0.04, 0.01)))
            total = record.total_active_tokens
            logger.log(record)
            loss = 1 + 2.5 * math.exp(-number / 60) + chance.gauss(0.0, 0.03)
            logger.log_metrics({"train/loss": loss}, step=record.step)


def window(step: int, raw_tps: float, padded_frac: float, total: int, *, warmup: bool) -> Any:
    """The record of two seconds in which 7 % of the slots were masked."""
    raw, elapsed_s, devices = int(2 * raw_tps), 2.0, 2
    padded = int(raw * padded_frac)
    active = int(raw * 0.93) - padded
    return make_record(
        step=step,
        active_tps=active / elapsed_s,
        raw_tps=raw / elapsed_s,
        padded_frac=padded / raw,
        masked_frac=(raw - active - padded) / raw,
        active_tps_per_device=active / elapsed_s / devices,
        raw_tps_per_device=raw / elapsed_s / devices,
        raw_tokens=raw,
        active_tokens=active,
        padded_tokens=padded,
        elapsed_s=elapsed_s,
        devices=devices,
        total_active_tokens=total + active,
        warmup=warmup,
    )


@pytest.fixture(scope="module")
def tensorboard(runs: Path) -> Iterator[str]:
    """The address of a TensorBoard on the two runs."""
    port = free_port()
    command = ["-m", "tensorboard.main", "--logdir", str(runs / "boards"), "--port", str(port)]
    with (runs / "tensorboard.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command, "--host", "127.0.0.1"], stdout=log, stderr=log
        )
    try:
        _wait_for_runs(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _wait_for_runs(port: int, process: subprocess.Popen[bytes]) -> None:
    """TensorBoard answers before it has read its files."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        assert process.poll() is None, "TensorBoard has ended"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/data/runs")
            if b"packed" in connection.getresponse().read():
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise AssertionError("TensorBoard does not show the runs")


@pytest.fixture(scope="module")
def mlflow(runs: Path) -> Iterator[str]:
    """The address of an MLflow server on the two runs."""
    server = MlflowServer(runs)
    server.start()
    try:
        yield server.url
    finally:
        server.kill()

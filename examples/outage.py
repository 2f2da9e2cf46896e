"""Watch an outage: a loop trains, its MLflow server is killed and comes back, nothing is lost.

    python examples/outage.py
    python examples/outage.py --seconds 6

Everything is on this machine: the server is started here, on a loopback port, and killed with
SIGKILL in the middle of training.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from mlflow import MlflowClient

from tokrate import RunInfo, ThroughputMeter, TokenCounts, open_logger

STEP_S = 0.02
FIRST_TIMEOUT_S = 90.0


def start_server(port: int, folder: Path) -> subprocess.Popen[bytes]:
    """A small MLflow server; with all that it starts it is a process group of its own."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "server.log").open("a") as log:
        return subprocess.Popen(  # noqa: S603 - our own command
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
            return True
    except OSError:
        return False


def wait_for_server(port: int) -> None:
    until_s = time.monotonic() + FIRST_TIMEOUT_S
    while not answers(port):
        if time.monotonic() > until_s:
            sys.exit("the MLflow server does not come up; see server.log")
        time.sleep(0.1)


def kill(server: subprocess.Popen[bytes]) -> None:
    if server.poll() is None:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def main(seconds: float, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    print(f"starting an MLflow server on port {port} ...", flush=True)
    server = start_server(port, folder)
    wait_for_server(port)
    url = f"http://127.0.0.1:{port}"
    spec = {"console": False, "mlflow": {"tracking_uri": url}, "tensorboard": {}}
    meter, slowest_s, step = ThroughputMeter(), 0.0, 0
    try:
        with open_logger(spec, run=RunInfo("outage", id="outage"), dir=folder / "runs") as logger:
            begin_s = time.monotonic()
            down = back = False
            while (now_s := time.monotonic() - begin_s) < seconds:
                step += 1
                time.sleep(STEP_S)  # here a model would train
                meter.add(TokenCounts(raw=4096, active=3000, padded=500))
                record = meter.record(step)
                called_s = time.perf_counter()
                logger.log(record)
                slowest_s = max(slowest_s, time.perf_counter() - called_s)
                if not down and now_s > seconds / 4:
                    down = True
                    kill(server)
                    print(f"step {step}: the server is killed; training goes on", flush=True)
                if not back and now_s > seconds / 2:
                    back = True
                    server = start_server(port, folder)
                    print(f"step {step}: the server is started again", flush=True)
            print(f"step {step}: training is over", flush=True)
            wait_for_server(port)
        print(f"the longest call of log() took {slowest_s * 1e3:.1f} ms")
        print(logger.stats())
        client = MlflowClient(url)
        (run,) = client.search_runs(["1"], "tags.`tokrate.run_id` = 'outage'")
        history = client.get_metric_history(run.info.run_id, "throughput/raw_tps")
        print(f"MLflow has {len(history)} of {step} points and says {run.info.status}")
    finally:
        kill(server)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=40.0, help="of training")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        main(arguments.seconds, Path(name))

"""A real MLflow server on loopback, and a gate before it that can be slow, silent or in trouble."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

Mode = Literal["open", "slow", "silent", "error", "locked"]
HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "date", "server"}


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class MlflowServer:
    """`mlflow server` with the smallest set of workers, on a SQLite store in the folder."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.store_uri = f"sqlite:///{folder}/mlflow.db"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        command = [sys.executable, "-m", "mlflow", "server", "--workers", "1"]
        command += ["--port", str(self.port), "--backend-store-uri", self.store_uri]
        command += ["--artifacts-destination", str(self._folder / "artifacts")]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self._folder / "server.log").open("a") as log:
            self._process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + 90
        while not self._answers():
            assert self._process.poll() is None, "the MLflow server has ended"
            assert time.monotonic() < until, "the MLflow server does not come up"
            time.sleep(0.1)

    def kill(self) -> None:
        """SIGKILL for the server and the worker that it started, as a machine that fails."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(20)
            self._process = None

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


class Gate:
    """Passes requests on to a server on loopback, as long as its mode is `open`.

    slow    the answer comes `slow_s` later, or when the mode is another
    silent  the request is accepted and never answered
    error   the answer is 500
    locked  the answer is 403, as of an account that has expired
    """

    def __init__(self, target_port: int, *, port: int = 0) -> None:
        self.target_port = target_port
        self.mode: Mode = "open"
        self.slow_s = 2.0
        self.requests = 0
        """Requests that came, whatever became of them."""
        self.end = threading.Event()
        self._server = _GateServer(("127.0.0.1", port), _Visitor)
        self._server.gate = self
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    def wait_while_slow(self) -> None:
        """Be as slow as a slow server is."""
        until = time.monotonic() + self.slow_s
        while self.mode == "slow" and time.monotonic() < until and not self.end.wait(0.02):
            pass

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.end.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _GateServer(ThreadingHTTPServer):
    gate: Gate

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: whoever asked has given up waiting."""


class _Visitor(BaseHTTPRequestHandler):
    server: _GateServer

    def do_GET(self) -> None:
        gate = self.server.gate
        gate.requests += 1
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        match gate.mode:
            case "silent":
                gate.end.wait(30)
                self.close_connection = True
            case "error":
                self._answer(500, [], b"<html>in trouble</html>")
            case "locked":
                self._answer(403, [], b'{"error_code": "PERMISSION_DENIED", "message": "no"}')
            case "slow":
                gate.wait_while_slow()
                self._pass_on(gate.target_port, body)
            case "open":
                self._pass_on(gate.target_port, body)

    do_POST = do_PUT = do_PATCH = do_GET  # noqa: N815 - the names that http.server calls

    def _pass_on(self, port: int, body: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            self._answer(answer.status, answer.getheaders(), answer.read())
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass

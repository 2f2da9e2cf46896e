"""Trackers of the tests' own, and nobody's account."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.conftest import empty_store, nobodys_account, store_uri
from faults.servers import Gate, MlflowServer

__all__ = ["empty_store", "nobodys_account", "store_uri"]


@pytest.fixture(scope="session")
def mlflow_server(
    empty_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MlflowServer]:
    """One real MLflow server for all tests; they may kill it and start it again."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_store, folder / "mlflow.db")
    server = MlflowServer(folder)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(mlflow_server: MlflowServer) -> MlflowServer:
    """The server, running."""
    mlflow_server.start()
    return mlflow_server


@pytest.fixture
def gate(server: MlflowServer) -> Iterator[Gate]:
    """A door before the real server that a test can jam."""
    with Gate(server.port) as gate:
        yield gate


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)

"""No tracker of the person who runs the tests is touched."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nobodys_account(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take away keys, addresses and modes that are set outside."""
    for name in list(os.environ):
        if name.startswith(("WANDB_", "MLFLOW_")) and name != "WANDB_SERVICE":
            monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store of MLflow without runs, made once: its migrations take about a second."""
    from tokrate.backends._mlflow_store import open_store

    file = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    open_store(f"sqlite:///{file}", 10.0)
    return file


@pytest.fixture
def store_uri(empty_store: Path, tmp_path: Path) -> str:
    """The address of a store of the test's own."""
    file = tmp_path / "mlflow.db"
    shutil.copy(empty_store, file)
    return f"sqlite:///{file}"

"""Opens an MLflow tracking store that answers or fails within our own time-out.

MLflow retries a request for minutes (a killed server blocked one call for 248 s) and reads its
limits from the environment, which belongs to the user. So requests to a server go through a
store of our own class that passes the limits with each call, and the process stays as it is.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SQLITE = "sqlite:///"

LOCK_TIMEOUT_S = 60.0
"""How long another process may take to create the same SQLite store (it takes about 1 s)."""


def open_store(tracking_uri: str, timeout_s: float) -> Any:
    """The tracking store (an `mlflow.store.tracking.AbstractStore`) behind the address.

    Args:
        tracking_uri: A server (`http`, `https`), a database, or whatever MLflow has a plug-in for.
        timeout_s: Limit for connecting to a server, and again for each of its answers, in seconds.
    """
    if urlsplit(tracking_uri).scheme in ("http", "https"):
        return _server_store(tracking_uri, timeout_s)
    database = sqlite_path(tracking_uri)
    if database is not None:
        return _sqlite_store(tracking_uri, database)
    from mlflow.tracking._tracking_service.utils import _get_store

    return _get_store(tracking_uri)


def sqlite_path(tracking_uri: str) -> Path | None:
    """The database file of a `sqlite:///…` address; None for every other address."""
    if not tracking_uri.startswith(SQLITE):
        return None
    return Path(unquote(tracking_uri[len(SQLITE) :].partition("?")[0]))


@contextmanager
def without_mlflow_logs() -> Iterator[None]:
    """Keep what MLflow logs in this thread to itself: a failure is told once, by delivery.

    MLflow prints a whole traceback for every database error, and two lines for a new store.
    """
    own = threading.get_ident()

    def is_not_ours(record: logging.LogRecord) -> bool:
        return record.thread != own

    logger = logging.getLogger("mlflow.store.db.utils")
    logger.addFilter(is_not_ours)
    try:
        yield
    finally:
        logger.removeFilter(is_not_ours)


def _sqlite_store(tracking_uri: str, database: Path) -> Any:
    """A SQLite store; artifacts lie beside the database, not in the working directory.

    Several processes that create the same fresh store crash in its migrations, so one at a time.
    """
    from filelock import FileLock
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    database.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(database.with_name(f".{database.name}.lock"), timeout=LOCK_TIMEOUT_S)
    with lock:
        return SqlAlchemyStore(tracking_uri, str(database.parent.absolute() / "mlartifacts"))


def _server_store(tracking_uri: str, timeout_s: float) -> Any:
    from mlflow.store.tracking.rest_store import RestStore
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.proto_json_utils import parse_dict
    from mlflow.utils.rest_utils import http_request, verify_rest_response

    class ImpatientStore(RestStore):
        """MLflow's own store, with one attempt and one time limit for each request."""

        def _call_endpoint(
            self,
            api: Any,
            json_body: str | None = None,
            endpoint: str | None = None,
            retry_timeout_seconds: float | None = None,
            response_proto: Any = None,
        ) -> Any:
            path, method = self._METHOD_TO_INFO[api]
            path = endpoint or path
            body = None if json_body is None else json.loads(json_body)
            response = http_request(
                self.get_host_creds(),
                path,
                method,
                max_retries=0,
                timeout=timeout_s,
                raise_on_status=False,
                **{"params" if method == "GET" else "json": body},
            )
            answer = response_proto or api.Response()
            parse_dict(
                js_dict=json.loads(verify_rest_response(response, path).text), message=answer
            )
            return answer

    make_store: Any = ImpatientStore  # mlflow's own signature has no types
    return make_store(partial(get_default_host_creds, tracking_uri))


def put_artifact(store: Any, artifact_uri: str, name: str, text: str, timeout_s: float) -> None:
    """Keep a small text file among a run's artifacts.

    Args:
        store: What `open_store` returned.
        artifact_uri: Where the run keeps its artifacts, as the run itself says.
        name: File name.
        text: What is in it.
        timeout_s: Limit for each request, in seconds.
    """
    address = urlsplit(artifact_uri)
    if address.scheme == "mlflow-artifacts" and hasattr(store, "get_host_creds"):
        from mlflow.utils.rest_utils import http_request, verify_rest_response

        path = f"/api/2.0/mlflow-artifacts/artifacts/{address.path.strip('/')}/{name}"
        answer = http_request(
            store.get_host_creds(),
            path,
            "PUT",
            max_retries=0,
            timeout=timeout_s,
            raise_on_status=False,
            data=text.encode(),
        )
        verify_rest_response(answer, path)
        return
    _put_by_mlflow(artifact_uri, name, text)


def _put_by_mlflow(artifact_uri: str, name: str, text: str) -> None:
    from tempfile import TemporaryDirectory

    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    with TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        get_artifact_repository(artifact_uri).log_artifact(str(file))

"""Opening a run: everything that can be wrong is found here, before training starts."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokrate.backends.base import BackendFactory
from tokrate.backends.registry import check_options, find_backend
from tokrate.config import BackendChoice, LoggerChoice, parse_logger
from tokrate.cursor import Cursor
from tokrate.delivery import Delivery
from tokrate.errors import BackendError, RunFolderError
from tokrate.folder import check_run, open_folder, release, remove
from tokrate.journal import JOURNAL_NAME, Journal, Resume, started_unix_ms
from tokrate.logger import Logger
from tokrate.names import MetricNames, parse_aliases
from tokrate.plain import plain
from tokrate.ranks import RankLayout
from tokrate.record import SCHEMA_VERSION
from tokrate.redact import redact, redact_text
from tokrate.run import RunInfo


def open_logger(
    spec: Any,
    *,
    run: RunInfo,
    dir: str | os.PathLike[str] = "runs",  # noqa: A002 - the word that people use
    ranks: RankLayout | None = None,
    prefix: str = "throughput",
    metrics: str = "standard",
    aliases: str | Iterable[str] | Mapping[str, str] | None = None,
    strict: bool | None = None,
    close_timeout_s: float = 30.0,
    redact_keys: Iterable[str] = (),
    fsync: bool = False,
) -> Logger:
    """Open the run's journal and the backends that the `logger` key asks for.

    Everything that is wrong with the configuration is said here, before training starts. Trackers
    are reached in the background; use `{"mlflow": {"required": True}}` to wait for one.

    Args:
        spec: The `logger` key; see `tokrate.config.parse_logger`.
        run: Facts of the run.
        dir: Folder in which the run's folder is made.
        ranks: Which rank writes. On the others the logger does nothing.
        prefix: What stands before the slash in our metric keys.
        metrics: `"standard"`, or `"all"` numbers of the record.
        aliases: Framework names under which some numbers are written as well (`"torchtune"`), or
            a mapping of your own names to fields of the record.
        strict: True makes bad names, values and steps raise in `log_metrics`; for tests.
        close_timeout_s: Longest time that `close` may take, in seconds.
        redact_keys: Words that name a secret in a configuration key, beside those of
            `tokrate.redact`.
        fsync: True makes each entry survive a power cut, too, at the price of a disk write for
            each `log`. `kill -9` loses nothing either way.

    Raises:
        ConfigError: The key, an option, a name or a package is wrong.
        RunFolderError: The run's folder cannot be made or written.
        JournalError: Another process writes this run.
        BackendError: A backend with `required: true` cannot be reached.
    """
    names = MetricNames(prefix, metrics, parse_aliases(aliases))
    choice = parse_logger(spec)
    config = redact(plain(run.config or {}), redact_keys)
    run = replace(check_run(run), config=config, tags=tuple(redact(plain(list(run.tags)))))
    factories = find_factories(choice)
    if not (ranks or RankLayout()).is_writer:
        return Logger(run=run, names=names, journal=None)
    folder, made = open_folder(Path(dir).resolve(), run)
    started = started_unix_ms(folder / JOURNAL_NAME)
    run = replace(run, folder=folder, prefix=prefix, started_unix_ms=started)
    journal: Journal | None = None
    deliveries: list[Delivery] = []
    try:
        journal = Journal(folder, fsync=fsync)
        session = journal.sessions + 1
        if run.resume_step is not None:
            journal.resumes.append(Resume(journal.place.offset, run.resume_step))
        deliveries += [make_delivery(*each, run, journal, session) for each in factories]
        for (backend, _), delivery in zip(factories, deliveries, strict=True):
            if backend.required:
                _connect(delivery)
        line = _run_line(run, redact(choice_as_json(choice), redact_keys), names, session)
        _begin(journal, line)
    except BaseException:  # nothing stays by halves
        for delivery in deliveries:
            delivery.abandon()
        if journal is not None:
            journal.close()
        if made:
            remove(folder)
        else:
            release(folder)
        raise
    return Logger(
        run=run,
        names=names,
        journal=journal,
        deliveries=deliveries,
        strict=bool(strict),
        close_timeout_s=close_timeout_s,
    )


def find_factories(choice: LoggerChoice) -> list[tuple[BackendChoice, BackendFactory]]:
    """The backends that the key asks for, their options checked by name.

    Raises:
        ConfigError: No such backend, its package is missing, or it takes no such option.
    """
    backends = list(choice.backends)
    if choice.console and all(backend.name != "console" for backend in backends):
        backends.insert(0, BackendChoice("console"))
    found = []
    for backend in backends:
        factory = find_backend(backend.name)
        check_options(backend.name, factory, backend.options)
        found.append((backend, factory))
    return found


def make_delivery(
    backend: BackendChoice,
    factory: BackendFactory,
    run: RunInfo,
    journal: Journal,
    session: int,
) -> Delivery:
    """Open one backend and put its delivery at the place that earlier sessions reached.

    Raises:
        ConfigError: A value of an option is wrong.
    """
    name = f"{cursor_name(backend.name)}.json"
    cursor = Cursor(journal.path.parent / "cursors" / name)
    if cursor.ended_session < journal.sessions:
        cursor.go_back()
    # The resumes that the tracker knows nothing of: those that lie before it.
    ahead = [r.step for r in journal.resumes if cursor.reached.place.offset <= r.offset]
    opened = factory(replace(run, resume_step=min(ahead, default=None)), **backend.options)
    return Delivery(backend.name, opened, journal, cursor, session)


def _begin(journal: Journal, line: Mapping[str, Any]) -> None:
    try:
        journal.append(line)
    except OSError as error:
        raise RunFolderError(
            f"{journal.path} cannot be written ({error.strerror or error}): expected room on the "
            "disk; free some, or pass another dir="
        ) from error


def _connect(delivery: Delivery) -> None:
    try:
        delivery.connect()
    except BackendError as error:
        # Not chained: what it came from may show the secret that is taken out here.
        raise BackendError(
            f"{delivery.name} is required and cannot be reached: {redact_text(str(error))}; "
            "mend it, or leave out `required` to let entries wait in the journal",
            retryable=error.retryable,
        ) from None


def cursor_name(backend: str) -> str:
    """A file name for a backend's name, which may be a dotted path."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in backend)


def choice_as_json(choice: LoggerChoice) -> dict[str, Any]:
    """The `logger` key as the journal keeps it."""
    backends = [
        {"name": b.name, "options": plain(b.options), "required": b.required}
        for b in choice.backends
    ]
    return {"logger": backends, "console": choice.console}


def _run_line(
    run: RunInfo, choice: Mapping[str, Any], names: MetricNames, session: int
) -> dict[str, Any]:
    """What the journal says of a session: enough to deliver it from another machine."""
    import platform  # these not at import: `import tokrate` stays light
    import socket
    from importlib.metadata import version

    return {
        "kind": "run",
        "time_unix_ms": time.time_ns() // 1_000_000,
        "schema_version": SCHEMA_VERSION,
        "id": run.id,
        "name": run.name,
        "session": session,
        "resume_step": run.resume_step,
        "tags": list(run.tags),
        "config": run.config,
        "prefix": names.prefix,
        "metrics": names.metrics,
        "aliases": dict(names.aliases),
        **choice,
        "tokrate": version("tokrate"),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }

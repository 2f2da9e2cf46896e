"""`tokrate sync`: deliver what a run left waiting, any time, on any machine that has its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokrate.config import BackendChoice, LoggerChoice, parse_logger
from tokrate.delivery import Delivery, DeliveryStats
from tokrate.errors import ConfigError, JournalError
from tokrate.journal import JOURNAL_NAME, Journal, read_lines, started_unix_ms
from tokrate.opening import find_factories, make_delivery
from tokrate.redact import HIDDEN
from tokrate.run import Outcome, RunInfo

Progress = Callable[[str, DeliveryStats], None]
"""Called with a backend and where it stands, after each batch."""


def sync_run(
    folder: Path, spec: Any = None, *, progress: Progress | None = None
) -> dict[str, DeliveryStats]:
    """Deliver what is waiting in a run's journal and tell the trackers how the run ended.

    Running it twice does no harm: every backend goes on from its own place.

    Args:
        folder: The run's folder.
        spec: A `logger` key to use instead of the one that the run was started with.
        progress: Told after each batch.

    Raises:
        JournalError: There is no journal, or the run is still being written.
        ConfigError: The `logger` key is wrong here, say because a package is missing.
    """
    folder = folder.resolve()
    session = _last_session(folder / JOURNAL_NAME)
    choice = _choice_of(session) if spec is None else parse_logger(spec)
    _check_nothing_is_hidden(choice)
    factories = find_factories(LoggerChoice(choice.backends, console=False))
    journal = Journal(folder)
    try:
        found = {}
        for backend, factory in factories:
            run = _run_of(session, folder)
            delivery = make_delivery(backend, factory, run, journal, session["session"])
            if delivery.has_work(journal.place.entries):
                _drain(delivery, journal, _outcome_of(session), progress)
            found[backend.name] = delivery.stats(journal.place.entries)
        if "end" not in session:  # it was killed, and had no time to say so
            journal.append_end(_outcome_of(session))
        return found
    finally:
        journal.close()


def _check_nothing_is_hidden(choice: LoggerChoice) -> None:
    """Secrets are not in the journal, so an option that held one must be given again."""
    for backend in choice.backends:
        hidden = [name for name, value in backend.options.items() if HIDDEN in str(value)]
        if hidden:
            raise ConfigError(
                f"{backend.name}: {', '.join(hidden)} held a secret, which the journal does not "
                "keep: pass the options again, such as --logger "
                f'\'{{"{backend.name}": {{"{hidden[0]}": "..."}}}}\''
            )


def _drain(
    delivery: Delivery, journal: Journal, outcome: Outcome, progress: Progress | None
) -> None:
    accepted = journal.place.entries
    while delivery.deliver_some():
        if progress is not None:
            progress(delivery.name, delivery.stats(accepted))
    delivery.finish(outcome)


def _last_session(journal: Path) -> dict[str, Any]:
    """The last `run` line, with the `end` line that follows it, if one does, under `"end"`."""
    session: dict[str, Any] | None = None
    for line in read_lines(journal):
        if line.get("kind") == "run":
            session = line
        elif line.get("kind") == "end" and session is not None:
            session["end"] = line
    if session is None:
        raise JournalError(f"{journal} has no line of kind 'run': expected the journal of a run")
    return session


def _choice_of(session: Mapping[str, Any]) -> LoggerChoice:
    return LoggerChoice(tuple(BackendChoice(**backend) for backend in session["logger"]))


def _run_of(session: Mapping[str, Any], folder: Path) -> RunInfo:
    return RunInfo(
        session["name"],
        session["id"],
        session["config"],
        tuple(session["tags"]),
        folder=folder,
        prefix=session["prefix"],
        started_unix_ms=started_unix_ms(folder / JOURNAL_NAME),
    )


def _outcome_of(session: Mapping[str, Any]) -> Outcome:
    """How the run ended; one that left no word was killed."""
    end = session.get("end")
    return Outcome("killed", 137) if end is None else Outcome(end["outcome"], end["exit_code"])

"""A backend of a third party: one JSON line per entry, in a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokrate.errors import BackendError, ConfigError
from tokrate.run import Entry, Outcome, RunInfo


class JsonLinesBackend:
    """Appends to `<run folder>/<name>.jsonl`.

    Args:
        run: The run that is written.
        name: File name without its ending.
    """

    def __init__(self, run: RunInfo, *, name: str = "points") -> None:
        if run.folder is None or "/" in name:
            raise ConfigError(f"jsonlines: expected a plain file name, not {name!r}")
        self._file = run.folder / f"{name}.jsonl"

    def write(self, entries: Sequence[Entry]) -> None:
        """Append the entries."""
        lines = [json.dumps({"step": e.step, "metrics": dict(e.metrics)}) + "\n" for e in entries]
        self._append(lines)

    def close(self, outcome: Outcome) -> None:
        """Note how the run ended, where there is a file to note it in."""
        if self._file.exists():
            self._append([json.dumps({"outcome": outcome.status}) + "\n"])

    def _append(self, lines: Sequence[str]) -> None:
        try:
            with self._file.open("a") as file:
                file.writelines(lines)
        except OSError as error:
            raise BackendError(f"jsonlines: {error}", retryable=True) from error


def read(file: Path) -> list[tuple[int, dict[str, float]]]:
    """The points in a file."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [(line["step"], line["metrics"]) for line in lines if "step" in line]

"""Little trackers for tests of delivery: files that a test reads, and can take away."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokrate import Outcome, RunInfo
from tokrate.errors import BackendError
from tokrate.run import Entry


class FileTracker:
    """Writes one line for each entry into `path`; fails as long as `<path>.down` exists."""

    def __init__(self, run: RunInfo, *, path: str, refuse_step: int | None = None) -> None:
        self._path = Path(path)
        self._refuse_step = refuse_step
        self._closed = False

    def write(self, entries: Sequence[Entry]) -> None:
        if self._path.with_suffix(".down").exists():
            raise BackendError("the file tracker is down", retryable=True)
        if any(entry.step == self._refuse_step for entry in entries):
            raise BackendError("an unlucky step", retryable=False)
        self._append([{"step": e.step, "metrics": dict(e.metrics)} for e in entries])
        self._append([{"batch": len(entries)}])

    def close(self, outcome: Outcome) -> None:
        if not self._closed:
            self._append([{"outcome": outcome.status, "exit_code": outcome.exit_code}])
        self._closed = True

    def _append(self, lines: list[dict[str, object]]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class BrokenTracker:
    """Raises what no backend should raise."""

    def __init__(self, run: RunInfo) -> None:
        pass

    def write(self, entries: Sequence[Entry]) -> None:
        raise ZeroDivisionError("a bug")

    def close(self, outcome: Outcome) -> None:
        raise ZeroDivisionError("another bug")


class ClosedAccount:
    """Will never take anything."""

    def __init__(self, run: RunInfo) -> None:
        pass

    def write(self, entries: Sequence[Entry]) -> None:
        raise BackendError("the account is closed", retryable=False)

    def close(self, outcome: Outcome) -> None:
        pass


def read_tracker(path: Path) -> tuple[list[int], list[dict[str, object]]]:
    """Steps in the order in which they arrived, and the lines that are no entries."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line], [
        line for line in lines if "step" not in line
    ]


class Chatty:
    """Writes its configuration, and tells its address when it fails."""

    def __init__(self, run: RunInfo, *, out: str, uri: str) -> None:
        Path(out).write_text(json.dumps(run.config))
        self._uri = uri

    def write(self, entries: Sequence[Entry]) -> None:
        raise BackendError(f"cannot reach {self._uri}", retryable=True)

    def close(self, outcome: Outcome) -> None:
        pass

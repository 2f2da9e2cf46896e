"""Writes to Weights & Biases, through a run object of our own and with our own step metric.

W&B's native step drops what is not in order, so each row carries `<prefix>/step`, and the charts
are told to use it. A run that is active already is joined: its settings and its end stay with
whoever started it.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, get_args

from tokrate.backends._wandb_run import (
    active_run,
    forget_service,
    is_service_lost,
    let_go,
    start_run,
)
from tokrate.backends.base import Entry, Outcome
from tokrate.errors import BackendError, ConfigError
from tokrate.run import RunInfo
from tokrate.steady import STEADY

Mode = Literal["online", "offline"]

LONGEST_PROJECT = 128


class WandbBackend:
    """One W&B run, online or offline.

    Args:
        run: The run that is written.
        project: Project of a run that we create. None takes WANDB_PROJECT, else `tokrate`.
        entity: User or team that owns the project. None takes W&B's own default.
        mode: `online` or `offline`. None takes W&B's own setting; where nobody is logged in, the
            run is kept offline, which `wandb sync` uploads later.
        group: Group of runs to show together.
        job_type: Kind of the run within its group.
        notes: Longer description.
        init_timeout_s: Limit for reaching the server at the start, in seconds.
    """

    settle_s: ClassVar[float] = 5.0
    """W&B's service writes its file once a second; what it was given within this time is written
    again when it has died."""

    def __init__(
        self,
        run: RunInfo,
        *,
        project: str | None = None,
        entity: str | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        job_type: str | None = None,
        notes: str | None = None,
        init_timeout_s: float = 15.0,
    ) -> None:
        texts = {
            "project": project,
            "entity": entity,
            "group": group,
            "job_type": job_type,
            "notes": notes,
        }
        _check(run, mode, init_timeout_s, texts)
        self._run_info = run
        self._mode = mode
        self._init_timeout_s = float(init_timeout_s)
        self._texts = {**texts, "project": project or os.environ.get("WANDB_PROJECT") or "tokrate"}
        self._step_key = f"{run.prefix}/step"
        self._borrowed = active_run()
        self._run: Any = None
        self._recent: deque[tuple[float, Entry]] = deque()
        self._open_step: int | None = None
        self.left_out: Counter[str] = Counter()

    def write(self, entries: Sequence[Entry]) -> None:
        """Hand the entries to W&B's local service, one row each."""
        with self._translated("writing a row"):
            run = self._connected()
            left_out = Counter[str]()
            for entry in entries:
                left_out += self._log(run, entry)
        self.left_out += left_out
        self._keep(entries)

    def close(self, outcome: Outcome) -> None:
        """Finish the run with the exit code, unless somebody else started it."""
        run, self._run = self._run, None
        if run is not None and run is not self._borrowed:
            let_go(run)
            with self._translated("finishing the run"):
                run.finish(exit_code=outcome.exit_code)

    def _connected(self) -> Any:
        if self._run is None:
            run = self._run = self._borrowed or start_run(
                self._run_info, self._texts, self._mode, self._init_timeout_s
            )
            self._define_metrics(run)
            for _, entry in self._recent:
                self._log(run, entry)
        return self._run

    def _define_metrics(self, run: Any) -> None:
        """Say how W&B shows our metrics; of somebody else's run, only our own.

        No rule for the summary is given: the last value is what it then shows, under the plain
        name; a rule would make it `name.last`. Metrics that are defined by their own names keep
        that where the user has a rule for `*`.
        """
        prefix, step_key = self._run_info.prefix, self._step_key
        run.define_metric(step_key, hidden=True)
        run.define_metric(f"{prefix}/total_active_tokens", step_metric=step_key)  # another x-axis
        for name in STEADY:  # columns of the table of runs, no charts of one point
            run.define_metric(f"{prefix}/{name}", step_metric=step_key, hidden=True)
        run.define_metric(f"{prefix}/*", step_metric=step_key)
        if run is not self._borrowed:
            run.define_metric("*", step_metric=step_key)

    def _log(self, run: Any, entry: Entry) -> Counter[str]:
        """Write what W&B can show of the entry; return how many values it cannot, by reason."""
        row, left_out = _row(entry)
        row[self._step_key] = entry.step
        if run is self._borrowed:
            self._log_borrowed(run, row)
        else:
            run.log({**row, "_timestamp": entry.time_unix_ms / 1000})
        return left_out

    def _keep(self, entries: Sequence[Entry]) -> None:
        """Hold on to what a dying service may not have written yet."""
        now_s = time.monotonic()
        self._recent.extend((now_s, entry) for entry in entries)
        while self._recent and now_s - self._recent[0][0] > self.settle_s:
            self._recent.popleft()

    def _log_borrowed(self, run: Any, row: dict[str, Any]) -> None:
        """Add to the row that the trainer has open: closing it would lose what it logs later.

        Only where our own last values are still in that row must it be closed first.
        """
        if getattr(run, "_is_finished", False):  # asked for its step, it would hang for 30 s
            raise BackendError("wandb: the run that was joined has been finished", retryable=False)
        if self._open_step is not None and run.step == self._open_step:
            run.log({}, commit=True)
        run.log(row, commit=False)
        self._open_step = run.step

    @contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """The one place where what W&B raises becomes a `BackendError`."""
        try:
            yield
        except BackendError:
            raise
        except ImportError as error:
            raise BackendError(
                f"wandb is installed but fails to import: {error}", retryable=False
            ) from error
        except Exception as error:
            let_go(self._run)
            self._run = None
            if is_service_lost(error):
                forget_service()
            reason = str(error).strip() or type(error).__name__
            retryable = self._borrowed is None and not _is_permanent(error)
            raise BackendError(f"wandb: {what} failed: {reason}", retryable=retryable) from error


def _check(
    run: RunInfo, mode: object, init_timeout_s: object, texts: dict[str, str | None]
) -> None:
    for option, value in texts.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"wandb: {option} is a text, not {value!r}")
    _check_project(texts["project"] or "")
    if mode not in (None, *get_args(Mode)):
        raise ConfigError(f"wandb: mode is one of {', '.join(get_args(Mode))}, not {mode!r}")
    number = isinstance(init_timeout_s, (int, float)) and not isinstance(init_timeout_s, bool)
    if not number or init_timeout_s <= 0:  # type: ignore[operator]
        raise ConfigError(f"wandb: init_timeout_s is a number above 0, not {init_timeout_s!r}")
    if run.id is not None and (re.search(r"[:;,#?/'\\%]", run.id) or run.id != run.id.strip()):
        raise ConfigError(
            f"wandb: the run id {run.id!r} has characters that W&B refuses (: ; , # ? / ' \\ % "
            f"and spaces at the ends); give another RunInfo.id"
        )


def _check_project(project: str) -> None:
    legal = re.sub(r"[/\\#?%:]+", "-", project)
    if legal != project:
        raise ConfigError(
            f"wandb: the project name {project!r} has one of / \\ # ? % : which W&B refuses; "
            f"try {legal!r}"
        )
    if len(project) > LONGEST_PROJECT:
        raise ConfigError(
            f"wandb: the project name has {len(project)} characters, W&B takes {LONGEST_PROJECT}"
        )


def _row(entry: Entry) -> tuple[dict[str, Any], Counter[str]]:
    """What W&B can show of an entry, and how many values it cannot, by reason."""
    row: dict[str, Any] = {}
    left_out = Counter[str]()
    for key, number in entry.metrics.items():
        if key.startswith("_"):
            left_out["name begins with _"] += 1
        elif _becomes_inf(number):
            left_out["too large for float64"] += 1
        else:
            row[key] = number
    return row, left_out


def _becomes_inf(number: int | float) -> bool:
    """Whether W&B would show infinity for a number that is finite."""
    try:
        float(number)
    except OverflowError:
        return True
    return False


def _is_permanent(error: Exception) -> bool:
    if type(error).__name__ in ("UsageError", "AuthenticationError"):
        return True
    return bool(re.search(r"\b(401|403|404)\b", str(error)))

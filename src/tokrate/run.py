"""What crosses the seam between the loop, the journal and the backends: run, entry, outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from tokrate.record import ThroughputRecord

Status = Literal["finished", "failed", "killed"]


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts of one training job, given once and not per point."""

    name: str
    """What people call the run; also the name of its folder."""
    id: str | None = None
    """Identity across restarts: the same id continues the same curves. None makes a new one."""
    config: Mapping[str, Any] | None = None
    """Configuration of the run, shown by the trackers."""
    tags: tuple[str, ...] = ()
    """Short words to find the run by."""
    resume_step: int | None = None
    """Last optimizer step of the checkpoint that the run goes on from; None for a fresh start."""
    folder: Path | None = field(default=None, kw_only=True)
    """Folder of the run's journal and local files. Set by `open_logger`."""
    prefix: str = field(default="throughput", kw_only=True)
    """What stands before the slash in our metric keys. Set by `open_logger`."""
    started_unix_ms: int | None = field(default=None, kw_only=True)
    """When the first session began, in milliseconds since 1970-01-01 UTC. Set by `open_logger`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One point as the journal keeps it and the backends write it."""

    time_unix_ms: int
    """Stamped once, when `log` was called, in milliseconds since 1970-01-01 UTC."""
    step: int
    """Optimizer step, 0 to 2**63 - 1."""
    metrics: Mapping[str, int | float]
    """Metric key to value: legal names, plain numbers (NaN and inf are data)."""
    record: ThroughputRecord | None = None
    """The record that the metrics came from, when `Logger.log` was called."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, told truthfully to every tracker."""

    status: Status
    """`finished`, `failed` (an exception) or `killed` (SIGTERM, Ctrl-C)."""
    exit_code: int
    """Exit code of the process as far as it is known: 0, 1, or 128 + signal number."""

    FINISHED: ClassVar[Outcome]
    FAILED: ClassVar[Outcome]
    KILLED: ClassVar[Outcome]


Outcome.FINISHED = Outcome("finished", 0)
Outcome.FAILED = Outcome("failed", 1)
Outcome.KILLED = Outcome("killed", 143)

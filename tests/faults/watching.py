"""What the tests of faults look at: accounts that add up, times of log calls, what was said."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from backends.readers import read_mlflow, read_tensorboard, read_wandb
from tokrate.delivery import DeliveryStats
from tokrate.logger import Logger, LoggerStats

LEEWAY_S = 20.0
"""What a deadline may be missed by on a machine that does much else.

By default `close` waits for 30 s, and a tracker that never answers would be waited for for ever.
"""


def journal_lines(folder: Path) -> list[dict[str, Any]]:
    """All lines of a run's journal, read without our own reader."""
    return [json.loads(x) for x in (folder / "journal.jsonl").read_text().splitlines()]


def journal_steps(folder: Path) -> list[int]:
    """The steps of the entries in a run's journal."""
    return [line["step"] for line in journal_lines(folder) if line["kind"] == "entry"]


def adds_up(
    report: LoggerStats | Mapping[str, DeliveryStats],
    folder: Path,
    *,
    shown: Mapping[str, int] | None = None,
) -> None:
    """Every entry of the journal is in each backend's account once, and what was delivered shows.

    Args:
        report: What `Logger.close`, `Logger.stats` or `sync_run` returned.
        folder: The run's folder.
        shown: Backend to the number of entries that its tracker shows.
    """
    backends = report.backends if isinstance(report, LoggerStats) else report
    entries = len(journal_steps(folder))
    if isinstance(report, LoggerStats):
        assert report.entries == entries
    for name, stats in backends.items():
        parts = (stats.delivered, stats.waiting, stats.refused, stats.superseded)
        assert stats.accepted == sum(parts) == entries, f"{name}: {stats!r}"
        assert min(parts) >= 0, f"{name}: {stats!r}"
    for name, number in (shown or {}).items():
        assert backends[name].delivered == number, f"{name}: {backends[name]!r}, shown {number}"


def log_steps(logger: Logger, steps: Iterable[int], pace_s: float = 0.0) -> list[float]:
    """Log one entry at each step; how long each call took, in seconds."""
    took_s = []
    for step in steps:
        begin_s = time.perf_counter()
        logger.log_metrics({"loss": float(step)}, step=step)
        took_s.append(time.perf_counter() - begin_s)
        if pace_s:
            time.sleep(pace_s)
    return took_s


def show(text: str) -> None:
    """Print what was measured; `pytest -s` shows it."""
    sys.stdout.write(f"{text}\n")


def show_times(fault: str, without: list[float], during: list[float]) -> None:
    """Print median and p99 of `log` with and without the fault; neither may feel the outage."""
    for what, took_s in (("without", without), (f"with {fault}", during)):
        p99 = statistics.quantiles(took_s, n=100)[98]
        show(
            f"log {what}: median {statistics.median(took_s) * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs, "
            f"longest {max(took_s) * 1e3:.1f} ms, n = {len(took_s)}"
        )
        assert statistics.median(took_s) < 0.005
        assert p99 < 0.5  # whoever waits for a tracker waits for a second and more


def wait_until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for another thread or process, with a bound."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"waited {seconds:.0f} s"
        time.sleep(0.02)


def wait_delivered(logger: Logger, *backends: str) -> None:
    """Wait until the backends (all, if none is named) have taken everything."""
    wait_until(
        lambda: not any(
            stats.waiting for name, stats in logger.stats().backends.items()
            if name in backends or not backends
        )
    )  # fmt: skip


def said(caplog: pytest.LogCaptureFixture, backend: str) -> list[str]:
    """What was said of a backend, above INFO, as the user reads it."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "tokrate"
        and record.levelname == "WARNING"
        and record.getMessage().startswith(f"{backend}:")
    ]


def one_outage(caplog: pytest.LogCaptureFixture, backend: str) -> None:
    """The outage was said once, with what waits, and so was its end."""
    messages = said(caplog, backend)
    assert len(messages) == 2, messages
    assert "nothing is lost" in messages[0]
    assert "wait" in messages[0]
    assert "works again" in messages[1]


def steps_shown(backend: str, folder: Path, uri: str = "", run_id: str = "") -> Counter[int]:
    """How often a tracker shows each step of `loss`, by the tracker's own means."""
    if backend == "tensorboard":
        rows = read_tensorboard(folder)
    elif backend == "mlflow":
        rows = read_mlflow(uri, run_id)
    else:
        rows = read_wandb(folder)
    return Counter(step for step, values in rows if "loss" in values)


def each_once(steps: Iterable[int]) -> Counter[int]:
    """What a tracker shows that has every point once."""
    return Counter(steps)


def kill_wandb_service(pid: int | None = None) -> None:
    """SIGKILL for the W&B service that this process, or another of ours, has started."""
    own = ["pgrep", "-P", str(pid or os.getpid()), "-f", "wandb-core"]
    found = subprocess.run(own, capture_output=True, text=True, check=False).stdout.split()
    assert found, "no W&B service is running"
    for service in found:
        os.kill(int(service), signal.SIGKILL)

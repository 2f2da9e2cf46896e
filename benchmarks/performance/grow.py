"""Whether a long run, a large entry or many trackers make `log` cost more: it should stay flat.

python benchmarks/performance/grow.py [OUT.json]

    entries    journals of 10^3 to 10^6 entries, continued; calls to the three in turn. What is paid
               once a session for them is in further columns: `open_logger` reads the journal from
               end to end, to count its entries and to find its sessions
    metrics    `log_metrics` of 1 to 64 numbers, in turn, with the journal alone
    backends   1 to 8 backends that take everything and do nothing, in turns of some hundred calls,
               1000 calls a second with matrix products in between, as in a training loop; the
               delivery threads read, decode and hand over meanwhile
    memory     what the process holds, with one such backend, while 100,000 records are logged

Times are of the calling thread. torch is not loaded.
"""

from __future__ import annotations

import contextlib
import random
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from common import Part, Row, Table, interleave, main, quantiles, versions_of

from tokrate import Logger, RunInfo, ThroughputMeter, ThroughputRecord, TokenCounts, open_logger
from tokrate.run import Entry, Outcome

ENTRIES = (1000, 100_000, 1_000_000)
METRICS = (1, 4, 16, 64)
BACKENDS = (1, 2, 4, 8)
ROUNDS = 5000
STATS_ROUNDS = 500
TURNS, TURN_CALLS, PACE_HZ = 12, 300, 1000
MEMORY_ENTRIES = (10_000, 50_000, 100_000)
FLAT = 1.1
"""Up to this ratio a cost has not grown: less than the tables differ from one run to the next."""
MATRIX = np.random.default_rng(0).random((96, 96))


class Taker:
    """Takes everything, and does nothing with it."""

    def __init__(self, run: RunInfo) -> None:
        pass

    def write(self, entries: Sequence[Entry]) -> None:
        """Take them."""

    def close(self, outcome: Outcome) -> None:
        """Nothing is open."""


for _number in range(max(BACKENDS)):  # a run has each backend once, so that each needs a name
    globals()[f"Taker{_number}"] = type(f"Taker{_number}", (Taker,), {})


def takers(number: int) -> dict[str, Any]:
    """The `logger` key that opens so many."""
    return {"console": False, **{f"{__name__}:Taker{place}": {} for place in range(number)}}


def make_metrics(number: int) -> dict[str, float]:
    """Numbers with all their digits, as a loss has them."""
    values = np.random.default_rng(0).random(number).tolist()
    return {f"train/number_{place}": value for place, value in enumerate(values)}


def make_record() -> ThroughputRecord:
    """A record as a loop makes it; the second, since the first is warm-up."""
    meter = ThroughputMeter()
    for step in (1, 2):
        meter.add(TokenCounts(raw=32_768, active=14_000, padded=9_000))
        record = meter.record(step)
    return record


def as_rows(found: dict[str, dict[str, float | None]]) -> list[Row]:
    """All of them tokrate's."""
    return [Row(name=name, values=values, ours=True) for name, values in found.items()]


def grown(found: dict[str, dict[str, float]], column: str = "median") -> float:
    """The largest row's number as a multiple of the smallest's."""
    values = list(found.values())
    return values[-1][column] / values[0][column]


# --- entries in the journal ----------------------------------------------------------------------


def make_journal(entries: int, folder: Path) -> RunInfo:
    """A run of so many entries: one is written by tokrate, and repeated."""
    run = RunInfo(f"entries-{entries}", id=f"entries-{entries}")
    with open_logger(takers(0), run=run, dir=folder) as logger:
        logger.log_metrics(make_metrics(4), step=1)
        path = (logger.run.folder or folder) / "journal.jsonl"
    first, entry, last = path.read_bytes().splitlines(keepends=True)
    batch = 1000
    with path.open("wb") as file:
        file.write(first)
        for _ in range(entries // batch):
            file.write(entry * batch)
        file.write(last)
    return run


def seconds_of(call: Any) -> tuple[float, Any]:
    """How long one call takes, and what it returns."""
    begin_s = time.perf_counter()
    found = call()
    return time.perf_counter() - begin_s, found


def measure_entries(folder: Path) -> Table:
    """Microseconds of a call, by the number of entries that are there."""
    metrics, record = make_metrics(4), make_record()
    once: dict[str, dict[str, float]] = {}
    loggers: dict[str, Logger] = {}
    with contextlib.ExitStack() as stack:
        for entries in ENTRIES:
            run = make_journal(entries, folder)
            open_s, logger = seconds_of(lambda run=run: open_logger(takers(0), run=run, dir=folder))
            loggers[name := f"{entries:,}"] = stack.enter_context(logger)
            once[name] = {"open": open_s * 1000}
            if logger.stats().entries != entries:
                raise SystemExit(f"found {logger.stats()}, expected {entries} entries")
        calls = {n: lambda log=one.log_metrics: log(metrics, step=2) for n, one in loggers.items()}
        records = {n: lambda log=one.log: log(record) for n, one in loggers.items()}
        times, record_times = interleave(calls, ROUNDS), interleave(records, ROUNDS)
        stats_times = interleave({n: one.stats for n, one in loggers.items()}, STATS_ROUNDS)
        for name, logger in loggers.items():
            once[name]["stats"] = float(np.median(stats_times[name]))
            once[name]["close"] = seconds_of(logger.close)[0] * 1000
    found = {
        name: quantiles(times[name]) | {"record": float(np.median(record_times[name]))} | once[name]
        for name in times
    }
    last = found[f"{ENTRIES[-1]:,}"]
    growth = {column: grown(found, column) for column in ("median", "record", "stats")}
    return Table(
        title="Grow, entries in the journal",
        about="one log_metrics of 4 numbers; record: one log; open, stats, close: one call each",
        columns={
            "median": "µs",
            "p99": "µs",
            "record": "µs",
            "stats": "µs",
            "open": "ms",
            "close": "ms",
        },
        rows=as_rows(found),
        baseline=f"{ENTRIES[0]:,}",
        ratio_of="median",
        aim="flat",
        result=(
            f"With a thousand times the entries log_metrics takes {growth['median']:.2f} times as "
            f"long, log {growth['record']:.2f} times, stats {growth['stats']:.2f} times; opening "
            f"reads the journal, {last['open']:.0f} ms for {ENTRIES[-1]:,} entries"
        ),
        reached=max(growth.values()) <= FLAT,
    )


# --- metrics per entry ---------------------------------------------------------------------------


def measure_metrics(folder: Path) -> Table:
    """Microseconds of a call, by the number of metrics."""
    with open_logger(takers(0), run=RunInfo("metrics"), dir=folder) as logger:
        sizes = {str(number): make_metrics(number) for number in METRICS}
        calls = {name: lambda m=m: logger.log_metrics(m, step=1) for name, m in sizes.items()}
        times = interleave(calls, ROUNDS)
    found = {
        name: quantiles(one) | {"a metric": float(np.median(one)) / int(name)}
        for name, one in times.items()
    }
    share, growth = grown(found, "a metric"), grown(found)
    further = (found["64"]["median"] - found["1"]["median"]) / 63
    return Table(
        title="Grow, metrics in an entry",
        about="one log_metrics of so many numbers, the journal alone",
        columns={"median": "µs", "p99": "µs", "a metric": "µs"},
        rows=as_rows(found),
        baseline=str(METRICS[0]),
        ratio_of="median",
        aim="less than in proportion",
        result=(
            f"64 times the metrics take {growth:.1f} times as long: {further:.2f} µs for each "
            f"further one, which makes a metric {1 / share:.1f} times cheaper than alone"
        ),
        reached=share < 1,
    )


# --- backends ------------------------------------------------------------------------------------


def log_at_pace(logger: Logger, metrics: dict[str, float], times_us: list[float]) -> None:
    """One turn of calls; then wait until all is delivered, so that it hits no other's turn."""
    due_s = time.perf_counter()
    for _ in range(TURN_CALLS):
        due_s += 1 / PACE_HZ
        while time.perf_counter() < due_s:
            MATRIX @ MATRIX
        begin_ns = time.perf_counter_ns()
        logger.log_metrics(metrics, step=1)
        times_us.append((time.perf_counter_ns() - begin_ns) / 1000)
    while any(stats.waiting for stats in logger.stats().backends.values()):
        time.sleep(0.01)


def measure_backends(folder: Path) -> Table:
    """Microseconds of a call, by the number of backends."""
    metrics, order = make_metrics(4), random.Random(0)
    times: dict[str, list[float]] = {str(number): [] for number in BACKENDS}
    with contextlib.ExitStack() as stack:
        loggers = {}
        for number in BACKENDS:
            run = RunInfo(f"backends-{number}")
            logger = open_logger(takers(number), run=run, dir=folder)
            loggers[str(number)] = stack.enter_context(logger)
            log_at_pace(logger, metrics, [])
        for _ in range(TURNS):
            for name in order.sample(list(loggers), len(loggers)):
                log_at_pace(loggers[name], metrics, times[name])
    found = {name: quantiles(np.array(one)) for name, one in times.items()}
    growth = grown(found)
    further = (found["8"]["median"] - found["1"]["median"]) / 7
    return Table(
        title="Grow, backends",
        about=f"one log_metrics of 4 numbers, {PACE_HZ} a second in a busy loop",
        columns={"median": "µs", "p99": "µs", "worst": "µs"},
        rows=as_rows(found),
        baseline=str(BACKENDS[0]),
        ratio_of="median",
        aim="flat",
        result=(
            f"Eight backends instead of one make the median {growth:.2f} times as long, "
            f"{further:.2f} µs for each further one, and the 99th percentile "
            f"{grown(found, 'p99'):.1f} times: their threads take turns with the loop's"
        ),
        reached=growth <= FLAT,
    )


# --- memory --------------------------------------------------------------------------------------


def rss_mib() -> float:
    """What the process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def measure_memory(folder: Path) -> Table:
    """MiB after so many records."""
    record, found = make_record(), {}
    with open_logger(takers(1), run=RunInfo("memory"), dir=folder) as logger:
        for step in range(1, MEMORY_ENTRIES[-1] + 1):
            logger.log(replace(record, step=step))
            if step % 1000 == 0:  # a loop is slower: what waits on disk is no memory of ours
                while any(stats.waiting for stats in logger.stats().backends.values()):
                    time.sleep(0.01)
            if step in MEMORY_ENTRIES:
                found[f"{step:,}"] = {"memory": rss_mib()}
    first, *_, last = (values["memory"] for values in found.values())
    entries = MEMORY_ENTRIES[-1] - MEMORY_ENTRIES[0]
    return Table(
        title="Grow, memory",
        about="what the process holds after so many records, one backend open",
        columns={"memory": "MiB"},
        rows=as_rows(found),
        baseline=f"{MEMORY_ENTRIES[0]:,}",
        ratio_of="memory",
        aim="flat",
        result=f"{last - first:+.1f} MiB over {entries:,} records",
        reached=last / first <= FLAT,
        plot=False,
    )


def measure() -> Part:
    """All tables."""
    with tempfile.TemporaryDirectory(prefix="tokrate-grow-") as name:
        folder = Path(name)
        measures = (measure_entries, measure_metrics, measure_backends, measure_memory)
        tables = [one(folder) for one in measures]
    return Part(name="grow", tables=tables, versions=versions_of("msgspec", "numpy"))


if __name__ == "__main__":
    main(measure)

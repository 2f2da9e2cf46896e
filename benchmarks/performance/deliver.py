"""What delivery costs in the background: entries a second into each tracker, and processor time.

python benchmarks/performance/deliver.py [OUT.json]

A journal is written first. Then its entries are delivered, as `tokrate sync` does; the same entries
go through the tracker's own API in a loop, one call for each (TensorBoard: one for each number),
and, where it has one, through its own batching. All are called in turn, in an order that changes
from round to round, and medians are taken. The time runs from a tracker that is connected until it
was told that the run has ended, so that nothing is left in a buffer. Slow ones are given fewer
entries, and what is shown is for 100,000.

    CPU       user and system time of this process
    service   the same of the processes that belong to the tracker: W&B's service, MLflow's server
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import Part, Row, Table, main, versions_of

from tokrate import RunInfo, ThroughputMeter, TokenCounts, open_logger
from tokrate.config import parse_logger
from tokrate.journal import Journal
from tokrate.opening import find_factories, make_delivery
from tokrate.run import Outcome

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from faults.servers import MlflowServer

ROUNDS = 3
PER = 100_000
"""Entries that the numbers are for."""
FAST, BATCHED, SLOW = 20_000, 5000, 500
"""Entries of each round: most; MLflow in batches; and MLflow in one call for each entry."""
METRICS_PER_CALL = 1000
"""The most that MLflow takes."""

Entry = dict[str, Any]
"""A line of the journal: `time_unix_ms`, `step`, `metrics`."""
Deliver = Callable[[], object]
Open = Callable[[Path, str, int], Deliver]
"""Connects to a tracker (folder, MLflow's address, number of entries); what it returns delivers."""


# --- tokrate -------------------------------------------------------------------------------------


def write_journal(folder: Path, count: int) -> Path:
    """The folder of a run with that many entries, none of them delivered."""
    meter = ThroughputMeter()
    with open_logger({"console": False}, run=RunInfo(f"run-{count}"), dir=folder) as logger:
        for step in range(1, count + 1):
            meter.add(TokenCounts(raw=32_768, active=14_000 + step % 1000, padded=9_000))
            logger.log(meter.record(step))
    return logger.run.folder


def tokrate(tracker: str) -> Open:
    """What `tokrate sync` does with a run, but for the choice of what to sync."""

    def connect(folder: Path, uri: str, count: int) -> Deliver:
        options: dict[str, dict[str, str]] = {
            "wandb": {"mode": "offline"},
            "mlflow": {"tracking_uri": uri},
            "tensorboard": {},
        }
        written = write_journal(folder, count)
        choice = parse_logger({tracker: options[tracker], "console": False})
        ((backend, factory),) = find_factories(choice)
        journal = Journal(written)
        run = RunInfo(f"run-{count}", folder=written)
        delivery = make_delivery(backend, factory, run, journal, 1)
        delivery.connect()

        def deliver() -> None:
            while delivery.deliver_some():
                pass
            delivery.finish(Outcome.FINISHED)
            stats = delivery.stats(journal.place.entries)
            journal.close()
            if stats.delivered != count or stats.problem or any(stats.values_left_out.values()):
                raise SystemExit(f"{tracker}: not everything was delivered: {stats}")

        return deliver

    return connect


# --- the trackers' own API -----------------------------------------------------------------------


def entries_of(folder: Path, count: int) -> list[Entry]:
    """The same numbers as tokrate's, ready to be handed over."""
    with (write_journal(folder, count) / "journal.jsonl").open() as lines:
        entries = [json.loads(line) for line in lines]
    return [entry for entry in entries if entry["kind"] == "entry"]


def add_scalar(folder: Path, _: str, count: int) -> Deliver:
    from torch.utils.tensorboard import SummaryWriter

    entries, writer = entries_of(folder, count), SummaryWriter(str(folder / "events"))

    def deliver() -> None:
        for entry in entries:
            time_s = entry["time_unix_ms"] / 1000
            for name, value in entry["metrics"].items():
                writer.add_scalar(name, value, entry["step"], walltime=time_s)
        writer.close()

    return deliver


def run_log(folder: Path, _: str, count: int) -> Deliver:
    import wandb

    entries = entries_of(folder, count)
    run = wandb.init(mode="offline", dir=str(folder), reinit="create_new")

    def deliver() -> None:
        for entry in entries:
            run.log({**entry["metrics"], "step": entry["step"]})
        run.finish()

    return deliver


def log_batch(folder: Path, uri: str, count: int) -> Deliver:
    """One call for each entry."""
    return mlflow_calls(folder, uri, count, lambda metrics: (list(m) for m in metrics))


def log_batch_full(folder: Path, uri: str, count: int) -> Deliver:
    """As many metrics in a call as MLflow takes."""
    return mlflow_calls(
        folder,
        uri,
        count,
        lambda metrics: batched(itertools.chain.from_iterable(metrics), METRICS_PER_CALL),
    )


def mlflow_calls(
    folder: Path, uri: str, count: int, calls: Callable[[Iterator[Any]], Iterable[list[Any]]]
) -> Deliver:
    """`MlflowClient.log_batch`, with what `calls` makes of the entries' metrics."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    entries, client = entries_of(folder, count), MlflowClient(uri)
    run_id = client.create_run("0").info.run_id

    def metrics_of(entry: Entry) -> Iterator[Metric]:
        for name, value in entry["metrics"].items():
            yield Metric(name, float(value), entry["time_unix_ms"], entry["step"])

    def deliver() -> None:
        for metrics in calls(metrics_of(entry) for entry in entries):
            client.log_batch(run_id, metrics)
        client.set_terminated(run_id)

    return deliver


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of that many items."""
    items = iter(items)
    while found := list(itertools.islice(items, size)):
        yield found


# --- measuring -----------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Contender:
    """One row; each round adds a number to each list, in seconds for 100,000 entries."""

    connect: Open
    entries: int
    lacks: str = ""
    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    service_s: list[float] = field(default_factory=list)

    def run(self, uri: str) -> None:
        """Connect, and deliver once."""
        with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
            deliver = self.connect(Path(name), uri or f"sqlite:///{name}/mlflow.db", self.entries)
            cpu_s, service_s, start_s = time.process_time(), children_s(), time.perf_counter()
            deliver()
            spent_s = time.perf_counter() - start_s
            scale = PER / self.entries
            self.times_s.append(spent_s * scale)
            self.cpu_s.append((time.process_time() - cpu_s) * scale)
            self.service_s.append((children_s() - service_s) * scale)


def children_s() -> float:
    """Processor seconds of all processes that this one has started."""
    found = 0.0
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = child.cpu_times()
            found += times.user + times.system
    return found


CRASH = "nothing resumes after a crash: what was sent already is not known"


def contenders_of(tracker: str) -> dict[str, Contender]:
    """Baseline first."""
    if tracker == "mlflow":
        return {
            "direct: log_batch for each entry": Contender(
                connect=log_batch, entries=SLOW, lacks=CRASH
            ),
            f"direct: log_batch of {METRICS_PER_CALL} metrics": Contender(
                connect=log_batch_full, entries=BATCHED, lacks=f"{CRASH}; entries are torn apart"
            ),
            "tokrate": Contender(connect=tokrate(tracker), entries=BATCHED),
        }
    name, connect = {
        "tensorboard": ("direct: SummaryWriter.add_scalar", add_scalar),
        "wandb": ("direct: Run.log", run_log),
    }[tracker]
    return {
        name: Contender(connect=connect, entries=FAST, lacks=CRASH),
        "tokrate": Contender(connect=tokrate(tracker), entries=FAST),
    }


def compare(title: str, contenders: Mapping[str, Contender], uri: str) -> Table:
    """All in turn; a first round that does not count imports and opens what stays open."""
    order = random.Random(0)
    for number in range(-1, ROUNDS):
        for name in order.sample(list(contenders), len(contenders)):
            contender = contenders[name]
            if number < 0:
                Contender(connect=contender.connect, entries=20).run(uri)
            else:
                contender.run(uri)
    return Table(
        title=title,
        about=f"100,000 entries of {numbers_in_an_entry()} numbers; a round had `entries` of them",
        columns={"time": "s", "rate": "per s", "CPU": "s", "service": "s", "entries": ""},
        rows=[
            Row(
                name=name,
                values={
                    "time": median(one.times_s),
                    "rate": PER / median(one.times_s),
                    "CPU": median(one.cpu_s),
                    "service": median(one.service_s) if max(one.service_s) else None,
                    "entries": one.entries,
                },
                lacks=one.lacks,
                ours=name == "tokrate",
            )
            for name, one in contenders.items()
        ],
        baseline=next(iter(contenders)),
        ratio_of="time",
    )


def numbers_in_an_entry() -> int:
    """How many."""
    with tempfile.TemporaryDirectory() as name:
        return len(entries_of(Path(name), 1)[0]["metrics"])


def measure() -> Part:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    os.environ |= {"WANDB_MODE": "offline", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
    part = Part(name="deliver", versions=versions_of("wandb", "mlflow", "tensorboard", "torch"))
    trackers = {
        "Deliver, TensorBoard": "tensorboard",
        "Deliver, MLflow SQLite": "mlflow",
        "Deliver, MLflow over HTTP": "mlflow",
        "Deliver, W&B offline": "wandb",  # last: its service stays
    }
    for title, tracker in trackers.items():
        with contextlib.ExitStack() as stack:
            uri = ""
            if title.endswith("HTTP"):
                server = MlflowServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
                stack.callback(server.kill)
                server.start()
                uri = server.url
            part.tables.append(compare(title, contenders_of(tracker), uri))
    return part


if __name__ == "__main__":
    main(measure)

"""What `log` costs the loop: the time on the caller's thread for one record, its tracker open.

python benchmarks/performance/log.py [OUT.json]

Every contender has a process of its own, as in a training: W&B, MLflow and the frameworks keep one
run for each process, and nobody's background threads take the interpreter from somebody else. The
processes are asked for a slice of their calls in turn, in an order that changes from round to
round, and only one works at a time. Between two calls there is a training step's stand-in, a
matrix product of about 0.6 ms with one thread: some thousand times more records than a training
makes, which is hard on those that work in the background, tokrate among them. A slice is several
times longer than tokrate lets records gather before it delivers them, so that delivery falls into
it. After each slice a process finishes what it has in the background, so that this falls on nobody
else.

    tokrate     `Logger.log(record)`; at the end, all must have been delivered
    direct      the tracker's own API
    torchtune   its metric loggers; a recipe has one of them
    Lightning   `log_metrics` of its loggers, as Fabric calls it; the Trainer also calls `save`
    accelerate  `Accelerator.log`

Everybody writes the same numbers. Peers are handed them as a dictionary that is ready; tokrate
makes it from the record, within its time. Those that wait for MLflow are called less often, and the
worst of fewer calls flatters them.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Part, Row, Table, main, number, quantiles, versions_of
from writers import (
    Log,
    Place,
    accelerate,
    floor,
    in_turn,
    lightning,
    mlflow_async,
    mlflow_client,
    mlflow_fluent,
    summary_writer,
    tokrate,
    torchtune,
    wandb_run,
)

from tokrate import ThroughputMeter, ThroughputRecord, TokenCounts
from tokrate.names import MetricNames

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from faults.servers import MlflowServer

ROUNDS = 5
FAST, SLOW = 10_000, 500
"""Calls of each contender: most, and those that write to MLflow themselves, be it in the
background, where it takes as long to catch up."""
SLOW_TURNS = 5
"""Slices of a slow one in each round. A disk has slow spells, which so fall on all alike."""
MATRIX = torch.randn(320, 320)
PRELOADED = (
    "accelerate",
    "lightning.pytorch.loggers",
    "mlflow",
    "torch.utils.tensorboard",
    "torchtune.training.metric_logging",
    "wandb",
)
"""Imported once, before the contenders' processes are forked off: 29 times would take minutes."""


# --- the contenders of each table ----------------------------------------------------------------


@dataclass(kw_only=True)
class Contender:
    """One row."""

    opener: Callable[[Place], Log]
    calls: int = FAST
    turns: int = 1
    lacks: str = ""
    times_us: list[float] = field(default_factory=list)


WANDB = "raises into the loop once W&B's service has died; what that had not yet written is lost"
MLFLOW = "the loop waits for the database or server; what fails is raised into the loop, and lost"
DROPS = "a batch that fails is dropped; a crash loses the queue"
WRITER = "the loop waits when 10 numbers are queued; a full disk is raised into the loop"
FLUSHED = "the loop waits for the file each time; a full disk is raised into the loop"
CSV = "a file only; a crash loses up to 100 records, which wait in memory"
NOT_SAFE = "one tracker's trouble is raised into the loop, and those after it get nothing"


def wandb_table() -> dict[str, Contender]:
    return {
        "direct: Run.log": Contender(opener=wandb_run, lacks=WANDB),
        "torchtune": Contender(opener=partial(torchtune, "wandb"), lacks=WANDB),
        "Lightning": Contender(opener=partial(lightning, "wandb"), lacks=WANDB),
        "accelerate": Contender(opener=partial(accelerate, ["wandb"]), lacks=WANDB),
        "tokrate": Contender(opener=partial(tokrate, ["wandb"])),
    }


def tensorboard_table() -> dict[str, Contender]:
    return {
        "direct: add_scalar": Contender(opener=summary_writer, lacks=WRITER),
        "torchtune": Contender(opener=partial(torchtune, "tensorboard"), lacks=WRITER),
        "Lightning": Contender(opener=partial(lightning, "tensorboard"), lacks=WRITER),
        "Lightning: CSVLogger": Contender(opener=partial(lightning, "csv"), lacks=CSV),
        "accelerate": Contender(opener=partial(accelerate, ["tensorboard"]), lacks=FLUSHED),
        "tokrate": Contender(opener=partial(tokrate, ["tensorboard"])),
    }


def mlflow_table() -> dict[str, Contender]:
    slow = partial(Contender, calls=SLOW, turns=SLOW_TURNS, lacks=MLFLOW)
    return {
        "direct: log_metrics": slow(opener=mlflow_fluent),
        "direct: log_batch": slow(opener=mlflow_client),
        "direct: log_metrics, synchronous=False": Contender(
            opener=mlflow_async, calls=SLOW, lacks=DROPS
        ),
        "torchtune": slow(opener=partial(torchtune, "mlflow")),
        "Lightning": slow(opener=partial(lightning, "mlflow")),
        "accelerate": slow(opener=partial(accelerate, ["mlflow"])),
        "tokrate": Contender(opener=partial(tokrate, ["mlflow"])),
    }


def all_table() -> dict[str, Contender]:
    three = ("wandb", "mlflow", "tensorboard")
    slow = partial(Contender, calls=SLOW, turns=SLOW_TURNS, lacks=NOT_SAFE)
    return {
        "direct": slow(opener=partial(in_turn, [wandb_run, mlflow_fluent, summary_writer])),
        "direct, MLflow with synchronous=False": Contender(
            opener=partial(in_turn, [wandb_run, mlflow_async, summary_writer]),
            calls=SLOW,
            lacks=f"{NOT_SAFE}; MLflow: {DROPS}",
        ),
        "Lightning": slow(opener=partial(in_turn, [partial(lightning, one) for one in three])),
        "accelerate": slow(opener=partial(accelerate, three)),
        "tokrate": Contender(opener=partial(tokrate, three)),
        "floor: the numbers as JSON, one os.write": Contender(
            opener=floor, lacks="a file that no tracker reads"
        ),
    }


# --- measuring -----------------------------------------------------------------------------------


def make_records(count: int) -> Iterator[ThroughputRecord]:
    """Records as a loop makes them."""
    meter = ThroughputMeter()
    for step in range(1, count + 1):
        meter.add(TokenCounts(raw=32_768, active=14_000 + step % 1000, padded=9_000))
        yield meter.record(step)


def work(contender: Contender, ours: bool, uri: str, pipe: Connection) -> None:
    """One contender's process: open, then a slice of calls whenever it is asked."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # trackers print where runs can be seen
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    os.environ["WANDB_MODE"] = "offline"
    records = make_records(contender.calls + 1)
    names = MetricNames()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(name))
        uri = uri or f"sqlite:///{name}/mlflow.db"
        place = Place(folder=Path(name), uri=uri, stack=stack)
        log = contender.opener(place)
        arguments = ((r,) if ours else (r.metrics(names), r.step) for r in records)
        log(*next(arguments))  # the first call opens files and connections
        place.settle()
        pipe.send("ready")
        while calls := pipe.recv():
            times_us = timed(log, [next(arguments) for _ in range(calls)])
            place.settle()
            pipe.send(times_us)
    pipe.send("closed")


def timed(log: Log, arguments: Sequence[Any]) -> list[float]:
    """Microseconds of each call, with a step of training before it."""
    now = time.perf_counter_ns
    times_us = []
    for one in arguments:
        MATRIX @ MATRIX
        start_ns = now()
        log(*one)
        times_us.append((now() - start_ns) / 1000)
    return times_us


def compare(contenders: dict[str, Contender], uri: str = "") -> None:
    """Fill in the contenders' times."""
    context, order = multiprocessing.get_context("forkserver"), random.Random(0)
    context.set_forkserver_preload(["__main__", *PRELOADED])
    pipes: dict[str, Connection] = {}
    for name, contender in contenders.items():
        pipes[name], end = context.Pipe()
        arguments = (contender, name == "tokrate", uri, end)
        context.Process(target=work, args=arguments, daemon=True).start()
        end.close()  # the process's own copy stays: with it gone, so is the process
    for pipe in pipes.values():
        pipe.recv()
    turns = [name for name, contender in contenders.items() for _ in range(contender.turns)]
    for _ in range(ROUNDS):
        for name in order.sample(turns, len(turns)):
            contender = contenders[name]
            pipes[name].send(contender.calls // ROUNDS // contender.turns)
            contender.times_us += pipes[name].recv()
    for pipe in pipes.values():
        pipe.send(0)
        pipe.recv()


def table_of(title: str, contenders: dict[str, Contender]) -> Table:
    """Rows, in the order in which they were called."""
    rows, numbers = [], len(next(make_records(1)).metrics(MetricNames()))
    for name, contender in contenders.items():
        values = {"calls": contender.calls, **quantiles(np.array(contender.times_us))}
        rows.append(Row(name=name, values=values, lacks=contender.lacks, ours=name == "tokrate"))
    return Table(
        title=title,
        about=f"one record of {numbers} numbers, on the caller's thread",
        columns={"calls": "", "median": "µs", "p99": "µs", "worst": "µs"},
        rows=rows,
        baseline=next(iter(contenders)),
        ratio_of="median",
    )


def judge(table: Table) -> None:
    """Say whether the aim was reached, with the numbers."""
    values = {row.name: row.values for row in table.rows}
    ours, direct, least = values["tokrate"], values["direct"], values[table.rows[-1].name]
    peers = [row for row in table.rows if not row.ours and not row.name.startswith("floor")]
    best = min(peers, key=lambda row: row.values["median"] or 0)
    times = direct["median"] / ours["median"]
    table.aim = "100 times less than direct calls, and p99 below the best peer's median"
    table.reached = times >= 100 and ours["p99"] < best.values["median"]
    table.result = (
        f"{number(times)} times less ({number(ours['median'])} against {number(direct['median'])} "
        f"µs); p99 {number(ours['p99'])} µs against {number(best.values['median'])} µs, the median "
        f"of: {best.name}. Floor: {number(least['median'])} µs, p99 {number(least['p99'])} µs"
    )


def measure() -> Part:
    part = Part(name="log")
    part.versions = versions_of(
        "wandb", "mlflow", "tensorboard", "torch", "torchtune", "lightning", "accelerate"
    )
    tables = {
        "Log, W&B offline": wandb_table(),
        "Log, MLflow SQLite": mlflow_table(),
        "Log, MLflow over HTTP": mlflow_table(),
        "Log, TensorBoard": tensorboard_table(),
        "Log, all three at once": all_table(),
    }
    for title, contenders in tables.items():
        with contextlib.ExitStack() as stack:
            uri = ""
            if title.endswith("HTTP"):
                server = MlflowServer(Path(stack.enter_context(tempfile.TemporaryDirectory())))
                stack.callback(server.kill)
                server.start()
                uri = server.url
            compare(contenders, uri)
        part.tables.append(table_of(title, contenders))
    judge(part.tables[-1])
    return part


if __name__ == "__main__":
    main(measure)

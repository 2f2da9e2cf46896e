"""What is left of it all in a training step: the demo's, with three trackers open, against bare.

python benchmarks/performance/train.py [OUT.json]

The demo's model is trained on its packed batches, with the demo's own number of threads, which is
torch's default: one for each core. Blocks of 10 steps take turns, on the same batches:

    bare      the loop alone, twice in each round: the two tell what the method cannot see
    tokrate   `meter.watch`, `meter.update` each step, `meter.record` and `logger.log` once
    direct    labels counted with torch each step, three numbers to each tracker once; every other
              round, since it need not be known as closely

All trackers (TensorBoard, MLflow with SQLite, W&B offline) are connected before. Delivery begins
0.2 s after `log`, so that it would fall on the block that follows, were `log` called at the end:
it is called after the fifth step, and a block ends when all trackers have the entry. Delivery then
lies within tokrate's own blocks, in competition with torch's threads for the cores. What W&B's
service does, in a process beside it, may come later, for both who use it.

A step is compared with each of the two bare ones of its round on the same batch; not with their
mean, which a burst of other work on the machine would move more often than it moves one of them.
Each place in the block has the median of its ratios; the result is the mean over the places, so
that what falls on one of them, such as `log` or delivery, counts by its share. The 95 % interval
comes from resampling the rounds (percentile bootstrap).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from common import Part, Row, Table, main, versions_of
from writers import Place, in_turn, mlflow_fluent, summary_writer, wandb_run

from tokrate import RunInfo, ThroughputMeter, open_logger
from tokrate.demo.batches import IGNORE_INDEX, Batch, training_batches
from tokrate.demo.data import load_documents
from tokrate.demo.model import SmallTransformer
from tokrate.demo.train import LEARNING_RATE, train_step

STEPS = 10
"""Steps of a block."""
LOG_AFTER = 5
"""Steps of a block before its record: what remains is longer than delivery takes."""
SECONDS = 125.0
FEWEST_ROUNDS = 4
BATCHES = 100
RESAMPLES = 2000
AIM = 1.005
GIVE_UP_S = 120.0

BARE, CONTROL = "the bare loop", "the bare loop again"
OURS, DIRECT = "tokrate, three trackers", "direct calls, three trackers"
LACKS = "one class of three; the loop waits for each tracker; no journal"

Train = Callable[[Batch], float]
Block = Callable[[Sequence[Batch]], list[float]]
"""Takes batches; returns when it began, and when each step had ended."""


class Tokrate:
    """The demo's loop with its lines of tokrate."""

    def __init__(self, train: Train, folder: Path) -> None:
        spec = {
            "tensorboard": {},
            "mlflow": {"tracking_uri": f"sqlite:///{folder / 'tokrate.db'}"},
            "wandb": {"mode": "offline"},
            "console": False,
        }
        self.train = train
        self.logger = open_logger(spec, run=RunInfo("train"), dir=folder, close_timeout_s=GIVE_UP_S)
        self.meter = ThroughputMeter(labels_aligned=True)
        self.steps = 0
        self.calls_s = 0.0
        self.logger.log_metrics({"train/loss": 0.0}, step=0)
        self.wait()  # until the trackers are connected

    def block(self, batches: Sequence[Batch]) -> list[float]:
        now = time.perf_counter
        ends_s = [now()]
        for number, batch in enumerate(self.meter.watch(batches), start=1):
            self.train(batch)
            begin_s = now()
            self.steps += 1
            self.meter.update(batch.labels, attention_mask=batch.documents)
            if number == LOG_AFTER:
                self.logger.log(self.meter.record(self.steps))
            ends_s.append(now())
            self.calls_s += ends_s[-1] - begin_s
        self.wait()
        ends_s[-1] = now()
        return ends_s

    def wait(self) -> None:
        """Until all trackers have what was logged."""
        give_up_s = time.monotonic() + GIVE_UP_S
        while any(stats.waiting for stats in self.logger.stats().backends.values()):
            if time.monotonic() > give_up_s:
                raise SystemExit(f"the trackers do not take it: {self.logger.stats()}")
            time.sleep(0.001)

    def delivery_cpu_s(self) -> float:
        """Processor time of the delivery threads so far."""
        threads = [t for t in threading.enumerate() if t.name.startswith("tokrate-")]
        clocks = [time.pthread_getcpuclockid(t.ident) for t in threads if t.ident]
        return sum(map(time.clock_gettime, clocks))

    def close(self) -> None:
        stats = self.logger.close()
        delivered = {one.delivered for one in stats.backends.values()}
        if delivered != {stats.entries} or stats.left_out:
            raise SystemExit(f"not everything was delivered: {stats}")


class Direct:
    """What people write instead."""

    def __init__(self, train: Train, place: Place) -> None:
        self.train = train
        self.log = in_turn([summary_writer, mlflow_fluent, wandb_run], place)
        self.steps = self.tokens = 0
        self.began_s = time.perf_counter()
        self.log({"train/loss": 0.0}, 0)

    def block(self, batches: Sequence[Batch]) -> list[float]:
        ends_s = [time.perf_counter()]
        for number, batch in enumerate(batches, start=1):
            loss = self.train(batch)
            self.steps += 1
            self.tokens += int((batch.labels != IGNORE_INDEX).sum().item())
            if number == LOG_AFTER:
                seconds = time.perf_counter() - self.began_s
                numbers = {"loss": loss, "lr": LEARNING_RATE, "tps": self.tokens / seconds}
                self.log(numbers, self.steps)
                self.tokens, self.began_s = 0, time.perf_counter()
            ends_s.append(time.perf_counter())
        return ends_s


def make_training() -> tuple[list[Batch], Train]:
    """The demo's batches and its step."""
    documents, _ = load_documents()
    batches = list(islice(training_batches(documents, layout="packed"), BATCHES))
    model = SmallTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    return batches, lambda batch: train_step(model, optimizer, batch)


def take_turns(blocks: dict[str, Block], batches: list[Batch]) -> dict[str, np.ndarray]:
    """Seconds of each step, as [round, place in the block]; NaN where one sat out."""
    order, out = random.Random(0), [np.nan] * (STEPS + 1)
    rounds: list[dict[str, list[float]]] = []
    for block in blocks.values():
        block(batches[:STEPS])  # not counted: all is warm then
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s or len(rounds) < FEWEST_ROUNDS:
        first = len(rounds) * STEPS % (len(batches) - STEPS + 1)
        chosen = [name for name in blocks if name != DIRECT or len(rounds) % 2 == 0]
        turns = order.sample(chosen, len(chosen))
        rounds.append({name: blocks[name](batches[first : first + STEPS]) for name in turns})
    return {name: np.diff([one.get(name, out) for one in rounds]) for name in blocks}


def ratio_of(logs: np.ndarray) -> tuple[float, float, float]:
    """The ratio, and its 95 % interval.

    Args:
        logs: Logarithms of ratios, as [round, bare block, place in the block].
    """
    logs = logs[~np.isnan(logs).any(axis=(1, 2))]
    chooser = np.random.default_rng(0)
    found = [middle_of(logs[chooser.integers(0, len(logs), len(logs))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, [0.025, 0.975])
    return middle_of(logs), float(low), float(high)


def middle_of(logs: np.ndarray) -> float:
    """The mean over the places of the median at each."""
    return float(np.exp(np.median(logs, axis=(0, 1)).mean()))


def make_table(seconds: dict[str, np.ndarray], calls_s: float, threads_s: float) -> Table:
    """Ratios to the two bare blocks of the same round.

    Args:
        seconds: Of each step, as [round, place in the block].
        calls_s: Seconds in tokrate's calls, for each of its steps.
        threads_s: Processor seconds of its delivery threads, for each of its steps.
    """
    logs = {name: np.log(found) for name, found in seconds.items()}
    both = np.stack([logs[BARE], logs[CONTROL]], axis=1)
    ratios = {
        BARE: (1.0, 1.0, 1.0),
        CONTROL: ratio_of((logs[CONTROL] - logs[BARE])[:, None]),
        **{name: ratio_of(logs[name][:, None] - both) for name in (OURS, DIRECT)},
    }
    ours, low, high = ratios[OURS]
    _, from_, to = ratios[CONTROL]
    step_s = float(np.median(seconds[BARE]))
    share = calls_s / step_s * 100
    rows = []
    for name, (middle, *ends) in ratios.items():
        percent = [(value - 1) * 100 for value in (middle, *ends)]
        columns = dict(zip(("slower by", "from", "to"), percent, strict=True))
        step_ms = float(np.nanmedian(seconds[name])) * 1000
        rows.append(
            Row(
                name=name,
                values={"step": step_ms, **columns, "ratio": middle},
                lacks=LACKS if name == DIRECT else "",
                ours=name == OURS,
            )
        )
    return Table(
        title="Train, a step",
        about=(
            f"one step of the demo, {len(logs[BARE])} rounds of {STEPS} steps each, one log among "
            f"them; from, to: 95 % interval; {torch.get_num_threads()} threads"
        ),
        columns={"step": "ms", "slower by": "%", "from": "%", "to": "%"},
        rows=rows,
        baseline=BARE,
        ratio_of="ratio",
        aim=f"at most {AIM} times the bare loop's step",
        result=(
            f"{ours:.4f} times ({low:.4f} to {high:.4f}); the bare loop against itself comes to "
            f"between {from_:.4f} and {to:.4f}. In a step of {step_s * 1e3:.0f} ms the calls take "
            f"{calls_s * 1e6:.0f} µs ({share:.2f} %) and the delivery threads "
            f"{threads_s * 1e6:.0f} µs of processor time"
        ),
        reached=ours <= AIM,
    )


def measure() -> Part:
    """The one table."""
    warnings.simplefilter("ignore")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
    os.environ |= {"WANDB_MODE": "offline", "MLFLOW_LOGGING_LEVEL": "ERROR"}
    batches, train = make_training()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tokrate-train-")))
        stack.enter_context(contextlib.chdir(folder))
        ours = Tokrate(train, folder)
        stack.callback(ours.close)
        uri = f"sqlite:///{folder / 'direct.db'}"
        direct = Direct(train, Place(folder=folder, uri=uri, stack=stack))

        def bare(block: Sequence[Batch]) -> list[float]:
            ends_s = [time.perf_counter()]
            for batch in block:
                train(batch)
                ends_s.append(time.perf_counter())
            return ends_s

        before = ours.steps, ours.calls_s, ours.delivery_cpu_s()
        blocks = {BARE: bare, CONTROL: bare, OURS: ours.block, DIRECT: direct.block}
        seconds = take_turns(blocks, batches)
        steps = ours.steps - before[0]
        calls_s = (ours.calls_s - before[1]) / steps
        table = make_table(seconds, calls_s, (ours.delivery_cpu_s() - before[2]) / steps)
    return Part(
        name="train",
        tables=[table],
        versions=versions_of("torch", "numpy", "mlflow", "tensorboard", "wandb"),
    )


if __name__ == "__main__":
    main(measure)

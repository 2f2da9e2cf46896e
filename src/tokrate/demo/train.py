"""Trains the arms for a while: a plain loop, and the lines of tokrate in it.

    padded   ■ ■ ■ ■        one window at a time, in turns: a machine is never as idle as it
    packed    ■ ■ ■ ■       looks, and what disturbs it then disturbs all arms alike
    …          ■ ■ ■ ■

A run is paused while the others train (`meter.phase`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import nn

from tokrate import Logger, RunInfo, ThroughputMeter, ThroughputRecord, open_logger
from tokrate.demo.arms import Arm
from tokrate.demo.batches import ROWS, Batch, collate, pad_rows, steps_per_epoch, training_batches
from tokrate.demo.data import MAX_SLOTS, Document
from tokrate.demo.model import SmallTransformer, mean_loss
from tokrate.demo.result import ArmResult, sum_steady

LEARNING_RATE = 2e-3
"""AdamW's, chosen for the short run that the demo is."""
TRACKERS_OPEN_S = 15.0
"""Longest wait for the trackers before the first step of an arm; the journal has all anyway."""
WINDOWS = 24
"""Records that an arm aims at. Windows last a share of the time, so that their number does not
depend on how fast the machine is."""


class Observer(Protocol):
    """Is told how training gets on."""

    def on_turn(self, name: str) -> None:
        """What comes now is of the arm of that name."""

    def on_step(self, elapsed_s: float) -> None:
        """After each optimizer step; `elapsed_s` is the time that the arm has trained."""

    def on_record(self, record: ThroughputRecord, loss: float) -> None:
        """After each window; `loss` is the mean training loss in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all arms have in common."""

    training: Sequence[Document]
    held_out: Sequence[Document]
    logger: Any
    """The `logger` key, as `open_logger` takes it."""
    dir: Path
    """Folder that the runs' folders are made in."""
    seconds: float
    """Time to train each arm for."""
    seed: int = 0


def train_arms(
    arms: Sequence[Arm],
    job: Job,
    observer: Observer,
    clock: Callable[[], float] = time.perf_counter,
) -> list[ArmResult]:
    """Train the arms in turns of one window, so that what else the machine does hits all alike.

    Args:
        clock: Returns seconds.

    Raises:
        ConfigError: The `logger` key is wrong; nothing has been trained then.
    """
    results: dict[str, ArmResult] = {}
    waiting = {arm.name: _train_arm(arm, job, observer, clock) for arm in arms}
    try:
        while waiting:
            for name, turns in list(waiting.items()):
                observer.on_turn(name)
                try:
                    next(turns)
                except StopIteration as end:
                    results[name] = end.value
                    del waiting[name]
    except BaseException as error:
        for turns in waiting.values():  # they end as this one did, and tell their trackers so
            with suppress(type(error)):
                turns.throw(error)
        raise
    return [results[arm.name] for arm in arms]


def _train_arm(
    arm: Arm, job: Job, observer: Observer, clock: Callable[[], float]
) -> Generator[None, None, ArmResult]:
    """Train one arm from fresh weights and log it; yields between its windows."""
    model = SmallTransformer(job.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    batches = training_batches(job.training, layout=arm.layout, target=arm.target, seed=job.seed)
    records: list[ThroughputRecord] = []
    losses: list[float] = []
    trained_s = 0.0
    run = RunInfo(name=arm.name, config=_config(arm, job), tags=("tokrate-demo",))
    with open_logger(job.logger, run=run, dir=job.dir) as logger:
        logger.log_metrics({"eval/loss": evaluate(model, job.held_out)}, step=0)
        _wait_for_trackers(logger, clock)
        meter = ThroughputMeter(clock=clock, labels_aligned=True)
        window_began_s = clock()
        for step, batch in enumerate(meter.watch(batches), start=1):
            losses.append(train_step(model, optimizer, batch))
            meter.update(labels=batch.labels, attention_mask=batch.documents)
            window_s = clock() - window_began_s
            observer.on_step(trained_s + window_s)
            if window_s < job.seconds / WINDOWS:
                continue
            trained_s += window_s
            metrics = {"train/loss": fmean(losses)}
            # One record for the warm-up and one to measure, however short the time is.
            last = trained_s >= job.seconds and len(records) > 0
            if last:
                with meter.phase("eval"):
                    metrics["eval/loss"] = evaluate(model, job.held_out)
            records.append(meter.record(step))
            logger.log_metrics(metrics, step=step)
            logger.log(records[-1])
            observer.on_record(records[-1], metrics["train/loss"])
            if last:
                break
            losses.clear()
            with meter.phase("other arms"):
                yield
            window_began_s = clock()
    return sum_steady(
        records,
        name=arm.name,
        folder=job.dir / (logger.run.folder or job.dir).name,
        pairs=len(job.training),
        steps_per_epoch=steps_per_epoch(job.training, layout=arm.layout, seed=job.seed),
        loss=metrics["eval/loss"],
    )


def _wait_for_trackers(logger: Logger, clock: Callable[[], float]) -> None:
    """Let them open in peace: their imports would share the cores with the first steps."""
    give_up_s = clock() + TRACKERS_OPEN_S
    while any(stats.waiting for stats in logger.stats().backends.values()):
        if clock() >= give_up_s:
            break
        time.sleep(0.05)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """One forward and backward pass and one update of the weights; returns the loss."""
    loss = mean_loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@torch.no_grad()
def evaluate(model: nn.Module, documents: Sequence[Document]) -> float:
    """Mean loss on the answers' tokens, the same measure whatever the arm was trained on."""
    return mean_loss(model, collate(pad_rows(documents), target="answers")).item()


def _config(arm: Arm, job: Job) -> dict[str, Any]:
    """What the trackers show of the run's configuration."""
    return {
        "arm": arm.name,
        "layout": arm.layout,
        "target": arm.target,
        "rows": ROWS,
        "max_slots": MAX_SLOTS,
        "learning_rate": LEARNING_RATE,
        "seed": job.seed,
        "seconds": job.seconds,
        "training_pairs": len(job.training),
    }

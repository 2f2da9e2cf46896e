"""What measuring costs a step: count, add up, and make the numbers every 10 steps.

python benchmarks/performance/measure.py [OUT.json]

    host     labels and mask of 8 × 4096 int64 on the CPU; the block of 10 steps that ends with the
             numbers is timed as a whole, all contenders in turn
    device   kernels queued and waits for the device, by a dispatch mode that stands in for one: it
             sees every operation and every read that a real device would have to answer

Peers are called as their own trainers call them, on the same batch. Callbacks run with a stand-in
for the trainer, since the trainer's own work is not what is measured. A peer that is not installed
is left out: composer asks for a torch of its own, so that it has an environment of its own.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from common import Call, Part, Row, Table, interleave, main, rows_of, versions_of
from count import IGNORE_INDEX, make_batch

from tokrate import CountingCollator, ThroughputMeter

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from stalls import Watch, as_if_on_a_device

WITHIN = ("_local_scalar_dense", "item")
"""What a read calls in turn: it is one wait all the same."""
BESIDE = ", beside composer" if find_spec("composer") else ""
STEPS = 10
"""Steps between two records."""
ROUNDS = 1000

THROUGHPUT = "Lightning: Throughput.update, compute"
MONITOR = "Lightning: ThroughputMonitor"
COMPOSER = "composer: SpeedMonitor.batch_end"
TOKRATE = "tokrate: update, record"
COLLATED = "tokrate: counted by a CountingCollator in the workers, record"
TORCHTUNE = "torchtune: the recipe's own lines"
LACKS = {
    TORCHTUNE: "one class, of the last step before a log alone; no phases; forgets on resume",
    THROUGHPUT: "slots only, padding included; the caller keeps the sums",
    MONITOR: "slots only, padding included; waits for the device each step",
    COMPOSER: "slots only, padding included; counted by the trainer, which is not in the time",
}


class Torchtune:
    """Lines of the recipe `full_finetune_single_device` of torchtune 0.6.1.

    It starts anew with each step, so that what it logs is of the last step alone.
    """

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels
        self.num_tokens: Any = 0
        self.began_s = time.perf_counter()

    def step(self) -> None:
        self.num_tokens, self.began_s = 0, time.perf_counter()
        current_num_tokens = (self.labels != IGNORE_INDEX).sum()
        self.num_tokens += current_num_tokens

    def numbers(self) -> float:
        time_per_step = time.perf_counter() - self.began_s
        return float(self.num_tokens / time_per_step)  # its logger reads it


class LightningThroughput:
    """As its documentation shows it."""

    def __init__(self, labels: torch.Tensor) -> None:
        from lightning.fabric.utilities.throughput import Throughput

        self.labels = labels
        self.throughput = Throughput(window_size=STEPS)
        self.began_s, self.batches, self.samples, self.lengths = time.perf_counter(), 0, 0, 0

    def step(self) -> None:
        self.batches += 1
        self.samples += self.labels.shape[0]
        self.lengths += self.labels.numel()
        self.throughput.update(
            time=time.perf_counter() - self.began_s,
            batches=self.batches,
            samples=self.samples,
            lengths=self.lengths,
        )

    def numbers(self) -> object:
        return self.throughput.compute()


class LightningMonitor:
    """The callback, as the Trainer calls it after each batch."""

    def __init__(self, labels: torch.Tensor) -> None:
        from lightning.fabric.utilities.throughput import Throughput
        from lightning.pytorch.callbacks import ThroughputMonitor
        from lightning.pytorch.trainer.states import RunningStage, TrainerFn

        self.batch = labels
        connector = SimpleNamespace(should_update_logs=False, log_metrics=lambda *a, **k: None)
        self.trainer: Any = SimpleNamespace(
            precision_plugin=None,
            strategy=SimpleNamespace(root_device=torch.device("cpu")),
            state=SimpleNamespace(stage=RunningStage.TRAINING, fn=TrainerFn.FITTING),
            fit_loop=SimpleNamespace(total_batch_idx=0, _should_accumulate=lambda: False),
            _logger_connector=connector,
        )
        self.module: Any = SimpleNamespace(flops_per_batch=1)
        self.monitor = ThroughputMonitor(
            batch_size_fn=lambda batch: batch.shape[0],
            length_fn=lambda batch: batch.numel(),
            window_size=STEPS,
        )
        self.monitor._throughputs[RunningStage.TRAINING] = Throughput(window_size=STEPS)
        self.monitor.on_train_start(self.trainer)

    def step(self) -> None:
        self.monitor.on_train_batch_end(self.trainer, self.module, None, self.batch)

    def numbers(self) -> None:
        """The last step of a window logs as well."""
        self.trainer._logger_connector.should_update_logs = True
        self.monitor._compute(self.trainer, None)
        self.trainer._logger_connector.should_update_logs = False


class ComposerMonitor:
    """The callback, as the trainer's engine calls it after each batch, with real timestamps."""

    def __init__(self, labels: torch.Tensor) -> None:
        from composer.callbacks import SpeedMonitor
        from composer.core import Timestamp

        stamps = [Timestamp()]
        for _ in range(STEPS * 100):
            stamps.append(
                stamps[-1].to_next_batch(labels.shape[0], labels.numel(), timedelta(seconds=1))
            )
        self.stamps = cycle(stamps)
        self.state: Any = SimpleNamespace(model=SimpleNamespace(module=None), timestamp=stamps[0])
        self.logger: Any = SimpleNamespace(log_metrics=lambda metrics: None)
        self.monitor = SpeedMonitor(window_size=STEPS)

    def step(self) -> None:
        self.state.timestamp = next(self.stamps)
        self.monitor.batch_end(self.state, self.logger)

    def numbers(self) -> None:
        """It has logged them with each step."""


class Tokrate:
    """Update each step, a record every 10."""

    def __init__(self, labels: torch.Tensor, mask: torch.Tensor) -> None:
        self.labels, self.mask = labels, mask
        self.meter = ThroughputMeter(labels_aligned=True)
        self.steps = 0
        self.step()
        self.numbers()  # the first window is checked in full

    def step(self) -> None:
        self.steps += 1
        self.meter.update(self.labels, attention_mask=self.mask)

    def numbers(self) -> object:
        return self.meter.record(self.steps)


class TokrateCollated(Tokrate):
    """The batch was counted where it was made; the loop only adds."""

    def __init__(self, labels: torch.Tensor, mask: torch.Tensor) -> None:
        collate = CountingCollator(
            lambda rows: {"labels": labels, "attention_mask": mask}, labels_aligned=True
        )
        self.counts = collate([]).counts
        super().__init__(labels, mask)

    def step(self) -> None:
        self.steps += 1
        self.meter.add(self.counts)


def contenders(labels: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
    """Name → something with `step` and `numbers`."""
    found: dict[str, Any] = {TORCHTUNE: Torchtune(labels)}
    if find_spec("lightning"):
        found |= {THROUGHPUT: LightningThroughput(labels), MONITOR: LightningMonitor(labels)}
    if find_spec("composer"):
        found[COMPOSER] = ComposerMonitor(labels)
    ours = {TOKRATE: Tokrate(labels, mask), COLLATED: TokrateCollated(labels, mask)}
    return found | ours


def block_of(contender: Any) -> Call:
    """Ten steps and the numbers."""

    def block() -> None:
        for _ in range(STEPS):
            contender.step()
        contender.numbers()

    return block


def measure_host() -> Table:
    """Microseconds a step."""
    blocks = {
        name: block_of(one) for name, one in contenders(*make_batch(8, 4096, torch.int64)).items()
    }
    times = {name: found / STEPS for name, found in interleave(blocks, ROUNDS).items()}
    medians = {name: float(np.median(found)) for name, found in times.items()}
    peers = {n: m for n, m in medians.items() if not n.startswith("tokrate")}
    cheapest = min(peers, key=peers.__getitem__)
    return Table(
        title=f"Measure, host{BESIDE}",
        about="one step, its share of the numbers every 10 steps included; 8 × 4096 int64",
        columns={"median": "µs", "p99": "µs"},
        rows=rows_of(times, LACKS),
        baseline=TORCHTUNE,
        ratio_of="median",
        aim="the lowest cost of all",
        result=(
            f"Counted in the loop {medians[TOKRATE]:.1f} µs a step, in the workers "
            f"{medians[COLLATED]:.1f} µs; the cheapest peer takes {peers[cheapest]:.1f} µs "
            f"({cheapest.partition(':')[0]}, {LACKS[cheapest]})"
        ),
        reached=medians[COLLATED] <= min(peers.values()),
    )


def measure_device() -> Table:
    """Kernels and waits, counted."""
    found = {}
    for name, one in contenders(*make_batch(8, 4096, torch.int64)).items():
        block = block_of(one)
        with as_if_on_a_device():
            block()
            with Watch() as watch:
                block()
        waits = [stall for stall in watch.stalls if stall not in WITHIN]
        found[name] = (len(watch.kernels) / STEPS, len(waits) / STEPS)
    # On a device the callback calls torch.cuda.synchronize in each step, which no CPU shows.
    if MONITOR in found:
        kernels, waits = found[MONITOR]
        found[MONITOR] = (kernels, waits + 1)
    stalls = {name: stalls for name, (_, stalls) in found.items()}
    return Table(
        title=f"Measure, device{BESIDE}",
        about="kernels queued and waits for the device in one step, the numbers included",
        columns={"waits": "", "kernels": ""},
        rows=[
            Row(
                name=name,
                values={"waits": number, "kernels": kernels},
                lacks=LACKS.get(name, ""),
                ours=name.startswith("tokrate"),
            )
            for name, (kernels, number) in found.items()
        ],
        baseline=TORCHTUNE,
        ratio_of="kernels",
        aim="fewest waits: none in a step",
        result=(
            f"{stalls[TOKRATE]:.1f} waits a step: none in `update`, one in `record`, whose clock "
            "would be wrong without it; none at all when the workers count"
        ),
        reached=stalls[TOKRATE] <= 1 / STEPS,
        plot=False,
    )


def measure() -> Part:
    """Both tables."""
    torch.set_num_threads(1)
    versions = versions_of("torch", "numpy", "torchtune", "lightning")
    if composer := versions_of("mosaicml"):
        versions = composer | {"mosaicml's torch": versions["torch"]}
    return Part(name="measure", tables=[measure_host(), measure_device()], versions=versions)


if __name__ == "__main__":
    main(measure)

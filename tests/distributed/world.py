"""What four real ranks do; run by torchrun from test_world.py.

Each scenario is a function that all ranks call at the same time and whose result says what this
rank saw. The results of all scenarios go into one JSON file for each rank: processes are started
once, and the tests that look at the files have nothing to wait for.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import tokrate.overdue
from driving import Clock
from tokrate import RankLayout, RunInfo, ThroughputMeter, TokenCounts, open_logger
from tokrate.errors import TokrateError

Scenario = Callable[[int, Path], Any]
SCENARIOS: dict[str, Scenario] = {}
RANKS = 4


def scenario(function: Scenario) -> Scenario:
    """Add a scenario under its function's name."""
    SCENARIOS[function.__name__] = function
    return function


# --- what the scenarios are made of --------------------------------------------------------------


def make_batch(number: int) -> dict[str, torch.Tensor]:
    """2 x 4 slots: 4 targets, 2 of prompt and 2 of padding, in other words for each number."""
    labels = torch.tensor([[-100, -100, 5, 6], [7, 8, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    return {"labels": torch.where(labels > 0, labels + 10 * number, labels), "attention_mask": mask}


def shard(batch: dict[str, torch.Tensor], part: int, parts: int) -> dict[str, torch.Tensor]:
    """The columns of the batch that one of several ranks is given."""
    return {name: tensor.chunk(parts, dim=1)[part] for name, tensor in batch.items()}


def joined(numbers: range) -> dict[str, torch.Tensor]:
    """Several batches as one, as a global batch is before it is shared out."""
    batches = [make_batch(number) for number in numbers]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def make_meter(ranks: RankLayout | None = None) -> tuple[ThroughputMeter, Clock]:
    """A meter for labels that stand where the loss reads them, and its clock."""
    clock = Clock()
    return ThroughputMeter(clock=clock, ranks=ranks, labels_aligned=True), clock


def measure(ranks: RankLayout | None, *batches: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The record of one window of 2 s, and whatever was said about it."""
    with said() as messages:
        meter, clock = make_meter(ranks)
        for batch in batches:
            meter.update(**batch)
        clock.now = 2.0
        return meter.record(1).to_dict() | {"said": messages}


@contextmanager
def said() -> Iterator[list[str]]:
    """What tokrate warned of meanwhile."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tokrate")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def refusal(call: Callable[[], Any]) -> str | None:
    """The words and the kind of the error that a call ends in; None when it does not."""
    try:
        call()
    except TokrateError as error:
        return f"{type(error).__name__}: {error}"
    return None


def mesh_of(**sizes: int) -> Any:
    """A mesh of the four ranks with named dimensions."""
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


class Collectives(TorchDispatchMode):
    """Lists the operations of torch.distributed that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


# --- a missing rank ------------------------------------------------------------------------------


@scenario
def one_rank_never_records(rank: int, out: Path) -> Any:
    """Rank 3 never calls record; the group's time-out is 2 s. First: the watcher starts here."""
    group = dist.new_group(list(range(RANKS)), timeout=timedelta(seconds=2))
    meter, _ = make_meter(RankLayout(group=group))
    tokrate.overdue.OVERDUE_S = 0.5  # until the next time that the watcher wakes up
    began = time.monotonic()
    with said() as messages:
        refused = None if rank == 3 else refusal(lambda: meter.record(7))
    tokrate.overdue.OVERDUE_S = 60.0
    seconds = time.monotonic() - began
    state = meter.state_dict()
    return {"refused": refused, "seconds": seconds, "state": state, "said": messages}


# --- counted before sharding, or on the shard ----------------------------------------------------
# One batch is 8 raw, 4 active, 2 padded; so that is what four ranks together see of one batch.


@scenario
def dp_before(rank: int, out: Path) -> Any:
    """Every rank counts the global batch of 4 x 8 slots and trains on a quarter."""
    return measure(RankLayout.from_mesh(mesh_of(dp=4), distinct=()), joined(range(4)))


@scenario
def dp_shard(rank: int, out: Path) -> Any:
    """Each rank counts its own batch."""
    return measure(RankLayout.from_mesh(mesh_of(dp=4)), make_batch(rank))


@scenario
def tp_before(rank: int, out: Path) -> Any:
    """All ranks are fed, and count, the same batch."""
    return measure(RankLayout.from_mesh(mesh_of(tp=4)), make_batch(0))


@scenario
def tp_shard(rank: int, out: Path) -> Any:
    """Sequence parallel: each rank counts its columns."""
    layout = RankLayout.from_mesh(mesh_of(tp=4), distinct=("tp",))
    return measure(layout, shard(make_batch(0), rank, 4))


@scenario
def cp_before(rank: int, out: Path) -> Any:
    """Context parallel, counted before the batch was cut into columns."""
    return measure(RankLayout.from_mesh(mesh_of(cp=4), distinct=()), make_batch(0))


@scenario
def cp_shard(rank: int, out: Path) -> Any:
    """Context parallel, each rank counts its columns."""
    return measure(RankLayout.from_mesh(mesh_of(cp=4)), shard(make_batch(0), rank, 4))


@scenario
def pp_before(rank: int, out: Path) -> Any:
    """All stages are fed the same batch."""
    return measure(RankLayout.from_mesh(mesh_of(pp=4)), make_batch(0))


@scenario
def pp_shard(rank: int, out: Path) -> Any:
    """Only the last stage has labels, and counts."""
    layout = RankLayout.from_mesh(mesh_of(pp=4), distinct=("pp",))
    return measure(layout, *([make_batch(0)] if rank == RANKS - 1 else []))


@scenario
def dp_tp_before(rank: int, out: Path) -> Any:
    """Two pairs of tensor parallel ranks; a pair is fed the same batch."""
    mesh = mesh_of(dp=2, tp=2)
    return measure(RankLayout.from_mesh(mesh), make_batch(mesh.get_local_rank("dp")))


@scenario
def dp_tp_shard(rank: int, out: Path) -> Any:
    """The same with sequence parallel, counted on the columns."""
    mesh = mesh_of(dp=2, tp=2)
    batch = shard(make_batch(mesh.get_local_rank("dp")), mesh.get_local_rank("tp"), 2)
    return measure(RankLayout.from_mesh(mesh, distinct=("dp", "tp")), batch)


@scenario
def dp_cp_before(rank: int, out: Path) -> Any:
    """Two pairs of context parallel ranks, counted before the batch was cut."""
    mesh = mesh_of(dp=2, cp=2)
    layout = RankLayout.from_mesh(mesh, distinct="dp")
    return measure(layout, make_batch(mesh.get_local_rank("dp")))


@scenario
def dp_cp_shard(rank: int, out: Path) -> Any:
    """The same, counted on the columns."""
    mesh = mesh_of(dp=2, cp=2)
    batch = shard(make_batch(mesh.get_local_rank("dp")), mesh.get_local_rank("cp"), 2)
    return measure(RankLayout.from_mesh(mesh), batch)


@scenario
def part_of_the_world(rank: int, out: Path) -> Any:
    """Meshes over two of the four ranks: one dimension of a mesh, and two of three."""
    line = mesh_of(dp=2, tp=2)["dp"]
    pages = mesh_of(pp=2, dp=2, tp=1)
    return [
        measure(RankLayout.from_mesh(line), make_batch(rank)),
        measure(RankLayout.from_mesh(pages["dp", "tp"]), make_batch(rank)),
        measure(RankLayout.from_mesh(pages["dp", "tp"], devices=2), make_batch(rank)),
    ]


# --- uneven ranks and clocks ---------------------------------------------------------------------


@scenario
def uneven(rank: int, out: Path) -> Any:
    """100, 200, 300 and 400 tokens in 1, 2, 3 and 4 s; waits and phases differ too."""
    meter, clock = make_meter()
    meter.add(TokenCounts(100 * (rank + 1), 100 * (rank + 1), 0))
    with meter.phase("eval"):
        clock.now += 10.0 - rank
    clock.now += rank + 1.0
    return meter.record(1).to_dict()


@scenario
def one_rank_without_tokens(rank: int, out: Path) -> Any:
    """The last rank ran out of data."""
    return measure(None, *([make_batch(rank)] if rank < 3 else []))


@scenario
def waiting_for_data(rank: int, out: Path) -> Any:
    """Rank 2 waits for 1 s; the others watch no loader."""
    meter, clock = make_meter()

    def slow() -> Iterator[int]:
        clock.now += 1.0
        yield 1

    if rank == 2:
        list(meter.watch(slow()))
    clock.now = 4.0
    return meter.record(1).to_dict()


# --- writers -------------------------------------------------------------------------------------


def log_once(layout: RankLayout, folder: Path) -> None:
    """What a loop does: open, record, log, without any `if`."""
    meter, clock = make_meter(layout)
    with open_logger("none", run=RunInfo("r"), dir=folder, ranks=layout) as logger:
        clock.now = 1.0
        logger.log(meter.record(1))


@scenario
def writers(rank: int, out: Path) -> Any:
    """Each writer in turn; each rank would make a folder of its own if it made one."""
    mesh = mesh_of(pp=2, dp=2)
    last_stage = int(mesh.mesh[-1].flatten()[0])
    made = {}
    for name, writer in {"first": 0, "last": RANKS - 1, "first of last stage": last_stage}.items():
        folder = out / "writers" / name / str(rank)
        log_once(RankLayout.from_mesh(mesh, writer=writer), folder)
        journals = [path.read_text().splitlines() for path in folder.rglob("journal.jsonl")]
        made[name] = [[json.loads(line)["kind"] for line in lines] for lines in journals]
        made[f"{name}: exists"] = folder.exists()
    return made


# --- collectives ---------------------------------------------------------------------------------


@scenario
def collectives(rank: int, out: Path) -> Any:
    """What update, record, and a bare all_reduce call of torch.distributed."""
    meter, _ = make_meter()
    names = {}
    for step in (1, 2):
        with Collectives() as seen, warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):
                meter.update(**make_batch(rank + 4 * number))
            names[f"update {step}"] = seen.names.copy()
            meter.record(step)
            names[f"record {step}"] = seen.names
    with Collectives() as seen:
        dist.all_reduce(torch.zeros(1))
    return names | {"all_reduce": seen.names}


# --- what the ranks say --------------------------------------------------------------------------


@scenario
def same_batch(rank: int, out: Path) -> Any:
    """Ranks 1 and 3 are fed the same batch, unsaid; a later window says nothing more."""
    with said() as messages:
        meter, _ = make_meter()
        meter.update(**make_batch(1 if rank == 3 else rank))
        meter.record(1)
        meter.update(**make_batch(0))
        meter.record(2)
    return messages


@scenario
def same_batch_in_a_group(rank: int, out: Path) -> Any:
    """Ranks are called by their global numbers, and the group's own writer says it."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    layout = RankLayout(group=groups[rank % 2], writer=3)
    return measure(layout, make_batch(0))["said"]


@scenario
def all_masked_batches(rank: int, out: Path) -> Any:
    """Batches without a target are equal everywhere, and no reason to warn."""
    batch = make_batch(rank)
    return measure(None, batch | {"labels": torch.full((2, 4), -100)})["said"]


@scenario
def replicas_that_are_none(rank: int, out: Path) -> Any:
    """Two ranks in four are said to share a batch, and all four differ."""
    return measure(RankLayout(replicas=2), make_batch(rank))["said"]


# --- bad input -----------------------------------------------------------------------------------


@scenario
def refused_layouts(rank: int, out: Path) -> Any:
    """Layouts that cannot be."""
    group = dist.new_group([0, 1])
    mesh, unnamed = mesh_of(dp=2, tp=2), init_device_mesh("cpu", (4,))
    odd = mesh_of(dp=2, ep=2)
    return {
        "group": refusal(lambda: RankLayout(group=group)),
        "replicas": refusal(lambda: ThroughputMeter(ranks=RankLayout(replicas=3))),
        "writer": refusal(lambda: ThroughputMeter(ranks=RankLayout(writer=4))),
        "dimension": refusal(lambda: RankLayout.from_mesh(mesh, distinct=("dp", "cp"))),
        "unnamed": refusal(lambda: RankLayout.from_mesh(unnamed)),
        "unknown": refusal(lambda: RankLayout.from_mesh(odd)),
        "named": RankLayout.from_mesh(odd, distinct=("dp", "ep")).replicas,
    }


@scenario
def one_backward_clock(rank: int, out: Path) -> Any:
    """The clock of rank 2 runs backwards: all ranks say so, and the next record is whole."""
    meter, clock = make_meter()
    meter.add(TokenCounts(8, 4, 2))
    clock.now = -1.0 if rank == 2 else 1.0
    refused = refusal(lambda: meter.record(1))
    before = meter.state_dict()
    clock.now = 2.0
    return {"refused": refused, "before": before, "record": meter.record(1).to_dict()}


@scenario
def smaller_step(rank: int, out: Path) -> Any:
    """A step back is refused on each rank before any collective."""
    meter, clock = make_meter()
    clock.now = 1.0
    meter.record(5)
    return {"refused": refusal(lambda: meter.record(4)), "state": meter.state_dict()}


@scenario
def other_steps(rank: int, out: Path) -> Any:
    """Rank 3 left out record(10) and meets the others in its record(20)."""
    meter, clock = make_meter()
    meter.add(TokenCounts(8, 4, 2))
    clock.now = 1.0
    refused = refusal(lambda: meter.record(20 if rank == 3 else 10))
    return {"refused": refused, "state": meter.state_dict()}


# --- restarts ------------------------------------------------------------------------------------


@scenario
def resumed_on_two_ranks(rank: int, out: Path) -> Any:
    """Four ranks count 4 x 8 slots in 2 s, then two of them 2 x 8 more in 1 s."""
    meter, clock = make_meter()
    meter.update(**make_batch(rank))
    clock.now = 2.0
    meter.record(1)
    state = meter.state_dict()
    pair = dist.new_group([0, 1])
    if rank > 1:
        return {"state": state}
    resumed, clock = make_meter(RankLayout(group=pair, devices=2))
    resumed.load_state_dict(state)
    resumed.update(**make_batch(rank))
    clock.now = 1.0
    return {"state": state, "record": resumed.record(2).to_dict()}


@scenario
def distributed_checkpoint(rank: int, out: Path) -> Any:
    """The meter itself, named in a checkpoint that all ranks write and read."""
    meter, clock = make_meter()
    meter.update(**make_batch(rank))
    clock.now = 2.0
    meter.record(1)
    dcp.save({"meter": meter, "model": torch.ones(2)}, checkpoint_id=out / "dcp")
    resumed, _ = make_meter()
    dcp.load({"meter": resumed, "model": torch.zeros(2)}, checkpoint_id=out / "dcp")
    return [meter.state_dict(), resumed.state_dict()]


def main() -> None:
    """Run all scenarios, and keep what this rank saw."""
    out = Path(sys.argv[1])
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    results = {}
    for name, run in SCENARIOS.items():
        try:
            results[name] = run(rank, out)
        except Exception:
            results[name] = {"crashed": traceback.format_exc()}
        dist.barrier()
    (out / f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

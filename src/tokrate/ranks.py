"""Many ranks: which of them count the same tokens, and one collective for each window.

rank 0: report ─┐
rank 1: report ─┼─ all_gather ──► the same table on every rank ──► one record
rank n: report ─┘

Why a gather and not a sum, and what it costs at 16,384 ranks: docs/explanation/scale.md.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

from tokrate.errors import RankError
from tokrate.overdue import said_when_overdue
from tokrate.window import REPORT_INTEGERS, Report, Reports, lone_batches, same_batches

DISTINCT = ("dp", "dp_replicate", "dp_shard", "cp")
"""Mesh dimensions whose ranks count different tokens, as far as a mesh has them."""
REPLICATED = ("tp", "pp")
"""Mesh dimensions whose ranks are fed the same tokens."""
SHOWN_RANKS = 8
CALL_ON_ALL = "call record on all ranks at the same steps, not only on the one that logs"
LET_GO_S = 5.0
"""How long the end of a process waits, at most, until torch has let go of the last window."""

_last: tuple[Any, ...] = ()
"""The tensors of the last collective."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Which ranks are summed, and how many of them counted the same tokens.

    Raises:
        RankError: `replicas` does not divide the group, or this rank is not in it.
    """

    group: Any = None
    """`torch.distributed` process group to sum over; None is all ranks (or one process)."""
    replicas: int = 1
    """Ranks of the group that counted the same tokens (tensor or pipeline parallel; context
    parallel when counted before sharding)."""
    devices: int | None = None
    """What per-device rates divide by; None is the world size."""
    writer: int = 0
    """Global rank that logs."""

    def __post_init__(self) -> None:
        for name in ("replicas", "devices"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value != int(value) or value < 1):
                raise RankError(f"{name}={value!r}: expected a whole number of at least 1")
        if self.group is not None:
            self.check()

    @classmethod
    def from_mesh(cls, mesh: Any, distinct: Sequence[str] | None = None, **options: Any) -> Self:
        """Derive the layout from a `torch.distributed.device_mesh.DeviceMesh`.

        All ranks of the mesh are summed; those that differ only in the dimensions that are not
        distinct counted the same tokens. Where the mesh is a part of the world, all its ranks must
        make this call.

        Args:
            mesh: A mesh with named dimensions.
            distinct: Dimensions along which ranks counted different tokens. None: those of
                `DISTINCT` that the mesh has; its others must then be `REPLICATED` ones. Pass
                `("dp",)` when the batch was counted before context parallelism sharded it, and `()`
                when all ranks are fed the same tokens.
            options: `devices` and `writer`, as for `RankLayout`.

        Raises:
            RankError: The mesh has no names, lacks one that was given, or has one of which it is
                not known whether its ranks share tokens.
        """
        names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
        distinct = _known_distinct(names) if distinct is None else distinct
        distinct = (distinct,) if isinstance(distinct, str) else distinct
        if not names or not set(distinct) <= set(names):
            raise RankError(
                f"distinct={distinct!r} and a mesh with the dimensions {names or '(no names)'}: "
                "expected names of the mesh; name the dimensions along which ranks count "
                'different tokens, e.g. distinct=("dp_shard",)'
            )
        shared = (n for name, n in zip(names, mesh.shape, strict=True) if name not in distinct)
        return cls(group=_group_of(mesh), replicas=math.prod(shared), **options)

    @property
    def size(self) -> int:
        """Ranks in the group; 1 when nothing is distributed."""
        dist = distributed()
        return int(dist.get_world_size(self.group)) if dist else 1

    @property
    def device_count(self) -> int:
        """What per-device rates divide by."""
        dist = distributed()
        return self.devices or (int(dist.get_world_size()) if dist else 1)

    @property
    def is_writer(self) -> bool:
        """Whether this process is the one that logs."""
        return global_rank() == self.writer

    def check(self) -> None:
        """Refuse a layout that cannot be, as soon as the process group is there.

        Raises:
            RankError: As said for the class.
        """
        dist = distributed()
        if dist is None:
            if self.group is not None:
                raise RankError(
                    "a process group was given but torch.distributed is not initialised: call "
                    "torch.distributed.init_process_group first"
                )
            return
        if self.group is not None and dist.get_rank(self.group) < 0:
            raise RankError(
                f"rank {dist.get_rank()} is not in the group that was given: expected a group "
                "with this rank; every rank must make its layout from its own group"
            )
        if self.size % self.replicas:
            raise RankError(
                f"replicas={self.replicas} does not divide the {self.size} ranks of the group: "
                "expected how many ranks share the same tokens (the product of the tensor and "
                "pipeline parallel sizes, say)"
            )
        if not 0 <= self.writer < dist.get_world_size():
            raise RankError(
                f"writer={self.writer} is no rank: expected 0 to {dist.get_world_size() - 1}"
            )

    def gather(self, report: Report) -> Reports:
        """Every rank's report, in rank order. One collective when there are several ranks.

        Raises:
            RankError: The collective failed, as it does when a rank never calls `record`, or the
                ranks closed different windows.
        """
        self.check()
        if self.size == 1:
            return Reports.of([report])
        torch = sys.modules["torch"]
        ints = REPORT_INTEGERS
        row = torch.tensor(report[:ints], dtype=torch.int64)
        # The bits of the seconds travel as integers: one collective, and nothing is rounded.
        times = torch.tensor(report[ints:], dtype=torch.float64).view(torch.int64)
        mine = torch.cat((row, times)).to(_device_of(self.group))
        # A group's own time-out comes after 10 or 30 minutes, and NCCL's ends the process from a
        # thread of its own: what is waited for must be said before.
        waiting = (
            f"rank {global_rank()} waits for every rank of the group to call "
            f"meter.record(step={report.step})"
        )
        try:
            with said_when_overdue(f"{waiting}, and has for a while; {CALL_ON_ALL}"):
                table = _all_gather(mine, self.size, self.group).cpu()
        except RuntimeError as error:
            raise RankError(
                f"{waiting}, and the process group gave up: {error}. {CALL_ON_ALL}; if a rank "
                "died, its own error says why"
            ) from error
        columns = table.view(self.size, len(report)).t().contiguous()
        counts, seconds = columns[:ints].tolist(), columns[ints:].view(torch.float64).tolist()
        reports = Reports(*counts, *seconds)
        self._check_steps(reports.step)
        return reports

    def _check_steps(self, steps: Sequence[int]) -> None:
        if min(steps) == max(steps):
            return
        calls = (
            f"record(step={step}) on {self.named([r for r, s in enumerate(steps) if s == step])}"
            for step in sorted(set(steps))[:SHOWN_RANKS]
        )
        raise RankError(
            f"the ranks closed different windows: {', '.join(calls)}; expected the same step on "
            "all: a rank left out a call of record, or made one more than the others"
        )

    def doubts(self, checksums: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Where the ranks' first batches do not look as declared: what about, and the message.

        Every over-count in the field began with ranks that were fed the same batch unsaid.

        Args:
            checksums: Of each rank's first batch, in rank order; 0 where there is none.
        """
        if not any(checksums):  # nearly always: only the first window has any
            return
        replicas = self.replicas
        if same := same_batches(checksums, replicas):
            groups = " and ".join(self.named(ranks) for ranks in same[:SHOWN_RANKS])
            doubt = (
                f"{groups} counted the same first batch although replicas={replicas}: "
                "their tokens are added up as if they were different ones. Declare "
                f"RankLayout(replicas={len(same[0])}), or RankLayout.from_mesh(...), if they are "
                "tensor, pipeline or context parallel; else check the sampler"
            )
            yield "same batch", doubt
        if lone := lone_batches(checksums, replicas):
            doubt = (
                f"{self.named(sorted(chain(*lone)))} counted a first batch that fewer than "
                f"replicas={replicas} ranks counted: their tokens are divided by {replicas} all "
                "the same. Declare how many ranks are fed the same tokens (1 when context "
                "parallel ranks count their shards)"
            )
            yield "lone batch", doubt

    def named(self, ranks: Sequence[int]) -> str:
        """How to call some ranks of the group in a message: by their global numbers."""
        dist = distributed()
        if dist and self.group is not None:
            world = dist.get_process_group_ranks(self.group)
            ranks = [world[rank] for rank in ranks]
        more = len(ranks) - SHOWN_RANKS
        shown = ", ".join(str(rank) for rank in ranks[:SHOWN_RANKS])
        return f"ranks [{shown}]" + (f" and {more} more" if more > 0 else "")


def distributed() -> Any:
    """The module `torch.distributed` if a process group is up, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def global_rank() -> int:
    """Rank of this process, also between the launch by torchrun and `init_process_group`."""
    dist = distributed()
    return int(dist.get_rank()) if dist else int(os.environ.get("RANK", "0"))


def _known_distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The dimensions that are distinct by their names.

    Raises:
        RankError: A name says nothing: to guess would be to count wrong.
    """
    unknown = [name for name in names if name not in (*DISTINCT, *REPLICATED)]
    if unknown:
        raise RankError(
            f"the mesh has the dimensions {tuple(names)}, and {', '.join(unknown)} says nothing of "
            f"whether its ranks share tokens: known are {DISTINCT} (different tokens) and "
            f"{REPLICATED} (the same); name the different ones in distinct="
        )
    return tuple(name for name in names if name in DISTINCT)


def _group_of(mesh: Any) -> Any:
    """A process group over all ranks of the mesh; None (all ranks) where the mesh is the world."""
    dist = distributed()
    if dist is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _all_gather(mine: Any, size: int, group: Any) -> Any:
    """The rows of all ranks in one flat tensor."""
    global _last
    dist = sys.modules["torch"].distributed
    table = mine.new_empty(size * mine.numel())
    # torch 2.13 renamed it and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(table, mine, group=group)
    if not _last:
        atexit.register(_wait_until_let_go)
    _last = (mine, table)
    return table


def _wait_until_let_go() -> None:
    """Let the threads of a process group drop the last tensors while there still is an interpreter.

    A thread of gloo's does so a moment after the collective has returned, and takes the GIL for
    it. Before Python 3.14 whoever asks for the GIL of an interpreter that ends is made to exit,
    which torch's C++ answers with SIGABRT: torchrun takes a training that is done for a failure.
    """
    global _last
    until = time.monotonic() + LET_GO_S
    while any(_held(tensor) for tensor in _last) and time.monotonic() < until:
        time.sleep(0.001)
    _last = ()


def _held(tensor: Any) -> bool:
    """Whether anybody but Python holds the tensor; no public name says it."""
    return hasattr(tensor, "_use_count") and tensor._use_count() > 1


def _device_of(group: Any) -> Any:
    """Device on which the group moves data: the CPU where it can, so that no stream waits."""
    torch = sys.modules["torch"]
    group = group or torch.distributed.group.WORLD
    kinds = {device.type for device in group._device_types}  # no public name says it
    if not kinds or "cpu" in kinds:
        return torch.device("cpu")
    kind = min(kinds)
    return torch.device(kind, torch.get_device_module(kind).current_device())

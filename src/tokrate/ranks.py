"""Many ranks: which of them count the same tokens, and one collective for each window.

rank 0: report ─┐
rank 1: report ─┼─ all_gather ──► the same table on every rank ──► one record
rank n: report ─┘
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tokrate.errors import RankError
from tokrate.window import REPORT_INTEGERS, Report


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
    def from_mesh(cls, mesh: Any, distinct: Sequence[str] = ("dp", "cp"), **options: Any) -> Self:
        """Derive the layout from a `torch.distributed.device_mesh.DeviceMesh`.

        All ranks of the mesh are summed; those that differ only in the dimensions that are not
        named counted the same tokens.

        Args:
            mesh: A mesh with named dimensions.
            distinct: Dimensions along which ranks counted different tokens. Leave out `"cp"` when
                the batch was counted before context parallelism sharded it. Names that the mesh
                lacks are ignored as long as one is there.
            options: `devices` and `writer`, as for `RankLayout`.

        Raises:
            RankError: The mesh has no names, or none of those given.
        """
        names = tuple(getattr(mesh, "mesh_dim_names", None) or ())
        if not set(distinct) & set(names):
            raise RankError(
                f"the mesh has dimensions {names or '(without names)'}: expected at least one of "
                f"{tuple(distinct)}; name the dimensions along which ranks see different tokens "
                'in distinct=, e.g. distinct=("dp_shard",)'
            )
        sizes = dict(zip(names, mesh.shape, strict=True))
        replicas = 1
        for name, size in sizes.items():
            replicas *= 1 if name in distinct else size
        return cls(group=_group_of(mesh), replicas=replicas, **options)

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

    def gather(self, report: Report) -> list[Report]:
        """Every rank's report, in rank order. One collective when there are several ranks.

        Raises:
            RankError: The collective failed, as it does when a rank never calls `record`.
        """
        self.check()
        if self.size == 1:
            return [report]
        torch = sys.modules["torch"]
        ints = REPORT_INTEGERS
        row = torch.tensor(report[:ints], dtype=torch.int64)
        # The bits of the seconds travel as integers: one collective, and nothing is rounded.
        times = torch.tensor(report[ints:], dtype=torch.float64).view(torch.int64)
        device = _device_of(self.group)
        mine = torch.cat((row, times)).to(device)
        table = torch.empty(self.size * len(report), dtype=torch.int64, device=device)
        try:
            torch.distributed.all_gather_into_tensor(table, mine, group=self.group)
        except RuntimeError as error:
            raise RankError(
                f"rank {global_rank()} waited for every rank of the group to call "
                f"meter.record(step={report.step}), and the process group gave up: {error}. "
                "Call record on all ranks at the same steps, not only on the one that logs"
            ) from error
        table = table.cpu().view(self.size, len(report))
        seconds = table[:, ints:].contiguous().view(torch.float64)
        rows = zip(table[:, :ints].tolist(), seconds.tolist(), strict=True)
        return [Report(*counts, *times) for counts, times in rows]


def distributed() -> Any:
    """The module `torch.distributed` if a process group is up, else None. Imports nothing."""
    torch = sys.modules.get("torch")
    dist = getattr(torch, "distributed", None)
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def global_rank() -> int:
    """Rank of this process, also between the launch by torchrun and `init_process_group`."""
    dist = distributed()
    return int(dist.get_rank()) if dist else int(os.environ.get("RANK", "0"))


def _group_of(mesh: Any) -> Any:
    """A process group over all ranks of the mesh; None (all ranks) where the mesh is the world."""
    dist = distributed()
    if dist is None or mesh.size() == dist.get_world_size():
        return None
    return mesh.get_group() if mesh.ndim == 1 else mesh._flatten().get_group()


def _device_of(group: Any) -> Any:
    """Device that the group's backend moves data on."""
    torch = sys.modules["torch"]
    if "nccl" in str(torch.distributed.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

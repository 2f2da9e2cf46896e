"""Two ranks train watched models in DDP and FSDP2, and rank 0 prints what was counted."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from integrations.test_watch_model import Model, make_batches, train
from tokrate import ThroughputMeter, watch_model


def sharded(model: Model) -> nn.Module:
    """The model under FSDP2, each layer a unit."""
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def run(name: str, called: Any, watched: Any) -> None:
    """Train this rank's batches and print the sum over the ranks."""
    meter = ThroughputMeter()
    with watch_model(watched, meter):
        train(called, make_batches(4)[dist.get_rank() :: 2], accumulate=2)
        record = meter.record(step=1)
    if dist.get_rank() == 0:
        print(f"{name}: {record.raw_tokens} {record.active_tokens} {record.padded_tokens}")  # noqa: T201 - what the test reads


def main() -> None:
    """Each way of wrapping a model."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Model())
    run("ddp outside", ddp, ddp)
    run("ddp inside", ddp, ddp.module)
    compiled = torch.compile(ddp, backend="eager")
    run("ddp compiled", compiled, ddp)
    fsdp = sharded(Model())
    run("fsdp2", fsdp, fsdp)
    fsdp = sharded(Model(checkpointed=True))
    run("fsdp2 checkpointed", fsdp, fsdp)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

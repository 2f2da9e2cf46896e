"""A loop of your own under Lightning Fabric: the meter as in any loop, and a logger.

    python examples/fabric_loop.py
    python examples/fabric_loop.py runs 2        on 2 processes

All metrics that `fabric.log` is given go into tokrate's journal, and the records with them.
"""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from lightning_fit import SmallModel, collate, make_documents
from torch.utils.data import DataLoader

from tokrate import RunInfo, ThroughputMeter
from tokrate.integrations.lightning import TokrateLogger


def main(folder: str = "runs", devices: str = "1") -> None:
    logger = TokrateLogger("none", run=RunInfo("fabric"), dir=folder)
    fabric = Fabric(accelerator="cpu", devices=int(devices), loggers=logger)
    fabric.launch()
    module = SmallModel()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model.mark_forward_method("loss_of")
    loader = fabric.setup_dataloaders(
        DataLoader(make_documents(), batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    )

    meter = ThroughputMeter()
    for step, batch in enumerate(meter.watch(loader), start=1):
        loss = model.loss_of(batch)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        meter.update(labels=batch["labels"], attention_mask=batch["attention_mask"])
        if step % 4 == 0:
            fabric.log("train/loss", loss, step=step)
            logger.log(meter.record(step))  # all ranks
    logger.close()


if __name__ == "__main__":
    main(*sys.argv[1:])

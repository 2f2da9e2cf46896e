"""What docs/how-to/restarts.md takes as given: a model, its data and an optimizer."""

from pathlib import Path

import torch


def train(meter, logger, steps):
    for step in steps:
        meter.update(labels=torch.tensor([[1, 2, 3, 4]]), attention_mask=torch.ones(1, 4))
        logger.log(meter.record(step))
    return step

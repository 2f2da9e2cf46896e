"""Fine-tune a small model on real text: a plain loop, and the lines that tokrate adds to it.

    python examples/finetune.py
    python examples/finetune.py logger=wandb layout=packed
    python examples/finetune.py "logger=[tensorboard,mlflow]" steps=100 dir=out
    python examples/finetune.py examples/finetune.yaml logger.wandb.mode=online

The lines marked `# tokrate` are all that a loop of your own needs.
"""

from __future__ import annotations

import sys
from itertools import islice

import torch
from omegaconf import DictConfig, OmegaConf

from tokrate import RunInfo, ThroughputMeter, open_logger  # tokrate
from tokrate.demo.batches import training_batches
from tokrate.demo.data import load_documents
from tokrate.demo.model import SmallTransformer, mean_loss

DEFAULTS = {
    "name": "finetune",
    "steps": 30,
    "batch_size": 16,
    "lr": 0.002,
    "layout": "padded",  # or packed
    "target": "answers",  # or all: the loss on prompts, too
    "log_every": 5,
    "dir": "runs",
    "logger": "tensorboard",
}


def read_config(arguments: list[str]) -> DictConfig:
    """The defaults, then YAML files, then key=value; each overrides what came before it."""
    files = [OmegaConf.load(argument) for argument in arguments if "=" not in argument]
    config = OmegaConf.merge(DEFAULTS, *files)
    for key, equals, text in (argument.partition("=") for argument in arguments):
        if equals:
            value = OmegaConf.from_dotlist([f"value={text}"]).value
            OmegaConf.update(config, key, value, merge=False)
    if unknown := sorted(set(config) - set(DEFAULTS)):
        sys.exit(f"unknown: {', '.join(unknown)}; expected {', '.join(DEFAULTS)}")
    return config


def main(config: DictConfig) -> None:
    documents, _ = load_documents()
    batches = training_batches(
        documents, layout=config.layout, target=config.target, rows=config.batch_size
    )
    batches = islice(batches, config.steps)
    model = SmallTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)

    run = RunInfo(name=config.name, config=config)  # tokrate
    meter = ThroughputMeter(labels_aligned=True)  # tokrate
    with open_logger(config.logger, run=run, dir=config.dir) as logger:  # tokrate
        for step, batch in enumerate(meter.watch(batches), start=1):  # tokrate: watch
            loss = mean_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            meter.update(labels=batch.labels, attention_mask=batch.documents)  # tokrate
            if step % config.log_every == 0:
                logger.log_metrics({"train/loss": loss}, step=step)  # tokrate
                logger.log(meter.record(step))  # tokrate


if __name__ == "__main__":
    main(read_config(sys.argv[1:]))

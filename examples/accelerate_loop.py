"""An Accelerate loop with gradient accumulation: the tracker logs and counts.

    python examples/accelerate_loop.py
    accelerate launch --cpu --num_processes 2 examples/accelerate_loop.py runs

The lines marked `# tokrate` are all that a loop of your own needs.
"""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from tokrate.integrations.accelerate import TokrateTracker  # tokrate

DOCUMENTS = [torch.arange(1, 6 + number * 5 % 24) for number in range(48)]
"""48 documents of 5 to 28 tokens."""


def collate(documents: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows padded to the longest; every token but the first of a row is a target."""
    ids = pad_sequence(documents, batch_first=True)
    mask = ids > 0
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }


def main(folder: str = "runs", logger: str = "none") -> None:
    tracker = TokrateTracker("accelerate-loop", logger, dir=folder)  # tokrate
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    accelerator.init_trackers("accelerate-loop", config={"lr": 0.1})
    config: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_attention_heads=2, **config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader: Any = DataLoader(DOCUMENTS, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    tracker.watch(model)  # tokrate

    step = 0
    for batch in tracker.meter.watch(loader):  # tokrate: tells the time spent waiting for data
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            accelerator.log({"train/loss": loss}, step=step)
            if step % 2 == 0:
                tracker.record(step)  # tokrate
    totals = tracker.meter.state_dict()
    accelerator.end_training()

    active = sum(len(document) - 1 for document in DOCUMENTS)
    print(f"by hand: {active} active")
    print(f"counted: {totals['total_active_tokens']} active")


if __name__ == "__main__":
    main(*sys.argv[1:])

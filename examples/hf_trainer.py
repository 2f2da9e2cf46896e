"""Fine-tune with transformers' `Trainer`: one line of tokrate, and the batches counted by hand.

    python examples/hf_trainer.py
    python examples/hf_trainer.py runs tensorboard

Nothing is downloaded: the model is made from a configuration, the data in code.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tokrate.integrations.transformers import TokrateCallback  # tokrate

LENGTH = 32


def make_row(index: int) -> dict[str, Any]:
    """A prompt of 4 tokens, an answer of 4 to 27, and padding up to 32 slots."""
    real = 8 + index * 5 % 24
    ids = [(index * 7 + place) % 60 + 1 for place in range(real)]
    tail = LENGTH - real
    return {
        "input_ids": ids + [0] * tail,
        "attention_mask": [1] * real + [0] * tail,
        "labels": [-100] * 4 + ids[4:] + [-100] * tail,
    }


def main(folder: str = "runs", logger: str = "none") -> None:
    rows = [make_row(index) for index in range(48)]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    callback = TokrateCallback(logger, run="hf-trainer", dir=folder)  # tokrate
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            logging_steps=2,
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            report_to="none",
        )
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
        trainer.train()
        totals = callback.meter.state_dict()

    active = sum(label != -100 for row in rows for label in row["labels"][1:])
    print(f"by hand: {len(rows) * LENGTH} slots, {active} active")
    print(f"counted: {totals['total_raw_tokens']} slots, {totals['total_active_tokens']} active")


if __name__ == "__main__":
    main(*sys.argv[1:])

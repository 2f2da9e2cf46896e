"""Tiny models, tokenizers and trainers of the Hugging Face kind, made in code."""

from __future__ import annotations

import json
import os
import runpy
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

IGNORED = -100
EXAMPLES = Path(__file__).parents[2] / "examples"


def tiny_llama() -> LlamaForCausalLM:
    """Two layers of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=258,
    )
    return LlamaForCausalLM(config)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that anybody can count by hand."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of 8 slots: a prompt of 2 tokens, an answer of 1 to 5, padding.

    Args:
        without: Keys to leave out.
        clock: Is told of each row that is fetched.
    """

    def __init__(self, number: int = 24, without: tuple[str, ...] = (), clock: Any = None) -> None:
        self.without = without
        self.number = number
        self.clock = clock

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.clock is not None:
            self.clock.now += 0.25
        real = 3 + index % 5
        ids = [(index * 7 + place) % 60 + 1 for place in range(real)]
        tail = 8 - real
        row = {
            "input_ids": ids + [258] * tail,
            "attention_mask": [1] * real + [0] * tail,
            "labels": [IGNORED] * 2 + ids[2:] + [IGNORED] * tail,
        }
        return {key: value for key, value in row.items() if key not in self.without}


class Counting(Trainer):
    """A trainer that remembers the number it normalised each step's loss by."""

    items: list[int]

    def get_batch_samples(self, *arguments: Any) -> Any:
        samples, items = super().get_batch_samples(*arguments)
        if items is not None:
            self.items = [*getattr(self, "items", []), int(items)]
        return samples, items


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    """Six steps of two micro-batches of two rows, logged every other step."""
    defaults = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder / "out"), **{**defaults, **options})


def journal(folder: Path) -> list[dict[str, Any]]:
    """The lines of the one journal below a folder."""
    (path,) = folder.rglob("journal.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(folder: Path) -> list[dict[str, Any]]:
    """The records in the one journal below a folder."""
    lines = (line.get("record") for line in journal(folder))
    return [record for record in lines if record]


def run_example(name: str, *arguments: str) -> None:
    """Call the `main` of an example, as its last line does."""
    runpy.run_path(str(EXAMPLES / name))["main"](*arguments)


def two_lines(printed: str) -> tuple[list[int], list[int]]:
    """The numbers that an example counted by hand, and those that tokrate counted."""
    by_hand, counted = (
        [int(word) for word in line.split() if word.isdigit()]
        for line in printed.splitlines()
        if line.startswith(("by hand:", "counted:"))
    )
    return by_hand, counted

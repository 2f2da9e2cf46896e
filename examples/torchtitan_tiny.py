r"""A configuration for torchtitan with tokrate in it: one call around what a registry returns.

    python examples/torchtitan_tiny.py tiny               writes a byte tokenizer and a data set
    PYTHONPATH=examples TINY=tiny torchrun --nproc-per-node 1 -m torchtitan.train \
        --module torchtitan_tiny --config tiny --hf_assets_path tiny --dump_folder tiny/out

Nothing is downloaded. torchtitan trains on accelerators; what it takes to run this on the CPU is in
tests/integrations/envs/torchtitan_on_cpu.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataLoader, HuggingFaceTextDataLoader
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from tokrate.integrations.torchtitan import with_tokrate

FOLDER = os.environ.get("TINY", "tiny")


def _load(path: str) -> Any:
    return load_dataset("json", data_files=f"{path}/data.jsonl", split="train")


DATASETS["tiny"] = DatasetConfig(
    path=FOLDER, loader=_load, sample_processor=lambda sample: sample["question"] + sample["answer"]
)


def plain() -> Trainer.Config:
    """What a registry returns: nothing of tokrate is in it."""
    spec = model_registry("debugmodel")
    text = HuggingFaceTextDataLoader.Config(dataset="tiny")
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(
            loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))
        ),
        optimizer=default_adamw(lr=8e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=256, steps=6, disable_cuda_graphs=True),
        dataloader=text,
        metrics=MetricsProcessor.Config(log_freq=2),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        validator=Validator.Config(enable=True, freq=4, steps=2, dataloader=text),
    )


def tiny() -> Trainer.Config:
    """The same, counted: rows of text without padding."""
    return with_tokrate(plain(), logger="none", name="tiny", id="tiny", dir=f"{FOLDER}/runs")


def plain_chat() -> Trainer.Config:
    """Questions are context, answers are targets, and what is left of a row is padding."""
    config = plain()
    config.dataloader = ChatDataLoader.Config(
        dataset="json",
        dataset_path="json",
        load_dataset_kwargs={"data_files": f"{FOLDER}/data.jsonl", "split": "train"},
        sample_processor=_as_messages,
    )
    return config


def chat() -> Trainer.Config:
    """The same, counted."""
    return with_tokrate(plain_chat(), name="chat", id="chat", dir=f"{FOLDER}/runs")


def _as_messages(sample: dict[str, str]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": sample["question"]},
        {"role": "assistant", "content": sample["answer"]},
    ]


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, and one for the end of a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: place for place, letter in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_data(folder: Path) -> None:
    """Questions and answers, one JSON line for each."""
    methods = {name: getattr(str, name).__doc__ for name in dir(str)}
    lines = [
        json.dumps({"question": f"What does str.{name} do?", "answer": text[:150]}) + "\n"
        for name, text in methods.items()
        if text
    ]
    (folder / "data.jsonl").write_text("".join(lines[:48]))


def main(name: str = "tiny") -> None:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_data(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

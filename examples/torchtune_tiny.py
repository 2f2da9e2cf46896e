r"""Make what a torchtune recipe reads from disk: a tiny model, a byte tokenizer and a data set.

    python examples/torchtune_tiny.py tiny
    tune run full_finetune_single_device --config examples/torchtune_finetune.yaml folder=tiny
    tune run full_finetune_single_device --config examples/torchtune_finetune.yaml folder=tiny \
        dataset.packed=True batch_size=1

Nothing is downloaded. The data set: the documentation of Python's own string methods.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import torch
from torchtune.models.llama3 import llama3

SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    "<|video|>",
)
MODEL = {
    "vocab_size": 256 + len(SPECIAL),
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "embed_dim": 16,
    "max_seq_len": 1024,
    "intermediate_dim": 32,
}


def write_tokenizer(folder: Path) -> None:
    """A token for each byte, and the special tokens of Llama 3 behind them."""
    lines = (f"{base64.b64encode(bytes([byte])).decode()} {byte}\n" for byte in range(256))
    (folder / "tokenizer.model").write_text("".join(lines))
    special = [{"id": 256 + place, "content": text} for place, text in enumerate(SPECIAL)]
    (folder / "special.json").write_text(json.dumps({"added_tokens": special}))


def write_data(folder: Path) -> None:
    """Questions and answers, one JSON line for each."""
    methods = {name: getattr(str, name).__doc__ for name in dir(str)}
    lines = [
        json.dumps({"input": f"What does str.{name} do?", "output": text[:200]}) + "\n"
        for name, text in methods.items()
        if text
    ]
    (folder / "data.jsonl").write_text("".join(lines[:32]))


def write_model(folder: Path) -> None:
    """Weights in torchtune's own format."""
    torch.manual_seed(0)
    (folder / "model").mkdir(exist_ok=True)
    torch.save(llama3(**MODEL).state_dict(), folder / "model" / "tiny.pt")


def main(name: str = "tiny") -> None:
    folder = Path(name)
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    write_data(folder)
    write_model(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

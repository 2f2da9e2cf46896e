"""Fine-tune on completions with TRL's `SFTTrainer`, padded or padding-free, counted by hand.

    python examples/trl_sft.py
    python examples/trl_sft.py padding-free runs tensorboard

Nothing is downloaded: the model is made from a configuration, the tokenizer and the data in code.
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tokrate.integrations.transformers import TokrateCallback  # tokrate

WORDS = "the quick brown fox jumps over the lazy dog and runs far away from every barking hound"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    ends = {"eos_token": "<eos>", "pad_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **ends)


def main(layout: str = "padded", folder: str = "runs", logger: str = "none") -> None:
    prompts = [f"{number} words: " for number in range(1, 17)]
    completions = [" ".join(WORDS.split()[:number]) for number in range(1, 17)]
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
        )
    )
    callback = TokrateCallback(logger, run=f"trl-{layout}", dir=folder)  # tokrate
    with tempfile.TemporaryDirectory() as output:
        config = SFTConfig(
            output,
            num_train_epochs=1,
            per_device_train_batch_size=4,
            logging_steps=2,
            padding_free=layout == "padding-free",
            max_length=None,
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            report_to="none",
        )
        SFTTrainer(
            model,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts, "completion": completions}),
            processing_class=make_tokenizer(),
            callbacks=[callback],
        ).train()
        totals = callback.meter.state_dict()

    active = sum(len(text) + 1 for text in completions)  # and the end-of-text token
    print(f"by hand: {active} active, {active + sum(map(len, prompts))} tokens")
    print(f"counted: {totals['total_active_tokens']} active, {totals['total_raw_tokens']} slots")


if __name__ == "__main__":
    main(*sys.argv[1:])

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
)
ids = list(range(1, 9))
rows = [{"input_ids": ids, "attention_mask": [1] * 8, "labels": [-100, *ids[1:]]}] * 8

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
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
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(64).reshape(8, 8) % 60 + 1
rows = [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids]
loader = torch.utils.data.DataLoader(rows, batch_size=2)

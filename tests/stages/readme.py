"""What README.md takes as given: a model, its data and an optimizer."""

import random
from types import SimpleNamespace

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

torch.manual_seed(0)
torch.set_num_threads(1)
methods = {name: getattr(str, name).__doc__ for name in dir(str)}
pairs = [(f"What does str.{name} do?", text) for name, text in methods.items() if text]


def collate(pairs):
    rows = [
        torch.tensor(list(f"{question}\n{answer}"[:400].encode())) for question, answer in pairs
    ]
    labels = [row.clone() for row in rows]
    for (question, _), row in zip(pairs, labels):
        row[: len(question) + 1] = -100
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 128)
        self.layers = torch.nn.GRU(128, 128, batch_first=True)
        self.head = torch.nn.Linear(128, 256)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.head(self.layers(self.embed(input_ids))[0])
        return SimpleNamespace(loss=cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:]))


model = Model()
optimizer = torch.optim.AdamW(model.parameters())
choose = random.Random(0)
loader = [collate(choose.sample(pairs, 16)) for _ in range(30)]

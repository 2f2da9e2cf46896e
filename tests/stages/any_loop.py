import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 16)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.embed(input_ids)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten())


class Other(nn.Module):
    def forward(self, tokens, targets):
        return tokens


class Pair(nn.Module):
    def forward(self, chosen, rejected):
        return chosen


model, other_model, pair_model = Model(), Other(), Pair()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids = torch.arange(24).reshape(3, 8) % 15 + 1
batches = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}] * 4
tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, -100]])
chosen, rejected = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6]])

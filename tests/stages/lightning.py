"""What docs/how-to/lightning.md takes as given: a module, its data and an optimizer."""

import warnings

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", ".*does not have many workers")
warnings.filterwarnings("ignore", ".*LeafSpec")
documents = [torch.arange(1, 1 + length) for length in (3, 9, 5, 1, 7, 2, 8, 4)]


def collate(documents):
    ids = pad_sequence(documents, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))

    def training_step(self, batch):
        loss = self.layers(batch["input_ids"]).mean()
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


module = Module()
loader = DataLoader(documents, batch_size=2, collate_fn=collate)

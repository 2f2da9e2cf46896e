"""What docs/how-to/count-in-workers.md takes as given: a model, its data and an optimizer."""

import warnings

import torch
from torch.nn.utils.rnn import pad_sequence

from tokrate import ThroughputMeter

warnings.filterwarnings("ignore", "This process .* is multi-threaded")  # DataLoader forks
documents = [torch.arange(10, 10 + length) for length in (3, 9, 5, 1, 7, 2, 8, 4)]


def collate(documents):
    ids = pad_sequence(documents, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def collate_tuples(documents):
    return tuple(collate(documents).values())


def train_on(input_ids, attention_mask, labels):
    pass


meter = ThroughputMeter()

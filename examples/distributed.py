"""Train on several ranks, and get one record: the tokens of all, the time of the slowest.

    torchrun --nproc-per-node 4 examples/distributed.py
    torchrun --nproc-per-node 4 examples/distributed.py runs

No line asks for the rank: all ranks make the same calls, and only one of them writes.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from tokrate import CountingCollator, RankLayout, RunInfo, ThroughputMeter, open_logger

VOCABULARY = 1000
ROWS = 4


def make_documents(number: int = 64) -> list[Tensor]:
    """Token ids of documents of all lengths."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 200, (number,), generator=random).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """Rows padded to the longest; each token but the last has the next one as its label."""
    ids = pad_sequence([document[:-1] for document in documents], batch_first=True)
    labels = [document[1:] for document in documents]
    return {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def main(folder: str = "runs") -> None:
    dist.init_process_group("gloo")  # "nccl" where there are GPUs
    documents = make_documents()
    loader = DataLoader(
        documents,  # type: ignore[arg-type]
        batch_size=ROWS,
        sampler=DistributedSampler(documents, shuffle=False),  # type: ignore[arg-type]
        collate_fn=CountingCollator(collate, labels_aligned=True),
    )
    layers = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    # Data parallel: each rank trains on batches of its own. Under tensor or pipeline parallelism
    # some ranks share theirs; RankLayout.from_mesh(mesh) says which.
    ranks = RankLayout(writer=0)
    meter = ThroughputMeter(ranks=ranks)
    with open_logger("none", run=RunInfo("distributed"), dir=folder, ranks=ranks) as logger:
        for batch in meter.watch(loader):
            logits = model(batch["input_ids"])
            nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        logger.log(meter.record(step=len(loader)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

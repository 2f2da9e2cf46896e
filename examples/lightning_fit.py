"""Fit with Lightning, and get the record: two lines beside what a fit has anyway.

    python examples/lightning_fit.py
    python examples/lightning_fit.py runs 2        on 2 processes
    tokrate compare runs/lightning

A second start goes on from the last checkpoint: same run, same curves, totals that go on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tokrate import RunInfo
from tokrate.integrations.lightning import TokrateCallback, TokrateLogger

VOCABULARY = 1000


def make_documents(number: int = 64, seed: int = 0) -> list[Tensor]:
    """Token ids of documents of all lengths."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 200, (number,), generator=random).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """Rows padded to the longest; padding is no target."""
    ids = pad_sequence(documents, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class SmallModel(lightning.LightningModule):
    """A bigram model: nothing of tokrate is in it."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))

    def loss_of(self, batch: dict[str, Tensor]) -> Tensor:
        """Mean loss over the targets."""
        logits = self.layers(batch["input_ids"])[:, :-1]  # slot i predicts token i + 1
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """As ever."""
        loss = self.loss_of(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor]) -> None:
        """As ever."""
        self.log("eval/loss", self.loss_of(batch), batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As ever."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])


def main(folder: str = "runs", devices: str = "1", epochs: str = "2") -> None:
    documents, others = make_documents(), make_documents(16, seed=1)
    last = Path(folder, "last.ckpt")
    loaders = [DataLoader(d, batch_size=4, collate_fn=collate) for d in (documents, others)]  # type: ignore[arg-type]
    run = RunInfo("lightning", id="lightning")  # with an id, a second start goes on with the run
    with TokrateLogger("none", run=run, dir=folder) as logger:
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=int(devices),
            max_epochs=int(epochs),
            accumulate_grad_batches=2,
            log_every_n_steps=2,
            logger=logger,
            callbacks=[TokrateCallback()],
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(SmallModel(), *loaders, ckpt_path=last if last.exists() else None)
    trainer.save_checkpoint(last)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Train with Ray: two workers, one record; a worker fails, and the totals go on.

    python examples/ray_train.py                 runs/ray on this machine
    python examples/ray_train.py /mnt/shared 8   a folder that all machines share, 8 workers

Without an argument more, worker 1 fails once at step 5: Ray starts all workers again, they go on
from the checkpoint, and the journal has one curve with two sessions.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from tokrate.integrations.ray import open_run

VOCABULARY, ROWS, STEPS, EVERY = 1000, 4, 8, 2


def make_documents(number: int = 64) -> list[Tensor]:
    """Token ids of documents of all lengths."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 200, (number,), generator=random).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=random) for length in lengths]


def collate(documents: list[Tensor]) -> dict[str, Tensor]:
    """Rows padded to the longest; padding is no target."""
    ids = pad_sequence(documents, batch_first=True)
    mask = (ids > 0).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def make_loader(rank: int, workers: int, done: int) -> DataLoader[Any]:
    """The batches of one worker that come after the steps that are done."""
    documents = make_documents()
    share = list(DistributedSampler(documents, workers, rank, shuffle=False))  # type: ignore[arg-type]
    rest = [documents[place] for place in share[done * ROWS :]]
    return DataLoader(rest, batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]


def train(config: dict[str, Any]) -> None:
    """What each worker does. The lines with `run` are tokrate's."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    layers = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY))
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            layers.load_state_dict(torch.load(Path(folder, "model.pt")))
    model = ray.train.torch.prepare_model(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with open_run(config["logger"], config=config) as run:
        loader = make_loader(rank, context.get_world_size(), done=run.step)
        for step, batch in enumerate(run.meter.watch(loader), start=run.step + 1):
            run.meter.update(labels=batch["labels"], attention_mask=batch["attention_mask"])
            fail_once(config["fails_at"], step, rank, Path(config["marker"]))
            logits = model(batch["input_ids"])[:, :-1]
            loss = nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"][:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                record = run.record(step, {"train/loss": loss})
                with tempfile.TemporaryDirectory() if rank == 0 else nullcontext() as folder:
                    if folder:
                        torch.save(layers.state_dict(), Path(folder, "model.pt"))
                        run.save(folder)
                    saved = Checkpoint.from_directory(folder) if folder else None
                    with run.meter.phase("checkpoint"):
                        ray.train.report({"active_tps": record.active_tps}, checkpoint=saved)


def fail_once(fails_at: int, step: int, rank: int, marker: Path) -> None:
    """Stand in for a machine that goes away."""
    if (step, rank) == (fails_at, 1) and not marker.exists():
        marker.touch()
        raise RuntimeError("the machine of worker 1 is gone")


def main(folder: str = "runs/ray", workers: str = "2", fails_at: str = "5") -> None:
    place = Path(folder).resolve()
    place.mkdir(parents=True, exist_ok=True)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={
            "logger": "none",
            "fails_at": int(fails_at),
            "marker": str(place / "failed"),
        },
        scaling_config=ScalingConfig(num_workers=int(workers)),
        run_config=RunConfig(
            name="alpaca", storage_path=str(place), failure_config=FailureConfig(max_failures=1)
        ),
    )
    print(trainer.fit().checkpoint)


if __name__ == "__main__":
    main(*sys.argv[1:])

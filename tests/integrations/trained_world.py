"""Two ranks train with `Trainer` in DDP; each prints the numbers it normalised its loss by."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from integrations.hugging import Counting, Rows, arguments, tiny_llama
from tokrate.integrations.transformers import TokrateCallback


def main(folder: str) -> None:
    """Four steps, logged every other one."""
    trainer = Counting(
        model=tiny_llama(),
        args=arguments(Path(folder), max_steps=4, ddp_backend="gloo"),
        train_dataset=Rows(32),
        callbacks=[TokrateCallback()],
    )
    trainer.train()
    items = trainer.items
    print(f"items {[sum(items[i : i + 2]) for i in range(0, len(items), 2)]}")  # noqa: T201 - what the test reads
    # Behind our last record the trainer gathers once more, and nobody waits until gloo's threads
    # have let go of that (see tokrate.ranks): a process that ends now may end with SIGABRT.
    time.sleep(0.5)


if __name__ == "__main__":
    main(*sys.argv[1:])

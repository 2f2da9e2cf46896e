"""Two processes train with Accelerate, accumulating gradients; each prints what it was fed."""

from __future__ import annotations

import sys

from accelerate import Accelerator

from integrations.test_accelerate import loader, train
from tokrate.integrations.accelerate import TokrateTracker


def main(folder: str) -> None:
    """Two epochs; all processes make the same calls."""
    tracker = TokrateTracker("world", dir=folder)
    accelerator = Accelerator(cpu=True, log_with=tracker, gradient_accumulation_steps=2)
    if accelerator.is_main_process:  # as many scripts have it
        accelerator.init_trackers("world", config={"rows": 2})
    fed = train(accelerator, tracker, loader(rows=22))
    print(f"fed {fed.raw} {fed.active} {fed.padded} end")  # noqa: T201 - what the test reads
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A run that loses a worker and goes on; started by torchrun from test_elastic.py.

Two ranks train 8 steps of 2 x 8 slots and 1 s each, and save every second step. In its first life
rank 1 is killed after step 5, so that torchrun starts both again from the checkpoint of step 4.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from driving import Clock
from tokrate import RunInfo, ThroughputMeter, TokenCounts, open_logger

STEPS = 8
LAST_STEP_OF_RANK_1 = 5


def save(state: dict[str, Any], path: Path) -> None:
    """Write the checkpoint whole or not at all, on rank 0."""
    if dist.get_rank() == 0:
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)
    dist.barrier()


def main() -> None:
    """Train on from the last checkpoint, if there is one."""
    out = Path(sys.argv[1])
    checkpoint = out / "checkpoint.pt"
    first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    resume_step = None
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        meter.load_state_dict(saved["meter"])
        resume_step = saved["step"]
    run = RunInfo("elastic", id="elastic-1", resume_step=resume_step)
    with open_logger("none", run=run, dir=out / "runs", ranks=meter.ranks) as logger:
        for step in range((resume_step or 0) + 1, STEPS + 1):
            meter.add(TokenCounts(8, 4, 2))
            clock.now += 1.0
            logger.log(meter.record(step))
            if step % 2 == 0:
                save({"step": step, "meter": meter.state_dict()}, checkpoint)
            dist.barrier()
            if first_life and dist.get_rank() == 1 and step == LAST_STEP_OF_RANK_1:
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

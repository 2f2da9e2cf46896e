"""Starts real processes with torchrun, and says what they said when they fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def torchrun(script: Path, *arguments: str, ranks: int, options: tuple[str, ...] = ()) -> str:
    """What `torchrun --standalone --nproc-per-node RANKS SCRIPT` prints, errors too.

    Raises:
        AssertionError: It ended with an error; the message holds all output.
    """
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), *options, str(script), *arguments),
    ]
    # A second life under torch 2.13 reads the addresses of the first one's dead workers out of the
    # store, unless each is given a store of its own.
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        command,
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout

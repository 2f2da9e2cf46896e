"""A small soak: memory stays flat, the cursor keeps up, entries travel in batches."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from faults.watching import adds_up, each_once, journal_steps, show, steps_shown
from tokrate.sync import sync_run
from toys import read_tracker

ENTRIES = 20_000
PROGRAM = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from faults.test_soak import rss_mib
from faults.watching import log_steps, wait_until
from tokrate import RunInfo, open_logger
spec = {{"console": False, "tensorboard": {{}}, "toys:FileTracker": {{"path": {out!r}}}}}
lags, memory = [], []
with open_logger(spec, run=RunInfo("a", id="a1"), dir={dir!r}) as logger:
    for first in range(0, {entries}, 1000):
        log_steps(logger, range(first, first + 1000))
        wait_until(lambda: max(s.waiting for s in logger.stats().backends.values()) < 1000)
        memory.append(rss_mib())
print(memory[3], memory[len(memory) // 2], memory[-1])
"""


def rss_mib() -> float:
    """What the process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def test_twenty_thousand_entries(tmp_path: Path) -> None:
    """Two backends behind a loop that only logs: no growth, and far fewer writes than entries."""
    out = tmp_path / "out"
    tests = str(Path(__file__).parents[1])
    program = PROGRAM.format(tests=tests, out=str(out), dir=str(tmp_path), entries=ENTRIES)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    start, middle, end = map(float, done.stdout.split())
    steps, others = read_tracker(out)
    writes = len([line for line in others if "batch" in line])
    show(f"RSS {start:.0f}, {middle:.0f}, {end:.0f} MiB; {ENTRIES / writes:.0f} entries in a write")
    assert end - start < 8.0
    assert writes < ENTRIES / 50
    assert steps == journal_steps(tmp_path / "a") == list(range(ENTRIES))
    assert steps_shown("tensorboard", tmp_path / "a") == each_once(range(ENTRIES))
    adds_up(sync_run(tmp_path / "a"), tmp_path / "a", shown={"tensorboard": ENTRIES})

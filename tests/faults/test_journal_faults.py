"""Faults under the journal itself: said once, counted, and training goes on."""

from __future__ import annotations

import os
import shutil
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.watching import (
    LEEWAY_S,
    adds_up,
    each_once,
    journal_steps,
    log_steps,
    show,
    steps_shown,
    wait_delivered,
)
from tokrate import RunInfo, open_logger
from tokrate.errors import JournalError, RunFolderError
from tokrate.sync import sync_run


def fill(ballast: Path) -> None:
    """Leave no byte free."""
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 50)


def test_full_disk_under_the_journal(
    tmp_path: Path, small_disk: Path, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Entries that find no room are counted; with room again, all goes on, and nothing is torn."""
    spec = {
        "console": False,
        "tensorboard": {"dir": str(tmp_path / "tb")},
        "mlflow": {"tracking_uri": store_uri},
    }
    ballast = small_disk / "ballast"
    with open_logger(spec, run=RunInfo("a", id="a1"), dir=small_disk) as logger:
        log_steps(logger, range(50))
        fill(ballast)
        log_steps(logger, range(50, 250))
        ballast.unlink()
        log_steps(logger, range(250, 300))
    folder = small_disk / "a"
    steps = journal_steps(folder)
    left_out = logger.stats().left_out["journal"]
    assert len(steps) + left_out == 300
    assert 150 < left_out <= 200
    assert set(steps) >= {*range(50), *range(250, 300)}
    shown = {
        "tensorboard": steps_shown("tensorboard", tmp_path / "tb" / "a"),
        "mlflow": steps_shown("mlflow", folder, store_uri, "a1"),
    }
    assert shown["tensorboard"] == shown["mlflow"] == each_once(steps)
    adds_up(logger.stats(), folder, shown=dict.fromkeys(shown, len(steps)))
    messages = [r.getMessage() for r in caplog.records if r.name == "tokrate"]
    assert len([m for m in messages if "No space left" in m and "left out" in m]) == 1
    assert len([m for m in messages if "cannot be kept" in m]) <= 2  # once for each backend
    assert len(messages) <= 4, messages


def test_no_room_for_the_first_line(small_disk: Path) -> None:
    """A disk that is full before training is an error of ours, and leaves nothing behind."""
    fill(small_disk / "ballast")
    with pytest.raises(RunFolderError, match="pass another dir="):
        open_logger({"console": False}, run=RunInfo("a"), dir=small_disk)
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


LIMITED = """
import resource, sys
sys.path.insert(0, {tests!r})
from faults.watching import log_steps, wait_delivered
from tokrate import RunInfo, open_logger
spec = {{"console": False, "tensorboard": {{}}}}
with open_logger(spec, run=RunInfo("a"), dir={dir!r}) as logger:
    log_steps(logger, range(100))
    wait_delivered(logger)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    log_steps(logger, range(100, 500))
    wait_delivered(logger)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    log_steps(logger, range(500, 600))
print(logger.stats().entries, logger.stats().left_out["journal"])
"""


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The same with a limit of the process, which needs no root: no line is torn, all counted."""
    program = LIMITED.format(tests=str(Path(__file__).parents[1]), dir=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    entries, left_out = map(int, done.stdout.split())
    steps = journal_steps(tmp_path / "a")
    assert (len(steps), entries + left_out) == (entries, 600)
    assert left_out > 100
    assert set(steps) >= {*range(100), *range(500, 600)}
    assert steps_shown("tensorboard", tmp_path / "a") == each_once(steps)
    assert done.stderr.count("left out") == 1


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run's folder on a file system that is read-only."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs root")
    try:
        with open_logger({"console": False}, run=RunInfo("a", id="a1"), dir=folder) as logger:
            log_steps(logger, range(10))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_read_only_file_system(read_only: Path) -> None:
    """A new run, a resumed one and a sync each say in one sentence what is wrong."""
    with pytest.raises(RunFolderError, match="Read-only file system"):
        open_logger({"console": False}, run=RunInfo("b"), dir=read_only)
    with pytest.raises(JournalError, match="Read-only file system"):
        open_logger({"console": False}, run=RunInfo("a", id="a1"), dir=read_only)
    with pytest.raises(JournalError, match="Read-only file system"):
        sync_run(read_only / "a", {"tensorboard": {}})


def test_the_run_folder_is_removed(
    tmp_path: Path, store_uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever removes the journal of a running job is told so once; the job goes on and ends."""
    spec = {"console": False, "mlflow": {"tracking_uri": store_uri}}
    run = RunInfo("a", id="a1")
    logger = open_logger(spec, run=run, dir=tmp_path, close_timeout_s=2.0)
    log_steps(logger, range(10))
    wait_delivered(logger)
    # At once for the delivery thread, which may be keeping its place in there.
    (tmp_path / "a").rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "away")
    log_steps(logger, range(10, 20))
    begin_s = time.monotonic()
    logger.close()
    assert time.monotonic() - begin_s < 2.0 + LEEWAY_S
    messages = [r.getMessage() for r in caplog.records if r.name == "tokrate"]
    assert len([m for m in messages if "cannot be read" in m]) == 1, messages


def test_what_fsync_costs(tmp_path: Path) -> None:
    """Each entry waits for the disk with `fsync=True`; the price is printed."""
    for fsync in (False, True):
        name = f"fsync-{fsync}"
        spec = {"console": False}
        with open_logger(spec, run=RunInfo(name), dir=tmp_path, fsync=fsync) as logger:
            took_s = log_steps(logger, range(300))
        p99_us = statistics.quantiles(took_s, n=100)[98] * 1e6
        show(f"fsync={fsync}: median {statistics.median(took_s) * 1e6:.0f} µs, p99 {p99_us:.0f} µs")
        assert journal_steps(tmp_path / name) == list(range(300))


def test_nothing_is_world_writable(tmp_path: Path, store_uri: str) -> None:
    """Files and folders of a run with three trackers have the modes that the umask leaves.

    W&B's are written by its service, with the umask that it was started with.
    """
    before = os.umask(0o027)
    try:
        spec = {
            "console": False,
            "tensorboard": {},
            "mlflow": {"tracking_uri": store_uri},
            "wandb": {"mode": "offline"},
        }
        with open_logger(spec, run=RunInfo("a", id="a1"), dir=tmp_path) as logger:
            log_steps(logger, range(3))
    finally:
        os.umask(before)
    for path in [tmp_path / "a", *(tmp_path / "a").rglob("*")]:
        if not path.is_symlink():
            forbidden = 0o002 if "wandb" in path.parts else 0o027
            assert stat.S_IMODE(path.stat().st_mode) & forbidden == 0, path

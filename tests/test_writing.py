"""The write that keeps Python's lock behaves as `os.write` does."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from tokrate.writing import Write, keeping_write

BOTH = pytest.mark.parametrize("write", [os.write, keeping_write()], ids=["os.write", "keeping"])


def test_it_is_not_the_fallback() -> None:
    """Where the tests run, C's write can be called."""
    assert keeping_write() is not os.write


@BOTH
def test_all_bytes_arrive(write: Write, tmp_path: Path) -> None:
    """Bytes of any value, in order, and their number is returned."""
    lines = [b'{"a":1}\n', b"\0\xff\n", b""]
    file = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    assert [write(file, line) for line in lines] == [8, 3, 0]
    os.close(file)
    assert (tmp_path / "file").read_bytes() == b"".join(lines)


@BOTH
@pytest.mark.parametrize(("path", "number"), [("/dev/full", errno.ENOSPC), (None, errno.EBADF)])
def test_errors_are_those_of_the_system(write: Write, path: str | None, number: int) -> None:
    """A full disk, a file that is closed."""
    file = os.open(path or os.devnull, os.O_WRONLY)
    if path is None:
        os.close(file)
    with pytest.raises(OSError) as found:
        write(file, b"line\n")
    assert found.value.errno == number
    if path:
        os.close(file)


@BOTH
def test_a_write_that_hangs_is_ended_by_a_signal(write: Write) -> None:
    """Ctrl-C ends the wait for a file system that does not answer; here a pipe that is full."""

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedError("the handler has run")

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writes, bytes(65_536))
    os.set_blocking(writes, True)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(InterruptedError, match="has run"):
            write(writes, b"line\n")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        os.close(reads)
        os.close(writes)

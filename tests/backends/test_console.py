"""What a person sees: aligned lines on standard error, and a live line in a terminal only."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokrate.backends._console import (
    HEADER_EVERY,
    ConsoleBackend,
    format_header,
    format_metrics,
    format_record,
)
from tokrate.errors import ConfigError
from tokrate.record import ThroughputRecord
from tokrate.run import Entry, Outcome, RunInfo

RUN = RunInfo("packed", id="r1")
IN_A_TERMINAL = """
import sys
from test_console import RUN, loose, record_entry
from tokrate.backends._console import ConsoleBackend
from tokrate.run import Outcome
backend = ConsoleBackend(RUN)
backend.write([loose(3, loss=2.5)])
print("from the loop")
backend.write([record_entry(4)])
backend.close(Outcome.FINISHED)
"""


def make_record(step: int = 4, **changes: Any) -> ThroughputRecord:
    """A record like those of the demo."""
    values: dict[str, Any] = {
        "step": step,
        "active_tps": 41_234.5,
        "raw_tps": 98_765.4,
        "padded_frac": 0.579,
        "masked_frac": 0.003,
        "active_tps_per_device": 41_234.5,
        "raw_tps_per_device": 98_765.4,
        "raw_tokens": 200_000,
        "active_tokens": 83_600,
        "padded_tokens": 115_800,
        "steps": 1,
        "elapsed_s": 2.1,
        "paused_s": 0.0,
        "data_wait_s": 0.0252,
        "devices": 1,
        "rank_imbalance": 1.0,
        "total_raw_tokens": 200_000,
        "total_active_tokens": 83_600,
        "total_elapsed_s": 2.1,
        "session": 1,
        "mfu": None,
        "warmup": False,
        "time_unix_ms": 0,
    }
    return ThroughputRecord(**{**values, **changes})


def record_entry(step: int, **changes: Any) -> Entry:
    """An entry as `Logger.log` makes it."""
    return Entry(time_unix_ms=0, step=step, metrics={}, record=make_record(step, **changes))


def loose(step: int, **metrics: float) -> Entry:
    """An entry as `Logger.log_metrics` makes it."""
    return Entry(time_unix_ms=0, step=step, metrics={f"train/{k}": v for k, v in metrics.items()})


def show(capsys: pytest.CaptureFixture[str], *entries: Entry) -> list[str]:
    """The lines on standard error; there are none on standard output."""
    backend = ConsoleBackend(RUN)
    backend.write(entries)
    backend.close(Outcome.FINISHED)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_record_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A header, then the record under it, and nothing else where there is no terminal."""
    assert show(capsys, record_entry(50)) == [
        "    step active tok/s   raw tok/s  padded  masked   wait  window",
        "      50       41,234      98,765   57.9%    0.3%   1.2%   2.10s",
    ]


def test_the_steady_state_stands_in_the_same_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is the run as a whole; what is unknown is a dash."""
    whole = {
        "active_tps": 41_198.2,
        "raw_tps": 98_702.0,
        "padded_frac": 0.578,
        "masked_frac": 0.004,
    }
    steady = {f"throughput/steady_{name}": value for name, value in whole.items()}
    speeds = dict(list(steady.items())[:2])
    lines = show(
        capsys,
        record_entry(50),
        Entry(time_unix_ms=0, step=50, metrics=steady),
        Entry(time_unix_ms=0, step=50, metrics=speeds),
    )
    assert lines[2:] == [
        "  steady       41,198      98,702   57.8%    0.4%",
        "  steady       41,198      98,702       –       –",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"active_tps": 3.2, "raw_tps": 9.0},
        {"active_tps": 999_999_999.4, "raw_tps": 999_999_999.6},
        {"active_tps": 1.5e9, "raw_tps": 2.25e12},
        {"active_tps": 0.0, "padded_frac": 1.0},
        {"active_tps": None, "raw_tps": None, "elapsed_s": 0.0},
        {"padded_frac": None, "masked_frac": None, "padded_tokens": None},
        {"elapsed_s": 123_456.7, "data_wait_s": None},
        {"step": 9_999_999},
    ],
)
def test_columns_stay_aligned(changes: dict[str, Any]) -> None:
    """However large or unknown a number is, every value ends where its title ends."""
    header, line = format_header(), format_record(make_record(**changes))
    ends = [match.end() for match in re.finditer(r"\S+( tok/s)?", header)]
    assert [match.end() for match in re.finditer(r"\S+", line)] == ends
    assert len(line) == len(header) <= 64


def test_unknown_is_a_dash() -> None:
    """What was not measured is shown as a dash, not as a number."""
    line = format_record(make_record(padded_frac=None, masked_frac=None, data_wait_s=None))
    assert line.split()[3:6] == ["–", "–", "–"]


def test_warmup_is_marked() -> None:
    """A warm-up record says that it is one."""
    assert format_record(make_record(warmup=True)).endswith("  warm-up")


def test_loose_metrics_join_the_next_record(capsys: pytest.CaptureFixture[str]) -> None:
    """A loss of every step makes no line of its own: the latest stands at the next record."""
    entries = [loose(1, loss=3.0), loose(2, loss=2.5, lr=1e-4), record_entry(2), record_entry(3)]
    _, first, second = show(capsys, *entries)
    assert first.endswith("2.10s  loss 2.5  lr 0.0001")
    assert second.endswith("2.10s")


def test_the_last_loose_metrics_are_shown_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """An evaluation after the last record is not lost."""
    assert show(capsys, loose(7, accuracy=0.5)) == ["       7  accuracy 0.5"]


def test_numbers_of_any_size_are_shown() -> None:
    """Whole numbers stay whole as long as they are short, and no size of them fails."""
    numbers = {"a/n": 12_345, "a/big": 10**400, "a/nan": float("nan"), "a/x": 1 / 3}
    assert format_metrics(numbers) == "n 12345  big 1.000e+400  nan nan  x 0.3333"


def test_the_header_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    """After some records the header is repeated."""
    lines = show(capsys, *(record_entry(step) for step in range(HEADER_EVERY + 1)))
    assert [i for i, line in enumerate(lines) if "raw tok/s" in line] == [0, HEADER_EVERY + 1]


def test_markup_is_not_interpreted(capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets in a name are letters, not formatting."""
    assert show(capsys, loose(1, **{"x[bold]": 1.0})) == ["       1  x[bold] 1"]


def test_live_must_be_a_truth_value() -> None:
    """A wrong type of the option is an error before training."""
    with pytest.raises(ConfigError, match="live is true or false, not 'yes'"):
        ConsoleBackend(RUN, live="yes")  # type: ignore[arg-type]


def test_a_running_tqdm_bar_is_respected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a bar of tqdm is on the screen, lines go above it by its own means."""
    written: list[str] = []
    bar = SimpleNamespace(_instances={1}, write=lambda line, file: written.append(line))
    monkeypatch.setitem(sys.modules, "tqdm.std", SimpleNamespace(tqdm=bar))
    assert show(capsys, record_entry(4)) == []
    assert [line.split()[0] for line in written] == ["step", "4"]


def test_a_terminal_has_a_live_line() -> None:
    """In a terminal a line below the records tells the step and the loss, and goes in the end."""
    screen = _in_terminal(IN_A_TERMINAL)
    assert "packed · step 3 · loss 2.5" in screen
    assert "from the loop" in screen
    after = screen.rpartition("from the loop")[2]
    assert "41,234" in after
    assert "\x1b[2K" in after.rpartition("41,234")[2], "the live line was not erased"


def _in_terminal(code: str) -> str:
    """Everything that a program writes to a terminal of 100 columns."""
    leader, follower = pty.openpty()
    here = str(Path(__file__).parent)
    environment = {**os.environ, "COLUMNS": "100", "TERM": "xterm-256color", "PYTHONPATH": here}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    chunks: list[bytes] = []

    def read() -> None:
        try:
            while chunk := os.read(leader, 4096):
                chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(30) == 0, b"".join(chunks).decode()
    reader.join(10)
    os.close(leader)
    return b"".join(chunks).decode()

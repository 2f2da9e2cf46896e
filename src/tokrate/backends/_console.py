"""Shows records in the terminal: one aligned line each, and a live line below while waiting.

        step active tok/s   raw tok/s  padded  masked   wait  window
          50       41,234      98,765   57.9%    0.3%   1.2%   2.10s  loss 2.314
      steady       41,198      98,702   57.8%    0.4%
    ⠹ packed · step 57 · loss 2.298 · 0:00:04 since the last record

Everything goes to standard error: standard output belongs to the training script.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from tokrate.backends.base import Entry, Outcome
from tokrate.errors import BackendError, ConfigError
from tokrate.record import ThroughputRecord
from tokrate.run import RunInfo
from tokrate.steady import STEADY

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

HEADER_EVERY = 25
"""Records between two header lines, so that one is always near."""

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the record line."""

    title: str
    width: int
    show: Callable[[ThroughputRecord], str]


def _tokens_per_second(value: float | None) -> str:
    """A rate with thousands marked, or with a unit where the digits would burst the column."""
    if value is None:
        return UNKNOWN
    if round(value) < 10**9:
        return f"{value:,.0f}"
    return f"{value / 1e9:.3f}G" if value < 1e12 else f"{value / 1e12:.3f}T"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 1000 else f"{value:.0f}s"


COLUMNS: tuple[Column, ...] = (
    Column("step", 8, lambda r: str(r.step)),
    Column("active tok/s", 13, lambda r: _tokens_per_second(r.active_tps)),
    Column("raw tok/s", 12, lambda r: _tokens_per_second(r.raw_tps)),
    Column("padded", 8, lambda r: _share(r.padded_frac)),
    Column("masked", 8, lambda r: _share(r.masked_frac)),
    Column("wait", 7, lambda r: _share(r.data_wait_frac)),
    Column("window", 8, lambda r: _seconds(r.elapsed_s)),
)
"""Together 64 characters: 80 columns have room for the loss as well."""


def format_header() -> str:
    """The titles above the columns of `format_record`."""
    return "".join(column.title.rjust(column.width) for column in COLUMNS)


def format_record(record: ThroughputRecord) -> str:
    """The record as one line of plain text, aligned under `format_header`; unknown is `–`."""
    line = "".join(column.show(record).rjust(column.width) for column in COLUMNS)
    return f"{line}  warm-up" if record.warmup else line


def format_steady(values: Mapping[str, int | float]) -> str:
    """What the run was like as a whole, by the names of `STEADY`, in the columns of the records."""
    active_tps, raw_tps, padded_frac, masked_frac = (values.get(name) for name in STEADY)
    shown = (
        "steady",
        _tokens_per_second(active_tps),
        _tokens_per_second(raw_tps),
        _share(padded_frac),
        _share(masked_frac),
    )
    columns = zip(shown, COLUMNS, strict=False)
    return "".join(text.rjust(column.width) for text, column in columns)


def format_metrics(metrics: Mapping[str, int | float]) -> str:
    """Metrics that belong to no record, as `loss 2.314  lr 0.0001`."""
    return "  ".join(f"{_short(key)} {_number(value)}" for key, value in metrics.items())


class ConsoleBackend:
    """Writes to standard error; never fails a run, and ends with it.

    Args:
        run: The run whose records are shown.
        live: Keep a line below the records that says what happens now. None decides by itself:
            only in a terminal that no progress bar of tqdm is using.
    """

    def __init__(self, run: RunInfo, *, live: bool | None = None) -> None:
        if live is not None and not isinstance(live, bool):
            raise ConfigError(f"console: live is true or false, not {live!r}")
        self._run = run
        self._live_wanted = live
        self._console: Console | None = None
        self._live: Live | None = None
        self._spinner: Spinner | None = None
        self._loose: dict[str, int | float] = {}
        self._step = 0
        self._lines = 0
        self._last_record_s = time.monotonic()

    def write(self, entries: Sequence[Entry]) -> None:
        """Print the records; keep what has none for the next line."""
        try:
            console = self._open()
            for entry in entries:
                self._show(console, entry)
            self._update_live(console)
        except (OSError, ValueError) as error:  # ValueError: standard error was closed
            raise BackendError(
                f"console: cannot write to standard error: {error}", retryable=False
            ) from error

    def close(self, outcome: Outcome) -> None:
        """Take the live line away, and print what no record has shown yet."""
        live, self._live = self._live, None
        console, self._console = self._console, None
        try:
            if live is not None:
                live.stop()
            if console is not None and self._loose:
                self._print(
                    console, f"{self._step:>{COLUMNS[0].width}}  {format_metrics(self._loose)}"
                )
                self._loose.clear()
        except (OSError, ValueError) as error:
            raise BackendError(
                f"console: cannot write to standard error: {error}", retryable=False
            ) from error

    def _open(self) -> Console:
        if self._console is None:
            from rich.console import Console

            self._console = Console(stderr=True, highlight=False)
        return self._console

    def _show(self, console: Console, entry: Entry) -> None:
        self._step = entry.step
        if entry.record is None:
            steady = self._steady(entry)
            if steady:
                self._print(console, format_steady(steady))
            else:
                self._loose.update(entry.metrics)
            return
        if self._lines % HEADER_EVERY == 0:
            self._print(console, format_header(), style="dim")
        self._lines += 1
        self._last_record_s = time.monotonic()
        self._print(console, self._line(console, entry.record))
        self._loose.clear()

    def _steady(self, entry: Entry) -> dict[str, int | float]:
        """The steady values in an entry, by their names without the prefix."""
        keys = {f"{self._run.prefix}/{name}": name for name in STEADY}
        return {keys[key]: value for key, value in entry.metrics.items() if key in keys}

    def _line(self, console: Console, record: ThroughputRecord) -> Text:
        """The record, then as many loose metrics as still fit a terminal's line."""
        from rich.text import Text

        text = Text(format_record(record), style="dim" if record.warmup else "")
        room = console.width - len(text) - 1 if console.is_terminal else None
        for key, value in self._loose.items():
            extra = f"  {format_metrics({key: value})}"
            if room is not None and (room := room - len(extra)) < 0:
                break
            text.append(extra, style="dim")
        return text

    def _print(self, console: Console, line: str | Text, style: str | None = None) -> None:
        tqdm = _busy_tqdm()
        if tqdm is None:
            console.print(line, style=style, soft_wrap=True, markup=False)
        else:
            tqdm.write(str(line), file=sys.stderr)

    def _update_live(self, console: Console) -> None:
        if self._live is None and self._may_live(console):
            from rich.live import Live

            # Only what really shares our terminal is taken through the live display: a standard
            # output that goes into a file stays there, and tqdm's bars must see the real stderr.
            self._live = Live(
                console=console,
                get_renderable=self._status,
                refresh_per_second=8,
                transient=True,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=False,
            )
            self._live.start()
        elif self._live is not None and _busy_tqdm() is not None:
            self._live.stop()
            self._live = None

    def _may_live(self, console: Console) -> bool:
        if self._live_wanted is False or _busy_tqdm() is not None:
            return False
        terminal = console.is_terminal and not console.is_dumb_terminal and sys.stderr.isatty()
        return terminal or bool(self._live_wanted and console.is_terminal)

    def _status(self) -> Spinner:
        """What the live line shows; called by rich's own thread several times a second."""
        from rich.spinner import Spinner

        if self._spinner is None:
            self._spinner = Spinner("dots")
        since_s = int(time.monotonic() - self._last_record_s)
        parts = [self._run.name, f"step {self._step}"]
        loose = dict(self._loose)
        if loose:
            parts.append(format_metrics(loose))
        what = "since the last record" if self._lines else "without a record"
        parts.append(f"{since_s // 3600}:{since_s // 60 % 60:02}:{since_s % 60:02} {what}")
        self._spinner.update(text=_dim(" · ".join(parts)))
        return self._spinner


def _dim(line: str) -> Text:
    from rich.text import Text

    return Text(line, style="dim", no_wrap=True, overflow="ellipsis")


def _short(key: str) -> str:
    """A key without the group before its last slash: the line is narrow."""
    return key.rsplit("/", 1)[-1]


def _number(value: int | float) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value}" if abs(value) < 10**9 else f"{Decimal(value):.4g}"


def _busy_tqdm() -> Any:
    """The tqdm class while one of its bars is on the screen, else None."""
    module = sys.modules.get("tqdm.std")
    tqdm = getattr(module, "tqdm", None)
    return tqdm if tqdm is not None and getattr(tqdm, "_instances", None) else None

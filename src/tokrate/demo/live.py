"""Shows training while it goes on: bars and the latest record in a terminal, lines elsewhere.

    padded        ━━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━   8 s  step   52  loss 2.91
    packed        ━━━━━━━━━━━━━━╸━━━━━━━━━━━━━━━━━━━━━   8 s  step   49  loss 2.87
                      step active tok/s   raw tok/s  padded  masked   wait  window
    packed              49       66,001      67,532    2.3%    0.0%   0.9%   1.27s

What goes on is told through `tokrate.demo.train.Observer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tokrate.backends._console import format_header, format_record
from tokrate.record import ThroughputRecord

# So many lines for each arm when nobody watches: enough for a log, not a flood.
_LINES_PER_ARM = 4
# Room for the longest name of an arm, so that the records stand under each other.
_NAME_WIDTH = 14


class TerminalDisplay:
    """A bar for each arm over its time, and the latest record under them.

    Args:
        console: A terminal.
        names: Names of all arms, in the order in which they are trained.
        seconds: Time that each is trained for.
    """

    def __init__(self, console: Console, names: Sequence[str], seconds: float) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:>3.0f} s  {task.fields[note]}"),
            console=console,
            expand=True,
        )
        self._tasks = {name: self._add(name, seconds) for name in names}
        self._name = names[0]
        self._live = Live(self._progress, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.update(self._progress)  # the bars stay, the record has had its time
        self._live.stop()

    def on_turn(self, name: str) -> None:
        """Move on to the bar of this arm."""
        self._name = name

    def on_step(self, elapsed_s: float) -> None:
        """Move the bar."""
        self._progress.update(self._tasks[self._name], completed=elapsed_s)

    def on_record(self, record: ThroughputRecord, loss: float) -> None:
        """Show the record."""
        note = f"step {record.step:>4}  loss {loss:.2f}"
        self._progress.update(self._tasks[self._name], note=note)
        header = Text(f"{'':{_NAME_WIDTH}}{format_header()}", style="dim", no_wrap=True)
        line = Text(f"{self._name:{_NAME_WIDTH}}{format_record(record)}", no_wrap=True)
        self._live.update(Group(self._progress, header, line))

    def _add(self, name: str, seconds: float) -> TaskID:
        return self._progress.add_task(name, total=seconds, note=" " * len("step    0  loss 0.00"))


class PlainDisplay:
    """A few lines for each arm, for files and pipes.

    Args:
        console: Where they go.
        seconds: Time that each arm is trained for.
    """

    def __init__(self, console: Console, seconds: float) -> None:
        self._console = console
        self._interval_s = seconds / _LINES_PER_ARM
        self._name = ""
        self._elapsed_s = 0.0
        self._due_s: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._line(f"{'':{_NAME_WIDTH}}{format_header()}")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the lines as they are."""

    def on_turn(self, name: str) -> None:
        """Name the arm in the lines that follow."""
        self._name = name

    def on_step(self, elapsed_s: float) -> None:
        """Note the time."""
        self._elapsed_s = elapsed_s

    def on_record(self, record: ThroughputRecord, loss: float) -> None:
        """Print the record when a line is due."""
        if self._elapsed_s >= self._due_s.get(self._name, self._interval_s):
            line = f"{self._name:{_NAME_WIDTH}}{format_record(record)}"
            self._line(f"{line}  loss {loss:.2f}")
            self._due_s[self._name] = self._elapsed_s + self._interval_s

    def _line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)


def open_display(
    console: Console, names: Sequence[str], seconds: float
) -> TerminalDisplay | PlainDisplay:
    """The display that suits the console."""
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalDisplay(console, names, seconds)
    return PlainDisplay(console, seconds)

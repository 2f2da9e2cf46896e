"""What the parts share: interleaved timing, and tables of ratios that travel as JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Call = Callable[[], object]
SETTLE_ROUNDS = 50


@dataclass(kw_only=True)
class Row:
    """One contender of a table."""

    name: str
    values: dict[str, float | None]
    """Column → number; None where it was not measured."""
    lacks: str = ""
    """What this one does not do that tokrate does; empty for tokrate's own rows."""
    ours: bool = False
    """Whether it is tokrate."""


@dataclass(kw_only=True)
class Table:
    """One comparison: what was measured, what it was measured against, and whether it is enough."""

    title: str
    columns: dict[str, str]
    """Column → unit, in the order in which they are shown."""
    rows: list[Row]
    baseline: str
    """Row to which ratios are relative."""
    ratio_of: str
    """Column whose ratio to the baseline is the result."""
    about: str
    """What one call or one step is; read by people who have not seen the code."""
    aim: str = ""
    """What was to be reached, in words; empty where there is none."""
    result: str = ""
    """What was reached, with the numbers; where it is less than the aim, why, and the floor."""
    reached: bool | None = None
    """Whether the aim was reached; None where there is none."""
    plot: bool = True
    """Whether the figure shows it."""


@dataclass(kw_only=True)
class Part:
    """What one part of the benchmarks came to."""

    name: str
    tables: list[Table] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    """Packages that took part → version."""


def interleave(
    calls: Mapping[str, Call], rounds: int, *, before_each: Call | None = None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Microseconds of each call on the calling thread, round by round.

    Every contender runs once in each round, in an order that changes from round to round, so that
    what the machine does meanwhile falls on all of them alike.
    """
    times_ns: dict[str, list[int]] = {name: [] for name in calls}
    order, now = random.Random(seed), time.perf_counter_ns
    for number in range(-SETTLE_ROUNDS, rounds):
        for name in order.sample(list(calls), len(calls)):
            call = calls[name]
            if before_each is not None:
                before_each()
            start = now()
            call()
            spent = now() - start
            if number >= 0:
                times_ns[name].append(spent)
    return {name: np.array(times) / 1000 for name, times in times_ns.items()}


def quantiles(times: np.ndarray) -> dict[str, float]:
    """The three columns that most tables have."""
    return {
        "median": float(np.median(times)),
        "p99": float(np.quantile(times, 0.99)),
        "worst": float(times.max()),
    }


def rows_of(times: Mapping[str, np.ndarray], lacks: Mapping[str, str]) -> list[Row]:
    """A row for each contender; those of tokrate begin with its name."""
    return [
        Row(
            name=name,
            values=dict(quantiles(found)),
            lacks=lacks.get(name, ""),
            ours=name.startswith("tokrate"),
        )
        for name, found in times.items()
    ]


def versions_of(*packages: str) -> dict[str, str]:
    """Package → version, for those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main(measure: Callable[[], Part]) -> None:
    """Run one part: print its tables, and write them as JSON where a file is named."""
    part = measure()
    for table in part.tables:
        print(as_text(table), "\n")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(asdict(part), indent=1))


def load_part(path: Path) -> Part:
    """The inverse of what `main` writes."""
    data: dict[str, Any] = json.loads(path.read_text())
    tables = [
        Table(**{**table, "rows": [Row(**row) for row in table["rows"]]})
        for table in data["tables"]
    ]
    return Part(name=data["name"], tables=tables, versions=data["versions"])


def ratio(table: Table, row: Row) -> float | None:
    """The row's number as a multiple of the baseline's."""
    base = next(r for r in table.rows if r.name == table.baseline).values.get(table.ratio_of)
    value = row.values.get(table.ratio_of)
    return None if value is None or not base else value / base


def as_text(table: Table) -> str:
    """The table for a terminal."""
    wide = max(len(row.name) for row in table.rows) + 2
    lines = [f"{table.title}: {table.about}"]
    head = "".join(f"{f'{c} {u}'.strip():>14}" for c, u in table.columns.items())
    lines.append(f"{'':{wide}}{head}{'ratio':>9}")
    for row in table.rows:
        cells = "".join(f"{number(row.values.get(c)):>14}" for c in table.columns)
        lines.append(f"{row.name:{wide}}{cells}{number(ratio(table, row)):>9}")
    if table.aim:
        lines.append(f"aim: {table.aim}. {table.result}")
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three digits that mean something; five near 1, where a ratio's difference from it counts."""
    if value is None:
        return "–"
    if 0.95 < value < 1.05:
        return f"{value:.4f}".rstrip("0").rstrip(".")
    if value and abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"

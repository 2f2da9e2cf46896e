"""The page and the figure that the parts' tables make."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

from common import Part, Row, Table, number, ratio

PARTS = {
    "count": "What counting a batch costs the loop, or a worker of its loader.",
    "measure": "What a step pays for the numbers, and whether it waits for the device.",
    "log": "What the loop pays for one record, with the tracker open.",
    "train": "What is left of all this in a training step.",
    "deliver": "What the delivery threads do, in the background.",
    "start": "What is paid once.",
    "grow": "Whether a long run, a large record or many trackers cost more.",
}
"""Part → what it answers."""
REASONS = {
    "Count": (
        "numpy's own work is the floor of what has no compiled code of its own: a comparison and a "
        "count read every slot, and write and read a boolean for it. With 512 slots it is the "
        "price of calling numpy at all. torch's line makes one such pass over one array."
    ),
    "Measure, host": (
        "the cheapest peer looks at no label: it adds up sizes that it is handed. Counting in "
        "the loop cannot cost less than [count](#count) says; counted in the workers, what is "
        "left is the bookkeeping of windows, phases and ranks."
    ),
    "Log": (
        "what is left above the floor are threads: a delivery that has begun keeps Python's lock "
        "for up to 5 ms, and the loop waits for it before `log` as after any other call."
    ),
    "Train": (
        "delivery is Python, in threads that share two cores with torch's, which are never idle. "
        "The processor time of a record, most of it MLflow's, is the floor on such a machine; "
        "where a core is free it is hidden. A record here comes every 10 steps, about 1.5 s; most "
        "trainings make one far less often, and pay that much less."
    ),
    "Start, open": (
        "imports are what is left: `importlib.metadata`, which finds the plug-ins that claim a "
        "name, `filelock` and `msgspec`. The trackers themselves open in the background."
    ),
}
"""Beginning of a title → why an aim is out of reach, and what the floor is."""
OURS, PEER = "#c2410c", "#64748b"
HEAD = """\
# Performance

What tokrate costs, beside what people would use instead. `make bench` measured it in {minutes}
minutes on one machine, the contenders of each comparison in turn, and wrote this page. **Ratios are
the result**, each to the row that is marked *baseline*; the times are only context, and another
machine has others.

- Machine: {machine}
- Versions: {versions}

![Cost of each contender as a multiple of the baseline's](../images/performance.png)

Each line of the figure is one comparison; the baseline is at 1, and left of it is cheaper.

## What was to be reached

"""


def write_page(parts: Sequence[Part], docs: Path, minutes: int) -> None:
    """Write `reference/performance.md` and `images/performance.png`."""
    versions: dict[str, str] = {}
    for part in parts:
        versions |= part.versions
    head = HEAD.format(
        minutes=minutes,
        machine=machine(),
        versions=", ".join(f"{name} {version}" for name, version in sorted(versions.items())),
    )
    tables = [table for part in parts for table in part.tables]
    text = head + "\n".join([*aims(tables), "", *shortfalls(tables)]) + "\n"
    for part in parts:
        text += f"\n## {part.name.capitalize()}\n\n{PARTS[part.name]}\n"
        for table in part.tables:
            text += "\n" + "\n".join(as_markdown(table)) + "\n"
    (docs / "reference" / "performance.md").write_text(text)
    draw([table for table in tables if table.plot and any(is_peer(r) for r in table.rows)], docs)


def machine() -> str:
    """What it was measured on."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = lines[0].partition(":")[2].strip() if lines else model
    return (
        f"{model}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    )


def aims(tables: Iterable[Table]) -> list[str]:
    """The aims, and what came of them."""
    lines = ["| comparison | aim | reached | measured |", "|---|---|---|---|"]
    for table in tables:
        if table.aim:
            reached = {True: "yes", False: "**no**", None: "–"}[table.reached]
            lines.append(f"| {table.title} | {table.aim} | {reached} | {table.result} |")
    return lines


def shortfalls(tables: Iterable[Table]) -> list[str]:
    """Why an aim was not reached, and what the floor is."""
    lines = []
    for beginning, reason in REASONS.items():
        titles = [t.title for t in tables if t.reached is False and t.title.startswith(beginning)]
        if titles:
            lines.append(f"- {'; '.join(titles)}: {reason}")
    return ["Where it says *no*:", "", *lines] if lines else []


def as_markdown(table: Table) -> list[str]:
    """One comparison."""
    heads = [f"{column}, {unit}" if unit else column for column, unit in table.columns.items()]
    ratios = table.baseline != ""
    lacks = any(row.lacks for row in table.rows)
    cells = [
        "",
        *heads,
        *(["ratio"] if ratios else []),
        *(["what it does not do"] if lacks else []),
    ]
    marks = ["---", *["---:"] * (len(heads) + ratios), *(["---"] if lacks else [])]
    lines = [f"**{table.title}**: {table.about}", "", row_of(cells), f"|{'|'.join(marks)}|"]
    for row in table.rows:
        name = f"**{row.name}**" if row.ours else row.name
        name += " *(baseline)*" if row.name == table.baseline else ""
        values = [number(row.values.get(column)) for column in table.columns]
        values += [number(ratio(table, row))] if ratios else []
        lines.append(row_of([name, *values, *([row.lacks] if lacks else [])]))
    return lines


def row_of(cells: Iterable[str]) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def draw(tables: Sequence[Table], docs: Path) -> None:
    """One line for each comparison, on one logarithmic axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.36 * len(tables) + 1.2))
    for place, table in enumerate(reversed(tables)):
        points = [(ratio(table, row), row) for row in table.rows if ratio(table, row)]
        axes.plot(
            [min(r for r, _ in points), max(r for r, _ in points)], [place] * 2, color="#e2e8f0"
        )
        for value, row in points:
            axes.plot(value, place, **mark_of(row, table))
    axes.set_yticks(range(len(tables)), [table.title for table in reversed(tables)])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1, color="#94a3b8", linewidth=0.8, zorder=0)
    axes.set_xlabel("cost as a multiple of the baseline's (logarithmic; left is cheaper)")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    for label, style in LEGEND.items():
        axes.plot([], [], label=label, **style)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False)
    figure.savefig(docs / "images" / "performance.png", dpi=150, bbox_inches="tight")


LEGEND = {
    "tokrate": {"marker": "o", "color": OURS, "linestyle": "none", "markersize": 8},
    "baseline": {"marker": "|", "color": "#0f172a", "linestyle": "none", "markersize": 13},
    "peer": {
        "marker": "o",
        "color": PEER,
        "linestyle": "none",
        "markersize": 6,
        "fillstyle": "none",
    },
    "floor": {"marker": "s", "color": "#94a3b8", "linestyle": "none", "markersize": 4},
}


def is_peer(row: Row) -> bool:
    """Whether the row is somebody else's."""
    return not row.ours and not row.name.startswith("floor")


def mark_of(row: Row, table: Table) -> dict[str, object]:
    """How a contender looks in the figure."""
    if row.ours:
        return LEGEND["tokrate"]
    if row.name == table.baseline:
        return LEGEND["baseline"]
    return LEGEND["floor" if row.name.startswith("floor") else "peer"]

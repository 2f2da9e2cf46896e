"""Run every part in turn, and write the page and the figure.

python benchmarks/performance/run.py [PART ...]

Each part runs in a process of its own; within it, contenders run interleaved. With parts named,
only those run, and the page is left as it is.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Part, load_part
from page import write_page

PARTS = ("count", "measure", "log", "train", "deliver", "start", "grow")
HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
COMPOSER = HERE.parents[1] / ".venvs" / "composer" / "bin" / "python"
"""Python of the environment that composer has to itself; `make bench` builds it where it can."""


def main() -> None:
    chosen = sys.argv[1:] or PARTS
    if unknown := set(chosen) - set(PARTS):
        sys.exit(f"no such part: {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    began_s = time.monotonic()
    parts = []
    for name in chosen:
        print(f"\n## {name}\n", flush=True)
        part = run_part(name, sys.executable)
        if name == "measure" and COMPOSER.exists():
            beside = run_part(name, str(COMPOSER))
            part.tables += beside.tables
            part.versions |= beside.versions
        parts.append(part)
    if tuple(chosen) == PARTS:
        write_page(parts, DOCS, minutes=round((time.monotonic() - began_s) / 60))
        print(f"wrote {DOCS.name}/reference/performance.md and its figure")


def run_part(name: str, python: str) -> Part:
    """Run one part in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="tokrate-bench-") as folder:
        file = Path(folder) / "part.json"
        subprocess.run([python, HERE / f"{name}.py", file], check=True)
        return load_part(file)


if __name__ == "__main__":
    main()

"""Write the tables of the public cases into the page about them: `tools/case_table.py`."""

from __future__ import annotations

import re
from pathlib import Path

from tokrate.testing import Case, cases
from tokrate.testing.case_set import KINDS

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "check-your-own-numbers.md"
REPORT = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def table(kind: str) -> str:
    """One row for each case: its name, what it stands for, and where it was reported."""
    rows = (f"| `{case.id}` | {case.why} | {link(case)} |" for case in cases(kind))
    return "\n".join(["| case | what it stands for | reported in |", "|---|---|---|", *rows])


def link(case: Case) -> str:
    """The public report; GitHub sends the address of an issue on to a pull request of its number.

    A source without a number, or nobody's, stands as it is.
    """
    return REPORT.sub(r"[\1#\2](https://github.com/\1/issues/\2)", case.source)


def with_tables(page: str) -> str:
    """The page with its tables as they should be."""
    for kind in KINDS:
        begin, end = f"<!-- cases: {kind} -->\n", f"\n<!-- end: {kind} -->"
        head, rest = page.split(begin)
        page = head + begin + table(kind) + end + rest.split(end, 1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text("utf-8")), "utf-8")

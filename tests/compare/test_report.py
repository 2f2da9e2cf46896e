"""The reports: every width and form, nothing from outside, and no name that becomes markup."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from compare.making import Window, noisy, records, series
from tokrate.compare import Comparison, RunResult, compare_runs, list_runs
from tokrate.compare.factors import Factor, Ratio
from tokrate.compare.report.page import make_page
from tokrate.compare.report.table import print_comparison, print_runs
from tokrate.compare.report.text import CSV_COLUMNS, as_csv, as_json, as_markdown
from tokrate.compare.same import Run, gather_runs
from tokrate.compare.words import packing, sentence

NASTY = '<script>alert("x")</script>|*_&'


def runs(second: str = "packed") -> list[Run]:
    """A padded run and a packed one, which waits for its data now and then."""
    return gather_runs(
        [
            series(records([Window(), *noisy(30, 1, wait_s=0.0)]), "padded"),
            series(records([Window(), *noisy(30, 2, padded=20, active=900, wait_s=0.05)]), second),
        ]
    )


def printed(found: Comparison, width: int) -> str:
    """The comparison as a terminal of that width shows it."""
    out = io.StringIO()
    print_comparison(found, Console(file=out, width=width))
    return out.getvalue()


# --- words ----------------------------------------------------------------------------------------


def test_the_sentence_names_the_largest_cause() -> None:
    """Packing more than doubles the speed, because there is less padding; the wait is named."""
    found = compare_runs(runs())
    first = found.sentences[0]
    assert first.startswith("packed has 2.2")
    assert "mainly because less of it is padding (×1.96" in first
    assert "against that, it waits more for data (×0.950)" in first
    assert found.sentences[1].startswith("padded: 50.0% of its slots are padding; perfect packing")


def test_no_difference_is_said_as_such() -> None:
    """Two runs alike; and causes that cancel each other out are named all the same."""
    alike = gather_runs([series(records(noisy(30, i)), name) for i, name in enumerate("ab")])
    (said,) = compare_runs(alike).sentences[:1]
    assert said.startswith("b and a: no difference that these windows can show, ratio")
    cancelled = [
        Factor(name="raw", ratio=0.5, low=0.49, high=0.51),
        Factor(name="unpadded", ratio=2.0, low=1.9, high=2.1),
        Factor(name="unmasked", ratio=1.0, low=1.0, high=1.0),
    ]
    versus = Ratio(
        of="active_tps", ratio=1.0, low=0.9, high=1.1, factors=tuple(cancelled), split=()
    )
    run = replace(compare_runs(alike).runs[1], versus=versus)
    assert "but the machine works slower (×0.500), and less of it is padding" in sentence(run, run)


def test_packing_is_only_named_where_it_could_help() -> None:
    """Two percent of padding are not worth a word."""
    a, b = list_runs(runs())
    assert packing(b) is None
    assert packing(a) is not None


# --- the terminal ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    """No line is longer than the terminal, and every run has its line."""
    text = printed(compare_runs(runs()), width)
    assert max(map(len, text.splitlines())) <= width
    assert re.search(r"^padded .* 50\.0% .* reference", text, re.M)
    assert re.search(r"^packed .* 2\.0% .* ×2\.2\d\d", text, re.M)
    assert ("windows" in text.splitlines()[0]) == (width == 120)
    assert "packed ×2.2" in text
    assert "unpadded ×1.960" in text


@pytest.mark.parametrize("width", [80, 120])
def test_the_list_fits(width: int) -> None:
    """Outcome, time and steady values of each run."""
    out = io.StringIO()
    print_runs(list_runs(runs()), Console(file=out, width=width))
    assert max(map(len, out.getvalue().splitlines())) <= width
    assert re.search(r"^padded +– +.* 31 ", out.getvalue(), re.M)


def test_markup_in_a_name_is_text() -> None:
    """Rich's own markup, too."""
    assert "[red]x[/red]" in printed(compare_runs(runs("[red]x[/red]")), 120)


# --- other forms ----------------------------------------------------------------------------------


def test_json_has_everything() -> None:
    """It is the fields of the result, and standard JSON."""
    found = json.loads(as_json(compare_runs(runs())), parse_constant=pytest.fail)
    assert set(found) == {"version", "reference", "runs", "sentences", "doubts"}
    assert list(found["runs"][0]) == [field.name for field in fields(RunResult)]
    factors = found["runs"][1]["versus"]["factors"]
    assert [factor["name"] for factor in factors] == ["raw", "unpadded", "unmasked"]


def test_csv_is_a_line_for_each_run() -> None:
    """Unknown is empty."""
    rows = list(csv.DictReader(io.StringIO(as_csv(compare_runs(runs())))))
    assert tuple(rows[0]) == CSV_COLUMNS
    assert [row["label"] for row in rows] == ["padded", "packed"]
    assert (rows[0]["ratio"], rows[0]["mfu"]) == ("", "")
    assert float(rows[1]["factor_unpadded"]) == pytest.approx(1.96)


def test_markdown_is_tables_and_lists() -> None:
    """Every row has as many cells as the head, whatever a run is called."""
    text = as_markdown(compare_runs(runs(NASTY)))
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in table[:4]} == {11}
    assert "<script>" not in text


# --- the page -------------------------------------------------------------------------------------


class Parsed(HTMLParser):
    """What a page refers to, and what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        outside = ("src", "href", "srcset", "action", "data", "poster", "xlink:href")
        self.references += [value or "" for name, value in attrs if name in outside]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(page: str) -> Parsed:
    """The page, read."""
    parser = Parsed()
    parser.feed(page)
    return parser


def test_the_page_refers_to_nothing_outside() -> None:
    """No address but an empty icon, no import, no font; and a policy that forbids requests."""
    found = runs()
    page = make_page(compare_runs(found), found)
    assert parsed(page).references == ["data:,"]
    assert not re.findall(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", page)
    assert "default-src 'none'" in page


def test_the_page_has_all_its_parts() -> None:
    """Sentences, the table, the factor bars, four charts, and the runs' names in each."""
    found = runs()
    page = parsed(make_page(compare_runs(found), found))
    assert page.tags.count("svg") == 1 + 4
    assert page.tags.count("polyline") == 4 * 2
    assert page.tags.count("tr") == 3
    text = " ".join(page.text)
    for part in ("Why, against padded", "Curves", "×2.2", "unpadded", "over steps"):
        assert part in text, part


def test_names_on_the_page_are_text() -> None:
    """A run that is called like a script is none."""
    found = runs(NASTY)
    page = make_page(compare_runs(found), found)
    assert "<script>alert" not in page
    assert parsed(page).tags.count("script") == 1
    assert NASTY in "".join(parsed(page).text)


def test_long_runs_are_thinned() -> None:
    """Ten thousand windows make a page of some kilobytes."""
    found = gather_runs([series(records([Window(), *noisy(10_000)]), "long")])
    assert len(make_page(compare_runs(found), found)) < 60_000


def test_an_old_run_has_a_page() -> None:
    """Where rates are per device and totals unknown there are curves over steps alone."""
    old = series(records([Window(), *noisy(20)]), "old")
    nothing = {c: v * float("nan") for c, v in old.columns.items() if c != "elapsed_s"}
    nothing["active_tps_per_device"] = old.columns["active_tps_per_device"]
    columns = {**old.columns, **nothing}
    found = gather_runs(
        [replace(old, columns=columns, total_active_tokens=old.total_active_tokens * float("nan"))]
    )
    page = parsed(make_page(compare_runs(found), found))
    assert page.tags.count("svg") == 1


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
def test_a_browser_runs_the_page_without_an_error(tmp_path: Path) -> None:
    """Its script runs: a click on `over active tokens` changes the charts; the console is quiet."""
    found = runs()
    click = "document.querySelector('.over [data-over=tokens]').click();"
    page = make_page(compare_runs(found), found).replace("</script>", f"{click}</script>")
    path = tmp_path / "page.html"
    path.write_text(page)
    options = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --dump-dom"
    options += " --disable-background-networking --disable-component-update --disable-sync"
    command = [str(BROWSER), *options.split(), "--enable-logging=stderr", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "CONSOLE" not in done.stderr
    shown = re.findall(r'data-over="(\w+)"( hidden)?', done.stdout.split('class="charts"')[1])
    assert [over for over, hidden in shown if not hidden] == ["tokens", "tokens"]

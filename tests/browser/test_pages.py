"""The trackers' own pages, in a browser: sections, charts and values are where the how-to says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.readers import accumulate
from tokrate.steady import STEADY

Picture = Callable[[Any, str], None]


@pytest.fixture
def steady(runs: Path) -> dict[str, float]:
    """The steady values of the run `packed`, read without our own reader."""
    events = accumulate(runs / "boards" / "packed")
    return {name: events.Scalars(f"throughput/{name}")[-1].value for name in STEADY}


def texts(locator: Any) -> list[str]:
    """What stands in the elements, without the blanks around it."""
    return [" ".join(text.split()) for text in locator.all_inner_texts()]


def test_tensorboard_groups_the_curves(page: Any, tensorboard: str) -> None:
    """TIME SERIES has one section for our numbers and one for the trainer's, with both runs."""
    page.goto(f"{tensorboard}/#timeseries")
    sections = page.locator("metrics-card-group-toolbar")
    sections.first.wait_for()
    assert [text.split()[0][:5] for text in texts(sections)] == ["throu", "train"]
    rows = page.locator("runs-data-table tb-data-table-content-row")
    rows.nth(1).wait_for()
    assert texts(rows) == ["packed", "padded"]
    assert page.get_by_text("/active_tps", exact=True).first.is_visible()


def test_tensorboard_puts_both_speeds_into_one_chart(
    page: Any, tensorboard: str, picture: Picture
) -> None:
    """CUSTOM SCALARS has three charts; those of two numbers hold both numbers of both runs."""
    page.set_viewport_size({"width": 1000, "height": 690})
    page.goto(f"{tensorboard}/#custom_scalars")
    for title in ("tokens per second", "share of raw tokens", "share of time spent waiting for"):
        page.get_by_text(title).first.wait_for()
    matches = page.get_by_text(re.compile(r"^\s*Matches \(\d+\)\s*$"))
    matches.nth(2).wait_for()
    assert texts(matches) == ["Matches (4)", "Matches (4)", "Matches (2)"]
    picture(page, "tensorboard-custom-scalars")


def test_tensorboard_has_a_row_for_each_run(
    page: Any, tensorboard: str, steady: dict[str, float], picture: Picture
) -> None:
    """HPARAMS has two rows, no sub-runs, and the steady values as columns without a click."""
    page.set_viewport_size({"width": 2060, "height": 360})
    page.goto(f"{tensorboard}/#hparams")
    cells = page.locator("vaadin-grid-cell-content")
    cells.get_by_text("packed", exact=True).wait_for()
    shown = texts(cells)
    assert shown.count("packed") == shown.count("padded") == 1
    assert not [text for text in shown if text.startswith(("packed/", "padded/"))]
    for name, value in steady.items():
        assert f"throughput/{name}" in shown
        assert any(_is_near(text, value) for text in shown), (name, value)
    picture(page, "tensorboard-hparams")


def _is_near(text: str, value: float) -> bool:
    """Whether the text is the value with the five digits that the table shows."""
    try:
        return float(text) == pytest.approx(value, rel=1e-4)
    except ValueError:
        return False


def test_tensorboard_tells_the_facts(page: Any, tensorboard: str) -> None:
    """TEXT has the run's configuration and says what holds between the numbers."""
    page.goto(f"{tensorboard}/#text")
    page.get_by_text("model.layers").first.wait_for()
    for words in ("packing", "0.0003", "sft", "raw_tps * (1 - padded_frac - masked_frac)"):
        assert page.get_by_text(words).first.is_visible()


def open_run(page: Any, mlflow: str) -> None:
    """Go to the run `packed` from the table of runs, under "Model training"."""
    page.goto(f"{mlflow}/#/experiments/1/runs?workflowType=machine_learning")
    page.get_by_role("link", name="packed").first.click()
    page.get_by_text("Run ID").first.wait_for()


def test_mlflow_describes_the_run(page: Any, mlflow: str, picture: Picture) -> None:
    """The run's page has tags, parameters, the description and how long it took."""
    page.set_viewport_size({"width": 1000, "height": 880})
    open_run(page, mlflow)
    page.goto(f"{page.url.partition('?')[0]}?workflowType=machine_learning")
    page.get_by_role("link", name="Active and raw tokens per second in one chart").wait_for()
    text = " ".join(texts(page.locator("body")))
    for words in ("tokrate.version", "tokrate.schema_version", "tokrate.devices", "sft"):
        assert words in text
    assert re.search(r"Duration \d", text), "a run cannot end before it begins"
    picture(page, "mlflow-run")
    page.get_by_text("Show more").click()
    assert page.get_by_text("raw_tps * (1 - padded_frac - masked_frac)").is_visible()
    assert page.get_by_text("model.layers").first.is_visible()


def test_mlflow_groups_the_charts(page: Any, mlflow: str) -> None:
    """The charts of a run lie in one section for our numbers and one for the trainer's."""
    open_run(page, mlflow)
    page.get_by_role("tab", name="Model metrics").click()
    page.get_by_text("throughput", exact=True).wait_for()
    page.get_by_text("train", exact=True).wait_for()
    page.get_by_text("active_tps", exact=True).first.wait_for()


def test_mlflow_puts_both_speeds_into_one_chart(page: Any, mlflow: str, picture: Picture) -> None:
    """The link in the description opens active and raw in one chart, over the steps."""
    open_run(page, mlflow)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="Active and raw tokens per second in one chart").click()
    chart = opened.value
    chart.get_by_text("throughput/active_tps vs throughput/raw_tps").wait_for()
    chart.get_by_text("packed (throughput/raw_tps)").wait_for()
    picture(chart, "mlflow-both-speeds")


def test_mlflow_sorts_by_the_steady_values(
    page: Any, mlflow: str, steady: dict[str, float], picture: Picture
) -> None:
    """The other link opens the table of runs with the fastest first; columns can be added."""
    open_run(page, mlflow)
    with page.context.expect_page() as opened:
        page.get_by_role("link", name="All runs, the fastest first").click()
    table = opened.value
    table.get_by_role("link", name="padded").first.wait_for()
    assert table.get_by_text("Sort: throughput/steady_active_tps").is_visible()
    names = [text for text in texts(table.get_by_role("link")) if text in ("packed", "padded")]
    assert names == ["packed", "padded"]
    table.set_viewport_size({"width": 1900, "height": 420})
    table.get_by_role("button", name="Columns").click()
    table.get_by_placeholder("Search columns").fill("steady")
    table.get_by_text(f"Metrics ({len(STEADY)})").click()
    table.keyboard.press("Escape")
    table.mouse.move(0, 0)
    cells = table.get_by_role("gridcell")
    cells.get_by_text(str(steady["steady_active_tps"])[:4]).first.wait_for()
    for name, value in steady.items():
        assert any(_is_near(text, value) for text in texts(cells)), (name, value)
    picture(table, "mlflow-runs")


@pytest.mark.parametrize("name", STEADY)
def test_both_trackers_have_the_same_steady_values(
    runs: Path, steady: dict[str, float], name: str
) -> None:
    """One name, one value, up to TensorBoard's float32."""
    from backends.readers import mlflow_run

    uri = f"sqlite:///{runs}/mlflow.db"
    ours = mlflow_run(uri, _run_id(runs)).data.metrics[f"throughput/{name}"]
    assert steady[name] == pytest.approx(ours, rel=1e-6)


def _run_id(runs: Path) -> str:
    from tokrate.journal import first_line

    line = first_line(runs / "runs" / "packed" / "journal.jsonl")
    assert line is not None
    return str(line["id"])

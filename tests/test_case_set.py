"""The public cases: ours pass them, wrong ones are found out, and the page says what they are."""

from __future__ import annotations

import json
import re
import runpy
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from driving import CASES
from gathered import record_of_ranks
from tokrate import ThroughputMeter, TokenCounts, count_tokens
from tokrate.testing import CheckReport, cases, check
from tokrate.testing.case_set import KINDS

ROOT = Path(__file__).parents[1]


# --- the set -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["counting", "meter"])
def test_shipped_cases_begin_with_the_shared_ones(kind: Any) -> None:
    """What stands in tests/cases is shipped word for word, in the same order; more follows."""
    shared = json.loads((CASES / f"{kind}.json").read_text())["cases"]
    shipped = [
        {"id": c.id, "why": c.why, "source": c.source, **c.given}
        for c in cases(kind)[: len(shared)]
    ]
    assert shipped == shared


def test_cases_are_named_once_and_say_where_they_come_from() -> None:
    """Names are unique over all kinds; every case has a reason, and a report or `own`."""
    named = Counter(case.id for case in cases())
    assert [name for name, times in named.items() if times > 1] == []
    without_number = {"own", "Lightning-AI throughput window", "huggingface/trl GRPO"}
    for case in cases():
        assert case.why, case
        assert case.source in without_number or re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", case.source)


def test_cases_of_a_kind() -> None:
    """One kind or all; a kind that is none is refused with those that are."""
    assert cases() == tuple(case for kind in KINDS for case in cases(kind))
    assert {case.kind for case in cases("ranks")} == {"ranks"}
    with pytest.raises(ValueError, match="counting, meter, ranks"):
        cases("rank")  # type: ignore[arg-type]


def test_page_lists_every_case() -> None:
    """The tables of the page are those of the set; `tools/case_table.py` writes them."""
    tool = runpy.run_path(str(ROOT / "tools" / "case_table.py"))
    page = tool["PAGE"].read_text("utf-8")
    assert tool["with_tables"](page) == page
    for case in cases():
        assert f"| `{case.id}` | {case.why} |" in page


# --- what is right passes ------------------------------------------------------------------------


@pytest.mark.parametrize("arrays", [None, np.array, torch.tensor])
def test_our_count_passes(arrays: Any) -> None:
    """Lists, numpy and torch give the numbers of every case."""
    report = check(count=count_tokens, arrays=arrays)
    report.raise_for_failures()
    assert len(report.passed) == len(cases("counting"))


def test_our_meter_passes() -> None:
    """The meter gives the numbers of every case, restarts included."""
    report = check(meter=ThroughputMeter)
    report.raise_for_failures()
    assert len(report.passed) == len(cases("meter"))


def test_our_ranks_pass() -> None:
    """Real meters whose reports are gathered give the numbers of every case."""
    report = check(ranks=record_of_ranks)
    report.raise_for_failures()
    assert len(report.passed) == len(cases("ranks"))


def test_results_may_be_mappings_objects_or_arrays() -> None:
    """What an implementation returns need not be ours."""

    def count(**batch: Any) -> dict[str, Any]:
        counts = count_tokens(**batch)
        found = {name: getattr(counts, name) for name in ("raw", "active", "padded", "masked")}
        return {n: v if v is None else torch.tensor(v) for n, v in found.items()}

    check(count=count).raise_for_failures()


# --- what is wrong is found ----------------------------------------------------------------------


def failing(report: CheckReport) -> set[str]:
    """Names of the cases that an implementation gets wrong."""
    return {failure.id for failure in report.failures}


def test_count_without_the_shift_is_found() -> None:
    """Counting every label that is not ignored is wrong exactly where the loss shifts one away."""

    def count(labels: Any = None, loss_mask: Any = None, **rest: Any) -> dict[str, int]:
        used = np.ones(np.shape(loss_mask if labels is None else labels), bool)
        if labels is not None:
            used &= np.array(labels) != rest.get("ignore_index", -100)
        if loss_mask is not None:
            used &= np.array(loss_mask) != 0
        return {"active": int(used.sum())}

    assert failing(check(count=count, fields=["active"])) == {
        "both-numbers-shifted",
        "pad-is-eos-mask-decides",
        "pad-is-eos-label-decides",
        "shift-drops-first",
        "shift-in-every-row",
        "one-token-row",
        "pack-counts-what-loss-sees",
        "pack-boundary-masked",
    }


def test_ignored_labels_taken_for_padding_are_found() -> None:
    """Reading padding off the labels is wrong wherever a prompt is masked or nothing is known."""

    def count(labels: Any = None, loss_mask: Any = None, **rest: Any) -> dict[str, int]:
        tokens = np.array(loss_mask if labels is None else labels)
        return {"padded": int((tokens == -100).sum())}

    assert failing(check(count=count, fields=["padded"])) == {
        "both-numbers",
        "both-numbers-shifted",
        "nothing-known-about-padding",
        "pad-is-eos-preshifted",
        "pack-boundary-masked",
        "last-assistant-turn-only",
        "user-turns-masked",
        "fully-masked",
        "loss-mask-instead-of-labels",
        "ignored-for-two-reasons",
        "left-padding",
        "left-padding-by-id",
        "pad-id-inside-a-row",
        "document-numbered-mask",
        "padding-free",
        "preference-pair",
        "left-padded-prompt-and-completion",
        "masked-language-model",
        "images-beside-the-text",
    }


def test_number_of_elements_is_found() -> None:
    """Every slot taken for a token, and every token for a target, fails wherever it matters."""

    def count(labels: Any = None, loss_mask: Any = None, **rest: Any) -> dict[str, int]:
        slots = np.size(loss_mask if labels is None else labels)
        return {"raw": slots, "active": slots, "padded": 0, "masked": 0}

    report = check(count=count)
    assert set(report.passed) == {"varlen-sum-not-product", "pack-empty-document"} | {
        "token-zero-is-a-token"
    }


class Loop:
    """What many training loops do: count all, clock all, and average the rates."""

    def __init__(self, clock: Any, **options: Any) -> None:
        self.clock = clock
        self.began = clock()
        self.tokens = self.total = 0
        self.rates: list[float] = []

    def add(self, counts: TokenCounts) -> None:
        self.tokens += counts.raw
        self.total += counts.raw

    def phase(self, name: str) -> Any:
        return nullcontext()

    def record(self, step: int) -> dict[str, float]:
        now = self.clock()
        self.rates.append(self.tokens / (now - self.began))
        self.began, self.tokens = now, 0
        return {"raw_tps": sum(self.rates) / len(self.rates), "total_raw_tokens": self.total}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_loop_with_a_mean_of_rates_is_found() -> None:
    """A mean of rates, evaluation in the clock, lost totals and a division by zero are found."""
    report = check(meter=Loop, fields=["raw_tps", "total_raw_tokens"])
    assert failing(report) == {
        "rate-of-sums",
        "eval-is-not-training",
        "eval-tokens-not-counted",
        "nested-phases",
        "record-inside-a-phase",
        "zero-time",
        "warmup-is-marked",
        "totals-go-on",
    }
    found = {failure.id: failure.found for failure in report.failures}
    assert found["rate-of-sums"] == {"record(4).raw_tps": 50.75}
    assert found["totals-go-on"] == {"record(11).total_raw_tokens": 100}
    assert found["zero-time"] == {"error": "ZeroDivisionError: float division by zero"}
    assert {"mfu-is-not-guessed", "mfu-leaves-padding-out"} <= set(report.skipped)


def test_all_tokens_by_the_seconds_since_a_restart_are_found() -> None:
    """Totals that are restored and divided by the session's seconds give 1100 a second, not 100."""

    class Resumed(Loop):
        def state_dict(self) -> dict[str, Any]:
            return {"total": self.total}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.tokens = self.total = state["total"]

    report = check(meter=Resumed, fields=["raw_tps"])
    found = {failure.id: failure.found for failure in report.failures}
    assert found["resumed-run"] == {"record(11).raw_tps": 1100.0}


def test_first_rank_times_world_is_found() -> None:
    """Rank 0 times the number of ranks is wrong wherever ranks differ or share tokens."""

    def ranks(counts: list[dict[str, Any]], **layout: Any) -> dict[str, float]:
        tokens = counts[0]["raw"] * len(counts)
        return {"raw_tokens": tokens, "raw_tps": tokens / counts[0]["elapsed_s"]}

    assert failing(check(ranks=ranks, fields=["raw_tokens", "raw_tps"])) == {
        "uneven-ranks",
        "tensor-parallel",
        "data-times-tensor-parallel",
        "pipeline-stages",
        "context-parallel-counted-before-sharding",
        "uneven-shards",
        "rank-without-tokens",
        "slowest-clock",
        "imbalance",
    }


def test_sum_over_all_ranks_is_found() -> None:
    """A sum that knows no replicas counts tensor, pipeline and context parallel ranks twice."""

    def ranks(counts: list[dict[str, Any]], **layout: Any) -> dict[str, int]:
        return {"raw_tokens": sum(rank["raw"] for rank in counts)}

    assert failing(check(ranks=ranks, fields=["raw_tokens"])) == {
        "tensor-parallel",
        "data-times-tensor-parallel",
        "pipeline-stages",
        "context-parallel-counted-before-sharding",
    }


# --- the report ----------------------------------------------------------------------------------


def test_report_says_what_why_and_where_from() -> None:
    """A failure names the case, what was expected and found, the reason and the public report."""
    report = check(count=lambda **batch: {"active": 5}, fields=["active"])
    failure = next(f for f in report.failures if f.id == "shift-drops-first")
    assert (failure.expected, failure.found) == ({"active": 4}, {"active": 5})
    assert str(failure) == (
        "counting/shift-drops-first: expected active=4; found active=5\n"
        f"    {failure.why} [huggingface/transformers#46204]"
    )
    assert failure.source == "huggingface/transformers#46204"
    assert str(failure) in str(report)


def test_report_raises_only_when_asked() -> None:
    """Failures are data; `raise_for_failures` makes a test of them; no case is no pass."""
    report = check(count=lambda **batch: {})
    assert not report.ok
    with pytest.raises(AssertionError, match=r"found raw=\(absent\), active="):
        report.raise_for_failures()
    nothing = check(count=count_tokens, fields=["tokens"])
    assert len(nothing.skipped) == len(cases("counting"))
    with pytest.raises(AssertionError, match="0 passed, 0 failed, 40 skipped"):
        nothing.raise_for_failures()


def test_argument_that_is_not_known_is_no_refusal() -> None:
    """A function that takes labels only fails on the rest, also where a batch must be refused."""
    report = check(count=lambda labels: {"raw": 1}, fields=["error"])
    assert "nothing-tells-targets" in failing(report)
    assert all("TypeError" in failure.found["error"] for failure in report.failures)


def test_batch_that_should_be_refused_is_shown() -> None:
    """Where a batch must be refused, a number is what was found."""
    report = check(count=lambda **batch: 7, fields=["error"])
    failure = next(f for f in report.failures if f.id == "additive-mask")
    assert (failure.expected, failure.found) == ({"error": "a refusal"}, {"error": "none, but 7"})


def test_check_needs_an_implementation() -> None:
    """Without one there is nothing to check, and nothing that looks like a pass."""
    with pytest.raises(TypeError, match="count=, meter= or ranks="):
        check()

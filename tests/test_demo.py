"""The demo: its data, its packing, the claims it measures, and one real short run."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from driving import make_record
from tokrate import ThroughputRecord, count_tokens
from tokrate.demo import DemoResult, run_demo
from tokrate.demo.arms import ARMS
from tokrate.demo.batches import (
    IGNORE_INDEX,
    Batch,
    collate,
    epoch_batches,
    pack_rows,
    pad_rows,
    steps_per_epoch,
)
from tokrate.demo.claims import (
    UNCHANGED,
    Sensitivity,
    change_context,
    check_claims,
    measure_sensitivity,
)
from tokrate.demo.data import (
    EOS_ID,
    MAX_SLOTS,
    Document,
    Pair,
    harvest_pairs,
    split_documents,
)
from tokrate.demo.live import TerminalDisplay
from tokrate.demo.model import SmallTransformer, document_mask, token_losses
from tokrate.demo.report import how_to_open, notes, reasons
from tokrate.demo.result import ArmResult, explain, sum_steady
from tokrate.demo.train import WINDOWS, Job, train_arms
from tokrate.errors import ConfigError, MissingPackageError


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    """All pairs of this Python's library."""
    return harvest_pairs()


@pytest.fixture(scope="module")
def documents(pairs: list[Pair]) -> list[Document]:
    """The training documents."""
    return split_documents(pairs)[0]


@pytest.fixture(scope="module")
def model() -> SmallTransformer:
    """Untrained weights."""
    return SmallTransformer()


@pytest.fixture(scope="module")
def sensitivity(model: SmallTransformer, documents: list[Document]) -> Sensitivity:
    """One batch of 8, with more padding, and with other context."""
    return measure_sensitivity(model, documents[:8])


# --- data -----------------------------------------------------------------------------------------


def test_harvest_is_large_and_the_same_every_time(pairs: list[Pair]) -> None:
    """This Python's library gives thousands of pairs, in the same order each time."""
    assert len(pairs) > 4000
    assert pairs == harvest_pairs()
    assert len({pair.docstring for pair in pairs}) == len(pairs)


def test_harvest_executes_nothing(tmp_path: Path) -> None:
    """Source files are read, not run: neither a raise nor a broken file does anything."""
    functions = "".join(f'def f{i}(x):\n    """Text {i}."""\n' for i in range(600))
    (tmp_path / "loud.py").write_text(functions + "raise SystemExit('executed')\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    pairs = harvest_pairs(tmp_path)
    assert len(pairs) == 600
    assert pairs[7].prompt == "# loud.py\ndef f7(x):\n"


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    """A Python that ships no sources is told so, before anything is trained."""
    with pytest.raises(
        ConfigError, match=r"found 0 documented functions under .*expected at least"
    ):
        harvest_pairs(tmp_path)


def test_documents_depend_on_the_seed_only(pairs: list[Pair], documents: list[Document]) -> None:
    """The split is the same for the same seed, and another one for another seed."""
    assert split_documents(pairs, seed=0)[0] == documents
    assert split_documents(pairs, seed=1)[0] != documents
    assert not set(documents).intersection(split_documents(pairs)[1])


def test_documents_fit_and_keep_an_answer(documents: list[Document]) -> None:
    """No document is longer than a row, and each has something to answer."""
    assert max(document.slots for document in documents) == MAX_SLOTS
    assert all(document.prompt_tokens < document.slots for document in documents)
    assert all(document.tokens[-1] == EOS_ID for document in documents)


# --- batches --------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=300), st.integers(50, 80))
def test_packing_loses_and_doubles_nothing(lengths: list[int], width: int) -> None:
    """Each document is in exactly one row, and no row is fuller than it is wide."""
    documents = [Document((index,) * (slots + 1), 1) for index, slots in enumerate(lengths)]
    rows = pack_rows(documents, width=width)
    assert Counter(document for row in rows for document in row) == Counter(documents)
    assert all(0 < sum(document.slots for document in row) <= width for row in rows)


def test_an_epoch_holds_each_token_once(documents: list[Document]) -> None:
    """Padded or packed, an epoch has the same documents, token for token and target for target."""
    expected = Counter(document.tokens for document in documents[:300])
    for layout in ("padded", "packed"):
        batches = list(epoch_batches(documents[:300], layout=layout))
        found = Counter(tokens for batch in batches for tokens in _documents_in(batch))
        assert found == expected
        assert len(batches) == steps_per_epoch(documents[:300], layout=layout)


def _documents_in(batch: Batch) -> Iterator[tuple[int, ...]]:
    """The documents of a batch, rebuilt from its tensors: tokens, then the last target."""
    for row in range(len(batch.tokens)):
        for number in range(1, int(batch.documents[row].max()) + 1):
            own = batch.documents[row] == number
            tokens, labels = batch.tokens[row][own].tolist(), batch.labels[row][own].tolist()
            assert tokens[1:] == labels[:-1]  # no target lies behind the document's boundary
            assert batch.positions[row][own].tolist() == list(range(len(tokens)))
            yield (*tokens, labels[-1])


def test_masked_prompts_leave_the_answers(documents: list[Document]) -> None:
    """With the loss on answers only, the targets are the answer's tokens and the end token."""
    document = documents[0]
    labels = collate(pad_rows([document]), target="answers").labels[0]
    assert labels[labels != IGNORE_INDEX].tolist() == list(
        document.tokens[document.prompt_tokens :]
    )


def test_padding_is_what_we_say(documents: list[Document]) -> None:
    """Over an epoch about 58 % of the padded slots are padding, and hardly any of the packed."""
    shares = {}
    for layout in ("padded", "packed"):
        raw = padded = 0
        for batch in epoch_batches(documents, layout=layout):
            counts = count_tokens(batch.labels, attention_mask=batch.documents, labels_aligned=True)
            assert counts.masked == 0
            raw, padded = raw + counts.raw, padded + counts.padded
        shares[layout] = padded / raw
    assert shares["padded"] == pytest.approx(0.58, abs=0.03)  # other Pythons, other docstrings
    assert shares["packed"] < 0.05


# --- model ----------------------------------------------------------------------------------------


def _losses(model: SmallTransformer, batch: Batch, documents: list[Document]) -> list[float]:
    """Mean loss of each document, in the order in which they lie in the batch."""
    with torch.no_grad():
        losses = token_losses(model, batch)
    found = [
        losses[row][batch.documents[row] == number].mean().item()
        for row in range(len(batch.tokens))
        for number in range(1, int(batch.documents[row].max()) + 1)
    ]
    assert len(found) == len(documents)
    return found


def test_packed_documents_read_as_if_alone(
    model: SmallTransformer, documents: list[Document]
) -> None:
    """Each document has the same loss in a pack as in a row of its own: mask and positions hold."""
    rows = pack_rows(documents[:40])
    order = [document for row in rows for document in row]
    packed = _losses(model, collate(rows), order)
    padded = _losses(model, collate(pad_rows(order)), order)
    assert len(rows) < len(order) / 2
    assert packed == pytest.approx(padded, rel=1e-5)


@pytest.mark.parametrize("broken", ["documents", "positions"])
def test_a_leaking_pack_would_be_found(
    model: SmallTransformer, documents: list[Document], broken: str
) -> None:
    """The test above fails when a pack lets documents see each other or runs positions on."""
    batch = collate(pack_rows(documents[:40]))
    positions = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    leak = {"documents": (batch.documents > 0).long(), "positions": positions}[broken]
    wrong = replace(batch, **{broken: leak})
    with torch.no_grad():
        change = token_losses(model, wrong) - token_losses(model, batch)
    last = batch.documents > 1
    assert change[last].abs().max() > 1e-2


def test_no_row_of_the_mask_is_empty(documents: list[Document]) -> None:
    """Padding sees padding, so that the softmax is never over nothing."""
    batch = collate(pack_rows(documents[:20]), width=MAX_SLOTS + 3)
    assert document_mask(batch.documents).any(dim=-1).all()


def test_weights_depend_on_the_seed_only() -> None:
    """Two arms start from the same weights, and the caller's random state is left alone."""
    state = torch.random.get_rng_state()
    one, two, other = SmallTransformer(3), SmallTransformer(3), SmallTransformer(4)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(one.to_logits.weight, two.to_logits.weight)
    assert not torch.equal(one.to_logits.weight, other.to_logits.weight)


# --- claim (c) of torchtune issue 2296 ------------------------------------------------------------


def test_extra_padding_changes_nothing(sensitivity: Sensitivity) -> None:
    """More padding in each row leaves loss and gradient as they were, to float tolerance."""
    assert sensitivity.loss_more_padding == pytest.approx(sensitivity.loss, rel=1e-6)
    assert sensitivity.gradient_change_padding < UNCHANGED


def test_masked_context_changes_the_gradient(
    documents: list[Document], sensitivity: Sensitivity
) -> None:
    """Other tokens in masked slots change the loss of the same targets, and its gradient."""
    batch = collate(pad_rows(documents[:8]), target="answers")
    other = change_context(batch)
    active = batch.labels != IGNORE_INDEX
    assert torch.equal(other.labels, batch.labels)
    assert torch.equal(other.tokens[active], batch.tokens[active])
    assert abs(sensitivity.loss_other_context - sensitivity.loss) > 1e-3
    assert sensitivity.gradient_change_context > 0.05


# --- from records to sentences --------------------------------------------------------------------


def _arm(name: str, **sums: Any) -> ArmResult:
    fields = {"elapsed_s": 2.0, "raw_tokens": 1000, "active_tokens": 400, "padded_tokens": 600}
    facts = {"folder": Path("out") / name, "pairs": 50, "steps_per_epoch": 10, "loss": 2.5}
    record = make_record(step=5, steps=5, **(fields | sums))
    return sum_steady([record], name=name, **facts)


def test_rates_are_sums_over_sums() -> None:
    """Warm-up is left out, and a slow window weighs by its time: (8 + 24) slots in (2 + 2) s."""
    records = [
        make_record(warmup=True, raw_tokens=999, elapsed_s=99.0),
        make_record(step=2, elapsed_s=2.0),
        make_record(step=5, steps=3, elapsed_s=2.0, raw_tokens=24, active_tokens=6, raw_tps=12.0),
    ]
    facts = {"name": "x", "folder": Path("x"), "pairs": 60, "steps_per_epoch": 8, "loss": 1.0}
    arm = sum_steady(records, **facts)
    assert (arm.windows, arm.steps, arm.trained_steps, arm.disturbed) == (2, 4, 5, 1)
    assert (arm.raw_tps, arm.active_tps) == (8.0, 2.5)
    assert (arm.padded_frac, arm.masked_frac) == (4 / 32, 18 / 32)
    assert (arm.seconds_per_epoch, arm.pairs_per_s) == (8.0, 7.5)


@given(st.integers(1, 10**9), st.data())
def test_the_table_and_the_factors_add_up(raw: int, data: st.DataObject) -> None:
    """Every arm satisfies the identity, and the three factors multiply to the whole difference."""
    arms = []
    for name in ("a", "b"):
        active = data.draw(st.integers(1, raw))
        padded = data.draw(st.integers(0, raw - active))
        arms.append(_arm(name, raw_tokens=raw, active_tokens=active, padded_tokens=padded))
    for arm in arms:
        identity = arm.raw_tps * (1 - arm.padded_frac - arm.masked_frac)
        assert arm.active_tps == pytest.approx(identity, abs=1e-9 * arm.raw_tps)
    factors = explain(*arms)
    product = factors.raw * factors.unpadded * factors.unmasked
    assert product == pytest.approx(factors.active, rel=1e-5)


def test_reasons_name_the_cause() -> None:
    """The sentences name padding and masking where the numbers do, and the machine where it is."""
    padded, packed = _arm("padded"), _arm("packed", active_tokens=980, padded_tokens=20)
    masked = _arm("masked-prompt", active_tokens=300)
    slow = _arm("packed", active_tokens=980, padded_tokens=20, elapsed_s=4.0)
    by_padding, by_masking = reasons([padded, packed, masked])
    assert by_padding == (
        "packed has 2.45 times the active_tps of padded = raw ×1.00 · unpadded ×2.45 · "
        "unmasked ×1.00: less padding explains it."
    )
    assert by_masking == (
        "masked-prompt has 0.75 times the active_tps of padded = raw ×1.00 · unpadded ×1.00 · "
        "unmasked ×0.75: more masking explains it."
    )
    assert reasons([padded, slow])[0].endswith(
        "less padding explains it, and the hardware's pace takes some of it back."
    )
    assert reasons([packed, replace(packed, name="padded")])[0].endswith(
        "nothing stands out from the noise."
    )
    assert reasons([padded]) == []


def test_claims_follow_the_numbers(sensitivity: Sensitivity) -> None:
    """A claim holds only when the numbers say so; one that the arms cannot tell about is absent."""
    on_all, masked = _arm("train-on-all"), _arm("masked-prompt", active_tokens=300)
    packed = _arm("packed", active_tokens=980, padded_tokens=20)
    few = {"packed": replace(packed, steps_per_epoch=4), "train-on-all": on_all}
    slow = {"masked-prompt": replace(masked, elapsed_s=4.0), "train-on-all": on_all}
    assert [claim.letter for claim in check_claims({}, sensitivity)] == ["c"]
    assert [(c.letter, c.holds) for c in check_claims(few, sensitivity)] == [
        ("b", True),
        ("c", True),
    ]
    assert [(c.letter, c.holds) for c in check_claims(slow, sensitivity)] == [
        ("a", False),
        ("c", True),
    ]


def test_a_disturbed_machine_is_said() -> None:
    """Windows that something else slowed down are summed up, and the reader is told."""
    arm = replace(_arm("padded"), windows=12, disturbed=3)
    assert "half the raw_tps of the arm's best: padded 3 of 12." in notes([arm])[-1]


def test_every_tracker_is_told_how_to_open() -> None:
    """Each tracker that was used has its command, and the journal is always there."""
    lines = how_to_open([_arm("padded")], ["tensorboard", "mlflow", "wandb"], Path("my out"))
    assert lines[0] == "tensorboard --logdir 'my out'"
    assert lines[1] == "mlflow ui --backend-store-uri 'sqlite:///my out/mlflow.db'"
    assert lines[3].startswith("wandb sync 'my out'/*/wandb/offline-run-*")
    assert how_to_open([_arm("padded")], [], Path("out")) == [
        "tail -n 2 out/padded/journal.jsonl  # the run's own file"
    ]


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arms", "logger", "seconds", "message"),
    [
        (["padded", "paked"], [], 1.0, r"arms: found 'paked'; expected one or more of padded, "),
        ([], [], 1.0, r"arms: found none; expected"),
        (["padded", "padded"], [], 1.0, r"expected each arm once"),
        (["padded"], [], 0.0, r"seconds: found 0\.0; expected a number above 0"),
        (["padded"], [], math.nan, r"seconds: found nan"),
        (["padded"], ["tensorbord"], 1.0, r"Did you mean 'tensorboard'"),
    ],
)
def test_mistakes_are_told_first(
    tmp_path: Path, arms: list[str], logger: list[str], seconds: float, message: str
) -> None:
    """A wrong arm, backend or time is one clear error, and nothing is printed or written."""
    output = io.StringIO()
    with pytest.raises(ConfigError, match=message):
        run_demo(arms, logger, tmp_path / "out", seconds, Console(file=output))
    assert not output.getvalue()
    assert not (tmp_path / "out").exists()


def test_missing_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch the demo says what to install."""
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'tokrate\[torch\]'"):
        run_demo(["padded"], [], tmp_path, 1.0, Console(file=io.StringIO()))


def test_importing_the_demo_loads_no_torch() -> None:
    """The command line may look at the arms without paying for torch."""
    code = "import sys, tokrate.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- a real run -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, str]:
    """Two arms of one second each: the result, and what an 80-column file would get."""
    output = io.StringIO()
    folder = tmp_path_factory.mktemp("demo")
    console = Console(file=output, width=80)
    result = run_demo(["padded", "packed"], ["tensorboard"], folder, 2.0, console)
    return result, output.getvalue()


def _entries(arm: ArmResult) -> list[dict[str, Any]]:
    lines = (arm.folder / "journal.jsonl").read_text().splitlines()
    return [entry for entry in map(json.loads, lines) if entry["kind"] == "entry"]


def test_each_arm_leaves_an_honest_journal(demo: tuple[DemoResult, str]) -> None:
    """The result is what the journal's records sum up to, and every record is whole."""
    for arm in demo[0].arms:
        records = [entry["record"] for entry in _entries(arm) if "record" in entry]
        steady = records[1:]
        assert [record["warmup"] for record in records] == [True] + [False] * len(steady)
        assert arm.windows == len(steady) > 0
        assert arm.raw_tokens == sum(record["raw_tokens"] for record in steady)
        assert arm.elapsed_s == pytest.approx(sum(record["elapsed_s"] for record in steady))
        assert records[-1]["paused_s"] > 0  # the evaluation belongs to no window
        assert records[-1]["step"] == arm.trained_steps
        for record in records:
            real = 1 - record["padded_frac"] - record["masked_frac"]
            assert record["active_tps"] == pytest.approx(record["raw_tps"] * real)


def test_each_arm_learns_and_ends_well(demo: tuple[DemoResult, str]) -> None:
    """The held-out loss falls, and the run's end is told truthfully."""
    for arm in demo[0].arms:
        losses = [e["metrics"]["eval/loss"] for e in _entries(arm) if "eval/loss" in e["metrics"]]
        assert losses[0] > losses[-1] == arm.loss
        last = (arm.folder / "journal.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["outcome"] == "finished"


def test_tensorboard_has_what_the_journal_has(demo: tuple[DemoResult, str]) -> None:
    """Read by TensorBoard's own reader, the values are the journal's, to float32."""
    for arm in demo[0].arms:
        events = EventAccumulator(str(arm.folder))
        events.Reload()
        found = {(e.step, e.value) for e in events.Scalars("throughput/active_tps")}
        written = {
            (e["step"], torch.tensor(e["metrics"]["throughput/active_tps"]).item())
            for e in _entries(arm)
            if "record" in e
        }
        assert found == written


def test_the_table_shows_the_result(demo: tuple[DemoResult, str]) -> None:
    """The table's cells are the result's numbers, and they satisfy the identity."""
    result, output = demo
    for arm in result.arms:
        row = re.search(rf"^{arm.name} +([\d,]+) +([\d,]+) +(0\.\d\d) +(0\.\d\d) ", output, re.M)
        assert row
        active, raw = (float(cell.replace(",", "")) for cell in row.groups()[:2])
        padded, masked = map(float, row.groups()[2:])
        assert active == pytest.approx(arm.active_tps, abs=0.5)
        assert active == pytest.approx(raw * (1 - padded - masked), abs=0.01 * raw + 1)


def test_the_report_is_whole_and_narrow(demo: tuple[DemoResult, str]) -> None:
    """Table, reason, claims and commands are there, and only commands are wider than 80 columns."""
    output = demo[1]
    assert "packed has " in output
    assert "(b) A pack about doubles" in output
    assert "(c) Extra padding leaves" in output
    assert "tensorboard --logdir" in output
    report = output[output.index("active_tps raw_tps") : output.index("Look at the runs")]
    assert max(map(len, report.splitlines())) <= 80


class Impatient:
    """An observer that presses Ctrl-C when an arm's first record comes in."""

    def __init__(self, arm: str) -> None:
        self.arm, self.name = arm, ""

    def on_turn(self, name: str) -> None:
        """Note whose turn it is."""
        self.name = name

    def on_step(self, elapsed_s: float) -> None:
        """Wait."""

    def on_record(self, record: ThroughputRecord, loss: float) -> None:
        """Interrupt, as a terminal would."""
        if self.name == self.arm:
            raise KeyboardInterrupt


def test_an_interrupt_ends_all_runs_truthfully(tmp_path: Path, documents: list[Document]) -> None:
    """Ctrl-C in one arm's turn ends that run and the one that waits as killed."""
    job = Job(
        training=documents[:64],
        held_out=documents[64:68],
        logger={"console": False},
        dir=tmp_path,
        seconds=WINDOWS * 1e-3,  # each window is one step
    )
    with pytest.raises(KeyboardInterrupt):
        train_arms([ARMS["padded"], ARMS["packed"]], job, Impatient("packed"))
    for name in ("padded", "packed"):
        last = (tmp_path / name / "journal.jsonl").read_text().splitlines()[-1]
        assert json.loads(last)["outcome"] == "killed"


def test_the_terminal_shows_bars_and_the_record() -> None:
    """In a terminal there is a bar for each arm and the latest record under them."""
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=90, _environ={"TERM": "xterm"})
    with TerminalDisplay(console, list(ARMS), 20.0) as display:
        display.on_turn("packed")
        display.on_step(7.0)
        display.on_record(make_record(step=42, active_tps=66_001.0), 2.34)
        display._live.refresh()
    text = output.getvalue()
    assert all(name in text for name in ARMS)
    assert "  7 s" in text
    assert "step   42  loss 2.34" in text
    assert "66,001" in text

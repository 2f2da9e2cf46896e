"""What the demo says at the end: table, reasons, claims, and how to open each tracker."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tokrate.demo.result import ArmResult, Claim, DemoResult, explain
from tokrate.demo.train import Job

NOISE = 0.05
"""Ratios closer to 1 than this are not named as a cause."""
TITLES = (
    "active_tps",
    "raw_tps",
    "padded_frac",
    "masked_frac",
    "steps/\nepoch",  # broken, so that the table fits 80 columns
    "seconds/\nepoch",
    "loss",
)
"""Heads of the table's columns after the arm's name; the first four are the record's own names."""


def print_opening(job: Job, arms: int, console: Console) -> None:
    """Print what is about to happen."""
    pairs = len(job.training) + len(job.held_out)
    console.print(
        f"{pairs:,} pairs of signature and docstring from Python's own library, "
        f"{len(job.held_out)} held out.\n{arms} arm{'s' * (arms > 1)}, "
        f"{job.seconds:g} s of training each, in turns.\n",
        highlight=False,
    )


def print_report(result: DemoResult, console: Console) -> None:
    """Print the table, its notes, the reasons and the claims."""
    console.print()
    console.print(make_table(result.arms, gap=2 if console.width >= 90 else 1))
    console.print()
    for note in notes(result.arms):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print()
    for sentence in reasons(result.arms):
        console.print(sentence, markup=False, highlight=False)
    console.print("\nThe three claims of torchtune issue 2296, as measured here:")
    console.print(_claims_grid(result.claims))


def make_table(arms: Sequence[ArmResult], gap: int = 1) -> Table:
    """One row for each arm, with so many blanks between the columns."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 0, 0, gap))
    table.add_column("arm", no_wrap=True)
    for title in TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    for arm in arms:
        table.add_row(
            arm.name,
            f"{arm.active_tps:,.0f}",
            f"{arm.raw_tps:,.0f}",
            f"{arm.padded_frac:.2f}",
            f"{arm.masked_frac:.2f}",
            f"{arm.steps_per_epoch:,}",
            f"{arm.seconds_per_epoch:,.1f}",
            f"{arm.loss:.3f}",
        )
    return table


def notes(arms: Sequence[ArmResult]) -> list[str]:
    """What one must know to read the table."""
    lines = [
        "Rates: tokens per second, Σ tokens ÷ Σ seconds of all steady windows; fractions: of raw.",
        "active_tps = raw_tps × (1 − padded_frac − masked_frac).",
        "Loss: nats per token on held-out answers, after the same time of training for each arm.",
    ]
    by_name = {arm.name: arm for arm in arms}
    if {"padded", "train-on-all"} <= by_name.keys():
        noise = explain(by_name["padded"], by_name["train-on-all"]).raw
        lines.append(
            "padded and train-on-all are the same configuration, on purpose: what lies between "
            f"them (raw_tps ×{noise:.2f}) is noise."
        )
    if any(arm.disturbed for arm in arms):
        lines.append(_disturbance(arms))
    return lines


def _disturbance(arms: Sequence[ArmResult]) -> str:
    counts = ", ".join(f"{arm.name} {arm.disturbed} of {arm.windows}" for arm in arms)
    return (
        "Something else used the machine; windows with less than half the raw_tps of the arm's "
        f"best: {counts}. The rates are lower than they could be."
    )


def reasons(arms: Sequence[ArmResult]) -> list[str]:
    """A sentence for each comparison: what explains the difference in `active_tps`."""
    by_name = {arm.name: arm for arm in arms}
    sentences = []
    for name, bases in (
        ("packed", ("padded", "train-on-all")),
        ("masked-prompt", ("train-on-all", "padded")),
    ):
        base = next((by_name[base] for base in bases if base in by_name), None)
        if base and name in by_name:
            sentences.append(_reason(base, by_name[name]))
    return sentences


def _reason(base: ArmResult, other: ArmResult) -> str:
    factors = explain(base, other)
    causes = {
        "the hardware's pace": factors.raw,
        "less padding" if factors.unpadded > 1 else "more padding": factors.unpadded,
        "less masking" if factors.unmasked > 1 else "more masking": factors.unmasked,
    }
    return (
        f"{other.name} has {factors.active:.2f} times the active_tps of {base.name} = "
        f"raw ×{factors.raw:.2f} · unpadded ×{factors.unpadded:.2f} · "
        f"unmasked ×{factors.unmasked:.2f}: "
        f"{_main_cause(causes)}."
    )


def _main_cause(causes: Mapping[str, float]) -> str:
    """Names the cause that weighs most, and any other that is more than noise."""
    weights = {cause: math.log(ratio) for cause, ratio in causes.items()}
    first, *others = sorted(causes, key=lambda cause: -abs(weights[cause]))
    if abs(weights[first]) <= NOISE:
        return "nothing stands out from the noise"
    parts = [f"{first} explains it"]
    for cause in others:
        if abs(weights[cause]) > NOISE:
            same = weights[cause] * weights[first] > 0
            parts.append(f"{cause} {'adds to it' if same else 'takes some of it back'}")
    return ", and ".join(parts)


def _claims_grid(claims: Sequence[Claim]) -> Table:
    grid = Table.grid(padding=(0, 1, 0, 0))
    for claim in claims:
        verdict = ("holds", "green") if claim.holds else ("not seen in this run", "yellow")
        grid.add_row(f"  ({claim.letter})", Text.assemble(claim.text, " → ", verdict))
        grid.add_row("", Text(claim.measured, style="dim"))
    return grid


def print_how_to_open(
    arms: Sequence[ArmResult], backends: Sequence[str], folder: Path, console: Console
) -> None:
    """Print a command for each tracker that was used, whole, so that it can be copied."""
    console.print("\nLook at the runs:")
    for line in how_to_open(arms, backends, folder):
        console.print(f"  {line}", soft_wrap=True, markup=False, highlight=False)


def how_to_open(arms: Sequence[ArmResult], backends: Sequence[str], folder: Path) -> list[str]:
    """Commands that show the runs, one or two for each tracker, and the journal at the end."""
    first = arms[0].folder
    root = shlex.quote(str(folder))
    store = shlex.quote(f"sqlite:///{folder / 'mlflow.db'}")
    commands = {
        "tensorboard": [f"tensorboard --logdir {root}"],
        "mlflow": [f"mlflow ui --backend-store-uri {store}"],
        "wandb": [
            f"wandb leet {shlex.quote(str(first / 'wandb'))}  # in the terminal, no account",
            f"wandb sync {root}/*/wandb/offline-run-*  # to your account",
        ],
    }
    lines = [line for name in backends for line in commands.get(name, [])]
    return [*lines, f"tail -n 2 {shlex.quote(str(first / 'journal.jsonl'))}  # the run's own file"]

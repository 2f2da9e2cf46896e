"""TRL's trainers with the callback: padded, packed, padding-free, completions only, preferences."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from integrations.hugging import byte_tokenizer, records, run_example, tiny_llama, two_lines
from tokrate.integrations.transformers import TokrateCallback

pytestmark = [
    # transformers, TRL and accelerate on what they themselves, and torch, do.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
TEXTS = ["a", "bcd", "efghij", "klmn", "op", "qrstuvwx", "yz", "abcde"]
PROMPTS = ["q:", "ask:", "why:", "how so:", "x:", "y:", "say:", "tell:"]
LENGTHS = [len(text) + 1 for text in TEXTS]
"""Tokens of each text: its bytes, and the end-of-text token that TRL adds."""
PROMPT_LENGTHS = [len(prompt) for prompt in PROMPTS]
SETTINGS = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": "none",
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
    "gradient_checkpointing": True,
}


class Counting(SFTTrainer):
    """A trainer that remembers what it normalised each step's loss by."""

    def get_batch_samples(self, *arguments: Any) -> Any:
        samples, items = super().get_batch_samples(*arguments)
        self.items = [*getattr(self, "items", []), int(items)]
        return samples, items


def sft(folder: Path, columns: dict[str, list[str]], **options: Any) -> Counting:
    """Train two steps of two micro-batches, recorded each step."""
    if options.get("padding_free"):
        options["max_length"] = None  # TRL cuts no text there, and wants to be told so
    trainer = Counting(
        model=tiny_llama(),
        args=SFTConfig(str(folder / "out"), **{**SETTINGS, **options}),
        train_dataset=Dataset.from_dict(columns),
        processing_class=byte_tokenizer(),
        callbacks=[TokrateCallback()],
    )
    trainer.train()
    return trainer


def found(folder: Path) -> list[tuple[int, int, int]]:
    """Raw, active and padded of each record."""
    return [(r["raw_tokens"], r["active_tokens"], r["padded_tokens"]) for r in records(folder)]


def by_hand(
    lengths: list[int], context: list[int], *, padded: bool = True, rows: int = 2
) -> list[tuple[int, int, int]]:
    """The counts of each step of two micro-batches: rows of these lengths, in order.

    Args:
        lengths: Tokens of each row.
        context: Tokens at its start that are no target; at least the first one.
        padded: Whether the rows of a micro-batch are padded to the longest.
        rows: In a micro-batch.
    """
    steps = []
    for step in (0, 1):
        raw = active = real = 0
        for micro in (0, 1):
            first = (step * 2 + micro) * rows
            mine = range(first, first + rows)
            longest = max(lengths[row] for row in mine)
            raw += sum(longest if padded else lengths[row] for row in mine)
            real += sum(lengths[row] for row in mine)
            active += sum(lengths[row] - max(context[row], 1) for row in mine)
        steps.append((raw, active, raw - real))
    return steps


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_padded_texts(tmp_path: Path, loss_type: str) -> None:
    """Each row loses its first token to the shift; the rest of the text is active."""
    trainer = sft(tmp_path, {"text": TEXTS}, loss_type=loss_type)
    assert found(tmp_path) == by_hand(LENGTHS, [0] * 8)
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


@pytest.mark.parametrize("padding_free", [False, True])
def test_completions_only(tmp_path: Path, padding_free: bool) -> None:
    """Prompts are masked, padded or not."""
    columns = {"prompt": PROMPTS, "completion": TEXTS}
    trainer = sft(tmp_path, columns, padding_free=padding_free)
    lengths = [a + b for a, b in zip(PROMPT_LENGTHS, LENGTHS, strict=True)]
    assert found(tmp_path) == by_hand(lengths, PROMPT_LENGTHS, padded=not padding_free)
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_padding_free(tmp_path: Path) -> None:
    """Documents stand in one row: no padding, and each loses its first token."""
    trainer = sft(tmp_path, {"text": TEXTS}, padding_free=True)
    assert found(tmp_path) == by_hand(LENGTHS, [0] * 8, padded=False)
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_padding_free_filled_up_to_a_round_length(tmp_path: Path) -> None:
    """TRL calls each slot of the tail a document of its own; it is padding."""
    trainer = sft(tmp_path, {"text": TEXTS}, padding_free=True, pad_to_multiple_of=16)
    plain = by_hand(LENGTHS, [0] * 8, padded=False)
    pairs = [sum(LENGTHS[i : i + 2]) for i in range(0, 8, 2)]
    rounded = [-(-pair // 16) * 16 for pair in pairs]
    raws = [sum(rounded[:2]), sum(rounded[2:])]
    assert found(tmp_path) == [
        (raw, active, raw - real) for raw, (real, active, _) in zip(raws, plain, strict=True)
    ]
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_packing(tmp_path: Path) -> None:
    """Best-fit packs of 16: TRL's own packs, each document without its first token."""
    options = {"packing": True, "max_length": 16, "per_device_train_batch_size": 1, "max_steps": 1}
    trainer = sft(tmp_path, {"text": TEXTS}, **options)
    packs = trainer.train_dataset["seq_lengths"]
    assert sorted(length for pack in packs for length in pack) == sorted(LENGTHS)
    hand = [(sum(pack), sum(pack) - len(pack), 0) for pack in packs[:2]]
    assert found(tmp_path) == [tuple(map(sum, zip(*hand, strict=True)))]
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_wrapped_packing(tmp_path: Path) -> None:
    """Wrapped packs are rows without documents: each row loses one token, none is padding."""
    options = {"packing": True, "packing_strategy": "wrapped", "max_length": 4}
    trainer = sft(tmp_path, {"text": TEXTS}, **options)
    assert found(tmp_path) == [(16, 12, 0)] * 2
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_assistant_turns_only(tmp_path: Path) -> None:
    """Of a conversation, what the template marks as generated is active."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    talks = [
        [{"role": "user", "content": p}, {"role": "assistant", "content": t}]
        for p, t in zip(PROMPTS, TEXTS, strict=True)
    ]
    trainer = Counting(
        model=tiny_llama(),
        args=SFTConfig(str(tmp_path / "out"), **SETTINGS, assistant_only_loss=True),
        train_dataset=Dataset.from_dict({"messages": talks}),
        processing_class=tokenizer,
        callbacks=[TokrateCallback()],
    )
    trainer.train()
    lengths = [a + b for a, b in zip(PROMPT_LENGTHS, LENGTHS, strict=True)]
    assert found(tmp_path) == by_hand(lengths, PROMPT_LENGTHS)
    assert [active for _, active, _ in found(tmp_path)] == trainer.items


def test_what_trl_calls_num_tokens(tmp_path: Path) -> None:
    """TRL's `num_tokens` is every real token; with padding-free also what fills up the row."""
    trainer = sft(tmp_path / "padded", {"text": TEXTS})
    raw, padded = (
        sum(column) for column in list(zip(*found(tmp_path / "padded"), strict=True))[::2]
    )
    assert trainer.state.log_history[-2]["num_tokens"] == raw - padded == sum(LENGTHS)
    trainer = sft(tmp_path / "free", {"text": TEXTS}, padding_free=True, pad_to_multiple_of=16)
    raw, _, _ = (sum(column) for column in zip(*found(tmp_path / "free"), strict=True))
    assert trainer.state.log_history[-2]["num_tokens"] == raw > sum(LENGTHS)


@pytest.mark.parametrize("precompute", [False, True])
def test_preferences(tmp_path: Path, precompute: bool) -> None:
    """Chosen and rejected are rows of one batch; the reference model's pass adds nothing."""
    rejected = [text[::-1] + "!" for text in TEXTS]
    columns = {"prompt": PROMPTS, "chosen": TEXTS, "rejected": rejected}
    trainer = DPOTrainer(
        model=tiny_llama(),
        ref_model=None if precompute else tiny_llama(),
        args=DPOConfig(str(tmp_path / "out"), **SETTINGS, precompute_ref_log_probs=precompute),
        train_dataset=Dataset.from_dict(columns),
        processing_class=byte_tokenizer(),
        callbacks=[TokrateCallback()],
    )
    trainer.train()
    hand = []
    for step in (0, 1):
        raw = active = real = 0
        for micro in (0, 1):
            mine = range((step * 2 + micro) * 2, (step * 2 + micro) * 2 + 2)
            rows = [PROMPT_LENGTHS[i] + LENGTHS[i] for i in mine]
            rows += [PROMPT_LENGTHS[i] + LENGTHS[i] + 1 for i in mine]
            raw, real = raw + max(rows) * 4, real + sum(rows)
            active += sum(rows) - 2 * sum(PROMPT_LENGTHS[i] for i in mine)
        hand.append((raw, active, raw - real))
    assert found(tmp_path) == hand
    assert trainer.state.log_history[-2]["num_tokens"] == sum(raw - pad for raw, _, pad in hand)


def test_a_loss_of_your_own_hides_the_labels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SFTTrainer with label smoothing shows the model no labels: said, and no rate is made up."""
    with caplog.at_level(logging.WARNING, "tokrate"):
        sft(tmp_path, {"text": TEXTS}, label_smoothing_factor=0.1)
    assert {record["active_tps"] for record in records(tmp_path)} == {None}
    assert "label smoothing" in caplog.text


@pytest.mark.parametrize("layout", ["padded", "padding-free"])
def test_the_example_counts_what_it_counts_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str
) -> None:
    """Its record and its own count of the same texts are one; only padding makes more slots."""
    run_example("trl_sft.py", layout, str(tmp_path))
    (active, tokens), counted = two_lines(capsys.readouterr().out)
    raw, found_active, padded = (sum(column) for column in zip(*found(tmp_path), strict=True))
    assert counted == [found_active, raw]
    assert (active, tokens) == (found_active, raw - padded)
    assert (padded == 0) is (layout == "padding-free")

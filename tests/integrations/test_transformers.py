"""`Trainer` with the callback: what is counted is what the trainer normalises its loss by."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration, Trainer

from integrations.hugging import (
    IGNORED,
    Counting,
    Rows,
    arguments,
    byte_tokenizer,
    journal,
    records,
    run_example,
    tiny_llama,
    two_lines,
)
from launching import TESTS, torchrun
from tokrate import RunInfo, ThroughputMeter, integrations, open_logger, watch_model
from tokrate.errors import ConfigError
from tokrate.integrations.transformers import TokrateCallback

pytestmark = [
    # transformers and accelerate on what they themselves, and torch, do.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
ROW = 8
ROWS_IN_A_STEP = 4


@pytest.fixture(autouse=True)
def _graphs_of_their_own() -> Iterator[None]:
    """What torch compiled for one test is not there in the next."""
    yield
    torch.compiler.reset()


def train(
    folder: Path,
    callback: TokrateCallback | None = None,
    *,
    model: Any = None,
    rows: Any = None,
    kind: type[Trainer] = Counting,
    resume: Any = None,
    callbacks: tuple[Any, ...] = (),
    trainer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Train with the callback (or one that was made for it) and return the trainer."""
    callback = callback or TokrateCallback()
    trainer = kind(
        model=model or tiny_llama(),
        args=arguments(folder, **options),
        train_dataset=rows or Rows(),
        eval_dataset=Rows(8),
        callbacks=[callback, *callbacks],
        **(trainer_options or {}),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def actives(folder: Path) -> list[int]:
    """Active tokens of each record."""
    return [record["active_tokens"] for record in records(folder)]


def pairs(numbers: list[int]) -> list[int]:
    """Sums of each two: records are written every other step."""
    return [sum(numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


# --- the counts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_accumulation_steps": 1},
        {"gradient_checkpointing": True},
        {
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        {"torch_compile": True, "torch_compile_backend": "eager"},
        {"neftune_noise_alpha": 5},
        {"bf16": True},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_active_is_what_the_loss_is_normalised_by(tmp_path: Path, options: dict[str, Any]) -> None:
    """Each window's active tokens are the sum of its steps' num_items_in_batch."""
    model, forwards = tiny_llama(), []
    if "gradient_checkpointing" in options:
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: forwards.append(1))
    trainer = train(tmp_path, model=model, **options)
    assert actives(tmp_path) == pairs(trainer.items)
    # The options are in force: layers run again in backward, or what is called is compiled.
    assert len(forwards) == (2 * 12 if "gradient_checkpointing" in options else 0)
    compiled = hasattr(trainer.model_wrapped, "_orig_mod")
    assert compiled is ("torch_compile" in options)


def test_a_label_in_the_first_slot_is_no_target(tmp_path: Path) -> None:
    """A text without a prompt loses one label a row to the shift, here as in the trainer."""

    class Texts(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            labels = zip(row["input_ids"], row["attention_mask"], strict=True)
            return {**row, "labels": [i if real else IGNORED for i, real in labels]}

    trainer = train(tmp_path, rows=Texts(), train_sampling_strategy="sequential")
    assert actives(tmp_path) == pairs(trainer.items)
    assert sum(trainer.items) == sum(3 + index % 5 - 1 for index in range(24))


def test_the_record_is_a_hand_count(tmp_path: Path) -> None:
    """Rows in order, counted from what Rows says: 3 to 7 real tokens, 2 of them prompt."""
    train(tmp_path, train_sampling_strategy="sequential")
    hand = []
    for first in (0, 8, 16):
        real = [3 + index % 5 for index in range(first, first + 8)]
        hand.append((64, sum(real) - 2 * 8, 64 - sum(real), 2))
    found = [
        (r["raw_tokens"], r["active_tokens"], r["padded_tokens"], r["steps"])
        for r in records(tmp_path)
    ]
    assert found == hand
    assert journal(tmp_path)[-1]["outcome"] == "finished"


def test_the_example_counts_what_it_counts_by_hand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its record and its own count of the same rows are one."""
    run_example("hf_trainer.py", str(tmp_path))
    by_hand, counted = two_lines(capsys.readouterr().out)
    assert by_hand == counted == [48 * 32, actives_in(tmp_path)]


def actives_in(folder: Path) -> int:
    """Active tokens of all records."""
    return sum(actives(folder))


def test_masked_models_read_labels_where_they_stand(tmp_path: Path) -> None:
    """BERT's loss does not shift, and neither count does."""
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=264,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )

    class Hidden(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return {**row, "labels": row["input_ids"][:1] + [IGNORED] * 7}

    trainer = train(tmp_path, model=model, rows=Hidden())
    assert actives(tmp_path) == pairs(trainer.items) == [8, 8, 8]


def test_encoder_decoders_have_two_sequences(tmp_path: Path) -> None:
    """T5's encoder slots are work without targets; its labels are not shifted."""
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=264,
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
        )
    )

    class Translations(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return {**row, "labels": row["labels"][2:6]}

    trainer = train(tmp_path, model=model, rows=Translations())
    assert actives(tmp_path) == pairs(trainer.items)
    assert {record["raw_tokens"] for record in records(tmp_path)} == {8 * (8 + 4)}


def test_generation_and_evaluation_by_others_do_not_count(tmp_path: Path) -> None:
    """A callback that generates or evaluates in between changes no count and no training time."""

    class Curious(transformers.TrainerCallback):
        trainer: Any = None

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kw: Any) -> None:
            model.eval()
            model.generate(torch.tensor([[5, 6]]), max_new_tokens=2, do_sample=False)
            if state.global_step == 3:
                self.trainer.evaluate()

    class Knowing(Counting):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            curious.trainer = self

    curious = Curious()
    trainer = train(tmp_path, kind=Knowing, callbacks=(curious,))
    assert actives(tmp_path) == pairs(trainer.items)
    assert all(record["paused_s"] > 0 for record in records(tmp_path)[1:])


def test_two_processes_sum(tmp_path: Path) -> None:
    """Under torchrun with DDP, active is the num_items_in_batch that both ranks gathered."""
    said = torchrun(TESTS / "integrations" / "trained_world.py", str(tmp_path), ranks=2)
    found = records(tmp_path)
    assert f"items {[record['active_tokens'] for record in found]}" in said
    assert [record["raw_tokens"] for record in found] == [2 * 64] * 2
    assert {record["devices"] for record in found} == {2}
    kinds = [line["kind"] for line in journal(tmp_path)]
    assert (kinds.count("run"), kinds.count("end")) == (1, 1)


# --- time ----------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass only when somebody says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(Counting):
    """Training takes 1 s a micro-batch, an evaluation batch 100 s, a checkpoint 1000 s."""

    clock: Clock

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, *args, **kwargs)
        self.clock.now += 1 if model.training else 100
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        self.clock.now += 1000

    def log(self, *args: Any, **kwargs: Any) -> None:
        self.clock.now += 0.125
        super().log(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "pauses"),
    [
        ({"eval_strategy": "steps", "eval_steps": 4}, [(2, 0), (4, 0), (6, 100)]),
        ({"save_strategy": "steps", "save_steps": 2}, [(2, 0), (4, 1000), (6, 1000)]),
        (
            {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 2, "save_steps": 2},
            [(2, 0), (4, 1100), (6, 1100)],
        ),
        (
            {
                "save_strategy": "best",
                "eval_strategy": "steps",
                "eval_steps": 3,
                "metric_for_best_model": "loss",
            },
            [(2, 0), (3, 0), (4, 1100), (6, 0)],
        ),
        ({"eval_on_start": True}, [(2, 100), (4, 0), (6, 0)]),
        (
            {
                "logging_strategy": "epoch",
                "eval_strategy": "epoch",
                "save_strategy": "epoch",
                "max_steps": -1,
                "num_train_epochs": 2,
            },
            [(6, 0), (12, 1100)],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_evaluation_and_checkpoints_are_phases(
    tmp_path: Path, options: dict[str, Any], pauses: list[tuple[int, int]]
) -> None:
    """Their time is paused time, however they are asked for; training time is none of it."""
    clock = Timed.clock = Clock()
    callback = TokrateCallback(meter_options={"clock": clock})
    train(tmp_path, callback, kind=Timed, per_device_eval_batch_size=8, **options)
    found = records(tmp_path)
    assert [(r["step"], round(r["paused_s"], -2)) for r in found] == pauses
    for record in found:  # two micro-batches of a second each, and the trainer's logging
        assert record["steps"] * 2 <= record["elapsed_s"] <= record["steps"] * 2 + 0.5


def test_waiting_for_data_is_told(tmp_path: Path) -> None:
    """Each row takes a quarter of a second to fetch; logging between two steps is no waiting."""
    clock = Timed.clock = Clock()
    callback = TokrateCallback(meter_options={"clock": clock})
    train(tmp_path, callback, kind=Timed, rows=Rows(clock=clock))
    # accelerate fetches one batch ahead: its wait falls into the step before
    assert [record["data_wait_s"] for record in records(tmp_path)] == [2.5, 2.0, 1.5]


# --- restarts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("restore", [False, True])
def test_totals_go_on_from_a_checkpoint(tmp_path: Path, restore: bool) -> None:
    """The same run goes on, with or without transformers restoring callbacks by itself."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    first = train(tmp_path, max_steps=3, **saving)
    second = train(
        tmp_path,
        TokrateCallback(logger_options={"metrics": "all"}),
        resume=str(tmp_path / "out" / "checkpoint-3"),
        restore_callback_states_from_checkpoint=restore,
        **saving,
    )
    lines = journal(tmp_path)  # one journal
    assert [line["session"] for line in lines if line["kind"] == "run"] == [1, 2]
    found = records(tmp_path)
    assert [(r["step"], r["session"]) for r in found] == [(2, 1), (3, 1), (4, 2), (6, 2)]
    assert found[-1]["total_active_tokens"] == sum(first.items) + sum(second.items)
    keys = {key for line in lines if line["kind"] == "entry" for key in line["metrics"]}
    assert "throughput/total_raw_tokens" in keys  # the new settings are in force


def test_a_checkpoint_from_before_tokrate_is_no_obstacle(tmp_path: Path) -> None:
    """Totals begin with this session, and the trainer can save again."""
    saving = {"save_strategy": "steps", "save_steps": 3}
    trainer = Counting(
        model=tiny_llama(), args=arguments(tmp_path, max_steps=3, **saving), train_dataset=Rows()
    )
    trainer.train()
    resumed = train(tmp_path, resume=str(tmp_path / "out" / "checkpoint-3"), **saving)
    found = records(tmp_path)
    assert [record["session"] for record in found] == [1, 1]
    assert found[-1]["total_active_tokens"] == sum(resumed.items)


def test_training_again_is_a_new_run(tmp_path: Path) -> None:
    """The same trainer, trained twice, writes two runs."""
    trainer = train(tmp_path)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "out" / "runs").iterdir()) == ["out", "out-2"]


def test_training_that_failed_hinders_nobody(tmp_path: Path) -> None:
    """After an exception the model can be trained again, and its first run has failed."""

    class Failing(Counting):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == 3:
                raise RuntimeError("out of luck")
            return super().training_step(*args, **kwargs)

    model = tiny_llama()
    with pytest.raises(RuntimeError, match="out of luck"):
        train(tmp_path / "first", model=model, kind=Failing)
    trainer = train(tmp_path / "second", model=model)
    assert journal(tmp_path / "first")[-1]["outcome"] == "failed"
    assert actives(tmp_path / "second") == pairs(trainer.items)


def test_training_that_failed_is_told_at_the_end_of_the_process(tmp_path: Path) -> None:
    """Also where the script caught the exception, let go of the trainer, and ended well."""
    program = f"""
from pathlib import Path
from integrations.hugging import Counting, Rows, arguments, tiny_llama
from tokrate.integrations.transformers import TokrateCallback

class Failing(Counting):
    def training_step(self, *args, **kwargs):
        raise RuntimeError("out of luck")

args = arguments(Path({str(tmp_path)!r}))
rows, callbacks = Rows(), [TokrateCallback()]
trainer = Failing(model=tiny_llama(), args=args, train_dataset=rows, callbacks=callbacks)
try:
    trainer.train()
except RuntimeError:
    del trainer, callbacks
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert journal(tmp_path)[-1]["outcome"] == "failed"


# --- beside others -------------------------------------------------------------------------------


def test_beside_report_to_mlflow_there_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that transformers started is joined, and each number is there once."""
    import mlflow

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "both")
    mlflow.set_tracking_uri(uri)
    train(tmp_path, TokrateCallback("mlflow"), report_to="mlflow")
    os.environ.pop("MLFLOW_EXPERIMENT_ID", None)  # mlflow itself chooses it for child processes
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("both").experiment_id])
    history = client.get_metric_history(run.info.run_id, "throughput/active_tps")
    assert [point.step for point in history] == [2, 4, 6]
    assert len(client.get_metric_history(run.info.run_id, "loss")) == 3
    assert "train/loss" not in run.data.metrics
    assert run.info.status == "FINISHED"


def test_beside_report_to_wandb_there_is_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One offline run holds the trainer's numbers and ours."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    train(tmp_path, TokrateCallback("wandb"), report_to="wandb")
    wandb.finish()
    (file,) = tmp_path.rglob("*.wandb")
    content = file.read_bytes()
    assert b"throughput/active_tps" in content
    assert b"train/loss" in content


@pytest.mark.parametrize(
    ("spec", "report_to", "forward", "there"),
    [
        ("none", "none", None, True),
        ("tensorboard", "none", False, False),
        ("tensorboard", "tensorboard", None, False),
        ("tensorboard", "tensorboard", True, True),
    ],
)
def test_the_trainers_own_numbers_are_written_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spec: str,
    report_to: str,
    forward: bool | None,
    there: bool,
) -> None:
    """They come along, under the names that transformers' callbacks use, unless they are there."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    callback = TokrateCallback(spec, forward_logs=forward)
    train(tmp_path, callback, report_to=report_to, eval_strategy="steps", eval_steps=6)
    keys = {key for line in journal(tmp_path) for key in line.get("metrics", {}) if "/" in key}
    assert ({"train/loss", "eval/loss", "train/grad_norm"} <= keys) is there


def test_a_logger_of_yours_stays_open(tmp_path: Path) -> None:
    """Records go into an open logger, which is closed by whoever opened it."""
    with open_logger("none", run=RunInfo("mine"), dir=tmp_path) as logger:
        train(tmp_path, TokrateCallback(logger))
        logger.log_metrics({"after": 1.0}, step=7)
    assert {"after": 1.0} in [line.get("metrics") for line in journal(tmp_path)]
    assert len(records(tmp_path)) == 3


def test_two_callbacks_count_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second one writes nothing and says why."""
    with caplog.at_level(logging.WARNING, "tokrate"):
        trainer = train(tmp_path, callbacks=(TokrateCallback(run="second"),))
    assert actives(tmp_path) == pairs(trainer.items)  # and there is one journal
    assert "TokrateCallback was asked to count" in caplog.text


def test_beside_watch_model_it_counts_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model that is watched by hand is left to its watcher, and training goes on."""
    model, meter = tiny_llama(), ThroughputMeter()
    watch = watch_model(model, meter)
    with caplog.at_level(logging.WARNING, "tokrate"):
        trainer = train(tmp_path, model=model)
    watch.remove()
    assert meter.record(6).active_tokens == sum(trainer.items)
    assert not list(tmp_path.rglob("journal.jsonl"))
    assert "counted once, by watch_model" in caplog.text


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["label smoothing", "compute_loss_func"])
def test_labels_that_the_trainer_keeps_are_taken_from_its_own_number(
    tmp_path: Path, way: str
) -> None:
    """The model sees no labels, but is told how many targets the step has."""
    options: dict[str, Any] = {}
    if way == "label smoothing":
        options["label_smoothing_factor"] = 0.1
    else:

        def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
            return outputs.logits.float().pow(2).sum() / num_items_in_batch

        options["trainer_options"] = {"compute_loss_func": loss}
    trainer = train(tmp_path, **options)
    assert actives(tmp_path) == pairs(trainer.items)
    assert all(record["padded_tokens"] for record in records(tmp_path))


def test_a_model_that_is_told_nothing_of_targets_trains_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No labels and no number: said once, no rate is made up."""

    class Own(Counting):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs.pop("labels")
            return model(**inputs).logits.float().pow(2).mean()

    with caplog.at_level(logging.WARNING, "tokrate"):
        train(tmp_path, kind=Own)
    found = records(tmp_path)
    assert len(found) == 3
    assert {record["active_tps"] for record in found} == {None}
    (message,) = [r.getMessage() for r in caplog.records if r.name == "tokrate"]
    assert "nothing says which tokens are targets" in message


def test_data_without_masks_leaves_the_fractions_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Padding is unknown without a mask; the tokenizer's padding token tells it."""
    rows = Rows(without=("attention_mask",))
    with caplog.at_level(logging.WARNING, "tokrate"):
        train(tmp_path / "none", rows=rows)
    assert {record["padded_frac"] for record in records(tmp_path / "none")} == {None}
    assert "nothing tells padding from context" in caplog.text
    options = {
        "processing_class": byte_tokenizer(),
        "data_collator": transformers.default_data_collator,  # another would make up a mask
    }
    train(tmp_path / "pad", rows=rows, trainer_options=options)
    train(tmp_path / "mask")
    padded = [[r["padded_tokens"] for r in records(tmp_path / way)] for way in ("pad", "mask")]
    assert padded[0] == padded[1]


def test_labels_that_fit_nothing_are_said_and_train_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A target on padding makes the fractions unknown; it does not stop the trainer."""

    class Wrong(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            row = super().__getitem__(index)
            return {**row, "labels": [IGNORED] * 7 + [5]}

    with caplog.at_level(logging.WARNING, "tokrate"):
        train(tmp_path, rows=Wrong())
    assert records(tmp_path)[0]["padded_frac"] is None
    assert "are a target of the loss and padding by the mask at once" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meter_options": {"warmup": 1}}, "unexpected keyword argument 'warmup'"),
        ({"logger": 5}, "logger"),
    ],
)
def test_mistakes_are_said_when_the_callback_is_made(options: dict[str, Any], message: str) -> None:
    """Misspelled options do not wait for training to begin."""
    with pytest.raises(ConfigError, match=message):
        TokrateCallback(**options)


def test_an_unknown_backend_stops_before_the_first_step(tmp_path: Path) -> None:
    """The trainer has made no step when the error comes, and the model is left alone."""
    model = tiny_llama()
    with pytest.raises(ConfigError, match="Did you mean 'tensorboard'"):
        train(tmp_path, TokrateCallback("tensorbord"), model=model)
    assert watch_model(model, ThroughputMeter()).active


def test_versions_that_were_not_run_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown version of transformers is a warning with the known ones, and no more."""
    monkeypatch.setitem(integrations.KNOWN, "transformers", ("4.5", "4.0", "4.9"))
    monkeypatch.setattr(integrations, "_said", set())
    with caplog.at_level(logging.WARNING, "tokrate"):
        train(tmp_path, max_steps=2)
        train(tmp_path / "again", max_steps=2)
    said = [r.getMessage() for r in caplog.records if "not known to work" in r.getMessage()]
    assert len(said) == 1
    assert f"transformers {transformers.__version__}" in said[0]
    assert "transformers 4.5, and >= 4.0 and < 4.9 is" in said[0]


def test_nothing_is_kept_of_a_trainer_that_is_gone(tmp_path: Path) -> None:
    """The callback keeps no model alive once trainer and callback are gone."""
    from tokrate import watching

    gc.collect()
    before = len(watching._claims)
    train(tmp_path, max_steps=2)
    gc.collect()
    assert len(watching._claims) == before


# --- beside the framework's own number -----------------------------------------------------------


@pytest.mark.parametrize("way", ["all", "non_padding"])
def test_what_num_input_tokens_seen_is(tmp_path: Path, way: str) -> None:
    """`all` is our raw, `non_padding` our raw without padding; neither is active."""
    trainer = train(tmp_path, include_num_input_tokens_seen=way)
    found = records(tmp_path)
    raw = sum(record["raw_tokens"] for record in found)
    padded = sum(record["padded_tokens"] for record in found)
    seen = trainer.state.num_input_tokens_seen
    assert seen == (raw if way == "all" else raw - padded)
    assert seen > sum(trainer.items)

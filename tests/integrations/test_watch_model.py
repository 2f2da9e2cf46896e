"""A watched model counts what it is trained on, and nothing else."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from launching import TESTS, torchrun
from tokrate import ThroughputMeter, TokenCounts, watch_model
from tokrate.errors import ConfigError, CountingError
from tokrate.watching import claim_model

IGNORED = -100


class Layer(nn.Module):
    """Something that can be checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    """A causal model as Hugging Face's are: it takes labels and shifts them."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(8, 16)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        logits = self.head(x)
        if labels is None:
            return logits
        return nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )


def make_batches(number: int = 4) -> list[dict[str, Tensor]]:
    """Rows of different lengths, with prompts that the loss leaves out."""
    random = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(number):
        lengths = torch.randint(3, 9, (3, 1), generator=random)
        mask = (torch.arange(8) < lengths).long()
        ids = torch.randint(1, 16, (3, 8), generator=random) * mask
        labels = ids.masked_fill((mask == 0) | (torch.arange(8) < 2), IGNORED)
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


BATCHES = make_batches()


def by_hand(batches: list[dict[str, Tensor]]) -> TokenCounts:
    """The counts of the batches, from lists and not through the code under test."""
    raw = active = padded = 0
    for batch in batches:
        for labels, mask in zip(
            batch["labels"].tolist(), batch["attention_mask"].tolist(), strict=True
        ):
            raw += len(labels)
            active += sum(label != IGNORED for label in labels[1:])
            padded += mask.count(0)
    return TokenCounts(raw, active, padded)


def counted(meter: ThroughputMeter, step: int = 1) -> TokenCounts:
    """The counts of the meter's window."""
    record = meter.record(step)
    return TokenCounts(record.raw_tokens, record.active_tokens, record.padded_tokens)


NOTHING = TokenCounts(0, 0, 0)


@pytest.fixture(autouse=True)
def _graphs_of_their_own() -> Iterator[None]:
    """What torch compiled for one test is not there in the next."""
    yield
    torch.compiler.reset()
    gc.collect()


def train(model: Any, batches: list[dict[str, Tensor]], *, accumulate: int = 1) -> None:
    """A plain loop, without a line of tokrate."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, batch in enumerate(batches, start=1):
        loss = model(**batch)
        (loss / accumulate).backward()
        if step % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_each_micro_batch_counts_once(accumulate: int) -> None:
    """Whatever is accumulated, the window holds every micro-batch."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    train(model, BATCHES, accumulate=accumulate)
    assert counted(meter) == by_hand(BATCHES)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointed_layers_are_no_second_batch(reentrant: bool | None) -> None:
    """Layers that run again in backward, and whole models that do, count once."""
    model, meter = Model(checkpointed=reentrant is None), ThroughputMeter()
    watch_model(model, meter)
    if reentrant is None:
        train(model, BATCHES)
    else:
        for layer in model.layers:
            plain = layer.forward
            layer.forward = lambda x, plain=plain: checkpoint(  # type: ignore[method-assign]
                plain, x, use_reentrant=reentrant
            )
        train(model, BATCHES)
    assert counted(meter) == by_hand(BATCHES)


def test_a_model_that_is_checkpointed_as_a_whole_counts_once() -> None:
    """The second forward, within backward, is the same batch again."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    for batch in BATCHES:
        checkpoint(model, **batch, use_reentrant=False).backward()
    assert counted(meter) == by_hand(BATCHES)


@pytest.mark.parametrize("where", ["inside", "outside", "in place"])
def test_compiled_models_count(where: str) -> None:
    """The hook is outside of what is compiled, wherever it was set."""
    model, meter = Model(), ThroughputMeter()
    if where == "in place":
        model.compile(backend="eager")
        called: Any = model
    else:
        called = torch.compile(model, backend="eager")
    watch_model(called if where == "outside" else model, meter)
    train(called, BATCHES)
    assert counted(meter) == by_hand(BATCHES)


def test_the_compiled_forward_stays_one_graph() -> None:
    """Watching the compiled module breaks no graph, so `fullgraph=True` goes on working."""
    model, meter = Model(), ThroughputMeter()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    watch_model(compiled, meter)
    train(compiled, BATCHES)
    assert counted(meter) == by_hand(BATCHES)


def test_evaluation_and_generation_do_not_count() -> None:
    """Neither a model in evaluation mode, nor one without gradients, is being trained."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    with torch.no_grad():
        model(**BATCHES[0])
    with torch.inference_mode():
        model(**BATCHES[0])
    model.eval()
    model(**BATCHES[0])
    assert counted(meter) == NOTHING


def test_phases_do_not_count() -> None:
    """What is trained within a phase belongs to no window, as for update."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    with meter.phase("try out"):
        model(**BATCHES[0])
    assert counted(meter) == NOTHING


def test_remove_ends_it() -> None:
    """Nothing is counted after remove, nor behind a with block; removing twice is fine."""
    model, meter = Model(), ThroughputMeter()
    watch = watch_model(model, meter)
    assert watch.active
    watch.remove()
    watch.remove()
    assert not watch.active
    with watch_model(model, meter) as second:
        assert second.active
        model(**BATCHES[0])
    model(**BATCHES[1])
    assert counted(meter) == by_hand(BATCHES[:1])


def test_positional_inputs_are_known_by_the_forwards_parameters() -> None:
    """A loop may call the model by position, wrapped or not, or with a lone dict."""

    class TakesDict(nn.Module):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return batch["input_ids"]

    batch = BATCHES[0]
    for model in (Model(), torch.compile(Model(), backend="eager")):
        meter = ThroughputMeter()
        watch_model(model, meter)
        model(batch["input_ids"], batch["attention_mask"], batch["labels"])
        assert counted(meter) == by_hand([batch])
    model, meter = TakesDict(), ThroughputMeter()
    watch_model(model, meter)
    model(batch)
    assert counted(meter) == by_hand([batch])


def test_fields_name_other_parameters() -> None:
    """A forward with words of its own is understood once they are told."""

    class Own(nn.Module):
        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return tokens

    model, meter = Own(), ThroughputMeter(labels_aligned=True, pad_id=0)
    watch_model(model, meter, fields={"input_ids": "tokens", "labels": "targets"})
    model(torch.tensor([[5, 6, 7, 0]]), targets=torch.tensor([[6, 7, IGNORED, IGNORED]]))
    assert counted(meter) == TokenCounts(4, 2, 1)


def test_read_understands_any_forward() -> None:
    """Two sequences in one call are two counts."""

    class Pair(nn.Module):
        def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
            return chosen

    def read(inputs: Any) -> list[dict[str, Tensor]]:
        return [{"labels": inputs["chosen"]}, {"labels": inputs["rejected"]}]

    model, meter = Pair(), ThroughputMeter()
    watch_model(model, meter, read=read)
    model(torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2]]))
    assert meter.record(1).active_tokens == 3


def test_shifted_labels_stand_where_the_loss_reads_them() -> None:
    """`shift_labels` lose no slot to the shift, whatever the meter says of labels."""

    class Shifted(nn.Module):
        def forward(self, **inputs: Tensor) -> Tensor:
            return inputs["input_ids"]

    model, meter = Shifted(), ThroughputMeter()
    watch_model(model, meter)
    ids = torch.tensor([[5, 6, 7]])
    model(
        input_ids=ids,
        labels=ids,
        shift_labels=torch.tensor([[6, 7, IGNORED]]),
        attention_mask=torch.ones_like(ids),
    )
    assert counted(meter) == TokenCounts(3, 2, 0)


@pytest.mark.parametrize(("pad_id", "padded"), [(None, 0), (0, 2)])
def test_documents_in_one_row_have_no_padding_but_a_tail(pad_id: int | None, padded: int) -> None:
    """Position ids tell documents; a tail that only fills up the row is told by the pad token."""
    model, meter = Model(), ThroughputMeter(pad_id=pad_id)
    watch_model(model, meter)
    model(
        input_ids=torch.tensor([[5, 6, 7, 8, 0, 0]]),
        labels=torch.tensor([[IGNORED, 6, 7, IGNORED, IGNORED, IGNORED]]),
        position_ids=torch.tensor([[0, 1, 2, 0, 0, 0]]),
    )
    assert counted(meter) == TokenCounts(6, 2, padded)


def test_several_rows_with_positions_say_nothing_of_padding() -> None:
    """Positions alone are no mask: padding stays unknown and is never guessed."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    ids = torch.ones(2, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids, position_ids=torch.arange(4).expand(2, 4))
    assert counted(meter) == TokenCounts(8, 6, None)


def test_a_mask_of_pairs_is_left_out() -> None:
    """A four-dimensional mask says nothing of single slots, and stops nobody."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    ids = torch.ones(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids, attention_mask=torch.ones(1, 1, 4, 4))
    assert counted(meter) == TokenCounts(4, 3, None)


def test_a_forward_without_labels_is_said_once_and_trains_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing says what the targets are: no rate is made up, and the message says what to do."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    with caplog.at_level(logging.WARNING, "tokrate"):
        for batch in BATCHES[:2]:
            model(batch["input_ids"], batch["attention_mask"]).sum().backward()
    record = meter.record(1)
    assert record.raw_tps is None
    assert record.active_tps is None
    (message,) = [r.getMessage() for r in caplog.records]
    assert "called with attention_mask, input_ids" in message or "input_ids" in message
    assert 'fields={"labels": "targets"}' in message


def test_a_batch_that_contradicts_itself_is_the_meters_affair() -> None:
    """As update does, a strict meter raises, and one that is not says it once."""
    wrong = BATCHES[0] | {"attention_mask": torch.zeros_like(BATCHES[0]["attention_mask"])}
    model = Model()
    with watch_model(model, ThroughputMeter()), pytest.raises(CountingError, match="padding"):
        model(**wrong)
    meter = ThroughputMeter(strict=False)
    with watch_model(model, meter):
        model(**wrong)
    assert meter.record(1).padded_frac is None


def test_two_that_count_the_same_model_count_once(caplog: pytest.LogCaptureFixture) -> None:
    """The second one, on the module or on one around or within it, is told who counts already."""
    model, meter = Model(), ThroughputMeter()
    first = watch_model(model, meter, holder="the first")
    others: list[nn.Module] = [model, nn.Sequential(model), model.layers[0]]
    with caplog.at_level(logging.WARNING, "tokrate"):
        watches = [watch_model(other, meter, holder="the second") for other in others]
        assert claim_model(model, "a callback") is None
    assert not any(watch.active for watch in watches)
    assert len(caplog.records) == 4
    assert "the second was asked to count" in caplog.text
    assert "counted once, by the first" in caplog.text
    train(model, BATCHES)
    assert counted(meter) == by_hand(BATCHES)
    for watch in watches:
        watch.remove()
    first.remove()
    assert watch_model(model, meter).active


def test_a_claim_keeps_others_out_until_it_is_released() -> None:
    """An integration that counts elsewhere claims the model; other models are no conflict."""
    model, other = Model(), Model()
    claim = claim_model(model, "the Lightning callback")
    assert claim is not None
    assert not watch_model(model, ThroughputMeter()).active
    assert watch_model(other, ThroughputMeter()).active
    claim.release()
    claim.release()
    assert watch_model(model, ThroughputMeter()).active


def test_a_model_that_is_gone_claims_nothing() -> None:
    """Claims do not keep models alive, nor outlive them."""
    from tokrate import watching

    model = Model()
    claim_model(model, "somebody")
    number = len(watching._claims)
    del model
    gc.collect()
    assert len(watching._claims) == number - 1


def test_a_copy_of_a_watched_model_is_not_counted_by_surprise() -> None:
    """A deep copy (an EMA, a reference model) is put in evaluation mode by those who make one."""
    model, meter = Model(), ThroughputMeter()
    watch_model(model, meter)
    reference = copy.deepcopy(model).eval()
    reference(**BATCHES[0])
    assert counted(meter) == NOTHING


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((print,), "expected the torch.nn.Module"),
        ((Model(), {"targets": "labels"}), "fields= names targets"),
    ],
)
def test_mistakes_are_said_before_training(arguments: tuple[Any, ...], message: str) -> None:
    """What is no module, and what count_tokens does not take, is refused."""
    model, *fields = arguments
    with pytest.raises(ConfigError, match=message):
        watch_model(model, ThroughputMeter(), fields=fields[0] if fields else None)


def test_wrapped_models_count_on_every_rank() -> None:
    """DDP and FSDP2 on two ranks, watched outside or inside: the sum of both ranks' batches."""
    script = TESTS / "integrations" / "watched_world.py"
    said = torchrun(script, ranks=2)
    hand = [by_hand(make_batches(4)[rank::2]) for rank in (0, 1)]
    total = hand[0] + hand[1]
    line = f"{total.raw} {total.active} {total.padded}"
    for way in ("ddp outside", "ddp inside", "fsdp2", "ddp compiled", "fsdp2 checkpointed"):
        assert f"{way}: {line}" in said

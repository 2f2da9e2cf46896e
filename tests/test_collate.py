"""Counting in the workers of a DataLoader: the same counts, and batches as they were."""

from __future__ import annotations

import logging
import pickle
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import pin_memory

from driving import Clock
from tokrate import CountingCollator, ThroughputMeter, TokenCounts
from tokrate.collate import CountedBatch
from tokrate.errors import CountingError

# DataLoader forks, and Python 3.12 warns of it wherever a thread runs; whose is no matter here.
pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")

LENGTHS = [3, 9, 5, 1, 7, 2, 8, 4, 6]


class Documents(Dataset[list[int]]):
    """Nine documents of 1 to 9 tokens."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> list[int]:
        return list(range(10, 10 + LENGTHS[index]))


class Stream(IterableDataset[list[int]]):
    """The same documents without a length, shared out among the workers."""

    def __iter__(self) -> Iterator[list[int]]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return (Documents()[index] for index in range(first, len(LENGTHS), step))


class Encoding(UserDict[str, Any]):
    """A batch of a class of its own, which forgets foreign attributes, as BatchEncoding does."""

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data = state["data"]


def as_dict(documents: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows padded to the longest, as a Hugging Face collator makes them."""
    width = max(map(len, documents))
    mask = torch.tensor([[1] * len(d) + [0] * (width - len(d)) for d in documents])
    ids = torch.tensor([d + [0] * (width - len(d)) for d in documents])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def as_tuple(documents: list[list[int]]) -> tuple[torch.Tensor, ...]:
    """The same, as a tuple."""
    return tuple(as_dict(documents).values())


def as_encoding(documents: list[list[int]]) -> Encoding:
    """The same, as a class of its own."""
    return Encoding(as_dict(documents))


FIELDS = {"attention_mask": 1, "labels": 2}
COLLATORS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "dict": (as_dict, {}),
    "tuple": (as_tuple, {"fields": FIELDS}),
    "own class": (as_encoding, {}),
}


def arguments_of(batch: Any) -> dict[str, Any]:
    """What a loop on the main thread would pass to `update`."""
    if isinstance(batch, tuple):
        return {name: batch[place] for name, place in FIELDS.items()}
    return {name: batch[name] for name in ("attention_mask", "labels")}


def counted_here(collate: Callable[[Any], Any], data: Dataset[Any]) -> TokenCounts:
    """Counts of an epoch, taken by `update` on the main thread."""
    meter = ThroughputMeter(clock=Clock())
    for batch in DataLoader(data, batch_size=2, collate_fn=collate):
        meter.update(**arguments_of(batch))
    record = meter.record(1)
    assert record.padded_tokens is not None
    return TokenCounts(record.raw_tokens, record.active_tokens, record.padded_tokens)


@pytest.mark.parametrize("data", [Documents(), Stream()], ids=["map", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", COLLATORS)
def test_same_counts_in_workers(kind: str, workers: int, data: Dataset[Any]) -> None:
    """An epoch counted where it is collated has the counts of one counted on the main thread."""
    collate, options = COLLATORS[kind]
    loader = DataLoader(
        data, batch_size=1, collate_fn=CountingCollator(collate, **options), num_workers=workers
    )
    meter = ThroughputMeter(clock=Clock())
    for batch in meter.watch(loader):
        assert type(batch) in (dict, tuple, Encoding)
    record = meter.record(1)
    # one document to a row and batch: all 45 tokens, less the first of each of the 9 rows
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (45, 36, 0)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", COLLATORS)
def test_same_counts_with_padding(kind: str, workers: int) -> None:
    """With padded batches of two the counts are those of the main thread as well."""
    collate, options = COLLATORS[kind]
    counting = CountingCollator(collate, **options)
    loader = DataLoader(Documents(), batch_size=2, collate_fn=counting, num_workers=workers)
    meter = ThroughputMeter(clock=Clock())
    for _ in meter.watch(loader):
        pass
    record = meter.record(1)
    expected = counted_here(collate, Documents())
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (
        expected.raw,
        expected.active,
        expected.padded,
    )
    # pairs 3+9, 5+1, 7+2, 8+4 padded to the longer, and 6 alone
    assert expected == TokenCounts(raw=18 + 10 + 14 + 16 + 6, active=36, padded=6 + 4 + 5 + 4)


def test_a_model_can_be_called_with_the_batch() -> None:
    """The loop is handed exactly what collate_fn made: no key is added."""

    def model(input_ids: Any, attention_mask: Any, labels: Any) -> tuple[int, ...]:
        return tuple(input_ids.shape)

    loader = DataLoader(Documents(), batch_size=9, collate_fn=CountingCollator(as_dict))
    shapes = [model(**batch) for batch in ThroughputMeter(clock=Clock()).watch(loader)]
    assert shapes == [(9, 9)]


@pytest.mark.parametrize("kind", COLLATORS)
def test_counts_live_through_pinning(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the DataLoader's pinning thread does to a batch leaves the counts and pins the rest.

    Here no memory can be pinned, so the tensors only note that they were asked to; all that takes
    the batch apart and puts it together again is PyTorch's own.
    """
    collate, options = COLLATORS[kind]
    counted = CountingCollator(collate, **options)([Documents()[0], Documents()[1]])
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    arrived = pin_memory.pin_memory(counted)
    assert len(pinned) == 3
    assert isinstance(arrived, CountedBatch)
    assert type(arrived.batch) is type(counted.batch)
    assert arrived.counts == counted.counts


def test_loader_that_cannot_pin() -> None:
    """`pin_memory=True` on a machine without an accelerator changes nothing but a warning."""
    if torch.accelerator.is_available():
        pytest.skip("this machine can pin")
    loader = DataLoader(
        Documents(), batch_size=2, collate_fn=CountingCollator(as_dict), pin_memory=True
    )
    meter = ThroughputMeter(clock=Clock())
    with pytest.warns(UserWarning, match="no accelerator"):
        for _ in meter.watch(loader):
            pass
    assert meter.record(1).active_tokens == 36


def test_counted_batches_without_a_watch() -> None:
    """A loop of another shape hands the counts to the meter itself."""
    meter = ThroughputMeter(clock=Clock())
    for batch, counts in DataLoader(Documents(), collate_fn=CountingCollator(as_dict)):
        assert set(batch) == {"input_ids", "attention_mask", "labels"}
        meter.add(counts)
    assert meter.record(1).raw_tokens == 45


def test_batches_in_a_phase_are_not_counted() -> None:
    """Evaluation may use a counting loader too."""
    loader = DataLoader(Documents(), collate_fn=CountingCollator(as_dict))
    meter = ThroughputMeter(clock=Clock())
    with meter.phase("eval"):
        for _ in meter.watch(loader):
            pass
    assert meter.record(1).raw_tokens == 0


def test_the_collator_can_be_pickled() -> None:
    """Workers that are spawned get a copy, with its options."""
    counting = CountingCollator(as_dict, labels_aligned=True)
    copy = pickle.loads(pickle.dumps(counting))
    documents = [Documents()[0]]
    assert copy(documents).counts == counting(documents).counts
    assert copy(documents).counts.tally.active == 3


def test_numpy_batches_are_counted() -> None:
    """Nothing in a collator asks for torch."""
    counting = CountingCollator(lambda rows: {"labels": np.array(rows)}, labels_aligned=True)
    assert counting([[1, 2], [3, -100]]).counts.tally[:3] == (4, 3, None)


# --- batches that are wrong ----------------------------------------------------------------------


def contradictory(documents: Any) -> dict[str, Any]:
    """Targets where the mask says padding."""
    return {"labels": torch.tensor([[5, 6, 7, 8]]), "attention_mask": torch.tensor([[1, 1, 0, 0]])}


@pytest.mark.parametrize("workers", [0, 2])
def test_contradiction_fails_the_first_window(workers: int) -> None:
    """What a worker found is raised by the meter, in the main process."""
    loader = DataLoader(
        Documents(), collate_fn=CountingCollator(contradictory), num_workers=workers
    )
    meter = ThroughputMeter(clock=Clock())
    with pytest.raises(CountingError, match="2 of 4 slots"):
        next(iter(meter.watch(loader)))


def test_later_contradiction_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    """After the first window it is said once; rates stay, fractions are unknown."""
    clock = Clock()
    meter = ThroughputMeter(clock=clock)
    meter.record(0)
    clock.now = 2.0
    loader = DataLoader(Documents(), collate_fn=CountingCollator(contradictory))
    with caplog.at_level(logging.WARNING, "tokrate"):
        assert len(list(meter.watch(loader))) == 9
        record = meter.record(1)
    assert (record.raw_tps, record.active_tps, record.padded_frac) == (18.0, 13.5, None)
    assert caplog.text.count("2 of 4 slots") == 1


@pytest.mark.parametrize(
    ("collate", "fields", "message"),
    [
        (as_tuple, None, r"the batch is a tuple, whose parts have no names: pass CountingCollator"),
        (as_tuple, {"labels": 7}, "has no part tuple index out of range"),
        (as_dict, {"labels": "targets"}, "has no part 'targets'"),
        (lambda rows: rows[0][0], {"labels": 0}, "the batch, a int, has no part"),
        (lambda rows: {"x": torch.ones(2)}, None, "found neither labels nor loss_mask"),
    ],
)
def test_batches_that_cannot_be_counted(collate: Any, fields: Any, message: str) -> None:
    """The message says what the batch is and what to pass; the batch itself comes through."""
    counted = CountingCollator(collate, fields=fields)([Documents()[0]])
    assert counted.counts.tally is None
    with pytest.raises(CountingError, match=message):
        ThroughputMeter(clock=Clock()).add(counted.counts)


def test_unknown_fields_are_refused_at_once() -> None:
    """A misspelled argument fails before training starts."""
    with pytest.raises(CountingError, match="names mask: expected arguments of count_tokens"):
        CountingCollator(as_dict, fields={"labels": 2, "mask": 1})

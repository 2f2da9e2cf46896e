"""Batches that are not plain fine-tuning: what is counted is what the loss gives a gradient to."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, pad

from tokrate import ThroughputMeter, TokenCounts, count_tokens
from tokrate.errors import CountingError

VOCABULARY = 64


def new_logits(*shape: int) -> torch.Tensor:
    """Scores of a model for a batch of this shape, none of them certain."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, VOCABULARY, generator=generator).requires_grad_()


def seen_by(loss: torch.Tensor, logits: torch.Tensor) -> int:
    """How many slots the loss uses: those whose scores have a gradient."""
    loss.backward()
    assert logits.grad is not None
    return int(logits.grad.any(-1).sum())


def causal_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The shifted loss of Hugging Face's causal models."""
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def log_probabilities(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Log-probability of each row's targets, as preference losses take it."""
    targets = labels[:, 1:]
    chosen = targets.clamp(min=0).unsqueeze(-1)
    scores = logits[:, :-1].log_softmax(-1).gather(-1, chosen).squeeze(-1)
    return (scores * (targets != -100)).sum(-1)


def test_preference_pairs_stacked() -> None:
    """The preference loss scores the answers of both rows, and nothing of the prompts."""
    labels = torch.tensor([[-100, -100, 5, 6, 7], [-100, -100, 8, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    logits = new_logits(2, 5)
    chosen, rejected = log_probabilities(logits, labels)
    assert seen_by(-logsigmoid(0.1 * (chosen - rejected)), logits) == 4
    assert count_tokens(labels, attention_mask=mask) == TokenCounts(10, 4, 2)


def test_preference_pairs_one_by_one() -> None:
    """Two updates of a meter are the two rows of a stacked batch, less what stacking padded."""
    meter, stacked = ThroughputMeter(), ThroughputMeter()
    meter.update(torch.tensor([[-100, -100, 5, 6, 7]]), attention_mask=torch.ones(1, 5))
    meter.update(torch.tensor([[-100, -100, 8]]), attention_mask=torch.ones(1, 3))
    stacked.update(
        torch.tensor([[-100, -100, 5, 6, 7], [-100, -100, 8, -100, -100]]),
        attention_mask=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
    )
    one, both = meter.record(1), stacked.record(1)
    assert (one.raw_tokens, one.active_tokens, one.padded_tokens) == (8, 4, 0)
    assert (both.raw_tokens, both.active_tokens, both.padded_tokens) == (10, 4, 2)
    assert one.masked_tokens == both.masked_tokens == 4


@pytest.mark.parametrize("tool", [[[1, 1, 1], [1, 1, 1]], [[1, 1, 1], [1, 0, 1]]])
def test_policy_loss_over_completions(tool: list[list[int]]) -> None:
    """The policy loss scores completion tokens that are neither padding nor a tool's."""
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    completion_mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    used = completion_mask * torch.tensor(tool)
    ids = torch.arange(12).reshape(2, 6)
    logits = new_logits(2, 6)
    scores = logits[:, 2:-1].log_softmax(-1).gather(-1, ids[:, 3:].unsqueeze(-1)).squeeze(-1)
    advantages = torch.tensor([[0.5], [-0.5]])
    counts = count_tokens(
        loss_mask=torch.cat([torch.zeros_like(prompt_mask), used], 1),
        attention_mask=torch.cat([prompt_mask, completion_mask], 1),
    )
    assert counts.active == seen_by(-(scores * advantages * used).sum(), logits) == used.sum()
    assert (counts.raw, counts.padded) == (12, 2)


def test_labels_of_completions_only() -> None:
    """Logits cut down to the completion stand over its tokens: nothing is shifted any more."""
    completion_mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert count_tokens(loss_mask=completion_mask, labels_aligned=True).active == 5
    assert count_tokens(loss_mask=completion_mask).active == 3


def test_encoder_decoder() -> None:
    """The decoder's labels are targets where they stand; the encoder has slots and no target."""
    source_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    labels = torch.tensor([[5, 6, 1], [7, 1, -100]])
    logits = new_logits(2, 3)
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    source = count_tokens(loss_mask=torch.zeros_like(source_mask), attention_mask=source_mask)
    target = count_tokens(labels, attention_mask=labels != -100, labels_aligned=True)
    assert source + target == TokenCounts(14, 5, 2)
    assert seen_by(loss, logits) == 5


def test_masked_language_model() -> None:
    """Hidden tokens are targets, in the first slot of a row too."""
    labels = torch.tensor([[-100, 7, -100, -100], [9, -100, -100, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    logits = new_logits(2, 4)
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    assert count_tokens(labels, attention_mask=mask, labels_aligned=True) == TokenCounts(8, 2, 1)
    assert seen_by(loss, logits) == 2


def test_images_that_the_model_puts_in() -> None:
    """`raw` gives the slots that the model sees: counting what it makes of the batch agrees."""
    labels = torch.tensor([[-100, -100, 5, 6], [-100, -100, 7, -100]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    inside = count_tokens(
        pad(labels, (3, 0), value=-100), attention_mask=pad(mask, (3, 0), value=1)
    )
    assert count_tokens(labels, attention_mask=mask, raw=8 + 2 * 3) == inside
    assert inside == TokenCounts(14, 3, 1)
    logits = new_logits(2, 7)
    assert seen_by(causal_loss(logits, pad(labels, (3, 0), value=-100)), logits) == 3


def test_images_and_ids_of_another_length() -> None:
    """With `raw`, ids may have the text's length while labels have the model's."""
    labels = torch.tensor([[-100, -100, -100, -100, 6]])
    ids = torch.tensor([[99, 6]])
    counts = count_tokens(labels, input_ids=ids, attention_mask=torch.ones(1, 5), raw=5)
    assert counts == TokenCounts(5, 1, 0)


DOCUMENTS = [[10, 11, 12], [20, 21], [30, 31, 32, 33]]


def flattened(first_label: int | None = -100) -> torch.Tensor:
    """Labels of all documents in one row; the first of each replaced, or left in with None."""
    rows = [[doc[0] if first_label is None else first_label, *doc[1:]] for doc in DOCUMENTS]
    return torch.tensor([[label for row in rows for label in row]])


def test_padding_free_is_the_padded_batch_without_padding() -> None:
    """Flattened or padded, the same documents have the same targets and the same tokens."""
    labels = torch.tensor([doc + [-100] * (4 - len(doc)) for doc in DOCUMENTS])
    padded = count_tokens(labels, attention_mask=labels != -100)
    flat = count_tokens(flattened(), cu_seqlens=torch.tensor([0, 3, 5, 9]))
    assert (flat.raw, flat.padded) == (9, 0)
    assert flat.active == padded.active == 6
    assert flat.masked == padded.masked
    logits = new_logits(1, 9)
    assert seen_by(causal_loss(logits, flattened()), logits) == 6


def test_tail_of_a_buffer_is_padding() -> None:
    """A buffer of fixed size is padding behind the last document, or in a document of its own."""
    labels = pad(flattened(), (0, 3), value=-100)
    ends = torch.tensor([0, 3, 5, 9, 12], dtype=torch.int32)
    assert count_tokens(labels, cu_seqlens=ends[:-1]) == TokenCounts(12, 6, 3)
    assert count_tokens(labels, cu_seqlens=ends).padded == 0


def test_numbered_documents() -> None:
    """A mask of document numbers tells padding by its zeros, whatever it sums to."""
    mask = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3, 0, 0, 0]])
    labels = pad(flattened(), (0, 3), value=-100)
    assert count_tokens(labels, attention_mask=mask) == TokenCounts(12, 6, 3)
    assert mask.sum() == 19


def test_label_left_in_at_a_boundary() -> None:
    """A label that the collator left in at a boundary is trained on, so it is counted."""
    mask = torch.tensor([[1, 1, 1, 2, 2, 3, 3, 3, 3]])
    assert count_tokens(flattened(None), attention_mask=mask).active == 8


def test_mask_of_pairs_is_refused() -> None:
    """A mask over pairs of slots is refused in words that say what to pass instead."""
    pairs = torch.ones(1, 1, 9, 9)
    with pytest.raises(CountingError, match="pass the mask of shape"):
        count_tokens(flattened(), attention_mask=pairs)


def test_kinds_may_be_mixed_in_a_run() -> None:
    """A run may mix kinds of batches: their counts add up in one window."""
    meter = ThroughputMeter()
    meter.update(flattened(), cu_seqlens=torch.tensor([0, 3, 5, 9]))
    meter.update(torch.tensor([[-100, -100, 5, 6]]), attention_mask=torch.ones(1, 4), raw=10)
    meter.update(loss_mask=[[0, 1, 1, 0]], attention_mask=[[1, 1, 1, 0]])
    record = meter.record(1)
    assert (record.raw_tokens, record.active_tokens, record.padded_tokens) == (23, 10, 1)

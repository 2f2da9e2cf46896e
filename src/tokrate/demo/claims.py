"""The three claims of torchtune issue 2296, measured.

https://github.com/meta-pytorch/torchtune/issues/2296, "Tokens per second calculation"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from tokrate.demo.batches import IGNORE_INDEX, Batch, collate, pad_rows
from tokrate.demo.data import Document
from tokrate.demo.model import mean_loss
from tokrate.demo.result import ArmResult, Claim, explain

EXTRA_SLOTS = 64
"""Slots of padding that claim (c) adds to each row."""
UNCHANGED = 1e-4
"""Relative change up to which a float32 gradient counts as the same (sums in another order)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """What happens to one batch's loss and gradient when slots that are no targets change."""

    loss: float
    """Loss of the batch as it is, in nats per token."""
    loss_more_padding: float
    """Loss with more padding in each row."""
    gradient_change_padding: float
    """Norm of the gradient's change by the padding, as a share of the gradient's norm."""
    loss_other_context: float
    """Loss with other bytes in the masked slots, the targets being the same."""
    gradient_change_context: float
    """Norm of the gradient's change by the other context, as a share of the gradient's norm."""


def measure_sensitivity(model: nn.Module, documents: Sequence[Document]) -> Sensitivity:
    """Add padding to one batch, then change its masked tokens, and look at loss and gradient.

    The loss is taken over the answers; the prompts are context only.

    Args:
        documents: One for each row of the batch.
    """
    rows = pad_rows(documents)
    batch = collate(rows, target="answers")
    wider = collate(rows, target="answers", width=batch.tokens.shape[1] + EXTRA_SLOTS)
    loss, gradient = _loss_and_gradient(model, batch)
    wider_loss, wider_gradient = _loss_and_gradient(model, wider)
    other_loss, other_gradient = _loss_and_gradient(model, change_context(batch))
    return Sensitivity(
        loss=loss,
        loss_more_padding=wider_loss,
        gradient_change_padding=_change(gradient, wider_gradient),
        loss_other_context=other_loss,
        gradient_change_context=_change(gradient, other_gradient),
    )


def change_context(batch: Batch) -> Batch:
    """The batch with other bytes in its masked slots; every target stays what it was."""
    masked = (batch.documents > 0) & (batch.labels == IGNORE_INDEX)
    flipped = batch.tokens ^ 1  # the lowest bit of a byte: a letter becomes its neighbour
    return replace(batch, tokens=torch.where(masked, flipped, batch.tokens))


def check_claims(arms: Mapping[str, ArmResult], sensitivity: Sensitivity) -> tuple[Claim, ...]:
    """The claims that the trained arms can tell about, with the numbers.

    Args:
        arms: Results by the arm's name.
        sensitivity: What claim (c) was measured by.
    """
    padded = arms.get("padded") or arms.get("train-on-all")
    on_all = arms.get("train-on-all") or padded
    masked, packed = arms.get("masked-prompt"), arms.get("packed")
    claims = []
    if on_all and masked:
        claims.append(_mask_drops(on_all, masked))
    if padded and packed:
        claims.append(_pack_hides(padded, packed))
    return (*claims, _same_loss(sensitivity))


def _mask_drops(on_all: ArmResult, masked: ArmResult) -> Claim:
    factors = explain(on_all, masked)
    return Claim(
        letter="a",
        text="A heavier mask drops active_tps while raw_tps stays put.",
        measured=(
            f"{on_all.name} → {masked.name}: active_tps {on_all.active_tps:,.0f} → "
            f"{masked.active_tps:,.0f} (×{factors.active:.2f}), raw_tps {on_all.raw_tps:,.0f} → "
            f"{masked.raw_tps:,.0f} (×{factors.raw:.2f})"
        ),
        holds=factors.active < 1 and _outweighs(factors.active, factors.raw),
    )


def _pack_hides(padded: ArmResult, packed: ArmResult) -> Claim:
    factors = explain(padded, packed)
    pace = packed.pairs_per_s / padded.pairs_per_s
    return Claim(
        letter="b",
        text="A pack about doubles progress through the data, and raw_tps hides it.",
        measured=(
            f"{padded.name} → {packed.name}: {padded.pairs_per_s:,.1f} → {packed.pairs_per_s:,.1f} "
            f"pairs/s (×{pace:.2f}), an epoch {padded.seconds_per_epoch:,.1f} → "
            f"{packed.seconds_per_epoch:,.1f} s, active_tps ×{factors.active:.2f}, "
            f"raw_tps ×{factors.raw:.2f}"
        ),
        holds=pace > 1 and _outweighs(pace, factors.raw),
    )


def _same_loss(found: Sensitivity) -> Claim:
    loss_change = abs(found.loss_more_padding - found.loss)
    return Claim(
        letter="c",
        text="Extra padding leaves the loss unchanged; masked context changes the gradients.",
        measured=(
            f"one batch, {EXTRA_SLOTS} more padded slots a row: loss {found.loss:.6f} → "
            f"{found.loss_more_padding:.6f}, gradient changed by "
            f"{found.gradient_change_padding:.1e} of its norm; other bytes in the masked slots: "
            f"loss {found.loss_other_context:.6f}, gradient changed by "
            f"{found.gradient_change_context:.1e}"
        ),
        holds=loss_change <= UNCHANGED * found.loss
        and found.gradient_change_padding <= UNCHANGED
        and found.gradient_change_context > 10 * UNCHANGED,
    )


def _outweighs(ratio: float, raw_ratio: float) -> bool:
    """Whether a ratio says much more than what raw_tps changed by (which is the noise here)."""
    return abs(math.log(ratio)) > 2 * abs(math.log(raw_ratio))


def _loss_and_gradient(model: nn.Module, batch: Batch) -> tuple[float, Tensor]:
    loss = mean_loss(model, batch)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return loss.item(), torch.cat([gradient.flatten() for gradient in gradients])


def _change(gradient: Tensor, other: Tensor) -> float:
    return float((other - gradient).norm() / gradient.norm())

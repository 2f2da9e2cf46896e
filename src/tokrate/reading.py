"""Reading a forward's inputs: from the names that Hugging Face models use to those of a count.

labels, attention_mask, input_ids        as they are
shift_labels                             labels that stand where the loss reads them
position_ids / cu_seq_lens_q, no mask    documents one after the other, without padding
encoder and decoder                      two sequences, counted one by one
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tokrate.collate import KEYS

Inputs = Mapping[str, Any]
"""What a forward was called with, by the names of its parameters."""


def read_inputs(inputs: Inputs, pad_id: int | None = None) -> list[dict[str, Any]]:
    """Arguments of `meter.update` for the inputs of a decoder or encoder.

    Args:
        inputs: By parameter name.
        pad_id: Tells the tail of a padding-free batch that was filled up to a round length.
    """
    batch = {key: inputs[key] for key in KEYS if inputs.get(key) is not None}
    if inputs.get("shift_labels") is not None:
        batch |= {"labels": inputs["shift_labels"], "labels_aligned": True}
    if "attention_mask" not in batch and "cu_seqlens" not in batch:
        batch |= _documents(inputs, pad_id)
    if _is_pairwise(batch.get("attention_mask")):
        del batch["attention_mask"]  # says nothing of single slots; the record then says so
    return [batch]


def read_encoder_decoder(inputs: Inputs) -> list[dict[str, Any]]:
    """Arguments of `meter.update` for an encoder's sequence, and for its decoder's."""
    source = inputs.get("input_ids")
    labels = inputs.get("labels")
    batches = []
    if source is not None:
        batch = {"input_ids": source, "loss_mask": source.new_zeros(source.shape)}
        if inputs.get("attention_mask") is not None:
            batch["attention_mask"] = inputs["attention_mask"]
        batches.append(batch)
    if labels is None:
        return [{"input_ids": source}]  # nothing says what the targets are
    mask = inputs.get("decoder_attention_mask")
    mask = labels != -100 if mask is None else mask
    return [*batches, {"labels": labels, "attention_mask": mask, "labels_aligned": True}]


def _documents(inputs: Inputs, pad_id: int | None) -> dict[str, Any]:
    """What tells padding in a batch whose documents stand in one row, if this is one.

    Collators that fill such a row up to a round length give each slot of the tail the position 0,
    as if it were a document: they are told from one by the padding token.
    """
    ids, positions = inputs.get("input_ids"), inputs.get("position_ids")
    cu_seqlens = inputs.get("cu_seq_lens_q")
    if ids is None or ids.shape[0] != 1:
        return {}
    if positions is None or positions.shape != ids.shape:
        return {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
    real = positions == positions if pad_id is None else (positions > 0) | (ids != pad_id)
    return {"attention_mask": real.flip(-1).cumsum(-1).flip(-1) > 0}


def _is_pairwise(mask: Any) -> bool:
    """Whether a mask has a value for each pair of slots, or is one of flex attention's blocks."""
    torch = sys.modules["torch"]
    return mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim <= 2)

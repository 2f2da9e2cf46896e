"""A small decoder-only transformer in plain torch that keeps packed documents apart.

tokens + positions ─► embed ─► ( attention ─► MLP ) × layers ─► norm ─► logits
                                    ▲
documents ── a slot sees the earlier slots of its own document, and nothing else
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader expects
from torch import Tensor, nn

from tokrate.demo.batches import IGNORE_INDEX, Batch
from tokrate.demo.data import MAX_SLOTS, VOCABULARY

WIDTH = 64
"""Size of a slot's vector."""
HEADS = 4
"""Attention heads."""
LAYERS = 2
"""Blocks of attention and MLP."""


class SmallTransformer(nn.Module):
    """Causal byte-level language model.

    Args:
        seed: Seed of the initial weights; the caller's random state is left as it was.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed_token = nn.Embedding(VOCABULARY, WIDTH)
            # Learned positions: a pack must restart them, or its documents read differently.
            self.embed_position = nn.Embedding(MAX_SLOTS, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.norm = nn.LayerNorm(WIDTH)
            self.to_logits = nn.Linear(WIDTH, VOCABULARY)
            for embedding in (self.embed_token, self.embed_position):
                nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, batch: Batch) -> Tensor:
        """Logits of shape [rows, width, VOCABULARY]."""
        hidden = self.embed_token(batch.tokens) + self.embed_position(batch.positions)
        mask = document_mask(batch.documents)
        for block in self.blocks:
            hidden = block(hidden, mask)
        logits: Tensor = self.to_logits(self.norm(hidden))
        return logits


class Block(nn.Module):
    """Attention and MLP, each normalised first and added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.from_heads = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Hidden states of shape [rows, width, WIDTH], for a mask of [rows, 1, width, width]."""
        hidden = hidden + self._attend(self.attention_norm(hidden), mask)
        out: Tensor = hidden + self.mlp(hidden)
        return out

    def _attend(self, hidden: Tensor, mask: Tensor) -> Tensor:
        rows, width, _ = hidden.shape
        heads = self.to_qkv(hidden).view(rows, width, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out: Tensor = self.from_heads(seen.transpose(1, 2).reshape(rows, width, WIDTH))
        return out


def document_mask(documents: Tensor) -> Tensor:
    """Which slot sees which, as bool [rows, 1, width, width].

    Padding (document 0) sees padding, so that no row of the mask is empty: the softmax over
    nothing would be NaN.
    """
    width = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    earlier = torch.ones(width, width, dtype=torch.bool, device=documents.device).tril()
    return (same & earlier)[:, None]


def token_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each slot, shape [rows, width]; 0 where the slot is no target."""
    logits = model(batch)
    return F.cross_entropy(
        logits.transpose(1, 2), batch.labels, ignore_index=IGNORE_INDEX, reduction="none"
    )


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy over the batch's active tokens; a scalar."""
    logits = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE_INDEX)

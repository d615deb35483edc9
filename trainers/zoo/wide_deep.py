"""Wide & deep (Cheng et al.: Wide & Deep Learning for Recommender Systems, 2016) for click logs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainers.zoo.click_layers import linear, perceptron


class WideDeep(torch.nn.Module):
    """logit = wide(dense) + deep([rows of the ids, dense]): a linear unit, and a perceptron on everything.

    `embedding` maps (batch, slots) int64 ids to (batch, slots, dim) and serves all slots:
    trainers.ps.SparseEmbedding(dim, padding_idx=0) on parameter servers, FoldedEmbedding(rows, dim) or an
    nn.Embedding(sparse=True) elsewhere too.
    """

    def __init__(
        self,
        embedding: torch.nn.Module,
        dim: int,
        *,
        slots: int = 26,
        dense: int = 13,
        hidden: Sequence[int] = (400, 400, 400),
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.wide = linear(dense, 1)
        self.deep = perceptron(slots * dim + dense, hidden)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(batch, slots) int64 and (batch, dense) float32 -> (batch,) logits of a click."""
        rows = self.embedding(ids).flatten(1)
        logits: Tensor = self.wide(dense) + self.deep(torch.cat([rows, dense], dim=1))
        return logits.squeeze(1)

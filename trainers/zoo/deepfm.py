"""DeepFM (Guo et al.: DeepFM: A Factorization-Machine based Neural Network for CTR Prediction, 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainers.zoo.click_layers import linear, perceptron


class DeepFM(torch.nn.Module):
    """logit = first order + pairwise products + deep, the last two on the same factors.

    Every field, a slot or a dense feature, has a weight and a vector of `dim` - 1 factors; a dense feature's
    are multiplied by its value. `embedding` maps (batch, slots) int64 ids to (batch, slots, dim), the weight
    first in each row, and serves all slots, as in WideDeep.
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
        self.first = linear(dense, 1)
        self.factors = torch.nn.Parameter(torch.empty(dense, dim - 1).uniform_(-0.01, 0.01))
        self.deep = perceptron((slots + dense) * (dim - 1), hidden)

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(batch, slots) int64 and (batch, dense) float32 -> (batch,) logits of a click."""
        rows = self.embedding(ids)
        fields = torch.cat([rows[..., 1:], dense.unsqueeze(2) * self.factors], dim=1)
        first = rows[..., 0].sum(1) + self.first(dense).squeeze(1)
        logits: Tensor = first + pairs(fields) + self.deep(fields.flatten(1)).squeeze(1)
        return logits


def pairs(fields: Tensor) -> Tensor:
    """(batch, fields, factors) -> (batch,): the sum of the inner products of all pairs of fields, by
    ((sum v)^2 - sum v^2) / 2 (Rendle: Factorization Machines, 2010, lemma 3.1).
    """
    return (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2

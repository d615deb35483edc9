"""Define models for click logs, with hidden layers and a lookup of unbounded ids in a table of fixed size.

The models are Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016) and DeepFM
(Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", 2017).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

# ---- Shared parts: hidden layers, and a lookup of unbounded ids in a table of fixed size


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    """Return a linear layer with normal weights of standard deviation 1 / sqrt(inputs), and zero biases."""
    layer = torch.nn.Linear(inputs, outputs)
    torch.nn.init.normal_(layer.weight, std=inputs**-0.5)
    torch.nn.init.zeros_(layer.bias)
    return layer


def perceptron(inputs: int, hidden: Iterable[int]) -> torch.nn.Sequential:
    """Return (batch, inputs) -> (batch, 1): hidden layers with ReLU, then one linear unit."""
    layers: list[Module] = []
    for units in hidden:
        layers += [linear(inputs, units), torch.nn.ReLU()]
        inputs = units
    return torch.nn.Sequential(*layers, linear(inputs, 1))


class FoldedEmbedding(Module):
    """Maps (...) int64 ids of any size to (..., dim). Id 0 gives zeros, and other ids share `rows` - 1 rows.

    It uses an nn.Embedding(sparse=True), so models for unbounded ids also train in one process. Ids that
    share a row cost accuracy, and unused rows cost memory. Parameter servers avoid both (see
    trainers.ps.SparseEmbedding).
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(rows, dim, padding_idx=0, sparse=True)
        torch.nn.init.uniform_(self.table.weight, -0.01, 0.01)
        with torch.no_grad():
            self.table.weight[0] = 0

    def forward(self, ids: Tensor) -> Tensor:
        folded = ids.remainder(self.table.num_embeddings - 1) + 1
        looked_up: Tensor = self.table(folded.masked_fill_(ids == 0, 0))
        return looked_up


# ---- Wide & Deep


class WideDeep(Module):
    """logit = wide(dense) + deep([rows of the ids, dense]), a linear unit and a perceptron on all inputs.

    `embedding` maps (batch, slots) int64 ids to (batch, slots, dim) for all slots. Use
    trainers.ps.SparseEmbedding(dim, padding_idx=0) on parameter servers. FoldedEmbedding(rows, dim) and
    nn.Embedding(sparse=True) work everywhere.
    """

    def __init__(
        self,
        embedding: Module,
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
        """Map (batch, slots) int64 and (batch, dense) float32 to (batch,) logits of a click."""
        rows = self.embedding(ids).flatten(1)
        logits: Tensor = self.wide(dense) + self.deep(torch.cat([rows, dense], dim=1))
        return logits.squeeze(1)


# ---- DeepFM


class DeepFM(Module):
    """logit = first order + pairwise products + deep, the last two on the same factors.

    Every field, a slot or a dense feature, has a weight and a vector of `dim` - 1 factors. The factors of a
    dense feature are multiplied by its value. `embedding` maps (batch, slots) int64 ids to (batch, slots,
    dim) for all slots, as in WideDeep, with the weight first in each row.
    """

    def __init__(
        self,
        embedding: Module,
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
        """Map (batch, slots) int64 and (batch, dense) float32 to (batch,) logits of a click."""
        rows = self.embedding(ids)
        fields = torch.cat([rows[..., 1:], dense.unsqueeze(2) * self.factors], dim=1)
        first = rows[..., 0].sum(1) + self.first(dense).squeeze(1)
        logits: Tensor = first + pairs(fields) + self.deep(fields.flatten(1)).squeeze(1)
        return logits


def pairs(fields: Tensor) -> Tensor:
    """Return the sum of the inner products of all pairs of fields, (batch, fields, factors) -> (batch,).

    The formula is ((sum v)^2 - sum v^2) / 2 (Rendle, "Factorization Machines", 2010, lemma 3.1).
    """
    return (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2

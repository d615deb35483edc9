"""What click models share: hidden layers, and a lookup of unbounded ids in a table of fixed size."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    """Weights normal with standard deviation 1 / sqrt(inputs), biases zero."""
    layer = torch.nn.Linear(inputs, outputs)
    torch.nn.init.normal_(layer.weight, std=inputs**-0.5)
    torch.nn.init.zeros_(layer.bias)
    return layer


def perceptron(inputs: int, hidden: Iterable[int]) -> torch.nn.Sequential:
    """(batch, inputs) -> (batch, 1): hidden layers with ReLU, then one linear unit."""
    layers: list[torch.nn.Module] = []
    for units in hidden:
        layers += [linear(inputs, units), torch.nn.ReLU()]
        inputs = units
    return torch.nn.Sequential(*layers, linear(inputs, 1))


class FoldedEmbedding(torch.nn.Module):
    """(...) int64 ids of any size -> (..., dim): id 0 is zeros, any other shares one of `rows` - 1 rows.

    An nn.Embedding(sparse=True) underneath, so that models for unbounded ids train in one process too; ids
    that meet in a row cost accuracy, and rows that no id meets cost memory. Parameter servers need neither:
    see trainers.ps.SparseEmbedding.
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

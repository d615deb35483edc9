"""Define a model for click logs, with hidden layers and a lookup of ids.

The model is Wide & Deep (Cheng et al., "Wide & Deep Learning for Recommender Systems", 2016).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import Module

# ---- Hidden layers


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


# ---- Wide & Deep


class WideDeep(Module):
    """logit = wide(dense) + deep([rows of the ids, dense]), a linear unit and a perceptron on all inputs.

    `embedding` maps (batch, slots) int64 ids to (batch, slots, dim) for all slots. Use
    trainers.ps.SparseEmbedding(dim, padding_idx=0) on parameter servers. nn.Embedding(sparse=True) works
    everywhere.
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

"""A lookup of unbounded ids in a table of fixed size, for models in one process."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Module


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

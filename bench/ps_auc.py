"""Why our wide & deep and Paddle's have different test AUCs: two meanings of Adam on rows, without servers.

    python bench/ps_auc.py [--rows 800000] [--write docs/benchmarks-ps.md]

One process trains the job of bench/ps_wide_deep.py twice. `table`: the bias correction of Adam counts the
steps of the table, as torch.optim.SparseAdam does and our servers do. `row`: it counts the updates of each
row, as Paddle's servers do, so that the first steps of rare ids are ten to thirty times larger.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from _marks import check_marks, publish
from _ps_files import TEST_ROWS, TRAIN_ROWS

from trainers.data.clicks import ClickModel
from trainers.metrics import auc
from trainers.zoo.click_models import WideDeep

NAME = "ps_auc.py"
BATCH, DIM, HIDDEN, LR = 512, 9, (128, 64), 1e-3
FIRST, SECOND, EPS = 0.9, 0.999, 1e-8
COUNTS = ("table", "row")

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Rows(torch.nn.Module):
    """All rows of the job in one tensor, with Adam of its own; `by_row`: bias correction by a row's updates.
    Ids are places in it.
    """

    def __init__(self, count: int, *, by_row: bool) -> None:
        super().__init__()
        self._values = torch.empty(count, DIM).uniform_(-0.01, 0.01)
        self._means, self._squares = torch.zeros(2, count, DIM)
        self._updates, self._steps = torch.zeros(count, 1), 0
        self._by_row = by_row
        self._keys = torch.empty(0, dtype=torch.int64)
        self._touched = torch.empty(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._keys, places = torch.unique(ids, return_inverse=True)
        self._touched = self._values[self._keys].requires_grad_(torch.is_grad_enabled())
        return self._touched[places]

    def step(self) -> None:
        """Adam on the rows of the last batch."""
        grad, keys = self._touched.grad, self._keys
        assert grad is not None
        self._steps += 1
        self._updates[keys] += 1
        count = self._updates[keys] if self._by_row else torch.tensor(float(self._steps))
        self._means[keys] = FIRST * self._means[keys] + (1 - FIRST) * grad
        self._squares[keys] = SECOND * self._squares[keys] + (1 - SECOND) * grad * grad
        size = LR * torch.sqrt(1 - SECOND**count) / (1 - FIRST**count)
        self._values[keys] -= size * self._means[keys] / (self._squares[keys].sqrt() + EPS)


def trained(rows: int, train: Tensors, test: Tensors, *, by_row: bool) -> float:
    """Test AUC after one epoch."""
    torch.manual_seed(0)
    table = Rows(rows, by_row=by_row)
    model = WideDeep(table, DIM, hidden=HIDDEN)
    adam = torch.optim.Adam(model.parameters(), lr=LR)
    for batch in torch.split(torch.randperm(len(train[0])), BATCH):
        ids, dense, labels = (column[batch] for column in train)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        table.step()
    with torch.no_grad():
        pairs = zip(torch.split(test[0], 4096), torch.split(test[1], 4096), strict=True)
        clicks = torch.cat([torch.sigmoid(model(ids, dense)) for ids, dense in pairs])
    return auc(clicks.double(), test[2])


def splits(rows: int, test_rows: int) -> tuple[int, Tensors, Tensors]:
    """How many ids there are; and (places of the ids, dense, labels) to train and to test on."""
    truth = ClickModel()
    both = truth.draw(rows, seed=0), truth.draw(test_rows, seed=1)
    ids, places = np.unique(np.concatenate([each.ids for each in both]), return_inverse=True)
    found = torch.from_numpy(places.reshape(-1, both[0].ids.shape[1]))
    (_, *train), (_, *test) = (each.tensors() for each in both)
    return len(ids), (found[:rows], train[0], train[1]), (found[rows:], test[0], test[1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", metavar="N", type=int, default=TRAIN_ROWS, help="examples [%(default)s]")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    ids, train, test = splits(options.rows, TEST_ROWS)
    found = {name: trained(ids, train, test, by_row=name == "row") for name in COUNTS}
    text = (
        f"{options.rows:,} examples, {ids:,} ids, one process.\n\n"
        "| Adam's bias correction counts the steps of the | as | test AUC |\n| --- | --- | ---: |\n"
        f"| table | torch.optim.SparseAdam, fleetrun | {found['table']:.4f} |\n"
        f"| row | Paddle | {found['row']:.4f} |"
    )
    publish(text, options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())

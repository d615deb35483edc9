"""What an EmbeddingBag costs a trainer in a step, by who adds up the rows: one run, one table.

    python bench/ps_bags.py [--runs 15] [--write docs/benchmarks-ps-parts.md]

26 tables of dim 16 in one group, each called with 512 bags of 4 ids that are drawn from 2,000; rows come from
an answer that is always the same: no server and no network is in it. A step prepares the batch, calls the
modules, runs backward and takes the gradients for a push. CPU time of one thread; the three alternate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from _marks import check_marks, publish

from trainers.ps.client import Client, Request
from trainers.ps.tables.rules import SGD
from trainers.ps.tables.spec import TableKind, TableSpec
from trainers.ps.tables.warm import EVERYTHING
from trainers.ps.trainer.embedding import ServedEmbedding
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import SparseParameter
from trainers.ps.wire import Field, Kind, Message, Part

NAME = "ps_bags.py"
TABLES, DIM, BAGS, SIZE, IDS = 26, 16, 512, 4, 2_000
CASES = ("sum", "mean", "sum, weights")


class Answers:
    """Servers whose answer is always the same."""

    def __init__(self) -> None:
        self._rows = torch.randn(TABLES * IDS, DIM)

    def send(self, requests: Sequence[Request]) -> Sequence[Request]:
        return requests

    def wait(self, requests: Sequence[Request]) -> list[Message]:
        return [Message(kind=Kind.DATA, parts=(self._answer(each.parts[-1]),)) for each in requests]

    def _answer(self, keys: Part) -> Part:
        return Part(keys.table, Field.ROWS, self._rows[: len(keys.data)])


class Trainer:
    """26 modules; `module` makes one, `call` calls it with (bags, size) ids. `by_torch`: torch adds up."""

    def __init__(
        self,
        module: Callable[[], torch.nn.Module],
        call: Callable[..., torch.Tensor],
        *,
        by_torch: bool = False,
    ) -> None:
        self._call = call
        made: list[Any] = []
        for number in range(TABLES):
            spec = TableSpec(kind=TableKind.SPARSE, name=f"t{number}", size=DIM, rule=SGD())
            with torch.device("meta"):
                made.append(
                    SparseParameter(
                        name=spec.name,
                        module=cast(Any, module()),
                        group={"lr": 1.0},
                        own_lr=None,
                        table=number,
                        spec=spec,
                        rule=SGD(),
                    )
                )
        self._group = TableGroup(made, 1, cast(Client, Answers()))
        if by_torch:
            self._group.pools = [False] * TABLES
        for table in self._group.tables:
            ServedEmbedding(table.sparse.name, table.sparse.module, table, statistics=False)

    def step(self, drawn: torch.Tensor) -> None:
        group, ids = self._group, list(drawn)
        group.send(group.prepare({number: [each] for number, each in enumerate(ids)}))
        bags = [self._call(table.sparse.module, each) for table, each in zip(group.tables, ids, strict=True)]
        torch.cat(bags, 1).square().sum().backward()
        group.add_push([[]], cast(Any, group.take_gradients()))


def trainers(case: str) -> dict[str, Trainer]:
    mode = case.split(",")[0]
    weights = torch.rand(BAGS, SIZE) if "weights" in case else None

    def bag() -> torch.nn.Module:
        return torch.nn.EmbeddingBag(10, DIM, mode=mode, sparse=True)

    def call(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, module(ids, per_sample_weights=weights))

    def pooled(module: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
        rows = module(ids) if weights is None else module(ids) * weights[:, :, None]
        return cast(torch.Tensor, rows.mean(1) if mode == "mean" else rows.sum(1))

    return {
        "EmbeddingBag": Trainer(bag, call),
        "the same by torch's embedding_bag": Trainer(bag, call, by_torch=True),
        "Embedding, and torch's sum or mean": Trainer(
            lambda: torch.nn.Embedding(10, DIM, sparse=True), pooled
        ),
    }


def measured(case: str, runs: int) -> dict[str, float]:
    """Milliseconds of a step, medians."""
    sides = trainers(case)
    times: dict[str, list[float]] = {name: [] for name in sides}
    drawn = torch.randint(0, IDS, (16, TABLES, BAGS, SIZE))
    for run in range(runs + 1):
        for name, side in sides.items():
            began = time.thread_time()
            for batch in drawn:
                side.step(batch)
            if run:
                times[name].append(time.thread_time() - began)
    return {name: statistics.median(each) / len(drawn) * 1e3 for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", metavar="N", type=int, default=15, help="runs of each measurement")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    torch.set_num_threads(1)
    for use in EVERYTHING:
        use()
    lines: list[str] = []
    for case in CASES:
        found = measured(case, options.runs)
        if not lines:
            lines = [f"| ms of CPU a step | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
        ours, *others = found.values()
        cells = [f"**{ours:.1f}**", *(f"{each:.1f} ({each / ours:.1f} x)" for each in others)]
        lines.append(f"| {case} | {' | '.join(cells)} |")
        sys.stderr.write(f"{lines[-1]}\n")
    publish("\n".join(lines), options.write, NAME)


if __name__ == "__main__":
    main()

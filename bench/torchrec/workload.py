"""The job that all sides do: data, batches, dense model, figures. Knows torch only; drawing the data needs
fleetrun's generator.

    python bench/torchrec/workload.py DATA.pt --rows 409600 --test_rows 49152

An epoch is made of batches that lie in memory, laid out as each side wants them: only training is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SLOTS, DENSE = 26, 13


@dataclass(frozen=True)
class Shape:
    """`tables`: 1 (all slots share one), 26 (one a slot) or 26 k (each serves batch / k examples of a slot:
    the same number of ids in all, in more calls). `dims`: of slot s, dims[s % len(dims)].
    """

    tables: int
    dims: tuple[int, ...]
    batch: int

    def __post_init__(self) -> None:
        if self.tables != 1 and (self.tables % SLOTS or self.batch % (self.tables // SLOTS)):
            raise SystemExit(
                f"--tables is {self.tables}; it must be 1, or a multiple of 26 whose share divides the batch"
            )
        if len(self.dims) > 1 and self.tables != SLOTS:
            raise SystemExit("several dims need 26 tables")

    @property
    def share(self) -> int:
        """Tables of a slot."""
        return max(1, self.tables // SLOTS)

    @property
    def ids(self) -> int:
        """Ids of a table in a batch."""
        return self.batch * SLOTS // self.tables

    def slot(self, table: int) -> int:
        return table // self.share

    def dim(self, table: int) -> int:
        return self.dims[self.slot(table) % len(self.dims)]

    @property
    def width(self) -> int:
        """Values of an example that come from tables."""
        return sum(self.dims[slot % len(self.dims)] for slot in range(SLOTS))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", required=True, type=Path, help="written by workload.py")
    parser.add_argument("--tables", type=int, default=26, help="1, 26, 104, 416 ... [%(default)s]")
    parser.add_argument("--dims", type=_numbers, default=(16,), help="9, 16 or 8,16,32 ... [16]")
    parser.add_argument("--hidden", type=_numbers, default=(128, 64), help="128,64 or 400,400,400 [128,64]")
    parser.add_argument(
        "--batch_size", type=int, default=512, help="batch size of each trainer [%(default)s]"
    )
    parser.add_argument("--rule", default="adagrad", help="of the tables: adagrad, adam (lazy) [%(default)s]")
    parser.add_argument("--lr", type=float, default=0.02, help="of the tables [%(default)s]")
    parser.add_argument("--dense_lr", type=float, default=1e-3, help="Adam, of everything else [%(default)s]")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument(
        "--rows", type=int, help="of the training split, all trainers together (default: all)"
    )
    parser.add_argument("--warm_up", type=int, default=20, help="steps before the clock starts [%(default)s]")
    parser.add_argument("--result", help="a path that members append to; set by the parent")


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape(args.tables, tuple(args.dims), args.batch_size)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


class Dense(torch.nn.Module):
    """Wide & deep without its tables: (batch, width) rows and (batch, 13) floats -> (batch,) logits."""

    def __init__(self, width: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.wide = _linear(DENSE, 1)
        layers: list[torch.nn.Module] = []
        inputs = width + DENSE
        for units in hidden:
            layers += [_linear(inputs, units), torch.nn.ReLU()]
            inputs = units
        self.deep = torch.nn.Sequential(*layers, _linear(inputs, 1))

    def forward(self, rows: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        return (self.wide(dense) + self.deep(torch.cat([rows, dense], dim=1))).squeeze(1)


def _linear(inputs: int, outputs: int) -> torch.nn.Linear:
    layer = torch.nn.Linear(inputs, outputs)
    torch.nn.init.normal_(layer.weight, std=inputs**-0.5)
    torch.nn.init.zeros_(layer.bias)
    return layer


def joined(rows: Sequence[torch.Tensor], shape: Shape) -> torch.Tensor:
    """What the tables gave, in their order, as (batch, width)."""
    if shape.tables == 1:
        return rows[0].reshape(shape.batch, -1)
    if shape.share == 1:
        return torch.cat(list(rows), dim=1)
    return torch.cat(list(rows)).view(SLOTS, shape.batch, -1).transpose(0, 1).reshape(shape.batch, -1)


@dataclass(frozen=True)
class Split:
    """Of a trainer: local ids (rows, 26) from 1, 0 where missing; floats; labels."""

    ids: torch.Tensor
    dense: torch.Tensor
    labels: torch.Tensor

    def batches(self, shape: Shape) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(ids, dense, labels): ids (batch, 26) for one table, else (26, batch), contiguous."""
        found = []
        for start in range(0, len(self.labels) - shape.batch + 1, shape.batch):
            some = slice(start, start + shape.batch)
            ids = self.ids[some] if shape.tables == 1 else self.ids[some].t().contiguous()
            found.append((ids.contiguous(), self.dense[some], self.labels[some]))
        return found


class Data:
    """`sizes`: local ids of each slot, 0 included. `signs`: of each slot, the 63-bit id of a local one."""

    def __init__(self, path: Path, rank: int, trainers: int, rows: int | None = None) -> None:
        held = torch.load(path, mmap=True)
        self.sizes: list[int] = held["sizes"]
        self.signs: list[torch.Tensor] = held["signs"]
        self.train = self._share(held["train"], rank, trainers, rows)
        self.test = self._share(held["test"], rank, trainers, None)

    def _share(self, split: Any, rank: int, trainers: int, rows: int | None) -> Split:
        each = min(len(split[2]), rows or len(split[2])) // trainers
        return Split(*(tensor[rank * each : (rank + 1) * each].clone() for tensor in split))

    def signed(self, ids: torch.Tensor) -> torch.Tensor:
        """63-bit ids for local ones, (rows, 26)."""
        return torch.stack([self.signs[slot][ids[:, slot]] for slot in range(SLOTS)], dim=1)


def cpu() -> float:
    """Seconds of user and system time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(steps: Callable[[], int], barrier: Callable[[], None]) -> dict[str, float]:
    """`steps()` does all steps and returns their number; the clock stops when all trainers are through."""
    barrier()
    cpu_before, started = cpu(), time.perf_counter()
    count = steps()
    barrier()
    return {"steps": count, "seconds": time.perf_counter() - started, "cpu": cpu() - cpu_before}


def leave(result: str, rank: int, row: dict[str, float], logits: torch.Tensor, labels: torch.Tensor) -> None:
    """What a trainer hands to its parent."""
    torch.save({"logits": logits, "labels": labels}, f"{result}.pt{rank}")
    Path(f"{result}.trainer{rank}").write_text(json.dumps(row))


def summary(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Of all members. CPU in seconds per million examples, and ms a step of one trainer."""
    rows = [json.loads((folder / f"r.trainer{rank}").read_text()) for rank in range(args.trainers)]
    tests = [torch.load(folder / f"r.pt{rank}") for rank in range(args.trainers)]
    logits, labels = (torch.cat([each[name] for each in tests]) for name in ("logits", "labels"))
    steps = sum(row["steps"] for row in rows)
    examples = steps * args.batch_size
    trainer, server = sum(row["cpu"] for row in rows), max(row.get("server_cpu", 0.0) for row in rows)
    return {
        "speed": examples / max(row["seconds"] for row in rows),
        "trainer_cpu_s_per_M": trainer / examples * 1e6,
        "server_cpu_s_per_M": server / examples * 1e6,
        "cpu_s_per_M": (trainer + server) / examples * 1e6,
        "trainer_ms_a_step": trainer / steps * 1e3,
        "server_ms_a_step": server / steps * 1e3,
        "auc": _auc(logits, labels),
        "log_loss": float(torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)),
        "examples": examples,
        "load": os.getloadavg()[0],
    }


def _auc(logits: torch.Tensor, labels: torch.Tensor) -> float:
    _, place, counts = torch.unique(logits.double(), return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    clicks, others = labels.sum().double(), (1 - labels).sum().double()
    return float((ranks[labels > 0].sum() - clicks * (clicks + 1) / 2) / (clicks * others))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=409_600)
    parser.add_argument("--test_rows", type=int, default=49_152)
    args = parser.parse_args()
    from trainers.data.clicks import ClickModel

    truth = ClickModel()
    train, test = truth.draw(args.rows, seed=0), truth.draw(args.test_rows, seed=1)
    signs, columns = [], []
    both = torch.cat([torch.from_numpy(train.ids), torch.from_numpy(test.ids)])
    for slot in range(SLOTS):
        column = both[:, slot]
        known = torch.unique(column[column != 0])
        columns.append(torch.where(column == 0, 0, torch.searchsorted(known, column) + 1))
        signs.append(torch.cat([torch.zeros(1, dtype=torch.int64), known]))
    local = torch.stack(columns, dim=1)
    parts = [(each.tensors()[1].clone(), each.tensors()[2].clone()) for each in (train, test)]
    torch.save(
        {
            "sizes": [len(each) for each in signs],
            "signs": signs,
            "train": (local[: args.rows].clone(), *parts[0]),
            "test": (local[args.rows :].clone(), *parts[1]),
        },
        args.path,
    )
    print(
        f"{sum(map(len, signs)):,} ids; best AUC {test.best().auc:.4f}, log loss {test.best().log_loss:.4f}"
    )


if __name__ == "__main__":
    main()

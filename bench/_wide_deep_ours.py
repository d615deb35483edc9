"""Wide & deep on our parameter server: a member of a job that bench/ps_wide_deep.py and bench/ps_scale.py
start. The same model, data and options as bench/paddle/wide_deep.py.

Each trainer appends one line of JSON to RESULT.trainer<rank>: see `measured`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from _folded import FoldedEmbedding
from _usage import leave_pid, own_cpu, server_usage
from _wire import Wire

from trainers import fleet
from trainers.data.click_files import CLICK_SLOTS, ID_SLOTS
from trainers.data.dataset import InMemoryDataset, QueueDataset
from trainers.data.slots import Batch
from trainers.metrics import Auc, LogLoss
from trainers.ps import SparseEmbedding, Uniform
from trainers.zoo.click_models import WideDeep

BUCKETS = 4096
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["sync", "async", "geo"], default="async")
    parser.add_argument("--k_steps", type=int, default=100)
    parser.add_argument("--merge", type=int, default=1, help="steps of a push, in async training")
    parser.add_argument("--data", nargs="+", required=True, help="files to train on")
    parser.add_argument("--test", nargs="*", default=[], help="files to test on")
    parser.add_argument("--in_memory", action="store_true")
    parser.add_argument("--pipe", default="cat", help="pipe_command of the training files")
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--hidden", default="128,64")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--folded", type=int, metavar="ROWS", help="bound the table to this size")
    parser.add_argument("--no_prefetch", action="store_true")
    parser.add_argument("--warm_up", type=int, default=0, metavar="STEPS", help="before anything is measured")
    parser.add_argument("--count", action="store_true", help="count messages and bytes on the wire")
    parser.add_argument("--result", required=True)
    return parser.parse_args()


def strategy(args: argparse.Namespace) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = args.mode != "sync"
    if args.mode == "geo":
        made.a_sync_configs = {"k_steps": args.k_steps}
    elif args.mode == "async":
        made.a_sync_configs = {"max_merge_var_num": args.merge}
    return made


def network(args: argparse.Namespace) -> WideDeep:
    table: torch.nn.Module
    if args.folded:
        table = FoldedEmbedding(args.folded, args.dim)
    else:
        table = SparseEmbedding(args.dim, init=Uniform(-0.01, 0.01), padding_idx=0)
    return WideDeep(table, args.dim, hidden=[int(units) for units in args.hidden.split(",")])


def dataset(args: argparse.Namespace, files: list[str], pipe: str) -> Any:
    made = InMemoryDataset() if args.in_memory else QueueDataset()
    made.init(use_var=CLICK_SLOTS, pipe_command=pipe, batch_size=args.batch_size, thread_num=1)
    made.set_filelist(files[fleet.worker_index() :: fleet.worker_num()])
    if args.in_memory:
        made.load_into_memory()
    return made


def tensors(batch: Batch) -> Tensors:
    return batch.joined(*ID_SLOTS), batch.tensor("dense_input"), batch.tensor("label").squeeze(1)


def epoch(model: WideDeep, optimizer: Any, batches: Iterable[Tensors], *, prefetch: bool) -> tuple[int, int]:
    """(examples, steps)."""
    examples = steps = 0
    if prefetch:
        batches = fleet.prefetch(batches, lambda batch: batch[0])
    for ids, dense, labels in batches:
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(ids, dense), labels)
        optimizer.minimize(loss)
        examples += len(labels)
        steps += 1
    return examples, steps


@torch.no_grad()
def test(model: WideDeep, batches: Iterable[Tensors]) -> dict[str, Any]:
    model.eval()
    area, loss = Auc(BUCKETS), LogLoss()
    for ids, dense, labels in batches:
        clicks = torch.sigmoid(model(ids, dense))
        area.update(clicks, labels)
        loss.update(clicks, labels)
    others, clicks = area.state.view(2, BUCKETS)
    total, rows = loss.state.tolist()
    return {
        "test_rows": int(rows),
        "test_loss": total,
        "others": others.long().tolist(),
        "clicks": clicks.long().tolist(),
    }


def measured(args: argparse.Namespace, model: WideDeep, optimizer: Any) -> dict[str, Any]:
    """One epoch and a test. `seconds` of this trainer's epoch until its last gradient has been applied, `cpu`
    of its process and its pipe commands; `server_cpu` of the servers from the first trainer's start to the
    last one's end; what `Wire` counts, if wanted; `others` and `clicks`: histograms of this trainer's test
    predictions.
    """
    data = dataset(args, args.data, args.pipe)
    if args.in_memory:
        data.local_shuffle()
    if args.warm_up:
        first = itertools.islice(map(tensors, data), args.warm_up)
        epoch(model, optimizer, first, prefetch=not args.no_prefetch)
    fleet.barrier_worker()
    wire = Wire(fleet.server_endpoints()) if args.count else None
    server_before, cpu_before = server_usage(args.result)[0], own_cpu()
    started = time.perf_counter()
    rows, steps = epoch(model, optimizer, map(tensors, data), prefetch=not args.no_prefetch)
    fleet.barrier_worker()
    seconds, cpu = time.perf_counter() - started, own_cpu() - cpu_before
    traffic = wire.since() if wire else {}
    server_after, server_peak = server_usage(args.result)
    row = {
        "rows": rows,
        "steps": steps,
        "seconds": seconds,
        "cpu": cpu,
        "server_cpu": server_after - server_before,
        "server_peak_mb": server_peak,
        **traffic,
    }
    fleet.barrier_worker()
    return row | (test(model, _test_batches(args)) if args.test else {})


def _test_batches(args: argparse.Namespace) -> Iterator[Tensors]:
    yield from map(tensors, dataset(args, args.test, "cat"))


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    fleet.init()
    model = network(args)
    wishes = strategy(args)
    served = fleet.distributed_model(model)
    adam = torch.optim.Adam(served.parameters(), lr=args.lr)
    optimizer = fleet.distributed_optimizer(adam, wishes)
    if fleet.is_server():
        leave_pid(args.result, fleet.server_index())
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    row = measured(args, model, optimizer)
    with Path(f"{args.result}.trainer{fleet.worker_index()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
    fleet.stop_worker()


if __name__ == "__main__":
    main()

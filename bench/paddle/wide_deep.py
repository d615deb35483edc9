"""Wide & deep on Paddle's parameter server: what bench/ps_wide_deep.py measures ours against.

Run by Paddle's launcher with one server and two trainers. Each trainer appends one line of JSON to
RESULT.trainer<rank>: see `measured`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import mend
import numpy as np
import paddle
import paddle.distributed.fleet as fleet
from paddle.distributed.fleet.utils.ps_util import DistributedInfer

DENSE, SLOTS = 13, 26
BUCKETS = 4096
TICKS = os.sysconf("SC_CLK_TCK")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=["sync", "async", "geo"], default="async")
    parser.add_argument("--k_steps", type=int, default=100)
    parser.add_argument("--data", nargs="+", required=True, help="files to train on")
    parser.add_argument("--test", nargs="+", required=True, help="files to test on")
    parser.add_argument("--in_memory", action="store_true")
    parser.add_argument("--pipe", default="cat", help="pipe_command of the training files")
    parser.add_argument("--dim", type=int, default=9)
    parser.add_argument("--hidden", default="128,64")
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--vocabulary", type=int, default=1_000_001, help="rows of the table in geo training")
    parser.add_argument("--result", required=True)
    return parser.parse_args()


def normal(fan_in: int) -> paddle.ParamAttr:
    return paddle.ParamAttr(initializer=paddle.nn.initializer.Normal(std=1 / math.sqrt(fan_in)))


class Network:
    """The static graph: `inputs`, `cost`, and a copy for testing that sums what the metrics need."""

    def __init__(self, args: argparse.Namespace) -> None:
        dense = paddle.static.data("dense_input", [None, DENSE], "float32")
        slots = [paddle.static.data(f"C{n}", [None, 1], "int64", lod_level=1) for n in range(1, SLOTS + 1)]
        label = paddle.static.data("label", [None, 1], "int64")
        self.inputs = [dense, *slots, label]
        wide = paddle.static.nn.fc(dense, 1, weight_attr=normal(DENSE))
        rows = [paddle.reshape(self._rows(slot, args), [-1, args.dim]) for slot in slots]
        layer, width = paddle.concat([*rows, dense], axis=1), args.dim * SLOTS + DENSE
        for units in map(int, args.hidden.split(",")):
            layer = paddle.static.nn.fc(layer, units, activation="relu", weight_attr=normal(width))
            width = units
        deep = paddle.static.nn.fc(layer, 1, weight_attr=normal(width))
        click = paddle.nn.functional.sigmoid(wide + deep)
        truth = paddle.cast(label, "float32")
        self.cost = paddle.mean(paddle.nn.functional.log_loss(click, truth))
        self._add_test(click.name, label.name)

    @staticmethod
    def _rows(slot: Any, args: argparse.Namespace) -> Any:
        initial = paddle.nn.initializer.Uniform(-0.01, 0.01)
        attributes = paddle.ParamAttr(name="embedding", initializer=initial)
        if args.mode == "geo":  # geo training knows fixed vocabularies only
            return paddle.static.nn.embedding(
                slot, size=[args.vocabulary, args.dim], is_sparse=True, param_attr=attributes
            )
        return paddle.static.nn.sparse_embedding(slot, size=[1024, args.dim], param_attr=attributes)

    def _add_test(self, click_name: str, label_name: str) -> None:
        self.test = self.cost.block.program.clone(for_test=True)
        block = self.test.global_block()
        with paddle.static.program_guard(self.test, paddle.static.default_startup_program()):
            click, label = block.var(click_name), block.var(label_name)
            both = paddle.concat([1 - click, click], axis=1)
            _, _, stats = paddle.static.auc(both, label, num_thresholds=BUCKETS - 1)
            self.clicks, self.others = stats[2].name, stats[3].name
            total = paddle.static.create_global_var([1], 0.0, "float32", persistable=True, name="total_loss")
            truth = paddle.cast(label, "float32")
            losses = paddle.nn.functional.log_loss(click, truth, epsilon=1e-7)
            paddle.assign(total + paddle.reshape(paddle.sum(losses), [1]), total)
            self.loss = total.name


def strategy(args: argparse.Namespace) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy()
    made.a_sync = args.mode != "sync"
    if args.mode == "geo":
        made.a_sync_configs = {"k_steps": args.k_steps}
    return made


def dataset(network: Network, args: argparse.Namespace, files: list[str], pipe: str) -> Any:
    kind = paddle.distributed.InMemoryDataset if args.in_memory else paddle.distributed.QueueDataset
    made = kind()
    made.init(use_var=network.inputs, pipe_command=pipe, batch_size=args.batch_size, thread_num=1)
    made.set_filelist(files[fleet.worker_index() :: fleet.worker_num()])
    if args.in_memory:
        made.load_into_memory()
    return made


def lines(files: list[str]) -> int:
    count = 0
    for name in files[fleet.worker_index() :: fleet.worker_num()]:
        with Path(name).open("rb") as file:
            count += sum(1 for _ in file)
    return count


def server_usage(result: str) -> tuple[float, float]:
    """(CPU seconds, peak resident MB) so far of all servers."""
    cpu, peak = 0.0, 0.0
    for path in Path(result).parent.glob(f"{Path(result).name}.server*"):
        process = Path("/proc") / path.read_text()
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        cpu += (int(fields[11]) + int(fields[12])) / TICKS
        status = (process / "status").read_text()
        peak += int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return cpu, peak


def variable(name: str) -> Any:
    return np.array(paddle.static.global_scope().find_var(name).get_tensor())


def main() -> None:
    args = arguments()
    os.environ["CPU_NUM"] = "1"
    paddle.enable_static()
    fleet.init(is_collective=False)
    network = Network(args)
    adam = paddle.optimizer.Adam(learning_rate=args.lr, lazy_mode=True)
    fleet.distributed_optimizer(adam, strategy(args)).minimize(network.cost)
    if fleet.is_server():
        Path(f"{args.result}.server{fleet.server_index()}").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    row = measured(network, args, executor)
    with Path(f"{args.result}.trainer{fleet.worker_index()}").open("a") as file:
        file.write(json.dumps(row) + "\n")
    fleet.util.barrier()
    mend.leave(fleet)


def measured(network: Network, args: argparse.Namespace, executor: Any) -> dict[str, Any]:
    """One epoch and a test. `seconds` of this trainer's epoch, `cpu` of its process and its pipe commands;
    `server_cpu` of the servers from the first trainer's start to the last one's end; `others` and `clicks`:
    histograms of this trainer's test predictions.
    """
    sync = mend.SyncCommunicator(fleet) if args.mode == "sync" else None
    data = dataset(network, args, args.data, args.pipe)
    if args.in_memory:
        data.local_shuffle()
    fleet.util.barrier()
    if sync is not None:
        sync.arm(1)
    server_before, before = server_usage(args.result)[0], os.times()
    started = time.perf_counter()
    executor.train_from_dataset(
        paddle.static.default_main_program(), data, paddle.static.global_scope(), thread=1, debug=False
    )
    seconds, after = time.perf_counter() - started, os.times()
    fleet.util.barrier()
    server_after, server_peak = server_usage(args.result)
    program = network.test
    if args.mode != "geo":
        startup = paddle.static.default_startup_program()
        program = DistributedInfer(main_program=program, startup_program=startup).get_dist_infer_program()
    executor.infer_from_dataset(
        program, dataset(network, args, args.test, "cat"), paddle.static.global_scope(), thread=1, debug=False
    )
    return {
        "rows": lines(args.data),
        "seconds": seconds,
        "cpu": sum(after[:4]) - sum(before[:4]),
        "server_cpu": server_after - server_before,
        "server_peak_mb": server_peak,
        "test_rows": lines(args.test),
        "test_loss": float(variable(network.loss).sum()),
        "others": variable(network.others).reshape(-1).tolist(),
        "clicks": variable(network.clicks).reshape(-1).tolist(),
    }


if __name__ == "__main__":
    main()

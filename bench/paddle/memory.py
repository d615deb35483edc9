"""The memory of a table's rows on Paddle's parameter server: what bench/ps_kernels.py puts beside ours.

Run by Paddle's launcher with one server and one trainer, which trains on ids that are all new. Writes one
line of JSON to RESULT.trainer0: resident bytes of the server after so many rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import mend
import numpy as np
import paddle
import paddle.distributed.fleet as fleet

BATCH = 100_000
RULES = {"Adagrad": ("StdAdaGradSGDRule", "adagrad"), "SparseAdam": ("SparseAdamSGDRule", "adam")}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=RULES, required=True)
    parser.add_argument("--dim", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--result", required=True)
    return parser.parse_args()


def strategy(rule: str) -> fleet.DistributedStrategy:
    """A table as ours: each value with its own optimizer state, and all of it from the first push on."""
    made = fleet.DistributedStrategy()
    made.a_sync = True
    table = made.strategy.downpour_table_param.add()
    table.table_name, table.table_class, table.shard_num = "embedding", "MemorySparseTable", 1000
    table.accessor.accessor_class = "SparseAccessor"
    table.accessor.embedx_threshold = 0
    name, options = RULES[rule]
    for part in (table.accessor.embed_sgd_param, table.accessor.embedx_sgd_param):
        part.name = name
        chosen = getattr(part, options)
        chosen.learning_rate, chosen.initial_range = 0.05, 0.01
        chosen.weight_bounds.extend([-10.0, 10.0])
    return made


def resident(result: str) -> int:
    status = (Path("/proc") / Path(f"{result}.server0").read_text() / "status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def main() -> None:
    args = arguments()
    paddle.enable_static()
    fleet.init(is_collective=False)
    ids = paddle.static.data("ids", [None, 1], "int64")
    initial = paddle.ParamAttr(name="embedding", initializer=paddle.nn.initializer.Uniform(-0.01, 0.01))
    rows = paddle.static.nn.sparse_embedding(ids, size=[1024, args.dim], param_attr=initial)
    cost = paddle.mean(paddle.static.nn.fc(paddle.reshape(rows, [-1, args.dim]), 1))
    fleet.distributed_optimizer(paddle.optimizer.SGD(1e-6), strategy(args.rule)).minimize(cost)
    if fleet.is_server():
        Path(f"{args.result}.server0").write_text(str(os.getpid()))
        fleet.init_server()
        fleet.run_server()
        return
    executor = paddle.static.Executor(paddle.CPUPlace())
    executor.run(paddle.static.default_startup_program())
    fleet.init_worker()
    new = np.random.default_rng(0).integers(1, 2**62, args.rows)
    found = []
    for start in range(0, args.rows, BATCH):
        batch = new[start : start + BATCH, None]
        executor.run(paddle.static.default_main_program(), feed={"ids": batch}, fetch_list=[])
        fleet.fleet._runtime_handle._worker.client_flush()
        found.append((start + len(batch), resident(args.result)))
    time.sleep(1)  # what comes after an answer
    found[-1] = args.rows, resident(args.result)
    Path(f"{args.result}.trainer0").write_text(json.dumps({"resident": found}) + "\n")
    mend.leave(fleet)


if __name__ == "__main__":
    main()

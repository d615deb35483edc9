"""A rank of the job that `warm.py` starts: data parallel training of a small model over Gloo.

    _warm_worker.py FOLDER CRASHES

In each of the first CRASHES attempts, the last rank kills itself after ten steps. With -1, all ranks of the
first attempt stay. What happens is written to FOLDER as lines of JSON.
"""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

IMPORTED = time.time()

import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

STEPS = 10


def main() -> None:
    folder, crashes, rank = Path(sys.argv[1]), int(sys.argv[2]), os.environ["RANK"]
    attempt = len(list(folder.glob(f"begun.{rank}.*")))
    (folder / f"begun.{rank}.{attempt}").touch()
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped = 0.0
    for _ in range(STEPS):
        model(torch.rand(8, 64)).sum().backward()
        optimizer.step()
        stepped = stepped or time.time()
    dist.barrier()
    rows = [line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines()]
    size = next(int(row[1]) for row in rows if row[0] == "Pss:")
    dist.barrier()  # no rank ends before all have measured
    kills = attempt < crashes and dist.get_rank() == dist.get_world_size() - 1
    told = {"attempt": attempt, "imported": IMPORTED, "stepped": stepped, "pss": size, "ends": time.time()}
    (folder / f"told.{rank}.{attempt}").write_text(json.dumps(told))
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)
    if crashes < 0 and not attempt:
        time.sleep(1000)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

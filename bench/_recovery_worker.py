"""A rank of the job that `recovery.py` breaks: data parallel training of a model of MB megabytes over Gloo.

    _recovery_worker.py FOLDER MB WAY CRASHES PATIENCE

WAY is `disk`: rank 0 saves by torch.save every EVERY steps, or `memory`: every rank by
`trainers.checkpoints.memory` after each step. CRASHES times the last rank is killed by SIGKILL, PATIENCE
seconds after the first step of the attempt. What happens is written to FOLDER as lines of JSON.
"""

import time

BEGIN = time.time()

import torch  # noqa: E402  what a script begins with

IMPORTED = time.time()

import datetime  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch.distributed as dist  # noqa: E402

EVERY = 20
WAIT = 30.0  # seconds until a meeting is given up: with torch's default of 30 minutes one in vain never ended
PAUSE = 0.05  # seconds of a step in which the processors are free, as with a GPU

folder, megabytes, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
crashes, patience = int(sys.argv[4]), float(sys.argv[5])
rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
attempt = len(list(folder.glob(f"begun.{rank}.*")))
crashed = len(list(folder.glob("crashed.*")))  # attempts that came to nothing are none of these
(folder / f"begun.{rank}.{attempt}").touch()
told = (folder / f"told.{rank}.jsonl").open("a", buffering=1)


def tell(what: str, **more: object) -> None:
    now = {"time": time.time(), "processor": time.process_time()}
    told.write(json.dumps({"what": what, "attempt": attempt, "rank": rank, **now, **more}) + "\n")


def save_to_disk(step: int) -> None:
    if rank == 0 and step % EVERY == 0:
        aside = folder / "checkpoint.new"
        torch.save({"step": step, **{name: each.state_dict() for name, each in state.items()}}, aside)
        aside.replace(folder / "checkpoint.pt")


def load_from_disk() -> int:
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    saved = torch.load(path)
    for name, each in state.items():
        each.load_state_dict(saved[name])
    return int(saved["step"])


tell("begin", time=BEGIN, imports=IMPORTED - BEGIN)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT))
tell("group")
torch.manual_seed(1)
layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(megabytes)]  # a megabyte each
tell("model")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
tell("DDP")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
state = {"model": model, "optimizer": optimizer}

if way == "memory":
    from trainers.checkpoints import memory

    done = memory.load(state) or 0
else:
    done = load_from_disk()

tell("load", step=done)
first = None
plain = torch.empty(megabytes << 20, dtype=torch.uint8), torch.ones(megabytes << 20, dtype=torch.uint8)
step = done
while True:
    step += 1
    optimizer.zero_grad()
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()
    tell("step", step=step)
    before = time.perf_counter()
    if way == "memory":
        memory.save(step, state)
    else:
        save_to_disk(step)
    stall = time.perf_counter() - before
    if crashed == crashes and step - done > 10:
        before = time.perf_counter()
        plain[0].copy_(plain[1])
        tell("saved", seconds=stall, copy=time.perf_counter() - before)
    first = first or time.time()
    if crashed < crashes and rank == last and time.time() - first > patience:
        tell("crash", step=step)
        (folder / f"crashed.{attempt}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if crashed == crashes and step - done > 30:
        break
    time.sleep(PAUSE)

"""A rank of the job that `day.py` breaks: data parallel training over Gloo with a known answer.

    _day_worker.py FOLDER WAY STEPS PAUSE

WAY is `disk`: rank 0 saves every EVERY steps, or `memory`: as well every rank after each step, with a copy on
the next machine. STEPS: where it ends, 0: never. PAUSE: seconds of a step in which the processors are free,
as with a GPU. FOLDER is seen by all hosts. A file FOLDER/HOST.KIND makes the rank on that host fail; with
HOST.bad, which stays, it does so AFTER steps after each start.
"""

import datetime
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

EVERY = 50
AFTER = 20
WAIT = 20.0  # seconds until a collective is given up, with either launcher

folder, way, last, pause = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
rank, host = int(os.environ["RANK"]), socket.gethostname()
told = (folder / f"told.{host}.{os.getpid()}.jsonl").open("a", buffering=1)


def tell(what: str, **more: object) -> None:
    told.write(json.dumps({"what": what, "time": time.time(), "host": host, "rank": rank, **more}) + "\n")


def asked(kind: str) -> bool:
    """Whether it is to fail in this way; once for each time that it was asked to."""
    try:
        (folder / f"{host}.{kind}").unlink()
    except FileNotFoundError:
        return False
    tell("fault", kind=kind)
    return True


def fail_if_asked(made: int) -> None:
    """`made`: steps since this process began."""
    if asked("exception"):
        raise RuntimeError("a fault of the schedule")
    if made >= AFTER and (folder / f"{host}.bad").exists():
        tell("fault", kind="bad")
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    while asked("hang"):
        time.sleep(1e6)


tell("begin")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT))
torch.manual_seed(1)
layers = [
    torch.nn.Linear(64, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 256),
    torch.nn.ReLU(),
    torch.nn.Linear(256, 1),
]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
checkpoint = folder / "checkpoint.pt"

step = None
if way == "memory":
    from trainers.checkpoints import memory

    step = memory.load(state)
source = "memory"
if step is None:
    step, source = 0, "disk"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        for name, each in state.items():
            each.load_state_dict(saved[name])
        step = saved["step"]
tell("ready", step=step, source=source)
begun = step

truth = torch.randn(64, 1, generator=torch.Generator().manual_seed(7))
while not last or step < last:
    step += 1
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * 1000 + rank))
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch), torch.tanh(batch @ truth))
    loss.backward()
    for (
        each
    ) in model.parameters():  # DDP lays its buckets anew after the first step, and sums in another order
        dist.all_reduce(each.grad)
        each.grad /= dist.get_world_size()
    optimizer.step()
    tell("step", step=step, loss=loss.item())
    if way == "memory":
        memory.save(step, state, neighbour=True)
    if rank == 0 and step % EVERY == 0:
        aside = checkpoint.with_suffix(".new")
        torch.save({"step": step, **{name: each.state_dict() for name, each in state.items()}}, aside)
        aside.replace(checkpoint)
    fail_if_asked(step - begun)
    time.sleep(pause)
dist.destroy_process_group()

"""The jobs of `controls.py`: `_controls_job.py NAME SECONDS`. Each is healthy, but for those of BROKEN.

SECONDS is how long a phase takes in which a rank does something else than training.
"""

import ctypes
import datetime
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
SECONDS = float(sys.argv[2]) if __name__ == "__main__" else 0.0
LONGER = datetime.timedelta(hours=1)


def meet() -> None:
    dist.init_process_group("gloo", timeout=LONGER)


def train(steps: int = 20, each: Callable[[int], None] = lambda step: None) -> None:
    """Steps of one second, each with an all_reduce."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        each(step)
        model(torch.randn(8, 4)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if RANK == 0:
            print("step", step, flush=True)
        time.sleep(1)


def on_first(step: int) -> None:
    if step == 10 and RANK == 0:
        time.sleep(SECONDS)


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(10_000))


# ---- Healthy


def long_first_step() -> None:
    meet()
    train(20, lambda step: time.sleep(SECONDS * (step == 0)))


def one_compiles_longer() -> None:
    meet()
    train(20, lambda step: busy(SECONDS * (step == 0 and RANK == 1)))


def compiles() -> None:
    meet()
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    for width in range(2, 6):
        compiled(torch.randn(width, 8)).sum().backward()
    train()


def evaluates() -> None:
    meet()
    train(20, on_first)
    if RANK == 0:
        time.sleep(SECONDS)
    dist.barrier()


def prepares_data() -> None:
    meet()
    if RANK == 0:
        time.sleep(SECONDS)
    dist.barrier()
    train()


def prepares_before_meeting() -> None:
    if RANK == 0:
        time.sleep(SECONDS)
    meet()
    train()


def slow_checkpoints() -> None:
    meet()

    def save(step: int) -> None:
        if step % 5 == 4:
            if RANK == 0:
                time.sleep(SECONDS / 4)
            dist.barrier()

    train(20, save)


def debugger() -> None:
    """Another process traces rank 1 and stops it."""
    meet()
    if RANK == 1 and os.fork() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        time.sleep(5)
        libc.ptrace(16, os.getppid(), 0, 0)  # PTRACE_ATTACH
        os.waitpid(os.getppid(), 0x40000000)  # __WALL
        time.sleep(SECONDS)
        libc.ptrace(17, os.getppid(), 0, 0)  # PTRACE_DETACH
        os._exit(0)
    train()


def suspended() -> None:
    """`controls.py` suspends the whole job for a while, as Ctrl-Z does."""
    meet()
    train(30)


def collects_garbage() -> None:
    meet()
    held = [[number] for number in range(300_000)]

    def collect(step: int) -> None:
        if step % 4 == RANK:
            for _ in range(10):
                gc.collect()

    train(20, collect)
    del held


def uneven_batches() -> None:
    """The ranks that have fewer batches wait at the end of the epoch."""
    meet()
    train(10)
    if RANK == 0:
        for _ in range(int(SECONDS / 5)):
            time.sleep(5)
    dist.barrier()
    train(10)


def logs_much() -> None:
    meet()

    def say(step: int) -> None:
        end = time.monotonic() + SECONDS / 20
        while time.monotonic() < end:
            print("x" * 4000)

    train(20, say)


def logs_nothing() -> None:
    meet()
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - to the end of the process
    train(int(SECONDS))


def only_sleeps() -> None:
    time.sleep(SECONDS)


def pipeline() -> None:
    """The first stage reads for long, the others wait for it."""
    meet()
    value = torch.zeros(4)
    for step in range(10):
        if RANK == 0:
            time.sleep(SECONDS * (step == 5))
        else:
            dist.recv(value, RANK - 1)
        if dist.get_world_size() - 1 > RANK:
            dist.send(value, RANK + 1)
        time.sleep(1)


def slow_loader() -> None:
    class Slow(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(SECONDS / 8)
            return torch.zeros(4)

    meet()
    for _ in DataLoader(Slow(), batch_size=2, num_workers=1):
        train(1)


def saves_at_the_end() -> None:
    """The others have ended already."""
    meet()
    train()
    if RANK == 0:
        time.sleep(SECONDS)


def asks_rarely() -> None:
    """Rank 1 answers requests, which come rarely."""
    meet()
    value = torch.zeros(1)
    for _ in range(3):
        if RANK == 0:
            time.sleep(SECONDS / 3)
            dist.send(value, 1)
        elif RANK == 1:
            dist.recv(value, 0)
    dist.barrier()


def on_their_own() -> None:
    """Trials of a sweep, of which one takes much longer."""
    for step in range(20):
        print("trial", RANK, step, flush=True)
        time.sleep(1)
    if RANK == 1:
        time.sleep(SECONDS)


# ---- Broken


def sleeps_forever() -> None:
    meet()
    train(20, lambda step: time.sleep(10**6 * (step == 10 and RANK == 1)))


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    meet()
    train(20, lambda step: lock.acquire() if step == 10 and RANK == 1 else None)


def stops() -> None:
    meet()
    train(20, lambda step: os.kill(os.getpid(), signal.SIGSTOP) if step == 10 and RANK == 1 else None)


def loops() -> None:
    meet()
    train(20, lambda step: busy(10**6 * (step == 10 and RANK == 1)))


def another_order() -> None:
    meet()
    groups = [dist.new_group([0, 1], timeout=LONGER) for _ in range(2)]
    train(5)
    if RANK < 2:
        for group in groups if RANK else groups[::-1]:
            dist.all_reduce(torch.zeros(1), group=group)
    dist.barrier()


HEALTHY = [
    long_first_step, one_compiles_longer, compiles, evaluates, prepares_data, prepares_before_meeting,
    slow_checkpoints, debugger, suspended, collects_garbage, uneven_batches, logs_much, logs_nothing,
    only_sleeps, pipeline, slow_loader, saves_at_the_end, asks_rarely, on_their_own,
]  # fmt: skip
BROKEN = [sleeps_forever, deadlock, stops, loops, another_order]

if __name__ == "__main__":
    Path(f"begun.{RANK}").touch()
    {job.__name__: job for job in (*HEALTHY, *BROKEN)}[sys.argv[1]]()

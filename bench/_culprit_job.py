"""The training that `culprit.py` breaks: one rank does something wrong at one step; see FAULTS.

    _culprit_job.py FAULT RANK STEP STYLE

STYLE is plain (all_reduce of each gradient), ddp, fsdp (FSDP2) or ps (sync training on a parameter server,
where a RANK of -1 means the server, and another word the file for its pid). Collectives time out after 4
seconds. With CULPRIT_DEVICE=cuda they are NCCL's, and all ranks share one GPU.
"""

import contextlib
import ctypes
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

STEPS = 20
TIMEOUT = datetime.timedelta(seconds=4)


class Broken(RuntimeError):
    pass


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def slow_disk() -> None:
    folder = tempfile.mkdtemp()
    path = Path(folder, "shard")
    os.mkfifo(path)
    path.read_text()  # nobody writes


def python_loop() -> None:
    while True:
        pass


def thread_dies() -> None:
    done = threading.Event()

    def load() -> None:
        raise Broken("the loading thread")

    threading.Thread(target=load, daemon=True).start()
    done.wait()


class BadData(torch.utils.data.Dataset):
    def __init__(self, kill: bool) -> None:
        self.kill = kill

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise Broken("in a worker of the data loader")


def bad_loader(kill: bool = False) -> None:
    next(iter(torch.utils.data.DataLoader(BadData(kill), num_workers=1)))


def memory() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    bytearray(1 << 40)


FAULTS = {
    # does not come
    "sleep": lambda: time.sleep(600),
    "python loop": python_loop,
    "C loop with the GIL": lambda: sum(range(10**13)),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "lock": deadlock,
    "slow disk": slow_disk,
    "thread dies": thread_dies,
    "recv without send": lambda: dist.recv(torch.ones(1), (dist.get_rank() + 1) % dist.get_world_size()),
    # comes to something else
    "operation": lambda: dist.broadcast(torch.ones(1000), 0),
    "size": lambda: dist.all_reduce(torch.ones(900)),
    "dtype": lambda: dist.all_reduce(torch.ones(1000, dtype=torch.float64)),
    "group": lambda: dist.all_reduce(torch.ones(1000), group=ALL_AGAIN),
    # is gone
    "fewer steps": lambda: sys.exit(0),
    "fewer steps, stays": lambda: (dist.destroy_process_group(), time.sleep(600)),
    "os._exit(0)": lambda: os._exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "network cut": lambda: subprocess.run(
        ["ip", "link", "set", "dev", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True
    ),
    "launcher SIGKILL": lambda: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "storage times out": lambda: (_ for _ in ()).throw(TimeoutError("the read operation timed out")),
    "exception": lambda: (_ for _ in ()).throw(Broken("in the step")),
    "data loader": bad_loader,
    "data loader killed": lambda: bad_loader(kill=True),
    "memory": memory,
    # comes late
    "straggler": lambda: time.sleep(5.5),
}
"""Besides `backward` (an exception in it), `never joins`, `order` (two groups the other way round) and
`sends nothing` (where the next rank receives).
"""


def train_ps(fault: str, bad: int, step: int) -> None:
    from fleetrun import fleet
    from trainers.ps import SparseEmbedding

    begun = threading.Event()

    def beat() -> None:  # a start on a busy machine is not a hang
        while not begun.wait(1.0):
            print("starting", flush=True)

    threading.Thread(target=beat, daemon=True).start()
    fleet.init()
    model = nn.Sequential(SparseEmbedding(4), nn.Linear(4, 1))
    fleet.distributed_model(model)
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = False
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.01), strategy)
    server = Path(sys.argv[5])
    if fleet.is_server():
        server.write_text(str(os.getpid()))
        if fault == "busy":
            os.replace = lambda *paths: time.sleep(600)  # all that it saves
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    for number in range(STEPS):
        if number == 1:
            begun.set()
        if number == step and bad == fleet.worker_index():
            FAULTS[fault]()
        if number == step and bad == -1 and fleet.worker_index() == 0:
            hit_server(fault, server)
        loss = model(torch.arange(8)).square().mean()
        if number == step and fault == "backward" and bad == fleet.worker_index():
            loss.register_hook(lambda grad: (_ for _ in ()).throw(Broken("in backward")))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    fleet.stop_worker()


def hit_server(fault: str, server: Path) -> None:
    from fleetrun import fleet

    if fault == "busy":
        fleet.save_persistables(tempfile.mkdtemp())
    else:
        os.kill(int(server.read_text()), signal.Signals[fault])


def fail(fault: str, after: int) -> None:
    """In the rank that is so many after the bad one."""
    if fault == "sends nothing" and after < 2:
        if after:
            dist.irecv(torch.ones(1), (dist.get_rank() - 1) % dist.get_world_size()).wait()
        time.sleep(600)
    elif fault in FAULTS and not after:
        FAULTS[fault]()


def exchange(model: nn.Module | None, rank: int) -> None:
    for parameter in model.parameters() if model is not None else ():
        dist.all_reduce(parameter.grad)
    if rank < 2:  # Gloo counts this, which other ranks do not do, with its collectives
        (dist.recv if rank else dist.send)(torch.ones(8), 1 - rank)


def join(rank: int) -> None:
    if os.environ.get("CULPRIT_DEVICE") != "cuda":
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return
    os.environ["NCCL_HOSTID"] = f"host{rank}"  # NCCL takes one GPU for several on as many hosts
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "2000"  # a minute else, until it ends the process
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=60))
    dist.all_reduce(torch.ones(1))
    dist.distributed_c10d._set_pg_timeout(TIMEOUT, dist.group.WORLD)


def train(fault: str, bad: int, step: int, style: str) -> None:
    global ALL_AGAIN
    rank = int(os.environ["RANK"])
    if fault == "never joins" and rank == bad:
        time.sleep(600)
    join(rank)
    ALL_AGAIN = dist.new_group(timeout=TIMEOUT)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    if style == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif style == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for number in range(STEPS):
        now = number == step and rank == bad
        if number == step:
            fail(fault, (rank - bad) % dist.get_world_size())
        groups = [None, ALL_AGAIN]
        for group in groups[::-1] if now and fault == "order" else groups:
            dist.all_reduce(torch.ones(1000), group=group)
        loss = model(torch.randn(8, 16)).square().mean()
        if now and fault == "backward":
            loss.register_hook(lambda grad: (_ for _ in ()).throw(Broken("in backward")))
        optimizer.zero_grad()
        loss.backward()
        exchange(model if style == "plain" else None, rank)
        optimizer.step()
        loss.item()  # a GPU is waited for here
        time.sleep(0.02)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()


FAULT, BAD, STEP, STYLE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if STYLE == "ps":
    train_ps(FAULT, BAD, STEP)
else:
    train(FAULT, BAD, STEP, STYLE)

"""Trainers that die: `ps_failures die_in_sync | come_back | forget`. Says on stdout how far it has come."""

import os
import signal
import sys
import threading
from collections.abc import Callable

import torch

from trainers import fleet

STEPS = 20


def say(*words: object) -> None:
    print(*words, flush=True)


def build(a_sync: bool) -> tuple[torch.nn.Module, fleet.DistributedOptimizer]:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = a_sync
    # How long a connection may be gone, for servers; to trainers, how long a process may stand still.
    timeout = 4.0 if fleet.is_server() else 60.0
    strategy.ps_configs = {"trainer_timeout_s": timeout, "request_timeout_s": 60.0}
    torch.manual_seed(0)
    model = fleet.distributed_model(torch.nn.Linear(3, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, fleet.distributed_optimizer(inner, strategy)


def step(model: torch.nn.Module, optimizer: fleet.DistributedOptimizer) -> None:
    optimizer.minimize((model(torch.ones(4, 3)) - 1).square().mean())


def die_in_sync() -> None:
    """Trainer 1 is killed in the middle; trainer 0 must not wait for ever."""
    model, optimizer = build(a_sync=False)
    if fleet.is_server():
        fleet.init_server()
        # SIGTERM may reach any thread: here another than the one that serves, which no signal wakes up.
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        fleet.run_server()
        return say("server ended")
    say("joining")
    fleet.init_worker()
    for number in range(STEPS):
        if fleet.worker_index() == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        step(model, optimizer)
        say("step", number)


def come_back() -> None:
    """Trainer 0 is killed, and finds the tables as it left them."""
    model, optimizer = build(a_sync=True)
    if fleet.is_server():
        fleet.init_server()
        return fleet.run_server()
    restarted = os.environ["PADDLE_RESTART_COUNT"] != "0"
    initial = float(model.weight.detach().sum())
    say("joining")
    fleet.init_worker()
    if restarted:
        say("found", "initial values" if float(model.weight.detach().sum()) == initial else "trained values")
    for number in range(STEPS):
        step(model, optimizer)
        if number == 5 and not restarted and fleet.is_first_worker():
            os.kill(os.getpid(), signal.SIGKILL)
    fleet.barrier_worker()
    fleet.stop_worker()
    say("end", float(model.weight.detach().sum()))


def forget() -> None:
    """Uneven numbers of steps in a sync job, and one that ends without stop_worker: both are fine."""
    model, optimizer = build(a_sync=False)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return say("server ended")
    fleet.init_worker()
    for _ in range(5 + 3 * fleet.worker_index()):
        step(model, optimizer)
    if fleet.is_first_worker():
        fleet.stop_worker()
        late = (fleet.stop_worker, fleet.barrier_worker, optimizer.step)
        say("refused", sum(map(refused, late)))


def refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except RuntimeError as error:
        say(error)
        return True
    return False


if __name__ == "__main__":
    fleet.init()
    {"die_in_sync": die_in_sync, "come_back": come_back, "forget": forget}[sys.argv[1]]()

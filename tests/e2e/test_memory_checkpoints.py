"""Checkpoints in memory of real jobs: killed at any moment they end with the numbers of one that was not."""

import contextlib
import os
import signal
from collections.abc import Callable

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.traces import left_behind

PLAIN = """
import random
import torch
import torch.distributed as dist
from trainers.checkpoints import memory

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
done = memory.load(state) or 0
tell("from", ATTEMPT, done)
for step in range(done + 1, 301):
    torch.manual_seed(1000 * step + RANK)
    loss = model(torch.randn(8, 300)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory.save(step, state)
    if RANK == 1 and ATTEMPT < int(sys.argv[1]) and step == done + 2:  # the other one has made its first save
        import threading
        threading.Timer(random.Random(ATTEMPT).uniform(0.05, 0.2), os.kill, (os.getpid(), 9)).start()
tell("end", RANK, float(model.module.weight.double().sum().detach()))
"""


def ends(launch: Launch) -> set[str]:
    return {line.split()[3] for line in launch.told(" end ")}


def test_killed_again_and_again_a_job_ends_with_the_same_numbers(fleetrun: Fleetrun):
    script = fleetrun.script(PLAIN)
    launch = fleetrun.run("--nproc_per_node", "2", script, "0")
    assert launch.code == 0, launch
    (whole,) = ends(launch)
    launch = fleetrun.run("--max_restart", "2", "--nproc_per_node", "2", script, "2")
    assert launch.code == 0, launch
    assert ends(launch) == {whole}
    steps = [int(line.split()[3]) for line in launch.told("trainer.0 from ")]
    assert len(steps) == 3
    assert steps[2] >= steps[1] > 0, steps


APART = """
import torch
import torch.distributed as dist
from trainers.checkpoints import memory

dist.init_process_group("gloo")
state = {"s": {"v": 0}}
done = memory.load(state) or 0
tell("from", ATTEMPT, done, state["s"]["v"])
for step in range(done + 1, 9):
    state["s"]["v"] += 1
    ahead = ATTEMPT < 2 and step == 6
    if RANK == 1 and ahead:
        dist.barrier()  # rank 0 has saved
        os.kill(os.getpid(), 9)
    memory.save(step, state)
    dist.barrier()
    if ahead:
        dist.barrier()  # which rank 1 does not reach
"""


def test_ranks_that_were_a_save_apart_are_not_lost_when_that_happens_again(fleetrun: Fleetrun):
    launch = fleetrun.run("--nproc_per_node", "2", fleetrun.script(APART))
    assert launch.code == 0, launch
    assert launch.told("trainer.0 from ") == [
        "trainer.0 from 0 0 0", *(f"trainer.0 from {attempt} 5 5" for attempt in (1, 2))
    ]  # fmt: skip


FLEET = """
import torch
from trainers import fleet

strategy = fleet.DistributedStrategy()
if "local" in sys.argv:
    strategy.localsgd, strategy.localsgd_configs = True, {"k_steps": 4}
fleet.init(is_collective=True, strategy=strategy)
torch.manual_seed(1)
model = fleet.distributed_model(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5)))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
seen = {"batches": 0}
where = sys.argv[1]
fleet.load_checkpoint(where, model, optimizer, seen=seen)
done = fleet.resume_step()
tell("from", ATTEMPT, done, seen["batches"])
for step in range(done + 1, 13):
    loss = model(torch.full((4, 8), float(step + RANK))).square().mean()
    optimizer.minimize(loss)
    seen["batches"] += 2
    fleet.checkpoint(where, step, model, optimizer, every=None if "never" in sys.argv else 0.0, seen=seen)
    if step in (5, 9) and ATTEMPT == (step == 9) and "die" in sys.argv:
        fleet.barrier_worker()  # both have this step: with localsgd a rank may be steps ahead
        if RANK == 1:
            os.kill(os.getpid(), 9)
if "leave" in sys.argv:
    fleet.wait_checkpoint()
    sys.exit(3)
weight = next(model.parameters())
tell("end", RANK, float(weight.double().sum().detach()))
"""


@pytest.mark.parametrize("how", ["together", "local"])
def test_fleets_checkpoint_restores_all_of_it(fleetrun: Fleetrun, how: str):
    """With localsgd each process goes on with its own model, and where it was between two averages."""
    script = fleetrun.script(FLEET)
    launch = fleetrun.run("--nproc_per_node", "2", script, "whole", "never", how)
    (whole,) = ends(launch)
    launch = fleetrun.run("--nproc_per_node", "2", script, "killed", "never", "die", how)
    assert launch.code == 0, launch
    assert ends(launch) == {whole}
    assert [line.split()[2:] for line in launch.told("trainer.0 from ")] == [
        ["0", "0", "0"],
        ["1", "5", "10"],
        ["2", "9", "18"],
    ]
    assert not (fleetrun.folder / "killed").exists()


def test_what_is_written_behind_outlives_the_launcher(fleetrun: Fleetrun):
    script = fleetrun.script(FLEET)
    words = ["--max_restart", "0", "--nproc_per_node", "2"]
    first = fleetrun.run(*words, script, "saved", "leave")
    assert first.code == 3
    steps = sorted(int(path.name[-8:]) for path in (fleetrun.folder / "saved").glob("step-????????"))
    assert 1 <= len(steps) <= 2
    second = fleetrun.run("--nproc_per_node", "3", script, "saved")
    assert second.code == 0, second
    assert second.told("trainer.2 from ") == [f"trainer.2 from 0 {steps[-1]} {2 * steps[-1]}"]


SHARDED = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainers.checkpoints import memory

dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
done = memory.load(state) or 0
tell("from", ATTEMPT, done)
for step in range(done + 1, 9):
    loss = model(torch.full((4, 10), float(step + RANK))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    memory.save(step, state)
    if step == 5 and ATTEMPT == 0 and "die" in sys.argv:
        dist.barrier()  # both have this step
        if RANK == 0:
            os.kill(os.getpid(), 9)
tell("end", RANK, float(sum(p.full_tensor().double().sum() for p in model.parameters())))
"""


def test_shards_come_back_as_shards(fleetrun: Fleetrun):
    script = fleetrun.script(SHARDED)
    (whole,) = ends(fleetrun.run("--nproc_per_node", "2", script))
    launch = fleetrun.run("--nproc_per_node", "2", script, "die")
    assert launch.code == 0, launch
    assert ends(launch) == {whole}
    assert len(launch.told(" from 1 5")) == 2, launch


UNCOUNTED = """
import torch
from trainers.checkpoints import memory
state = {"s": {"v": torch.zeros(4)}}
done = memory.load(state) or 0
for step in range(done + 1, 4):
    state["s"]["v"] += 1
    memory.save(step, state)
    if step < 3:
        os.kill(os.getpid(), 9)
tell("end", float(state["s"]["v"][0]))
"""

EPOCHS = """
import torch
from trainers import progress
from trainers.checkpoints import memory
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
state = {"model": model, "optimizer": optimizer}
done = memory.load(state) or 0
for epoch in range(done + 1, 4):
    for _ in range(60 - 10 * epoch):
        optimizer.step()
    progress.meter.flush()
    memory.save(epoch, state)
    if epoch < 3:
        os.kill(os.getpid(), 9)
tell("end", epoch)
"""

OWN_FILE = """
import torch
from trainers import fleet
fleet.init(is_collective=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
own = Path("own")
done = int(own.read_text()) if own.exists() else 0
for step in range(done + 1, 6):
    optimizer.step()
    if step % 2 == 0:
        fleet.save_checkpoint("saved", step, model, optimizer)
        own.write_text(str(step))
        os.kill(os.getpid(), 9)
tell("end", step)
"""


@pytest.mark.parametrize("text", [UNCOUNTED, EPOCHS, OWN_FILE])
def test_a_newer_checkpoint_is_progress(fleetrun: Fleetrun, text: str):
    launch = fleetrun.run("--max_restart", "1", fleetrun.script(text))
    assert launch.code == 0, launch
    assert launch.err.count("restart 1 of 1") == 2
    assert launch.told(" end ")


def test_before_the_group_it_is_refused(fleetrun: Fleetrun):
    script = fleetrun.script(
        "if RANK:\n    sys.exit()\nfrom trainers.checkpoints import memory\nmemory.load({})"
    )
    launch = fleetrun.run("--max_restart", "0", "--nproc_per_node", "2", script)
    assert launch.code == 1
    assert "Call init_process_group" in launch.err


COPIED = """    memory.save(step, state, neighbour=True)
    if step >= 199 and not done:
        own = memory._keepers[""]._neighbour
        while own._sent != own._chosen.head.number:  # then the next save is copied, or this one has been
            time.sleep(0.01)
        if step == 200:
            tell("half", RANK)
            wait_for_go()
"""
NEIGHBOURS = PLAIN.replace("    memory.save(step, state)\n", COPIED).replace(
    "(done + 1, 301)", "(done + 1, 401)"
)


BEFORE_THE_FIRST_COPY = """
import time
import torch
import torch.distributed as dist
from trainers.checkpoints import memory, neighbour

dist.init_process_group("gloo")
state = {"s": {"v": torch.zeros(100)}}
if ATTEMPT == 1:
    neighbour.Neighbour._send_all = lambda self: None
done = memory.load(state) or 0
tell("from", ATTEMPT, done, float(state["s"]["v"].mean()))
for step in range(done + 1, 400):
    state["s"]["v"] += 1
    memory.save(step, state, neighbour=True)
    if ATTEMPT == 0 and step > 200:
        own = memory._keepers[""]._neighbour
        copied = torch.tensor([own._before.head.step if own._before else 0])
        dist.all_reduce(copied, dist.ReduceOp.MIN)
        if copied.item() > 200 and RANK == 1:
            os._exit(3)
    if ATTEMPT == 1 and step == done + 10:
        tell("half", RANK)
        wait_for_go()
tell("end", RANK, float(state["s"]["v"].mean()))
"""


def test_a_machine_may_be_lost_after_a_restart_before_the_first_copy(fleetrun: Fleetrun):
    (at,) = lose_a_machine(fleetrun, fleetrun.script(BEFORE_THE_FIRST_COPY), "1")
    assert int(at) > 200


def test_a_lost_machine_is_served_by_its_neighbour(fleetrun: Fleetrun):
    (at,) = lose_a_machine(fleetrun, fleetrun.script(NEIGHBOURS))
    assert int(at) >= 199


SHRINKS = """
import contextlib
import time
import torch.distributed as dist
from trainers.checkpoints import memory

def kept():
    found = set()
    for each in (*Path("/proc/self/fd").iterdir(), *Path(f"/proc/{os.getppid()}/fd").iterdir()):
        with contextlib.suppress(FileNotFoundError):
            kind, _, name = os.readlink(each).partition(":")
            found |= {name.split()[0].partition(".")[2]} if kind == "/memfd" else set()
    return sorted(found)

dist.init_process_group("gloo")
state = {"s": {"v": 0}}
done = memory.load(state) or 0
for step in range(done + 1, 4):
    memory.save(step, state, neighbour=True)
    dist.barrier()
if dist.get_world_size() == 4:
    while sum("copy" in name for name in kept()) < 2:
        time.sleep(0.01)
    tell("half", *kept())
    dist.barrier()
    time.sleep(600)  # until it is stopped
tell("kept", *kept())
"""


def test_memory_of_ranks_that_are_no_more_is_given_back(fleetrun: Fleetrun):
    first, _ = without_a_machine(fleetrun, fleetrun.script(SHRINKS), "1", "1:2")
    assert first.wait() == 0, first
    assert all({"2.copy.0", "3.copy.0"} < set(line.split()) for line in first.told(" half "))
    kept = [line.split()[2:] for line in first.told(" kept ")]
    assert [{name[:-2] for name in names} for names in kept] == [{"0.own", "1.own"}] * 2


def lose_a_machine(fleetrun: Fleetrun, script: str, level: str = "0") -> set[str]:
    """After the ranks of both have told `half`. From where another one in its place continues."""
    first, another = without_a_machine(fleetrun, script, level, "2")
    third = another()
    assert [first.wait(), third.wait()] == [0, 0], (first, third)
    numbers = ends(first) | ends(third)
    assert len(numbers) == 1, numbers
    assert "No copy of the checkpoint on the next node" not in first.err
    return {line.split()[3] for line in third.told(" from ")}


def without_a_machine(
    fleetrun: Fleetrun, script: str, level: str, nodes: str
) -> tuple[Launch, Callable[[], Launch]]:
    """The one that is left, and what starts another one."""
    many = ["--nnodes", nodes, "--elastic_level", level, "--heartbeat_timeout", "2", "--stop_timeout", "2"]
    words = [*many, "--nproc_per_node", "2", "--master", f"127.0.0.1:{free_port()}"]

    def start(rank: int, number: int) -> Launch:
        return fleetrun.start(*words, "--rank", str(rank), "--log_dir", f"log/{number}", script, "0")

    first = start(0, 0)
    first.until_err("waiting")  # it serves the store
    second = start(1, 1)
    first.until_told(" half ", 2)
    second.until_told(" half ", 2)
    for pid in left_behind(second.token).keys() - {second.popen.pid}:  # the guard removes its cgroup
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    second.wait()
    second.no_process()
    first.go()
    return first, lambda: start(1, 2)

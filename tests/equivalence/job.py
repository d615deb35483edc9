"""Runs of a training program on parameter servers: its plain twin in this process, or a job of real servers
and trainers.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence

import torch

import trainers.data
import trainers.ps
from fleetrun.envs.contract import Cluster, Mode, Role
from tests.equivalence.children import Job, Result, Way, a_folder, start_member
from tests.equivalence.data import Examples
from tests.equivalence.loop import Run
from tests.equivalence.model import Net
from tests.equivalence.program import ROWS, Program, draw
from tests.equivalence.rules import TABLE_CONFIGS, Steppers, given, twins
from tests.support.cluster import reserved_endpoints
from trainers import fleet

WAYS = (
    Way("sync", 1),
    Way("async", 1, a_sync=True),
    Way("sync with two trainers", 2),
)


# ---- In the process that trains


def _rows(run: Run) -> dict[str, torch.Tensor]:
    """Rows of tables of no known size, which only servers have."""
    run.net.eval()
    with torch.no_grad():
        return {
            f"tables.{place}.weight": run.net.tables[place](torch.arange(ROWS)).detach().clone()
            for place, block in enumerate(run.net.blocks)
            if block.name == "sparse_embedding"
        }


def _train(run: Run, end: Callable[[], None]) -> Result:
    result = Result(run.seen)
    try:
        run.train()
        rows = _rows(run)
        end()
        result.final = {**run.net.values(), **rows}
    except Exception as error:  # noqa: BLE001  # whatever the script raises is the result
        result.failed(error)
    return result


def _net(program: Program, *, served: bool) -> Net:
    torch.manual_seed(program.seed)
    return Net(program, served)


def ways(program: Program) -> list[Way]:
    return [way for way in WAYS if way.trainers == 1 or not program.alone]


def run_twin(program: Program, way: Way) -> Result:
    """In one torch process, the batches of all trainers together."""
    return run_plain(program, range(way.trainers))


def run_plain(program: Program, ranks: Sequence[int]) -> Result:
    net = _net(program, served=False)
    run = Run(program, net, Steppers(twins(program, net), served=False), Examples(program, ranks))
    return _train(run, lambda: None)


def _strategy(program: Program, way: Way) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = way.a_sync
    if way.a_sync:
        merged = program.first("merged_steps")
        strategy.a_sync_configs = (
            {"overlap": False}
            if merged is None
            else {"max_merge_var_num": merged["steps"], "overlap": merged["overlap"]}
        )
    tables = {}
    for block in program.family("optimizer"):
        tables = TABLE_CONFIGS.get(block.name, {})
    if program.has("all_on_both") and not tables:
        tables = {"*": {"servers": 2}}
    if tables:
        strategy.sparse_table_configs = tables
    return strategy


def run_served(program: Program, way: Way) -> Result:
    """As this member of a job."""
    try:
        fleet.init()
        net = _net(program, served=True)
        strategy = _strategy(program, way)
        fleet.distributed_model(net)
        optimizers = [fleet.distributed_optimizer(each, strategy) for each in given(program, net)]
        if fleet.is_server():
            fleet.init_server()
            fleet.run_server()
            return Result()
        fleet.init_worker()
    except Exception as error:  # noqa: BLE001  # whatever the script raises is the result
        result = Result()
        result.failed(error)
        return result
    examples = Examples(program, (fleet.worker_index(),))
    return _train(Run(program, net, Steppers(optimizers, served=True), examples), fleet.stop_worker)


# ---- In the process that starts the members of a job


def servers_of(program: Program) -> int:
    return 2 if program.has("two_servers") or program.has("all_on_both") else 1


@contextlib.contextmanager
def served(program: Program, way: Way) -> Iterator[Job]:
    """A job that runs the program; what still runs at the end is killed."""
    servers, job = servers_of(program), Job()
    with a_folder() as folder, reserved_endpoints(way.trainers + servers + 1) as endpoints:
        cluster = Cluster(
            mode=Mode.PS,
            trainers=endpoints[: way.trainers],
            servers=endpoints[way.trainers : -1],
            master=endpoints[-1],
        )
        try:
            for role, members in ((Role.SERVER, job.servers), (Role.TRAINER, job.trainers)):
                for rank in range(servers if role is Role.SERVER else way.trainers):
                    members.append(
                        start_member(folder, cluster, role, rank, lambda: run_served(program, way))
                    )
            yield job
        finally:
            job.kill()


_NOT_NEEDED = ("__main__", "allkernels", "stand_ins", "kafka", "parquet")


def warm_up() -> None:
    """Import and compile what a member needs, before the first fork."""
    for package in (trainers.ps, trainers.data):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith(_NOT_NEEDED):
                importlib.import_module(found.name)
    for name in ("fleetrun.envs.curve", "fsspec", "zmq"):
        importlib.import_module(name)
    for use in importlib.import_module("trainers.ps.tables.warm").EVERYTHING:
        use()
    for seed in range(30):  # half of torch is imported by its first use
        run_plain(draw(seed), (0,))

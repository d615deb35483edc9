"""Runs of a program: its plain twin in this process, or a job of real servers and trainers.

Members of a job are forked from this process, which has imported everything. Each writes what it found into a
file. A job that hangs is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import select
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from fleetrun.envs import contract
from fleetrun.envs.contract import Cluster, Member, Mode, Role
from tests.equivalence.data import Examples
from tests.equivalence.loop import Run, Seen
from tests.equivalence.model import Net
from tests.equivalence.program import ROWS, Program
from tests.equivalence.rules import TABLE_CONFIGS, Steppers, given, twins
from tests.support.cluster import reserved_endpoints
from trainers import fleet
from trainers.errors import FleetError

DEADLINE_S = 120.0
"""A run that takes longer hangs. An ordinary one takes a second on an idle machine."""
_AFTER_S = 60.0
"""How long servers may run after their trainers."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run a program on servers."""

    name: str
    trainers: int
    a_sync: bool


WAYS = (
    Way("sync", 1, False),
    Way("async", 1, True),
    Way("sync with two trainers", 2, False),
)


@dataclass(slots=True)
class Result:
    """What a process found. `error`: its type, whether fleet refused, and its text."""

    seen: list[Seen] = field(default_factory=list)
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    error: tuple[str, bool, str] | None = None
    trace: str = ""

    def failed(self, error: Exception) -> None:
        self.error = (type(error).__name__, isinstance(error, FleetError), str(error))
        self.trace = traceback.format_exc()


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


def run_plain(program: Program, ranks: Sequence[int]) -> Result:
    """In one torch process, the batches of these ranks together."""
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


@dataclass(slots=True)
class _Child:
    pid: int
    fd: int
    path: Path
    log: Path

    def read(self) -> Result | None:
        """None if it ended without a result."""
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            found: Result = pickle.loads(self.path.read_bytes())
            return found
        return None

    def kill(self) -> None:
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.fd)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    @property
    def ended(self) -> bool:
        return bool(select.select([self.fd], [], [], 0)[0])


def _fork(folder: Path, name: str, environ: dict[str, str], call: Callable[[], Result]) -> _Child:
    path, log = folder / f"{name}.result", folder / f"{name}.log"
    pid = os.fork()
    if not pid:
        _become(folder, log, path, environ, call)
    return _Child(pid, os.pidfd_open(pid), path, log)


def _become(
    folder: Path, log: Path, path: Path, environ: dict[str, str], call: Callable[[], Result]
) -> NoReturn:
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environ)
        os.chdir(folder)
        faulthandler.enable(output)
        faulthandler.register(signal.SIGUSR1, output)
        warnings.simplefilter("ignore")
        result = call()
        aside = path.with_suffix(".part")
        aside.write_bytes(pickle.dumps(result))
        aside.replace(path)
        code = 0
    except BaseException:  # noqa: BLE001  # the end of a child
        traceback.print_exc()
    finally:
        os._exit(code)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="equivalence-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait(children: Sequence[_Child], deadline: float) -> bool:
    """Until all have ended, or one of them with an error; False at the deadline."""
    waiting = list(children)
    while waiting:
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        ready, _, _ = select.select([each.fd for each in waiting], [], [], left)
        for each in [each for each in waiting if each.fd in ready]:
            waiting.remove(each)
            found = each.read()
            if found is None or found.error is not None:
                return True
    return True


@dataclass(slots=True)
class Job:
    """One run under way: `results` waits for it."""

    trainers: list[_Child] = field(default_factory=list)
    servers: list[_Child] = field(default_factory=list)
    deadline: float = field(default_factory=lambda: time.monotonic() + DEADLINE_S)

    def results(self) -> tuple[list[Result | None], str]:
        """Of each trainer that has one, and a problem: a hang, or the end of a process without a result."""
        problem = ""
        if not _wait(self.trainers, self.deadline):
            problem = f"hang: no end within {DEADLINE_S:.0f} s\n" + self._stacks()
        found = [each.read() if each.ended else None for each in self.trainers]
        failed = any(each is None or each.error is not None for each in found)
        if not problem and not failed and not _wait(self.servers, time.monotonic() + _AFTER_S):
            problem = "hang: a server does not end\n" + self._stacks()
        dead = [each for each in self.trainers + self.servers if each.ended and each.read() is None]
        if not problem and dead:
            problem = "a process ended without a result\n" + "\n".join(each.tail() for each in dead)
        failures = [each.read() for each in self.servers if each.ended]
        if not problem and not failed:
            problem = "\n".join(each.trace for each in failures if each is not None and each.trace)
        return found, problem

    def kill(self) -> None:
        for each in self.trainers + self.servers:
            each.kill()

    def _stacks(self) -> str:
        for each in self.trainers + self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each.pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the handlers to write, and only after a hang
        return "\n".join(f"{each.log.name}:\n{each.tail()}" for each in self.trainers + self.servers)


def servers_of(program: Program) -> int:
    return 2 if program.has("two_servers") or program.has("all_on_both") else 1


@contextlib.contextmanager
def served(program: Program, way: Way) -> Iterator[Job]:
    """A job that runs the program; what still runs at the end is killed."""
    servers, job = servers_of(program), Job()
    with _folder() as folder, reserved_endpoints(way.trainers + servers + 1) as endpoints:
        cluster = Cluster(
            mode=Mode.PS,
            trainers=endpoints[: way.trainers],
            servers=endpoints[way.trainers : -1],
            master=endpoints[-1],
        )

        def start(role: Role, rank: int, places: Sequence[str]) -> _Child:
            member = Member(
                cluster=cluster,
                role=role,
                rank=rank,
                endpoint=places[rank],
                local_rank=rank,
                local_size=len(places),
                pod="testpod",
                omp_threads=1,
            )
            environ = contract.without_contract(os.environ) | contract.write(member)
            return _fork(folder, f"{role}-{rank}", environ, lambda: run_served(program, way))

        try:
            for rank in range(servers):
                job.servers.append(start(Role.SERVER, rank, cluster.servers))
            for rank in range(way.trainers):
                job.trainers.append(start(Role.TRAINER, rank, cluster.trainers))
            yield job
        finally:
            job.kill()

"""One simulated job of servers, trainers and a follower, with the faults of its plan."""

from __future__ import annotations

import gc
import math
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.simulated_ps.contents import budget_errors, differences, state_of
from tests.simulated_ps.disk import Disk
from tests.simulated_ps.exchanges import Exchanged
from tests.simulated_ps.model import SPEC, WIDEST, Model, Push, Second, Violation
from tests.simulated_ps.network import Network, NetworkFaults, Newcomers
from tests.simulated_ps.plan import Plan
from tests.simulated_ps.threads import fake_futures, fake_threading, fake_time
from tests.simulated_ps.versions import Versions, values
from tests.simulated_ps.world import Killed, Process, World, current, outside, patched
from trainers.errors import FleetError, ServerError
from trainers.kernels import compiled
from trainers.ps import wire
from trainers.ps.client import Client, PendingReplies, Request, to_all
from trainers.ps.configs import PsConfigs
from trainers.ps.durable.durable import DurableFolder
from trainers.ps.kernels.eviction import LEVEL, LEVELS_A_UNIT, LEVELS_BELOW, NOW, pass_until
from trainers.ps.saves.manifest import MANIFEST, SaveMode
from trainers.ps.saves.read import RowOwner, load_tables, open_saves
from trainers.ps.server import server as server_module
from trainers.ps.server import state as state_module
from trainers.ps.server.saving import SaveRunner
from trainers.ps.server.server import Server, ServerPlan
from trainers.ps.server.state import StateSaver
from trainers.ps.tables import budget as budget_module
from trainers.ps.tables.budget import Budget
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.tables.spec import EvictionPolicy, FullError, describe_job
from trainers.ps.tables.storage import Cut
from trainers.ps.tables.warm import EVERYTHING
from trainers.ps.trainer.saving import SaveCoordinator
from trainers.ps.wire import Code, Field, Kind, Part, bytes_part
from trainers.storage.errors import SaveError

AGE = 2.0**16 - 0.5
"""The time of the clocks of old budgets, shortly before they restart."""
_HASTY = 1 / 8
"""The uses in a unit of hasty clocks, for each row that fits."""
_SOON = 200.0  # seconds in which a job ends once its trouble has ended


class Job:
    """One simulated job. `run` raises Violation or Stuck."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.world = World(plan.seed)
        self.network = Network(self.world, plan.network)
        self.model = Model(plan, [plan.trainers])
        self.second: list[Second] = []
        self.specs = [SPEC] if plan.second is None else [SPEC, plan.second]
        self.folder = Path(f"/dev/shm/simulated-{os.getpid()}-{plan.seed}")
        self.folder.mkdir()
        self.disk = Disk(self.world, self.folder)
        self.disk.errors, self.disk.late_errors = dict(plan.disk_errors), plan.late_errors
        self.disk.bad_syncs, self.disk.late_at = plan.bad_syncs, plan.late_at
        self.disk.goes_away, self.disk.loses_power = "away" in plan.on, plan.power
        self.disk.at_bad_sync = lambda process: self.world.after(0.4, process.kill)
        if "spill" in plan.on:
            (self.folder / "rows").mkdir()
        self.versions = Versions(self.model, self.world, self.folder)
        self.configs = PsConfigs(
            publish=str(self.folder / "published") if "publish" in plan.on else "",
            publish_interval_s=plan.publish_s,
            durability=plan.durability,
            log_fsync=plan.fsync,
            snapshot_interval_s=plan.snapshot_s,
            trainer_timeout_s=4.0 if plan.kept else 8.0,
            disk_dir=str(self.folder / "rows") if "spill" in plan.on else "",
        )
        self.endpoints = [f"127.0.0.1:{7000 + server}" for server in range(plan.servers)]
        self.servers: list[Process | None] = [None] * plan.servers
        self.live: list[Server | None] = [None] * plan.servers
        """The servers that have recovered."""
        self.trainers: list[Process | None] = [None] * plan.trainers
        self.finished = 0
        self.in_flight: dict[int, list[tuple[Push, PendingReplies | None]]] = {}
        """Pushes of each trainer that are not acknowledged."""
        self.committed = 0
        """The number of saves that were committed."""
        self.leaving: set[int] = set()
        """Trainers that are not killed any more: the servers that they have left may have ended."""
        self.ending = False
        """True once a trainer has made its last push."""
        self.shrinking = False
        self.violations: list[BaseException] = []
        self.troubled = True
        self._expected: list[dict[str, Any] | None] = [None] * plan.servers
        """What each server had in memory when it was killed between two requests."""
        self._cuts: list[list[dict[str, Any]]] = [[] for _ in range(plan.servers)]
        """What each server had in memory at its last complete snapshot, and at each later one."""
        self._cut_kills = plan.cut_kills

    # ---- Servers

    def start_server(self, index: int) -> None:
        plan = ServerPlan(
            endpoints=self.endpoints,
            index=index,
            trainers=self.model.trainers,
            sync=self.plan.sync,
            configs=self.configs,
            max_staleness=self.plan.staleness,
            start=f"job {self.model.start}",
            durable_dir=self.folder if self.plan.kept else None,
        )

        def serve() -> None:
            server = Server(plan)
            self._begin(index, server)
            server.run()

        def ended(error: BaseException | None) -> None:
            self.servers[index] = None
            self.disk.forget_failures()
            if isinstance(error, Killed):
                if self.plan.power and self.world.random.random() < 0.7:
                    self.disk.lose_power(self.folder / f"server-{index}")
            elif error is None:
                return
            elif not (isinstance(error, FleetError | OSError) and self._may_fail()):
                self.violations.append(error)
                return
            if not self.plan.kept:
                self.violations.append(Violation(f"server {index} ended: {error!r}"))
            self.world.after(0.2 + self.world.random.random(), lambda: self.start_server(index))

        process = self.servers[index] = Process(self.world, f"server {index}", serve, ended)
        process.at_end.append(lambda: self._note_end(index, process))

    def _begin(self, index: int, server: Server) -> None:
        """Note that a server has started, and compare its first table with what was acknowledged."""
        model, plan = self.model, self.plan
        self.live[index] = server
        if self.second:
            self.second[index].up_since = self.world.now
        if errors := budget_errors(server._store):
            raise Violation(f"server {index} starts, and {errors}")
        keys, applied = self._keys(index), set[Push]()
        if isinstance(table := server._store.tables.get(0), SparseTable):
            values = table.pull(torch.tensor(keys), insert=False)[:, 0].tolist()
            applied = model.applied(index, dict(zip(keys, values, strict=True)))
        self._note_resize(index, server, applied)
        if plan.sync or len(self.leaving) == model.trainers:
            return
        if plan.durability == "snapshot":
            # Also what trainers have not yet seen acknowledged by all servers.
            model.lost |= {each for each in model.sent if each[0] == index and each[1] not in applied}
        elif missing := model.lacking(index, applied, model.acknowledged):
            raise Violation(f"server {index} starts without acknowledged pushes: {sorted(missing)}")

    def _note_resize(self, index: int, server: Server, applied: set[Push]) -> None:
        """Note where a server continues with another number of trainers."""
        model = self.model
        start, done = model.start, model.former.setdefault(index, [])
        if len(done) == start:
            return
        if not self.plan.sync:
            done.append((start - 1, range(0)))
            for member in server._members:  # the server has counted these steps for others
                skipped = [Push(start, member.rank, step) for step in range(member.step)]
                model.lost |= {(index, push) for push in skipped}
            return
        first = model.first_counted.get(index, 0)
        stop = max((push.step + 1 for push in applied if push.start == start - 1), default=first)
        wanted = stop * model.starts[-2] // model.starts[-1]
        if server._steps.step != wanted:
            raise Violation(f"server {index} did {stop} steps, and starts at {server._steps.step}")
        done.append((start - 1, range(first, stop)))
        model.first_counted[index] = wanted

    def _note_end(self, index: int, process: Process) -> None:
        """Note what a server has in memory when it is killed."""
        server, self.live[index] = self.live[index], None
        if server is None:
            return
        if errors := budget_errors(server._store):
            self.violations.append(Violation(f"server {index} ends, and {errors}"))
        self._expected[index] = None
        # A table of a HELLO that a full disk refused is empty, and not in the log.
        joined = any(member.joined for member in server._members)
        if process.idle and self.plan.durability == "log" and joined and not server._store.shrinking:
            self._expected[index] = state_of(server._members, server._store, server._steps)

    def _check_recovered(self, index: int, found: dict[str, Any], start: str | None) -> None:
        """Compare what a server recovers with what it had."""
        wanted, self._expected[index] = self._expected[index], None
        if self.plan.durability == "snapshot":
            if self._cuts[index] and found not in self._cuts[index]:
                wrong = differences(self._cuts[index][-1], found)
                raise Violation(f"server {index} does not recover its last snapshot: {wrong}")
        elif wanted is not None and start == f"job {self.model.start}" and wanted != found:
            raise Violation(f"server {index} recovers another state: {differences(wanted, found)}")

    # ---- Trainers

    def start_trainer(self, rank: int, restarts: int) -> None:
        start, model = self.model.start, self.model

        def ended(error: BaseException | None) -> None:
            if start != model.start:  # of a former start of the job
                return
            self.trainers[rank] = None
            for push, _ in self.in_flight.pop(rank, ()):
                model.lost |= {(server, push) for server in range(self.plan.servers)}
            if error is None:
                self.finished += 1
                return
            model.vague |= any(each.counts for each in self.second) or (self.shrinking and not rank)
            if isinstance(error, Killed) or (isinstance(error, ServerError) and self._may_fail()):
                self.world.note(f"trainer {rank}: {error}")
                again = 0.1 + self.world.random.random()
                if "pair" in self.plan.on:
                    again += 1.0
                    for _ in range(self.plan.servers):
                        self.world.after(0.2 + self.world.random.random(), self._kill_server)
                self.world.after(again, lambda: self._again(rank, restarts + 1, start))
            else:
                self.violations.append(error)

        self.trainers[rank] = Process(
            self.world, f"trainer {rank}", lambda: self._train(rank, restarts), ended
        )

    def _again(self, rank: int, restarts: int, start: int) -> None:
        if start == self.model.start:
            self.start_trainer(rank, restarts)

    def _may_fail(self) -> bool:
        """Return True if an error of a process is no violation."""
        plan = self.plan
        lossy = plan.server_kills and (plan.saves or plan.durability == "snapshot")
        return bool(plan.disk_errors or plan.late_errors or plan.bad_syncs or lossy)

    def _train(self, rank: int, restarts: int) -> None:
        plan, servers, model = self.plan, range(self.plan.servers), self.model
        client = Client(self.endpoints, rank, self.configs)
        start = self._join(client, rank, restarts)
        in_flight = self.in_flight[rank] = []
        exchanged = Exchanged(model, client, start) if plan.merged > 1 else None
        saver = SaveCoordinator(client, plan.servers)
        for step in range(start, plan.steps):
            push = Push(model.start, rank, step)
            repeats = restarts > 0 and step == start
            for server in servers if repeats else [self.world.random.randrange(plan.servers)]:
                self._read(client, server, step, f"trainer {rank}")
            # A repeated shrink would wait for a save that waits for the repeated step.
            if "shrink" in plan.on and not (rank or repeats) and self.world.random.random() < 0.5:
                self._shrink(client, saver, step)
            if self.second and self.second[0].counts:
                client.ask([self._lookup(server, push) for server in servers])
            rests = self.world.random.random() < plan.rests
            rests = rests and (not plan.straggler or rank == model.trainers - 1)
            self.world.wait(None, 10.0 if rests else self.world.random.random() * plan.pace_s)
            for server in servers:
                model.sent.setdefault((server, push), self.world.now)
            last = step + 1 == plan.steps
            if exchanged is None:
                requests = [self._push(server, push) for server in servers]
                in_flight.append((push, client.send(requests)))
                self._await(client, rank, 0 if last else plan.in_flight)
            else:
                self._exchange(exchanged, push, last=last)
            if not in_flight and self.world.random.random() < plan.saves:
                self._save(saver, rank, step + 1)
        self._finish(client, rank)

    def _await(self, client: Client, rank: int, most: int) -> None:
        """Wait until no more than so many pushes are in flight."""
        in_flight = self.in_flight[rank]
        while len(in_flight) > most:
            push, replies = in_flight[0]
            assert replies is not None
            client.wait(replies)
            del in_flight[0]
            self.world.note(f"trainer {rank}: step {push.step} is acknowledged")
            self.model.acknowledge(push, self.world.now)

    def _exchange(self, exchanged: Exchanged, push: Push, *, last: bool) -> None:
        """Make a step with the product's exchange. Repeated steps are flushed alike."""
        in_flight = self.in_flight[push.rank]
        in_flight.append((push, None))
        exchanged.step(push)
        if last or random.Random(f"{self.plan.seed} {push}").random() < self.plan.saves:
            exchanged.flush()
        if exchanged.settled:
            for done, _ in in_flight:
                self.model.acknowledge(done, self.world.now)
            self.world.note(f"trainer {push.rank}: steps up to {push.step} are acknowledged")
            in_flight.clear()

    def _join(self, client: Client, rank: int, restarts: int) -> int:
        """Join all servers. Return the first step."""
        plan, model = self.plan, self.model
        place = plan.sync, model.trainers, plan.servers
        jobs = [
            describe_job(*place, server, start=f"job {model.start}").encode()
            for server in range(plan.servers)
        ]
        specs = [bytes_part(Field.SPEC, spec.encode(), table) for table, spec in enumerate(self.specs)]
        hellos = client.ask(
            [
                Request(
                    server=server,
                    kind=Kind.HELLO,
                    number=restarts,
                    parts=(bytes_part(Field.TEXT, job), *specs),
                )
                for server, job in enumerate(jobs)
            ],
            silence=self.configs.join_timeout_s,
        )
        start = min(reply.number for reply in hellos)
        model.first_steps.setdefault((model.start, rank), start)
        if rank == 0 and any(reply.code is Code.NOT_READY for reply in hellos):
            client.ask(to_all(plan.servers, Kind.READY))
        client.ask(to_all(plan.servers, Kind.OPEN))
        return start

    def _finish(self, client: Client, rank: int) -> None:
        plan = self.plan
        self._begin_end()
        client.ask(to_all(plan.servers, Kind.FINISH))
        for server in range(plan.servers):
            self._read(client, server, plan.steps, f"trainer {rank}", last=True)
        if "publish" in plan.on and not rank:
            self._publish_last(client)
        client.ask(to_all(plan.servers, Kind.BARRIER, 1)[:1])
        self.leaving.add(rank)
        if (process := self.trainers[rank]) is not None:
            process.steps_left = None
        with suppress(ServerError):  # the answer of a server that has ended may be lost
            client.ask(to_all(plan.servers, Kind.LEAVE), silence=5.0)
        client.close()

    def _begin_end(self) -> None:
        self.ending = True
        if self.plan.durability == "snapshot":  # a server would forget who has finished
            for each in self.servers:
                if each is not None:
                    each.steps_left = None

    def _keys(self, server: int) -> list[int]:
        model = self.model
        return [*(model.own_key(server, push) for push in model.all_pushes()), *model.shared(server)]

    def _read(self, client: Client, server: int, step: int, who: str, *, last: bool = False) -> None:
        """Read all rows of a server as of a step, and check them."""
        keys, asked, known = self._keys(server), self.world.now, set(self.model.acknowledged)
        parts = tuple(Part(table, Field.PEEK, torch.tensor(keys)) for table in range(len(self.specs)))
        (reply,) = client.ask([Request(server=server, kind=Kind.PULL, number=step, parts=parts)])
        values = reply.parts[0].data
        if not torch.equal(values[:, 0], values[:, 1]):
            raise Violation(f"half a row was updated: {values}")
        found = dict(zip(keys, values[:, 0].tolist(), strict=True))
        self.model.check(server, found, known, step, who)
        if last:
            self.model.check_end(server, found, who)
        if self.second:
            applied = self.model.applied(server, found)
            self.second[server].check(reply.parts[1].data, keys, step, applied, asked, self.world.now)

    def _lookup(self, server: int, push: Push) -> Request:
        """Return the request for the rows of a batch of training."""
        keys = torch.tensor(self.model.keys(server, push))
        return Request(server=server, kind=Kind.PULL, number=push.step, parts=(Part(1, Field.KEYS, keys),))

    def _push(self, server: int, push: Push) -> Request:
        keys, rows = self.model.rows(server, push)
        parts = [Part(0, Field.KEYS, keys), Part(0, Field.ROWS, rows, lr=1.0)]
        if self.second:
            parts += [Part(1, Field.KEYS, keys), Part(1, Field.ROWS, rows, lr=self.model.lr(push.step))]
            if self.specs[1].seen:
                parts.append(Part(1, Field.STATS, self.model.stats(server, push)))
        return Request(server=server, kind=Kind.PUSH, number=push.step, parts=tuple(parts))

    def _shrink(self, client: Client, saver: SaveCoordinator, step: int) -> None:
        """Let a day pass, in sync training after all servers have reached the step."""
        model, begun = self.model, self.world.now
        for server in range(self.plan.servers):
            self._read(client, server, step, "trainer 0")
        if (model.start, step) in model.days:
            return
        model.days[model.start, step] = 1
        model.shrunk.append((begun, float("inf")))
        self.shrinking = True
        removed = saver.shrink([1], self.plan.policy, step)
        self.shrinking = False
        model.shrunk[-1] = begun, self.world.now
        self.world.note(f"trainer 0: {removed} rows were removed before step {step}")

    # ---- Versions

    def _publish_last(self, client: Client) -> None:
        """Publish everything, and wait until the follower has it."""
        until = self.world.now + self.plan.trouble_s + 120.0
        while True:
            try:
                (reply,) = client.ask(to_all(1, Kind.REFRESH, self.plan.steps))
                break
            except ServerError as error:
                self.world.note(f"trainer 0: {error}")
            if self.world.now > until:
                raise Violation("the last version is never published")
            self.world.wait(None, 1.0)
        self.world.note(f"trainer 0: version {reply.number} is published")
        self.versions.check_last(reply.number)
        while self.versions.followed < reply.number:
            if self.world.now > until:
                raise Violation(f"the follower never has version {reply.number}")
            self.world.wait(None, 0.2)

    def _end_follower(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, Killed):
            self.violations.append(error)

    # ---- Saved tables

    def _save(self, saver: SaveCoordinator, rank: int, step: int) -> None:
        where, before = str(self.folder / "saves"), set(self.model.acknowledged)
        modes = [SaveMode.ALL, SaveMode.DELTA, SaveMode.VALUES][: self.plan.modes]
        mode = self.world.random.choice(modes)
        if mode is SaveMode.DELTA and not self.committed:
            mode = SaveMode.ALL
        try:
            with saver.turn(where, mode, step, "tables") as mine:
                if mine:
                    self.model.saved.append((step, before))
                    saver.save(where, mode, step)
                    self.committed += 1
                    self.world.note(f"trainer {rank}: saved as of step {step}, mode {mode.name}")
        except (SaveError, ServerError) as error:
            # A server that has restarted has recorded no changes.
            expected = self.plan.memory_errors or "Save with mode 0" in str(error)
            if isinstance(error, ServerError) and not expected:
                raise
            self.world.note(f"trainer {rank}: {error}")

    def _check_saved(self) -> None:
        """Compare the last committed save with the model."""
        where, plan, model = self.folder / "saves", self.plan, self.model
        if len(model.starts) > 1 or not (self.committed or (where / MANIFEST).exists()):
            return
        opened = open_saves(where)
        tables = [SparseTable(spec) for spec in self.specs]
        load_tables(opened, tables, RowOwner(0, 1))
        step = opened.saves[-1].step
        applied: set[tuple[int, Push]] = set()
        for server in range(plan.servers):
            keys = self._keys(server)
            values = tables[0].pull(torch.tensor(keys), insert=False)[:, 0].tolist()
            here = model.applied(server, dict(zip(keys, values, strict=True)))
            applied |= {(server, push) for push in here}
            if plan.sync and here != model.complete(server, step):
                wrong = sorted(here ^ model.complete(server, step))
                raise Violation(f"the save of step {step} differs by {wrong} of server {server}")
        if not plan.sync and not any(
            {each for each in before if each not in model.lost} <= applied
            for begun, before in model.saved
            if begun == step
        ):
            raise Violation(f"the save of step {step} lacks acknowledged pushes")

    # ---- Faults

    def _plan_faults(self) -> None:
        plan, rng, world = self.plan, self.world.random, self.world
        faults = [self._kill_server] * plan.server_kills + [self._kill_trainer] * plan.trainer_kills
        training_s = 0.5 + plan.pace_s * plan.steps  # without faults
        for fault in faults + [self._set_clock] * plan.clock_steps:
            world.after(rng.random() * rng.choice([training_s, plan.trouble_s]), fault)
        if "resize" in plan.on:
            world.after(rng.random() * 1.5, self._resize)
        world.after(plan.trouble_s, self._end_trouble)

    def _kill_trainer(self) -> None:
        rank = self.world.random.randrange(self.model.trainers)
        process = self.trainers[rank]
        if process is None or rank in self.leaving:
            return
        if "sends" in self.plan.on and self.world.random.random() < 0.7:
            process.steps_left = self.world.random.randrange(10)
        else:
            process.kill()

    def _kill_server(self) -> None:
        if not self.troubled:
            return
        index = self.world.random.randrange(self.plan.servers)
        process, server = self.servers[index], self.live[index]
        if process is None or (self.plan.durability == "snapshot" and not self._has_snapshot(server)):
            return
        if self.world.random.random() < 0.5:
            process.steps_left = self.world.random.randrange(30)
        else:
            process.kill()

    def _has_snapshot(self, server: Server | None) -> bool:
        """Return True if a server may be killed in a job without a write-ahead log."""
        if server is None or self.ending:
            return False
        saver = server._state_saver
        return saver is not None and (saver.recovered or saver._snapshot_at is not None)

    def _resize(self) -> None:
        """Kill everything, and start with another number of trainers."""
        snapshots = all(map(self._has_snapshot, self.live))
        if self.ending or (self.plan.durability == "snapshot" and not snapshots):
            return
        model = self.model
        model.starts.append(self.plan.later_trainers)
        self.world.note(f"the job starts again with {model.trainers} trainers")
        for pending in self.in_flight.values():
            for push, _ in pending:
                model.lost |= {(server, push) for server in range(self.plan.servers)}
        self.in_flight.clear()
        processes = [each for each in (*self.trainers, *self.servers) if each is not None]
        self.trainers = [None] * model.trainers
        for process in processes:
            process.kill()
        self._start_trainers()

    def _start_trainers(self) -> None:
        start = self.model.start
        for rank in range(self.model.trainers):
            later = self.world.random.random() * 0.5
            self.world.after(later, lambda rank=rank: self._again(rank, 0, start))

    def _set_clock(self) -> None:
        by = self.world.random.choice([-7200.0, -3.0, 3.0, 7200.0])
        self.world.note(f"the clock is set by {by}")
        self.world.wall += by

    def _end_trouble(self) -> None:
        self.world.note("the trouble ends")
        self.troubled = False
        self.network.faults = NetworkFaults()
        self.disk.errors, self.disk.late_errors = {}, 0.0
        self.disk.bad_syncs, self.disk.goes_away = frozenset(), False
        self.disk.bring_back()
        for each in (*self.servers, *self.trainers):
            if each is not None:
                each.steps_left = None

    # ---- Run

    def run(self) -> None:
        try:
            before = random.getstate()
            with self._patched():
                plan = self.plan
                if plan.second is not None:
                    self.second = [Second(self.model, server) for server in range(plan.servers)]
                for index in range(plan.servers):
                    self.start_server(index)
                if "publish" in plan.on:
                    Process(self.world, "follower", self.versions.follow, self._end_follower)
                self._start_trainers()
                self._plan_faults()
                try:
                    self.world.run(self._over, within=plan.trouble_s + _SOON)
                finally:
                    for process in list(self.world.processes):
                        process.kill()
                        process._throw()
            if self.violations:
                raise self.violations[0]
            if random.getstate() != before:
                raise Violation("the random numbers of the script have changed")
            self._check_saved()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _over(self) -> bool:
        """True when all trainers have ended well. The launcher then stops servers that are left."""
        return bool(self.violations) or self.finished == self.model.trainers

    @contextmanager
    def _patched(self) -> Iterator[None]:
        world = self.world
        futures = fake_futures(world)
        rng = world.random
        names = {
            "time": fake_time(world),
            "threading": fake_threading(world),
            "zmq": self.network.zmq(),
            "secrets": SimpleNamespace(
                randbits=rng.getrandbits,
                token_hex=lambda count: f"{rng.getrandbits(8 * count):0{2 * count}x}",
                token_bytes=rng.randbytes,
            ),
            "ThreadPoolExecutor": futures.ThreadPoolExecutor,
            "Future": futures.Future,
            "concurrent": SimpleNamespace(futures=futures),
            "glog": lambda text: world.note(f"log: {text}"),
        }
        places = [
            (module, name, value)
            for module in _modules()
            for name, value in names.items()
            if name in vars(module) and not isinstance(vars(module)[name], str)
        ]
        places.append((server_module, "socket", SimpleNamespace(socketpair=self.network.socketpair)))
        places.append((server_module, "Newcomers", Newcomers))
        places.append((compiled, "_locked", _locked))
        places.append((state_module, "_SUMMARY_EVERY", 1 + world.random.randrange(40)))
        if "hasty" in self.plan.on:
            places.append((budget_module, "_USES_A_UNIT", dict.fromkeys(EvictionPolicy, _HASTY)))
        if "wide" in self.plan.on:
            places.append((wire, "MAX_PART_BYTES", WIDEST))
        places += self._watching()
        with ExitStack() as stack:
            stack.enter_context(patched(*places))
            stack.enter_context(self.disk.used())
            yield

    def _watching(self) -> list[tuple[Any, str, Any]]:
        """Return what is replaced to see the states of servers, and to make budgets old."""
        watched: list[tuple[Any, str, Any]] = [
            (StateSaver, "_replay", self._replay), (DurableFolder, "_remove_before", self._remove_before),
        ]  # fmt: skip
        if self.plan.durability == "snapshot":
            watched.append((StateSaver, "update", self._update))
        if self.plan.memory_errors:
            watched.append((Cut, "__init__", self._cut))
        if "publish" in self.plan.on:
            watched.append((SaveRunner, "publish", self._publish))
        if "aged" in self.plan.on:
            watched += [(Budget, "__init__", _make_old), (Budget, "restore", _restore_old)]
        return [(place, name, _method(call, getattr(place, name))) for place, name, call in watched]

    def _replay(self, real: Any, saver: Any, service: Any, *found: Any) -> None:
        real(saver, service, *found)
        if saver.recovered:
            self._check_recovered(_index(saver), state_of(*found), found[0].start)

    def _update(self, real: Any, saver: Any, *found: Any, may_cut: bool) -> None:
        real_begin = saver._durable.begin_snapshot

        def begin(*args: Any, **options: Any) -> Any:
            self._cuts[_index(saver)].append(state_of(*found))
            return real_begin(*args, **options)

        saver._durable.begin_snapshot = begin
        try:
            real(saver, *found, may_cut=may_cut)
        finally:
            del saver._durable.begin_snapshot

    def _remove_before(self, real: Any, folder: DurableFolder, *numbers: int) -> None:
        """Note that a snapshot is complete, and perhaps kill the server while it removes older files."""
        index, task = int(folder._folder.name.removeprefix("server-")), current()
        del self._cuts[index][:-1]
        older = len(list(folder._folder.glob("snapshot-*"))) > 1
        if self._cut_kills and older and task is not None and self.troubled and not self.ending:
            self._cut_kills -= 1
            task.process.steps_left = self.world.random.randrange(4)
            self.world.note(f"{task.process.name} removes what snapshot {numbers} makes unnecessary")
        real(folder, *numbers)

    def _cut(self, real: Any, cut: Cut, *found: Any) -> None:
        task = current()
        of_server = task is not None and task.process in self.servers
        if self.troubled and of_server and self.world.random.random() < self.plan.memory_errors:
            self.world.note("there is no memory for a cut")
            raise FullError("there is no memory for a cut")
        real(cut, *found)

    def _publish(self, real: Any, runner: Any, request: Any, tables: Any, *more: Any) -> bool:
        server = self.live[runner._index]
        assert server is not None
        cut = server._steps.step, values(tables)
        if not real(runner, request, tables, *more):
            return False
        self.versions.cuts.setdefault(request.id, {})[runner._index] = cut
        self.versions.ids[request.version] = request.id
        return True


def _method(call: Any, real: Any) -> Any:
    return lambda *args, **options: call(real, *args, **options)


def _make_old(real: Any, budget: Any, *found: Any, **options: Any) -> None:
    real(budget, *found, **options)
    budget.uses.clock[[NOW, LEVEL]] = AGE, math.floor(AGE * LEVELS_A_UNIT)


def _restore_old(real: Any, budget: Any, clocks: Any) -> None:
    budget.uses.clock[[NOW, LEVEL]] = 0
    pass_until(budget.uses, LEVELS_BELOW / LEVELS_A_UNIT)
    real(budget, clocks)


def _index(saver: StateSaver) -> int:
    return int(saver._folder.name.removeprefix("server-"))


@contextmanager
def _locked(
    path: Path, real: Callable[[Path], AbstractContextManager[None]] = compiled._locked
) -> Iterator[None]:
    """Compile a kernel that `prepare` has left out. Another process must not wait for it in this thread."""
    with real(path), outside("compilation"):
        yield


_LEFT_ALONE = ("trainers.ps.tables.storage", "trainers.ps.tables.run", "trainers.ps.kernels")


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith(("trainers.ps.", "trainers.storage.")) and not name.startswith(_LEFT_ALONE)
    ]


def prepare() -> None:
    """Load the kernels: a simulated process must not wait for a compilation."""
    for use in EVERYTHING:
        use()
    gc.collect()
    gc.freeze()  # the modules need no collection after each of many histories


def simulate(seed: int, without: frozenset[str] = frozenset()) -> Job:
    """Run the job of a seed, and return it. Raises Violation with the seed and the trace. `without` has
    faults and features to leave out.
    """
    job = Job(Plan.of(seed, without))
    try:
        job.run()
    except BaseException as error:
        lines = "\n".join(job.world.trace[-60:])
        left_out = f" without {','.join(sorted(without))}" if without else ""
        raise Violation(f"seed {seed}{left_out}: {error!r}\n{job.plan}\n{lines}") from error
    return job


def shortened(seed: int, error: Violation) -> str:
    """Return the violation of a seed with as few faults and features as it needs."""
    found, without = str(error), frozenset[str]()
    for each in sorted(Plan.of(seed).on):
        try:
            simulate(seed, without | {each})
        except Violation as again:
            found, without = str(again), without | {each}
    return found

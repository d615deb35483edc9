"""Streams: each record counts once, whoever is killed, and with other trainers afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fleetrun.envs.contract import Role
from tests.support.broker import PARTITIONS, Broker
from tests.support.cluster import Job, Process
from tests.support.forking import Forker
from tests.support.snapshots import complete
from tests.trainers.ps.test_recovery import in_training, restart, steps_said, wait_until
from tests.trainers.ps.test_resizing import kill_all, pushes_in
from trainers.ps.saves.inspection import shown
from trainers.storage.errors import LoadError

KILLS = int(os.environ.get("KILLS", "5"))
SEED = int(os.environ.get("SEED", "1"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(300, 60 + 10 * KILLS))]

IDS = 30


class Log:
    """The records of a stream, and how often each id is in them: files that grow, and others that come.
    `parquet`: all of these, none of those; `broker`: messages of a topic instead. `other`: counted together
    with this one.
    """

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        *,
        parquet: bool = False,
        broker: Broker | None = None,
        other: Log | None = None,
    ) -> None:
        self.folder, self._parquet, self._broker = folder, parquet, broker
        folder.mkdir()
        self._rng = rng
        self._half = ""
        self._files = 0
        counts = (Counter[int](), Counter[int]()) if other is None else (other.ids, other.words)
        self.ids, self.words = counts

    def line(self) -> str:
        found = self._rng.randrange(IDS), [self._rng.randrange(IDS) for _ in range(self._rng.randrange(4))]
        self.ids[found[0]] += 1
        self.words.update(found[1])
        return f"1 {found[0]} {len(found[1])} {' '.join(map(str, found[1]))}\n"

    def grow(self, records: int = 20) -> None:
        """Also in the middle of a line. Each partition of a topic gets messages."""
        if self._broker is not None:
            for partition in range(PARTITIONS):
                self._send(partition, self._rng.randrange(1, records))
        if self._parquet or self._broker:
            return
        for name in ("grows-0", "grows-1", "grows-2"):
            text = (self._half if name == "grows-0" else "") + "".join(
                self.line() for _ in range(self._rng.randrange(records))
            )
            if name == "grows-0":
                cut = self._rng.randrange(len(text) + 1)
                text, self._half = text[:cut], text[cut:]
            with (self.folder / name).open("a") as file:
                file.write(text)

    def add_file(self, records: int = 50) -> None:
        """At once, and in a directory of its own."""
        self._files += 1
        if self._broker is not None:
            self._send(self._files % PARTITIONS, self._rng.randrange(1, records))
            return
        path = self.folder / f"day-{self._files % 3}" / f"part-{self._files}"
        path.parent.mkdir(exist_ok=True)
        hidden = path.with_name(f".{path.name}")
        lines = [self.line() for _ in range(self._rng.randrange(1, records))]
        if self._parquet:
            numbers = [list(map(int, line.split())) for line in lines]
            ids, words = [each[1] for each in numbers], [each[3:] for each in numbers]
            table = pa.table(
                {"id": pa.array(ids, pa.int64()), "words": pa.array(words, pa.list_(pa.int64()))}
            )
            pq.write_table(table, hidden, row_group_size=10)
        else:
            hidden.write_text("".join(lines))
        hidden.rename(path)

    def _send(self, partition: int, records: int) -> None:
        assert self._broker is not None
        self._broker.send("records", partition, [self.line() for _ in range(records)])

    def finish(self) -> None:
        """The last line is complete, without an end."""
        if self._parquet or self._broker:
            return
        with (self.folder / "grows-0").open("a") as file:
            file.write(self._half.rstrip("\n") or self.line().rstrip("\n"))
        self._half = ""

    def expect(self, saved: Path, *, values: bool = True) -> None:
        """The tables have counted what is in the stream; `values`: the rows' too, which sync training divides
        by the number of trainers.
        """
        for table, wanted in (("ids", self.ids), ("words", self.words)):
            rows = shown(str(saved), f"{table}.weight", *map(str, range(IDS)))["rows"]
            found = {row["key"]: row for row in rows}
            assert {key: row["shows"] for key, row in found.items()} == wanted, table
            if values:
                assert {key: row["values"] for key, row in found.items()} == {
                    key: [count] for key, count in wanted.items()
                }


def streaming(
    folder: Path,
    ps: dict[str, object] | None = None,
    *,
    durability: str = "log",
    interval: float | None = None,
    **options: object,
) -> list[str]:
    """`interval`: seconds between snapshots. One takes the place of the log, where tests look for what a job
    holds at. `ps`: more of ps_configs.
    """
    interval = interval or (300.0 if "hold" in options else 0.3)
    kept = {"durability": durability, "durability_dir": f"{folder}/kept", "snapshot_interval_s": interval}
    ps = {**kept, **(ps or {})}
    text = json.dumps({"folder": str(folder), "ps": ps, **options})
    return ["-m", "tests.support.scripts.ps_streaming", text]


def steps_of(job: Job) -> int:
    return sum(steps_said(process, "step") + 1 for process in job.trainers)


def kill_some(job: Job, command: list[str], log: Log, rng: random.Random, kills: int) -> None:
    """Each time new records have come, and some of them were trained, somebody dies, or two do."""
    for _ in range(kills):
        before = steps_of(job)
        log.grow()
        log.add_file()
        wait_until(lambda before=before: steps_of(job) > before, job)
        time.sleep(rng.uniform(0, 0.05))  # anywhere within some steps
        victims = rng.sample(job.processes, rng.choice([1, 1, 2]))
        wait_until(lambda victims=victims: all(map(is_up, victims)), job)
        for victim in victims:
            victim.kill()
        for victim in victims:
            restart(job, victim, command)


def is_up(process: Process) -> bool:
    return in_training(process, "step") or "joined" in process.output


def run(
    forker: Forker,
    folder: Path,
    kills: int,
    seed: int,
    trainers: list[int],
    broker: Broker | None = None,
    **options: object,
) -> None:
    """Several starts of a job with so many trainers each, all killed at the end; then one trains the rest."""
    rng = random.Random(seed)
    log = Log(folder / "records", rng, broker=broker)
    if broker is not None:
        log.grow()  # makes the topic
        options["brokers"] = broker.address
    command = streaming(folder, pause_ms=2, **options)
    for number in trainers:
        with forker.job(folder, trainers=number, servers=2) as job:
            job.start_all(command)
            kill_some(job, command, log, rng, kills // len(trainers))
            kill_all(job)
    finish(forker, folder, log, **options)


def finish(forker: Forker, folder: Path, log: Log, **options: object) -> None:
    """One trainer trains the rest and saves."""
    log.finish()
    with forker.job(folder, trainers=1, servers=2) as job:
        job.start_all(streaming(folder, **{**options, "follow": False, "save": True}))
        job.expect_success()
    log.expect(folder / "saved", values=not options.get("sync"))


MODES: dict[str, dict[str, object]] = {
    "sync": {"sync": True},
    "async": {"asynchronous": {"send_queue_size": 8}},
    "parquet": {"parquet": True},
    "kafka": {},
    "merged": {"asynchronous": {"max_merge_var_num": 3}, "prefetch": True},
}


@pytest.mark.parametrize("mode", ["sync", "async", "merged"])
@pytest.mark.parametrize("source", ["files", "kafka"])
def test_each_record_counts_once_through_kills_and_with_other_trainers(
    forker: Forker, tmp_path: Path, mode: str, source: str
) -> None:
    broker = Broker() if source == "kafka" else None
    run(forker, tmp_path, KILLS, SEED, [2, 3], broker, **MODES[mode])


HELD = 5


@pytest.mark.parametrize(
    ("mode", "trainers", "others"),
    [
        ("sync", 1, 2),
        ("sync", 2, 2),
        ("async", 3, 2),
        ("merged", 2, 2),
        ("parquet", 2, 3),
        ("kafka", 2, 3),
    ],
)
def test_a_push_that_only_one_of_two_servers_has(
    forker: Forker, tmp_path: Path, mode: str, trainers: int, others: int
) -> None:
    """The other is dead when trainers push a step. Then everybody is killed, and comes back with others, who
    cut batches otherwise.
    """
    options = dict(MODES[mode])
    kafka = Broker() if mode == "kafka" else None
    if kafka is not None:
        options["brokers"] = kafka.address
    log = Log(tmp_path / "records", random.Random(3), parquet=mode == "parquet", broker=kafka)
    for _ in range(12):
        log.add_file()
        log.grow()
    with forker.job(tmp_path, trainers=trainers, servers=2) as job:
        job.start_all(streaming(tmp_path, hold=HELD, **options))
        for trainer in job.trainers:
            trainer.wait_for("held")
        job.servers[1].kill()
        assert job.servers[1].wait() == -signal.SIGKILL
        (tmp_path / "go").touch()
        job.processes.remove(job.servers[1])
        wait_until(lambda: pushes_in(tmp_path, HELD) == trainers, job)
        kill_all(job)
    with forker.job(tmp_path, trainers=others, servers=2) as job:
        job.start_all(streaming(tmp_path, batch_size=3, **options))
        wait_until(lambda: steps_of(job) > 4 * others, job)
        kill_all(job)
    finish(forker, tmp_path, log, **options)


def test_a_step_that_one_trainer_had_not_pushed_is_trained_by_others(forker: Forker, tmp_path: Path) -> None:
    log = Log(tmp_path / "records", random.Random(4))
    for _ in range(12):
        log.add_file()
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        for rank in (0, 1):
            job.start(streaming(tmp_path, sync=True, interval=300.0), Role.SERVER, rank)
        job.start(streaming(tmp_path, sync=True), Role.TRAINER, 0)
        job.start(streaming(tmp_path, sync=True, hold=HELD), Role.TRAINER, 1)
        job.trainers[1].wait_for("held")
        wait_until(lambda: pushes_in(tmp_path, HELD) == 2, job)
        kill_all(job)
    finish(forker, tmp_path, log, sync=True)


def test_what_a_server_lost_that_went_back_to_a_snapshot_is_trained_by_the_next_start(
    forker: Forker, tmp_path: Path
) -> None:
    """Meanwhile the trainer goes on."""
    log = Log(tmp_path / "records", random.Random(8))
    for _ in range(24):
        log.add_file()
    options = {"durability": "snapshot", "asynchronous": {"send_queue_size": 8}}
    often, once = (streaming(tmp_path, interval=seconds, **options) for seconds in (0.3, 300.0))
    kept = [tmp_path / "kept" / f"server-{rank}" for rank in (0, 1)]
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        job.start(often, Role.SERVER, 0)
        job.start(once, Role.SERVER, 1)
        trainer = job.start(streaming(tmp_path, hold=20, **options), Role.TRAINER, 0)
        trainer.wait_for("held")
        wait_until(lambda: complete(kept[1]), job)
        (tmp_path / "go").touch()
        wait_until(lambda: steps_said(trainer, "step") > 25, job)
        job.servers[1].kill()
        again = restart(job, job.servers[1], once)
        again.wait_for("recovered 2 tables at step ")
        assert int(again.output.split("tables at step ")[1].split(":")[0]) <= 20
        wait_until(lambda: steps_said(trainer, "step") > 40, job)
        for _ in range(2):  # the second one begins after that
            seen = complete(kept[0])
            wait_until(lambda seen=seen: complete(kept[0]) - seen, job)
        kill_all(job)
    finish(forker, tmp_path, log, **options)


def test_in_sync_a_server_has_lost_several_steps(forker: Forker, tmp_path: Path) -> None:
    """By a power failure: its folder is as it was before them. They are made up for in fewer, larger ones."""
    log = Log(tmp_path / "records", random.Random(9))
    for _ in range(24):
        log.add_file()
    kept = tmp_path / "kept" / "server-1"
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(streaming(tmp_path, sync=True, hold=HELD))
        for trainer in job.trainers:
            trainer.wait_for("held")
        wait_until(lambda: complete(kept), job)  # nothing else is written until `go`
        wait_until(lambda: len(list(kept.glob("journal-*"))) == 1, job)
        shutil.copytree(kept, tmp_path / "then")
        (tmp_path / "go").touch()
        wait_until(lambda: steps_of(job) > 2 * (HELD + 10), job)
        kill_all(job)
    shutil.rmtree(kept)
    (tmp_path / "then").rename(kept)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(streaming(tmp_path, sync=True, batch_size=64))
        wait_until(lambda: all(steps_said(each, "step") > 5 for each in job.trainers), job)
        kill_all(job)
    finish(forker, tmp_path, log, sync=True)


@pytest.mark.parametrize("follow", [False, True])
def test_servers_at_different_steps_publish_what_they_all_have(
    forker: Forker, tmp_path: Path, follow: bool
) -> None:
    """One has lost steps, which are made up for in a larger one; no new record comes."""
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "a").write_text("".join(f"1 {number % IDS} 0\n" for number in range(60)))
    kept, published = tmp_path / "kept" / "server-1", tmp_path / "published"
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        job.start_all(streaming(tmp_path, sync=True, batch_size=2, hold=HELD))
        job.trainers[0].wait_for("held")
        wait_until(lambda: complete(kept), job)
        wait_until(lambda: len(list(kept.glob("journal-*"))) == 1, job)
        shutil.copytree(kept, tmp_path / "then")
        (tmp_path / "go").touch()
        wait_until(lambda: steps_of(job) == 30, job)
        kill_all(job)
    shutil.rmtree(kept)
    (tmp_path / "then").rename(kept)
    publish = {"publish": str(published), "publish_interval_s": 0.1}
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        command = streaming(tmp_path, publish, sync=True, batch_size=64, interval=300.0, follow=follow)
        job.start_all(command)

        def in_published() -> bool:
            with contextlib.suppress(LoadError):
                rows = shown(str(published), "ids.weight", *map(str, range(IDS)))["rows"]
                return all(row.get("values") == [2.0] for row in rows)
            return False

        wait_until(in_published, job)
        (tmp_path / "over").touch()
        job.expect_success()


THROUGH = 40


@pytest.mark.parametrize("all_are_killed", [False, True])
def test_a_trainer_that_was_through_trains_again_in_sync(
    forker: Forker, tmp_path: Path, all_are_killed: bool
) -> None:
    """The other one went on without it. If all are killed, one server has a step that the other has not."""
    log = Log(tmp_path / "records", random.Random(5))
    for _ in range(6):
        log.add_file()
    command = streaming(tmp_path, sync=True)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        for rank in (0, 1):
            job.start(command, Role.SERVER, rank)
        through = job.start(streaming(tmp_path, sync=True, follow=False), Role.TRAINER, 0)
        other = job.start(streaming(tmp_path, sync=True, hold=THROUGH), Role.TRAINER, 1)
        through.wait_for("through")
        assert 0 <= steps_said(through, "step") < THROUGH
        for _ in range(40):
            log.add_file()
        other.wait_for("held")
        if all_are_killed:
            job.servers[1].kill()
            assert job.servers[1].wait() == -signal.SIGKILL
            job.processes.remove(job.servers[1])
        else:
            through.kill()
            again = restart(job, through, command)
            again.wait_for("joined")
        (tmp_path / "go").touch()
        wait_until(lambda: all_are_killed <= pushes_in(tmp_path, THROUGH), job)
        if not all_are_killed:
            wait_until(lambda: steps_said(again, "step") > 3, job)
        kill_all(job)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(command)
        wait_until(lambda: all(steps_said(each, "step") > 3 for each in job.trainers), job)
        kill_all(job)
    finish(forker, tmp_path, log, sync=True)


@pytest.mark.parametrize(("mode", "hold"), [("sync", 5), ("merged", 6)])
def test_two_streams_of_which_only_one_server_has_a_push(
    forker: Forker, tmp_path: Path, mode: str, hold: int
) -> None:
    """A push of the second one, or of both. The trainers that come back begin with the first."""
    options = {**MODES[mode], "streams": ["records", "others"]}
    log = Log(tmp_path / "records", random.Random(6))
    others = Log(tmp_path / "others", random.Random(7), other=log)
    for each in (log, others):
        for _ in range(12):
            each.add_file()
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(streaming(tmp_path, hold=hold, **options))
        for trainer in job.trainers:
            trainer.wait_for("held")
        job.servers[1].kill()
        assert job.servers[1].wait() == -signal.SIGKILL
        (tmp_path / "go").touch()
        job.processes.remove(job.servers[1])
        wait_until(lambda: pushes_in(tmp_path, hold) == 2, job)
        kill_all(job)
    with forker.job(tmp_path, trainers=2, servers=2) as job:
        job.start_all(streaming(tmp_path, **options))
        wait_until(lambda: steps_of(job) > 8, job)
        kill_all(job)
    finish(forker, tmp_path, log, **options)

"""Following a published folder: what is served is, row for row, what the servers had at that step, whoever is
killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.support.cluster import Job
from tests.support.forking import Forker
from tests.support.inference import Served, Tensors, served
from tests.support.scripts.ps_following import IDS, Model
from tests.support.traces import wait_until
from tests.trainers.ps.test_recovery import give, in_training, restart, steps_said
from tests.trainers.ps.test_recovery import wait_until as wait_in_job
from trainers.ps import read_values
from trainers.ps.saves.manifest import current_manifest
from trainers.ps.saves.read import open_saves
from trainers.ps.trainer.stand_ins import initial_rows
from trainers.storage.errors import LoadError

KILLS = int(os.environ.get("KILLS", "3"))
pytestmark = [pytest.mark.slow, pytest.mark.timeout(max(600, 60 + 5 * KILLS))]

ASKED = {"ids": torch.arange(-15, IDS + 15).view(-1, 3)}  # some of them never have a row


def command(folder: Path, steps: int, **more: object) -> list[str]:
    return ["-m", "tests.support.scripts.ps_following", str(folder), str(steps), json.dumps(more)]


class Answers:
    """What was served, by version, and the step of each version as the folder says."""

    def __init__(self, published: Path) -> None:
        self._published = published
        self.by_version: dict[str, Tensors] = {}
        self.steps: dict[str, int] = {}

    def ask(self, server: Served) -> None:
        version, outputs = server.infer(ASKED)
        before = self.by_version.setdefault(version, outputs)
        assert all(torch.equal(before[name], outputs[name]) for name in before), "one version, one answer"
        self.note_steps()

    def steps_served(self) -> set[int]:
        return {self.steps[version] for version in self.by_version if version in self.steps}

    def note_steps(self) -> None:
        with contextlib.suppress(LoadError):
            manifest = current_manifest(self._published)
            self.steps |= {f"{manifest.stream}-{save.number}": save.step for save in manifest.saves}


@torch.no_grad()
def expected(folder: Path) -> Tensors:
    """What the model gives with the values of a save of all rows."""
    values = read_values(folder)
    options = {name: spec.rows for name, spec in open_saves(folder).specs().items()}
    model = Model().eval()
    for name, parameter in model.named_parameters():
        if name in values.dense:
            parameter.copy_(values.dense[name].view(parameter.shape))
    modules = {}
    for name, saved in values.sparse.items():
        module = model.get_submodule(name.removesuffix(".weight"))
        ids = torch.arange(-15, IDS + 15) if module.weight.shape[0] == 0 else torch.arange(len(module.weight))
        rows = initial_rows(options[name], ids, saved.values.shape[1])
        where = {key: place for place, key in enumerate(ids.tolist())}
        for key, row in zip(saved.keys.tolist(), saved.values, strict=True):
            rows[where[key]] = row
        modules[name] = rows.to(module.weight.dtype)
    full, ids = modules["full.weight"], modules["ids.weight"]
    ids[15 + 7] = modules["few.weight"][0] = 0.0  # padding_idx
    model.words.weight.copy_(modules["words.weight"])
    model.few.weight.copy_(modules["few.weight"])
    model.bags.weight.copy_(modules["bags.weight"])
    model.ids.forward = lambda asked: ids[asked + 15]  # type: ignore[method-assign]
    model.full.forward = lambda asked: full[asked + 15]  # type: ignore[method-assign]
    found: Tensors = model(**ASKED)
    return found


def kill_one(job: Job, words: list[str], limit: Path, to: int, chance: random.Random) -> None:
    """Let the trainers go on to this step, and kill one process of the job on the way."""
    reached = {process.member.rank: steps_said(process, "step") for process in job.trainers}
    give(limit, to)
    further = chance.randrange(1, 4)
    wait_in_job(
        lambda: all(steps_said(each, "step") >= reached[each.member.rank] + further for each in job.trainers),
        job,
    )
    victim = chance.choice(job.processes)
    wait_in_job(lambda: in_training(victim, "step"), job)
    victim.kill()
    restart(job, victim, words)


def test_every_row_that_is_served_is_what_the_servers_had_whoever_is_killed(
    forker: Forker, tmp_path: Path
) -> None:
    steps = 10 * KILLS
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder in (quiet, killed):
        folder.mkdir()
    with forker.job(quiet, trainers=2, servers=2) as job:
        give(quiet / "step_limit", steps + 1)
        job.start_all(command(quiet, steps + 1, every=True))
        job.expect_success()
    answers = Answers(killed / "published")
    more = {"durability": "log", "snapshot_interval_s": 2.0, "log_fsync": "no"}
    more |= {"publish": str(killed / "published"), "publish_interval_s": 0.1}
    words = command(killed, steps + 1, **more)
    chance = random.Random(int(os.environ.get("SEED", "1")))
    follow = ("bundle", "--follow=published", "--workers=2", "--threads=1", "--poll=0.05")
    with contextlib.ExitStack() as servers, forker.job(killed, trainers=2, servers=2) as job:
        job.start_all(words)
        wait_until(lambda: (killed / "bundle" / "inference.json").exists())
        server = servers.enter_context(served(killed, *follow))
        for number in range(KILLS):
            reached = 10 * (number + 1)
            with ThreadPoolExecutor(1) as thread:
                killing = thread.submit(kill_one, job, words, killed / "step_limit", reached, chance)
                if number % 2:
                    server.stop(signal.SIGKILL)
                    server = servers.enter_context(served(killed, *follow))
                else:
                    os.kill(chance.choice(server.workers()), signal.SIGKILL)
                while not (killing.done() and reached in answers.steps_served()):
                    assert not (killing.done() and killing.exception()), killing.exception()
                    with contextlib.suppress(ConnectionError):  # with the one that was killed
                        answers.ask(server)
        give(killed / "step_limit", steps + 1)
        job.expect_success(250 + KILLS)
        assert server.stop() == 0
    for version, outputs in answers.by_version.items():
        if (step := answers.steps.get(version)) is None:
            continue  # merged before the folder was looked at
        wanted = expected(quiet / "at" / str(step))
        for name in ("ids", "full", "words", "few", "bags"):
            assert torch.equal(outputs[name], wanted[name]), (version, step, name)
        assert torch.allclose(outputs["out"], wanted["out"], atol=1e-5), (version, step)

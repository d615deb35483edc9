"""Saves by a whole job: what is in them, onto what they load, and what happens when one goes wrong."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from fleetrun.envs.contract import Role
from tests.support.forking import Forker
from tests.trainers.ps.test_recovery import wait_until
from trainers.ps import read_values
from trainers.ps.saves.inspection import shown

pytestmark = pytest.mark.slow


def command(scenario: str, *folders: Path) -> list[str]:
    return ["-m", "tests.support.scripts.ps_saving", scenario, *map(str, folders)]


def run(forker: Forker, words: list[str], *, trainers: int, servers: int) -> list[str]:
    """What the trainers printed."""
    folder = Path(words[3])
    folder.mkdir(exist_ok=True)
    with forker.job(folder, trainers=trainers, servers=servers) as job:
        job.start_all(words)
        job.expect_success()
        return [trainer.output for trainer in job.trainers]


@pytest.fixture(scope="module")
def whole(forker: Forker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted job of two servers that saved half-way."""
    folder = tmp_path_factory.mktemp("whole")
    run(forker, command("halves", folder), trainers=2, servers=2)
    return folder


@pytest.mark.parametrize("servers", [1, 3])
def test_a_save_goes_on_with_any_number_of_servers(
    forker: Forker, tmp_path: Path, whole: Path, servers: int
) -> None:
    run(forker, command("second_half", tmp_path, whole / "saved"), trainers=2, servers=servers)
    for rank in (0, 1):
        wanted, found = (torch.load(folder / f"result.{rank}.pt") for folder in (whole, tmp_path))
        assert torch.equal(wanted["middle"], found["middle"])
        assert not torch.equal(wanted["middle"], wanted["end"])
        assert float((wanted["end"] - found["end"]).abs().max()) < 1e-6
        for left, right in zip(wanted["model"].values(), found["model"].values(), strict=True):
            assert torch.allclose(left, right, rtol=0, atol=1e-6)


def test_another_model_than_the_saved_one_is_refused_at_the_trainer(
    forker: Forker, tmp_path: Path, whole: Path
) -> None:
    with forker.job(tmp_path, trainers=1, servers=1) as job:
        job.start_all(command("other_model", tmp_path, whole / "saved"))
        assert job.trainers[0].wait() == 1
        said = job.trainers[0].output
        assert "ServerError: server 0 at 127.0.0.1:" in said
        assert str(whole / "saved") in said
        assert "is dense with 2100 elements, but in this model it is dense with 3000 elements" in said


def test_a_wider_model_begins_with_the_tables_that_are_named(
    forker: Forker, tmp_path: Path, whole: Path
) -> None:
    said = run(forker, command("warm", tmp_path, whole / "saved"), trainers=2, servers=3)
    assert all("warm" in each for each in said)
    (line,) = [line for each in said for line in each.splitlines() if "initial values: " in line]
    assert "/saved: ids.weight, words.weight, out.weight, out.bias; initial values: cities.weight, " in line
    assert line.endswith("wide.weight, wide.bias; not loaded: wide.bias, wide.weight")


def test_every_mode_holds_what_it_should(forker: Forker, tmp_path: Path) -> None:
    (said,) = run(forker, command("modes", tmp_path), trainers=1, servers=2)
    assert "all modes" in said
    assert 'Set strategy.ps_configs "publish"' in said.partition("to nowhere:")[2]


def test_trainers_that_all_save_make_one_save(forker: Forker, tmp_path: Path) -> None:
    said = run(forker, command("together", tmp_path), trainers=3, servers=2)
    assert all("together" in each for each in said)
    modes = {
        name: [save["mode"] for save in json.loads((tmp_path / name / "manifest.json").read_text())["saves"]]
        for name in ("all", "values", "aged", *(f"alone-{rank}" for rank in range(3)))
    }
    alone = {f"alone-{rank}": [0] for rank in range(3)}
    assert modes == {"all": [0, 1], "values": [2], "aged": [3], **alone}
    (row,) = shown(str(tmp_path / "aged"), "ids.weight", "1")["rows"]
    assert row["unseen_days"] == 1, "one day has passed, not three"
    assert not list((tmp_path / "program").glob("tables-*"))


def test_a_save_while_others_push_is_of_one_moment(forker: Forker, tmp_path: Path) -> None:
    words = command("beside", tmp_path)
    with forker.job(tmp_path, trainers=2, servers=1) as job:
        job.start_all(words)
        job.trainers[1].wait_for("pushed\npushed\npushed\n")
        (tmp_path / "save").touch()
        job.expect_success()
        pushed = job.trainers[1].output.count("pushed")
        assert f"end {pushed}.0\n" in job.trainers[0].output
    counts = []
    for number in range(4):
        values = read_values(tmp_path / f"saved{number}").sparse["weight"].values
        counts.append(float(values[0, 0]))
        assert bool((values == values[0, 0]).all()), "half of a push is in the save"
    assert counts == sorted(set(counts))
    assert counts[0] > 1
    assert counts[-1] <= pushed


def test_a_save_that_fails_says_why_and_leaves_the_former_one(forker: Forker, tmp_path: Path) -> None:
    (said,) = run(forker, command("refused", tmp_path), trainers=1, servers=2)
    lines = {line.partition(":")[0]: line for line in said.splitlines()}
    assert str(tmp_path / "file") in lines["unwritable"]
    assert "server 1 at 127.0.0.1:" in lines["full"]
    assert f"The save to {tmp_path}/saved" in lines["full"]
    assert "File too large" in lines["full"]
    assert "The former save" in lines["full"]
    assert len(list((tmp_path / "saved").glob("save-*"))) == 1, "what was written of it is gone"
    assert "went on" in lines
    again = tmp_path / "again"
    run(forker, command("second_half", again, tmp_path / "saved"), trainers=1, servers=1)
    assert torch.equal(torch.load(again / "result.0.pt")["middle"], torch.load(tmp_path / "before.pt"))


def test_a_trainer_killed_in_a_save_does_not_keep_the_next_one_from_it(
    forker: Forker, tmp_path: Path
) -> None:
    """One server writes its part, the other has not read yet that it is to."""
    words, saved = command("killed", tmp_path), tmp_path / "saved"
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        job.start_all(words)
        (victim,) = job.trainers
        victim.wait_for("saving")
        job.servers[1].stop()
        (tmp_path / "go").touch()
        wait_until(lambda: list(saved.glob("save-*")), job)
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        job.servers[1].go_on()
        assert not (saved / "manifest.json").exists()
        job.processes.remove(victim)
        job.start(words, Role.TRAINER, 0, restart_count=1)
        job.expect_success()
    assert len(list(saved.glob("save-*"))) == 1


def test_a_trainer_that_was_restarted_saves_what_has_changed_since_its_former_life(
    forker: Forker, tmp_path: Path
) -> None:
    words = command("continued", tmp_path)
    with forker.job(tmp_path, trainers=1, servers=2) as job:
        job.start_all(words)
        (victim,) = job.trainers
        victim.wait_for("trained")
        victim.kill()
        assert victim.wait() == -signal.SIGKILL
        job.processes.remove(victim)
        job.start(words, Role.TRAINER, 0, restart_count=1)
        job.expect_success()
    modes = [save["mode"] for save in json.loads((tmp_path / "saved" / "manifest.json").read_text())["saves"]]
    assert modes == [0, 1]

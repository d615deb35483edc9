"""`fleetrun bundle`: all that is known of a job in one file, without secrets."""

from __future__ import annotations

import json
import tarfile

import pytest

from tests.support.command import Fleetrun, Launch

pytestmark = pytest.mark.slow

SECRET = "wsj-8e1f0b77"
SAYS = f"""
print("loading from https://me:{SECRET}@store/data, HF_TOKEN={SECRET}, and the number of tokens: 42")
print("the key is {SECRET}" if RANK else "trained")
"""


def packed(fleetrun: Fleetrun, launch: Launch) -> dict[str, str]:
    """The texts by their names, without those of the folder and of logs' folder."""
    assert launch.code == 0, launch
    file = fleetrun.folder / launch.out.strip()
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        found = {each.name: archive.extractfile(each).read().decode() for each in archive.getmembers()}
    assert len({name.split("/")[0] for name in found}) == 1, "all is in one folder"
    return {name.split("/")[-1].split(".", 2)[-1] if "/logs/" in name else name.split("/")[1]: text
            for name, text in found.items()}  # fmt: skip


def test_a_job_that_runs(fleetrun: Fleetrun):
    waits = SAYS + "tell('ready', os.getpid())\nwait_for_go()\n"
    launch = fleetrun.start("--nproc_per_node", "2", fleetrun.script(waits))
    launch.until_ready(2)
    done = fleetrun.run("bundle", env={"WANDB_API_KEY": SECRET})
    found = packed(fleetrun, done)
    assert SECRET not in "".join(found.values())
    assert (
        "https://me:******@store/data, HF_TOKEN=******, and the number of tokens: 42"
        in found["trainer.0.log"]
    )
    assert "the key is ******" in found["trainer.1.log"], "a value of this shell"
    assert json.loads(found["status.json"])["state"] == "running"
    assert [each["rank"] for each in json.loads(found["why.json"])["states"]] == [0, 1]
    assert "wait_for_go" in found["stacks.txt"]
    assert json.loads(found["doctor.json"])["sections"]
    assert all(json.loads(line) for line in found["record.jsonl"].splitlines())
    assert found["missing.txt"] == ""
    launch.go()
    assert launch.wait() == 0, launch


def test_a_job_that_has_failed(fleetrun: Fleetrun):
    """What could not be had is told, and the rest is there."""
    bad = fleetrun.script(SAYS + "if RANK:\n    raise ValueError('bad batch')")
    launch = fleetrun.run("--nproc_per_node", "2", "--max_restart", "0", bad)
    assert launch.code == 1, launch
    (log,) = fleetrun.logs("*.trainer.0.log")
    log.unlink()
    done = fleetrun.run("bundle", "-o", "night.tgz")
    found = packed(fleetrun, done)
    assert "ValueError: bad batch" in found["report.txt"]
    assert json.loads(found["report.json"])["code"] == 1
    assert "bad batch" in found["trainer.1.log"]
    assert "trainer.0.log: " in found["missing.txt"]
    assert "missing in the file: logs/" in done.said
    assert "why.json" not in found
    for words, noun in (
        (("-o", "x.zip"), ".tar.gz"),
        (("-o", "gone/x.tgz"), "gone"),
        (("nosuch",), "nosuch"),
    ):
        wrong = fleetrun.run("bundle", *words)
        assert wrong.code in (1, 2), wrong
        assert noun in wrong.said, wrong
    assert {each.name for each in fleetrun.folder.glob("*.t*gz")} == {"night.tgz"}

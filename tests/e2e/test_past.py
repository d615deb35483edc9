"""Jobs have names and a past: a word means one by its script or folder, `history` lists launches, `prune`
deletes old ones.
"""

import json
import os
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch

pytestmark = pytest.mark.slow

STAY = "print('epoch 1')\nleave_on_term()\ntell('ready', os.getpid())\nstay()"


@pytest.fixture
def elsewhere(fleetrun: Fleetrun, tmp_path: Path):
    """The same user in another folder."""
    folder = tmp_path / "other"
    folder.mkdir()
    fleetrun.script(STAY, "other/serve.py")

    def start(*words: str, **options: object) -> Launch:
        return fleetrun.start(*words, prefix=("env", "-C", str(folder)), **options)  # type: ignore[arg-type]

    return start


def test_a_job_is_meant_by_its_script_or_folder_and_the_one_of_this_folder_comes_first(
    fleetrun: Fleetrun, elsewhere
):
    here = fleetrun.start(fleetrun.script(STAY))
    other = elsewhere("serve.py")
    for launch in (here, other):
        launch.until_ready(1)
    pods = {
        name: fleetrun.run("status", name, "--json") for name in ("train.py", "serve", "other", "./other")
    }
    found = {name: json.loads(done.out)["script"] for name, done in pods.items()}
    assert found == {"train.py": "train.py", "serve": "serve.py", "other": "serve.py", "./other": "serve.py"}
    assert json.loads(fleetrun.run("status", "--json").out)["script"] == "train.py"
    stopped = fleetrun.run("stop")
    assert stopped.code == 0
    assert here.wait() == 143

    refused = fleetrun.run("stop")  # no other job is meant where this folder's has ended
    assert refused.code == 1
    assert "the job of this directory ended" in refused.said
    for path in fleetrun.logs("*.events.jsonl"):
        path.unlink()
    refused = fleetrun.run("stop")  # the only one, but not of this folder, and nobody can be asked
    assert refused.code == 2
    assert "serve.py" in refused.said
    assert "was started in" in refused.said
    asked, _ = fleetrun.at_terminal("stop")
    asked.until_out("Stop it?")
    asked.type_in(b"n\n")
    assert asked.wait() == 130
    assert other.popen.poll() is None
    assert fleetrun.run("stop", "serve.py").code == 0
    assert other.wait() == 143


def test_history_lists_launches_and_prune_deletes_old_ones(fleetrun: Fleetrun):
    fleetrun.run(fleetrun.script("from trainers import progress\nprogress.report(7)", "good.py"))
    fleetrun.run("--max_restart", "0", fleetrun.script("raise ValueError('no such column')", "bad.py"))
    running = fleetrun.start(fleetrun.script(STAY))
    running.until_ready(1)
    shown = fleetrun.run("history", env={"COLUMNS": "200"})
    assert shown.code == 0
    good, bad, now = shown.out.splitlines()[1:]
    assert "good.py" in good
    assert good.endswith("7  completed")
    assert "bad.py" in bad
    assert "exit code 1: trainer 0: ValueError: no such column" in bad
    assert now.endswith("running")
    listed = json.loads(fleetrun.run("history", "bad", "--json").out)
    assert [(each["script"], each["code"], each["running"]) for each in listed] == [("bad.py", 1, False)]

    keep = fleetrun.folder / "log" / "default.savedone.model.pt"
    keep.touch()
    refused = fleetrun.run("prune", "--keep", "0")
    assert refused.code == 2
    assert "2 launches" in refused.said
    assert fleetrun.run("prune", "--keep", "0", "--older_than", "1d", "--yes").out.startswith(
        "nothing to delete"
    )
    assert fleetrun.run("prune", "--keep", "1", "--yes").out.startswith("deleted 1 launch,")
    assert [each["script"] for each in json.loads(fleetrun.run("history", "--json").out)] == [
        "train.py",
        "bad.py",
    ]
    assert fleetrun.run("prune", "--keep", "0", "-y").code == 0
    left = sorted(path.name for path in (fleetrun.folder / "log").iterdir() if path.name[0] != ".")
    assert {name.split(".")[1] for name in left if "." in name} == {listed_pod(fleetrun), "savedone"}
    assert (fleetrun.folder / "log" / "latest" / "trainer.0.log").read_text() == "epoch 1\n"
    assert fleetrun.run("stop").code == 0
    running.wait()
    assert fleetrun.run("prune", "--keep", "0", "-y").code == 0
    assert [path.name for path in (fleetrun.folder / "log").iterdir()] == [keep.name]
    assert fleetrun.run("history").code == 1


def test_prune_deletes_no_more_than_it_was_asked_to(fleetrun: Fleetrun):
    log = fleetrun.folder / "log"
    script = fleetrun.script("print('fine')", "good.py")
    fleetrun.run("--job_id", "night", script)
    (pod,) = {path.name.split(".")[1] for path in fleetrun.logs("night.*.log")}
    other = fleetrun.start("--job_id", f"night.{pod}", fleetrun.script(STAY))
    other.until_ready(1)
    (record,) = log.glob(f"night.{pod}.*.events.jsonl")
    theirs = set(log.glob(f"{record.name.removesuffix('events.jsonl')}*"))
    assert len(theirs) >= 2
    fleetrun.run("--job_id", "foreign", script)
    (record,) = log.glob("foreign.*.events.jsonl")
    os.chown(record, 12345, -1) if os.getuid() == 0 else record.chmod(0)
    asked = {
        word: fleetrun.run("prune", word, "--keep", "0", "--yes").code for word in ("", "nigh", "foreign")
    }
    assert asked == {"": 2, "nigh": 1, "foreign": 0}
    assert record.exists()
    assert fleetrun.run("prune", pod, "--keep", "0", "--yes").out.startswith("deleted 1 launch,")
    assert theirs <= set(log.iterdir())
    assert not list(log.glob(f"night.{pod}.trainer.*"))
    assert fleetrun.run("stop", "").code == 2
    assert fleetrun.run("stop", f"night.{pod}").code == 0
    other.wait()


def listed_pod(fleetrun: Fleetrun) -> str:
    (each,) = json.loads(fleetrun.run("history", "--json").out)
    return str(each["pod"])

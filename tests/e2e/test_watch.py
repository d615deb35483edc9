"""`fleetrun --watch`: an edit starts the processes again, and a job that ended waits for the next edit."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_together import Nodes
from tests.e2e.test_warm import READY, forked, installed, script, start
from tests.support.command import Fleetrun, Launch

__all__ = ["installed"]

WAITS = "waiting for a change of the script"


def edit(fleetrun: Fleetrun, name: str, text: str) -> None:
    """Replace a file as most editors do."""
    aside = fleetrun.folder / ".aside"
    aside.write_text(text)
    aside.rename(fleetrun.folder / name)


def replace(fleetrun: Fleetrun, name: str, old: str, new: str) -> None:
    edit(fleetrun, name, (fleetrun.folder / name).read_text().replace(old, new))


def lines_of(fleetrun: Fleetrun, event: str) -> list[dict[str, object]]:
    (record,) = fleetrun.logs("*.events.jsonl")
    return [line for line in map(json.loads, record.read_text().splitlines()) if line["event"] == event]


def test_an_edit_of_the_script_or_of_a_module_starts_all_ranks_again(fleetrun: Fleetrun):
    package = fleetrun.folder / "own"
    package.mkdir()
    (package / "__init__.py").write_text("")
    edit(fleetrun, "own/model.py", "VALUE = 'a'")
    name = fleetrun.script("import own.model\ntell('has', own.model.VALUE, 'one')\nstay()")
    launch = fleetrun.start("--watch", "--nproc_per_node", "2", name)
    launch.until_told("has a one", 2)
    edit(fleetrun, "own/model.py", "VALUE = 'b'")  # of the same size, perhaps in the same second
    launch.until_told("has b one", 2)
    edit(fleetrun, "own/model.py", "VALUE = ")
    launch.until_err("SyntaxError: invalid syntax")
    assert "own/model.py does not compile" in launch.err
    edit(fleetrun, "own/model.py", "VALUE = 'c'")
    launch.until_told("has c one", 2)
    replace(fleetrun, name, "'one'", "'two'")
    launch.until_told("has c two", 2)
    launch.until_ready(8)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130
    assert len(lines_of(fleetrun, "restart_asked")) == 3
    assert lines_of(fleetrun, "failed") == []
    (over,) = lines_of(fleetrun, "over")
    assert (over["code"], over["restarts"]) == (130, 0)


def test_a_job_that_crashed_waits_and_starts_again_when_it_is_fixed(fleetrun: Fleetrun):
    name = fleetrun.script("import own\ntell('has', own.VALUE, ATTEMPT)")
    launch = fleetrun.start("--watch", "--nproc_per_node", "2", name)
    launch.until_err(WAITS)
    assert "No module named 'own'" in launch.err
    state = json.loads(fleetrun.run("status", "--json").out)
    assert state["state"] == "waiting"
    edit(fleetrun, "own.py", "VALUE = 1")
    launch.until_told("has 1 1", 2)
    launch.until(lambda: launch.err.count(WAITS) == 2, WAITS)
    edit(fleetrun, "own.py", "VALUE = 2")
    launch.until_told("has 2 2", 2)
    launch.until(lambda: launch.err.count(WAITS) == 3, WAITS)
    launch.send(signal.SIGINT)
    assert launch.wait() == 0
    assert launch.err.count("Pod failed") == 1
    assert launch.err.count("Pod completed") == 2
    assert len(lines_of(fleetrun, "paused")) == 3
    (over,) = lines_of(fleetrun, "over")
    assert (over["code"], over["report"]) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_end_of_the_wait_is_the_end_of_the_last_attempt(fleetrun: Fleetrun, number: int):
    launch = fleetrun.start("--watch", fleetrun.script("sys.exit(7)"))
    launch.until_err(WAITS)
    launch.send(number)
    assert launch.wait() == 7
    assert launch.err.count("First failure") == 1
    (over,) = lines_of(fleetrun, "over")
    assert over["code"] == 7
    assert over["report"]


@pytest.mark.parametrize("words", [["-m", "program"], ["program"]])
def test_a_module_or_a_directory_is_watched_too(fleetrun: Fleetrun, words: list[str]):
    (fleetrun.folder / "program").mkdir()
    (fleetrun.folder / "program" / "own.py").write_text("")  # its compiled file changes the directory
    text = "sys.path[0] = os.path.dirname(__file__)\nimport own\ntell('has', 1)\nstay()"
    file = fleetrun.script(text, "program/__main__.py")
    launch = fleetrun.start("--watch", *words)
    launch.until_told("has 1")
    launch.until_ready(1)
    replace(fleetrun, file, "'has', 1", "'has', 2")
    launch.until_told("has 2")
    launch.until_ready(2)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130
    assert len(lines_of(fleetrun, "restart_asked")) == 1


def edited(fleetrun: Fleetrun, launch: Launch, name: str, old: str, new: str) -> None:
    replace(fleetrun, name, f"'{old}'", f"'{new}'")
    launch.until_told(f"has {new}", 2)


def test_an_edit_keeps_the_zygote_unless_it_may_change_variables(fleetrun: Fleetrun, installed: Path):
    name = script(
        fleetrun, "tell('at', ATTEMPT, os.getpid())\ntell('by', heavy.IMPORTED_BY)\ntell('has', 'a')\nstay()"
    )
    launch = start(fleetrun, installed, "--watch", "--nproc_per_node", "2", name)
    launch.until_told("has a", 2)
    edited(fleetrun, launch, name, "a", "b")
    edited(fleetrun, launch, name, "b", "c")
    by = {line.split()[2] for line in launch.told(" by ")}
    assert launch.err.count(READY) == len(by) == 1, launch
    assert forked(launch)
    replace(fleetrun, name, "tell('at'", "os.environ['THREADS'] = '1'\ntell('at'")
    launch.until_told("has c", 4)
    assert len({line.split()[2] for line in launch.told(" by ")}) == 2
    launch.send(signal.SIGINT)
    assert launch.wait() == 130


def test_restarts_count_anew_after_an_edit(fleetrun: Fleetrun):
    name = fleetrun.script("sys.exit(7)")
    launch = fleetrun.start("--watch", "--max_restart", "1", name)
    launch.until_err(WAITS)
    replace(fleetrun, name, "7", "8")
    launch.until(lambda: launch.err.count(WAITS) == 2, WAITS)
    assert launch.err.count("after 1 restart (--max_restart is 1)") == 2, launch
    launch.send(signal.SIGINT)
    assert launch.wait() == 8


def test_an_edit_of_a_running_job_lets_restarts_count_anew(fleetrun: Fleetrun):
    name = fleetrun.script("tell('has', 'a', ATTEMPT)\nif ATTEMPT == 0:\n    sys.exit(7)\nwait_for_go()")
    launch = fleetrun.start("--watch", "--max_restart", "1", name)
    launch.until_told("has a 1")
    assert json.loads(fleetrun.run("status", "--json").out)["restarts"] == 1
    text = (fleetrun.folder / name).read_text()
    edit(fleetrun, name, text.replace("'a'", "'b'").replace("ATTEMPT == 0", "ATTEMPT == 2"))
    launch.until_told("has b 3")
    assert json.loads(fleetrun.run("status", "--json").out)["restarts"] == 1
    launch.go()
    launch.until_err(WAITS)
    launch.send(signal.SIGINT)
    assert launch.wait() == 0
    assert "Pod completed" in launch.err
    (over,) = lines_of(fleetrun, "over")
    assert over["restarts"] == 1


def test_a_modification_time_of_0_is_an_edit(fleetrun: Fleetrun):
    name = fleetrun.script("tell('has', 'a')")
    launch = fleetrun.start("--watch", name)
    launch.until_err(WAITS)
    text = (fleetrun.folder / name).read_text().replace("'a'", "'b'")
    (fleetrun.folder / ".aside").write_text(text)
    os.utime(fleetrun.folder / ".aside", (0, 0))
    (fleetrun.folder / ".aside").rename(fleetrun.folder / name)
    launch.until_told("has b")
    launch.send(signal.SIGINT)
    assert launch.wait() in (0, 130)


# Puts the compiled file of the old module back, as a process that imports it slowly.
SLOW = """
import own
compiled = Path(own.__cached__)
text = compiled.read_bytes()
def put_back():
    compiled.write_bytes(text)
    os._exit(0)
if ATTEMPT == 0:
    on(signal.SIGTERM, put_back)
tell("has", own.VALUE, ATTEMPT)
stay()
"""


def test_a_process_that_compiles_the_old_module_late_does_not_hide_the_edit(fleetrun: Fleetrun):
    edit(fleetrun, "own.py", "VALUE = 'a'")
    second = 1_700_000_000 * 10**9
    os.utime(fleetrun.folder / "own.py", ns=(second, second))
    launch = fleetrun.start("--watch", fleetrun.script(SLOW))
    launch.until_told("has a 0")
    launch.until_ready(1)
    aside = fleetrun.folder / ".aside"
    aside.write_text("VALUE = 'b'")  # of the same size, in the same second
    os.utime(aside, ns=(second + 1, second + 1))
    aside.rename(fleetrun.folder / "own.py")
    assert launch.until_told("has ", 2)[1] == "trainer.0 has b 1"
    launch.send(signal.SIGINT)
    assert launch.wait() == 130


# ---- Several nodes


def start_nodes(fleetrun: Fleetrun, text: str, *words: str) -> list[Launch]:
    """Two nodes with this script. The first one serves the rendezvous."""
    nodes = Nodes(fleetrun, "--nnodes", "2", "--watch", *words)
    name = fleetrun.script(text)
    first = nodes.start("--rank", "0", name)
    first.until_err("1 of 2 nodes have joined")
    return [first, nodes.start("--rank", "1", name)]


def waiting(launches: list[Launch], times: int = 1) -> None:
    for each in launches:
        each.until(lambda each=each: each.err.count(WAITS) == times, WAITS)


def test_an_edit_starts_all_ranks_of_all_nodes_again_once(fleetrun: Fleetrun):
    edit(fleetrun, "own.py", "VALUE = 'a'")
    launches = start_nodes(fleetrun, "import own\ntell('has', own.VALUE, ATTEMPT)\nleave_on_term()\nstay()")
    for attempt, value in enumerate("abc"):
        if attempt:
            edit(fleetrun, "own.py", f"VALUE = '{value}'")
        for each in launches:
            each.until_told(f"has {value} {attempt}")
    edit(fleetrun, "own.py", "VALUE = ")
    for each in launches:
        each.until_err("own.py does not compile")
    launches[1].send(signal.SIGINT)
    assert [each.wait() for each in launches] == [130, 130]
    for each in launches:
        assert each.err.count("restart by a change of own.py; all nodes restart") == 2, each
        assert "(generation 4)" not in each.err


def test_an_edit_of_a_running_job_of_several_nodes_lets_restarts_count_anew(fleetrun: Fleetrun):
    text = "tell('has', 'a', ATTEMPT)\nif ATTEMPT == 0 and RANK:\n    sys.exit(7)\nleave_on_term()\nstay()"
    launches = start_nodes(fleetrun, text, "--max_restart", "1")
    for each in launches:
        each.until_told("has a 1")
    script = (fleetrun.folder / "train.py").read_text()
    edit(fleetrun, "train.py", script.replace("'a'", "'b'").replace("ATTEMPT == 0", "ATTEMPT == 2"))
    for each in launches:
        each.until_told("has b 3")
    launches[1].send(signal.SIGINT)
    assert [each.wait() for each in launches] == [130, 130]
    assert all(WAITS not in each.err for each in launches)


def test_all_nodes_wait_after_an_end_and_start_again_after_a_change(fleetrun: Fleetrun):
    edit(fleetrun, "own.py", "CODE = 7")
    launches = start_nodes(
        fleetrun,
        "import own\ntell('has', own.CODE)\nif own.CODE == 0 or RANK:\n    sys.exit(own.CODE)\nstay()",
    )
    waiting(launches)
    for each in launches:
        assert "trainer 1 exited with code 7" in each.err
    (record,) = (fleetrun.folder / "log" / "1").glob("*.events.jsonl")
    state = json.loads(fleetrun.run("status", record.name.split(".")[1], "--json").out)
    assert [each["state"] for each in (state, *state["nodes"])] == ["waiting"] * 3
    edit(fleetrun, "own.py", "CODE = 0")
    waiting(launches, 2)
    for each in launches:
        assert each.err.count("Pod completed") == 1
    edit(fleetrun, "own.py", "CODE = 3")
    waiting(launches, 3)
    launches[0].send(signal.SIGINT)
    assert [each.wait() for each in launches] == [3, 3]
    for each in launches:
        assert each.err.count("Pod failed") == 2


def test_a_node_that_is_lost_while_the_job_waits_ends_the_job(fleetrun: Fleetrun):
    launches = start_nodes(fleetrun, "tell('has')")
    waiting(launches)
    os.kill(launches[1].launcher, signal.SIGKILL)
    assert [each.wait() for each in launches] == [125, 125]
    assert "is lost: its launcher has ended" in launches[0].err


def test_a_node_that_joins_while_the_job_waits_takes_part_after_the_next_change(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "1:2", "--watch", "--elastic_timeout", "1")
    name = fleetrun.script("tell('of', SIZE, 'one')")
    first = nodes.start(name)
    waiting([first])
    late = nodes.start(name)
    late.until_err("this node waits as a spare")
    edit(fleetrun, name, (fleetrun.folder / name).read_text().replace("'one'", "'two'"))
    for each in (first, late):
        each.until_told("of 2 two")
    first.until(lambda: first.err.count(WAITS) == 2)
    waiting([late])
    first.send(signal.SIGINT)
    assert [each.wait() for each in (first, late)] == [0, 0]

"""Jobs of several nodes, each a real launcher on this machine: they meet, run, fail and end together. Several
hosts, with networks that break, are in test_hosts_*.py.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from fleetrun.elastic.meeting import CLOSE_TIMEOUT
from fleetrun.host.network import addresses
from tests.support.command import Fleetrun, Launch, environment
from tests.support.ports import free_port
from tests.support.traces import wait_until

SOON = ("--stop_timeout", "1")
TELL = 'tell("at", RANK, SIZE, os.environ["GROUP_RANK"], os.environ["PADDLE_RESTART_COUNT"])\n'


class Nodes:
    """Launchers that meet at one free port of this machine, each with a log directory of its own."""

    def __init__(self, fleetrun: Fleetrun, *words: str) -> None:
        self._fleetrun = fleetrun
        self._words = words
        self.master = f"127.0.0.1:{free_port()}"
        self._number = 0

    def start(self, *words: str, env: dict[str, str] | None = None) -> Launch:
        self._number += 1
        log_dir = f"log/{self._number}"
        Path(self._fleetrun.folder, "log").mkdir(exist_ok=True)
        return self._fleetrun.start(
            "--master", self.master, "--log_dir", log_dir, *SOON, *self._words, *words, env=env
        )


def told(*launches: Launch) -> list[str]:
    return sorted(line.partition(" at ")[2] for each in launches for line in each.told(" at "))


def test_two_nodes_are_one_job(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--nproc_per_node", "2")
    script = fleetrun.script(
        TELL + 'tell("all", os.environ["PADDLE_TRAINER_ENDPOINTS"], os.environ["MASTER_PORT"])'
    )
    launches = [nodes.start(script) for _ in range(2)]
    assert [each.wait() for each in launches] == [0, 0]
    assert told(*launches) == ["0 4 0 0", "1 4 0 0", "2 4 1 0", "3 4 1 0"]
    assert sum(f"can reach {nodes.master}" in each.err for each in launches) == 1
    same = {line.partition(" all ")[2] for each in launches for line in each.told(" all ")}
    assert len(same) == 1, same
    assert len(same.pop().split()[0].split(",")) == 4


def test_machines_with_other_packages_are_told(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script(TELL)
    other = fleetrun.folder / "other"
    for name in ("torch-1.2.3", "Some_Package-4.5"):
        (other / f"{name}.dist-info").mkdir(parents=True)
    path = f"{environment()['PYTHONPATH']}:{other}"
    first = nodes.start("--rank", "0", script)
    second = nodes.start("--rank", "1", f"--env=PYTHONPATH={path}", script)
    assert [first.wait(), second.wait()] == [0, 0]
    assert re.search(
        r"LAUNCH ERROR .* the nodes differ: torch is 1.2.3 on node 1, .+, 2\.\S+ elsewhere",
        first.err,
    )
    assert re.search(
        r"LAUNCH WARNING .* 1 package differs: some-package is 4.5 on node 1, .+, missing elsewhere",
        first.err,
    )
    assert first.err.index("the nodes differ") < first.err.index("Watching Pod")
    assert "differ" not in second.err
    assert "the nodes differ: torch" in fleetrun.run("report", "--log_dir", "log/1").out


def test_ranks_that_were_asked_for(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script(TELL)
    second = nodes.start("--rank", "1", script)
    second.until_err("waiting")
    first = nodes.start("--rank", "0", script)
    assert [first.wait(), second.wait()] == [0, 0]
    assert (told(first), told(second)) == (["0 2 0 0"], ["1 2 1 0"])
    assert fleetrun.run("logs", "--log_dir", "log/1", "--rank", "1").code == 0
    elsewhere = fleetrun.run("logs", "--log_dir", "log/1", "--rank", "0")
    assert elsewhere.code == 2
    assert re.search(r"node 0, .+: trainer 0\n.*fleetrun logs .*--rank 0\n", elsewhere.err)


def test_a_failure_ends_the_job_everywhere_with_its_code_and_its_report(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--max_restart", "0")
    script = fleetrun.script(
        'tell("ready", os.getpid())\nwait_for_go()\n'
        'if RANK == 1:\n    print("its last words")\n    sys.exit(7)\nleave_on_term()\nstay()'
    )
    launches = [nodes.start(script) for _ in range(2)]
    for each in launches:
        each.until_ready(1)
    for each in launches:
        each.go()
    assert [each.wait() for each in launches] == [7, 7]
    for each in launches:
        report = each.err.partition("=" * 40)[2]
        assert re.search(r"On node 1, .*127\.0\.0\.1", report), each
        assert "trainer 1 exited with code 7" in report
        assert "its last words" in report
        assert re.search(r"^Log:\s+/", report, re.MULTILINE), each  # others are in other directories
        assert re.fullmatch(
            r"node 1, .+: trainer 1 exited with code 7; its last line: its last words",
            each.err.splitlines()[-1],
        ), each


def test_all_start_again_and_count_together(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--max_restart", "2")
    script = fleetrun.script(
        f"{TELL}leave_on_term()\nmeet(2)\nif RANK == ATTEMPT % 2:\n    sys.exit(3)\nstay()"
    )
    launches = [nodes.start(script) for _ in range(2)]
    assert [each.wait() for each in launches] == [3, 3]
    assert told(*launches) == ["0 2 0 0", "0 2 0 1", "0 2 0 2", "1 2 1 0", "1 2 1 1", "1 2 1 2"]


def test_progress_of_the_node_that_fails_counts(fleetrun: Fleetrun):
    """Each of three restarts comes after a later step than all before, whichever node fails; a fourth not."""
    nodes = Nodes(fleetrun, "--nnodes", "2", "--max_restart", "1")
    script = fleetrun.script(
        TELL
        + """
from trainers import progress
progress.report(step=100 * min(ATTEMPT + 1, 4))
meet(2)
if RANK == ATTEMPT % 2:
    raise ValueError(f"of attempt {ATTEMPT}")
stay()
"""
    )
    launches = [nodes.start(script) for _ in range(2)]
    assert [each.wait() for each in launches] == [1, 1]
    assert len(told(*launches)) == 2 * 5, launches
    assert all("--max_restart is 1" in " ".join(each.err.split()) for each in launches), launches


def test_ctrl_c_on_one_node_ends_all(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script('tell("ready", os.getpid())\nleave_on_term()\nstay()')
    first, second = nodes.start(script), nodes.start(script)
    first.until_ready(1)
    second.until_ready(1)
    second.send(signal.SIGINT)
    assert [first.wait(), second.wait()] == [130, 130]
    for each in (first, second):
        assert re.search(r"Pod stopped: \w+, node \d, .*: interrupted, exit code 130", each.err), each
        assert "====" not in each.err  # a report would be about a failure


@pytest.mark.parametrize("victim", [0, 1])
def test_a_launcher_that_is_killed_is_missed_by_the_other(fleetrun: Fleetrun, victim: int):
    """Of the two, 0 serves the store."""
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script('tell("ready", os.getpid())\nleave_on_term()\nstay()')
    launches = [nodes.start(script)]
    launches[0].until_err("waiting")
    launches.append(nodes.start(script))
    for each in launches:
        each.until_ready(1)
    launches[victim].send(signal.SIGKILL)  # the guard; the launcher ends itself then
    launches[victim].wait()
    other = launches[1 - victim]
    assert other.wait() == 125, other
    assert re.search(rf"node {victim}, .*: .*guard", other.err), other


def test_a_launcher_that_ends_at_once_is_said_to_have_ended(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script('tell("ready", os.getpid())\nleave_on_term()\nstay()')
    first = nodes.start(script)
    first.until_err("waiting")
    second = nodes.start(script)
    for each in (first, second):
        each.until_ready(1)
    os.kill(second.launcher, signal.SIGKILL)
    second.wait()
    assert first.wait() == 125, first
    assert "its launcher has ended" in first.said, first
    assert "sent no heartbeat" not in first.said, first


def test_a_third_node_of_a_full_job_is_told_so_and_disturbs_nobody(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script('tell("ready", os.getpid())\nwait_for_go()')
    launches = [nodes.start(script) for _ in range(2)]
    for each in launches:
        each.until_ready(1)
    third = nodes.start(script)
    assert third.wait() == 123
    assert "2 of 2 nodes" in third.err
    for each in launches:
        each.go()
    assert [each.wait() for each in launches] == [0, 0]


@pytest.mark.parametrize(
    ("words", "nodes"),
    [
        (["--nnodes", "3"], 3),
        (["--nnodes", "2:4", "--master", "127.0.0.1:6768", "--rank", "1"], 4),
        (["--ips", "127.0.0.1,127.0.0.2", "--host", "127.0.0.1"], 2),
    ],
)
def test_a_dry_run_shows_the_plan_and_meets_nobody(fleetrun: Fleetrun, words: list[str], nodes: int):
    launch = fleetrun.run(*words, "--dry_run", "--json", fleetrun.script("tell('ran')"))
    assert launch.code == 0, launch
    variables = json.loads(launch.out)["containers"][0]["environment"]
    assert len(set(variables["PADDLE_TRAINER_ENDPOINTS"].split(","))) == nodes
    assert not launch.told("ran")


def test_who_is_missing_is_named_when_the_time_is_up(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "3", "--rdzv_timeout", "1")
    script = fleetrun.script("tell('ran')")
    first = nodes.start("--rank", "0", script)
    assert first.wait() == 124
    assert re.search(r"1 of 3 nodes .*1 s.* 1, 2", first.err), first
    assert not first.told("ran")


def test_options_that_differ_are_shown_with_their_nodes(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script("tell('ran')")
    launches = [nodes.start("--max_restart", number, script) for number in ("3", "5")]
    assert [each.wait() for each in launches] == [2, 2]
    for each in launches:
        assert re.search(r"--max_restart .*[35] on .*[35] on ", each.err), each
        assert not each.told("ran")


def test_a_secret_keeps_strangers_out(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script(TELL + "wait_for_go()")
    secret = {"FLEETRUN_TOKEN": "sixteen characters at least"}
    first = nodes.start(script, env=secret)
    first.until_err("waiting")
    for wrong in ({}, {"FLEETRUN_TOKEN": "another secret of sixteen"}):
        stranger = nodes.start(script, env=wrong)
        assert stranger.wait() == 125, stranger
        assert "FLEETRUN_TOKEN" in stranger.err
        assert "sixteen characters" not in stranger.err
    (fleetrun.folder / "token").write_text("sixteen characters at least\n")
    (fleetrun.folder / "token").chmod(0o600)
    second = nodes.start("--token_file", "token", script)
    second.until_told(" at ")
    for each in (first, second):
        each.go()
    assert [first.wait(), second.wait()] == [0, 0]


def test_an_elastic_job_grows_and_shrinks(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "1:2", "--elastic_timeout", "1")
    script = fleetrun.script(TELL + "leave_on_term()\nwait_for_go()")
    first = nodes.start(script)
    first.until_told(" at 0 1 0 0")
    second = nodes.start(script)
    second.until_told(" at 1 2 1 1")
    first.until_told(" at 0 2 0 1")
    second.send(signal.SIGTERM)
    assert second.wait() == 143
    first.until_told(" at 0 1 0 2")
    assert re.search(r"node 1, .*: got SIGTERM", first.err), first
    first.go()
    assert first.wait() == 0


def test_with_level_0_a_node_that_fails_leaves_and_all_are_told_so(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--elastic_level", "0", "--elastic_timeout", "1")
    script = fleetrun.script("leave_on_term()\nif RANK == 1:\n    sys.exit(3)\nstay()")
    launches = [nodes.start(script) for _ in range(2)]
    assert sorted(each.wait() for each in launches) == [3, 124]
    for each in launches:
        assert "wait for a replacement" in each.err, each


def test_the_wait_for_another_node_is_noted_and_that_of_a_restart_is_not(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--elastic_level", "1", "--heartbeat_timeout", "2")
    script = fleetrun.script(
        TELL
        + """
if RANK == 0:
    from trainers import progress
    progress.report(step=ATTEMPT + 1)
if ATTEMPT == 0:
    leave_on_term()
    stay()
if ATTEMPT == 1:
    meet(2)
    sys.exit(3)
"""
    )
    first = nodes.start("--rank", "0", script)
    first.until_err("waiting")
    second = nodes.start("--rank", "1", script)
    second.until_told(" ready")
    first.until_told(" ready")
    os.kill(second.launcher, signal.SIGKILL)
    assert second.wait() == 125
    first.until_err("1 of 2 nodes have joined; waiting up to 30 s more")
    third = nodes.start("--rank", "1", script)
    assert [first.wait(), third.wait()] == [0, 0], (first, third)
    assert [line.split()[3] for line in told(first)] == ["0", "1", "2"]
    for number, waits in ((1, 1), (3, 0)):
        (record,) = Path(fleetrun.folder, f"log/{number}").glob("*.events.jsonl")
        events = [json.loads(line) for line in record.read_text().splitlines()]
        assert [each["present"] for each in events if "present" in each] == [1] * waits
        assert events[-1]["goodput"]["seconds"]["waiting for nodes"] > 0


def test_a_job_without_a_trainer_does_nothing_on_any_node(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--server_num", "1", "--worker_num", "0")
    script = fleetrun.script("tell('ran')")
    launches = [nodes.start(script) for _ in range(2)]
    assert [each.wait() for each in launches] == [2, 2]
    for each in launches:
        assert "--trainer_num 1" in each.said, each
        assert not each.told("ran")


def test_an_elastic_job_ends_with_the_node_that_serves_its_meeting_point(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "1:2", "--elastic_timeout", "100")
    script = fleetrun.script(TELL + "leave_on_term()\nstay()")
    first = nodes.start(script)
    first.until_err("1 node ")
    second = nodes.start(script)
    second.until_told(" at 1 2 1 0")
    first.send(signal.SIGTERM)
    assert [first.wait(), second.wait()] == [143, 143]
    assert "got SIGTERM" in second.err
    assert len(told(second)) == 1


def test_the_node_that_serves_the_meeting_point_waits_for_one_that_stands_still(fleetrun: Fleetrun):
    """Longer than for a slow reader, who has a second: an alarm ends that, and is no signal to the job."""
    nodes = Nodes(fleetrun, "--nnodes", "2")
    script = fleetrun.script(TELL + "leave_on_term()\nstay()")
    first = nodes.start(script)
    first.until_err("waiting")
    second = nodes.start(script)
    for each in (first, second):
        each.until_told(" at ")
    os.kill(launcher := second.launcher, signal.SIGSTOP)
    began = time.monotonic()
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    assert time.monotonic() - began >= CLOSE_TIMEOUT
    assert "SIGALRM" not in first.err
    os.kill(launcher, signal.SIGCONT)
    assert second.wait() in (143, 125), "125: it stood still until nobody was there to tell it more"


def test_without_a_master_the_first_node_prints_the_command_for_the_others(fleetrun: Fleetrun):
    script = fleetrun.script(TELL)
    first = fleetrun.start(
        "--nnodes", "2", "--host", "127.0.0.1", *SOON, script, env={"PADDLE_MAX_RESTART": "1"}
    )
    first.until_err("fleetrun --master=")
    (line,) = re.findall(r"^ +(fleetrun --master=.*)$", first.err, re.MULTILINE)
    assert "--max_restart=1" in line
    second = fleetrun.start(*line.split()[1:])
    assert [first.wait(), second.wait()] == [0, 0]
    assert told(first, second) == ["0 2 0 0", "1 2 1 0"]


def test_servers_serve_the_trainers_of_all_nodes(fleetrun: Fleetrun):
    """A server leaves when the last trainer anywhere has ended."""
    nodes = Nodes(fleetrun, "--nnodes", "2", "--worker_num", "1")
    script = fleetrun.script("""
tell("at", os.environ["TRAINING_ROLE"], os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].count(":"), SIZE)
leave_on_term()
if os.environ["TRAINING_ROLE"] == "PSERVER":
    stay()
if os.environ["GROUP_RANK"] == "1":
    wait_for_go()
""")
    first = nodes.start("--server_num", "1", script)
    first.until_err("waiting")
    second = nodes.start("--server_num", "0", script)
    first.until_told(" at ", 2)
    second.until_told(" at ")
    second.go()
    assert [first.wait(), second.wait()] == [0, 0]
    assert told(first, second) == ["PSERVER 1 2", "TRAINER 1 2", "TRAINER 1 2"]


def test_a_port_that_another_program_holds_is_no_meeting_point(fleetrun: Fleetrun):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = fleetrun.run("--nnodes", "2", "--master", f"127.0.0.1:{port}", fleetrun.script(""))
    assert launch.code == 125
    assert f"127.0.0.1:{port}" in launch.err
    assert "is taken" in launch.err


def test_ranks_by_address(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--sort_ip")
    script = fleetrun.script(TELL)
    first = nodes.start("--host", "127.0.0.10", script)
    first.until_err("waiting")
    second = nodes.start("--host", "127.0.0.9", script)
    assert [first.wait(), second.wait()] == [0, 0]
    assert (told(first), told(second)) == (["1 2 1 0"], ["0 2 0 0"])


def test_what_is_open_to_everybody_is_said_in_one_line(fleetrun: Fleetrun):
    """Of an address that others reach, where there is no secret."""
    own = addresses()[0]
    if own in ("127.0.0.1", "::1"):
        pytest.skip("this machine has no address but loopback")
    words = ("--nnodes", "2", "--host", own, "--rdzv_timeout", "0.5", fleetrun.script(""))
    open_ = fleetrun.run(*words)
    assert open_.err.count("no token is set") == 1, open_
    closed = fleetrun.run(*words, env={"FLEETRUN_TOKEN": "sixteen characters at least"})
    assert "no token is set" not in closed.err
    assert (open_.code, closed.code) == (124, 124)


WAITING = "this node waits as a spare"


def test_a_spare_takes_the_place_of_a_lost_node(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--spares", "1", "--heartbeat_timeout", "2")
    script = fleetrun.script(f"{TELL}\nif ATTEMPT < 1:\n    leave_on_term()\n    stay()")
    first = nodes.start("--rank", "0", script)
    first.until_err("waiting")
    second = nodes.start("--rank", "1", script)
    second.until_told(" ready")
    spare = nodes.start("--rank", "2", script)
    spare.until_err(WAITING)
    late = nodes.start(script)
    assert late.wait() == 123
    assert "the job is full: 2 of 2 nodes are running" in late.said
    assert "1 spare waits" in late.said
    os.kill(second.launcher, signal.SIGKILL)
    assert second.wait() == 125
    assert [first.wait(), spare.wait()] == [0, 0], (first, spare)
    assert told(first) == ["0 2 0 0", "0 2 0 1"]
    assert told(spare) == ["1 2 1 1"]


def test_a_spare_that_is_not_needed_ends_with_the_job(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--spares", "2")
    script = fleetrun.script(f"{TELL}\ntell('ready', os.getpid())\nwait_for_go()\nsys.exit(int(sys.argv[1]))")
    for code in (0, 3):
        launches = [nodes.start("--max_restart", "0", script, str(code)) for _ in range(3)]
        (spare,) = until_one_waits(launches)
        for each in launches:
            each.go()
        assert [each.wait() for each in launches] == [code] * 3, launches
        assert spare.told(" at ") == []
        assert ("completed without this spare" in spare.err) == (code == 0)


def until_one_waits(launches: list[Launch]) -> list[Launch]:
    wait_until(lambda: any(WAITING in each.err for each in launches))
    return [each for each in launches if WAITING in each.err]


def test_without_a_spare_left_the_loss_of_a_node_ends_the_job(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--spares", "1", "--heartbeat_timeout", "2")
    script = fleetrun.script(f"{TELL}\nleave_on_term()\nstay()")
    first = nodes.start(script)
    first.until_err("waiting")
    second = nodes.start(script)
    second.until_told(" ready")
    os.kill(second.launcher, signal.SIGKILL)
    assert [first.wait(), second.wait()] == [125, 125]
    assert "is lost" in first.said


def broken_check(fleetrun: Fleetrun, name: str) -> dict[str, str]:
    """The environment of a machine of this name, on which the process of the check exits with 9."""
    file = Path(fleetrun.folder, "broken", "sitecustomize.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("import os, sys\nif 'fleetrun.doctor.check' in sys.orig_argv:\n    os._exit(9)\n")
    return {"FLEETRUN_NODE_NAME": name, "PYTHONPATH": str(file.parent)}


def test_a_machine_that_its_check_finds_broken_does_not_start(fleetrun: Fleetrun):
    """While it has its second turn one of the others has nothing to do."""
    nodes = Nodes(fleetrun, "--nnodes", "3", "--spares", "1", "--check", "fast")
    script = fleetrun.script(f"{TELL}tell('ready', os.getpid())\nwait_for_go()")
    good = [
        nodes.start("--rank", str(rank), script, env={"FLEETRUN_NODE_NAME": f"m{rank}"}) for rank in (0, 1)
    ]
    good[0].until_err("waiting")
    bad = nodes.start("--rank", "2", script, env=broken_check(fleetrun, "bad"))
    bad.until_err("checking this node")
    good.append(nodes.start(script, env={"FLEETRUN_NODE_NAME": "spare"}))
    assert bad.wait() == 123
    assert (
        "bad is excluded from this job after 2 faults: check 1 of 2: the check exited with code 9" in bad.said
    )
    for each in good:
        each.go()
    assert [each.wait() for each in good] == [0, 0, 0], good
    assert told(*good) == ["0 3 0 0", "1 3 1 0", "2 3 2 0"]


def test_a_spare_that_its_check_finds_broken_makes_room_for_another(fleetrun: Fleetrun):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--spares", "1", "--check", "fast")
    script = fleetrun.script(f"{TELL}tell('ready', os.getpid())\nwait_for_go()")
    launches = [nodes.start(script, env={"FLEETRUN_NODE_NAME": name}) for name in ("one", "two")]
    for each in launches:
        each.until_told(" ready")
    bad = nodes.start(script, env=broken_check(fleetrun, "bad"))
    assert bad.wait() == 123
    assert WAITING in bad.err
    assert (
        "bad is excluded from this job after 2 faults: check 1 of 2: the check exited with code 9" in bad.said
    )
    spare = nodes.start(script, env={"FLEETRUN_NODE_NAME": "spare"})
    spare.until_err(WAITING)
    for each in (*launches, spare):
        each.go()
    assert [each.wait() for each in (*launches, spare)] == [0, 0, 0], (*launches, spare)
    assert "warning" not in spare.err


def test_a_bad_machine_is_left_out_and_taken_back_when_it_was_repaired(fleetrun: Fleetrun):
    nodes = Nodes(
        fleetrun, "--nnodes", "2", "--spares", "1", "--exclude_after", "1", "--heartbeat_timeout", "2"
    )
    script = fleetrun.script(f"{TELL}\nif ATTEMPT < 1:\n    leave_on_term()\n    stay()\nwait_for_go()")
    good = nodes.start("--rank", "0", script, env={"FLEETRUN_NODE_NAME": "good"})
    good.until_err("waiting")
    bad = nodes.start("--rank", "1", script, env={"FLEETRUN_NODE_NAME": "bad"})
    bad.until_told(" ready")
    spare = nodes.start(script, env={"FLEETRUN_NODE_NAME": "spare"})
    spare.until_err(WAITING)
    os.kill(bad.launcher, signal.SIGKILL)
    spare.until_told(" at ")
    again = nodes.start(script, env={"FLEETRUN_NODE_NAME": "bad"})
    assert again.wait() == 123
    assert re.search(r"bad is excluded from this job after 1 fault: .* is lost", again.said), again.said
    assert "bad has 1 fault: jobs exclude this node if enough other nodes remain" in good.err
    for each in (good, spare):
        each.go()
    assert [good.wait(), spare.wait()] == [0, 0]
    for log_dir in ("log/1", "log/3"):  # of both machines that were there to the end
        listed = fleetrun.run("nodes", "--json", "--log_dir", log_dir)
        (row,) = json.loads(listed.out)
        assert (row["machine"], row["left_out"], len(row["faults"])) == ("bad", True, 1)
    assert re.match(
        r"NODE +FAULTS +STATE +LAST +WHAT\nbad +1 +excluded +",
        fleetrun.run("nodes", "--log_dir", "log/1").out,
    )
    assert (
        fleetrun.run("nodes", "--log_dir", "log/1", "--reset", "bat").err.count("Nodes with faults: bad") == 1
    )
    assert fleetrun.run("nodes", "--log_dir", "log/1", "--reset", "bad").code == 0
    assert fleetrun.run("nodes", "--log_dir", "log/1", "--json").out == "[]\n"


@pytest.mark.parametrize("kills", [(1, 0, 1, 1), (1, 1)])
def test_two_kills_leave_a_machine_out_but_not_where_others_have_them_too(
    fleetrun: Fleetrun, kills: tuple[int, ...]
):
    nodes = Nodes(fleetrun, "--nnodes", "2", "--spares", "1", "--max_restart", "9")
    script = fleetrun.script(
        f"{TELL}\nwhile not os.path.exists('begin'):\n    time.sleep(0.01)\n"
        f"if ATTEMPT < {len(kills)} and RANK == {kills}[ATTEMPT]:\n    os.kill(os.getpid(), 9)\n"
        f"leave_on_term()\nif ATTEMPT < {len(kills)}:\n    stay()"
    )
    names = ("good", "bad", "spare")
    launches = []
    for rank, name in enumerate(names):
        launches.append(nodes.start("--rank", str(rank), script, env={"FLEETRUN_NODE_NAME": name}))
        launches[-1].until_err(WAITING if name == "spare" else "waiting" if rank == 0 else "Node 1")
    (fleetrun.folder / "begin").touch()
    good, bad, spare = launches
    left_out = 0 not in kills
    assert [each.wait() for each in launches] == [0, 123 if left_out else 0, 0]
    last = f"1 2 1 {len(kills)}"
    assert told(good)[-1] == f"0 2 0 {len(kills)}"
    assert told(spare if left_out else bad)[-1] == last
    if left_out:
        why = r"bad is excluded from this job after 2 faults: .*SIGKILL.*SIGKILL"
        assert re.search(why, bad.said), bad.said

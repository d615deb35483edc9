"""Servers and trainers: who decides the result, who waits for whom, and what a server's end means."""

import signal

import pytest

from fleetrun.pod.supervisor import SERVERS_LEAVE
from tests.support.command import Fleetrun
from tests.support.traces import left_behind

ONCE = ("--max_restart", "0")
ONE_AND_TWO = ("--server_num", "1", "--trainer_num", "2")


@pytest.mark.slow
@pytest.mark.quick
def test_servers_are_asked_to_leave_when_all_trainers_have_ended(fleetrun: Fleetrun):
    script = fleetrun.script("""
if WHO.startswith("ps"):
    leave_on_term()
    stay()
wait_for_go()
""")
    launch = fleetrun.start("--server_num", "2", "--trainer_num", "2", "--stop_timeout", "100", script)
    launch.until_ready(2)
    launch.go()
    assert launch.wait() == 0, launch
    assert sorted(launch.told("got")) == ["ps.0 got SIGTERM", "ps.1 got SIGTERM"]
    assert "First failure" not in launch.err


SERVES = """
import socket
host, port = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].split(":")
if WHO == "ps.0":
    serving = socket.create_server((host, int(port)))
    taken, _ = serving.accept()
    taken.recv(1)  # until the trainer has gone
    {end}
else:
    while True:
        try:
            talk = socket.create_connection((host, int(port)))
            break
        except OSError:
            os.sched_yield()
"""


@pytest.mark.parametrize(
    ("body", "warned"),
    [
        ("WHO == 'ps.0' and stay()", True),
        ("tell('trained')", True),
        (SERVES.format(end="stay()"), False),
        (SERVES.format(end="taken.close()"), False),
    ],
    ids=["stays", "trains", "serves", "serves and ends"],
)
def test_a_server_that_never_listened_is_told(fleetrun: Fleetrun, body: str, warned: bool):
    launch = fleetrun.run(*ONCE, "--server_num", "1", "--trainer_num", "1", fleetrun.script(body))
    assert launch.code == 0, launch
    assert ("WARNING" in launch.err and "run_server" in launch.err) is warned, launch


@pytest.mark.slow
@pytest.mark.parametrize("body", ["ignore(signal.SIGTERM)", "leave_on_term(9)"])
def test_a_server_that_leaves_badly_then_does_not_matter(fleetrun: Fleetrun, body: str):
    script = fleetrun.script(f"if WHO == 'ps.0':\n    {body}\n    stay()\nwait_for_go()")
    launch = fleetrun.start(*ONE_AND_TWO, "--stop_timeout", "0.3", script)
    launch.until_ready(1)
    launch.go()
    assert launch.wait() == 0, launch
    assert not left_behind(launch.token)


def test_servers_that_leave_by_themselves_are_not_disturbed(fleetrun: Fleetrun):
    """For a while: one that takes longer is asked."""
    script = fleetrun.script("""
on(signal.SIGTERM, lambda: (tell("asked", time.monotonic()), os._exit(0)))
publish_pid()
tell("ready", os.getpid())
wait_for_go()
if WHO == "ps.0":
    wait_for_end_of(pid_of("trainer.0"))
    wait_for_end_of(pid_of("trainer.1"))
    tell("saved")
else:
    tell("ends", time.monotonic())
""")
    launch = fleetrun.start(*ONE_AND_TWO, "--stop_timeout", "100", script)
    launch.until_ready(3)
    launch.go()
    assert launch.wait() == 0
    ends, asked = ([float(line.split()[2]) for line in launch.told(word)] for word in (" ends ", " asked "))
    assert all(when >= max(ends) + SERVERS_LEAVE for when in asked)
    assert asked or launch.told("saved") == ["ps.0 saved"]


@pytest.mark.slow
def test_a_server_that_ends_well_but_early_is_a_failure(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\nif WHO != 'ps.0': stay()\n")
    launch = fleetrun.run(*ONCE, *ONE_AND_TWO, script)
    assert launch.code == 1
    report = " ".join(launch.err.split())
    assert "First failure: server 0 exited with code 0" in report


def test_a_server_that_fails_gives_the_job_its_code(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\nif WHO == 'ps.0': os._exit(9)\nstay()")
    launch = fleetrun.run(*ONCE, *ONE_AND_TWO, script)
    assert launch.code == 9
    assert "First failure: server 0 exited with code 9" in launch.err


def test_a_trainer_that_fails_gives_the_job_its_code_and_servers_stop_last(fleetrun: Fleetrun):
    script = fleetrun.script("""
def leave():
    wait_for_end_of(pid_of("trainer.0")) if WHO == "ps.0" else None
    tell("left")
    os._exit(0)
on(signal.SIGTERM, leave)
publish_pid()
if WHO != "trainer.1":
    stay()
tell("ready", os.getpid())
wait_for_go()
os._exit(5)
""")
    launch = fleetrun.start(*ONCE, *ONE_AND_TWO, script)
    launch.until_ready(3)
    launch.go()
    assert launch.wait() == 5
    assert [line.split()[0] for line in launch.told("left")] == ["trainer.0", "ps.0"]
    assert launch.news.index("trainer.0 left") < launch.news.index("ps.0 got SIGTERM")


def test_all_trainers_must_end_well(fleetrun: Fleetrun):
    script = fleetrun.script("""
leave_on_term()
publish_pid()
if WHO == "ps.0":
    stay()
tell("ready", os.getpid())
wait_for_go()
if WHO == "trainer.1":
    wait_for_end_of(pid_of("trainer.0"))
    os._exit(4)
""")
    launch = fleetrun.start(*ONCE, *ONE_AND_TWO, script)
    launch.until_ready(3)
    launch.go()
    assert launch.wait() == 4


def test_sigterm_stops_trainers_before_servers(fleetrun: Fleetrun):
    script = fleetrun.script("""
def leave():
    wait_for_go()
    os._exit(0)
on(signal.SIGTERM, leave)
stay()
""")
    launch = fleetrun.start(*ONE_AND_TWO, "--stop_timeout", "100", script)
    launch.until_ready(3)
    launch.send(signal.SIGTERM)
    launch.until_told("got SIGTERM", 2)
    launch.go()
    assert launch.wait() == 143
    assert [line.split()[0].split(".")[0] for line in launch.told("got")] == ["trainer", "trainer", "ps"]


def test_the_variables_of_each_role(fleetrun: Fleetrun):
    script = fleetrun.script("""
names = ("TRAINING_ROLE", "PADDLE_PORT", "POD_IP", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM",
         "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
tell("env", *(os.environ.get(name, "-") for name in names))
publish_pid()
meet(3)
""")
    launch = fleetrun.run(*ONE_AND_TWO, script)
    told = {line.split()[0]: line.split()[2:] for line in launch.told(" env ")}
    assert {who: words[0] for who, words in told.items()} == {
        "ps.0": "PSERVER",
        "trainer.0": "TRAINER",
        "trainer.1": "TRAINER",
    }
    servers, trainers = told["ps.0"][5].split(","), told["ps.0"][6].split(",")
    assert (len(servers), len(trainers)) == (1, 2)
    assert {who: words[7] for who, words in told.items()} == {
        "ps.0": servers[0],
        "trainer.0": trainers[0],
        "trainer.1": trainers[1],
    }
    assert {who: words[3:5] for who, words in told.items()} == {
        "ps.0": ["-", "2"],
        "trainer.0": ["0", "2"],
        "trainer.1": ["1", "2"],
    }
    for words in told.values():
        assert f"{words[2]}:{words[1]}" == words[7]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("--run_mode", "rpc", "--nproc_per_node", "2"), ["trainer.0", "trainer.1"]),
        (
            ("--server_num", "1", "--trainer_num", "1", "--heter_worker_num", "1;2"),
            ["heter.0", "heter.1", "heter.2", "ps.0", "trainer.0"],
        ),
        (
            ("--server_num", "1", "--trainer_num", "1", "--coordinator_num", "1"),
            ["coordinator.0", "ps.0", "trainer.0"],
        ),
    ],
)
def test_the_other_modes_start_what_they_name(fleetrun: Fleetrun, words: tuple[str, ...], names: list[str]):
    script = fleetrun.script(f"publish_pid()\ntell('here')\nmeet({len(names)})")
    launch = fleetrun.run(*words, script)
    assert launch.code == 0, launch
    assert sorted(line.split()[0] for line in launch.told("here")) == names
    assert sorted(".".join(path.name.split(".")[2:4]) for path in fleetrun.logs()) == names

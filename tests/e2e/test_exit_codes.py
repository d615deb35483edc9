"""The exit code: that of the first failure in time, and what the command itself ends with."""

import signal

import pytest

from tests.support.command import Fleetrun, Launch

ONCE = ("--max_restart", "0")
PATIENT = ("--stop_timeout", "1h")
"""Who tells of its SIGTERM has time to do so."""


def start_two_that_stay(fleetrun: Fleetrun, body: str = "leave_on_term()", *words: str) -> Launch:
    script = fleetrun.script(f"{body}\nstay()\n")
    launch = fleetrun.start(*PATIENT, *words, "--nproc_per_node", "2", script)
    launch.until_ready(2)
    return launch


@pytest.mark.quick
def test_zero_when_every_trainer_ends_with_zero(fleetrun: Fleetrun):
    launch = fleetrun.run("--nproc_per_node", "3", fleetrun.script("tell('here')"))
    assert launch.code == 0, launch
    assert sorted(launch.told("here")) == ["trainer.0 here", "trainer.1 here", "trainer.2 here"]


@pytest.mark.parametrize("code", [1, 3, 77, 255])
def test_that_of_the_trainer_that_failed(fleetrun: Fleetrun, code: int):
    script = fleetrun.script(f"sys.exit({code} if RANK == 1 else 0)")
    assert fleetrun.run(*ONCE, "--nproc_per_node", "2", script).code == code


@pytest.mark.quick
def test_that_of_the_first_failure_though_others_fail_with_other_codes(fleetrun: Fleetrun):
    script = fleetrun.script("""
publish_pid()
leave_on_term(9)
tell("ready", os.getpid())
wait_for_go()
if RANK == 2:
    os._exit(33)
wait_for_end_of(pid_of("trainer.2"))
os._exit(40 + RANK)
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "4", script)
    launch.until_ready(4)
    launch.go()
    assert launch.wait() == 33, launch
    assert "First failure: trainer 2 exited with code 33" in launch.err


@pytest.mark.parametrize(
    "name", ["SIGKILL", "SIGSEGV", "SIGABRT", "SIGTERM", "SIGINT", "SIGUSR1", "SIGRTMIN"]
)
def test_128_and_the_signal_that_ended_a_trainer(fleetrun: Fleetrun, name: str):
    number = signal.Signals[name]
    script = fleetrun.script(f"""
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.signal({number:d}, signal.SIG_DFL) if {number:d} != signal.SIGKILL else None
if RANK == 1:
    os.kill(os.getpid(), {number:d})
leave_on_term()
stay()
""")
    launch = fleetrun.run(*ONCE, "--nproc_per_node", "2", script)
    assert launch.code == 128 + number, launch
    assert f"trainer 1 was killed by {name}" in launch.err
    assert ("peak memory" in launch.err) == (name == "SIGKILL")


@pytest.mark.parametrize(
    ("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129), ("SIGQUIT", 131), ("SIGALRM", 142)]
)
def test_of_the_signal_that_the_command_got(fleetrun: Fleetrun, name: str, code: int):
    launch = start_two_that_stay(fleetrun, "leave_on_term()\non(signal.SIGINT, lambda: os._exit(0))")
    launch.send(signal.Signals[name])
    assert launch.wait() == code, launch
    assert len(launch.told("got SIGINT" if name == "SIGINT" else "got SIGTERM")) == 2
    assert ("interrupted" if name == "SIGINT" else f"got {name}") in launch.err
    assert "First failure" not in launch.err


@pytest.mark.parametrize(
    "ending", ["sys.exit(5)", "os.kill(os.getpid(), signal.SIGKILL)", "raise ValueError"]
)
def test_143_even_if_trainers_fail_while_they_are_stopped(fleetrun: Fleetrun, ending: str):
    launch = start_two_that_stay(fleetrun, f"def end(): {ending}\non(signal.SIGTERM, end)")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch


def test_124_when_the_job_takes_longer_than_its_timeout(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\nstay()")
    launch = fleetrun.run("--timeout", "0.4", "--nproc_per_node", "2", script)
    assert launch.code == 124, launch
    assert "--timeout 0.4 s" in launch.err


def test_the_timeout_of_a_job_that_is_in_time_does_nothing(fleetrun: Fleetrun):
    assert fleetrun.run("--timeout", "1h", fleetrun.script("pass")).code == 0


@pytest.mark.parametrize("code", [2, 126, 127])
def test_a_script_may_end_with_a_code_that_means_something_to_shells(fleetrun: Fleetrun, code: int):
    launch = fleetrun.run(fleetrun.script(f"tell('here')\nsys.exit({code})"))
    assert launch.code == code
    assert len(launch.told("here")) == 1


@pytest.mark.quick
def test_the_others_are_told_to_stop_when_one_fails(fleetrun: Fleetrun):
    script = fleetrun.script("""
leave_on_term()
if RANK != 1:
    stay()
tell("ready", os.getpid())
wait_for_go()
sys.exit(6)
""")
    launch = fleetrun.start(*ONCE, *PATIENT, "--nproc_per_node", "4", script)
    launch.until_ready(4)
    launch.go()
    assert launch.wait() == 6
    others = ["trainer.0 got SIGTERM", "trainer.2 got SIGTERM", "trainer.3 got SIGTERM"]
    assert sorted(launch.told("got SIGTERM")) == others


def test_one_that_ends_early_and_well_does_not_disturb_the_rest(fleetrun: Fleetrun):
    script = fleetrun.script("""
publish_pid()
tell("ready", os.getpid())
wait_for_go()
if RANK:
    wait_for_end_of(pid_of("trainer.0"))
    tell("still here")
""")
    launch = fleetrun.start("--nproc_per_node", "2", script)
    launch.until_ready(2)
    launch.go()
    assert launch.wait() == 0
    assert launch.told("still here") == ["trainer.1 still here"]

"""Whoever is killed, and however: nothing outlives the command. Here at chosen moments of its life."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.traces import left_behind, port_names, state_of, wait_until

STUBBORN = """
ignore(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
tell("endpoints", os.environ["PADDLE_TRAINER_ENDPOINTS"])
helper("ignore(signal.SIGTERM, signal.SIGHUP)\\nstay()", start_new_session=True)
stay()
"""


def start_stubborn(fleetrun: Fleetrun, *words: str, processes: int = 2) -> Launch:
    """Processes that ignore what can be ignored, each with a child in a session of its own."""
    script = fleetrun.script(STUBBORN)
    launch = fleetrun.start(*words, "--nproc_per_node", str(processes), script)
    launch.until_ready(2 * processes)
    return launch


def endpoints(launch: Launch) -> list[str]:
    return launch.told(" endpoints ")[0].split()[2].split(",")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL"])
def test_the_command_is_killed(fleetrun: Fleetrun, name: str):
    launch = start_stubborn(fleetrun)
    ports = endpoints(launch)
    assert len(port_names(ports)) == 2
    launch.send(signal.Signals[name])
    assert launch.wait() == -signal.Signals[name]
    launch.gone()
    wait_until(lambda: not port_names(ports))


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGSYS"])
def test_its_child_is_killed_and_the_command_says_so(fleetrun: Fleetrun, name: str):
    launch = start_stubborn(fleetrun)
    ports = endpoints(launch)
    os.kill(launch.launcher, signal.Signals[name])
    assert launch.wait() == 125
    assert not left_behind(launch.token), "the guard left before all was gone"
    assert not port_names(ports)
    assert (
        f"fleetrun: error: the launcher was killed by {name}; the 4 processes below it were ended"
        in launch.err
    )


def test_the_child_is_killed_with_many_processes_below(fleetrun: Fleetrun):
    launch = start_stubborn(fleetrun, processes=16)
    os.kill(launch.launcher, signal.SIGKILL)
    assert launch.wait() == 125
    assert not left_behind(launch.token)


def test_the_command_is_killed_while_its_child_is_stopped(fleetrun: Fleetrun):
    launch = start_stubborn(fleetrun)
    launcher = launch.launcher
    os.kill(launcher, signal.SIGSTOP)
    wait_until(lambda: state_of(launcher) == "T")
    launch.send(signal.SIGKILL)
    launch.wait()
    os.kill(launcher, signal.SIGCONT)
    launch.gone()


def test_the_command_is_killed_between_two_attempts(fleetrun: Fleetrun):
    """The job would never end by itself, though the signal came late."""
    launch = fleetrun.start(fleetrun.script("stay() if ATTEMPT == 2 else sys.exit(7)"))
    launch.until_err("restart 2 of 3")
    launch.send(signal.SIGKILL)
    launch.wait()
    launch.gone()


@pytest.mark.parametrize("victim", ["command", "child"])
def test_it_is_killed_while_it_stops_the_job(fleetrun: Fleetrun, victim: str):
    launch = start_stubborn(fleetrun, "--stop_timeout", "10m")
    launch.send(signal.SIGTERM)
    launch.until_err("got SIGTERM")
    os.kill(launch.popen.pid if victim == "command" else launch.launcher, signal.SIGKILL)
    launch.wait()
    launch.gone()


@pytest.mark.parametrize("victim", ["command", "child"])
def test_it_is_killed_while_its_output_waits_for_a_reader(fleetrun: Fleetrun, victim: str):
    """At the very end: the job is over, only its last lines have not been read."""
    read, write = os.pipe()
    script = fleetrun.script("tell('ready', os.getpid())\nprint('x' * 99 + '\\n' * 100_000)\ntell('written')")
    launch = fleetrun.start("--follow", "all", script, stdout=write)
    os.close(write)
    (trainer,) = launch.until_ready(1)
    wait_until(lambda: not Path(f"/proc/{trainer}").exists())
    os.kill(launch.popen.pid if victim == "command" else launch.launcher, signal.SIGKILL)
    launch.wait()
    launch.gone()
    os.close(read)


def test_the_command_is_killed_before_its_child_knows_what_to_do(fleetrun: Fleetrun):
    """In the milliseconds in which Python still imports."""
    launch = fleetrun.start(fleetrun.script("stay()"))

    def forked() -> bool:
        pid = launch.popen.pid
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    wait_until(forked)
    launch.send(signal.SIGKILL)
    launch.wait()
    launch.gone()


def test_the_log_tells_what_the_scripts_wrote_up_to_the_end(fleetrun: Fleetrun):
    script = fleetrun.script("""
print("half a line", end="", flush=True)
tell("ready", os.getpid())
wait_for_go()
""")
    launch = fleetrun.start(script)
    launch.until_ready(1)
    os.kill(launch.launcher, signal.SIGKILL)
    launch.wait()
    assert fleetrun.log("trainer.0") == "half a line"


def test_only_the_files_in_the_log_directory_remain(fleetrun: Fleetrun):
    temporary = fleetrun.folder / "tmp"
    temporary.mkdir()
    script = fleetrun.script(STUBBORN)
    launch = fleetrun.start("--nproc_per_node", "2", script, env={"TMPDIR": str(temporary)})
    launch.until_ready(4)
    launch.send(signal.SIGKILL)
    launch.wait()
    launch.gone()
    assert not list(temporary.iterdir())
    left = {path.name.split(".")[-1] for path in (fleetrun.folder / "log").iterdir()}
    assert left <= {"log", "latest", "json", "jsonl", "marks"} | {
        path.name.split(".")[-1] for path in fleetrun.logs(".latest.*")
    }


def test_python_that_cannot_import_fleetrun_any_more_leaves_nothing(fleetrun: Fleetrun):
    """An exception in the launcher itself, as from a broken installation."""
    (fleetrun.folder / "heapq.py").write_text("raise RuntimeError('broken installation')\n")
    launch = fleetrun.run(fleetrun.script("stay()"))
    assert launch.code == 125
    assert "RuntimeError: broken installation" in launch.err

"""What scripts leave behind: daemons, grandchildren in sessions of their own, the deaf, crowds."""

import json
import os
import re
import signal

import pytest

from fleetrun.pod.stopping import STRAYS_LEAVE
from tests.support.command import Fleetrun
from tests.support.traces import left_behind, state_of, wait_until

ONCE = ("--max_restart", "0")


def test_a_daemon_in_its_own_session_ends_with_the_job(fleetrun: Fleetrun):
    script = fleetrun.script("""
helper('''leave_on_term()
alive = Path(f"alive.{RANK}")
alive.touch()
tell("ready", os.getpid())
while True:
    alive.touch()
    time.sleep(0.01)
''', start_new_session=True)
wait_for_go()
""")
    launch = fleetrun.start("--nproc_per_node", "2", script)
    launch.until_ready(2)
    launch.go()
    assert launch.wait() == 0
    assert not left_behind(launch.token)
    assert re.search(r"ended 2 stray processes", launch.err), launch
    (record,) = fleetrun.logs("*.events.jsonl")
    over = json.loads(record.read_text().splitlines()[-1])["time"]
    for rank in (0, 1):
        stood_still = over - (fleetrun.folder / f"alive.{rank}").stat().st_mtime > 0.8 * STRAYS_LEAVE
        assert stood_still or launch.told(f"trainer.{rank} got SIGTERM"), "asked before it is killed"


@pytest.mark.parametrize("ending", ["pass", "sys.exit(3)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_proper_daemon_ends_with_the_job_however_the_script_ends(fleetrun: Fleetrun, ending: str):
    script = fleetrun.script(f"""
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.chdir("/")
    os.closerange(0, 100)
    ignore(signal.SIGTERM, signal.SIGHUP)
    stay()
wait_for_go()
{ending}
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "2", script)
    launch.until_ready(2)
    launch.go()
    launch.wait()
    assert not left_behind(launch.token)


def test_one_without_the_variables_of_the_job_too(fleetrun: Fleetrun):
    """A cleared environment hides it from a search, not from its ancestors."""
    script = fleetrun.script("""
code = "import os, signal; os.write(1, str(os.getpid()).encode()); os.close(1); signal.pause()"
options = {"env": {}, "start_new_session": True, "stdout": subprocess.PIPE}
tell("ready", subprocess.Popen([sys.executable, "-c", code], **options).stdout.read().decode())
""")
    launch = fleetrun.run(script)
    (daemon,) = launch.until_ready(1)
    with pytest.raises(ProcessLookupError):
        os.kill(daemon, 0)


def test_seven_of_eight_that_ignore_sigterm_and_their_children(fleetrun: Fleetrun):
    script = fleetrun.script("""
if RANK == 3:
    tell("ready", os.getpid())
    wait_for_go()
    sys.exit(5)
ignore(signal.SIGTERM, signal.SIGINT)
helper("ignore(signal.SIGTERM, signal.SIGINT)\\nstay()")
helper("ignore(signal.SIGTERM, signal.SIGINT)\\nstay()", start_new_session=True)
stay()
""")
    launch = fleetrun.start(*ONCE, "--stop_timeout", "0.5", "--nproc_per_node", "8", script)
    launch.until_ready(22)
    launch.go()
    assert launch.wait() == 5
    assert not left_behind(launch.token)


def test_who_left_the_group_is_asked_together_with_it(fleetrun: Fleetrun):
    """And not only when the ladder has come to its end."""
    script = fleetrun.script("""
ignore(signal.SIGTERM)
helper("leave_on_term()\\nstay()", start_new_session=True)
stay()
""")
    launch = fleetrun.start("--stop_timeout", "1000", "--nproc_per_node", "1", script)
    launch.until_ready(2)
    launch.send(signal.SIGTERM)
    launch.until_told("got SIGTERM")
    launch.send(signal.SIGINT)
    assert launch.wait() == 143


def test_a_stopped_process_is_ended_too(fleetrun: Fleetrun):
    script = fleetrun.script("""
leave_on_term()
tell("ready", os.getpid())
os.kill(os.getpid(), signal.SIGSTOP)
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--stop_timeout", "100", script)
    pids = launch.until_ready(2)
    wait_until(lambda: all(state_of(pid) == "T" for pid in pids), "stopped")
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143
    assert len(launch.told("got SIGTERM")) == 2


def test_data_loaders_end_with_the_trainer_that_was_killed(fleetrun: Fleetrun):
    script = fleetrun.script("""
if RANK == 0:
    for _ in range(4):
        helper("ignore(signal.SIGTERM)\\nstay()")
    wait_for_go()
    os.kill(os.getpid(), signal.SIGKILL)
leave_on_term()
stay()
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "2", script)
    launch.until_ready(5)
    launch.go()
    assert launch.wait() == 137
    assert not left_behind(launch.token)


CROWD = """
import struct
ignore(signal.SIGTERM)
left = int(sys.argv[1])
def breed(left):

    for share in (left // 2, left - left // 2):
        if share > 0 and os.fork() == 0:
            if share % 3 == 0:
                os.setsid()
            breed(share - 1)
            stay()
breed(left)
{ending}
"""


@pytest.mark.parametrize("ending", ["stay()", "wait_for_go(); sys.exit(3)"])
def test_a_crowd_of_two_hundred(fleetrun: Fleetrun, ending: str):
    script = fleetrun.script(CROWD.format(all=200, ending=ending))
    launch = fleetrun.start(*ONCE, "--stop_timeout", "0.2", script, "200")
    launch.until_ready(200)
    if "go" in ending:
        launch.go()
        assert launch.wait() == 3
    else:
        launch.send(signal.SIGTERM)
        assert launch.wait() == 143
    assert not left_behind(launch.token)


def test_a_crowd_that_grows_while_it_is_hunted(fleetrun: Fleetrun):
    """Each of twenty replaces itself as fast as it can, and would for ever; at most forty at a time."""
    script = fleetrun.script("""
ignore(signal.SIGTERM, signal.SIGCHLD)
for _ in range(20):
    if os.fork() == 0:
        os.setsid()
        tell("ready", os.getpid())
        while True:
            if os.fork():
                os._exit(0)
wait_for_go()
""")
    launch = fleetrun.start(*ONCE, script)
    launch.until_ready(20)
    launch.go()
    assert launch.wait() == 0
    launch.gone()

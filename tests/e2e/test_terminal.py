"""At a terminal: Ctrl-C, Ctrl-Z, the window that is closed, nohup."""

import os
import re
import shlex
import signal

import pytest

from tests.support.command import FLEETRUN, Fleetrun
from tests.support.traces import left_behind, state_of, wait_until

TWO = ("--nproc_per_node", "2")


@pytest.mark.quick
def test_ctrl_c_interrupts_every_process_once(fleetrun: Fleetrun):
    script = fleetrun.script("""
on(signal.SIGTERM, lambda: None)
on(signal.SIGINT, lambda: wait_for_go() or os._exit(0))
stay()
""")
    launch, _ = fleetrun.at_terminal("--stop_timeout", "100", *TWO, script)
    launch.until_ready(2)
    launch.type_in(b"\x03")
    launch.until_told("got SIGINT", 2)
    launch.go()
    assert launch.wait() == 130, launch
    assert len(launch.told("got SIGINT")) == 2, "the scripts are not in the terminal's foreground group"
    assert not launch.told("got SIGTERM")
    assert not re.search("ERROR|WARNING|SIGINT", launch.out), "it is not an error"


def test_after_ctrl_c_a_script_saves_what_it_has(fleetrun: Fleetrun):
    script = fleetrun.script("""
import atexit, time
atexit.register(tell, "atexit")
try:
    tell("ready", os.getpid())
    time.sleep(1000)
except KeyboardInterrupt:
    tell("saved")
finally:
    tell("finally")
""")
    launch, _ = fleetrun.at_terminal(*TWO, script)
    launch.until_ready(2)
    launch.type_in(b"\x03")
    assert launch.wait() == 130, launch
    assert [len(launch.told(word)) for word in ("saved", "finally", "atexit")] == [2, 2, 2]


def test_a_script_that_ignores_ctrl_c_gets_sigterm_later(fleetrun: Fleetrun):
    script = fleetrun.script("ignore(signal.SIGINT)\nleave_on_term()\nstay()")
    launch, _ = fleetrun.at_terminal("--stop_timeout", "2", *TWO, script)
    launch.until_ready(2)
    launch.type_in(b"\x03")
    assert launch.wait() == 130, launch
    assert len(launch.told("got SIGTERM")) == 2


def test_a_second_ctrl_c_kills_at_once(fleetrun: Fleetrun):
    script = fleetrun.script("ignore(signal.SIGTERM, signal.SIGINT)\nstay()")
    launch, _ = fleetrun.at_terminal("--stop_timeout", "10m", *TWO, script)
    launch.until_ready(2)
    launch.type_in(b"\x03")
    launch.until_out("stopping; Ctrl-C again kills")
    launch.type_in(b"\x03")
    assert launch.wait() == 130, launch
    assert "killing" in launch.out


@pytest.mark.parametrize(("words", "passed"), [(("--display", "plain"), True), (("-q",), True), ((), False)])
def test_escape_sequences_of_a_script(fleetrun: Fleetrun, words: tuple[str, ...], passed: bool):
    """As `python train.py` passes them on; above a status line only colours."""
    script = fleetrun.script("print('\\x1b]0;a title\\x07\\x1b[?1049h\\x1b[31mred\\x1b[0m')")
    launch, _ = fleetrun.at_terminal(*words, script, env={"TERM": "xterm"})
    assert launch.wait() == 0, launch
    assert ("\x1b]0;a title\x07\x1b[?1049h" in launch.out) == passed
    assert "\x1b[31mred\x1b[0m" in launch.out


def test_ctrl_backslash_ends_the_job(fleetrun: Fleetrun):
    launch, _ = fleetrun.at_terminal(*TWO, fleetrun.script("leave_on_term()\nstay()"))
    launch.until_ready(2)
    launch.type_in(b"\x1c")
    assert launch.wait() == 131, launch


def test_ctrl_z_stops_the_job_and_cont_continues_it(fleetrun: Fleetrun):
    script = fleetrun.script("""
helper("tell('ready', os.getpid())\\nwait_for_go()", start_new_session=True)
tell("ready", os.getpid())
wait_for_go()
""")
    launch, _ = fleetrun.at_terminal(*TWO, script)
    pids = [*launch.until_ready(4), launch.popen.pid]
    for _ in range(2):
        launch.type_in(b"\x1a")
        wait_until(lambda: all(state_of(pid) == "T" for pid in pids), lambda: list(map(state_of, pids)))
        launch.send(signal.SIGCONT)
        wait_until(lambda: all(state_of(pid) != "T" for pid in pids), lambda: list(map(state_of, pids)))
    launch.go()
    assert launch.wait() == 0, launch


def test_ctrl_z_and_fg_in_a_shell(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nprint('trained')")
    shell = ("bash", "--norc", "--noprofile", "-i")
    launch, _ = fleetrun.at_terminal(command=shell, env={"PS1": "ready> ", "TERM": "dumb"})
    launch.until_out("ready> ")
    launch.type_in(shlex.join([*FLEETRUN, *TWO, script]).encode() + b"\n")
    pids = launch.until_ready(2)
    launch.type_in(b"\x1a")
    launch.until_out("Stopped")
    wait_until(lambda: all(state_of(pid) == "T" for pid in pids))
    launch.type_in(b"fg\n")
    wait_until(lambda: all(state_of(pid) != "T" for pid in pids))
    launch.go()
    launch.until_out("trained")
    launch.until_out("Pod completed")
    launch.type_in(b"echo result=$?\n")
    launch.until_out("result=0")
    launch.type_in(b"exit\n")
    assert launch.wait() == 0


@pytest.mark.parametrize("body", ["leave_on_term()", "ignore(signal.SIGTERM, signal.SIGHUP)"])
def test_nothing_stays_when_the_window_is_closed(fleetrun: Fleetrun, body: str):
    script = fleetrun.script(f"{body}\nstay()")
    launch, window = fleetrun.at_terminal("--stop_timeout", "0.2", *TWO, script, watched=False)
    launch.until_ready(2)
    os.close(window)
    assert launch.wait() == 129
    assert not left_behind(launch.token)


def test_under_nohup_it_goes_on(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nprint('trained')")
    launch = fleetrun.start(*TWO, script, prefix=("nohup",))
    launch.until_ready(2)
    launch.send(signal.SIGHUP)
    os.kill(launch.launcher, signal.SIGHUP)
    launch.go()
    assert launch.wait() == 0, launch
    assert "trained" in launch.out


def test_lines_fit_the_terminal_and_words_stay_whole(fleetrun: Fleetrun):
    words = [f"word{number:02}" for number in range(40)]
    script = fleetrun.script(f"raise ValueError('{' '.join(words)}')")
    launch, _ = fleetrun.at_terminal("--max_restart", "1", script, env={"NO_COLOR": "1"})
    assert launch.wait() == 1
    told = launch.out.partition("LAUNCH ERROR")[2].partition("Traceback")[0]
    assert [word.rstrip(";") for word in told.split() if word.startswith("word")] == words
    assert [line for line in told.splitlines() if len(line) > 80 and "/" not in line] == []


def test_the_first_screen_of_80_columns_has_a_row_for_each_line(fleetrun: Fleetrun):
    script = fleetrun.script("pass")
    launch, _ = fleetrun.at_terminal("--display", "plain", *TWO, script, env={"NO_COLOR": "1"})
    assert launch.wait() == 0
    rows = [line.strip() for line in launch.out.partition("Pod completed")[0].splitlines()][:-1]
    assert [" ".join(row.split()[2:4]) for row in rows] == [
        "Job: default,", "2 trainers", "Settings: display=plain,", "Run Pod:", "Watching Pod:",
    ]  # fmt: skip


def test_colours_at_a_terminal_only(fleetrun: Fleetrun):
    script = fleetrun.script("sys.exit(2)")
    launch, _ = fleetrun.at_terminal(script, env={"TERM": "xterm"})
    launch.wait()
    assert "\x1b[31m" in launch.out
    for env in ({"NO_COLOR": "1", "TERM": "xterm"}, {"TERM": "dumb"}):
        launch, _ = fleetrun.at_terminal(script, env=env)
        launch.wait()
        assert "\x1b" not in launch.out
    assert "\x1b" not in fleetrun.run(script, env={"TERM": "xterm"}).err

"""The display at a real terminal, and the others: what a person sees, through a pty."""

import fcntl
import json
import os
import re
import shlex
import signal
import struct
import termios

import pytest

from tests.support.command import FLEETRUN, Fleetrun
from tests.support.ports import free_port
from tests.support.screen import Terminal

XTERM = {"TERM": "xterm-256color"}
REPORTS = """
import json, socket
def report(**fields):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    folder, _, name = os.environ["FLEETRUN_PROGRESS"].rpartition("/")
    os.chdir(folder)  # a socket's address is short, a test's folder is not
    sock.sendto(json.dumps({"mark": os.environ["FLEETRUN_CONTAINER"], **fields}).encode(), name)
"""


def screen_of(launch, columns=80, rows=40):
    return Terminal(columns, rows, raw=True).feed(launch.raw)


def until_foot(launch, *words):
    """Until the last row of the screen says all of this."""
    launch.until(
        lambda: all(word in "".join(screen_of(launch).rows[-1:]) for word in words), f"{words} at the foot"
    )


@pytest.mark.slow
def test_on_several_machines_the_foot_counts_them(fleetrun: Fleetrun):
    script = fleetrun.script('tell("ready", os.getpid())\nwait_for_go()')
    meet = ("--nnodes", "2", "--master", f"127.0.0.1:{free_port()}", "--log_dir")
    first, _ = fleetrun.at_terminal(*meet, "log", script, env=XTERM)
    second = fleetrun.start(*meet, "log2", script)
    until_foot(first, "nodes 2/2")
    for launch in (first, second):
        launch.until_ready(1)
        launch.go()
    assert [first.wait(), second.wait()] == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("etcd://127.0.0.1:1", "waiting for etcd, 9:"),
        ("127.0.0.1:PORT", "1 of 2 nodes, waiting for more, 9:"),
    ],
)
def test_while_it_waits_the_foot_says_for_what_and_how_long(fleetrun: Fleetrun, address: str, words: str):
    master = address.replace("PORT", str(free_port()))
    launch, _ = fleetrun.at_terminal("--nnodes", "2", "--master", master, fleetrun.script(""), env=XTERM)
    until_foot(launch, words, " left")
    launch.type_in(b"\x03")
    assert launch.wait() == 130


@pytest.mark.slow
def test_the_foot_follows_the_job_and_leaves_nothing(fleetrun: Fleetrun):
    script = fleetrun.script(f"""{REPORTS}
print("line one")
report(step=1234, loss=0.25, activity={{"what": "saving", "done": 1, "of": 2}})
tell("ready", os.getpid())
wait_for_go()
print("line two")
""")
    launch, window = fleetrun.at_terminal("--nproc_per_node", "2", "--follow", "all", script, env=XTERM)
    launch.until_ready(2)
    until_foot(launch, "trainers 2/2", "step 1,234", "loss 0.25", "saving [#####.....] 1/2")
    fcntl.ioctl(window, termios.TIOCSWINSZ, struct.pack("4H", 40, 50, 0, 0))
    launch.until(lambda: "trainers" not in screen_of(launch).rows[-1], "a foot that fits")
    until_foot(launch, "step 1,234")
    launch.go()
    assert launch.wait() == 0
    text = screen_of(launch).text
    lines = [line for line in text if "line" in line]
    assert sorted(lines) == [f"trainer.{rank} | line {word}" for rank in (0, 1) for word in ("one", "two")]
    assert "Pod completed" in " ".join(text[-4:])
    assert not [line for line in text if "trainers 2/2" in line or "| step 1,234" in line]


def test_a_success_ends_with_one_line_of_what_it_has_done(fleetrun: Fleetrun):
    script = fleetrun.script(f"""{REPORTS}
report(step=1199, samples=32, loss=0.5, time=1000)
report(step=1200 + RANK, samples=96, loss=0.25, time=1002)
""")
    launch = fleetrun.run("--nproc_per_node", "2", script)
    *_, last = launch.err.splitlines()
    said = (
        r"Pod completed: ([a-z]{6}), \d+\.\d s, step 1,201, loss 0.25, 64 samples/s; logs: log/default\.\1\."
    )
    assert re.search(said + r"\*\.log$", last), last


@pytest.mark.slow
def test_a_hostile_script_and_a_progress_bar(fleetrun: Fleetrun):
    script = fleetrun.script(r"""
print("\x1b[2J\x1b[5;5H\x1b[?1049h\x1b[1;3rwild")
print("\r 10%|#    |", end="\r 50%|###  |\r", flush=True)
tell("ready", os.getpid())
wait_for_go()
print("100%|#####|")
print("unfinished\r", end="")
sys.exit(3)
""")
    launch, _ = fleetrun.at_terminal("--max_restart", "0", script, env=XTERM)
    launch.until_ready(1)
    launch.until(lambda: screen_of(launch).rows[-3:-1] == ["wild", " 50%|###  |"], "the bar above the foot")
    until_foot(launch, "trainers 1/1")
    launch.go()
    assert launch.wait() == 3
    text = screen_of(launch).text
    assert "LAUNCH INFO" in text[0], "nothing has cleared the screen"
    shown = [line for line in text if line in ("wild", "100%|#####|", "unfinished", "=" * 80)]
    assert shown == ["wild", "100%|#####|", "unfinished", "=" * 80], "the report comes last"
    assert text[-1] == "trainer 0 exited with code 3; its last line: unfinished"
    assert not [line for line in text if "50%" in line or "trainers 1/1" in line]


@pytest.mark.slow
def test_the_shell_has_the_terminal_while_the_job_is_stopped(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nprint('trained')")
    shell = ("bash", "--norc", "--noprofile", "-i")
    launch, _ = fleetrun.at_terminal(command=shell, env={**XTERM, "PS1": "ready> "})
    launch.until_out("ready> ")
    launch.type_in(shlex.join([*FLEETRUN, script]).encode() + b"\n")
    launch.until_ready(1)
    until_foot(launch, "trainers 1/1")
    launch.type_in(b"\x1a")
    until_foot(launch, "ready>")
    assert not [line for line in screen_of(launch).text if "trainers 1/1" in line]
    launch.type_in(b"fg\n")
    until_foot(launch, "trainers 1/1")
    launch.go()
    until_foot(launch, "ready>")
    text = screen_of(launch).text
    assert "trained" in text
    assert not [line for line in text if "trainers 1/1" in line]
    launch.type_in(b"exit\n")
    assert launch.wait() == 0


@pytest.mark.slow
def test_the_guard_wipes_the_foot_of_a_launcher_that_was_killed(fleetrun: Fleetrun):
    script = fleetrun.script(r"print('50%|###  |\r', end='', flush=True)" + "\nstay()")
    launch, _ = fleetrun.at_terminal(script, env=XTERM)
    launch.until_ready(1)
    launch.until(lambda: "50%|###  |" in screen_of(launch).rows[-2:-1], "the bar above the foot")
    until_foot(launch, "trainers 1/1")
    os.kill(launch.launcher, signal.SIGKILL)
    assert launch.wait() == 125
    text = screen_of(launch).text
    assert "killed by SIGKILL" in " ".join(text)
    assert not [line for line in text if "trainers 1/1" in line]


def test_json_is_one_event_a_line(fleetrun: Fleetrun):
    script = fleetrun.script("print('hello')\nsys.exit(3)")
    launch = fleetrun.run("--display", "json", "--max_restart", "0", script)
    assert launch.code == 3
    assert launch.err == ""
    events = [json.loads(line) for line in launch.out.splitlines()]
    names = [event["event"] for event in events]
    assert [name for name in names if name not in ("message", "ready", "log")] == [
        "launch", "started", "exited", "failed", "over",
    ]  # fmt: skip
    by_name = {event["event"]: event for event in events}
    settings = by_name["launch"]["settings"]
    assert settings["max_restart"] == {"value": "0", "origin": "--max_restart"}
    assert settings["nproc_per_node"] == {"value": "None", "origin": None}
    assert not [e for e in events if e["event"] == "message" and e["level"] == "INFO"]
    assert by_name["log"]["line"] == "hello"
    assert by_name["exited"]["code"] == 3
    assert by_name["over"]["code"] == 3
    said = [event["text"] for event in events if event["event"] == "message" and event["level"] == "ERROR"]
    assert any("First failure: trainer 0 exited with code 3" in text for text in said)


def test_quiet_shows_errors_only(fleetrun: Fleetrun):
    well = fleetrun.run("--display", "quiet", fleetrun.script("print('hello')"))
    assert (well.code, well.out, well.err) == (0, "", "")
    badly = fleetrun.run("--display", "quiet", "--max_restart", "0", fleetrun.script("sys.exit(3)"))
    assert badly.code == 3
    assert badly.out == ""
    assert "First failure: trainer 0 exited with code 3" in badly.err

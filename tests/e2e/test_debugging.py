"""`fleetrun debug`: breakpoints that wait, pdb at a terminal and over a pipe, and the job meanwhile."""

import json
import os
import signal
import socket
from pathlib import Path

import pytest

from fleetrun.files import short_socket_path
from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch
from tests.support.traces import wait_until

BREAK = """
answer = 41
if RANK == 1:
    breakpoint()
    tell("continues")
wait_for_go()
"""
WAITS = "trainer 1 waits for `fleetrun debug 1` at train.py:"


@pytest.fixture
def waiting(fleetrun: Fleetrun) -> Launch:
    """Two trainers, of which the second waits at a breakpoint."""
    launch = fleetrun.start("--nproc_per_node", "2", "--debug", "on", fleetrun.script(BREAK))
    launch.until_err(WAITS)
    return launch


def debug(fleetrun: Fleetrun, *words: str, text: str = "") -> Launch:
    """`fleetrun debug`, which reads this text."""
    (fleetrun.folder / "typed").write_text(text)
    with (fleetrun.folder / "typed").open() as typed:
        return fleetrun.run("debug", *words, stdin=typed)


def states(fleetrun: Fleetrun) -> list[str]:
    return [each["state"] for each in json.loads(fleetrun.run("status", "--json").out)["containers"]]


def end(launch: Launch, code: int = 0) -> None:
    launch.go()
    assert launch.wait() == code, launch


def test_a_breakpoint_waits_for_pdb_and_the_rank_continues_at_the_end_of_its_input(
    fleetrun: Fleetrun, waiting: Launch
):
    assert "waits for `fleetrun debug 1`" in fleetrun.run("status").out
    assert states(fleetrun) == ["running", "debugged"]
    found = debug(fleetrun, text="p answer + 1\nprint('a' + 'b')\n")
    assert found.code == 0, found
    assert "-> tell(" in found.out or "-> breakpoint()" in found.out  # since Python 3.13, the line itself
    assert "(Pdb) 42\n(Pdb) ab\n" in found.out
    assert "trainer 1: detached" in found.err
    waiting.until_told("trainer.1 continues")
    assert "fleetrun debug" not in fleetrun.run("status").out
    assert states(fleetrun) == ["running", "running"]
    end(waiting)


def test_pdb_steps_over_the_next_breakpoint(fleetrun: Fleetrun):
    script = fleetrun.script("""
def work():
    breakpoint()
    return 1
for step in range(2):
    work()
""")
    launch = fleetrun.start("--debug", "on", script)
    launch.until_err("waits for `fleetrun debug 0`")
    found = debug(fleetrun, text="r\nn\nn\ns\ns\nn\nw\n")
    assert "work()\n-> return 1\n" in found.out.rpartition("(Pdb)   ")[2], found
    assert "bdb.py" not in found.out
    assert launch.wait() == 0


def test_a_command_of_pdb_runs_through_breakpoints(fleetrun: Fleetrun):
    script = fleetrun.script("""
def work(value):
    breakpoint()
    return value
work(1)
""")
    launch = fleetrun.start("--debug", "on", script)
    launch.until_err("waits for `fleetrun debug 0`")
    assert "(Pdb) 7\n(Pdb) 1\n" in debug(fleetrun, text="p work(7)\np value\n").out
    assert launch.wait() == 0


def test_threads_that_reach_a_breakpoint_together_stop_one_after_the_other(fleetrun: Fleetrun):
    script = fleetrun.script("""
import threading
def work():
    breakpoint()
    return 1
threads = [threading.Thread(target=work) for _ in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
""")
    launch = fleetrun.start("--debug", "on", script)
    launch.until_err("waits for `fleetrun debug 0`")
    found = debug(fleetrun, text="c\nc\nc\n")
    assert found.out.count("work()\n-> return 1") == 3, found
    assert launch.wait() == 0


def test_who_does_not_wait_is_named(fleetrun: Fleetrun, waiting: Launch):
    other = debug(fleetrun, "0")
    assert (other.code, "trainer 0 does not wait at a breakpoint" in other.err) == (2, True)
    assert "--now" in other.err
    unknown = debug(fleetrun, "7")
    assert (unknown.code, "trainer 0-1" in unknown.err) == (2, True)
    debug(fleetrun)
    none = debug(fleetrun)
    assert (none.code, "0 of 2 processes wait" in none.err) == (2, True)
    end(waiting)


def test_at_a_terminal_it_completes_and_control_c_interrupts(fleetrun: Fleetrun):
    script = fleetrun.script("""
def work():
    steps = 0
    while not Path("stop").exists():
        steps += 1
        time.sleep(0.01)
breakpoint()
work()
""")
    job, _ = fleetrun.at_terminal("--display", "plain", script)
    job.until_out("trainer 0 waits for `fleetrun debug 0`")
    home = {"HOME": str(fleetrun.folder), "TERM": "xterm"}
    client, _ = fleetrun.at_terminal("debug", env=home)

    def send(text: str, then: str) -> None:
        before = len(client.out)
        client.type_in(text.encode())
        client.until(lambda: then in client.out[before:], then)

    client.until_out("(Pdb) ")
    send("brea\t", "break")
    send("\x15time.slee\t(1000)\r", "sleep(1000)")
    wait_until(lambda: "is debugged at" in fleetrun.run("status").out)
    assert states(fleetrun) == ["debugged"]
    second = debug(fleetrun, "0")
    assert (second.code, "another `fleetrun debug`" in second.err) == (2, True)
    send("\x03", "KeyboardInterrupt\r\n(Pdb) ")
    send("c\r", "c\r\n")
    wait_until(lambda: "is debugged at" not in fleetrun.run("status").out)
    send("\x03", "Program interrupted")
    client.until(lambda: client.out.rpartition("Program interrupted")[2].count("(Pdb) ") == 1, "its prompt")
    send("up\r", "(Pdb) ")
    send("!Path('stop').touch()\r", "(Pdb) ")
    send("\x04", "detached")
    assert client.wait() == 0
    assert job.wait() == 0
    assert "time.sleep(1000)" in (fleetrun.folder / ".fleetrun_debug_history").read_text()


def test_without_any_input_it_leaves_the_rank(fleetrun: Fleetrun, waiting: Launch):
    client = fleetrun.run("debug", prefix=("sh", "-c", 'exec "$@" <&-', "sh"))
    assert (client.code, "trainer 1: detached" in client.err) == (0, True), client
    waiting.until_told("continues")
    end(waiting)


def test_the_rank_waits_again_after_its_client_was_killed(fleetrun: Fleetrun, waiting: Launch):
    client, _ = fleetrun.at_terminal("debug", env={"HOME": str(fleetrun.folder)})
    client.until_out("(Pdb) ")
    wait_until(lambda: "is debugged at" in fleetrun.run("status").out)
    client.send(signal.SIGKILL)
    client.wait()
    waiting.until(lambda: waiting.err.count(WAITS) == 2)
    assert "(Pdb) 41\n" in debug(fleetrun, text="p answer\n").out
    end(waiting)


def test_no_hang_is_reported_while_a_rank_is_debugged(fleetrun: Fleetrun):
    """Also while pdb executes a command."""
    # The timeout is longer than a Python takes to start.
    words = ("--nproc_per_node", "2", "--debug", "on", "--hang_timeout", "8")
    launch = fleetrun.start(*words, fleetrun.script(BREAK))
    launch.until_err(WAITS)
    assert "(Pdb) done\n" in debug(fleetrun, text="time.sleep(12)\nprint('done')\n").out
    end(launch)
    assert "hung" not in launch.err + fleetrun.run("report").out


def test_process_groups_that_time_out_meanwhile_are_named(fleetrun: Fleetrun):
    script = fleetrun.script("""
import datetime
import torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=321))
if RANK == 1:
    breakpoint()
dist.barrier()
dist.destroy_process_group()
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--debug", "on", script)
    launch.until_err("gloo group 0 times out after 321 s")
    assert "gloo group 0 times out after 321 s\n" in debug(fleetrun).out
    assert launch.wait() == 0


def test_now_stops_a_rank_at_its_next_line(fleetrun: Fleetrun):
    script = fleetrun.script("""
turns = 0
while not Path("stop").exists():
    turns += 1
    if turns == 1:
        tell("ready", os.getpid())
    time.sleep(0.01)
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--no_debug", script)
    launch.until_ready(2)
    found = debug(fleetrun, "1", "--now", text="p turns > 0\nPath('stop').touch()\n")
    assert "(Pdb) True\n" in found.out, found
    end(launch)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_ends_the_wait_and_the_script_gets_its_signal(fleetrun: Fleetrun, number: int):
    script = fleetrun.script("""
on(signal.SIGTERM, lambda: None)
try:
    breakpoint()
    wait_for_end_of(os.getppid())
except KeyboardInterrupt:
    tell("saves")
""")
    launch = fleetrun.start("--debug", "on", "--stop_timeout", "2", script)
    launch.until_err("waits for `fleetrun debug 0`")
    launch.send(number)
    launch.until_told("saves" if number == signal.SIGINT else "got SIGTERM")
    assert launch.wait() == 128 + number


def test_a_killed_launcher_ends_a_rank_that_waits(fleetrun: Fleetrun, waiting: Launch):
    os.kill(waiting.launcher, signal.SIGKILL)
    assert waiting.wait() == 125, waiting
    waiting.gone()


def test_debug_on_error_keeps_the_failed_rank_at_its_traceback(fleetrun: Fleetrun):
    script = fleetrun.script("""
def divide(by):
    if not by:
        raise ValueError("by is zero\\nas often")
sys.excepthook = lambda *error: print("its own hook", file=sys.stderr)
divide(RANK)
wait_for_go()
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", "--debug-on-error", script)
    launch.until_err("trainer 0 waits for `fleetrun debug 0` at train.py:")
    found = debug(fleetrun, text="p by\nup\n")
    assert "ValueError: by is zero\n" in found.out
    assert "(Pdb) 0\n" in found.out
    assert "-> divide(RANK)" in found.out
    assert launch.wait() == 1, launch


def test_a_stop_of_a_kept_rank_adds_no_traceback(fleetrun: Fleetrun):
    script = fleetrun.script("""
class Odd(Exception):
    def __str__(self):
        raise ValueError
raise Odd
""")
    launch = fleetrun.start("--debug", "error", script)
    launch.until_err("; Odd: <exception str() failed>")
    launch.send(signal.SIGINT)
    assert launch.wait() == 130
    assert "fleetrun_debug.py" not in launch.said + fleetrun.log("trainer.0")


@pytest.mark.parametrize(
    ("words", "why"), [((), "has no terminal, or runs in CI"), (("--no-debug",), "--no_debug is set")]
)
def test_a_breakpoint_that_nobody_can_see_fails(fleetrun: Fleetrun, words: tuple[str, ...], why: str):
    launch = fleetrun.run("--max_restart", "0", *words, fleetrun.script("breakpoint()"))
    assert launch.code == 1
    assert why in launch.said
    assert "--debug on" in launch.said


def test_at_a_terminal_in_ci_it_fails_too(fleetrun: Fleetrun):
    script = fleetrun.script("breakpoint()")
    launch, _ = fleetrun.at_terminal("--max_restart", "0", script, env={"CI": "true"})
    assert launch.wait() == 1
    assert "runs in CI" in launch.out


def test_in_a_child_process_it_fails(fleetrun: Fleetrun):
    script = fleetrun.script("""
if os.fork() == 0:
    breakpoint()
sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
""")
    launch = fleetrun.run("--max_restart", "0", "--debug", "on", script)
    assert launch.code == 1
    assert "child process of the rank cannot wait" in launch.said + fleetrun.log("trainer.0")


def test_its_socket_is_private(fleetrun: Fleetrun, waiting: Launch):
    folder = fleetrun.folder / "run" / "fleetrun"
    wait_until(lambda: any(folder.glob("*.debug")))
    (found,) = folder.glob("*.debug")
    wait_until(lambda: found.stat().st_mode & 0o777 == 0o600)
    for garbage in (b"garbage\n", b"{}\n", b'{"line": "p 1"}\n{"line": "p 2"}\n'):
        with short_socket_path(found) as name, socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(60)
            wait_until(
                lambda name=name, stranger=stranger: stranger.connect_ex(name) == 0
            )  # it may not listen yet
            stranger.sendall(garbage)
            while stranger.recv(1 << 16):
                pass
        wait_until(found.exists)
    debug(fleetrun)
    end(waiting)
    assert not list(Path(fleetrun.folder / "run" / "fleetrun").iterdir())


def test_in_a_process_that_a_zygote_forked_after_it_imported_pdb(fleetrun: Fleetrun):
    script = fleetrun.script("import pdb\nanswer = 42\npdb.set_trace()")
    launch = fleetrun.start("--warm", "--debug", "on", script)
    launch.until_err("waits for `fleetrun debug 0`")
    assert "ready for warm starts" in launch.err
    assert "(Pdb) 42\n" in debug(fleetrun, text="p answer\n").out
    assert launch.wait() == 0


# ---- On another node

ELSEWHERE = """
answer = 41
if RANK == 1:
    breakpoint()
    while not os.path.exists("enough"):
        time.sleep(0.01)
    tell("continues")
"""
SECRET = {"FLEETRUN_TOKEN": "correct horse battery staple"}


def two_nodes(fleetrun: Fleetrun, env: dict[str, str]) -> tuple[list[Launch], str, str]:
    """Two nodes whose second trainer waits at a breakpoint, the pod of the first node, and the job's URL."""
    nodes = Nodes(fleetrun, "--nnodes", "2", "--debug", "on")
    script = fleetrun.script(ELSEWHERE)
    launches = [nodes.start("--rank", str(rank), script, env=env) for rank in range(2)]
    launches[1].until_err(WAITS)
    (record,) = (fleetrun.folder / "log" / "1").glob("*.events.jsonl")
    return launches, record.name.split(".")[1], f"{nodes.master}/default"


def test_a_rank_of_another_node_is_debugged_through_the_store(fleetrun: Fleetrun):
    launches, pod, url = two_nodes(fleetrun, SECRET)
    found = debug(fleetrun, pod, "--rank", "1", text="p answer + 1\nprint('a' + 'b')\n")
    assert (found.code, "detached" in found.err) == (0, True), found
    assert "(Pdb) 42\n(Pdb) ab\n" in found.out
    idle = debug(fleetrun, pod, "--node", "1")
    assert (idle.code, "trainer 1 does not wait at a breakpoint" in idle.err) == (2, True), idle
    (fleetrun.folder / "typed").write_text("answer = 43\np answer\n")
    with (fleetrun.folder / "typed").open() as typed:
        found = fleetrun.run("debug", "1", "--now", "--job", url, env=SECRET, stdin=typed)
    assert "(Pdb) (Pdb) 43\n" in found.out, found
    nobody = fleetrun.run("debug", "7", "--job", url, env=SECRET)
    assert (nobody.code, "no node has such a process" in nobody.err) == (2, True)
    (fleetrun.folder / "enough").touch()
    assert [each.wait() for each in launches] == [0, 0]
    launches[1].until_told("trainer.1 continues")


def test_at_a_terminal_control_c_interrupts_a_rank_of_another_node(fleetrun: Fleetrun):
    launches, pod, _ = two_nodes(fleetrun, SECRET)
    client, _ = fleetrun.at_terminal("debug", pod, "--node", "1")
    client.until_out("(Pdb) ")
    client.type_in(b"c\n")
    wait_until(lambda: "is debugged" not in fleetrun.run("status", pod).out)
    client.type_in(b"\x03")
    client.until_out("Program interrupted")
    client.type_in(b"p answer + 2\n")
    client.until_out("43")
    client.type_in(b"q\n")
    assert client.wait() == 0
    (fleetrun.folder / "enough").touch()
    assert [each.wait() for each in launches] == [0, 0]


def test_without_a_token_a_rank_of_another_node_is_not_debugged(fleetrun: Fleetrun):
    launches, pod, _ = two_nodes(fleetrun, {})
    found = debug(fleetrun, pod, "--rank", "1")
    assert (found.code, "refuse debug" in found.err) == (2, True), found
    launches[0].send(signal.SIGINT)
    assert [each.wait() for each in launches] == [130, 130]

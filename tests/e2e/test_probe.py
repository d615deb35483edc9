"""The probe that fleetrun loads into its Python processes: what they notice of it (nothing), and what it
tells about their end.
"""

import json
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetrun.files import short_socket_path
from tests.support.command import Fleetrun, Launch
from tests.support.traces import wait_until

ONE = ("--nproc_per_node", "1", "--max_restart", "0")
ABORTS = """
import ctypes, sys, torch
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.abort, None, None)  # called after all that Python does
"""


@pytest.fixture
def torch_stub(fleetrun: Fleetrun) -> None:
    """An `import torch` that takes no time: only its name matters here."""
    (fleetrun.folder / "torch.py").touch()


def ended(fleetrun: Fleetrun, body: str, *options: str) -> Launch:
    return fleetrun.run(*ONE, *options, fleetrun.script(f"{ABORTS}\n{body}"))


@pytest.mark.usefixtures("torch_stub")
@pytest.mark.parametrize(
    "end", ["", "sys.exit(0)", "sys.exit()", "__import__('atexit').register(tell, 'bye')"]
)
def test_a_crash_after_the_end_of_a_script_is_no_failure(fleetrun: Fleetrun, end: str):
    launch = ended(fleetrun, end)
    assert launch.code == 0, launch
    assert "WARNING" in launch.err
    assert "SIGABRT" in launch.err
    assert not list(fleetrun.folder.glob("log/*.error.json"))


@pytest.mark.usefixtures("torch_stub")
@pytest.mark.parametrize(
    "end",
    ["sys.exit(3)", "sys.exit('why')", "1 / 0", "raise SystemExit(3)", "libc.abort()",
     "sys.stdout.flush(); __import__('atexit').register(libc.abort)"],
)  # fmt: skip
def test_a_crash_of_a_script_that_failed_or_had_not_ended_is_one(fleetrun: Fleetrun, end: str):
    launch = ended(fleetrun, end)
    assert launch.code == 134, launch


@pytest.mark.usefixtures("torch_stub")
def test_a_crash_before_the_end_after_one_behind_it(fleetrun: Fleetrun):
    """Each attempt is judged by itself."""
    body = "if os.environ['PADDLE_RESTART_COUNT'] == '1':\n    libc.abort()\nsys.exit(3)"
    launch = fleetrun.run("--nproc_per_node", "1", "--max_restart", "1", fleetrun.script(f"{ABORTS}\n{body}"))
    assert launch.code == 134, launch


@pytest.mark.usefixtures("torch_stub")
def test_a_finished_trainer_lets_the_others_go_on(fleetrun: Fleetrun):
    script = fleetrun.script(f"{ABORTS}\nif WHO == 'trainer.1': wait_for_go()")
    launch = fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", script)
    launch.until_err("SIGABRT")
    launch.go()
    assert launch.wait() == 0, launch
    assert launch.err.count("SIGABRT") == 2


@pytest.mark.usefixtures("torch_stub")
def test_below_a_program_that_ends_as_its_child_did(fleetrun: Fleetrun):
    script = fleetrun.script(ABORTS)
    assert fleetrun.run(*ONE, "bash", "-c", f"exec timeout 100 {sys.executable} {script}").code == 0


@pytest.mark.usefixtures("torch_stub")
def test_the_end_of_an_earlier_program_is_not_that_of_the_last(fleetrun: Fleetrun):
    """Of the same command: what comes after it is judged by itself."""
    prepares = fleetrun.script("import torch", "prepares.py")
    crashes = fleetrun.script("import ctypes, torch; ctypes.CDLL(None).abort()", "crashes.py")
    fails = fleetrun.script("import torch; raise ValueError('of the last')", "fails.py")
    for last, code in ((crashes, 134), (fails, 1)):
        python = sys.executable
        launch = fleetrun.run(*ONE, "bash", "-c", f"{python} {prepares}; exec {python} {last}")
        assert launch.code == code, launch
    left = [each.read_text() for each in fleetrun.folder.glob("log/*.trainer.0.error.json")]
    assert any("ValueError: of the last" in each for each in left), left


def test_without_the_probe_it_is_a_failure(fleetrun: Fleetrun):
    (fleetrun.folder / "torch.py").touch()
    assert ended(fleetrun, "", "--probe", "off").code == 134


SEES = """
import json, os, subprocess, sys
CODE = '''
import json, os, sys
finders = [type(each).__name__ for each in sys.meta_path]
print(json.dumps([dict(os.environ), sys.path, sorted(sys.modules), finders]))
'''
exec(CODE)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", CODE])
"""


def seen(fleetrun: Fleetrun, *options: str, paths: str) -> list[list[Any]]:
    """What a script sees, and a Python process that it starts."""
    (fleetrun.folder / "see.py").write_text(SEES)
    launch = fleetrun.run(*ONE, *options, "see.py", env={"PYTHONPATH": paths})
    assert launch.code == 0, launch
    return [json.loads(line) for line in launch.out.splitlines() if line.startswith("[{")]


OF_THIS_LAUNCH = re.compile(
    r"FLEETRUN_|FLEETTEST_|POD_|PADDLE_|MASTER_|TORCHELASTIC|SEED|DISTRIBUTED_TRAINER"
)


@pytest.mark.parametrize("own", [True, False], ids=["own sitecustomize", "none"])
def test_a_script_sees_nothing_of_it(fleetrun: Fleetrun, own: bool):
    """Its environment, search path and modules, but for the probe's own; what it starts has no probe."""
    lib = fleetrun.folder / "lib"
    lib.mkdir()
    (lib / "helpful.py").touch()
    if own:
        (lib / "sitecustomize.py").write_text("import helpful")
    with_probe, child = seen(fleetrun, paths=f"{lib}:/nowhere")
    without, child_without = seen(fleetrun, "--probe", "off", paths=f"{lib}:/nowhere")
    for one, other in ((with_probe, without), (child, child_without)):
        for environment in (one[0], other[0]):
            for name in [each for each in environment if OF_THIS_LAUNCH.match(each)]:
                del environment[name]
        assert one[:2] == other[:2]
    assert ("helpful" in with_probe[2]) is own
    added = set(with_probe[2]) - set(without[2])
    assert added - set(sys.stdlib_module_names) == {"fleetrun_probe", "fleetrun_steps"}
    assert not set(without[2]) - set(with_probe[2])
    assert child[2:] == child_without[2:]


def test_a_probe_that_fails_does_not_stop_the_script(fleetrun: Fleetrun):
    """An older module of that name on the path of the interpreter, for example."""
    script = fleetrun.script("tell('ran')")
    launch = fleetrun.run(*ONE, "env", "FLEETRUN_PROBE_SOCKET=\udcff", sys.executable, script)
    assert launch.code == 0, launch
    assert launch.told("ran")


@pytest.mark.slow
def test_a_process_answers_from_its_first_group_on(fleetrun: Fleetrun):
    """With the stacks of its threads and torch's own record of collectives; also while it waits in one."""
    script = fleetrun.script("""
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
tell("ready", os.getpid())
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(5))
else:
    wait_for_go()
    dist.all_reduce(torch.ones(5))
dist.destroy_process_group()
""")
    launch = fleetrun.start("--nproc_per_node", "2", "--max_restart", "0", script)
    pids = launch.until_ready(2)
    answers = []
    for rank in range(2):
        (address,) = (fleetrun.folder / "run" / "fleetrun").glob(f"*.trainer.{rank}.probe")
        where = ("all_reduce", "wait_for_go")[rank]
        answers.append(
            answer_when(
                address,
                lambda state, rank=rank, where=where: entered(state) == (2, 1)[rank] and stands(state, where),
            )
        )
    said = "trainer 1 has not come to all_reduce #2, in which trainer 0 waits"
    asked_why: list[Launch] = []
    wait_until(
        lambda: asked_why.append(fleetrun.run("why")) or said in asked_why[-1].out, lambda: asked_why[-1]
    )
    why = asked_why[-1]
    told = json.loads(fleetrun.run("why", "--json").out)
    launch.go()
    assert launch.wait() == 0, launch
    assert why.code == 0
    assert "wait_for_go" in why.out
    assert (told["verdict"]["kind"], told["verdict"]["ranks"]) == ("not entered", [1])
    assert len(told["ranks"]) == 2
    assert [each["pid"] for each in answers] == pids
    assert [each["groups"]["0"]["ranks"] for each in answers] == [[0, 1]] * 2
    assert [each["calls"][-1]["done"] for each in answers] == [False, True]
    assert answers[0]["calls"][-1]["operation"] == "all_reduce"
    assert answers[0]["calls"][-1]["sizes"] == [[5]]
    assert not list((fleetrun.folder / "run" / "fleetrun").glob("*.probe"))


def test_nobody_waits_for_another(fleetrun: Fleetrun):
    launch = fleetrun.start("--nproc_per_node", "2", fleetrun.script("stay()"))
    launch.until_ready(2)
    why = fleetrun.run("why")
    launch.send(signal.SIGTERM)
    launch.wait()
    assert why.code == 0
    assert "No rank is known" in why.out
    assert "trainers 0, 1" in why.out


def answer_when(address: Path, known: Callable[[Any], bool]) -> Any:
    found: list[Any] = []

    def ask() -> bool:
        with socket.socket(socket.AF_UNIX) as asked, short_socket_path(address) as short:
            asked.connect(short)
            found[:] = [json.loads(b"".join(iter(lambda: asked.recv(1 << 16), b"")))]
        return known(found[0])

    wait_until(ask, lambda: str(found))
    return found[0]


def entered(state: Any) -> int:
    """How many collectives."""
    return int(state["groups"]["0"]["entered"])


def stands(state: Any, where: str) -> bool:
    """Whether the main thread is in this function."""
    return any(function == where for _, _, function, _ in state["stack"])


def test_files_get_what_a_failing_script_has_written_though_no_cycles_are_searched(fleetrun: Fleetrun):
    script = fleetrun.script(
        "import atexit, gc, types\natexit.unregister(gc.freeze)  # that of the tests\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "class Held:\n    def __init__(self):\n        self.me, self.file = self, open('kept.txt', 'w')\n"
        "held = Held()\nheld.file.write('kept')\nraise RuntimeError('broken')"
    )
    launch = fleetrun.run("--max_restart", "0", script)
    assert launch.code == 1
    assert "RuntimeError: broken" in launch.err
    assert (fleetrun.folder / "kept.txt").read_text() == "kept"

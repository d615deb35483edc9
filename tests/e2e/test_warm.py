"""Warm restarts: a standby has done the imports, and the script cannot tell."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.traces import wait_until

HEAVY = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
print("importing heavy", flush=True)
"""

STEPS = """
import heavy
from trainers import progress
progress.report(step=ATTEMPT + 1)
tell("at", ATTEMPT, os.getpid())
"""


@pytest.fixture
def installed(fleetrun: Fleetrun) -> Path:
    """A folder of installed packages, with `heavy`."""
    return install(fleetrun, HEAVY)


def install(fleetrun: Fleetrun, text: str) -> Path:
    folder = fleetrun.folder / "site-packages"
    folder.mkdir()
    (folder / "heavy.py").write_text(text)
    return folder


def start(fleetrun: Fleetrun, folder: Path, *words: str) -> Launch:
    path = f"{fleetrun._env['PYTHONPATH']}:{folder}"
    return fleetrun.start("--warm", *words, env={"PYTHONPATH": path})


def standbys(launch: Launch) -> list[int]:
    """Their pids."""
    below = Path(f"/proc/{launch.launcher}/task/{launch.launcher}/children").read_text().split()
    names = {int(pid): Path(f"/proc/{pid}/comm").read_text().strip() for pid in below}
    return [pid for pid, name in names.items() if name == "standby"]


READY = "ready for warm restarts"


def pids(launch: Launch) -> list[int]:
    """Of the attempts so far."""
    return [int(line.split()[3]) for line in launch.told(" at ")]


def test_a_restart_continues_in_the_standby(fleetrun: Fleetrun, installed: Path):
    script = fleetrun.script(f"{STEPS}\nif ATTEMPT < 2: stay()")
    launch = start(fleetrun, installed, script)
    for attempt in range(2):
        launch.until_told(f" at {attempt}")
        launch.until(lambda: launch.err.count(READY) > attempt, READY)  # noqa: B023
        (standby,) = standbys(launch)
        os.kill(pids(launch)[attempt], signal.SIGKILL)
        launch.until_told(f" at {attempt + 1}")
        assert pids(launch)[attempt + 1] == standby, launch
    assert launch.wait() == 0
    parts = fleetrun.log("trainer.0").split("--- fleetrun: restart ")
    assert [part.count("importing heavy") for part in parts] == [1, 1, 1], parts
    (record,) = fleetrun.logs("*.events.jsonl")
    killed = [event for line in record.read_text().splitlines() if (event := json.loads(line)).get("signal")]
    assert [event["peak_memory"] > 0 for event in killed] == [True, True]


SERVED = """
import torch
from trainers import fleet
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.ps_configs = {"durability": "log"}
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
if fleet.is_server():
    fleet.init_server()
    tell("at", ATTEMPT, os.getpid())
    fleet.run_server()
else:
    fleet.init_worker()
    for _ in range(2):
        optimizer.minimize(model(torch.ones(1, 2)).sum())
        wait_for_go()
    fleet.stop_worker()
"""


def test_a_parameter_server_is_restarted_in_its_standby(fleetrun: Fleetrun):
    launch = fleetrun.start("--warm", "--server_num=1", "--trainer_num=1", fleetrun.script(SERVED))
    launch.until_err(f"2 standbys are {READY}")
    before = standbys(launch)
    os.kill(pids(launch)[0], signal.SIGKILL)
    launch.until_told(" at 1")
    assert pids(launch)[1] in before
    launch.go()
    assert launch.wait() == 0, launch


LOOK = """
import json, resource, threading, warnings
def look():
    import __main__
    status = Path("/proc/self/status").read_text().splitlines()
    kept = ("Umask", "NSpid", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "NoNewPrivs", "Threads")
    return {
        "environ": {n: v for n, v in os.environ.items() if "RESTART_COUNT" not in n},
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "cwd": os.getcwd(), "comm": [each.read_text() for each in Path("/proc/self/task").glob("*/comm")],
        "cmdline": Path("/proc/self/cmdline").read_text(),
        "main": sorted(n for n in vars(__main__)), "threads": threading.active_count(),
        "status": [line for line in status if line.split(":")[0] in kept and "NSpid" not in line],
        "session": os.getsid(0) == os.getpgrp() == os.getpid(),
        "parent": os.getppid(),
        "files": {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in ("0", "1", "2")},
        "open": sorted(os.listdir("/proc/self/fd"), key=int),
        "limits": [resource.getrlimit(number) for number in range(10)],
        "filters": str(warnings.filters), "finders": [type(each).__name__ for each in sys.meta_path],
        "buffered": [sys.stdout.line_buffering, sys.stdout.write_through, sys.stdout.isatty()],
        "inherited": helper("print(sorted(n for n in os.environ if 'RESTART_COUNT' not in n))",
                            stdout=-1).communicate()[0].decode(),
        "modules": [n for n in ("__main__", "site", "heavy") if n in sys.modules],
    }
Path(f"look.{ATTEMPT}").write_text(json.dumps(look(), indent=1))
"""


@pytest.mark.parametrize("module", [False, True])
def test_a_script_cannot_tell(fleetrun: Fleetrun, installed: Path, module: bool):
    script = fleetrun.script(f"import heavy\n{LOOK}\n{STEPS}\nif ATTEMPT < 1: stay()")
    words = ["-m", script.removesuffix(".py")] if module else [script]
    launch = start(fleetrun, installed, *words, "--lr", "0.1")
    launch.until_err(READY)
    (standby,) = standbys(launch)
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0
    assert pids(launch)[1] == standby
    cold, warm = ((fleetrun.folder / f"look.{attempt}").read_text() for attempt in range(2))
    assert cold == warm


def test_the_script_of_now_runs_and_nothing_of_the_user_in_advance(fleetrun: Fleetrun, installed: Path):
    (fleetrun.folder / "mine.py").write_text("from telling import *\ntell('mine', os.getpid())\n")
    script = fleetrun.script(f"import mine\n{STEPS}\nstay()")
    launch = start(fleetrun, installed, script)
    launch.until_err(READY)
    assert len(launch.told(" mine ")) == 1
    fleetrun.script("tell('new', ATTEMPT, os.getpid())")
    (standby,) = standbys(launch)
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0
    assert launch.told(" new ") == [f"trainer.0 new 1 {standby}"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_without_its_standby_a_restart_is_cold(fleetrun: Fleetrun, installed: Path, number: int):
    script = fleetrun.script(f"{STEPS}\nif ATTEMPT < 1: stay()")
    launch = start(fleetrun, installed, script)
    launch.until_err(READY)
    (standby,) = standbys(launch)
    os.kill(standby, number)
    wait_until(lambda: state(standby) in ("gone", "T"))
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0, launch
    assert standby not in pids(launch)
    assert len(pids(launch)) == 2


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import socket\nkeep = socket.create_server(('127.0.0.1', 0))", "open a connection"),
        ("import subprocess\nkeep = subprocess.Popen(['sleep', '60'])", "start a process"),
        ("import mine", "mine.py"),
        ("import colorsys, __main__\n__main__.__file__", "cannot be imported ahead"),
    ],
)
def test_imports_that_act_keep_restarts_cold(fleetrun: Fleetrun, text: str, why: str):
    (fleetrun.folder / "mine.py").write_text("")
    script = fleetrun.script(f"{STEPS}\nif ATTEMPT < 1: stay()")
    launch = start(fleetrun, install(fleetrun, text), script)
    launch.until_err("restarts will not be warm: ")
    assert why in launch.err
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0, launch
    assert len(pids(launch)) == 2


def test_libraries_see_the_variables_that_the_script_sets_before(fleetrun: Fleetrun):
    script = fleetrun.script(
        "tell('first', ATTEMPT, os.environ.get('LEVEL'), os.environ.get('HOME') is None)\n"
        "os.environ['LEVEL'] = '3'\nos.environ['NONE'] = ''\ndel os.environ['HOME']\n"
        f"{STEPS}\ntell('then', ATTEMPT, heavy.LEVEL, heavy.HOME, os.environ.get('OWN'))\n"
        "if ATTEMPT < 2: stay()"
    )
    text = "import os\nLEVEL, HOME = map(os.environ.get, ('LEVEL', 'HOME'))\nos.environ['OWN'] = 'x'\n"
    launch = start(fleetrun, install(fleetrun, text), script)
    for attempt in range(2):
        launch.until_told(f" then {attempt}")
        launch.until(lambda: launch.err.count(READY) > attempt, READY)  # noqa: B023
        (standby,) = standbys(launch)
        os.kill(pids(launch)[attempt], signal.SIGKILL)
        launch.until_told(f" at {attempt + 1}")
        assert pids(launch)[attempt + 1] == standby
    assert launch.wait() == 0
    assert launch.told(" first ") == [f"trainer.0 first {attempt} None False" for attempt in range(3)]
    assert launch.told(" then ") == [f"trainer.0 then {attempt} 3 None x" for attempt in range(3)]


def test_a_library_that_the_script_finds_elsewhere_is_not_replaced(fleetrun: Fleetrun, installed: Path):
    other = fleetrun.folder / "other" / "site-packages"
    other.mkdir(parents=True)
    (other / "heavy.py").write_text("")
    script = fleetrun.script(f"sys.path.insert(0, {str(other)!r})\n{STEPS}\nif ATTEMPT < 1: stay()")
    launch = start(fleetrun, installed, script)
    launch.until_err("restarts will not be warm: ")
    assert "heavy" in launch.err
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0
    assert "importing heavy" not in fleetrun.log("trainer.0")


def test_a_script_that_another_program_starts_is_refused(fleetrun: Fleetrun):
    (fleetrun.folder / "run.sh").write_text("#!/bin/sh\nexec python train.py\n")
    (fleetrun.folder / "run.sh").chmod(0o755)
    launch = fleetrun.run("--warm", "run.sh")
    assert launch.code == 2
    assert "--warm is for Python scripts" in launch.err
    launch = fleetrun.run("--warm", "--probe", "off", fleetrun.script("pass"))
    assert launch.code == 2
    assert "needs the probe" in launch.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_standbys(fleetrun: Fleetrun, installed: Path, number: int):
    script = fleetrun.script(f"{STEPS}\nleave_on_term()\nstay()")
    launch = start(fleetrun, installed, "--nproc_per_node", "2", script)
    launch.until_err(f"2 standbys are {READY}")
    assert len(standbys(launch)) == 2
    launch.send(number) if number == signal.SIGINT else os.kill(launch.launcher, number)
    launch.wait()
    launch.gone()


def test_on_several_machines(fleetrun: Fleetrun, installed: Path):
    script = fleetrun.script(f"{STEPS}\nif ATTEMPT < 1: stay()")
    many = ["--nnodes", "2", "--master", f"127.0.0.1:{free_port()}"]
    launches = [start(fleetrun, installed, *many, "--rank", rank, script) for rank in ("0", "1")]
    for launch in launches:
        launch.until_err(READY)
    before = [standbys(launch)[0] for launch in launches]
    os.kill(pids(launches[0])[0], signal.SIGKILL)
    assert [launch.wait() for launch in launches] == [0, 0]
    assert [pids(launch)[1] for launch in launches] == before


READERS = {
    "placed": "import os\nRANK = os.environ.get('RANK')\n",
    "uses": "import placed\n",
    "copies": "import os\nALL = dict(os.environ)\n",
    "sets": "import os\nos.environ['MASTER_ADDR'] = 'elsewhere'\n",
}
"""Modules that must not be imported before the place of a process is known."""

SPARED = f"""
tell("pid", ATTEMPT, os.getpid())
tell("before", ATTEMPT, [each for each in ("heavy", *{tuple(READERS)}) if each in sys.modules])
import heavy, uses, copies
tell("saw", ATTEMPT, uses.placed.RANK, copies.ALL["RANK"], WHO in copies.ALL["FLEETRUN_CONTAINER"])
import sets
{LOOK.replace("look.{ATTEMPT}", "look.{RANK}.{ATTEMPT}")}
if ATTEMPT < 1:
    {STEPS.replace(chr(10), chr(10) + "    ")}
if ATTEMPT == 1 and RANK == 1:
    sys.exit(1)
if ATTEMPT < 2:
    leave_on_term()
    stay()
"""


def test_a_spare_has_a_standby_for_whatever_place_it_gets(fleetrun: Fleetrun, installed: Path):
    """It replaces one of two nodes; the next restart there is cold."""
    for name, text in READERS.items():
        (installed / f"{name}.py").write_text(text)
    (fleetrun.folder / "log").mkdir(exist_ok=True)
    script = fleetrun.script(SPARED)
    many = ("--nnodes", "2", "--spares", "1", "--heartbeat_timeout", "2", "--stop_timeout", "1")
    many = (*many, "--master", f"127.0.0.1:{free_port()}", script)
    first = start(fleetrun, installed, "--log_dir", "log/0", *many)
    first.until_err("waiting")
    lost = start(fleetrun, installed, "--log_dir", "log/1", *many)
    lost.until_told(" at 0")
    spare = start(fleetrun, installed, "--log_dir", "log/2", *many)
    spare.until_err("is a spare")
    spare.until_err(f"1 standby is {READY}")
    (standby,) = standbys(spare)
    os.kill(lost.launcher, signal.SIGKILL)
    lost.wait()
    assert [first.wait(), spare.wait()] == [0, 0], (first, spare)
    assert spare.told(" before ") == ["trainer.1 before 1 ['heavy']", "trainer.1 before 2 []"]
    assert spare.told(" saw ") == [f"trainer.1 saw {attempt} 1 1 True" for attempt in (1, 2)]
    warm, cold = (json.loads((fleetrun.folder / f"look.1.{attempt}").read_text()) for attempt in (1, 2))
    assert warm == cold
    assert spare.told(" pid 1 ") == [f"trainer.1 pid 1 {standby}"]


@pytest.mark.parametrize("reads", [False, True])
def test_a_restart_with_another_rank_is_warm_unless_a_library_has_read_it(
    fleetrun: Fleetrun, installed: Path, reads: bool
):
    text = READERS["placed"] if reads else "RANK = 0"
    (installed / "placed.py").write_text(text)
    (fleetrun.folder / "log").mkdir(exist_ok=True)
    steps = f"import placed\ntell('saw', ATTEMPT, placed.RANK)\n{STEPS}"
    script = fleetrun.script(f"{steps}\nif ATTEMPT < 1:\n    leave_on_term()\n    stay()")
    many = ("--nnodes", "1:2", "--heartbeat_timeout", "2", "--stop_timeout", "1")
    many = (*many, "--master", f"127.0.0.1:{free_port()}")
    stays = start(fleetrun, installed, "--log_dir", "log/0", *many, "--rank", "1", script)
    stays.until_err("waiting")
    lost = start(fleetrun, installed, "--log_dir", "log/1", *many, "--rank", "0", script)
    for launch in (stays, lost):
        launch.until_err(READY)
    assert stays.told(" at 0")[0].startswith("trainer.1 ")
    (standby,) = standbys(stays)
    os.kill(lost.launcher, signal.SIGKILL)
    lost.wait()
    assert stays.wait() == 0, stays
    again = stays.told(" at 1")[0]
    assert again.startswith("trainer.0 ")
    assert (int(again.split()[-1]) == standby) == (not reads)
    record = next((fleetrun.folder / "log/0").glob("*.events.jsonl")).read_text().splitlines()
    reports = [each for each in map(json.loads, record) if each["event"] == "progress"]
    assert reports[-1]["step"] == 2, reports
    assert not reads or stays.told(" saw 1 ") == ["trainer.0 saw 1 0"]

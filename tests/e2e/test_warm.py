"""Warm starts: a zygote has done the imports and forks the processes, and the script cannot tell."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.traces import wait_until

SCRIPTS = Path(__file__).parents[1] / "support" / "scripts"

HEAVY = """
import os
print("importing heavy", flush=True)
IMPORTED_BY = os.getpid()
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


def script(fleetrun: Fleetrun, text: str) -> str:
    """A script whose first statement imports `heavy`: the next one acts."""
    name = fleetrun.script(text)
    path = fleetrun.folder / name
    path.write_text(f"import heavy\n{path.read_text()}")
    return name


def start(fleetrun: Fleetrun, folder: Path, *words: str) -> Launch:
    path = f"{fleetrun._env['PYTHONPATH']}:{folder}"
    return fleetrun.start("--warm", *words, env={"PYTHONPATH": path})


def zygotes(launch: Launch) -> list[int]:
    """Their pids."""
    below = Path(f"/proc/{launch.launcher}/task/{launch.launcher}/children").read_text().split()
    return [int(pid) for pid in below if name_of(pid) == "zygote"]


def name_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


READY = "ready for warm starts"
COLD = "processes start cold, as without --warm: "


def pids(launch: Launch) -> list[int]:
    """Of the attempts so far."""
    return [int(line.split()[3]) for line in launch.told(" at ")]


def test_each_start_is_a_fork_of_a_zygote(fleetrun: Fleetrun, installed: Path):
    name = script(fleetrun, f"{STEPS}\ntell('by', heavy.IMPORTED_BY)\nif ATTEMPT < 2: stay()")
    launch = start(fleetrun, installed, "--nproc_per_node", "2", name)
    for attempt in range(2):
        launch.until_told(" by ", 2 * attempt + 2)
        os.kill(pids(launch)[2 * attempt], signal.SIGKILL)
    assert launch.wait() == 0
    assert READY in launch.err
    assert len(set(pids(launch))) == len(launch.told(" by ")) == 6
    assert forked(launch)
    parts = fleetrun.log("trainer.0").split("--- fleetrun: restart ")
    assert [part.count("importing heavy") for part in parts] == [1, 1, 1], parts
    (record,) = fleetrun.logs("*.events.jsonl")
    ends = [event for line in record.read_text().splitlines() if (event := json.loads(line)).get("signal")]
    assert len(ends) == 4, ends
    assert all(event["peak_memory"] > 0 for event in ends)


@pytest.mark.parametrize("change", ["argument", "module"])
def test_a_variable_that_the_script_sets_counts_although_another_run_did_not_set_it(
    fleetrun: Fleetrun, change: str
):
    folder = install(fleetrun, "import os\nSEEN = os.environ.get('THREADS', 'none')\n")
    sets = "os.environ['THREADS'] = 'one'\n"
    own = fleetrun.folder / "own.py"
    own.write_text(f"import os, sys\nif '--one' in sys.argv:\n    {sets}")
    name = fleetrun.script(f"import own\n{STEPS}\ntell('seen', heavy.SEEN)\nprogress.report(step=2)")
    assert seen(start(fleetrun, folder, name)) == "none"
    assert seen(start(fleetrun, folder, name)) == "none"  # its zygote imports the list of the first run
    if change == "module":
        own.write_text(f"import os\n{sets}")
    assert seen(start(fleetrun, folder, name, *(["--one"] if change == "argument" else []))) == "one"


def seen(launch: Launch) -> str:
    assert launch.wait() == 0, launch
    assert READY in launch.err, launch
    return launch.told(" seen ")[0].split()[-1]


def forked(launch: Launch) -> bool:
    """Nobody who tells has imported `heavy` by itself."""
    return not {line.split()[2] for line in launch.told(" by ")} & {str(pid) for pid in pids(launch)}


SERVED = """
import time
COMPILED = "trainers.ps.server_runtime" in sys.modules
import torch
from trainers import fleet
fleet.init()
strategy = fleet.DistributedStrategy()
strategy.ps_configs = {"durability": "log"}
model = fleet.distributed_model(torch.nn.Linear(2, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy)
if fleet.is_server():
    fleet.init_server()
    tell("at", ATTEMPT, os.getpid(), COMPILED)
    fleet.run_server()
else:
    fleet.init_worker()
    for _ in range(40):  # a report of a step is sent at most once a second
        optimizer.minimize(model(torch.ones(1, 2)).sum())
        time.sleep(0.05)
    wait_for_go()
    optimizer.minimize(model(torch.ones(1, 2)).sum())
    fleet.stop_worker()
"""


def test_a_parameter_server_is_restarted_warm(fleetrun: Fleetrun):
    launch = fleetrun.start("--warm", "--server_num=1", "--trainer_num=1", fleetrun.script(SERVED))
    launch.until(lambda: launch.err.count(READY) == 4, READY)  # each twice: with what the first ones import
    os.kill(pids(launch)[0], signal.SIGKILL)
    launch.until_told(" at 1")
    assert launch.told(" at ")[1].split()[4:] == ["True"], launch
    launch.go()
    assert launch.wait() == 0, launch
    assert COLD not in launch.err


LOOK = """
import json, resource, threading, warnings
def look():
    import __main__
    status = Path("/proc/self/status").read_text().splitlines()
    kept = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed", "NoNewPrivs", "Threads")
    return {
        "environ": {n: v for n, v in os.environ.items() if "RESTART_COUNT" not in n},
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "flags": str(sys.flags),
        "cwd": os.getcwd(), "comm": [each.read_text() for each in Path("/proc/self/task").glob("*/comm")],
        "cmdline": Path("/proc/self/cmdline").read_text(),
        "main": sorted(n for n in vars(__main__)), "threads": threading.active_count(),
        "status": [line for line in status if line.split(":")[0] in kept],
        "session": os.getsid(0) == os.getpgrp() == os.getpid(),
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


OBSERVE = SCRIPTS / "observe.py"
WAYS = {
    "script": ([str(OBSERVE), "--lr", "0.1"], {}),
    "module": (["-m", "observe", "-x"], {"OMP_NUM_THREADS": "2"}),
    "options": (
        ["--no_python", sys.executable, "-X", "utf8", "-W", "error::BytesWarning", "-c", "{text}", "-v"],
        {"PYTHONWARNINGS": "ignore::ImportWarning"},
    ),
}


def observed(fleetrun: Fleetrun, way: str, name: str, **more: str) -> dict[str, object]:
    words, env = WAYS[way]
    text = f"import runpy; runpy.run_path({str(OBSERVE)!r}, run_name='__main__')"
    path = f"{fleetrun._env['PYTHONPATH']}:{SCRIPTS}"
    launch = fleetrun.run(
        "--warm", *[word.format(text=text) for word in words],
        env={"PYTHONPATH": path, "OBSERVED": str(fleetrun.folder / "observed.json"), **env, **more},
    )  # fmt: skip
    assert launch.code == 0, launch
    assert (COLD if name == "cold" else READY) in launch.err, launch
    assert (READY if name == "cold" else COLD) not in launch.err, launch
    return json.loads((fleetrun.folder / "observed.json").read_text())


@pytest.mark.parametrize("way", WAYS)
def test_a_script_cannot_tell(fleetrun: Fleetrun, way: str):
    cold = observed(fleetrun, way, "cold", NSYS_PROFILING_SESSION_ID="1")
    warm = observed(fleetrun, way, "warm")
    assert len(cold) >= 77
    assert {name: (cold[name], warm[name]) for name in cold if cold[name] != warm[name]} == {}


def test_a_script_of_another_user_is_warm(as_nobody: Fleetrun):
    text = "import json\nimport os, pathlib\ntitle = pathlib.Path('/proc/self/environ').read_bytes()\n"
    (as_nobody.folder / "train.py").write_text(f"{text}print(b'FLEETRUN_CONTAINER=' in title, os.getuid())\n")
    launch = as_nobody.run("--warm", "train.py")
    assert launch.code == 0
    assert "True 65534" in launch.out
    assert READY in launch.err


RANDOM = """
import json
import logging, multiprocessing, random, threading, time
import numpy, torch
from telling import *
numbers = [random.random(), *numpy.random.rand(1), *torch.rand(1).tolist(), torch.initial_seed()]
tell("drew", *numbers, bytes(multiprocessing.current_process().authkey).hex())
tell("own", threading.main_thread().native_id == os.getpid(), time.time() - logging._startTime < 100)
x = torch.rand(200, 200, requires_grad=True)
(x @ x).sum().backward()
if ATTEMPT < 1:
    meet(2)
    if RANK: sys.exit(1)
    leave_on_term()
    stay()
"""


def test_random_numbers_differ_over_ranks_and_restarts(fleetrun: Fleetrun):
    (fleetrun.folder / "train.py").write_text(RANDOM)
    launch = fleetrun.run("--warm", "--nproc_per_node", "2", "train.py")
    assert launch.code == 0, launch
    assert READY in launch.err
    assert COLD not in launch.err
    for number in range(2, 7):
        assert len({line.split()[number] for line in launch.told(" drew ")}) == 4, launch
    assert {tuple(line.split()[2:]) for line in launch.told(" own ")} == {("True", "True")}


OUTLIVES = """
import torch
import torch.distributed as dist
import weakref
from torch.nn.parallel import DistributedDataParallel
from telling import *
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
group = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
model.process_group = None
tell("group", group() is not None)
del model
tell("then", group() is not None)
"""


def test_a_reducer_is_never_the_last_owner_of_its_group(fleetrun: Fleetrun):
    """It would destroy the group while it holds the lock of the interpreter (pytorch#56297)."""
    (fleetrun.folder / "train.py").write_text(OUTLIVES)
    launch = fleetrun.run("--warm", "train.py")
    assert launch.code == 0, launch
    assert launch.news == ["trainer.0 group True", "trainer.0 then False"]


ENDS = """
import json
from telling import *
if ATTEMPT == 0: os.kill(os.getpid(), signal.SIGSEGV)
if ATTEMPT == 1: sys.exit(7)
if ATTEMPT == 2: raise ValueError("no")
"""


def test_exit_codes_and_signals_are_those_of_a_cold_process(fleetrun: Fleetrun):
    (fleetrun.folder / "train.py").write_text(ENDS)
    launch = fleetrun.run("--warm", "--max_restart", "2", "train.py")
    assert launch.code == 1, launch
    (record,) = fleetrun.logs("*.events.jsonl")
    ends = [each for each in map(json.loads, record.read_text().splitlines()) if each["event"] == "exited"]
    assert [each["code"] for each in ends] == [-11, 7, 1], ends
    assert "ValueError: no" in launch.err
    assert COLD not in launch.err


def test_a_package_that_changes_is_imported_again(fleetrun: Fleetrun, installed: Path):
    name = script(
        fleetrun, f"{STEPS}\ntell('by', heavy.IMPORTED_BY, getattr(heavy, 'NEW', 0))\nif ATTEMPT < 2: stay()"
    )
    launch = start(fleetrun, installed, name)
    launch.until(lambda: launch.err.count(READY) == 2 and launch.told(" ready"), READY)
    (installed / "heavy.py").write_text(f"{HEAVY}NEW = 1\n")
    os.kill(pids(launch)[0], signal.SIGKILL)
    launch.until_told(" by ", 2)
    assert launch.told(" by ")[1] == f"trainer.0 by {pids(launch)[1]} 1", launch
    assert f"{COLD}an imported package has been changed" in launch.err
    launch.until(lambda: launch.err.count(READY) == 3, READY)
    os.kill(pids(launch)[1], signal.SIGKILL)
    assert launch.wait() == 0
    assert launch.told(" by ")[2].endswith(" 1")


def test_the_next_launch_knows_the_modules_of_this_one(fleetrun: Fleetrun, installed: Path):
    text = f"{STEPS}\ntell('by', heavy.IMPORTED_BY)"
    name = fleetrun.script(text)
    for known in (False, True, False):
        launch = start(fleetrun, installed, "--nproc_per_node", "2", name)
        assert launch.wait() == 0, launch
        assert forked(launch) is known
        if known:
            fleetrun.script(f"{text}\n# edited")
    kept = list((fleetrun.folder / "run" / "fleetrun").glob("*.imports"))
    assert len(kept) == 1
    assert kept[0].parent.stat().st_mode & 0o777 == 0o700


def test_the_script_of_now_runs_and_nothing_of_the_user_in_advance(fleetrun: Fleetrun, installed: Path):
    (fleetrun.folder / "mine.py").write_text(
        "import heavy\nfrom telling import *\ntell('mine', os.getpid())\n"
    )
    launch = start(fleetrun, installed, script(fleetrun, f"import mine\n{STEPS}\nstay()"))
    launch.until_told(" ready")
    assert launch.told(" mine ") == [f"trainer.0 mine {pids(launch)[0]}"]
    script(fleetrun, "tell('new', ATTEMPT, os.getpid(), heavy.IMPORTED_BY != os.getpid())")
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0
    (new,) = launch.told(" new ")
    assert new.endswith(" True"), launch


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_restart_starts_another_zygote_for_one_that_ended(fleetrun: Fleetrun, installed: Path, number: int):
    name = script(fleetrun, f"{STEPS}\ntell('by', heavy.IMPORTED_BY)\nif ATTEMPT < 1: stay()")
    launch = start(fleetrun, installed, name)
    launch.until_told(" ready")
    launch.until(lambda: launch.err.count(READY) == 2, READY)
    (zygote,) = zygotes(launch)
    os.kill(zygote, number)
    wait_until(lambda: state(zygote) in ("gone", "T"))
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0, launch
    assert COLD not in launch.err
    assert launch.err.count(READY) == 3
    assert str(zygote) not in launch.told(" by ")[1].split()
    assert forked(launch)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import socket\nkeep = socket.create_server(('127.0.0.1', 0))", "open a connection"),
        ("import tempfile\nkeep = tempfile.TemporaryFile()", "the imports open /"),
        ("import subprocess\nkeep = subprocess.Popen(['sleep', '60'])", "start a process"),
        (
            "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
            "a thread",
        ),
        ("import mine", "mine.py"),
        ("import colorsys, __main__\n__main__.__file__", "cannot be imported ahead"),
        ("import random\nNAME = random.random()", "draws random numbers from random"),
        ("import numpy\nnumpy.random.seed(1)", "draws random numbers from numpy"),
        ("import os\nos.chdir('/')\n", "change the working directory"),
        ("import sys\nsys.settrace(lambda *_: None)", "the interpreter is traced"),
    ],
)
def test_imports_that_act_keep_starts_cold(fleetrun: Fleetrun, text: str, why: str):
    (fleetrun.folder / "mine.py").write_text("")
    name = script(fleetrun, "tell('at', ATTEMPT, os.getpid())")
    launch = start(fleetrun, install(fleetrun, text), "--nproc_per_node", "2", name)
    assert launch.wait() == 0, launch
    assert launch.err.count(COLD) == 1, launch
    assert why in launch.err
    assert READY not in launch.err
    assert len(pids(launch)) == 2


@pytest.mark.parametrize("variable", ["NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH"])
def test_a_profiler_keeps_starts_cold(fleetrun: Fleetrun, installed: Path, variable: str):
    launch = fleetrun.start("--warm", script(fleetrun, ""), env={"PYTHONPATH": str(installed), variable: "1"})
    launch.wait()
    assert f"{COLD}{variable} is set" in launch.err


ATTACKED = """
import os, signal
ZYGOTE = IMPORTED_BY = os.getpid()
def middle():
    return os.getppid() == ZYGOTE and os.kill(os.getpid(), signal.{number})
def rank():
    return ZYGOTE in (os.getpid(), os.getppid()) or os.kill(os.getpid(), signal.{number})
os.register_at_fork({when}={who})
"""


@pytest.mark.parametrize("number", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize(("when", "who"), [("before", "middle"), ("after_in_child", "rank")])
def test_processes_that_do_not_come_start_cold(fleetrun: Fleetrun, number: str, when: str, who: str):
    """The process between a zygote and the ranks, or a rank that may not go on yet."""
    folder = install(fleetrun, ATTACKED.format(number=number, when=when, who=who))
    name = script(fleetrun, "tell('at', ATTEMPT, os.getpid())\ntell('by', heavy.IMPORTED_BY)")
    launch = start(fleetrun, folder, "--nproc_per_node", "2", name)
    assert launch.wait() == 0, launch
    assert launch.err.count(COLD) == 1, launch
    by = {line.split()[2] for line in launch.told(" by ")}
    assert by == {str(pid) for pid in pids(launch)}
    assert len(by) == 2


def test_a_thousand_forks(fleetrun: Fleetrun, installed: Path):
    """Marked in tests/thorough.txt."""
    name = script(fleetrun, "tell('by', heavy.IMPORTED_BY)\nmeet(170)\nsys.exit(RANK == 0 and ATTEMPT < 5)")
    many = ("--nproc_per_node", "170", "--max_restart", "5", "--stop_timeout", "1")
    launch = start(fleetrun, installed, *many, name)
    assert launch.wait() == 0, launch
    assert len(launch.told(" by ")) == 1020
    assert COLD not in launch.err


def test_libraries_see_the_variables_that_the_script_sets_before(fleetrun: Fleetrun):
    name = fleetrun.script(
        "tell('first', ATTEMPT, os.environ.get('LEVEL'), os.environ.get('HOME') is None)\n"
        "os.environ['LEVEL'] = '3'\nos.environ['NONE'] = ''\ndel os.environ['HOME']\n"
        f"{STEPS}\ntell('then', ATTEMPT, heavy.LEVEL, heavy.HOME, os.environ.get('OWN'))\n"
        "tell('by', heavy.IMPORTED_BY)\nif ATTEMPT < 2: stay()"
    )
    text = "import os\nLEVEL, HOME = map(os.environ.get, ('LEVEL', 'HOME'))\nos.environ['OWN'] = 'x'\n"
    launch = start(fleetrun, install(fleetrun, f"{text}IMPORTED_BY = os.getpid()\n"), name)
    for attempt in range(2):
        launch.until_told(" by ", attempt + 1)
        launch.until(lambda: launch.err.count(READY) > 1, READY)
        os.kill(pids(launch)[attempt], signal.SIGKILL)
    assert launch.wait() == 0
    by = [line.split()[2] for line in launch.told(" by ")]
    assert [each in map(str, pids(launch)) for each in by] == [True, False, False]
    assert launch.told(" first ") == [f"trainer.0 first {attempt} None False" for attempt in range(3)]
    assert launch.told(" then ") == [f"trainer.0 then {attempt} 3 None x" for attempt in range(3)]


def test_a_library_that_the_script_finds_elsewhere_is_not_replaced(fleetrun: Fleetrun, installed: Path):
    other = fleetrun.folder / "other" / "site-packages"
    other.mkdir(parents=True)
    (other / "heavy.py").write_text("")
    text = f"sys.path.insert(0, {str(other)!r})\n{STEPS}\nif ATTEMPT < 1: stay()"
    launch = start(fleetrun, installed, fleetrun.script(text))
    launch.until_err(COLD)
    assert "heavy" in launch.err
    os.kill(pids(launch)[0], signal.SIGKILL)
    assert launch.wait() == 0
    assert "importing heavy" not in fleetrun.log("trainer.0")


def test_a_script_that_another_program_starts_is_refused(fleetrun: Fleetrun):
    (fleetrun.folder / "run.sh").write_text("#!/bin/sh\nexec python train.py\n")
    (fleetrun.folder / "run.sh").chmod(0o755)
    launch = fleetrun.run("--warm", "run.sh")
    assert launch.code == 2
    assert "--warm needs a Python script" in launch.err
    launch = fleetrun.run("--warm", "--probe", "off", fleetrun.script("pass"))
    assert launch.code == 2
    assert "needs the probe" in launch.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("who", ["launcher", "guard"])
def test_nothing_is_left_of_zygotes(fleetrun: Fleetrun, installed: Path, number: int, who: str):
    launch = start(fleetrun, installed, "--nproc_per_node", "2", script(fleetrun, f"{STEPS}\nstay()"))
    launch.until_told(" ready", 2)
    wait_until(lambda: zygotes(launch))  # another zygote may just take the place of the first
    os.kill(launch.launcher if who == "launcher" else launch.popen.pid, number)
    launch.wait()
    launch.gone()


def test_an_interrupt_during_the_imports_ends_the_job(fleetrun: Fleetrun):
    text = "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    launch = start(
        fleetrun, install(fleetrun, text), "--nproc_per_node", "2", script(fleetrun, "tell('ran')")
    )
    launch.until_err("Run Pod")
    wait_until(lambda: zygotes(launch))
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert launch.news == []
    launch.gone()


def test_on_several_machines(fleetrun: Fleetrun, installed: Path):
    name = script(fleetrun, f"{STEPS}\ntell('by', heavy.IMPORTED_BY)\nif ATTEMPT < 1: stay()")
    many = ["--nnodes", "2", "--master", f"127.0.0.1:{free_port()}"]
    launches = [start(fleetrun, installed, *many, "--rank", rank, name) for rank in ("0", "1")]
    for launch in launches:
        launch.until_told(" ready")
    os.kill(pids(launches[0])[0], signal.SIGKILL)
    assert [launch.wait() for launch in launches] == [0, 0]
    assert all(forked(launch) and len(pids(launch)) == 2 for launch in launches)


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


def test_a_spare_has_a_zygote_for_whatever_place_it_gets(fleetrun: Fleetrun, installed: Path):
    """It replaces one of two nodes."""
    for name, text in READERS.items():
        (installed / f"{name}.py").write_text(text)
    (fleetrun.folder / "log").mkdir(exist_ok=True)
    name = fleetrun.script(SPARED)
    many = ("--nnodes", "2", "--spares", "1", "--heartbeat_timeout", "2", "--stop_timeout", "1")
    many = (*many, "--master", f"127.0.0.1:{free_port()}", name)
    first = start(fleetrun, installed, "--log_dir", "log/0", *many)
    first.until_err("waiting")
    lost = start(fleetrun, installed, "--log_dir", "log/1", *many)
    lost.until_told(" at 0")
    spare = start(fleetrun, installed, "--log_dir", "log/2", *many)
    spare.until_err("as a spare")
    spare.until_err(READY)
    os.kill(lost.launcher, signal.SIGKILL)
    lost.wait()
    assert [first.wait(), spare.wait()] == [0, 0], (first, spare)
    assert spare.told(" before ") == [f"trainer.1 before {attempt} ['heavy']" for attempt in (1, 2)]
    assert spare.told(" saw ") == [f"trainer.1 saw {attempt} 1 1 True" for attempt in (1, 2)]
    assert COLD not in spare.err


@pytest.mark.parametrize("reads", [False, True])
def test_a_restart_with_another_rank_is_warm_and_libraries_read_the_new_one(
    fleetrun: Fleetrun, installed: Path, reads: bool
):
    text = READERS["placed"] if reads else "RANK = 0"
    (installed / "placed.py").write_text(text)
    (fleetrun.folder / "log").mkdir(exist_ok=True)
    text = f"import placed\ntell('saw', ATTEMPT, placed.RANK)\n{STEPS}\ntell('by', heavy.IMPORTED_BY)"
    name = script(fleetrun, f"{text}\nif ATTEMPT < 1:\n    leave_on_term()\n    stay()")
    many = ("--nnodes", "1:2", "--heartbeat_timeout", "2", "--stop_timeout", "1")
    many = (*many, "--master", f"127.0.0.1:{free_port()}")
    stays = start(fleetrun, installed, "--log_dir", "log/0", *many, "--rank", "1", name)
    stays.until_err("waiting")
    lost = start(fleetrun, installed, "--log_dir", "log/1", *many, "--rank", "0", name)
    for launch in (stays, lost):
        launch.until_told(" ready")
    assert stays.told(" at 0")[0].startswith("trainer.1 ")
    os.kill(lost.launcher, signal.SIGKILL)
    lost.wait()
    assert stays.wait() == 0, stays
    assert stays.told(" at 1")[0].startswith("trainer.0 ")
    assert forked(stays)
    record = next((fleetrun.folder / "log/0").glob("*.events.jsonl")).read_text().splitlines()
    reports = [each for each in map(json.loads, record) if each["event"] == "progress"]
    assert reports[-1]["step"] == 2, reports
    if reads:
        assert [line.split()[3] for line in stays.told(" saw ")] == ["1", "0"]

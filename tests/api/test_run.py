"""`fleetrun.run`: what functions and scripts return, and how failures arrive."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import fleetrun
from fleetrun.api import _secrets_apart, option_words
from tests.support.ports import free_port
from tests.support.waiting import eventually

RANK = "RANK"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: nothing of the tests can be imported from there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return tmp_path


def nothing_left(folder: Path) -> bool:
    return list((folder / "tmp").glob("fleetrun-*")) == []


class Bill:
    """A value of a class of this module."""

    def __init__(self, total: int, of: str) -> None:
        self.total = total
        self.of = of


def add(base: int, *, factor: int) -> Bill:
    return Bill(base + factor * int(os.environ[RANK]), os.environ["OF"])


@pytest.mark.slow
def test_every_rank_returns_its_value(folder, capsys):
    def shown(*args, **kwargs):
        print("shown by", os.environ[RANK])
        return add(*args, **kwargs)

    result = fleetrun.run(shown, (10,), {"factor": 2}, nproc_per_node=2, env={"OF": "me"})
    assert [(each.total, each.of) for each in result.values] == [(10, "me"), (12, "me")]
    assert all(isinstance(each, Bill) for each in result.values)
    assert (result.ranks, result.restarts, result.exit_code) == ([0, 1], 0, 0)
    assert result.elapsed > 0
    assert "shown by 1" in result.logs["trainer.1"].read_text()
    assert capsys.readouterr() == ("shown by 0\n", "")
    assert nothing_left(folder)


@pytest.mark.slow
def test_a_function_of_a_module_that_only_the_caller_finds(folder, monkeypatch):
    (folder / "lib").mkdir()
    (folder / "lib" / "only_here.py").write_text("def answer():\n    return __name__\n")
    monkeypatch.syspath_prepend("lib")
    from only_here import answer

    assert fleetrun.run(answer, display="quiet").values == ["only_here"]
    (folder / "lib" / "only_here.py").unlink()
    with pytest.raises(fleetrun.JobError, match="Each process must be able to import"):
        fleetrun.run(answer, display="quiet")


@pytest.mark.slow
def test_a_script_gets_its_words_and_is_shown(folder, capsys):
    (folder / "train.py").write_text("import sys; print(sys.argv[1:])")
    result = fleetrun.run(folder / "train.py", ("--lr", 0.5), nproc_per_node=2, follow=["trainer:1"])
    assert (result.values, result.ranks) == ([], [0, 1])
    assert capsys.readouterr().out == "trainer.1 | ['--lr', '0.5']\n"
    with pytest.raises(fleetrun.UsageError, match="kwargs"):
        fleetrun.run("train.py", (), {"lr": 1})
    with pytest.raises(fleetrun.UsageError, match="must be a list"):
        fleetrun.run("train.py", "--lr 0.5")


@pytest.mark.slow
def test_a_job_file_is_a_program(folder):
    (folder / "train.py").write_text("")
    (folder / "job.toml").write_text('script = "train.py"\nnproc_per_node = 2')
    assert fleetrun.run(config=folder / "job.toml").ranks == [0, 1]


# ---- failures


class Odd(Exception):
    """It cannot be unpickled: its arguments are not those that it was made with."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"odd: {one + other}")


def raises_on_rank_1():
    if os.environ[RANK] == "1":
        raise ValueError("no such user")
    threading.Event().wait()


@pytest.mark.slow
def test_the_first_failure_is_an_exception_with_its_report(folder, capsys):
    with pytest.raises(fleetrun.JobError, match="trainer 1") as caught:
        fleetrun.run(raises_on_rank_1, nproc_per_node=2)
    error = caught.value
    assert (error.role, error.rank, error.exit_code) == ("trainer", 1, 1)
    assert repr(error.__cause__) == "ValueError('no such user')"
    assert error.traceback.startswith("Traceback")
    assert error.traceback.endswith("ValueError: no such user")
    assert 'raise ValueError("no such user")' in error.traceback
    assert "fleetrun/function.py" not in error.traceback
    assert "ValueError: no such user" in str(error)
    assert error.logs["trainer.1"].is_file()
    assert capsys.readouterr().err == ""  # the exception has it
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.rank, again.logs) == (str(error), 1, error.logs)
    assert nothing_left(folder)


@pytest.mark.slow
def test_the_rank_is_that_of_the_first_failure_and_not_of_the_first_exit(folder):
    def raises():
        if os.environ[RANK] == "0":
            while not Path("raised").exists():
                time.sleep(0.002)
            raise ValueError("the second failure")
        threading.Thread(target=stays).start()
        raise KeyError("the first failure")

    def stays():
        threading.main_thread().join()
        Path("raised").touch()
        threading.Event().wait()

    with pytest.raises(fleetrun.JobError, match="First failure: trainer 1") as caught:
        fleetrun.run(raises, nproc_per_node=2, display="quiet")
    error = caught.value
    assert (error.role, error.rank) == ("trainer", 1)
    assert "the first failure" in error.traceback
    assert repr(error.__cause__) == "KeyError('the first failure')"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "said", "code"),
    [
        (lambda: (each for each in ()), "generator.*Hint: What a trainer returns is pickled", 1),
        (lambda: (_ for _ in ()).throw(Odd(1, 2)), "odd: 3", 1),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL", 137),
        (lambda: os._exit(0), "before its function returned", 1),
        (lambda: sys.exit(7), "exited with code 7", 7),
    ],
    ids=["unpicklable value", "unpicklable exception", "killed", "left early", "exit"],
)
def test_other_ends_of_a_function(folder, function, said, code):
    with pytest.raises(fleetrun.JobError, match=f"(?s){said}") as caught:
        fleetrun.run(function, display="quiet")
    assert (caught.value.exit_code, caught.value.rank) == (code, 0)
    assert nothing_left(folder)


@pytest.mark.slow
def test_a_restarted_function_returns_what_its_last_attempt_returned(folder, capsys):
    def second_time():
        if not Path("seen").exists():
            Path("seen").touch()
            raise OSError("the first time")
        return "second"

    result = fleetrun.run(second_time, max_restart=1)
    assert (result.values, result.restarts) == (["second"], 1)
    assert (
        "OSError: the first time" in capsys.readouterr().err
    )  # it did not end the job: the user must see it


@pytest.mark.slow
def test_a_value_of_an_earlier_attempt_is_none(folder):
    def part():
        if Path("seen").exists() and os.environ[RANK] == "0":
            os._exit(0)
        if Path("seen").exists() or os.environ[RANK] == "0":
            return "early"
        until = time.monotonic() + 60
        while not list(folder.glob("tmp/fleetrun-*/0.value")) and time.monotonic() < until:
            time.sleep(0.002)
        Path("seen").touch()
        raise OSError("the first time")

    with pytest.raises(fleetrun.JobError, match="trainer 0 ended before its function returned"):
        fleetrun.run(part, nproc_per_node=2, max_restart=1)


@pytest.mark.slow
def test_output_that_cannot_be_shown_stops_the_job(folder, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    with contextlib.suppress(BrokenPipeError), os.fdopen(write, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        with pytest.raises(BrokenPipeError):
            fleetrun.run(lambda: print("line") or threading.Event().wait())
    monkeypatch.undo()
    eventually(lambda: nothing_left(folder))


@pytest.mark.slow
def test_a_function_is_not_launched_again(folder):
    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "fleetrun", *words], capture_output=True, text=True)

    fleetrun.run(add, (1,), {"factor": 1}, env={"OF": "me"}, display="quiet")
    again = command("again", "add")
    assert (again.returncode, again.stdout) == (2, "")
    assert "ran tests.api.test_run.add, a function of a Python program" in again.stderr
    assert "tests.api.test_run.add" in command("history").stdout


@pytest.mark.slow
def test_a_script_is_launched_again_for_a_person(folder):
    (folder / "ok.py").write_text("print('fine')")
    fleetrun.run("ok.py", display="quiet")
    again = subprocess.run([sys.executable, "-m", "fleetrun", "again"], capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, "fine\n")
    assert "LAUNCH INFO" in again.stderr


def test_what_cannot_be_pickled_is_told_before_anything_starts(folder):
    lock = threading.Lock()
    with pytest.raises(fleetrun.UsageError, match="lock") as caught:
        fleetrun.run(lambda: lock)
    assert "inside the function" in str(caught.value.hint)
    assert nothing_left(folder)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nproc_per_node": 2, "master": None}, []),
        ({"mastr": None}, ["--mastr=None"]),
        ({"nproc_per_nod": 2}, ["--nproc_per_nod=2"]),
        ({"timeout": 1.5, "stop_timeout": "5m"}, []),
        ({"max_restarts": 70_000_000}, ["--max_restarts=70000000"]),
        ({"gpus": [0, 1], "nproc_per_node": 3}, ["--gpus=0,1", "--nproc_per_node=3"]),
    ],
)
def test_errors_are_those_of_the_command_line(folder, options, words):
    """Of options that are right, the script is missing."""
    script = "trian.py"
    (folder / "train.py").touch()
    command = [sys.executable, "-m", "fleetrun", *(words or ["--nproc_per_node=2"]), script]
    typed = subprocess.run(command, capture_output=True, text=True)
    with pytest.raises(fleetrun.LaunchError) as caught:
        fleetrun.run(script, **options)
    error = caught.value
    lines = [f"fleetrun: error: {error.message}", *(f"  {line}" for line in (error.hint or "").splitlines())]
    assert typed.stderr.splitlines() == lines
    assert error.exit_code == typed.returncode
    assert getattr(error, "__notes__", []) == ([error.hint] if error.hint else [])
    assert type(error).__name__ == ("UsageError" if words else "ScriptNotFoundError")


def test_env_may_be_a_list_of_words(folder, capsys):
    (folder / "train.py").write_text("import os; print(os.environ['A'], os.environ['B'])")
    fleetrun.run("train.py", env=["A=1,2", "B=x", "P*"])
    assert "1,2 x" in capsys.readouterr().out.splitlines()


def test_values_become_the_words_of_a_command_line():
    options = {
        "nnodes": (2, 4),
        "ips": ["h1", "h2"],
        "follow": ["trainer:0", "ps"],
        "heter_worker_num": [1, 2],
        "log_dir": Path("a b"),
        "scheduler_option": {"partition": "gpu"},
        "enable_gpu_log": False,
        "sort_ip": True,
        "master": None,
        "timeout": 0.5,
    }
    assert option_words(options) == [
        "--nnodes=2:4", "--ips=h1,h2", "--follow=trainer:0", "--follow=ps", "--heter_worker_num=1;2",
        "--log_dir=a b", "--scheduler_option=partition=gpu", "--enable_gpu_log=false", "--sort_ip=true",
        "--timeout=0.5",
    ]  # fmt: skip


def test_whom_to_notify_is_in_no_command_line():
    kept, env = _secrets_apart({"notify": ["command:true", "https://h/x"], "nnodes": 1})
    assert (kept, env) == ({"nnodes": 1}, {"FLEETRUN_NOTIFY": "command:true\nhttps://h/x"})


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("program", "options", "named"),
    [
        ("x.py", {"dry_run": True}, "dry_run"),
        ("x.py", {"version": True}, "version"),
        ("x.py", {"quiet": True}, "display"),
        (print, {"save": "job.toml"}, "save"),
        ("x.py", {"nproc_per_node": object()}, "nproc_per_node"),
        ("x.py", {"nproc_per_node": [1]}, "nproc_per_node"),
        (print, {"scheduler": "ssh"}, "ssh"),
        (print, {"no_python": True}, "no_python"),
        (print, {"display": "live"}, "display"),
        (coroutine, {}, "coroutine is a coroutine function"),
        (partial(generator), {}, "generator function"),
        (print, {"args": 3}, r"args is 3; it must be a list"),
        ("x.py", {"args": {"lr": 1}}, r"args is .*must be a list"),
        (print, {"kwargs": 5}, r"kwargs is 5; it must be a dict"),
        (print, {"kwargs": {1: 2}}, r"kwargs is \{1: 2\}; it must be a dict"),
        (print, {"env": {"A": None}}, r"env\['A'\] is None"),
        (print, {"env": "A=1"}, r"env is 'A=1'; it must be a dict .* or a list"),
        ("x.py", {"env": ["A_TOKEN=1"]}, "A_TOKEN=...: the name looks like a secret"),
    ],
)
def test_what_python_cannot_ask_for(folder, program, options, named):
    with pytest.raises(fleetrun.UsageError, match=named):
        fleetrun.run(program, **options)
    assert nothing_left(folder)


# ---- other kinds of jobs


@pytest.mark.slow
def test_the_values_of_a_job_with_servers_are_those_of_its_trainers(folder):
    def part():
        if os.environ["TRAINING_ROLE"] == "PSERVER":
            return threading.Lock()  # nobody asks for it
        return int(os.environ["PADDLE_TRAINER_ID"])

    result = fleetrun.run(part, server_num=1, trainer_num=2, display="quiet")
    assert (result.values, result.ranks) == ([0, 1], [0, 1])
    assert set(result.logs) == {"ps.0", "trainer.0", "trainer.1"}


@pytest.mark.slow
def test_on_several_machines_each_call_has_the_values_of_its_own(folder):
    """Two calls in threads stand for two machines."""
    master, found = f"127.0.0.1:{free_port()}", {}

    def machine(name: str) -> None:
        found[name] = fleetrun.run(
            lambda: int(os.environ[RANK]),
            nnodes=2,
            master=master,
            nproc_per_node=2,
            log_dir=name,
            display="quiet",
        )

    threads = [threading.Thread(target=machine, args=(name,)) for name in ("one", "two")]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert sorted(each.ranks for each in found.values()) == [[0, 1], [2, 3]]
    assert all(each.values == each.ranks for each in found.values())


def test_importing_fleetrun_is_cheap():
    code = (
        "import sys; before = set(sys.modules)\n"
        "import fleetrun\n"
        "assert {'run', 'launch', 'Job', 'Result', '__version__'} <= set(dir(fleetrun)), dir(fleetrun)\n"
        "assert fleetrun.__doc__ and fleetrun.__version__\n"
        "print(*sorted(set(sys.modules) - before))\n"
        "from fleetrun import run, launch, Job, Result, JobError, LaunchError\n"
        "assert 'torch' not in sys.modules and 'cloudpickle' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fleetrun"]

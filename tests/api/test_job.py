"""`fleetrun.launch`, and programs that call it: threads, asyncio, pytest, interrupts, the caller's death."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleetrun
from tests.support import sshd as sshd_parts
from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.traces import wait_until
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

WAIT = "import threading\nprint('ready', flush=True)\nthreading.Event().wait()\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "wait.py").write_text(WAIT)
    return tmp_path


def until_ready(job: fleetrun.Job) -> None:
    next(event for event in job.events() if event["event"] == "log" and event["line"] == "ready")


def test_a_job_is_asked_watched_and_stopped_from_other_threads(folder):
    job = fleetrun.launch("wait.py", nproc_per_node=2, job_id="night")
    seen: list[str] = []
    watching = threading.Thread(target=lambda: seen.extend(event["event"] for event in job.events()))
    watching.start()
    until_ready(job)
    status = job.status()
    assert (status["job"], status["state"], len(status["containers"])) == ("night", "running", 2)
    assert (job.name, job.pod, job.running) == ("night", status["pod"], True)
    assert job.pod in repr(job)
    assert os.getsid(job.pid) != os.getsid(0)  # Ctrl-C at the caller's terminal is the caller's alone
    with pytest.raises(TimeoutError, match="night"):
        job.wait(0.01)
    with pytest.raises(fleetrun.UsageError, match="timeout is -1"):
        job.wait(-1)
    eventually(lambda: "ready" in job.logs["trainer.1"].read_text())
    stopping = threading.Thread(target=job.stop)
    stopping.start()
    result = job.wait()
    watching.join()
    stopping.join()
    assert (result.exit_code, job.running) == (143, False)
    assert (seen[0], seen[-1], seen.count("exited")) == ("launch", "over", 2)
    job.stop()  # nothing
    with pytest.raises(fleetrun.LaunchError, match="has ended"):
        job.status()
    assert job.wait() == result


def test_stop_now_kills_what_ignores_signals(folder):
    (folder / "stubborn.py").write_text(
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{WAIT}"
    )
    job = fleetrun.launch("stubborn.py")
    until_ready(job)
    job.stop(now=True)
    assert job.wait().exit_code in (143, 131)


def test_as_a_context_manager_it_waits_and_an_exception_stops_it(folder):
    (folder / "short.py").write_text("open('done', 'w')")
    with fleetrun.launch("short.py") as job:
        pass
    assert (job.running, (folder / "done").exists()) == (False, True)

    def fails(job: fleetrun.Job) -> None:
        with job:
            until_ready(job)
            raise KeyError("mine")

    job = fleetrun.launch("wait.py")
    with pytest.raises(KeyError, match="mine"):
        fails(job)
    assert (job.running, job.wait().exit_code) == (False, 143)
    (folder / "fails.py").write_text("raise SystemExit(3)")
    with pytest.raises(fleetrun.JobError), fleetrun.launch("fails.py", max_restart=0):
        pass


def test_user_signals_reach_the_processes(folder):
    handler = "import signal, sys\nsignal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n"
    (folder / "signals.py").write_text(handler + WAIT)
    job = fleetrun.launch("signals.py")
    until_ready(job)
    job.send_signal(signal.SIGUSR1)
    assert job.wait().exit_code == 0


def test_the_status_can_be_asked_at_once(folder):
    job = fleetrun.launch("wait.py")
    assert job.status()["pod"] == job.pod
    job.stop(now=True)
    job.wait()


def test_a_failure_before_a_stop_stays_one(folder):
    (folder / "fail.py").write_text("raise SystemExit(3)")
    job = fleetrun.launch("fail.py", max_restart=0)
    for _ in job.events():
        pass
    job.stop()
    with pytest.raises(fleetrun.JobError) as first:
        job.wait()
    with pytest.raises(fleetrun.JobError) as second:
        job.wait()
    assert first.value is second.value
    assert first.value.exit_code == 3


def test_a_failure_is_one_where_children_are_not_waited_for(folder):
    """With SIGCHLD ignored, nobody knows the exit code of a child."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(fleetrun.JobError) as caught:
            fleetrun.run(lambda: sys.exit(3), display="quiet")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert caught.value.exit_code == 3


def test_whoever_reads_late_is_told_what_is_lost(folder):
    (folder / "chatty.py").write_text("for number in range(25_000): print(number)")
    job = fleetrun.launch("chatty.py")
    job.wait()
    late = job.events()
    first = next(late)
    assert first["event"] == "lost"
    rest = [event["line"] for event in late if event["event"] == "log"]
    assert first["events"] % 10_000 == 0
    assert rest == [str(number) for number in range(25_000)][-len(rest) :]
    assert len(rest) > 5_000


def test_a_launcher_that_is_killed_is_an_error(folder):
    job = fleetrun.launch("wait.py")
    until_ready(job)
    launcher = job.status()["pid"]
    os.kill(launcher, signal.SIGKILL)
    with pytest.raises(fleetrun.LaunchError, match="SIGKILL") as caught:
        job.wait()
    assert not isinstance(caught.value, fleetrun.JobError)


@pytest.mark.ssh
def test_an_engine_runs_a_script_on_several_machines(folder, capsys):
    if reason := sshd_parts.missing():
        pytest.skip(reason)
    (folder / "train.py").write_text("import os; print('rank', os.environ['RANK'], os.environ['A_TOKEN'])")
    with sshd_parts.sshd() as server:
        result = fleetrun.run(
            "train.py",
            scheduler="ssh",
            ips=["127.0.0.1", "127.0.0.2"],
            master=f"127.0.0.1:{free_port()}",
            scheduler_option={"config": str(server.config)},
            env={"PYTHONPATH": "/", "A_TOKEN": "x", "FLEETRUN_TOKEN": "the-secret-of-this-job"},
            follow="all",
        )
        assert (result.exit_code, result.values, result.logs) == (0, [], {})
        assert {"127.0.0.1 | rank 0 x", "127.0.0.2 | rank 1 x"} <= set(capsys.readouterr().out.splitlines())
        (folder / "job.toml").write_text('scheduler = "ssh"\nips = ["127.0.0.3"]')
        for where in ({"scheduler": "ssh", "ips": ["127.0.0.3"]}, {"config": folder / "job.toml"}):
            job = fleetrun.launch("train.py", scheduler_option=["prot=1"], **where)
            with pytest.raises(fleetrun.LaunchError, match="runs is available only on its nodes"):
                job.status()
            with pytest.raises(fleetrun.UsageError, match="prot"):
                job.wait()


# ---- programs of their own


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path, (sys.executable,)) as command:
        yield command


CALLER = """
import fleetrun
def work():
    import os, signal
    from telling import stay, tell, on
    {prepare}
    try:
        stay()
    except KeyboardInterrupt:
        tell("saved")
        {after}
try:
    fleetrun.run(work, nproc_per_node=2)
except KeyboardInterrupt:
    print("interrupted")
"""


def start(program: Fleetrun, prepare: str = "", after: str = "") -> Launch:
    (program.folder / "tmp").mkdir()
    (program.folder / "caller.py").write_text(CALLER.format(prepare=prepare, after=after))
    caller = program.start("caller.py", env={"TMPDIR": str(program.folder / "tmp")})
    caller.until_ready(2)
    return caller


def test_an_interrupt_lets_the_trainers_save(program):
    caller = start(program)
    caller.send(signal.SIGINT)
    assert caller.wait() == 0
    assert caller.out.endswith("interrupted\n")
    assert len(caller.told("saved")) == 2
    assert list((program.folder / "tmp").iterdir()) == []


def test_a_second_interrupt_kills(program):
    caller = start(program, after="stay()")
    caller.send(signal.SIGINT)
    caller.until_told("saved", 2)
    caller.until_told("ready", 4)
    caller.send(signal.SIGINT)
    assert caller.wait() == 0
    assert caller.out.endswith("interrupted\n")


def test_nothing_outlives_a_caller_that_is_killed(program):
    caller = start(program, prepare="on(signal.SIGTERM, lambda: os._exit(0))")
    caller.send(signal.SIGKILL)
    assert caller.wait() == -signal.SIGKILL
    caller.gone()
    wait_until(lambda: len(caller.told("got SIGTERM")) == 2)  # they could save
    wait_until(lambda: not list((program.folder / "tmp").iterdir()))  # the guard removes it at its end


def test_a_program_that_ends_ends_its_job(program):
    (program.folder / "leaves.py").write_text(
        "import fleetrun\n"
        "job = fleetrun.launch('train.py')\n"
        "next(event for event in job.events() if event['event'] == 'log')\n"
    )
    program.script("print('ready', flush=True)\nstay()")
    caller = program.start("leaves.py")
    assert caller.wait() == 0
    caller.gone()


ASYNC = """
import asyncio, os
import fleetrun

def rank():
    return int(os.environ["RANK"])

async def main():
    jobs = [asyncio.to_thread(fleetrun.run, rank, nproc_per_node=2, display="quiet") for _ in range(2)]
    print([result.values for result in await asyncio.gather(*jobs)])

    job = await asyncio.to_thread(fleetrun.launch, "wait.py")
    try:
        await asyncio.wait_for(asyncio.to_thread(job.wait), 0.01)
    except TimeoutError:
        print("late", job.running)
    finally:
        job.stop()
    print((await asyncio.to_thread(job.wait)).exit_code)

asyncio.run(main())
"""


def test_an_asyncio_program(program):
    (program.folder / "main.py").write_text(ASYNC)
    done = program.run("main.py")
    assert (done.code, done.out.splitlines()) == (0, ["[[0, 1], [0, 1]]", "late True", "143"]), done


ASYNC_WAIT = """
import asyncio
import fleetrun

def work():
    from telling import on, signal, stay, sys, tell
    on(signal.SIGTERM, sys.exit)
    try:
        stay()
    finally:
        tell("saved")

async def main():
    job = await asyncio.to_thread(fleetrun.launch, work, nproc_per_node=2)
    try:
        await asyncio.to_thread(job.wait)
    finally:
        job.stop()

asyncio.run(main())
"""


def test_an_interrupt_of_an_asyncio_program_stops_its_job(program):
    (program.folder / "main.py").write_text(ASYNC_WAIT)
    caller = program.start("main.py")
    caller.until_ready(2)
    caller.send(signal.SIGINT)
    assert caller.wait() in (130, -signal.SIGINT)
    assert len(caller.told("saved")) == 2
    caller.gone()


TEST = """
import os
import fleetrun
import pytest

def ranks():
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"]

def test_ranks(run_job, tmp_path):
    result = run_job(ranks, nproc_per_node=2)
    assert result.values == [(0, "2"), (1, "2")]
    assert result.logs["trainer.0"].parent == tmp_path / "log"

def test_failure(run_job):
    with pytest.raises(fleetrun.JobError, match="ZeroDivisionError"):
        run_job(lambda: 1 / 0)
"""


def test_the_fixture_of_pytest(program):
    (program.folder / "conftest.py").write_text('pytest_plugins = ["fleetrun.testing"]\n')
    (program.folder / "test_it.py").write_text(TEST)
    done = program.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error")
    assert (done.code, "2 passed" in done.out) == (0, True), done

"""What is done to a launcher and what is measured, as generators over one `Run`.

A `yield SECONDS` is a barrier: the runs of all launchers of a round come to it before any goes on, and then
that time passes for all. So slow starts overlap, while what is timed after the last barrier happens to one
launcher at a time. What has no barrier is a plain function and has the machine for itself from its start.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Generator, Sequence

from _peers import OURS
from _processes import cpu_seconds, peak_rss_mb
from _rows import Result
from _run import WORKER, BenchError, Run, Worker

Steps = Generator[float, None, Result]

SHORT, LONG = 5.0, 40.0  # seconds after which a launcher is not waited for any longer
PAUSE_AFTER_DEATH = 1.1  # "after 1 s"; mpirun needs 1.0 to stop its workers
RAISE = signal.SIGURG  # makes a Python launcher raise (see `_INJECTED`); not used otherwise


def random_phase() -> float:
    """Seconds of quiet before an event, so that it falls anywhere in the cycle of a launcher that polls."""
    return 0.3 + random.random()


def _after(moment: int, later: int | None) -> float:
    """Milliseconds."""
    assert later is not None, "it has not happened"
    return (later - moment) / 1e6


def _unended(run: Run) -> str:
    return f"leaves {len(run.live())}" if run.launcher.died else f"hangs with {len(run.live())}"


# --- start and end


def interpreter(run: Run) -> Result:
    """No launcher: the interpreter alone, from exec to the worker's first statement."""
    run.start([run.peer.python, str(WORKER)])
    worker = run.await_workers(1)[0]
    return {"start": run.since_launch(worker.started)}


def startup(run: Run, processes: int) -> Result:
    run.launch(processes)
    workers = run.await_workers(processes)
    first = run.since_launch(min(worker.started for worker in workers))
    own = run.own_processes()
    memory = sum(map(peak_rss_mb, own))
    for worker in workers:
        worker.tell("exit 0")
    if not run.await_all(30):
        raise BenchError("did not end in 30 s after its workers")
    last = max(worker.died or 0 for worker in workers)
    end = _after(last, run.launcher.died)
    return {"first": first, "end": end, "rss": memory, "processes": float(len(own))}


def empty(run: Run, processes: int) -> Result:
    run.launch(processes, empty=True)
    if not run.await_exit(60):
        raise BenchError("did not end in 60 s")
    if run.exit_code != 0:
        raise BenchError(f"exit code {run.exit_code}")
    return {"whole": run.since_launch(run.launcher.died or 0)}


def command_line(run: Run) -> Result:
    """--help, then a usage error."""
    result: Result = {}
    for what, arguments in {"help": ("--help",), "usage": (*run.peer.usage_error, str(WORKER))}.items():
        run.start([*run.peer.program, *arguments])
        if not run.await_exit(30):
            raise BenchError(f"{what}: not in 30 s")
        result[what] = run.since_launch(run.launcher.died or 0)
        result[f"{what} code"] = float(run.exit_code)
    return result


# --- one dies


def failure(run: Run, processes: int) -> Steps:
    """One of them calls os._exit(3); the others stamp their SIGTERM and obey it."""
    run.launch(processes, stop="stamp")
    yield 0.0
    workers = run.await_workers(processes)
    yield random_phase()
    victim, *others = random.sample(workers, processes)
    victim.tell("crash 3")
    if not run.await_all(SHORT if processes < 10 else 3 * SHORT):
        return {"told": _unended(run), "exit": _unended(run), "code": "-"}
    t = victim.stamps["dies"]
    told = max(worker.stamps.get("stop") or worker.died or 0 for worker in others)
    return {"told": _after(t, told), "exit": _after(t, run.launcher.died), "code": float(run.exit_code)}


def stubborn(run: Run) -> Steps:
    """One of 8 calls os._exit(3); seven ignore SIGTERM, SIGINT, SIGHUP and have a child each."""
    run.launch(8, stop="ignore", stop_timeout=2)
    yield 0.0
    workers = run.await_workers(8)
    victim, *others = workers
    for worker in others:
        worker.tell("spawn child")
    run.loop.until(lambda: all("spawned" in worker.stamps for worker in others), 10)
    yield 0.5
    victim.tell("crash 3")
    yield 0.0  # all at once: seconds are at stake, and forty of them
    ended = run.await_all(SHORT if run.peer.name == "bash" else LONG)
    left = float(sum(run.has(worker.stamps["spawned"]) for worker in others))
    if not ended:
        return {"exit": _unended(run), "grandchildren": left}
    return {"exit": _after(victim.stamps["dies"], run.launcher.died) / 1e3, "grandchildren": left}


def blame(run: Run, delay: float) -> Steps:
    """One rank raises; the others raise `delay` seconds later. Whom does the launcher's report name?

    No figure if another one was gone first after all: printing a traceback can take longer than the delay.
    """
    run.launch(4, to_files=True)
    yield 0.0
    workers = sorted(run.await_workers(4), key=lambda worker: worker.rank)
    yield random_phase()
    victim = random.choice(workers[1:])
    others = [worker for worker in workers if worker is not victim]
    victim.tell("raise the first error")
    run.loop.settle(delay)
    for worker in others:
        worker.tell("raise a later error")
    if not run.await_all(30):
        raise BenchError("did not end in 30 s")
    if min(worker.died or 0 for worker in others) < (victim.died or 0):
        return {}
    found = re.search(run.peer.named_rank, run.output, re.S)
    named = int(found[1]) - run.peer.first_rank if found else None
    result: Result = {"named": float(named == victim.rank)}
    if run.peer.to_files:  # else the output of all is on the console, and no report
        result["traceback"] = float("RuntimeError: the first error" in run.output)
    return result


def restart(run: Run) -> Steps:
    run.launch(4, restarts=1)
    yield 0.0
    workers = run.await_workers(4)
    yield random_phase()
    victim = random.choice(workers)
    victim.tell("crash 3")
    run.loop.until(lambda: len(run.workers) > 4 or run.launcher.died is not None, 15)
    fresh = run.workers[4:]
    if not fresh:
        return {"fresh": "no restart"}
    with contextlib.suppress(BenchError):
        fresh = run.await_workers(8)[4:]
    return {"fresh": _after(victim.stamps["dies"], min(worker.started for worker in fresh))}


# --- the launcher is told to stop, or dies


def stop(run: Run, number: signal.Signals) -> Steps:
    run.launch(4)
    yield 0.0
    workers = run.await_workers(4)
    yield random_phase()
    t = time.monotonic_ns()
    run.launcher.signal(number)
    if not run.await_all(SHORT):
        return {"out": _unended(run), "code": float(run.exit_code) if run.launcher.died else "-"}
    last = max(each.died or 0 for each in [run.launcher, *workers])
    return {"out": _after(t, last), "code": float(run.exit_code)}


_INJECTED_TEXT = "raised by order of the bench"
_INJECTED = f"""import signal
def throw(number, frame):
    raise RuntimeError("{_INJECTED_TEXT}")
signal.signal({RAISE:d}, throw)
"""


def death(run: Run, number: int, below_guard: bool = False) -> Steps:
    """The launcher gets a signal that it did not expect; what is alive a second later?"""
    env = {}
    if number == RAISE:  # every interpreter of the run gets a handler that raises in its main thread
        (run.folder / "sitecustomize.py").write_text(_INJECTED)
        env["PYTHONPATH"] = str(run.folder)
    run.launch(4, env=env)
    yield 0.0
    run.await_workers(4)
    yield 0.3
    target = run.launcher.pid
    if run.peer.name == OURS and below_guard:
        target = run.below_guard()
    os.kill(target, number)
    yield PAUSE_AFTER_DEATH
    if number == RAISE and _INJECTED_TEXT not in run.output:
        raise BenchError("the exception did not get into the launcher")
    return {"left": float(run.left())}


def daemon(run: Run) -> Steps:
    """Each of 2 workers starts a process with a session of its own; all workers then exit with 0."""
    run.launch(2)
    yield 0.0
    workers = run.await_workers(2)
    for worker in workers:
        worker.tell("spawn daemon")
    run.loop.until(lambda: all("spawned" in worker.stamps for worker in workers), 10)
    yield 0.3
    for worker in workers:
        worker.tell("exit 0")
    yield 0.0
    if not run.await_exit(15):
        raise BenchError("did not end in 15 s after its workers")
    yield PAUSE_AFTER_DEATH
    return {"left": float(run.left())}


# --- output, and doing nothing


def output(run: Run) -> Steps:
    """4 workers write 200 MB each to their files as fast as they can, three times over: the median."""
    run.launch(4, to_files=True)
    yield 0.0
    workers = run.await_workers(4)
    yield 0.5
    own = run.own_processes()
    before, t = sum(map(cpu_seconds, own)), time.monotonic_ns()
    walls = [_write(run, workers, int(200e6 * run.scale)) for _ in range(3)]
    run.loop.settle(0.2)  # what the launcher does a little later counts too
    used = sum(map(cpu_seconds, own)) - before
    return {"wall": statistics.median(walls), "cpu": 100e9 * used / (time.monotonic_ns() - t - 200_000_000)}


def _write(run: Run, workers: Sequence[Worker], size: int) -> float:
    """Seconds until all have written `size` bytes."""
    for worker in workers:
        worker.stamps.pop("wrote", None)
    t = time.monotonic_ns()
    for worker in workers:
        worker.tell(f"write {size}")
    if not run.loop.until(lambda: all("wrote" in worker.stamps for worker in workers), LONG):
        raise BenchError(f"4 x {size} bytes not written in {LONG:.0f} s")
    return _after(t, max(worker.stamps["wrote"] for worker in workers)) / 1e3


def idle(run: Run) -> Steps:
    """64 workers do nothing; all launchers do so in the same minute."""
    run.launch(64)
    yield 0.0
    run.await_workers(64)
    yield 2.0
    own = run.own_processes()
    before = sum(map(cpu_seconds, own))
    seconds = 60 * run.scale
    yield seconds
    return {"cpu": (sum(map(cpu_seconds, own)) - before) * 60 / seconds}

"""Where a pod runs on this machine: its loop, signals and guard, its log files, and what the console follows
of them. Decides nothing.
"""

from __future__ import annotations

import select
import signal
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.narrator import (
    Narrator,
    environment_tables,
    format_failure,
    hang_report,
    pod_line,
    restarts_in_words,
)
from fleetrun.console.text import read_tail
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.pod import cgroup, logfiles
from fleetrun.pod.follow import Watch
from fleetrun.pod.gpulog import GpuLog
from fleetrun.pod.guardian import Guard
from fleetrun.pod.jobcontrol import dispatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.observer import Observers
from fleetrun.pod.peers import Peers
from fleetrun.pod.pod import Pod
from fleetrun.pod.process import ask_strays, end_descendants
from fleetrun.pod.restarts import RestartPolicy
from fleetrun.pod.result import JobResult
from fleetrun.pod.signals import Signals
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.supervisor import Supervisor
from fleetrun.scene import Scene

WIDE = 100  # columns of a report that goes to no terminal


class Stage:
    """One for a launch. A job on several machines puts one pod after the other on it, with the same log
    files.
    """

    def __init__(self, settings: LaunchSettings, console: Console, signals: Signals, guard: Guard) -> None:
        self.loop = Loop()
        self.console = console
        self._settings = settings
        self._signals = signals
        self._guard = guard
        self._hurry = select.epoll()
        self._hurry.register(signals.fileno(), select.EPOLLIN)
        self._hurry.register(guard.fileno(), select.EPOLLIN)
        self._watch: Watch | None = None
        self._pod: Pod | None = None
        self._interrupt: Callable[[int], None] | None = None
        self._guard_lost: Callable[[], None] = lambda: None
        self._scene: Scene | None = None
        self._over = False

    def on(self, scene: Scene) -> None:
        """Before the first pod."""
        self._scene = scene
        scene.hurry = self.hurry
        scene.control.interrupt = self._end_job

    @property
    def hurry(self) -> int:
        """Readable when the last output cannot wait for a slow reader: the job shall end, or nobody guards
        it.
        """
        return self._hurry.fileno()

    def listen(self, interrupt: Callable[[int], None], guard_lost: Callable[[], None]) -> None:
        """From now on `interrupt` gets signals that mean "end"; `guard_lost` is called when the guard is
        gone.
        """
        first = self._interrupt is None
        self._interrupt = interrupt
        self._guard_lost = guard_lost
        if first:
            self.loop.add(self._signals.fileno(), self._signalled)
            self.loop.add(self._guard.fileno(), self._guard_gone)

    def _end_job(self, number: int) -> None:
        """The alarm after the end is for a slow reader of ours: other machines may have more time."""
        if self._interrupt is not None and not (self._over and number == signal.SIGALRM):
            self._interrupt(number)

    def _signalled(self) -> None:
        dispatch(
            self._signals.read,
            self._pod,
            interrupt=self._end_job,
            written=self._written,
            resumed=self._resumed,
            say=self.console.info,
            pausing=self.console.pause,
            beside=self._scene.companions if self._scene is not None else (),
        )

    def _written(self) -> None:
        """Something in the log directory was written to."""
        if self._watch is not None:
            self._watch.told()
        if self._scene is not None:
            self._scene.marks.told()

    def _resumed(self, seconds: float) -> None:
        self.loop.postpone(seconds)
        self.console.resume()

    def _guard_gone(self) -> None:
        self.loop.remove(self._guard.fileno())
        self._guard_lost()
        cgroup.kill_all(self._guard.pid)
        cgroup.remove(self._guard.pid)

    def supervisor(
        self, spec: PodSpec, *, timeout: float | None = None, peers: Peers | None = None, restarts: int = 0,
        attempt: int = 0,
    ) -> Supervisor:  # fmt: skip
        """For one pod. Its log files are in place then, and followed. `attempt` counts the pods before it,
        `restarts` those that were restarts after a failure.
        """
        assert self._scene is not None
        first = self._watch is None
        if first and self._settings.log_overwrite:
            logfiles.remove_earlier(spec.log_dir, spec.job_id)
        pod = Pod(spec, attempt)
        pod.prepare()
        if first:
            files = [(each.name, each.log) for each in spec.containers]
            logfiles.point_latest(spec.log_dir, spec.name, files)
            self._watch = _watch(self._settings, spec, self.console, self.loop, self._scene.marks.cut)
        assert self._watch is not None
        narrator = Narrator(self.console, spec, self._watch.catch_up, alone=peers is None)
        supervisor = Supervisor(
            pod,
            self.loop,
            RestartPolicy(limit=self._settings.max_restart),
            Observers([narrator, *self._scene.observers()]),
            stop_timeout=self._settings.stop_timeout,
            timeout=timeout,
            peers=peers,
            restarts=restarts,
            hangs=self._scene.hangs(),
            sweep=partial(end_descendants, but=self._scene.companions),
            ask=partial(_ask_strays, self._scene.companions),
        )
        self._pod = pod
        self._scene.plays(pod, restarts)
        if first:
            self._watch.start()
            GpuLog.start_if(self._settings.enable_gpu_log, spec, self.loop)
        return supervisor

    def over(self) -> None:
        """Nothing runs any more: show what the logs still hold."""
        self._over = True
        self._signals.only_endings()
        if self._watch is None:
            return
        self._watch.drain(lambda: self.console.out.drain(self.hurry))
        self.console.end()
        for path in self._watch.unbounded:
            self.console.warning(
                f"--log_rotate could not shorten {path}: its file system cannot take blocks out of a file"
            )


def _ask_strays(beside: Collection[int], groups: Collection[int]) -> None:
    """Not the processes beside the job, which lead groups of their own."""
    ask_strays({*groups, *beside})


def _watch(
    settings: LaunchSettings, spec: PodSpec, console: Console, loop: Loop, cut: Callable[[Path, int], None]
) -> Watch:
    """What the console follows: one container as it is, several with their names before each line. `cut` is
    told what --log_rotate takes away.
    """
    watch = Watch(loop, spec.log_dir, lambda: console.out.room, cut=cut)
    console.attach(loop, watch.go_on)
    followed = [
        each
        for each in spec.containers
        if console.follows
        and any(
            each.role is role and (numbers is None or each.index in numbers)
            for role, numbers in settings.follow
        )
    ]
    widest = max((len(each.name) for each in followed), default=0)
    for number, each in enumerate(followed):
        emit, live = console.follower(each.name, widest, number, alone=len(followed) == 1)
        watch.follow(each.log, emit, live=live)
    if settings.log_rotate is not None:
        for each in spec.containers:
            watch.bound(each.log, settings.log_rotate)
    return watch


def announce(spec: PodSpec, console: Console) -> None:
    """The pod that is about to run."""
    console.info(pod_line("Run", spec, "ready"))
    if console.says("DEBUG"):
        console.block(environment_tables(spec), level="DEBUG")
    if logfiles.is_full(spec.log_dir):
        console.warning(f"the disk of {spec.log_dir} is full: the job goes on, but its output will be lost")


def failure_report(result: JobResult, log_dir: Path, width: int | None = None) -> list[str]:
    """Of a result that has a cause."""
    assert result.cause is not None, "a report needs a cause"
    tail = read_tail(result.cause.spec.log)
    columns = width or terminal_columns() or WIDE
    return format_failure(result, tail, width=columns, log_full=logfiles.is_full(log_dir))


def conclude(result: JobResult, spec: PodSpec, console: Console) -> list[str]:
    """How it ended; returns the failure report, if there is one."""
    tell_strays(result, console)
    lines = _report(result, spec)
    if lines:
        console.block(lines, level="ERROR")
    if result.code == 0:
        restarts = f", {restarts_in_words(result.restarts)}" if result.restarts else ""
        console.info(f"Pod completed: {spec.name}{restarts}")
    elif result.cause is None:
        console.error(f"Pod stopped: {spec.name}, {result.reason}, exit code {result.code}")
    else:
        console.error(f"Pod failed: {spec.name}, exit code {result.code}")
    return lines


def _report(result: JobResult, spec: PodSpec) -> list[str]:
    if result.hang is not None:
        return hang_report(result.hang, result.restarts, terminal_columns() or WIDE)
    return failure_report(result, spec.log_dir) if result.cause is not None else []


def tell_strays(result: JobResult, console: Console) -> None:
    if result.strays:
        console.warning(f"{result.strays} processes that had left their container were ended with the job")

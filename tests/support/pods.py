"""Pods of small real processes, supervised in the process of the tests.

The scripts are for /bin/sh, which starts in a millisecond. They find in `$NOTES` a folder to leave files in,
and speak to the test with `tell WORDS`, which arrives at the loop while the supervisor runs.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.events import (
    Ending,
    Failure,
    Hang,
    JobResult,
    Leaving,
    Peers,
    PodEvent,
    RestartAsked,
    Restarting,
    Started,
)
from fleetrun.pod.kernel_log import OomWatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import NOTHING_SPENT, Budget, GiveUp, Restart
from fleetrun.pod.process import kill_marked
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.pod.supervisor import Inspect, Supervisor, start_cold

_OOM = OomWatch()  # one for all pods: it keeps a descriptor
_BOUND = 120.0
"""Real seconds, however the clock goes."""
SLOWLY = 0.02
"""The pace of a clock by which a second leaves a busy machine time."""

_PRELUDE = 'tell() { echo "$NAME $*" >"$NEWS"; }\n'
OBEDIENT = "tell ready; while :; do sleep 100 & wait; done"
STUBBORN = "trap '' INT TERM; tell ready; while :; do sleep 100; done"
CARING = "trap 'kill $!; tell asked; exit 0' INT TERM; sleep 100 & tell ready; wait"


def spec_of(
    folder: Path, script: str | Path, role: Role = Role.TRAINER, rank: int = 0, label: str = ""
) -> ContainerSpec:
    """One process that runs this sh script, or the program of this path."""
    name = label or f"{role}.{rank}"
    environment = {
        "PATH": os.environ["PATH"], "NAME": name, "NOTES": str(folder), "NEWS": str(folder / "news"),
        "ERROR_FILE": str(folder / f"{name}.json"), "FLEETRUN_CONTAINER": f"{folder.name}.{name}",
    }  # fmt: skip
    argv = (str(script),) if isinstance(script, Path) else ("/bin/sh", "-c", _PRELUDE + script)
    return ContainerSpec(
        role=role, rank=rank, index=rank, argv=argv, env=environment,
        log=folder / f"{name}.log", error_file=folder / f"{name}.json", label=label,
    )  # fmt: skip


Scripts = Mapping[str, str | Path]
"""`trainer.0` -> its script."""


class Clock:
    """The real one, which can be put forward, and goes at this pace."""

    def __init__(self, pace: float = 1.0) -> None:
        self.pace = pace
        self._ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() * self.pace + self._ahead

    def advance(self, seconds: float) -> None:
        self._ahead += seconds


class Supervision:
    """A job under the supervisor, and a listener: what was published is in `story`.

    `on(words, action)` acts when a script tells these words or the story gets them.
    """

    def __init__(
        self, folder: Path, scripts: Scripts, *, mode: Mode = Mode.COLLECTIVE, restarts: int = 0,
        stop_timeout: float = 100.0, timeout: float | None = None, hook: str | None = None,
        backoff: float = 0.01, pace: float = 1.0, peers: Peers | None = None, inspect: Inspect | None = None,
    ) -> None:  # fmt: skip
        self.folder = folder
        self.clock = Clock(pace)
        self.loop = Loop(self.clock)
        self.story: list[str] = []
        self.sweeps: list[float] = []
        self.asked_strays: list[Collection[int]] = []
        self.decisions: list[tuple[float, Restart | GiveUp]] = []
        self.failures: list[Failure] = []
        self.hangs: list[Hang] = []
        self.restarted_at: list[float] = []
        self.step: int | None = None
        self._actions: dict[str, Callable[[], None]] = {}
        self._processes = []
        os.mkfifo(folder / "news")
        self._news = os.open(folder / "news", os.O_RDWR | os.O_NONBLOCK)
        self._unread = b""
        self.loop.add(self._news, self._read_news)
        self.pod = Pod(self._spec(folder, scripts, mode, hook))
        self.pod.prepare()
        self.supervisor = Supervisor(
            self.pod, self.loop, Budget(restarts, backoff=backoff), self.handle,
            stop_timeout=stop_timeout, timeout=timeout, sweep=self._sweep, ask=self.asked_strays.append,
            out_of_memory=_OOM.killed, peers=peers, last_step=lambda containers: self.step, restarts=0,
            inspect=inspect or (lambda containers, ended, then: None), has_saved=lambda container: False,
            spent=NOTHING_SPENT, hangs=None, ready=start_cold, end_marked=kill_marked,
        )  # fmt: skip

    def _spec(self, folder: Path, scripts: Scripts, mode: Mode, hook: str | None) -> PodSpec:
        specs = []
        for name, script in scripts.items():
            role, _, rank = name.partition(".")
            specs.append(spec_of(folder, script, Role(role), int(rank)))
        pre_hook = None if hook is None else spec_of(folder, hook, label="pre_hook")
        return PodSpec(
            name="abcdef",
            job_id="default",
            mode=mode,
            containers=tuple(specs),
            log_dir=folder,
            pre_hook=pre_hook,
        )

    def on(self, words: str, action: Callable[[], None]) -> None:
        self._actions[words] = action

    def after(self, counts: Mapping[str, int], action: Callable[[], None]) -> None:
        """Act once these words have been told so often, in any order."""
        wanted = Counter(counts)

        def told(words: str) -> None:
            wanted.subtract([words])
            if not +wanted:
                action()

        for words in counts:
            self.on(words, lambda words=words: told(words))  # type: ignore[misc]

    def once_ended(self, name: str, action: Callable[[], None]) -> None:
        """Act when the supervisor has seen the end of this container."""
        self.once(lambda: not self.container(name).alive, action)

    def once(self, true: Callable[[], bool], action: Callable[[], None]) -> None:
        if true():
            action()
        else:
            self.soon(lambda: self.once(true, action))

    def soon(self, action: Callable[[], None]) -> None:
        """After a moment of real time."""
        self.loop.after(0.002 * self.clock.pace, action)

    def run(self) -> JobResult:
        self._bounded(time.monotonic() + _BOUND)
        try:
            return self.supervisor.run()
        finally:
            self._bound.cancel()
            self._read_news()

    def _bounded(self, end: float) -> None:
        left = end - time.monotonic()
        assert left > 0, f"the supervisor did not end within {_BOUND} s: {self.story}"
        self._bound = self.loop.after(left * self.clock.pace, lambda: self._bounded(end))

    def container(self, name: str) -> Container:
        return next(each for each in self.pod.containers if each.spec.name == name)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def told(self, words: str) -> int:
        """How often."""
        return self.story.count(words)

    def close(self) -> None:
        """Whatever a failed test left is ended."""
        for process in self._processes:
            if process.exit is None:
                process.signal_group(signal.SIGKILL)
                process.reap()
        self.loop.close()
        os.close(self._news)

    def _sweep(self, grace: float) -> int:
        self._remember()
        self.sweeps.append(grace)
        return 0

    def _remember(self) -> None:
        found = [each.process for each in [*self.pod.containers, self.pod.hook] if each and each.process]
        self._processes += [each for each in found if each not in self._processes]

    def _read_news(self) -> None:
        try:
            self._unread += os.read(self._news, 65536)
        except BlockingIOError:
            return
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            self._tell(line.decode())

    def _tell(self, words: str) -> None:
        self._remember()
        self.story.append(words)
        if words in self._actions:
            self._actions[words]()

    # ---- the listener

    def handle(self, event: PodEvent) -> None:
        match event:
            case Started():
                self._started(event.containers)
            case Failure():
                self._failed(event)
            case Hang():
                self._hung(event)
            case RestartAsked():
                self._tell(f"restart asked {' '.join(each.spec.name for each in event.containers)}")
            case Restarting():
                self._restarting(event.containers)
            case Leaving():
                self._leaving(event.rest)
            case Ending():
                self._ending(event.reason)

    def _started(self, containers: Sequence[Container]) -> None:
        self._tell(f"started {' '.join(each.spec.name for each in containers)}")

    def _failed(self, failure: Failure) -> None:
        self.decisions.append((self.clock(), failure.decision))
        self.failures.append(failure)
        self._tell(f"{failure.ended.spec.name} {failure.ended.exit}")

    def _hung(self, hang: Hang) -> None:
        self.hangs.append(hang)
        self._tell("hung")

    def _restarting(self, containers: Sequence[Container]) -> None:
        self.restarted_at.append(self.clock())
        self._tell(f"restarting {' '.join(each.spec.name for each in containers)}")

    def _leaving(self, rest: Sequence[Container]) -> None:
        self._tell(f"leaving {' '.join(each.spec.name for each in rest)}")

    def _ending(self, why: str) -> None:
        self._tell(f"ending: {why}")

"""Run the pods of a launch one after the other, with the same loop, signals, log files and console."""

from __future__ import annotations

from functools import partial

from fleetrun.console.console import Console
from fleetrun.console.narrator import Narrator, environment_tables, pod_line
from fleetrun.launcher.session import LaunchSession
from fleetrun.launcher.signals import Interrupts, dispatch
from fleetrun.launcher.victims import Victims
from fleetrun.pod import linux, logs
from fleetrun.pod.container import Pod
from fleetrun.pod.events import Peers, RestartAsked
from fleetrun.pod.kernel_log import OomWatch
from fleetrun.pod.logs import Watch
from fleetrun.pod.policy import NOTHING_SPENT, Budget, Spent
from fleetrun.pod.process import ask_strays, end_descendants, kill_marked
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.supervisor import Supervisor, start_cold


class PodRunner:
    """The runner of a launch. A job of several nodes runs one pod after the other, with the same logs."""

    def __init__(self, session: LaunchSession, interrupts: Interrupts) -> None:
        self._session = session
        self._settings = session.settings
        self._console = session.console
        self._loop = loop = session.loop
        self._interrupts = interrupts
        self._watch: Watch | None = None
        self.victims = Victims(loop, self._console.info, self._catch_up)
        self._pod: Pod | None = None
        self._oom = OomWatch()
        loop.add(interrupts.signals.fileno(), self._signalled)
        loop.add(interrupts.guard.fileno(), self._guard_ended)

    def _signalled(self) -> None:
        dispatch(
            self._interrupts.signals.read,
            self._pod,
            interrupt=self._interrupts.end,
            written=self._written,
            resumed=self._resumed,
            show=self._console.info,
            pausing=self._console.pause,
            companions=self._session.companions,
        )

    def _written(self) -> None:
        """Handle a write in the log directory."""
        if self._watch is not None:
            self._watch.handle_write()
        self._session.marks.handle_write()

    def _catch_up(self) -> None:
        if self._watch is not None:
            self._watch.catch_up()

    def _resumed(self, seconds: float) -> None:
        self._loop.postpone(seconds)
        self._console.resume()

    def _guard_ended(self) -> None:
        guard = self._interrupts.guard
        self._loop.remove(guard.fileno())
        self._interrupts.lose_guard()
        linux.kill_cgroup(guard.pid)
        linux.remove_cgroup(guard.pid)

    def supervisor(
        self,
        spec: PodSpec,
        *,
        timeout: float | None = None,
        peers: Peers | None = None,
        restarts: int = 0,
        spent: Spent = NOTHING_SPENT,
        attempt: int = 0,
    ) -> Supervisor:
        """Return a supervisor for one pod. The log files of the pod exist then, and are followed.

        `attempt` counts all earlier pods. `restarts` counts the earlier pods that restarted after a failure.
        `spent` is how much of the budget these restarts used.
        """
        first = self._watch is None
        if first and self._settings.log_overwrite:
            logs.remove_earlier(spec.log_dir, spec.job_id)
        warm, progress = self._session.warm, self._session.progress
        pod = Pod(spec, attempt, *([] if warm is None else [warm.take]))
        pod.prepare()
        if first:
            files = [(each.name, each.log) for each in spec.containers]
            logs.point_latest(spec.log_dir, spec.name, files)
            self._watch = self._follow(spec)
        assert self._watch is not None
        self.victims.settle()
        narrator = Narrator(self._console, spec, self._catch_up, alone=peers is None)
        supervisor = Supervisor(
            pod,
            self._loop,
            Budget(self._settings.max_restart, self._settings.restart_window),
            self._session.publish,
            stop_timeout=self._settings.stop_timeout,
            out_of_memory=self._oom.killed,
            timeout=timeout,
            peers=peers,
            restarts=restarts,
            spent=spent,
            last_step=lambda there: progress.last_step(each.spec.name for each in there),
            has_saved=lambda container: progress.has_saved(container.spec.name),
            hangs=self._session.ranks.hangs(),
            inspect=self._session.ranks.inspect,
            ready=start_cold if warm is None else warm.ready,
            sweep=partial(end_descendants, but=self._session.companions),
            # The launcher's helper processes, which lead their own groups, are no strays.
            ask=lambda groups: ask_strays({*groups, *self._session.companions}),
            end_marked=partial(kill_marked, but=self._session.companions),
        )
        self._pod = pod
        self._session.set_pod(pod, restarts, narrator)
        if first:
            self._watch.start()
            if self._settings.enable_gpu_log and spec.uses_gpus:
                from fleetrun.pod.gpu_log import GpuLog  # late: only with GPUs

                GpuLog.start(spec, self._loop)
        return supervisor

    def _follow(self, spec: PodSpec) -> Watch:
        """Follow the logs that the settings select. A single log is shown unchanged. Lines of several logs
        start with a name.
        """
        settings, console = self._settings, self._console
        watch = Watch(self._loop, spec.log_dir, lambda: console.out.room, cut=self._session.marks.cut)
        console.attach(self._loop, watch.go_on)
        followed = [
            each
            for each in spec.containers
            if console.shows_output
            and any(
                each.role is role and (numbers is None or each.index in numbers)
                for role, numbers in settings.follow
            )
        ]
        widest = max((len(each.name) for each in followed), default=0)
        for number, each in enumerate(followed):
            emit, live = console.follower(each.name, widest, number, alone=len(followed) == 1)
            if len(spec.containers) > 1 or settings.nnodes[1] > 1:
                emit = self.victims.hold(each.name, emit)
            watch.follow(each.log, emit, live=live)
        if settings.log_rotate is not None:
            for each in spec.containers:
                watch.bound(each.log, settings.log_rotate)
        return watch

    def drain(self) -> None:
        """Show the rest of the logs, after the last process of a pod."""
        if self._watch is not None:
            self._watch.drain(lambda: self._console.out.drain(self._interrupts.urgent))
            self.victims.settle()

    def wait(self) -> int:
        """Wait until the script changes, or a command restarts the job (--watch).

        Return the number of attempts so far, or 0 if the user ends the job instead.
        """
        assert self._pod is not None
        containers, causes = self._pod.containers, []

        def restart(name: str, command: str, edit: str) -> str:
            causes.append(command)
            self._loop.stop()
            return ""

        self._interrupts.listen(lambda number, command: self._loop.stop(), self._loop.stop, restart)
        self.pause()
        self._loop.run()
        if not causes:
            return 0
        self._session.publish(RestartAsked(containers, causes[0], 0))
        return 1 + max(each.restarts for each in containers)

    def pause(self) -> None:
        """Show and record that the job waits for a change."""
        self._console.info("waiting for a change of the script; Ctrl-C ends the job")
        self._session.journal.write("paused")

    def over(self) -> None:
        """Show the rest of the logs, after the last process."""
        self._interrupts.job_over = True
        self._interrupts.signals.only_endings()
        self.drain()
        if self._watch is None:
            return
        self._console.end()
        for path in self._watch.unbounded:
            self._console.warning(
                f"--log_rotate could not shorten {path}: its file system cannot remove blocks from a file"
            )


def announce(spec: PodSpec, console: Console) -> None:
    """Show the pod that is about to run."""
    console.opening(pod_line("Run", spec, "ready"))
    if console.enabled("DEBUG"):
        console.block(environment_tables(spec), level="DEBUG")
    if logs.is_full(spec.log_dir):
        console.warning(f"the disk of {spec.log_dir} is full; the job continues, but its output will be lost")

"""Around the pods of one launch on this machine: `PodRunner` has the loop, signals, log files and console;
`LaunchSession` the record, the control socket and the progress socket. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetrun import __version__, files
from fleetrun.aliases import Callback, Clock, Environ, Strings
from fleetrun.console.console import Console
from fleetrun.console.narrator import (
    Narrator,
    environment_tables,
    logs_pattern,
    pod_line,
    progress_facts,
    restarts_in_words,
)
from fleetrun.console.text import describe_duration, printable
from fleetrun.control.server import Control, JobStatus, Others, facts_of_launch
from fleetrun.envs.channels import error_file, write_error
from fleetrun.envs.contract import Mode, Role, split_endpoint
from fleetrun.envs.settings.command_line import without_secret_options
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.envs.settings.show import banner, job_file_parts, program, words
from fleetrun.errors import LaunchError
from fleetrun.host.network import ports_in_use
from fleetrun.launcher.signals import Interrupts, dispatch
from fleetrun.pod import linux, logs
from fleetrun.pod.container import Container, Ended, Pod
from fleetrun.pod.events import (
    Detail,
    Events,
    Findings,
    Late,
    Leaving,
    Peers,
    PodEvent,
    Verdict,
    lateness_fields,
    record_lines,
    verdict_fields,
)
from fleetrun.pod.kernel_log import OomWatch
from fleetrun.pod.logs import Watch
from fleetrun.pod.loop import Loop
from fleetrun.pod.memory import MemoryStore
from fleetrun.pod.policy import NOTHING_SPENT, Budget, Spent, is_symptom
from fleetrun.pod.process import Process, ask_strays, end_descendants, kill_marked
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.pod.supervisor import Supervisor
from fleetrun.progress.receiver import ProgressReceiver
from fleetrun.record.goodput import goodput_fields
from fleetrun.record.journal import Journal, Marks, encoded, journal_path, marks_path

if TYPE_CHECKING:
    from fleetrun.exporters.feed import Feed
    from fleetrun.launcher.notices import Notices
    from fleetrun.pod.hangs import HangWatch, PodWatch
    from fleetrun.pod.standby import Standbys
    from fleetrun.stacks.helper import AskOthers, State


def _tell_parent(report: Sequence[str]) -> None:
    """For a launcher that started this one, in the error file that it has named, as torchrun does."""
    path = error_file(os.environ)
    headlines = (line for line in report if line.startswith(("Cause: ", "First failure: ", "Hang: ")))
    if path:
        text = write_error(next(headlines, report[0]), "\n".join(report), time.time_ns())
        with contextlib.suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")


# ---- Fields of the events `launch` and `ready` in the record


def launch_fields(resolved: Resolved, spec: PodSpec, environ: Environ) -> dict[str, Any]:
    """Of the event `launch`. `argv` is what to type after `fleetrun` for the same launch, wherever its
    options came from, but for what only the `job_file` said; `typed` is what was typed.
    """
    settings = resolved.settings
    return {
        "job": settings.job_id,
        "pod": spec.name,
        "version": __version__,
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "user": environ.get("USER") or str(os.getuid()),
        "cwd": _cwd(),
        "python": sys.executable,
        "script": program(settings),
        "typed": without_secret_options(sys.argv[1:]),
        "argv": list(words(resolved, but=resolved.engine)),
        "settings": {name: {"value": value, "origin": origin} for name, value, origin in banner(resolved)},
        "job_file": job_file_parts(settings),
        "mode": str(spec.mode),
        "nnodes": _node_range(settings, spec),
        "log_dir": str(spec.log_dir),
        "max_restart": settings.max_restart,
        "containers": container_fields(spec),
    }


def _cwd() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # deleted a moment ago
        return ""


def _node_range(settings: LaunchSettings, spec: PodSpec) -> list[int]:
    """The fewest and the most. They may be given by number, or as a list of addresses."""
    if settings.nnodes != (1, 1):
        return list(settings.nnodes)
    number = next((each.env.get("FLEETRUN_NODE", "") for each in spec.containers), "").rpartition("/")[2]
    return [int(number or 1)] * 2


def container_fields(spec: PodSpec) -> list[dict[str, Any]]:
    """The processes of a pod; one that runs before them has no rank."""
    return [
        {
            "name": each.name,
            "role": each.label or str(each.role),
            "rank": None if each.label else each.rank,
            "index": each.index,
            "log": str(each.log),
            "endpoint": each.endpoint,
        }
        for each in _with_hook(spec)
    ]


def logs_of(spec: PodSpec) -> dict[str, Path]:
    """The log of each, by its name."""
    return {each.name: each.log for each in _with_hook(spec)}


def _with_hook(spec: PodSpec) -> Sequence[ContainerSpec]:
    return spec.containers if spec.pre_hook is None else (spec.pre_hook, *spec.containers)


_SPENDING = frozenset({"ready", "progress", "exited", "over"})
"""Events after which the time of the job is exported anew."""


# ---- The session: record, control socket, progress socket; one per launch, over all its pods


class LaunchSession:
    """Made before the first pod, closed after the last."""

    def __init__(
        self, resolved: Resolved, pod: str, console: Console, loop: Loop, interrupts: Interrupts
    ) -> None:
        self.settings: LaunchSettings = resolved.settings
        self.pod_name = pod
        self._resolved = resolved
        self._console = console
        self._loop = loop
        self._interrupts = interrupts
        self._runtime = files.run_folder(os.environ)
        log_dir = Path(self.settings.log_dir).absolute()
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        self._wall: Clock = lambda: booted + time.clock_gettime(time.CLOCK_BOOTTIME)
        """Seconds since the epoch. It goes on as before if someone sets the clock of the machine."""
        self.journal = Journal(journal_path(log_dir, self.settings.job_id, pod), self._wall)
        self.marks = Marks(marks_path(log_dir, self.settings.job_id, pod), loop, self._wall)
        self.journal.subscribe(self.marks.heard)
        if (hear := console.listener) is not None:
            self.journal.subscribe(lambda event: hear(encoded(event)))
        self.progress = ProgressReceiver(loop, files.progress_socket(self._runtime, pod), self.journal.write)
        self._memory = MemoryStore(loop, files.memory_socket(self._runtime, pod))
        self.companions: set[int] = set()
        """Pids of processes of the launcher's own: they are spared when what containers left is ended."""
        self._feed: Feed | None = None
        self.notices: Notices | None = None
        """With --notify; on several machines one of them tells."""
        self._hangs: HangWatch | None = None
        self._watches: list[PodWatch] = []
        self._over = False
        self._pod: Pod | None = None
        self._ask_others: AskOthers | None = None
        self._standbys: Standbys | None = None
        settings = self.settings
        facts = facts_of_launch(
            settings.job_id, pod, settings.run_mode, log_dir, settings.max_restart, program(settings)
        )
        self.job_status = JobStatus(facts, self.progress)
        self.journal.subscribe(self.job_status.goodput.take)
        self._control: Control | None = None

    def open(
        self,
        spec: PodSpec,
        others: Others | None = None,
        ask_others: AskOthers | None = None,
        listed: Callable[[bytes], None] | None = None,
    ) -> None:
        """Before the first process of the first pod starts. Of the other nodes, if there are any, `others`
        asks for their status and `ask_others` for where their ranks are; with --warm, `listed` gets what
        spares may import for `warm_up`. Raises LaunchError for what cannot be.
        """
        self._ask_others = ask_others
        settings = self.settings
        if settings.tensorboard is not None or settings.metrics_port is not None or settings.export:
            self._export(spec)
        if self.settings.notify:
            from fleetrun.launcher.notices import Notices  # late: only with --notify

            say, warn = self._console.info, self._warn
            self.notices = Notices(self.settings, self.pod_name, self._loop, self.companions, say, warn)
        if (problem := self.progress.open()) is not None:
            tell = self._console.debug if settings.hang_timeout is None else self._warn
            tell(
                f"no progress can be reported: {problem}. For --hang_timeout only output counts as a sign of "
                "life. Set XDG_RUNTIME_DIR to a folder of this user"
            )
        if (problem := self._memory.open()) is not None:
            self._console.debug(f"no checkpoints can be kept in memory: {problem}")
        if self.settings.warm:
            from fleetrun.pod.standby import Standbys  # late: few launches have them

            tell, warn = self._console.info, self._console.warning
            self._standbys = Standbys(self._loop, self.companions, tell, warn, listed)
            self.progress.subscribe(self._standbys.heard)
        self.journal.write("launch", **launch_fields(self._resolved, spec, os.environ))
        self._control = Control(
            self._loop,
            self.job_status,
            self._interrupts.end,
            self._interrupts.restart,
            self._console.info,
            others,
            self.why,
        )
        self._control.open(self._runtime, (self.progress.renew, self._memory.renew))
        if self._console.shows_status:
            from fleetrun.console.status_text import status_fields  # late: few launches show it

            most = self.settings.nnodes[1]
            status = self.job_status
            silent, stopping, waits = status.silent_for, status.stopping_for, status.waits_for
            self._console.begin(
                self._loop, lambda: status_fields(status.fields(), most, silent(), stopping(), waits())
            )
            self.progress.subscribe(lambda container, report: self._console.refresh())

    def set_store(self, address: dict[str, Any], url: str) -> None:
        """Where commands find the nodes of this job: `address` for those of this user here, with secrets;
        `url` for those on other hosts.
        """
        assert self._control is not None
        self._control.address = address
        self.job_status.facts = {**self.job_status.facts, "url": url}

    def events(self, narrator: Narrator, spec: PodSpec, *, alone: bool) -> Events:
        """The event stream of one pod, with all its subscribers. Their order matters: the console comes
        first, and the last progress report of a process is recorded before its exit. `alone`: no other
        machine has a part of the job.
        """
        events = Events()
        events.subscribe(narrator.handle)
        events.subscribe(self.progress.handle)
        events.subscribe(self._record)
        events.subscribe(self.job_status.handle)
        if self.settings.run_mode.has_servers:
            events.subscribe(self._check_served)
        if self.notices is not None:
            events.subscribe(partial(self.notices.handle, alone=alone))
        if not self._watches and self._has_ranks(spec.containers):
            # The warnings of one node, that of the job's first trainer, are enough for all.
            first = any(each.role is Role.TRAINER and each.rank == 0 for each in spec.containers)
            self._watches = self._watches_of_ranks(first)
        for watch in self._watches:
            events.subscribe(watch.handle)
        return events

    def _watches_of_ranks(self, first: bool) -> list[PodWatch]:
        """What concerns the whole job is watched where its `first` trainer is."""
        from fleetrun.pod.hangs import AloneWatch, LateWatch, WaitWatch  # late: one process needs none

        watches: list[PodWatch] = []
        if first:
            probes = partial(self._find, detail=Detail.PROBES)
            tell = partial(self._warn_of, normal=True)
            watches.append(WaitWatch(self._loop, self._find, tell, self._is_busy))
            watches.append(LateWatch(self._loop, probes, self._note_lateness, self._warn_of))
        hangs, limit = self.hangs(), self.settings.hang_timeout
        if hangs is not None and limit is not None:
            watches.append(AloneWatch(self._loop, limit, self._find, hangs.one_hangs, self._is_busy))
        for watch in watches:
            self.progress.subscribe(watch.heard)
        return watches

    def _is_busy(self, container: str) -> bool:
        report = self.progress.latest(container)
        return report is not None and report.activity is not None

    def _has_ranks(self, here: Sequence[object]) -> bool:
        """Whether there are several ranks whose probes tell what they wait for."""
        several = len(here) > 1 or self._ask_others is not None
        told = self.settings.run_mode is Mode.COLLECTIVE or self.settings.run_mode.has_servers
        return several and told and self.settings.probe == "on"

    def _find(
        self,
        containers: Sequence[Container],
        then: Callable[[Findings], None],
        detail: Detail = Detail.OUTSIDE,
    ) -> Callback:
        """Where all ranks are, here and on the other nodes."""
        from fleetrun.stacks.helper import Finder, quick_taker  # late: few jobs need it

        taker = quick_taker(self._loop, self.companions, detail)
        return Finder(taker, self._ask_others, detail).begin(containers, then)

    def warm(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """`TakeWarm` of the pods of this launch."""
        return self._standbys.take(spec, env) if self._standbys is not None else None

    def warm_up(self, spec: PodSpec, imports: bytes, trusted: bool) -> None:
        """On a spare: start standbys for a place like this one, with what another node's `listed` got.
        `trusted` as in `Standbys.prepare`.
        """
        if self._standbys is not None:
            try:
                self._standbys.prepare(spec.containers, imports, trusted=trusted)
            except (OSError, ValueError) as error:
                self._console.warning(printable(f"this spare will not be warm: {error}"))

    def _note_lateness(self, late: tuple[Late, ...]) -> None:
        if lateness_fields((*late, *self.job_status.late)):
            self.journal.write("lateness", late=lateness_fields(late))
        self.job_status.late = late

    def _warn_of(self, verdict: Verdict, *, normal: bool = False) -> None:
        tell = self._console.info if normal else self._console.warning
        hint = " (normal while a rank evaluates, compiles or reads data)" if normal else ""
        tell(printable(f"{verdict.sentence}{hint}; see `fleetrun why`"))
        self.journal.write("verdict", **verdict_fields(verdict))
        self.job_status.warned(verdict)

    def _check_served(self, event: PodEvent) -> None:
        """Warn of a server at whose endpoint no process has listened: its script has trained on its own."""
        if isinstance(event, Leaving):
            servers = [each.spec for each in event.rest]
        elif isinstance(event, Ended) and event.exit.ok and not event.dismissed and event.asked is None:
            servers = [event.spec]
        else:
            return
        # Twice: while connections end, the kernel's list may pass over one.
        seen = ports_in_use() | ports_in_use()
        for spec in servers:
            if spec.role is Role.SERVER and spec.endpoint and split_endpoint(spec.endpoint)[1] not in seen:
                self._console.warning(
                    f"{spec.title}: no process listened at its endpoint {spec.endpoint}. A script for "
                    "parameter servers calls fleet.run_server() there; any other has run its training in "
                    "this process too"
                )

    def _record(self, event: PodEvent) -> None:
        for name, fields in record_lines(event):
            self.journal.write(name, **fields)

    def hangs(self) -> HangWatch | None:
        """The watch for hangs, the same for all pods; None unless it was asked for."""
        if self._hangs is None and self.settings.hang_timeout is not None:
            from fleetrun.stacks.helper import watch_for_hangs  # late: most launches watch for none

            limit = self.settings.hang_timeout
            self._hangs = watch_for_hangs(
                self._loop, self.companions, limit, self._tell_places, self._ask_others
            )
            reported = self._hangs.reported
            self.progress.subscribe(lambda container, report: reported(container))
        return self._hangs

    def _tell_places(self, findings: Findings) -> None:
        self._console.block([f"  {printable(line)}" for line in findings.stacks], level="ERROR")

    def inspect(
        self, containers: Sequence[Container], ended: Ended | None, then: Callable[[Verdict | None], None]
    ) -> Callback | None:
        """`Inspect` of a supervisor: of what may follow from another rank's failure, and of silence."""
        silent, detail = (self.job_status.silent_for() or 0.0) >= _SILENT, Detail.PROBES
        if ended is not None:
            silent, detail = is_symptom(ended.exit, ended.message), Detail.OUTSIDE
        if not silent or not self._has_ranks(containers):
            return None
        return self._find(containers, lambda findings: then(findings.verdict), detail)

    def why(self, detail: Detail, then: Callable[[Findings], None]) -> None:
        """For `fleetrun why` and `bundle`."""
        self._find(self._pod.containers if self._pod is not None else [], then, detail)

    def tell_ranks(self, most: int, detail: Detail, then: Callable[[bytes], None]) -> None:
        """For another node that asks: where the ranks of this node are, or for how long all are silent."""
        from fleetrun.stacks.helper import pack_states, quick_taker, with_logs  # late: few jobs are asked

        containers = self._pod.containers if self._pod is not None else []
        asked, whole = time.time(), detail is Detail.ALL
        if detail is Detail.SIGNS:
            then(pack_states([{"quiet": self.job_status.silent_for()}], most, asked))
            return

        def taken(lines: Strings, states: list[State]) -> None:
            told = with_logs(states, containers) if whole else states
            then(pack_states(told, most, asked))

        quick_taker(self._loop, self.companions, detail, facts=whole).take(containers, taken)

    def last_step(self, containers: Sequence[Container]) -> int | None:
        """Of these containers in this attempt, as far as they have reported it."""
        return self.progress.last_step(each.spec.name for each in containers)

    def set_pod(self, pod: Pod, restarts: int) -> None:
        """This pod is next, after so many restarts."""
        self._pod = pod
        self.job_status.set_pod(pod, restarts)
        self.progress.pod(pod.spec)
        if self._standbys is not None:
            self._standbys.set_pod(pod)
        if self._feed is not None:
            self._feed.pod(pod.spec)
        self.journal.write(
            "ready",
            attempt=max((each.restarts for each in pod.containers), default=0),
            containers=container_fields(pod.spec),
        )
        self.marks.start(logs_of(pod.spec))

    def summary(self, spec: PodSpec, restarts: int = 0) -> str:
        """Of a job that ended on this machine, well or because it was stopped."""
        return f"{self.reached(spec, restarts)}; logs: {logs_pattern(spec, self.settings.log_dir)}"

    def reached(self, spec: PodSpec, restarts: int = 0) -> str:
        """`12m34s, 800 steps, loss 0.21, 1 restart`"""
        self.progress.settle()
        names = [each.name for each in spec.containers if each.role is Role.TRAINER]
        reports = [report for name in names if (report := self.progress.latest(name)) is not None]
        rates = [rate for name in names if (rate := self.progress.average(name)) is not None]
        facts = [
            describe_duration(self.job_status.elapsed),
            *progress_facts([(each.step, each.loss) for each in reports], sum(rates) if rates else None),
            *([restarts_in_words(restarts)] if restarts else []),
        ]
        return ", ".join(facts)

    def over(
        self,
        code: int,
        reason: str,
        restarts: int,
        report: list[str],
        first: ContainerSpec | None = None,
        *,
        requested: bool = False,
    ) -> None:
        """The job is over on this machine. `first`: the process of the first failure, if that was here.
        `requested`: its user ended it.
        """
        self._over = True
        self.marks.close()
        self.progress.settle()
        goodput = goodput_fields(self.job_status.goodput.seconds(self._wall()))
        self.journal.write(
            "over",
            code=code,
            reason=reason,
            restarts=restarts,
            report=report,
            container=first.name if first is not None else None,
            rank=first.rank if first is not None else None,
            goodput=goodput,
        )
        if code and report:
            _tell_parent(report)
        if self.notices is not None:
            reached = self.reached(self._pod.spec, restarts) if self._pod is not None else ""
            self.notices.over(code, reason, restarts, report, first, requested=requested, reached=reached)

    def close(self) -> None:
        """After the last process. May be called twice. While an error is handled, the error is recorded as
        the reason.
        """
        error = sys.exception()
        if error is not None and not self._over:
            bug = LaunchError(f"{type(error).__name__}: {error}")
            told = error if isinstance(error, LaunchError) else bug
            self.over(told.exit_code, told.message, 0, [])
        self.marks.close()
        for watch in self._watches:
            watch.close()
        if self._standbys is not None:
            self._standbys.close()
        if self._control is not None:
            self._control.close()
        self.progress.close()
        self._memory.close()
        files.remove_probe_sockets(self._runtime, self.pod_name)
        if self._feed is not None:
            self._feed.close(self._interrupts.urgent)
        if self.notices is not None:
            self.notices.close(self._interrupts.urgent)
        self.journal.close()

    def _warn(self, text: str) -> None:
        self._console.warning(printable(text))

    def _exported(self, event: dict[str, Any]) -> None:
        assert self._feed is not None
        self._feed.event(event)
        if event["event"] in _SPENDING:
            seconds = self.job_status.goodput.seconds()  # what is certain: a counter must never go back
            self._feed.spent({str(kind): spent for kind, spent in seconds.items()})

    def _export(self, spec: PodSpec) -> None:
        from fleetrun.exporters.feed import Feed  # late: most launches export nothing

        self._feed = Feed(self._loop, self.companions, self.progress, self._console.info, self._warn)
        self._feed.open(self.settings, spec)
        self.journal.subscribe(self._exported)


# ---- The runner: loop, signals and guard, log files, and what the console follows

_SILENT = 3.0  # seconds after which a job that is stopped perhaps makes no progress


class PodRunner:
    """One for a launch. A job on several machines puts one pod after the other on it, with the same log
    files.
    """

    def __init__(self, session: LaunchSession, console: Console, loop: Loop, interrupts: Interrupts) -> None:
        self._session = session
        self._settings = session.settings
        self._console = console
        self._loop = loop
        self._interrupts = interrupts
        self._watch: Watch | None = None
        self._pod: Pod | None = None
        self._oom = OomWatch()
        loop.add(interrupts.signals.fileno(), self._signalled)
        loop.add(interrupts.guard.fileno(), self._guard_gone)

    def _signalled(self) -> None:
        dispatch(
            self._interrupts.signals.read,
            self._pod,
            interrupt=self._interrupts.end,
            written=self._written,
            resumed=self._resumed,
            say=self._console.info,
            pausing=self._console.pause,
            companions=self._session.companions,
        )

    def _written(self) -> None:
        """Something in the log directory was written to."""
        if self._watch is not None:
            self._watch.told()
        self._session.marks.told()

    def _resumed(self, seconds: float) -> None:
        self._loop.postpone(seconds)
        self._console.resume()

    def _guard_gone(self) -> None:
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
        """For one pod. Its log files are in place then, and followed. `attempt` counts the pods before it,
        `restarts` those that were restarts after a failure, which have `spent` this of the budget.
        """
        first = self._watch is None
        if first and self._settings.log_overwrite:
            logs.remove_earlier(spec.log_dir, spec.job_id)
        pod = Pod(spec, attempt, self._session.warm)
        pod.prepare()
        if first:
            files = [(each.name, each.log) for each in spec.containers]
            logs.point_latest(spec.log_dir, spec.name, files)
            self._watch = _watch(self._settings, spec, self._console, self._loop, self._session.marks.cut)
        assert self._watch is not None
        narrator = Narrator(self._console, spec, self._watch.catch_up, alone=peers is None)
        supervisor = Supervisor(
            pod,
            self._loop,
            Budget(self._settings.max_restart, self._settings.restart_window),
            self._session.events(narrator, spec, alone=peers is None).publish,
            stop_timeout=self._settings.stop_timeout,
            out_of_memory=self._oom.killed,
            timeout=timeout,
            peers=peers,
            restarts=restarts,
            spent=spent,
            last_step=self._session.last_step,
            has_saved=lambda container: self._session.progress.has_saved(container.spec.name),
            hangs=self._session.hangs(),
            inspect=self._session.inspect,
            sweep=partial(end_descendants, but=self._session.companions),
            ask=partial(_ask_strays, self._session.companions),
            end_marked=partial(kill_marked, but=self._session.companions),
        )
        self._pod = pod
        self._session.set_pod(pod, restarts)
        if first:
            self._watch.start()
            if self._settings.enable_gpu_log and spec.uses_gpus:
                from fleetrun.pod.gpu_log import GpuLog  # late: only where there are GPUs

                GpuLog.start(spec, self._loop)
        return supervisor

    def over(self) -> None:
        """After the last process: show what the logs still hold."""
        self._interrupts.job_over = True
        self._interrupts.signals.only_endings()
        if self._watch is None:
            return
        self._watch.drain(lambda: self._console.out.drain(self._interrupts.urgent))
        self._console.end()
        for path in self._watch.unbounded:
            self._console.warning(
                f"--log_rotate could not shorten {path}: its file system cannot take blocks out of a file"
            )


def _ask_strays(companions: Collection[int], groups: Collection[int]) -> None:
    """But not the launcher's helper processes, which lead groups of their own."""
    ask_strays({*groups, *companions})


def _watch(
    settings: LaunchSettings, spec: PodSpec, console: Console, loop: Loop, cut: Callable[[Path, int], None]
) -> Watch:
    """What the console follows: one container as it is, several with their names before each line. `cut` is
    called with what --log_rotate takes away.
    """
    watch = Watch(loop, spec.log_dir, lambda: console.out.room, cut=cut)
    console.attach(loop, watch.go_on)
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
        watch.follow(each.log, emit, live=live)
    if settings.log_rotate is not None:
        for each in spec.containers:
            watch.bound(each.log, settings.log_rotate)
    return watch


def announce(spec: PodSpec, console: Console) -> None:
    """The pod that is about to run."""
    console.opening(pod_line("Run", spec, "ready"))
    if console.enabled("DEBUG"):
        console.block(environment_tables(spec), level="DEBUG")
    if logs.is_full(spec.log_dir):
        console.warning(f"the disk of {spec.log_dir} is full: the job continues, but its output will be lost")

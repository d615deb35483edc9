"""The composition root of one launch on one machine: settings in, exit code out. Everything is made here,
nothing decided.
"""

from __future__ import annotations

import os
import select
import string
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from fleetrun.console import banner, plan
from fleetrun.console.console import Console, terminal_columns, wants_colour
from fleetrun.console.narrator import Narrator
from fleetrun.console.report import report, restarts_in_words
from fleetrun.console.sink import sinks
from fleetrun.console.tail import read_tail
from fleetrun.envs import devices, topology
from fleetrun.envs.contract import Role
from fleetrun.envs.network import LOOPBACK, Ports, is_this_host, split_endpoint
from fleetrun.envs.settings import LaunchSettings, Resolved
from fleetrun.envs.settings import banner as banner_rows
from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod import cgroup, logfiles, program
from fleetrun.pod.follow import Watch
from fleetrun.pod.gpulog import GpuLog
from fleetrun.pod.guardian import Guard
from fleetrun.pod.job import command, job_spec, pod_spec
from fleetrun.pod.jobcontrol import dispatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.pod import Pod
from fleetrun.pod.restarts import RestartPolicy
from fleetrun.pod.result import JobResult
from fleetrun.pod.signals import Signals
from fleetrun.pod.spec import PodSpec
from fleetrun.pod.supervisor import Supervisor

_WIDE = 100  # columns of a report that goes to no terminal
_STAMP = 36  # columns of `LAUNCH INFO 2022-05-18 11:27:17,761 `


def run(resolved: Resolved, signals: Signals, guard: Guard) -> int:
    """Launch; return the exit code. Raises LaunchError for what cannot be started.

    `signals` holds what came since the process began.
    """
    settings = resolved.settings
    columns = terminal_columns()
    console = Console(*sinks(), settings.log_level, colour=wants_colour(os.environ), columns=columns)
    ports = Ports(settings.port_range)
    hurry = _hurry(signals, guard)
    try:
        _check_program(settings)
        for notice in resolved.notices:
            console.warning(notice)
        spec = _plan(resolved, console, ports, os.environ)
        if settings.dry_run:
            _print_plan(settings, spec)
            return 0
        logfiles.make_log_dir(Path(settings.log_dir))
        _announce(resolved, spec, console)
        result = _supervise(settings, spec, console, signals, guard, hurry)
        _conclude(result, spec, console)
        return result.code
    finally:
        ports.close()
        signals.only_endings()
        console.drain(hurry.fileno())


def _hurry(signals: Signals, guard: Guard) -> select.epoll:
    """Readable when the last output cannot wait for a slow reader: the job shall end, or nobody guards it."""
    either = select.epoll()
    either.register(signals.fileno(), select.EPOLLIN)
    either.register(guard.fileno(), select.EPOLLIN)
    return either


def _check_program(settings: LaunchSettings) -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError(
            "the current directory does not exist any more", hint="Try `cd .` or another."
        ) from None
    if settings.module:
        program.check_module(settings.script)
    elif settings.script.endswith(".py") and not settings.no_python:
        program.check_python_script(settings.script)
    else:
        program.check_program(command(settings)[0], os.environ.get("PATH", os.defpath))


def _plan(resolved: Resolved, console: Console, ports: Ports, environ: Mapping[str, str]) -> PodSpec:
    settings = resolved.settings
    host = _host(resolved, console, environ)
    members = topology.build(settings, host, lambda port: ports.any() if port is None else ports.fixed(port))
    pod = "".join(string.ascii_lowercase[byte % 26] for byte in os.urandom(6))
    spec = pod_spec(settings, members, pod=pod, cores=host.cores, environ=environ)
    _check_followed(settings, spec)
    return spec


def _check_followed(settings: LaunchSettings, spec: PodSpec) -> None:
    """Raises UsageError for a process that --follow names and that there is not."""
    if {role for role, _ in settings.follow} == set(Role):  # all
        return
    for role, numbers in settings.follow:
        there = [each.index for each in spec.containers if each.role is role]
        missing = [number for number in numbers or there[:1] or (0,) if number not in there]
        if missing:
            have = f"there are {role}:0 to {role}:{len(there) - 1}" if there else f"this job has no {role}"
            raise UsageError(f"--follow {role}:{missing[0]}: there is no such process; {have}")


def _host(resolved: Resolved, console: Console, environ: Mapping[str, str]) -> topology.Host:
    """This machine. Raises UsageError for hosts that are another, and devices that are not there."""
    settings = resolved.settings
    address = settings.host or (settings.ips[0] if settings.ips else LOOPBACK)
    stages = tuple(endpoint for stage in settings.heter_workers for endpoint in stage)
    endpoints = (*settings.servers, *settings.trainers, *stages, *settings.coordinators)
    named = [address, *([settings.master_addr] if settings.master_addr else [])]
    for host in dict.fromkeys([*named, *(split_endpoint(each)[0] for each in endpoints)]):
        if not is_this_host(host):
            raise UsageError(
                f"{host} is not an address of this machine", hint="This version starts jobs on one machine."
            )
    found = devices.detect(settings.device_kind, environ)
    if settings.devices and not found.ids:
        console.warning(
            f"{resolved.origins['devices']} {','.join(settings.devices)}: "
            f"there is no {settings.device_kind.upper()} here; "
            "computing on CPUs (Gloo)"
        )
    chosen = devices.choose(settings.devices, found) if found.ids else ()
    return topology.Host(
        address=address,
        devices=chosen,
        device_kind=settings.device_kind,
        wanted_devices=len(settings.devices),
        cores=len(os.sched_getaffinity(0)),
    )


def _print_plan(settings: LaunchSettings, spec: PodSpec) -> None:
    text = plan.as_json(spec, os.environ) if settings.json else "\n".join(plan.as_text(spec, os.environ))
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LaunchError(f"the plan could not be written: {error.strerror}") from None


def _announce(resolved: Resolved, spec: PodSpec, console: Console) -> None:
    columns = terminal_columns() or _WIDE
    for line in banner.configuration(banner_rows(resolved), rule=min(50, columns - _STAMP)):
        console.info(line)
    console.info(banner.job_line(job_spec(resolved.settings)))
    console.info(banner.pod_line("Run", spec, "ready"))
    if console.says("DEBUG"):
        console.block(banner.environments(spec), level="DEBUG")
    if logfiles.is_full(spec.log_dir):
        console.warning(f"the disk of {spec.log_dir} is full: the job goes on, but its output will be lost")


def _supervise(
    settings: LaunchSettings,
    spec: PodSpec,
    console: Console,
    signals: Signals,
    guard: Guard,
    hurry: select.epoll,
) -> JobResult:
    pod = _prepared(settings, spec)
    loop = Loop()
    watch = _watch(settings, spec, console, loop)
    supervisor = Supervisor(
        pod,
        loop,
        RestartPolicy(limit=settings.max_restart),
        Narrator(console, spec, watch.catch_up),
        stop_timeout=settings.stop_timeout,
        timeout=settings.timeout,
    )

    def signalled() -> None:
        dispatch(
            signals.read(),
            pod,
            interrupt=supervisor.interrupt,
            written=watch.told,
            resumed=loop.postpone,
            say=console.info,
        )

    loop.add(signals.fileno(), signalled)
    loop.add(guard.fileno(), partial(_guard_lost, loop, supervisor, guard))
    watch.start()
    GpuLog.start_if(settings.enable_gpu_log, spec, loop)
    result = supervisor.run()
    signals.only_endings()
    watch.drain(lambda: console.out.drain(hurry.fileno()))
    _warn_of_unbounded(watch, console)
    return result


def _prepared(settings: LaunchSettings, spec: PodSpec) -> Pod:
    """The pod, and its log files in place."""
    if settings.log_overwrite:
        logfiles.remove_earlier(spec.log_dir, spec.job_id)
    pod = Pod(spec)
    pod.prepare()
    logfiles.point_latest(spec.log_dir, spec.name, [(each.name, each.log) for each in spec.containers])
    return pod


def _guard_lost(loop: Loop, supervisor: Supervisor, guard: Guard) -> None:
    loop.remove(guard.fileno())
    supervisor.guard_lost()
    cgroup.kill_all(guard.pid)
    cgroup.remove(guard.pid)


def _warn_of_unbounded(watch: Watch, console: Console) -> None:
    for path in watch.unbounded:
        console.warning(
            f"--log_rotate could not shorten {path}: its file system cannot take blocks out of a file"
        )


def _watch(settings: LaunchSettings, spec: PodSpec, console: Console, loop: Loop) -> Watch:
    """What the console follows: one container as it is, several with their names before each line."""
    watch = Watch(loop, spec.log_dir, lambda: console.out.room)
    console.attach(loop, watch.go_on)
    followed = [
        each
        for each in spec.containers
        if any(
            each.role is role and (numbers is None or each.index in numbers)
            for role, numbers in settings.follow
        )
    ]
    widest = max((len(each.name) for each in followed), default=0)
    for number, each in enumerate(followed):
        label = console.label(each.name, widest, number) if len(followed) > 1 else b""
        watch.follow(each.log, partial(console.show, label), live=not label)
    if settings.log_rotate is not None:
        for each in spec.containers:
            watch.bound(each.log, settings.log_rotate)
    return watch


def _conclude(result: JobResult, spec: PodSpec, console: Console) -> None:
    if result.strays:
        console.warning(f"{result.strays} processes that had left their container were ended with the job")
    if result.cause is not None:
        tail = read_tail(result.cause.spec.log)
        lines = report(
            result, tail, width=terminal_columns() or _WIDE, log_full=logfiles.is_full(spec.log_dir)
        )
        console.block(lines, level="ERROR")
    if result.code == 0:
        restarts = f", {restarts_in_words(result.restarts)}" if result.restarts else ""
        console.info(f"Pod completed: {spec.name}{restarts}")
    elif result.cause is None:
        console.error(f"Pod stopped: {spec.name}, {result.reason}, exit code {result.code}")
    else:
        console.error(f"Pod failed: {spec.name}, exit code {result.code}")

"""The composition root of one launch: settings in, exit code out. Everything is made here, or for several
machines in `cluster.py`; nothing is decided.
"""

from __future__ import annotations

import os
from pathlib import Path

from fleetrun.console import narrator
from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.display import console_for
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.show import banner as banner_rows
from fleetrun.host.network import Ports
from fleetrun.launch.prepare import (
    check_followed,
    check_program,
    host_of,
    job_spec,
    offer_of,
    pod_name,
    print_plan,
    spec_of,
    take_token,
)
from fleetrun.launch.session import WIDE, LaunchSession, PodRunner, announce, conclude
from fleetrun.plan.site import Site, locate
from fleetrun.pod import logs
from fleetrun.pod.guard import Guard, Signals

_STAMP = 36  # columns of `LAUNCH INFO 2022-05-18 11:27:17,761 `


def run(resolved: Resolved, signals: Signals, guard: Guard) -> int:
    """Launch; return the exit code. Raises LaunchError for what cannot be started.

    `signals` holds what came since the process began.
    """
    settings = resolved.settings
    runs = settings.scheduler == "local" and not settings.dry_run
    console = console_for(settings.display, settings.log_level, os.environ, runs=runs)
    runner = PodRunner(settings, console, signals, guard)
    ports = Ports(settings.port_range)
    try:
        take_token(settings, os.environ, console.warning)
        if settings.scheduler != "local":
            return _submit(resolved, runner, signals, guard)
        check_program(settings)
        for notice in resolved.notices:
            console.warning(notice)
        site = locate(settings)
        if site.alone:
            return _alone(resolved, site, runner, ports)
        from fleetrun.launch.cluster import run_cluster  # late: one machine needs no network

        return run_cluster(resolved, site, runner, ports, lambda: _show_settings(resolved, site, console))
    finally:
        ports.close()
        signals.only_endings()
        console.drain(runner.urgent)


def _submit(resolved: Resolved, runner: PodRunner, signals: Signals, guard: Guard) -> int:
    """Hand the job to an engine."""
    from fleetrun.envs.settings.write_job_file import words_to_carry  # late: one machine needs none of these
    from fleetrun.schedulers.base import Submission, scheduler

    if "config" in resolved.words and not resolved.settings.dry_run:
        logs.make_log_dir(Path(resolved.settings.log_dir))
    job = Submission(
        settings=resolved.settings,
        words=words_to_carry(resolved),
        environ=os.environ,
        console=runner.console,
        signals=signals,
        guard=guard,
        token=os.environ.get(TOKEN),
    )
    return scheduler(resolved.settings.scheduler).submit(job)


def _alone(resolved: Resolved, site: Site, runner: PodRunner, ports: Ports) -> int:
    """A job on this machine."""
    settings, console = resolved.settings, runner.console
    host = host_of(resolved, site, console.warning, os.environ)
    offers = [offer_of(settings, host, ports)]
    pod = pod_name()
    spec = spec_of(settings, host, offers, 0, pod=pod, environ=os.environ)
    check_followed(resolved, spec)
    if settings.dry_run:
        print_plan(settings, spec)
        return 0
    logs.make_log_dir(Path(settings.log_dir))
    _show_settings(resolved, site, console)
    announce(spec, console)
    session = LaunchSession(resolved, pod, console, runner.loop)
    runner.on(session)
    try:
        session.opened(spec)
        supervisor = runner.supervisor(spec, timeout=settings.timeout)
        runner.listen(supervisor.interrupt, supervisor.guard_lost)
        result = supervisor.run()
        runner.over()
        lines = conclude(result, spec, console)
        session.over(result.code, result.reason, result.restarts, lines)
    finally:
        session.close()
    return result.code


def _show_settings(resolved: Resolved, site: Site, console: Console) -> None:
    columns = terminal_columns() or WIDE
    for line in narrator.configuration_lines(banner_rows(resolved), rule=min(50, columns - _STAMP)):
        console.info(line)
    console.info(narrator.job_line(job_spec(resolved.settings, site.nnodes)))

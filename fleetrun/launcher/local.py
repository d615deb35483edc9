"""Run one launch on this node, from settings to exit code. This module makes all objects in order of
dependency. For a job of several nodes, `cluster.py` makes the rest. The only decision here is the display.
"""

from __future__ import annotations

import os
from pathlib import Path

from fleetrun.aliases import Environ, Texts
from fleetrun.console import narrator
from fleetrun.console.console import LEVELS, Console, QuietConsole, sinks, terminal_columns, wants_colour
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.options import BY_VARIABLE, LaunchSettings, Resolved
from fleetrun.envs.settings.show import banner as banner_rows
from fleetrun.envs.settings.show import changed, job_file_parts, program
from fleetrun.envs.variables import chosen
from fleetrun.host.network import Ports
from fleetrun.launcher.ending import WIDE, first_failure, report_end
from fleetrun.launcher.parts import End, Reach
from fleetrun.launcher.prepare import (
    check_followed,
    check_program,
    equipped,
    imagined,
    locate,
    name_clash,
    offer_of,
    pod_name,
    print_plan,
    take_notify,
    take_token,
    with_debugger,
    with_writable_logs,
)
from fleetrun.launcher.runner import PodRunner, announce
from fleetrun.launcher.session import LaunchSession
from fleetrun.launcher.signals import Interrupts
from fleetrun.plan.topology import Host, pod_spec
from fleetrun.pod import logs
from fleetrun.pod.guard import Guard, Signals
from fleetrun.pod.linux import check_pidfds
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import PodSpec

_STAMP = 36  # columns of `LAUNCH INFO 2022-05-18 11:27:17,761 `


def run(resolved: Resolved, signals: Signals, guard: Guard) -> int:
    """Launch and return the exit code. `signals` holds the signals received since the process started.

    Raises LaunchError if something cannot be started.
    """
    settings = resolved.settings
    runs = settings.scheduler == "local" and not settings.dry_run
    console = console_for(settings.display, settings.log_level, os.environ, runs=runs)
    loop, interrupts = Loop(), Interrupts(signals, guard)
    ports = Ports(settings.port_range)
    try:
        check_pidfds()
        take_token(settings, os.environ, console.warning)
        take_notify(settings, os.environ)
        passed_on = _passed_on(settings, console) if settings.env else {}
        if settings.scheduler != "local":
            return _submit(resolved, console, signals, guard, passed_on)
        check_program(settings)
        if not settings.dry_run:
            resolved = with_debugger(with_writable_logs(resolved, console.warning), os.environ)
            settings = resolved.settings
        for notice in resolved.notices:
            console.warning(notice)
        if (clash := name_clash(settings, os.environ)) is not None:
            console.warning(f"{clash.sentence}. {clash.way_out}")
        host = locate(settings)
        if not host.alone:
            from fleetrun.elastic.meeting import check_meeting  # late: one node needs no network

            check_meeting(host.master)
        host = equipped(host, resolved, console.warning, os.environ)
        offer = offer_of(settings, host, ports)
        offers, rank = imagined(host, offer)
        spec = pod_spec(settings, host, offers, rank, pod=pod_name(), environ=os.environ)
        check_followed(resolved, spec)
        if settings.dry_run:
            print_plan(settings, spec)
            return 0
        logs.make_log_dir(Path(settings.log_dir))
        facts = _show_settings(resolved, host, spec, console)
        session = LaunchSession(resolved, spec, console, loop, interrupts)
        if host.alone:
            return _alone(session)
        from fleetrun.launcher.cluster import run_cluster  # late, for the same reason

        return run_cluster(session, host, ports, offer, facts)
    finally:
        signals.only_endings()
        ports.close()
        console.drain(interrupts.urgent)


def _passed_on(settings: LaunchSettings, console: Console) -> Texts:
    """Return the environment variables that --env selects. Raises UsageError."""
    found = chosen(settings.env, os.environ, BY_VARIABLE)
    if settings.scheduler != "local":  # local processes inherit all environment variables
        for remark in found.remarks:
            console.warning(remark)
    return found.values


def _submit(resolved: Resolved, console: Console, signals: Signals, guard: Guard, passed_on: Texts) -> int:
    """Submit the job to a scheduler."""
    from fleetrun.schedulers.base import Submission, submit  # late: a local job needs no scheduler

    job = Submission(
        settings=resolved.settings,
        words=resolved.words,
        passed_on=passed_on,
        job_file=job_file_parts(resolved.settings),
        environ=os.environ,
        console=console,
        signals=signals,
        guard=guard,
        token=os.environ.get(TOKEN),
    )
    return submit(job)


def _alone(session: LaunchSession) -> int:
    """Run a job of one node."""
    spec, console, interrupts = session.spec, session.console, session.interrupts
    announce(spec, console)
    runner = PodRunner(session, interrupts)
    try:
        session.open(Reach(), runner.victims)
        attempt = 0
        while True:
            supervisor = runner.supervisor(spec, timeout=session.settings.timeout, attempt=attempt)
            interrupts.listen(supervisor.interrupt, supervisor.guard_lost, supervisor.restart)
            result = supervisor.run()
            waits = session.settings.watch and not interrupts.asked
            end = runner.drain if waits else runner.over
            end()
            lines = report_end(result, spec, console, session.summary)
            attempt = runner.wait() if waits else 0
            if not attempt:
                break
        if waits:
            runner.over()
        session.over(
            End(
                code=result.code,
                reason=result.reason,
                restarts=result.restarts,
                report=tuple(lines),
                first=first_failure(result),
                requested=result.requested,
            )
        )
    finally:
        session.close()
    return result.code


def _show_settings(resolved: Resolved, host: Host, spec: PodSpec, console: Console) -> str:
    """Show the settings, and return a description of the processes on this node.

    With several nodes, each node prints the description when all nodes have joined. A log file gets Paddle's
    whole banner, because people read it afterwards. A terminal gets only settings that differ from the
    defaults.
    """
    settings, columns = resolved.settings, terminal_columns() or WIDE
    whole = console.enabled("DEBUG") or terminal_columns() is None
    if whole:
        for line in narrator.configuration_lines(banner_rows(resolved), rule=min(50, columns - _STAMP)):
            console.opening(line)
    console.opening(narrator.job_line(settings.job_id, settings.run_mode, host.nnodes))
    kind, script = settings.device_kind, os.path.basename(program(settings))  # noqa: PTH119 - may be a module
    facts = narrator.pod_facts(spec, script, kind, host.devices, settings.log_dir)
    if host.alone:
        console.opening(facts)
    if not whole and (rows := changed(resolved)):
        console.opening(narrator.settings_line(rows))
    return facts


# ---- The display: live, plain, json or quiet

NO_TERMINAL = (
    "--display live needs one terminal for stdout and stderr, and a TERM other than dumb; showing plain lines"
)


def choose_display(requested: str, environ: Environ, *, terminal: bool) -> str:
    """Return live, plain, json or quiet. `terminal`: stdout and stderr are the same terminal."""
    if requested not in ("auto", "live"):
        return requested
    able = terminal and environ.get("TERM", "") not in ("", "dumb")
    automated = environ.get("CI", "").lower() not in ("", "0", "false")
    notebook = "JPY_PARENT_PID" in environ  # a notebook's `!command` shows colours but cannot move the cursor
    wanted = requested == "live" or not (environ.get("NO_COLOR") or automated or notebook)
    return "live" if able and wanted else "plain"


def console_for(requested: str, level: str, environ: Environ, *, runs: bool = True) -> Console:
    """Return a console on stdout and stderr of this process. Without `runs`, this process starts no job: the
    console then has no state and no events to show.
    """
    out, err = sinks()
    colour = wants_colour(environ, 1, 2)
    display = choose_display(requested, environ, terminal=out is err and os.isatty(1))
    if display == "json" and runs:
        from fleetrun.console.jsonlines import JsonConsole  # late, as below: a launch needs at most one

        return JsonConsole(out, err, level)
    if display == "live" and runs:
        from fleetrun.console.status_line import live_console

        return live_console(out, level, colour=colour)
    if display == "quiet":
        level = max(level, "ERROR", key=LEVELS.__getitem__)
    kind = QuietConsole if display == "quiet" else Console
    console = kind(out, err, level, colour=colour, columns=terminal_columns())
    if requested == "live" and display != "live" and runs:
        console.warning(NO_TERMINAL)
    return console

"""ssh: the same command on every host of --ips, from one terminal, through the system's ssh."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from fleetrun.errors import UsageError
from fleetrun.schedulers.base import Options, Submission
from fleetrun.schedulers.party import Pace, Party

_TOKEN = "FLEETRUN_TOKEN"
_MOST = 8_000  # what goes into a pipe at once, however it is escaped


class Ssh:
    """`--scheduler ssh`. Ends with the exit code of the host that failed first."""

    name = "ssh"

    def submit(self, job: Submission) -> int:
        settings, options = job.settings, job.options
        if not settings.ips:
            raise UsageError("--scheduler ssh needs --ips: the hosts to start on")
        env = _environment(job, options)
        commands = {host: client(job, options, host) for host in settings.ips}
        options.refuse_rest("ssh")
        if settings.dry_run:
            job.print("".join(f"{shlex.join(argv)}\n" for argv in commands.values()))
            return 0
        pace = Pace(heartbeat_timeout=settings.heartbeat_timeout, stop_timeout=settings.stop_timeout)
        return Party(job.console, job.signals, job.guard, pace).run(commands, env)


def client(job: Submission, options: Options, host: str) -> list[str]:
    """The command line of the ssh client for a host. Nothing secret is in it."""
    alive = max(1, round(job.settings.heartbeat_timeout / 3))
    argv = ["ssh", "-T"]
    for option in (
        "BatchMode=yes",
        "ControlMaster=no",
        "ControlPath=none",
        f"ServerAliveInterval={alive}",
        "ServerAliveCountMax=3",
        "ConnectTimeout=10",
        "LogLevel=ERROR",
    ):
        argv += ["-o", option]
    for name, flag in (("config", "-F"), ("user", "-l"), ("port", "-p"), ("identity", "-i")):
        value = options.take(name)
        if value:
            argv += [flag, value]
    return [*argv, "--", host.strip("[]"), _remote(job, options, host)]


def _remote(job: Submission, options: Options, host: str) -> str:
    """For the login shell there, whichever it is: it only starts sh."""
    python = options.take("python", sys.executable)
    folder = options.take("dir") or str(Path.cwd())
    words = job.command("host", "nic", "token_file")
    # A host that is listed under two names must know which of them it is.
    fleetrun = (python, "-m", "fleetrun", f"--host={host}", *words)
    leash = (python, "-m", "fleetrun.schedulers.leash", "--")
    return shlex.join(["sh", "-c", f"cd {shlex.quote(folder)} && exec {shlex.join((*leash, *fleetrun))}"])


def _environment(job: Submission, options: Options) -> dict[str, str]:
    """Variables that go along: the secret, and those of `env=NAME,NAME`. They travel on stdin."""
    names = [name for name in options.take("env").split(",") if name]
    missing = [name for name in names if name not in job.environ]
    if missing:
        raise UsageError(f"--scheduler_option env={missing[0]}: that variable is not set here")
    env = {name: job.environ[name] for name in names} | ({_TOKEN: job.token} if job.token else {})
    if sum(len(name) + len(value) for name, value in env.items()) > _MOST:
        raise UsageError(f"--scheduler_option env: these variables are larger than {_MOST} characters")
    return env


ENGINE = Ssh()

"""The common parts of all schedulers: the job that they receive (`Submission`), their interface
(`Scheduler`), and the calls of their client programs (sbatch, scontrol, kubectl). Each scheduler is a file in
this directory, imported only when needed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from fleetrun import plugins
from fleetrun.aliases import Environ, Fields, Strings, Texts
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.options import NOTIFY, OPTIONS, LaunchSettings
from fleetrun.envs.variables import JOB_FILE, looks_secret
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.pod.guard import JOB_CONTROL, PASSED_ON, Guard, Signals
from fleetrun.record.faults import excluded, faults_path, read_kept

if TYPE_CHECKING:
    from fleetrun.console.console import Console

# ---- The interface of a scheduler

FLEETRUN = (sys.executable, "-m", "fleetrun")
"""This fleetrun installation, for nodes that share the files of this node."""


_OF_THE_SUBMISSION = (
    "scheduler", "scheduler_option", "image", "dry_run", "json", "save", "env", "config", "sync",
)  # fmt: skip
"""Options that the nodes do not receive on their command lines."""

_LARGEST_VARIABLE = 100_000
"""In bytes. The limit of Linux is 128 KiB."""


@frozen_by_name
class Submission:
    """A job for a scheduler."""

    settings: LaunchSettings
    words: Texts
    """The options as words of a command line, by name, from all sources."""
    environ: Environ
    console: Console
    signals: Signals
    guard: Guard
    passed_on: Texts = field(default_factory=dict, repr=False)
    """The environment variables that --env takes from this environment."""
    job_file: Fields = field(default_factory=dict, repr=False)
    """The tables of the job file that no option can express."""
    token: str | None = None
    """The token of the job."""
    _taken: set[str] = field(default_factory=set, repr=False)

    @property
    def carried(self) -> dict[str, str]:
        """The environment variables for fleetrun on each node: the variables of --env, and the job file.

        Raises UsageError.
        """
        # imported late, because a launch inside a job has no job file
        from fleetrun.envs.settings.write_job_file import tables

        head = "# Settings of this run that only a job file can hold."
        text = tables(self.job_file, head) if self.job_file else ""
        size = len(text.encode("utf-8", "surrogateescape"))
        if size > _LARGEST_VARIABLE:
            raise UsageError(
                f"the tables of the job file have {size} bytes; the limit of one variable is "
                f"{_LARGEST_VARIABLE} bytes",
                hint="Start the job with its file on each node, or shorten [environment] and [roles].",
            )
        return {**self.passed_on, **({JOB_FILE: text} if text else {})}

    @property
    def own_secrets(self) -> dict[str, str]:
        """The job's token and the value of --notify, as environment variables for fleetrun on each node."""
        token = {TOKEN: self.token} if self.token else {}
        return token | ({NOTIFY: self.environ[NOTIFY]} if NOTIFY in self.environ else {})

    @property
    def own_name(self) -> str:
        """The name that the user gave the job, else the name of its script."""
        return self.settings.job_id if "job_id" in self.words else Path(self.settings.script).stem

    @property
    def logs(self) -> str:
        """The absolute path of --log_dir."""
        return str(Path(self.settings.log_dir).absolute())

    def command(self, *but: str) -> Strings:
        """Return the words after `fleetrun` on a node of the job, without the scheduler's options and the
        options in `but`.
        """
        left_out = {*_OF_THE_SUBMISSION, *but}
        options = [word for name, word in self.words.items() if name not in left_out]
        if self.settings.script_in_job_file:
            return tuple(options)
        # The separator `--` is needed, because a script may be called -x.py.
        return (*options, "--", self.settings.script, *self.settings.script_args)

    def variables(self, *names: str) -> list[str]:
        """Return the environment variables of this process that set a scheduler or one of these options.

        A job that inherits them must not see them.
        """
        options = [OPTIONS["scheduler"], *(OPTIONS[name] for name in names)]
        return [name for option in options for name in option.env if name in self.environ]

    @property
    def options(self) -> Options:
        """The --scheduler_option values. All results share the record of used names, for `refuse_rest`."""
        pairs = (text.partition("=") for text in self.settings.scheduler_option)
        return Options({name.strip().replace("_", "-"): value for name, _, value in pairs}, self._taken)

    def heed(self) -> None:
        """Raise KeyboardInterrupt if a signal to end has arrived. Call it during long work."""
        if asked_to_end(self.signals.read()):
            raise KeyboardInterrupt

    def print(self, text: str) -> None:
        """Print text to stdout."""
        self.console.out.write(text.encode("utf-8", "surrogateescape"))


@dataclass(slots=True)
class Options:
    """The values of --scheduler_option NAME=VALUE, with `_` written as `-`.

    A name that is never taken is unknown to the scheduler.
    """

    given: Texts
    _taken: set[str] = field(default_factory=set)

    def take(self, name: str, default: str = "") -> str:
        """Return the value of an option, and mark the option as used."""
        self._taken.add(name)
        return self.given.get(name, default)

    def number(self, name: str, default: int | None = None) -> int | None:
        """Return an option as a whole number. Raises UsageError."""
        text = self.take(name)
        if not text:
            return default
        if not (text.isascii() and text.isdigit()):
            raise UsageError(f"--scheduler_option {name}={text}: it must be a whole number")
        return int(text)

    def truth(self, name: str) -> bool:
        return self.take(name).lower() in ("1", "true", "yes", "on")

    @property
    def python(self) -> str:
        """The Python of the nodes that has fleetrun: `python=PATH`, or this Python."""
        return self.given.get("python") or sys.executable

    def program(self, default: Strings) -> Strings:
        """Return the words that start fleetrun there: `python=PATH`, `command=WORDS` or the default."""
        import shlex

        command, python = self.take("command"), self.take("python")
        if command:
            return tuple(shlex.split(command))
        return (python, "-m", "fleetrun") if python else default

    def rest(self) -> dict[str, str]:
        """Return the options that were never taken."""
        return {name: value for name, value in self.given.items() if name not in self._taken}

    def refuse_rest(self, engine: str) -> None:
        """Raise UsageError for an option that was never taken."""
        for name in self.rest():
            known = ", ".join(sorted(self._taken))
            raise UsageError(f"--scheduler_option {name}: {engine} has no such option; it has {known}")


def has_secrets(job_file: Fields) -> bool:
    """Return True if these tables of a job file set a variable that looks like a secret."""
    return any(map(looks_secret, job_file.get("environment", ()))) or any(
        map(has_secrets, job_file.get("roles", {}).values())
    )


class Scheduler(Protocol):
    """Takes a job. `name` is its value for --scheduler."""

    name: str

    def submit(self, job: Submission) -> int:
        """Hand the job over and return the exit code. With --dry_run, print what would be handed over."""


def scheduler(name: str) -> Scheduler:
    """Return the scheduler with this name, one of the choices of --scheduler. Raises PluginError."""
    found: Scheduler = plugins.load("schedulers", name, has="submit")
    return found


def submit(job: Submission) -> int:
    """Hand the job to the scheduler of --scheduler and return the exit code. Raises LaunchError."""
    name = job.settings.scheduler
    engine, plugin = scheduler(name), plugins.find("schedulers", name)
    assert plugin is not None, "it was loaded"
    code = plugins.guarded(plugin, lambda: engine.submit(job))
    return code if isinstance(code, int) else 0


def processes(settings: LaunchSettings) -> int:
    """Return the number of processes per node that the options set, or 1 if they set none."""
    if settings.run_mode.has_servers:
        return (settings.server_num or 0) + (settings.trainer_num or 0) or 1
    if isinstance(settings.nproc_per_node, int):
        return settings.nproc_per_node
    return len(settings.devices) or 1


def gpus(job: Submission) -> int:
    """Count the devices per node that the job requests.

    Raises UsageError if only the node itself could count them.
    """
    settings, asked = job.settings, job.options.number("gpus")
    if asked is not None:
        return asked
    if not settings.devices and settings.nproc_per_node in ("gpu", "auto"):
        raise UsageError(
            f"--nproc_per_node {settings.nproc_per_node} gives no number of GPUs to request",
            hint="Add --gpus 0,1 or --scheduler_option gpus=2.",
        )
    return len(settings.devices)


def excluded_nodes(job: Submission) -> Strings:
    """Return the scheduler's names of the nodes that earlier runs have excluded.

    The user sees the names, because the scheduler may wait for other nodes in vain. Raises UsageError.
    """
    try:
        faults = read_kept(faults_path(Path(job.settings.log_dir))).faults
    except (OSError, ValueError) as error:
        raise UsageError(str(error), hint="Move this file away to start with no faults.") from None
    bad = excluded(faults, job.settings.exclude_after)
    names = tuple(name for name in bad if " " not in name and name.isprintable())
    if names:
        listed = ", ".join(names)
        job.console.info(f"Excluded for their faults: {listed}; `fleetrun nodes --reset` removes the faults")
    return names


# ---- Client programs (sbatch, scontrol, kubectl), run until they end or a signal arrives

_NO_ENDING = PASSED_ON | JOB_CONTROL | {signal.SIGCHLD, signal.SIGIO}


@frozen
class Answer:
    """The output of a program. `code` is the exit code as a shell would report it."""

    code: int
    out: str
    err: str


def program_output(argv: Sequence[str], environ: Environ, *, within: float = 30.0) -> str | None:
    """Return the stdout of a program.

    Return None if the program is missing, fails, or takes longer than `within` seconds.
    """
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=within, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run_program(argv: Sequence[str], text: str, environ: Environ, signals: Signals, guard: Guard) -> Answer:
    """Run a program with `text` on its stdin.

    Raises LaunchError if the program is missing. Raises KeyboardInterrupt if a signal arrives before its end,
    or if the guard has ended. The program has then ended too.
    """
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "surrogateescape"))
        return run_programs({"": argv}, given, environ, signals, guard)[""]


def run_programs(
    commands: Mapping[str, Sequence[str]],
    given: IO[bytes] | None,
    environ: Environ,
    signals: Signals | None,
    guard: Guard,
) -> dict[str, Answer]:
    """Run programs at the same time, each with the file `given` on its stdin. Raises as `run_program`.
    `signals` is None if another thread reads them.
    """
    with contextlib.ExitStack() as stack:
        running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = {}
        try:
            for name, argv in commands.items():
                out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
                running[name] = _started(argv, given, environ, out, err), out, err
        except OSError as error:
            _end_all([process for process, _, _ in running.values()])
            why = f"cannot run {argv[0]}: {error.strerror}"
            raise LaunchError(why, hint="Is it installed?") from None
        if not _ended([process for process, _, _ in running.values()], signals, guard):
            raise KeyboardInterrupt
        return {
            name: Answer(process.returncode, _text(out), _text(err))
            for name, (process, out, err) in running.items()
        }


def _started(
    argv: Sequence[str], given: IO[bytes] | None, environ: Environ, out: IO[bytes], err: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a program. It opens the file again, to have a separate position in the file. Raises OSError."""
    source = os.devnull if given is None else f"/proc/self/fd/{given.fileno()}"
    if given is not None:
        given.flush()
    with Path(source).open("rb") as stdin:
        return subprocess.Popen(
            argv, env=environ, stdin=stdin, stdout=out, stderr=err, start_new_session=True
        )  # a terminal's Ctrl-C must reach only this process


def _ended(processes: Sequence[subprocess.Popen[bytes]], signals: Signals | None, guard: Guard) -> bool:
    """Return True if all programs have ended by themselves."""
    poll = select.poll()
    left = {os.pidfd_open(process.pid) for process in processes}
    for fd in (*left, guard.fileno(), *([signals.fileno()] if signals else [])):
        poll.register(fd, select.POLLIN)
    try:
        while left:
            for fd in left.intersection(fd for fd, _ in poll.poll()):
                left.remove(fd)
                poll.unregister(fd)
                os.close(fd)
            if left and (guard.ended or (signals and asked_to_end(signals.read()))):
                return False
        return True
    finally:
        for fd in left:
            os.close(fd)
        _end_all(processes)


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # does nothing to a program that has ended
    for process in processes:
        process.wait()


def asked_to_end(numbers: bytes) -> list[int]:
    """Return the signals that request an end."""
    return [number for number in numbers if number not in _NO_ENDING]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

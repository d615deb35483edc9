"""What all schedulers share: the job that they are given (`Submission`), their interface (`Scheduler`), and
how their client programs (sbatch, scontrol, kubectl) are run. Each scheduler is a file in this folder,
imported when it is needed.
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
from typing import IO, Protocol

from fleetrun import plugins
from fleetrun.aliases import Callback, Environ, Fields, Strings, Texts
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.options import NOTIFY, OPTIONS, LaunchSettings
from fleetrun.envs.variables import JOB_FILE, looks_secret
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.pod.guard import JOB_CONTROL, PASSED_ON, Guard, Signals
from fleetrun.pod.loop import Loop
from fleetrun.record.faults import excluded, faults_path, read_kept

# ---- The interface of an engine. Each is a file in this folder, imported when it is needed

FLEETRUN = (sys.executable, "-m", "fleetrun")
"""This very fleetrun, for machines that share this one's files."""


_OF_THE_SUBMISSION = (
    "scheduler", "scheduler_option", "image", "dry_run", "json", "save", "env", "config", "sync",
)  # fmt: skip
"""Options that the machines do not get as words."""

_LARGEST_VARIABLE = 100_000
"""Bytes; Linux takes 128 KiB."""


class Output(Protocol):
    """A stream that takes whole lines and never blocks."""

    @property
    def room(self) -> bool: ...

    def write(self, data: bytes) -> None: ...


class Console(Protocol):
    """What an engine needs of the console."""

    @property
    def out(self) -> Output: ...

    @property
    def err(self) -> Output: ...

    def attach(self, loop: Loop, room: Callback) -> None: ...

    def info(self, text: str) -> None: ...

    def error(self, text: str) -> None: ...

    def label(self, name: str, width: int, number: int) -> bytes: ...


@frozen_by_name
class Submission:
    """A job to hand to an engine.

    `words` are the options as words of a command line, by name, wherever they were chosen; `job_file` are the
    tables that no option can express. `passed_on` are the variables that --env takes from this environment.
    `token` is the secret of the job.
    """

    settings: LaunchSettings
    words: Texts
    environ: Environ
    console: Console
    signals: Signals
    guard: Guard
    passed_on: Texts = field(default_factory=dict, repr=False)
    job_file: Fields = field(default_factory=dict, repr=False)
    token: str | None = None
    _taken: set[str] = field(default_factory=set, repr=False)

    @property
    def carried(self) -> dict[str, str]:
        """Variables for the fleetrun on each machine: those of --env, and the job file. Raises UsageError."""
        from fleetrun.envs.settings.write_job_file import text_to_carry  # late: a launch in a job has none

        text = text_to_carry(self.job_file)
        size = len(text.encode("utf-8", "surrogateescape"))
        if size > _LARGEST_VARIABLE:
            raise UsageError(
                f"the tables of the job file have {size} bytes; the limit of one variable is "
                f"{_LARGEST_VARIABLE} bytes",
                hint="Start the job with its file on each machine, or shorten [environment] and [roles].",
            )
        return {**self.passed_on, **({JOB_FILE: text} if text else {})}

    @property
    def own_secrets(self) -> dict[str, str]:
        """The job's secret, and whom to notify, as variables for the fleetrun on each machine."""
        token = {TOKEN: self.token} if self.token else {}
        return token | ({NOTIFY: self.environ[NOTIFY]} if NOTIFY in self.environ else {})

    @property
    def own_name(self) -> str:
        """The name that the user gave the job, or that of its script."""
        return self.settings.job_id if "job_id" in self.words else Path(self.settings.script).stem

    @property
    def logs(self) -> str:
        """The absolute path of --log_dir."""
        return str(Path(self.settings.log_dir).absolute())

    def command(self, *but: str) -> Strings:
        """The words after `fleetrun` on a machine of the job: without the engine's options and those of
        `but`.
        """
        left_out = {*_OF_THE_SUBMISSION, *but}
        options = [word for name, word in self.words.items() if name not in left_out]
        if self.settings.script_in_job_file:
            return tuple(options)
        # `--`: a script may be called -x.py.
        return (*options, "--", self.settings.script, *self.settings.script_args)

    def variables(self, *names: str) -> list[str]:
        """Variables of this environment that choose an engine, or one of these options: a job that inherits
        them must not see them.
        """
        options = [OPTIONS["scheduler"], *(OPTIONS[name] for name in names)]
        return [name for option in options for name in option.env if name in self.environ]

    @property
    def options(self) -> Options:
        """Each time the same: what was taken once counts for `refuse_rest`."""
        pairs = (text.partition("=") for text in self.settings.scheduler_option)
        return Options({name.strip().replace("_", "-"): value for name, _, value in pairs}, self._taken)

    def heed(self) -> None:
        """For work that takes long: raises KeyboardInterrupt when a signal to end has come."""
        if asked_to_end(self.signals.read()):
            raise KeyboardInterrupt

    def print(self, text: str) -> None:
        """To stdout."""
        self.console.out.write(text.encode("utf-8", "surrogateescape"))


@dataclass(slots=True)
class Options:
    """--scheduler_option NAME=VALUE, `_` written as `-`. What is never taken is not an option of the
    scheduler.
    """

    given: Texts
    _taken: set[str] = field(default_factory=set)

    def take(self, name: str, default: str = "") -> str:
        self._taken.add(name)
        return self.given.get(name, default)

    def number(self, name: str, default: int | None = None) -> int | None:
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
        """The Python of the machines, which has fleetrun: `python=PATH`, or this one."""
        return self.given.get("python") or sys.executable

    def program(self, default: Strings) -> Strings:
        """How fleetrun is started there: `python=PATH`, `command=WORDS`, or the default."""
        import shlex

        command, python = self.take("command"), self.take("python")
        if command:
            return tuple(shlex.split(command))
        return (python, "-m", "fleetrun") if python else default

    def rest(self) -> dict[str, str]:
        return {name: value for name, value in self.given.items() if name not in self._taken}

    def refuse_rest(self, engine: str) -> None:
        """Raises UsageError for an option that was never taken."""
        for name in self.rest():
            known = ", ".join(sorted(self._taken))
            raise UsageError(f"--scheduler_option {name}: {engine} has no such option; it has {known}")


def has_secrets(job_file: Fields) -> bool:
    """Whether these tables of a job file set a variable that looks like a secret."""
    return any(map(looks_secret, job_file.get("environment", ()))) or any(
        map(has_secrets, job_file.get("roles", {}).values())
    )


class Scheduler(Protocol):
    """An engine that takes a job."""

    name: str

    def submit(self, job: Submission) -> int:
        """Hand the job over; return the exit code. With --dry_run print what would be handed over."""


def scheduler(name: str) -> Scheduler:
    """The engine of that name, one of the choices of --scheduler. Raises PluginError."""
    found: Scheduler = plugins.load("schedulers", name, has="submit")
    return found


def submit(job: Submission) -> int:
    """Hand the job to the engine of --scheduler; return the exit code. Raises LaunchError."""
    name = job.settings.scheduler
    engine, plugin = scheduler(name), plugins.find("schedulers", name)
    assert plugin is not None, "it was loaded"
    code = plugins.guarded(plugin, lambda: engine.submit(job))
    return code if isinstance(code, int) else 0


def processes(settings: LaunchSettings) -> int:
    """How many processes compute on one machine, as far as the options tell."""
    if settings.run_mode.has_servers:
        return (settings.server_num or 0) + (settings.trainer_num or 0) or 1
    if isinstance(settings.nproc_per_node, int):
        return settings.nproc_per_node
    return len(settings.devices) or 1


def gpus(job: Submission) -> int:
    """How many devices of a machine the job asks for. Raises UsageError where only the machine could say."""
    settings, asked = job.settings, job.options.number("gpus")
    if asked is not None:
        return asked
    if not settings.devices and settings.nproc_per_node in ("gpu", "auto"):
        raise UsageError(
            f"--nproc_per_node {settings.nproc_per_node} does not say how many GPUs to ask for",
            hint="Add --gpus 0,1 or --scheduler_option gpus=2.",
        )
    return len(settings.devices)


def excluded_nodes(job: Submission) -> Strings:
    """The engine's names of the machines that earlier launches have left out. The user is told: the engine
    may wait for others in vain. Raises UsageError.
    """
    try:
        faults = read_kept(faults_path(Path(job.settings.log_dir))).faults
    except (OSError, ValueError) as error:
        raise UsageError(str(error), hint="Move that file away to begin anew.") from None
    bad = excluded(faults, job.settings.exclude_after)
    names = tuple(name for name in bad if " " not in name and name.isprintable())
    if names:
        told = ", ".join(names)
        job.console.info(f"Left out for their faults: {told}; `fleetrun nodes --reset` forgets them")
    return names


# ---- Client programs (sbatch, scontrol, kubectl): run to their end, or until a signal

_NO_ENDING = PASSED_ON | JOB_CONTROL | {signal.SIGCHLD, signal.SIGIO}


@frozen
class Answer:
    """What a program said. `code` is the shell's."""

    code: int
    out: str
    err: str


def program_output(argv: Sequence[str], environ: Environ, *, within: float = 30.0) -> str | None:
    """What a program prints; None when there is no such program, it fails, or takes longer."""
    try:
        done = subprocess.run(
            argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=within, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def run_program(argv: Sequence[str], text: str, environ: Environ, signals: Signals, guard: Guard) -> Answer:
    """Run a program with this on its stdin. Raises LaunchError when there is none, and KeyboardInterrupt when
    a signal came before its end, or the guard is gone: then it has ended too.
    """
    with tempfile.TemporaryFile() as given:
        given.write(text.encode("utf-8", "surrogateescape"))
        return run_programs({"": argv}, given, environ, signals, guard)[""]


def run_programs(
    commands: Mapping[str, Sequence[str]],
    given: IO[bytes] | None,
    environ: Environ,
    signals: Signals,
    guard: Guard,
) -> dict[str, Answer]:
    """Run programs at the same time, each with this file on its stdin. Raises as `run_program`."""
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
    """With its own position in the file: it is opened again. Raises OSError."""
    source = os.devnull if given is None else f"/proc/self/fd/{given.fileno()}"
    if given is not None:
        given.flush()
    with Path(source).open("rb") as stdin:
        return subprocess.Popen(
            argv, env=environ, stdin=stdin, stdout=out, stderr=err, start_new_session=True
        )  # a terminal's Ctrl-C is this process's to see


def _ended(processes: Sequence[subprocess.Popen[bytes]], signals: Signals, guard: Guard) -> bool:
    """Whether they came to their own end."""
    poll = select.poll()
    left = {os.pidfd_open(process.pid) for process in processes}
    for fd in (*left, signals.fileno(), guard.fileno()):
        poll.register(fd, select.POLLIN)
    try:
        while left:
            for fd in left.intersection(fd for fd, _ in poll.poll()):
                left.remove(fd)
                poll.unregister(fd)
                os.close(fd)
            if left and (asked_to_end(signals.read()) or guard.gone):
                return False
        return True
    finally:
        for fd in left:
            os.close(fd)
        _end_all(processes)


def _end_all(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()  # of one that has ended this does nothing
    for process in processes:
        process.wait()


def asked_to_end(numbers: bytes) -> list[int]:
    """Those of the signals that mean: end."""
    return [number for number in numbers if number not in _NO_ENDING]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")

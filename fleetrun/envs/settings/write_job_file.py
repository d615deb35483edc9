"""Write job files.

They serve `--save`, `fleetrun init` (a commented template), `fleetrun again`, and the nodes of a scheduler.
`job_file` reads them back as the same settings.
"""

from __future__ import annotations

import contextlib
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetrun.aliases import Environ, Fields, Texts
from fleetrun.envs.settings import toml
from fleetrun.envs.settings.command_line import Choice, CommandLine, read
from fleetrun.envs.settings.job_file import escaped
from fleetrun.envs.settings.options import NOTIFY, OF_JOBS, OPTIONS, Group, Option, Resolved, Takes
from fleetrun.envs.settings.show import job_file_parts
from fleetrun.errors import UsageError
from fleetrun.files import new_file
from fleetrun.frozen import frozen

# ---- --save

_NOT_KEPT = frozenset({"config", "save", "dry_run", "json", "module"})
_OF_ONE_MACHINE = frozenset({"rank", "host", "nic"})


def document(resolved: Resolved) -> str:
    """Return a job file with all options of a run, except the scheduler's options. Variables are
    filled in.
    """
    settings = resolved.settings
    fields = literal(job_file_parts(settings))
    lines = [
        "# A job file of fleetrun: start it with `fleetrun up FILE`.",
        "",
        f"script = {toml.value(escaped(settings.script))}",
    ]
    if settings.script_args:
        lines.append(f"args = {toml.value(literal(list(settings.script_args)))}")
    if settings.module:
        lines.append("module = true")
    lines.append("")
    lines += [_row(choice, resolved) for choice in read(_words(resolved)).options]
    secret = [each for each in OPTIONS.values() if each.secret and each.name in resolved.origins]
    lines += [f"# {each.name} is not saved, because it may be a secret: set {each.env[0]}" for each in secret]
    return "\n".join([*lines, *_tables(fields)]).rstrip() + "\n"


def tables(fields: Fields, head: str) -> str:
    """Return a job file with the settings that only job files can express (`show.job_file_parts`)."""
    rows = literal(fields)
    lines = [head, *(f"{name} = {toml.value(rows[name])}" for name in ("script", "args") if name in rows)]
    return "\n".join([*lines, *_tables(rows)]) + "\n"


def _tables(fields: Fields) -> list[str]:
    return [
        line
        for name in ("environment", "roles")
        if name in fields
        for line in toml.table((name,), fields[name])
    ]


def _words(resolved: Resolved) -> list[str]:
    left_out = _NOT_KEPT | resolved.engine
    return [word for name, word in resolved.words.items() if name not in left_out]


def _row(choice: Choice, resolved: Resolved) -> str:
    """Return a row such as `trainer_num = 2  # --worker_num`. An option of a single node becomes a
    comment.
    """
    name, origin = choice.option.name, resolved.origins.get(choice.option.name, "")
    value: object = escaped(choice.text)
    if choice.option.takes is not Takes.VALUE:
        value = getattr(resolved.settings, name)
    elif choice.option.joint in choice.text and choice.option.joint != "+":
        value = literal(choice.text.split(choice.option.joint))
    elif name == "scheduler_option":  # a list, which a single text cannot express
        value = literal(list(resolved.settings.scheduler_option))
    elif isinstance(getattr(resolved.settings, name), int) and choice.text.isdecimal():
        value = int(choice.text)
    row = f"{choice.alias} = {toml.value(value)}"
    if name in _OF_ONE_MACHINE:
        return f"# {row}  # of the node on which it was {_source(origin)}"
    return f"{row}  # {_source(origin)}" if not origin.startswith("--") else row


def _source(origin: str) -> str:
    return "typed" if origin.startswith("--") else f"from {origin}"


def literal(value: object) -> Any:
    """Escape a value for a job file, so that its strings stay literal."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [literal(each) for each in value]
    if isinstance(value, Mapping):
        return {name: literal(each) for name, each in value.items()}
    return value


def save(resolved: Resolved, name: str) -> None:
    """Write the job file for --save. Raises UsageError if the file exists or cannot be written."""
    try:
        text = document(resolved)
    except UnicodeEncodeError as error:
        raise UsageError(f"--save {name}: {error.object!r} is not valid UTF-8") from None
    create(name, text, "--save")


def typed(name: str) -> str:
    """Return the name of a job file as you type it after `fleetrun up`."""
    import shlex  # late, because few runs need it

    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def create(name: str, text: str, origin: str) -> None:
    """Create a file with this text, readable only by its owner, because environments may hold secrets.

    Raises UsageError.
    """
    data = text.encode()
    try:
        fd = new_file(name, 0o600)
    except FileExistsError:
        hint = "Move it away, or choose another name."
        raise UsageError(f"{origin} {name}: the file already exists", hint=hint) from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not a valid file name"
        raise UsageError(f"{origin} {name} cannot be written: {why}") from None
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise UsageError(f"{origin} {name} cannot be written: {error.strerror}") from None


# ---- fleetrun init: a template with every option, commented out

COMMAND_LINE_ONLY = frozenset({"config", "save", "dry_run", "json", "legacy", "standalone"})

EXAMPLES: Texts = {
    "env": '["NCCL_*", "HF_HOME"]',
    "timeout": '"12h"',
    "nproc_per_node": "2",
    "devices": "[0, 1]",
    "server_num": "1",
    "trainer_num": "2",
    "servers": '["10.0.0.1:6170", "10.0.0.2:6170"]',
    "trainers": '["10.0.0.1:6180", "10.0.0.2:6180"]',
    "coordinator_num": "1",
    "coordinators": '["10.0.0.1:6190"]',
    "heter_worker_num": "[1, 2]",
    "heter_workers": '[["10.0.0.1:6200"], ["10.0.0.1:6201", "10.0.0.2:6201"]]',
    "heter_devices": '["gpu", "cpu"]',
    "http_port": "6768",
    "host": '"10.0.0.1"',
    "start_port": "6170",
    "port_range": "[35100, 36000]",
    "master_addr": '"10.0.0.1"',
    "master_port": "29500",
    "hang_timeout": '"10m"',
    "restart_window": '"1h"',
    "elastic_pre_hook": '"./prepare.sh --quick"',
    "log_rotate": '"100M"',
    "follow": '["trainer:0", "ps"]',
    "tensorboard": '"runs"',
    "metrics_port": "9400",
    "export": '["NAME=ARGUMENT"]',
    "notify": '["https://hooks.slack.com/services/...", "command:mail -s fleetrun me@example.com"]',
    "notify_on": '["failure", "hang"]',
    "numa_binding": '"node"',
    "nnodes": "[2, 4]",
    "ips": '["10.0.0.1", "10.0.0.2"]',
    "master": '"10.0.0.1:6768"',
    "nic": '"eth0"',
    "token_file": '"secret.txt"',
    "scheduler_option": '{partition = "gpu", time = "1:00:00"}',
    "sync": '"."',
    "image": '"registry/train:1"',
}
"""Example values for options without a default, or with a default that does not show the syntax."""

_HEAD = """\
# A job file of fleetrun. Start it with:  fleetrun up FILE [OPTIONS]
# The command line overrides environment variables, and these override this file.
# ${NAME} in a string is an environment variable, or one of [variables]; ${here} is its directory.
# Relative paths are relative to the directory in which fleetrun is started.

# Other job files. Values in this file override their values:
# include = ["common.toml"]
"""

_TABLES = """

# ---- Values of ${NAME} for variables that are not set in the environment

# [variables]
# LR = 0.1

# ---- Environment of all processes; overrides the environment of the shell

# [environment]
# NCCL_DEBUG = "WARN"

# ---- Roles: trainer, server, coordinator, heter, evaluator. Each may have its own script, arguments,
# environment and threads (OMP_NUM_THREADS).

# [roles.trainer]
# count = 2
# [roles.trainer.resources]
# devices = [0, 1]
# threads = 4

# [roles.server]
# count = 1
# script = "server.py"
# args = ["--tables", "${here}/tables"]

# Evaluators run beside the training. A failed evaluator restarts alone, and all evaluators stop when the
# trainers have finished. on = "first": on the first node; "each": on every node.

# [roles.evaluator]
# count = 1
# on = "first"
# script = "evaluate.py"
# [roles.evaluator.environment]
# CUDA_VISIBLE_DEVICES = ""
"""


def template(script: str) -> str:
    """Return the job file template for this script."""
    lines = [_HEAD, f"script = {toml.value(escaped(script))}", 'args = []  # such as ["--lr", "0.1"]']
    for group in Group:
        options = [
            each for each in OPTIONS.values() if each.group is group and each.name not in COMMAND_LINE_ONLY
        ]
        if options:
            lines += ["", f"# ---- {group}", *(line for option in options for line in _entry(option))]
    return "\n".join(lines) + _TABLES


def _entry(option: Option) -> list[str]:
    choices = f" One of {', '.join(option.all_choices)}." if option.choices else ""
    shown = toml.value(option.default) if isinstance(option.default, bool) else option.default_text
    text = f"{option.help}{choices} Default: {shown}."
    return ["", *(f"# {line}" for line in textwrap.wrap(text, 100)), f"# {option.name} = {example(option)}"]


def example(option: Option) -> str:
    """Return a value that shows the syntax, which may be the default."""
    if option.name in EXAMPLES:
        return EXAMPLES[option.name]
    if option.takes is not Takes.VALUE:
        return toml.value(not option.default if option.name == "module" else bool(option.default))
    return toml.value(option.default)


# ---- fleetrun again: a recorded run as a command line


@frozen
class Recorded:
    """A recorded run. `line` holds all options, and `job_file` the settings that only a job file can
    express.
    """

    line: CommandLine
    cwd: str
    job_file: Fields

    @classmethod
    def read(cls, event: Fields, where: str) -> Recorded:
        """Read the event `launch`. Raises UsageError if the event is incomplete."""
        argv, cwd, job_file = event.get("argv"), event.get("cwd"), event.get("job_file", {})
        words = isinstance(argv, list) and all(isinstance(word, str) for word in argv)
        if not (words and cwd and isinstance(cwd, str) and isinstance(job_file, dict)):
            raise UsageError(f"{where} does not contain the command that started the job")
        return cls(read(argv or []), cwd, job_file)


def again(
    recorded: Recorded, words: Sequence[str], file: Path, environ: Environ
) -> tuple[list[str], dict[str, str]]:
    """Return the words for the same run, with the options in `words` replacing its own.

    Also return the environment without variables that are options. Settings that only a job file can express
    are written to `file`. Raises UsageError.
    """
    changed = read(words)
    if changed.action is not None:
        raise UsageError(f"fleetrun again: {changed.action.origin} cannot be combined with a job")
    if changed.script is not None:
        raise UsageError(
            f"fleetrun again takes no script, but has {changed.script}",
            hint="The command starts the script of that job. Put options after the name of the job.",
        )
    new = {each.option.name for each in changed.options}
    old = _for_people(recorded.line.options)
    dropped = {*new, "config"}
    if "notify" not in new and not environ.get(NOTIFY):
        dropped.add("notify_on")
    kept = [each for each in old if each.option.name not in dropped]
    options = [f"{each.origin}={each.text}" for each in (*kept, *changed.options)]
    if recorded.job_file and "config" not in new:
        _write(file, recorded.job_file)
        options.append(f"--config={file}")
    script = [] if recorded.line.script is None else ["--", recorded.line.script, *recorded.line.script_args]
    # Secrets are not in the event log, so their variables stay.
    recorded_ones = [each for each in OF_JOBS if not each.secret]
    variables = {name for option in recorded_ones for name in option.env}
    return [*options, *script], {name: text for name, text in environ.items() if name not in variables}


def _for_people(options: Sequence[Choice]) -> list[Choice]:
    """Drop `--display=json`, which served the program that read it, and the log level that
    `fleetrun.run` adds.
    """
    given = {each.option.name: each.text for each in options}
    if given.get("display") != "json":
        return list(options)
    added = {"display", *(["log_level"] if given.get("log_level") == "WARNING" else [])}
    return [each for each in options if each.option.name not in added]


def _write(file: Path, fields: Fields) -> None:
    """Write the job file, unless an earlier `again` wrote the same text."""
    text = tables(fields, "# The job file of this run, for `fleetrun again`.")
    try:
        if not file.is_symlink() and file.is_file() and file.read_bytes() == text.encode():
            return
    except OSError:
        pass
    create(str(file), text, "fleetrun again:")

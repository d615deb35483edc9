"""A launch of the past as a command line: out of what its record says. Launches nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetrun.envs.argv import CommandLine, read
from fleetrun.envs.settings import OPTIONS
from fleetrun.errors import UsageError
from fleetrun.jobfile.writing import create, tables


@dataclass(frozen=True, slots=True)
class Recorded:
    """`line` is the command line that says all options, `job_file` what only a job file could say."""

    line: CommandLine
    cwd: str
    job_file: Mapping[str, Any]

    @classmethod
    def read(cls, event: Mapping[str, Any], where: str) -> Recorded:
        """Out of the event `launch`. Raises UsageError when it does not tell."""
        argv, cwd, job_file = event.get("argv"), event.get("cwd"), event.get("job_file", {})
        words = isinstance(argv, list) and all(isinstance(word, str) for word in argv)
        if not (words and cwd and isinstance(cwd, str) and isinstance(job_file, dict)):
            raise UsageError(f"{where} does not say how the job was started")
        return cls(read(argv or []), cwd, job_file)


def again(
    recorded: Recorded, words: Sequence[str], file: Path, environ: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """The words for the same launch, with the options of `words` in place of its own; and the environment
    without variables that are options. What only a job file can say is written to `file`.

    Raises UsageError.
    """
    changed = read(words)
    if changed.action is not None:
        raise UsageError(f"fleetrun again: {changed.action.spelling} does not go with a job")
    if changed.script is not None:
        raise UsageError(
            f"fleetrun again takes no script, and was given {changed.script}",
            hint="It launches the script of that job; options come after the job's name.",
        )
    new = {given.option.name for given in changed.given}
    kept = [given for given in recorded.line.given if given.option.name not in {*new, "config"}]
    options = [f"{given.spelling}={given.text}" for given in (*kept, *changed.given)]
    if recorded.job_file and "config" not in new:
        _write(file, recorded.job_file)
        options.append(f"--config={file}")
    script = [] if recorded.line.script is None else ["--", recorded.line.script, *recorded.line.script_args]
    variables = {name for option in OPTIONS.values() for name in option.env}
    return [*options, *script], {name: text for name, text in environ.items() if name not in variables}


def _write(file: Path, said: Mapping[str, Any]) -> None:
    """As it was at that launch; of an earlier `again` it may be there."""
    text = tables(said, "# What the job files of this launch said, for `fleetrun again`.")
    try:
        if not file.is_symlink() and file.is_file() and file.read_bytes() == text.encode():
            return
    except OSError:
        pass
    create(str(file), text, "fleetrun again:")

"""Job files for tests: written into the current directory, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import load_job_file
from fleetrun.envs.settings.options import JobFile, Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError


def loaded(text: str, environ: Mapping[str, str] | None = None, **files: str) -> JobFile:
    """`files` by their names without `.toml`."""
    for name, other in files.items():
        Path(f"{name}.toml").write_text(other)
    Path("job.toml").write_text(text)
    return load_job_file("job.toml", environ or {}, "--config")


def resolved(text: str, words: str = "", environ: Mapping[str, str] | None = None, **files: str) -> Resolved:
    """The job file with these words and variables."""
    file = loaded(text, environ, **files)
    return resolve(read(["--config", "job.toml", *words.split()]), environ or {}, file=file)


def refusal(text: str, words: str = "", environ: Mapping[str, str] | None = None, **files: str) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolved(text, words, environ, **files)
    assert caught.value.exit_code == 2
    return caught.value

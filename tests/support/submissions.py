"""Jobs as an engine gets them, out of a command line; and a console that keeps what is said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.options import Resolved
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import job_file_parts
from fleetrun.envs.variables import chosen
from fleetrun.pod.loop import Loop
from fleetrun.schedulers.base import Submission


class Kept:
    """An output with room for everything, or none."""

    def __init__(self) -> None:
        self.data = b""
        self.room = True

    def write(self, data: bytes) -> None:
        self.data += data

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "surrogateescape")


class Came:
    """Signals that have come: none if nothing is said."""

    def __init__(self, *numbers: int) -> None:
        self._numbers = bytes(numbers)

    def read(self) -> bytes:
        numbers, self._numbers = self._numbers, b""
        return numbers


class KeptConsole:
    """`said` has `INFO ...` and `ERROR ...`; `read` is called by the engine's loop once it runs."""

    def __init__(self) -> None:
        self.out = Kept()
        self.err = Kept()
        self.said: list[str] = []
        self.resume: Callable[[], None] = lambda: None

    def attach(self, loop: Loop, room: Callable[[], None]) -> None:
        self.resume = room

    def info(self, text: str) -> None:
        self.said.append(f"INFO {text}")

    def error(self, text: str) -> None:
        self.said.append(f"ERROR {text}")

    def label(self, name: str, width: int, number: int) -> bytes:
        return f"{name:<{width}} | ".encode()


def submission(
    *words: str, environ: Mapping[str, str] | None = None, token: str | None = None, **parts: Any
) -> Submission:
    """The job of `fleetrun *words`. Without guard unless it is given."""
    environ = environ or {}
    return submission_of(resolve(command_line.read(words), environ), environ, token=token, **parts)


def submission_of(resolved: Resolved, environ: Mapping[str, str], **parts: Any) -> Submission:
    """The job of these settings."""
    settings = resolved.settings
    given = {
        "console": KeptConsole(),
        "signals": cast("Any", Came()),
        "guard": cast("Any", None),
        "passed_on": chosen(settings.env, environ, {}).values,
        "job_file": job_file_parts(settings),
    }
    return Submission(settings=settings, words=resolved.words, environ=environ, **(given | parts))


def printed(job: Submission) -> str:
    """What the engine printed to stdout."""
    assert isinstance(job.console, KeptConsole)
    return job.console.out.text

"""The far end of a connection: a command that ends when its stdin does. Pipes stand for the connection."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.waiting import ended, eventually

STUBBORN = "trap '' TERM; echo $$; while :; do sleep 0.01; done"
OBEDIENT = "trap 'exit 9' TERM; echo $$; while :; do sleep 0.01; done"


class Remote:
    """A command on a remote; `out` has its pid as the first line."""

    def __init__(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        patience: float = 60.0,
        grace: float = 60.0,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fleetrun.schedulers.ssh_remote", "--", *command],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        self.say(json.dumps({"env": dict(env or {}), "patience": patience, "grace": grace}))

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()

    def hang_up(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def end(self) -> tuple[int, list[str]]:
        """Its exit code, and what it said on stderr."""
        code = self.process.wait(60)
        assert self.process.stderr is not None
        return code, self.process.stderr.read().decode().rstrip("\n").split("\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.process.stderr):
            if file is not None and not file.closed:
                file.close()


@pytest.fixture
def remotes() -> Iterator[list[Remote]]:
    made: list[Remote] = []
    yield made
    for each in made:
        each.close()


def start(made: list[Remote], *command: str, **options: object) -> Remote:
    made.append(Remote(*command, **options))  # type: ignore[arg-type]
    return made[-1]


def sh(text: str) -> tuple[str, str, str]:
    return ("/bin/sh", "-c", text)


def test_the_command_has_the_environment_and_no_stdin(remotes: list[Remote]):
    here = start(remotes, *sh('echo "$SECRET $(cat)"; exit 7'), env={"SECRET": "abc"})
    assert here.line() == "abc"
    assert here.end() == (7, ["\x1efleetrun begun", "\x1efleetrun ended 7"])


def test_when_stdin_closes_it_is_asked_to_end(remotes: list[Remote]):
    here = start(remotes, *sh(OBEDIENT))
    here.line()
    here.hang_up()
    assert here.end()[0] == 9


@pytest.mark.slow
def test_when_stdin_is_silent_too(remotes: list[Remote]):
    """SIGTERM, whether or not the command could have set a trap by then."""
    here = start(remotes, *sh("while :; do sleep 0.01; done"), patience=0.3)
    assert here.end()[0] == 143


def test_what_does_not_end_is_killed(remotes: list[Remote]):
    here = start(remotes, *sh(STUBBORN), grace=0.2)
    here.line()
    here.hang_up()
    assert here.end()[0] == 137


def test_signals_are_passed_on(remotes: list[Remote]):
    here = start(remotes, *sh("trap 'echo got; exit 4' USR1; echo ready; while :; do sleep 0.01; done"))
    assert here.line() == "ready"
    here.say("")
    here.say("signal 10")
    assert here.line() == "got"
    assert here.end()[0] == 4


def test_a_killed_remote_lets_nothing_run_on(remotes: list[Remote]):
    here = start(remotes, *sh(OBEDIENT))
    pid = int(here.line())
    here.process.kill()
    eventually(lambda: ended(pid))


@pytest.mark.parametrize(("command", "code"), [("/no/such/program", 127), ("/etc/passwd", 126)])
def test_what_cannot_run_is_said(remotes: list[Remote], command: str, code: int):
    found, said = start(remotes, command).end()
    assert found == code
    assert any(line.startswith(f"{command}: ") for line in said)


def test_an_end_by_a_signal_is_told_as_a_shell_does(remotes: list[Remote]):
    assert start(remotes, *sh("kill -9 $$")).end()[0] == 137


def test_without_orders_it_does_nothing(tmp_path: Path):
    mark = tmp_path / "ran"
    argv = [sys.executable, "-m", "fleetrun.schedulers.ssh_remote", "--", "touch", str(mark)]
    assert subprocess.run(argv, stdin=subprocess.DEVNULL, check=False).returncode == 2
    assert not mark.exists()


def test_its_own_sigterm_is_the_commands(remotes: list[Remote]):
    here = start(remotes, *sh(OBEDIENT))
    here.line()
    os.kill(here.process.pid, signal.SIGTERM)
    assert here.end()[0] == 9


def test_also_before_the_near_end_knows_that_it_runs(remotes: list[Remote]):
    """A full stderr holds the remote up after the command's start, for as long as nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    here = start(remotes, *sh(OBEDIENT), stderr=writing)
    os.close(writing)
    here.line()
    os.kill(here.process.pid, signal.SIGTERM)
    with os.fdopen(reading, "rb") as said:
        assert said.read().lstrip(b"x") == b"\x1efleetrun begun\n\x1efleetrun ended 9\n"
    assert here.process.wait(60) == 9


def test_the_command_finds_its_signals_as_the_remote_did(remotes: list[Remote]):
    command = ("grep", "-E", "Sig(Blk|Ign)", "/proc/self/status")
    here = start(remotes, *command)
    assert here.end()[0] == 0
    found = "\n".join(here.line() for _ in range(2))
    assert found == subprocess.check_output(command, text=True).rstrip("\n")

"""The real command, as its user and its enemy have it: started in a folder of its own, watched, hunted down.

Every launch has a token in its environment, which whatever it starts inherits: so all that is left of it can
be found, in whatever session, group or parent it hides. Bounds are for hangs: nothing here measures time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import selectors
import signal
import struct
import subprocess
import sys
import termios
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from fleetrun.files import run_folder
from fleetrun.record.journal import SUFFIX
from tests.support.states import check_end, check_running, check_status
from tests.support.traces import BOUND, cgroup_of, has_ended, left_behind, wait_until

FLEETRUN = (sys.executable, "-m", "fleetrun")
CHILD_MODULES = Path(__file__).parent / "child"
_TOKEN = "FLEETTEST_TOKEN"
_KEPT = ("COVERAGE_", "FLEETTEST_IMPORTS")  # what measures the tests


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A plain login's; not the variables that the tests themselves run under."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(_KEPT)}
    plain = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
    return {**kept, **plain, "PYTHONPATH": str(CHILD_MODULES), **(extra or {})}


class Launch:
    """A started command. `out` and `err` are what it printed so far, `news` what its scripts told.

    Scripts tell by lines in a FIFO (`tests/support/child/telling.py`). `terminal` is the master of a terminal
    to read `out` from; `close` closes it. `sockets` is the folder of its launchers' sockets.
    """

    def __init__(
        self,
        argv: Sequence[str],
        folder: Path,
        env: Mapping[str, str] | None = None,
        terminal: int | None = None,
        sockets: Path | None = None,
        **options: Any,
    ) -> None:
        self._sockets = sockets
        self.token = uuid.uuid4().hex
        name = folder / f".news-{self.token}"
        gate = folder / f".gate-{self.token}"
        os.mkfifo(name)
        name.chmod(0o666)  # also for scripts of another user
        gate.touch(mode=0o644)
        self._gate: IO[str] | None = gate.open()
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        self._news = os.open(name, os.O_RDWR | os.O_NONBLOCK)
        told = {_TOKEN: self.token, "FLEETTEST_NEWS": str(name), "FLEETTEST_GATE": str(gate)}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.popen: subprocess.Popen[bytes] = subprocess.Popen(
            argv, cwd=folder, env={**environment(env), **told}, **(pipes | options)
        )
        self._texts = {"out": bytearray(), "err": bytearray(), "news": bytearray()}
        self._changed = threading.Condition()
        self._closing, self._close = os.pipe()
        self.terminal = terminal
        self._open = self._sources()
        for fd in self._open:
            os.set_blocking(fd, False)  # `_read` has the lock, and a key can empty a terminal before it reads
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _sources(self) -> dict[int, str]:
        streams = {self.popen.stdout: "out", self.popen.stderr: "err"}
        found = {stream.fileno(): name for stream, name in streams.items() if stream is not None}
        return found | ({self.terminal: "out"} if self.terminal is not None else {})

    def _collect(self) -> None:
        with selectors.DefaultSelector() as selector:
            for fd in (*self._open, self._news, self._closing):
                selector.register(fd, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fd == self._closing:
                        return
                    if not self._read(key.fd):
                        selector.unregister(key.fd)

    def _read(self, fd: int) -> bool:
        """Whether there may be more."""
        with self._changed:  # or a piece would be neither in the pipe nor in the text
            try:
                data = os.read(fd, 1 << 16)
            except BlockingIOError:  # news that `wait` has read, or what a typed ^C flushed away
                return True
            except OSError:  # a terminal whose last process has gone
                data = b""
            self._texts[self._open.get(fd, "news")] += data
            if not data:
                self._open.pop(fd, None)
            self._changed.notify_all()
        return bool(data)

    @property
    def out(self) -> str:
        return self._texts["out"].decode()

    @property
    def err(self) -> str:
        return self._texts["err"].decode()

    @property
    def said(self) -> str:
        """`err` however its lines are broken."""
        return " ".join(self.err.split())

    @property
    def raw(self) -> bytes:
        """`out` as it came."""
        return bytes(self._texts["out"])

    @property
    def news(self) -> list[str]:
        """`trainer.0 ready 4711`; the last line may still be on its way."""
        return self._texts["news"].decode().split("\n")[:-1]

    @property
    def printed(self) -> list[str]:
        """The lines of `out`, but for the runtime's: whoever comes first on a machine compiles kernels, and
        says so.
        """
        return [line for line in self.out.splitlines() if not re.match(r"I\d{4} ", line)]

    def told(self, text: str) -> list[str]:
        return [line for line in self.news if text in line]

    @property
    def code(self) -> int:
        code = self.popen.poll()
        assert code is not None, f"still running: {self}"
        return code

    @property
    def launcher(self) -> int:
        """The pid of the guard's child. Only while it runs."""
        pid = self.popen.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Until something that it prints or tells makes this true."""
        with self._changed:
            assert self._changed.wait_for(condition, BOUND), f"not within {BOUND} s: {what}\n{self}"

    def _until_printed(self, text: str, stream: str) -> None:
        """Fails at once where it has ended without that."""
        with self._changed:
            self._changed.wait_for(lambda: text in self._texts[stream].decode() or self._ended(), BOUND)
            ended = f"it ended ({self.popen.poll()})" if self._ended() else f"not within {BOUND} s"
            assert text in self._texts[stream].decode(), f"{ended}: {text!r} on std{stream}\n{self}"

    def _ended(self) -> bool:
        """All its outputs are closed."""
        return not self._open and bool(self._sources())

    def until_told(self, text: str, times: int = 1) -> list[str]:
        self.until(lambda: len(self.told(text)) >= times, f"{times} x {text!r}")
        return self.told(text)

    def until_ready(self, times: int) -> list[int]:
        """So many scripts say "ready"; their pids, in the order of their names. The status agrees with the
        record then.
        """
        lines = self.until_told(" ready", times)
        if self._sockets is not None:
            check_running(self._sockets)
        return [int(line.split()[2]) for line in sorted(lines)]

    def until_err(self, text: str) -> None:
        self._until_printed(text, "err")

    def until_out(self, text: str) -> None:
        self._until_printed(text, "out")

    def go(self) -> None:
        """Let every `wait_for_go` of its scripts return, those to come too."""
        if self._gate is not None:
            self._gate.close()
            self._gate = None

    def send(self, number: int) -> None:
        self.popen.send_signal(number)

    def type_in(self, text: bytes) -> None:
        """At its terminal."""
        assert self.terminal is not None
        os.write(self.terminal, text)

    def wait(self, bound: float = BOUND) -> int:
        """Its exit code (negative: a signal), with all it printed and told read."""
        try:
            code = self.popen.wait(bound)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {bound} s\n{self}") from None
        with self._changed:
            self._changed.wait_for(lambda: not self._open, BOUND)
            with contextlib.suppress(BlockingIOError):
                self._texts["news"] += os.read(self._news, 1 << 16)
        return code

    def no_process(self) -> None:
        """Until none of it is left."""
        seen: set[int] = set()

        def none() -> bool:
            """A process that ends loses its environment before its files, with all that the job held."""
            found = left_behind(self.token)
            seen.update(found)
            return not found and all(map(has_ended, seen))

        wait_until(none, lambda: f"{left_behind(self.token)}\n{self}")

    def gone(self) -> None:
        """Until nothing of it is left: no process, no cgroup."""
        self.no_process()
        guard = self.popen.pid
        wait_until(lambda: not cgroup_of(guard), lambda: f"{cgroup_of(guard)}\n{self}")

    def close(self) -> None:
        """Kill whatever is left of it, if need be, and give everything back."""
        self.go()
        while found := left_behind(self.token):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.popen.poll()
        self.popen.wait()
        os.write(self._close, b"x")
        self._thread.join()
        for fd in (self._closing, self._close, self._news, self.terminal):
            if fd is not None:
                os.close(fd)
        for stream in (self.popen.stdout, self.popen.stderr):
            if stream is not None:
                stream.close()

    def __repr__(self) -> str:
        return f"--- stdout\n{self.out[-3000:]}\n--- stderr\n{self.err[-3000:]}\n--- news\n{self.news[-30:]}"


class Fleetrun:
    """The command in one folder. As a context it ends in the assertion that nothing is left of any launch,
    unless the test `failed` already: a fixture sees no exception of its test.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str] = FLEETRUN,
        user: Sequence[str] = (),
        path: Sequence[Path] = (),
    ) -> None:
        """`user` is a command that runs another as somebody else, `path` more to import from."""
        self.folder = folder
        self._command = command
        self._user = user
        self._env = {
            "PYTHONPATH": ":".join(map(str, (CHILD_MODULES, *path))),
            "XDG_RUNTIME_DIR": str(folder / "run"),  # one test's jobs are not another's
        }
        self._launches: list[Launch] = []
        self.failed = False

    def script(self, text: str, name: str = "train.py") -> str:
        """A file that begins with all of `telling`; its name."""
        (self.folder / name).write_text(f"from telling import *\n{text}")
        return name

    def start(
        self,
        *words: str,
        prefix: Sequence[str] = (),
        command: Sequence[str] | None = None,
        env: Mapping[str, str] | None = None,
        **options: Any,
    ) -> Launch:
        """`fleetrun *words`, run by `prefix` (prlimit, nohup, ...)."""
        argv = [*self._user, *prefix, *(self._command if command is None else command), *words]
        there = {**self._env, **(env or {})}
        launch = Launch(argv, self.folder, there, sockets=run_folder(there), **options)
        self._launches.append(launch)
        return launch

    def at_terminal(
        self, *words: str, watched: bool = True, columns: int = 80, rows: int = 40, **options: Any
    ) -> tuple[Launch, int]:
        """The same as the leader of a session with a terminal of this size: and its master.

        The terminal's text is `out` of the launch, which closes it then; unless it is not `watched`.
        """
        master, slave = pty.openpty()
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)

        def take() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        options = {"start_new_session": True, "preexec_fn": take, **streams, **options}
        try:
            return self.start(*words, terminal=master if watched else None, **options), master
        finally:
            os.close(slave)

    def run(self, *words: str, **options: Any) -> Launch:
        """The same, to its end."""
        launch = self.start(*words, **options)
        launch.wait()
        if words[:1] == ("status",) and words[-1] == "--json" and launch.popen.poll() == 0:
            check_status(json.loads(launch.out))
        return launch

    def logs(self, pattern: str = "*.log") -> list[Path]:
        return sorted((self.folder / "log").glob(pattern))

    def log(self, who: str) -> str:
        """The text of the one log of `trainer.0`."""
        (path,) = self.logs(f"*.{who}.log")
        return path.read_text(errors="replace")

    def __enter__(self) -> Fleetrun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self.failed:
                for launch in self._launches:
                    assert launch.popen.poll() is not None, f"the test did not wait for\n{launch}"
                    launch.gone()
                for path in (self.folder / "log").glob(f"*{SUFFIX}"):
                    check_end(path)
        finally:
            for launch in self._launches:
                launch.close()

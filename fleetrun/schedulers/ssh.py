"""Run the same command on every host of --ips, from one terminal, through the system's ssh.

`Link` reads the output of one ssh client, and `judge_end` interprets its exit. `HostGroup` runs all hosts,
and ends them when one fails. `Ssh` is the scheduler. `ssh_remote.py` runs at the other end of each
connection.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING

from fleetrun.aliases import Strings
from fleetrun.console.console import sinks
from fleetrun.envs.settings.parsing import plural
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.pod.guard import PASSED_ON, Guard, Signals
from fleetrun.pod.loop import Loop
from fleetrun.schedulers.base import Answer, Submission, asked_to_end, run_programs
from fleetrun.schedulers.ssh_remote import ENDED, MARK, STARTED
from fleetrun.schedulers.tree import CODE, Tree, read_tree, times_of, tree_of_job
from fleetrun.schedulers.tree_remote import NOT_HERE

if TYPE_CHECKING:
    from fleetrun.console.console import Console

# ---- One host

_LONGEST_LINE = 1 << 16
_REMEMBERED = 8  # lines of output of a host before its fleetrun started


@frozen
class SshExit:
    """The end of a connection."""

    started: bool
    """fleetrun started on the host."""
    code: int | None
    """Exit code of the remote fleetrun. None if it could not report its exit code."""
    client: int
    """Exit code of the local ssh client."""
    output: Strings = ()
    """Output before fleetrun started."""
    cut: bool = False
    """This side ended the connection."""


class Link:
    """The ssh client of one host.

    `show(stream, lines)` receives whole lines of stream 1 or 2. `over` is called once, at the end.
    """

    def __init__(
        self, host: str, show: Callable[[int, bytes], None], over: Callable[[Link, SshExit], None]
    ) -> None:
        self.host = host
        self.started = False
        self.alive = False
        self._show = show
        self._over = over
        self._code: int | None = None
        self._output: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._rest = {1: b"", 2: b""}
        self._paused = False
        self._cut = False

    def open(self, loop: Loop, argv: Sequence[str], orders: bytes) -> None:
        """Start the client. Raises LaunchError if the program is missing."""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise LaunchError(f"cannot run {argv[0]}: {error.strerror}", hint="Is it installed?") from None
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._fds = [stream.fileno() for stream in streams if stream is not None]
        for fd in self._fds:
            os.set_blocking(fd, False)
        self.alive = True
        self._loop = loop
        self._pidfd = os.pidfd_open(self._process.pid)
        loop.add(self._pidfd, self._ended)
        loop.add(self._fds[1], partial(self._readable, 1))
        loop.add(self._fds[2], partial(self._readable, 2))
        self.send(orders)

    def pause(self) -> None:
        """Stop reading the job's output for now, because its reader is slow."""
        if self.alive and not self._paused:
            self._paused = True
            self._loop.remove(self._fds[1])

    def resume(self) -> None:
        if self.alive and self._paused:
            self._paused = False
            self._loop.add(self._fds[1], partial(self._readable, 1))

    def send(self, line: bytes = b"") -> None:
        """Send a line, or a heartbeat."""
        if self.alive:
            with contextlib.suppress(OSError):  # a broken link will be noticed at its end
                os.write(self._fds[0], line + b"\n")

    def signal(self, number: int) -> None:
        """Send a signal to the remote fleetrun. If it has not started, end the connection."""
        if self.started:
            self.send(b"signal %d" % number)
        else:
            self.cut()

    def cut(self) -> None:
        """End the connection. The far end then ends its command."""
        if self.alive:
            self._cut = True
            self._process.kill()

    def _readable(self, stream: int) -> None:
        self._read(stream)

    def _read(self, stream: int) -> bool:
        """Read one piece. Return True if there was data."""
        try:
            data = os.read(self._fds[stream], 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self._loop.remove(self._fds[stream])
            return False
        whole, newline, self._rest[stream] = (self._rest[stream] + data).rpartition(b"\n")
        if len(self._rest[stream]) > _LONGEST_LINE:
            whole, newline, self._rest[stream] = whole + newline + self._rest[stream], b"\n", b""
        if newline:
            self._take(stream, whole + newline)
        return True

    def _take(self, stream: int, lines: bytes) -> None:
        if stream == 1:
            self._show(1, lines)
            return
        kept = [line for line in lines.splitlines(keepends=True) if not self._is_ours(line)]
        if kept and self.started:
            self._show(2, b"".join(kept))
        elif kept:
            self._output.extend(kept)

    def _is_ours(self, line: bytes) -> bool:
        """Handle a line of the remote side. Return False for all other lines."""
        if not line.startswith(MARK):
            return False
        word = line.removeprefix(MARK).rstrip()
        if word == STARTED:
            self.started = True
        elif word.startswith(ENDED):
            text = word.removeprefix(ENDED)
            if text.isdigit() and len(text) <= 3:  # a script has printed any other text
                self._code = int(text)
        return True

    def _ended(self) -> None:
        for stream in (1, 2):
            while self._read(stream):
                pass
            if self._rest[stream]:
                self._take(stream, self._rest[stream] + b"\n")
                self._rest[stream] = b""
        for fd in (self._pidfd, *self._fds[1:]):
            self._loop.remove(fd)
        self.alive = False
        client = self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._process.stderr):
            if file is not None:
                file.close()
        os.close(self._pidfd)
        lines = tuple(line.decode(errors="replace").strip() for line in self._output)
        self._over(self, SshExit(self.started, self._code, client, tuple(filter(None, lines)), self._cut))


# ---- From the end of a connection to a message and an exit code

_SSH_FAILED = 255
_HINTS = {
    "Host key verification failed": "its host key is unknown or has changed: connect once by hand",
    "Permission denied": "the host did not accept your key: use an agent or a key, not a password",
    "Could not resolve": "no host has this name",
    "Connection refused": "no sshd listens there",
    "timed out": "it does not answer",
    "No route to host": "it cannot be reached",
}


@frozen
class Verdict:
    """The judgement on the end of a connection."""

    code: int
    message: str = ""
    started: bool = True
    """fleetrun had started on the host."""
    lost: bool = False
    """The connection broke."""


def judge_end(host: str, ssh_exit: SshExit) -> Verdict:
    """Interpret the end of a host's connection."""
    if ssh_exit.code is not None:
        message = f"{host}: fleetrun ended with exit code {ssh_exit.code}" if ssh_exit.code else ""
        return Verdict(ssh_exit.code, message)
    if ssh_exit.started:
        message = "" if ssh_exit.cut else f"{host}: the connection was lost; the processes on this host end"
        return Verdict(125, message, lost=True)
    if ssh_exit.cut:
        return Verdict(125, started=False)
    text = " ".join(ssh_exit.output)
    if ssh_exit.client == _SSH_FAILED:
        why = next((hint for part, hint in _HINTS.items() if part in text), "ssh failed")
        words = _relevant(ssh_exit.output)
        return Verdict(125, f"{host}: no connection, {why}" + (f" ({words})" if words else ""), started=False)
    missing = ssh_exit.client == 127 or "No module named" in text
    return Verdict(
        127 if missing else ssh_exit.client or 125,
        f"{host}: fleetrun did not start there ({_relevant(ssh_exit.output) or f'code {ssh_exit.client}'}); "
        "--scheduler_option python=PATH sets the Python, dir=PATH the directory",
        started=False,
    )


def _relevant(lines: Strings) -> str:
    """Return the line that names the problem. ssh surrounds the report of a bad host key with other lines."""
    for line in lines:
        if any(part in line for part in _HINTS):
            return line
    return lines[-1] if lines else ""


# ---- All hosts. When one fails, the others end.

_BEATS = 4  # heartbeats within the time after which a silent side is given up
_MARGIN = 5.0  # seconds for programs that end by themselves


@frozen_by_name
class Pace:
    """Time limits of the connections."""

    heartbeat_timeout: float
    """Seconds of silence after which a host is lost."""
    stop_timeout: float
    """Seconds that processes may take to stop."""

    @property
    def grace(self) -> float:
        """Seconds that a fleetrun may take to end, because it stops trainers first and servers after them."""
        return 2 * self.stop_timeout + _MARGIN


class HostGroup:
    """Runs one connection per host until all have ended."""

    def __init__(self, console: Console, signals: Signals, guard: Guard, pace: Pace) -> None:
        self._console = console
        self._signals = signals
        self._guard = guard
        self._pace = pace
        self._loop = Loop()
        self._links: list[Link] = []
        self._code = 0
        self._asked = 0
        self._offers = os.pipe()

    def run(self, commands: dict[str, list[str]], env: dict[str, str]) -> int:
        """Run all commands, by host. Return the exit code of the first failure."""
        console, loop = self._console, self._loop
        width = max(map(len, commands))
        console.attach(loop, self._room)
        loop.add(self._signals.fileno(), self._signalled)
        loop.add(self._guard.fileno(), self._guard_lost)
        loop.add(self._offers[0], self._pass_on)
        # The first line that the far end reads. It holds the environment with the secrets of the job, the
        # longest silence, and the time that processes then have to end.
        settings = {"env": env, "patience": self._pace.heartbeat_timeout, "grace": self._pace.grace}
        orders = json.dumps(settings).encode()
        for number, (host, argv) in enumerate(commands.items()):
            label = console.label(host, width, number) if len(commands) > 1 else b""
            link = Link(host, partial(self._show, label), self._over)
            self._links.append(link)
            link.open(loop, argv, orders)
        self._beat()
        loop.run()
        return self._code

    @property
    def _alive(self) -> list[Link]:
        return [link for link in self._links if link.alive]

    def _beat(self) -> None:
        for link in self._alive:
            link.send()
        self._loop.after(self._pace.heartbeat_timeout / _BEATS, self._beat)

    # ---- edits

    def offer(self, digest: str) -> None:
        """Offer a tree, which all hosts have, to the job. Another thread may call this."""
        os.write(self._offers[1], digest.encode())

    def _pass_on(self) -> None:
        line = b"edit %d %s" % (time.time_ns(), os.read(self._offers[0], 32))
        for link in self._alive:
            link.send(line)

    # ---- output

    def _show(self, label: bytes, stream: int, lines: bytes) -> None:
        output = self._console.out if stream == 1 else self._console.err
        output.write(label + lines[:-1].replace(b"\n", b"\n" + label) + b"\n" if label else lines)
        if not self._console.out.room:
            for link in self._alive:
                link.pause()

    def _room(self) -> None:
        for link in self._alive:
            link.resume()

    # ---- endings

    def _over(self, link: Link, ssh_exit: SshExit) -> None:
        verdict = judge_end(link.host, ssh_exit)
        if verdict.code != 0 and self._code == 0:
            self._code = verdict.code
            # End the other hosts. They learn of the failure by themselves and report it. They get a signal
            # only if they continue.
            if not verdict.started:
                patience = 0.0  # they would wait for a node that never comes
            elif verdict.lost:
                patience = self._pace.heartbeat_timeout + _MARGIN
            else:
                patience = self._pace.grace
            self._loop.after(patience, lambda: self._ask(signal.SIGTERM))
        if verdict.message and not self._asked:
            self._console.error(verdict.message)
        if not self._alive:
            self._loop.stop()

    def _ask(self, number: int) -> None:
        for link in self._alive:
            link.signal(number)
        self._loop.after(self._pace.grace + _MARGIN, self._cut)

    def _cut(self) -> None:
        for link in self._alive:
            link.cut()

    # ---- from outside

    def _signalled(self) -> None:
        numbers = self._signals.read()
        for number in numbers:
            for link in self._alive if number in PASSED_ON else ():
                if link.started:
                    link.signal(number)
        for number in asked_to_end(numbers):
            self._asked += 1
            self._code = self._code or 128 + number
            if self._asked > 2:
                self._cut()
            else:
                self._ask(number)

    def _guard_lost(self) -> None:
        self._loop.remove(self._guard.fileno())
        self._code = self._code or 125
        self._cut()


# ---- The scheduler

_REST = 0.1  # seconds between two looks at the working tree
_MORE = 0.00005  # seconds more for each path in it
_OFTEN = 30  # looks with changes of one file, without a look at which no file has changed
_AFTER_READING = 10  # looks for which a change counts right after sending or an error, which print a line
_LARGE = 16 << 20  # bytes of an archive that may take a while
_MOST_BYTES = 60_000  # size of the orders, which must fit into a pipe immediately


class Ssh:
    """Implements `--scheduler ssh`. Exits with the exit code of the host that failed first."""

    name = "ssh"

    def submit(self, job: Submission) -> int:
        settings, options = job.settings, job.options
        if not settings.ips:
            raise UsageError("--scheduler ssh needs --ips, the hosts to start on")
        job, tree = tree_of_job(job)
        env = _environment(job)
        if tree is not None and options.take("dir"):
            raise UsageError("--sync and --scheduler_option dir exclude each other: the job runs in the copy")
        commands = {
            host: client_command(job, host, _remote_command(job, host, tree)) for host in settings.ips
        }
        options.refuse_rest("ssh")
        if settings.dry_run:
            job.print("".join(f"{shlex.join(argv)}\n" for argv in commands.values()))
            return 0
        pace = Pace(heartbeat_timeout=settings.heartbeat_timeout, stop_timeout=settings.stop_timeout)
        group = HostGroup(job.console, job.signals, job.guard, pace)
        if tree is not None:
            _send(job, tree, job.signals)
            if settings.watch:
                Thread(target=_follow, args=(job, tree, group), daemon=True).start()
        return group.run(commands, env)


def _follow(job: Submission, tree: Tree, group: HostGroup) -> None:
    """Send later states of the working tree to all hosts, and then offer them to the job, in a thread.

    A file may change each time fleetrun or the job prints a line, as with `| tee out.log`. Unless it is code,
    a file that changes at many looks without a rest is no reason to send.
    """
    job = replace(job, console=copy(job.console))  # the loop uses the other one, with its own outputs
    job.console.out, job.console.err = sinks()
    paths, restless = tree.paths, set[str]()
    changes: Counter[str] = Counter()
    weight = 1
    seen = last = times_of(())
    while True:
        now = times_of(paths - restless)
        if now == last == seen:
            changes.clear()
        for path in now.keys() & last:
            changes[path] += weight * (now[path] != last[path])
            if changes[path] > _OFTEN and not path.endswith(CODE):
                restless.add(path)
                what = f"{path!r} changes all the time: it is only sent with the next edit of another file"
                job.console.info(what)
        weight = 1
        if now == last != seen:
            seen, weight = now, _AFTER_READING
            try:
                os.chdir(tree.root / tree.inside)  # another directory may have its place
                found = read_tree(str(tree.root), Path(job.logs))
                if found.digest != tree.digest:
                    _send(job, found)
                    group.offer(found.digest)
                tree, paths = found, found.paths
            except (LaunchError, OSError) as error:
                job.console.error(f"{error}; the job keeps the code that it has")
        last = now
        time.sleep(_REST + len(paths) * _MORE)


def _send(job: Submission, tree: Tree, signals: Signals | None = None) -> None:
    """Send the tree to the hosts that lack it, over separate connections. Raises LaunchError.

    Without `signals`, as in a thread, send the tree to all hosts.
    """

    def on_all(verb: str, hosts: Iterable[str], given: IO[bytes] | None) -> dict[str, Answer]:
        words = shlex.join(tree.receiver(job.options.python, verb))
        commands = {host: client_command(job, host, words) for host in hosts}
        answers = run_programs(commands, given, job.environ, signals, job.guard)
        _check_answers(answers, 0 if given is not None else NOT_HERE)
        return answers

    hosts = job.settings.ips
    without = list(hosts)
    if signals:
        without = [host for host, answer in on_all("has", hosts, None).items() if answer.code]
    if without:
        with tree.archive() as archive:
            if os.fstat(archive.fileno()).st_size > _LARGE:
                job.console.info(f"Code: {tree.text}, sending to {', '.join(without)}")
            on_all("unpack", without, archive)
    had, all_hosts = len(hosts) - len(without), plural(len(hosts), "host")
    sent = f"sent to {len(without)} of {all_hosts}" if without else f"{all_hosts} had it"
    there = f"; {had} had it" if had and without else ""
    job.console.info(f"Code: {tree.text}, {sent}{there}")


def _check_answers(answers: Mapping[str, Answer], other: int) -> None:
    """Raise LaunchError for the first host whose answer is neither 0 nor `other`, with the names of all such
    hosts.
    """
    wrong = {host: answer for host, answer in answers.items() if answer.code not in (0, other)}
    if not wrong:
        return
    host, answer = next(iter(wrong.items()))
    lines = tuple(filter(None, map(str.strip, answer.err.splitlines())))
    also = f"; {', '.join(list(wrong)[1:])} failed too" if len(wrong) > 1 else ""
    if answer.code in (_SSH_FAILED, 126, 127) or "No module named" in answer.err:
        verdict = judge_end(host, SshExit(False, None, answer.code, lines))
        raise LaunchError(verdict.message + also)
    why = (lines[-1] if lines else f"code {answer.code}").removeprefix("fleetrun: error: ")
    raise LaunchError(f"{host}: the code did not reach this host: {why}{also}")


def client_command(job: Submission, host: str, remote: str) -> list[str]:
    """Build the command line of the ssh client for a host. Secrets travel on stdin instead."""
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
        value = job.options.take(name)
        if value:
            argv += [flag, value]
    return [*argv, "--", host.strip("[]"), remote]


def _remote_command(job: Submission, host: str, tree: Tree | None) -> str:
    """Build the command for the login shell, which may be any shell. It only starts sh."""
    python = job.options.take("python", sys.executable)
    folder = job.options.take("dir") or str(Path.cwd())
    words = job.command("host", "nic", "token_file")
    # A host that is listed under two names needs to receive its name.
    fleetrun = (python, "-m", "fleetrun", f"--host={host}", *words)
    remote = (python, "-m", "fleetrun.schedulers.ssh_remote", "--")
    if tree is not None:
        return shlex.join(tree.command(python, job.logs, (*remote, *fleetrun)))
    return shlex.join(["sh", "-c", f"cd {shlex.quote(folder)} && exec {shlex.join((*remote, *fleetrun))}"])


def _environment(job: Submission) -> dict[str, str]:
    """Return the variables for the hosts: the token, the variables of --env, and the job file.

    They travel on stdin.
    """
    names = job.options.take("env")
    if names:
        raise UsageError(f"--scheduler_option env={names}: that is an option now", hint=f"--env {names}")
    env = job.carried | job.own_secrets
    size = len(json.dumps(env))
    if size > _MOST_BYTES:
        raise UsageError(f"--env and the job file come to {size} bytes; ssh carries {_MOST_BYTES}")
    return env


ENGINE = Ssh()

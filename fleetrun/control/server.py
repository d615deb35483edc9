"""Answer requests at the control socket of a running launcher: the status of the job, and the request to end.

A client sends one line of JSON and gets one line back, and the connection ends. Only this user and root get
an answer. The server never waits: a slow client is disconnected after a while, and costs the job nothing.
`JobStatus` is the status of the job on this node. `Control` connects socket, status and job.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fleetrun import files
from fleetrun.aliases import Callback, Clock, Document, Environ, Fields
from fleetrun.decoding import read_object
from fleetrun.envs.channels import DEBUGGED
from fleetrun.envs.contract import TOKEN, Role
from fleetrun.envs.settings.parsing import ranks_in_words
from fleetrun.files import peer, socket_at
from fleetrun.pod.container import Container, Pod, Status
from fleetrun.pod.events import Detail, Findings, lateness_fields, verdict_fields
from fleetrun.pod.loop import READ, WRITE, Loop, Timer
from fleetrun.record.goodput import Goodput, goodput_fields
from fleetrun.record.journal import plain
from fleetrun.record.state import State

if TYPE_CHECKING:
    from fleetrun.envs.progress_report import Report


# ---- The socket: one line of JSON, one line back. Only this user and root may connect. A slow client is
# disconnected after a while.

Message = Document
Reply = Callable[[Message], None]
Later = Callable[[Reply], None]
"""Calls its argument once with the answer, as soon as the answer exists."""

Answer = Callable[[Message], Message | Later]

PATIENCE = 10.0  # seconds for a whole conversation
MOST = 64  # conversations at a time; another one ends the oldest
LONGEST = 64 << 10  # bytes of a request
_PAUSE = 1.0  # seconds before it listens again, after it had no descriptor for a client
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Server:
    """A server that accepts requests from its creation on. Raises OSError if the socket cannot be made."""

    def __init__(self, loop: Loop, path: Path, answer: Answer) -> None:
        self.path = path
        self._loop = loop
        self._answer = answer
        self._talks: dict[_Talk, None] = {}  # oldest first
        self._pause: Timer | None = None
        self._socket, self._made = _listening(path)
        loop.add(self._socket.fileno(), self._called)

    def close(self) -> None:
        """Close the socket and all conversations. You may call it twice."""
        if self._socket.fileno() < 0:
            return
        for talk in list(self._talks):
            talk.end()
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        with suppress(OSError):
            if self.path.lstat().st_ino == self._made:
                self.path.unlink()

    def _called(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED:  # the socket would be readable again immediately, without end
                self._loop.remove(self._socket.fileno())
                self._pause = self._loop.after(_PAUSE, self._listen_again)
            return
        if not may_ask(peer(caller)[1], os.getuid()):
            caller.close()
            return
        if len(self._talks) >= MOST:
            next(iter(self._talks)).end()
        self._talks[_Talk(self._loop, caller, self._answer, self._talks.pop)] = None

    def _listen_again(self) -> None:
        self._loop.add(self._socket.fileno(), self._called)


def _listening(path: Path) -> tuple[socket.socket, int]:
    """Return a socket that listens, and the number of its inode.

    It listens before it gets its name, because a command removes a socket without a listener.
    """
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    made = socket_at(aside, socket.SOCK_STREAM)
    aside.chmod(0o600)
    made.listen(MOST)
    return made, aside.rename(path).lstat().st_ino


def may_ask(uid: int, own: int) -> bool:
    """Return True if a launcher of the user `own` answers this user."""
    return uid in (0, own)


class _Talk:
    """The conversation with one client, from its first byte to the last byte of the answer."""

    def __init__(
        self, loop: Loop, caller: socket.socket, answer: Answer, over: Callable[[_Talk], None]
    ) -> None:
        self._loop = loop
        self._caller = caller
        self._asker = peer(caller)[:2]
        self._answer = answer
        self._over = over
        self._asked = bytearray()
        self._left = memoryview(b"")
        self._limit = loop.after(PATIENCE, self.end)
        caller.setblocking(False)
        loop.add(caller.fileno(), self._receive, READ)

    def end(self) -> None:
        """End the conversation. A later answer is dropped."""
        self._limit.cancel()
        self._loop.remove(self._caller.fileno())
        self._caller.close()
        self._over(self)

    def _receive(self) -> None:
        try:
            data = self._caller.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._asked += data
        line, newline, _ = bytes(self._asked).partition(b"\n")
        if newline or len(self._asked) > LONGEST:
            self._loop.remove(self._caller.fileno())
            answer = _answered(line if newline else None, self._answer, self._asker)
            if callable(answer):
                answer(self._reply)
            else:
                self._reply(answer)
        elif not data:
            self.end()

    def _reply(self, answer: Message) -> None:
        """Send an answer. The client may have disconnected."""
        if self._caller.fileno() < 0:
            return
        self._left = memoryview(json.dumps(plain(answer)).encode() + b"\n")
        self._loop.add(self._caller.fileno(), self._send, WRITE)
        self._send()

    def _send(self) -> None:
        try:
            sent = self._caller.send(self._left)
        except BlockingIOError:
            return
        except OSError:  # the client has disconnected
            self.end()
            return
        self._left = self._left[sent:]
        if not self._left:
            self.end()


def _answered(line: bytes | None, answer: Answer, asker: tuple[int, int]) -> Message | Later:
    """Answer a line. The question carries `asker`, the process and user of the client."""
    if line is None:
        return {"error": f"a question has at most {LONGEST} bytes"}
    question = read_object(line)
    if question is None:
        return {"error": "a question is a JSON object on one line"}
    return answer({**question, "asker": asker})


# ---- The status of the job on this node

STATUS_VERSION = 1
"""The version of the answer. A later version has all fields of this one, and may have more."""


class Reports(Protocol):
    """The source of the processes' reports. Processes go by their names (`trainer.0`)."""

    def latest(self, container: str, /) -> Report | None: ...
    def age(self, container: str, /) -> float | None: ...
    def speeds(self, container: str, /) -> tuple[float | None, float | None, float | None]: ...


class JobStatus(State):
    """The state of the job, which follows from the event log, with the present values of processes and
    reports.

    `clock` is the clock of the event log.
    """

    def __init__(self, reports: Reports, clock: Clock) -> None:
        super().__init__()
        self.goodput = Goodput()
        self._reports = reports
        self._clock = clock
        self._began = self.began = clock()
        self._pod: Pod | None = None

    def set_pod(self, pod: Pod) -> None:
        """Prepare for the next pod."""
        self._pod = pod

    def handle(self, line: Fields) -> None:
        super().handle(line)
        self.goodput.take(line)

    @property
    def elapsed(self) -> float:
        """Seconds since the launch."""
        return round(self._clock() - self._began, 3)

    def fields(self) -> Document:
        """Return the answer to `status`. See docs/reference/status.md."""
        waiting, store = self.waiting, self.store
        return {
            "version": STATUS_VERSION,
            **self.launch,
            "elapsed": self.elapsed,
            "state": self.state,
            "why": self.why,
            "restarts": self.restarted,
            "nodes": self.nodes,
            "waiting": waiting
            and {
                **{name: waiting[name] for name in ("present", "wanted", "missing")},
                "left": self._left(waiting),
            },
            "store": store and {"name": store["name"], "left": self._left(store)},
            "containers": [self._container(each) for each in self._shown()],
            "late": self.late,
            "goodput": self.goodput_fields(),
        }

    def goodput_fields(self) -> Document:
        return goodput_fields(self.goodput.seconds(self._clock()))

    def _left(self, waits: Fields) -> float | None:
        until = waits["until"]
        return None if until is None else max(0.0, round(until - self._clock(), 3))

    def stopping_for(self) -> float | None:
        """Return for how many seconds the processes of this node have been stopping, or None if they are not
        stopping.
        """
        return None if self.stopping_since is None else self._clock() - self.stopping_since

    def waits_for(self) -> str:
        """Return the diagnosis since the last activity in a short form. Return "" without a diagnosis."""
        verdict = self.verdict
        if verdict is None or verdict["kind"] == "straggler":
            return ""
        if (self.silent_for() or 0.0) < self._clock() - verdict["time"]:
            return ""
        ranks = f"trainer {ranks_in_words(verdict['ranks'])}, " if verdict["ranks"] else ""
        return f"{verdict['kind']}: {ranks}fleetrun why"

    def silent_for(self) -> float | None:
        """Return the seconds without output or report of any trainer on this node. None unless
        trainers run.
        """
        trainers = [
            each.spec
            for each in (self._pod.containers if self._pod is not None and self.state == "running" else ())
            if each.spec.role is Role.TRAINER and each.alive
        ]
        ages: list[float] = []
        for each in trainers:
            known = self.processes.get(each.name)
            started = known.started if known is not None else None
            ages.append(0.0 if started is None else self._clock() - started)
            reported = self._reports.age(each.name)
            ages += [] if reported is None else [reported]
            with suppress(OSError):  # its time comes from the clock of the machine, which may have been set
                ages.append(time.time() - each.log.stat().st_mtime)
        return max(0.0, min(ages)) if ages else None

    def servers(self) -> Document:
        """Return the endpoints of the whole job's parameter servers, and the job's token, for commands of
        this user.
        """
        containers = () if self._pod is None else self._pod.containers
        env = next((each.spec.env for each in containers), {})
        endpoints = env.get("PADDLE_PSERVERS_IP_PORT_LIST", "")
        return {"endpoints": [each for each in endpoints.split(",") if each], "token": env.get(TOKEN, "")}

    def packed(self, brief: bool, most: int) -> bytes:
        """Return the fields for another node, in at most `most` bytes."""
        from fleetrun.control.node_status import pack  # late: for jobs of several nodes

        return pack(self.fields(), brief, most)

    def _shown(self) -> list[Container]:
        if self._pod is None:
            return []
        hook = self._pod.hook
        return [*self._pod.containers, *([hook] if hook is not None and hook.alive else [])]

    def _container(self, container: Container) -> Document:
        spec, process = container.spec, container.process
        alive = process is not None and process.exit is None
        known = self.processes.get(spec.name)
        return {
            "name": spec.name,
            "role": spec.label or str(spec.role),
            "rank": spec.rank,
            "index": spec.index,
            "state": str(container.status),
            "alive": alive,
            "pid": process.pid if process is not None and alive else None,
            "attempt": container.restarts,
            "started": known and known.started,
            "log": str(spec.log),
            "gpus": _gpus(spec.env),
            "ended": known and known.ended,
            "exit": known and known.code,
            **self._progress(spec.name if alive else "", container.status),
        }

    def _progress(self, name: str, status: Status) -> Document:
        report = self._reports.latest(name) if name else None
        if report is None:
            return dict.fromkeys(_OF_REPORTS)
        rate, step_seconds, left = self._reports.speeds(name)
        activity = report.activity
        debugged = activity and activity.what.startswith(DEBUGGED)
        return {
            "step": report.step,
            "of": report.of,
            "left": left,
            "samples": report.samples,
            "loss": report.loss,
            "rate": rate,
            "step_seconds": step_seconds,
            "activity": activity and {"what": activity.what, "done": activity.done, "of": activity.of},
            "server": report.server or None,
            "tables": report.tables or None,
            "hot": report.hot or None,
            **({"state": "debugged"} if status is Status.RUNNING and debugged else {}),
        }


_OF_REPORTS = (
    "step", "of", "left", "samples", "loss", "rate", "step_seconds", "activity", "server", "tables", "hot",
)  # fmt: skip


def _gpus(env: Environ) -> str:
    """Return the GPUs of a process as the node numbers them. The process numbers only the GPUs
    that it sees.
    """
    seen = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = env.get("FLAGS_selected_gpus", "").split(",")
    return ",".join(seen[int(each)] for each in own if each.isdecimal() and int(each) < len(seen))


def _findings_fields(findings: Findings, whole: bool) -> Document:
    """Return findings as fields. `whole`: with all answers of the probes."""
    found = findings.verdict or findings.straggler
    return {
        "version": 1,
        "verdict": None if found is None else verdict_fields(found),
        "ranks": list(findings.ranks),
        "late": lateness_fields(findings.late),
        **({"states": list(findings.states)} if whole else {}),
    }


# ---- Answers of a running launcher

_LONGEST_NAME = 100  # characters of a process's name


class Others(Protocol):
    """The launchers on the other nodes of the job."""

    within: float
    """Seconds in which they answer."""

    def ask(
        self, verb: str, options: Fields, then: Callable[[Mapping[int, object]], None], rank: int | None, /
    ) -> None:
        """Pass the answers of all nodes, or of the node with this rank, to `then`. Each has its `data`. None
        stands for a missing answer.
        """
        ...


def _named(pid: int, uid: int) -> str:
    """Describe a process in words. A process in another pid namespace has no number."""
    import pwd  # late: few jobs get requests

    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = f"user {uid}"
    return f" of {user}" + (f" (pid {pid})" if pid > 0 else "")


_RENEW_EVERY = 60.0


class Control:
    """The answers to commands that send requests to this launcher.

    `stop` ends the job for a command, immediately or not. `restart` restarts the process of this name for a
    command, and returns the reason if it refuses. `report` shows a line on the launcher's terminal. `others`
    are the other nodes of the job. `why` finds the rank that the others wait for.
    """

    def __init__(
        self,
        loop: Loop,
        job_status: JobStatus,
        stop: Callable[[str, bool], None],
        restart: Callable[[str, str], str],
        report: Callable[[str], None],
        others: Others | None,
        why: Callable[[Detail, Callable[[Findings], None]], None],
    ) -> None:
        self._job_status = job_status
        self.address: Document = {}
        """The address and the token of the store of a job of several nodes, as soon as they are known."""
        self._stop_job = stop
        self._restart_process = restart
        self._why = why
        self._others = others
        self._loop = loop
        self._report = report
        self._server: Server | None = None
        self._timer: Timer | None = None

    def open(self, runtime: Path, renew: Sequence[Callback] = ()) -> None:
        """Start to answer. Without a directory for the socket, the job runs without answers.

        A cleaner of old files may remove sockets. This socket is made again within a minute, and the other
        sockets by their `renew`.
        """
        self._timer = self._loop.after(_RENEW_EVERY, partial(self._renew, runtime, renew))
        try:
            path = files.control_socket(runtime, self._job_status.launch["pod"])
            self._server = Server(self._loop, path, self.answer)
        except OSError as error:
            why = error.strerror or error
            self._report(f"`fleetrun status` will not find this job: no socket in {runtime}: {why}")

    def _renew(self, runtime: Path, renew: Sequence[Callback]) -> None:
        for each in renew:
            each()
        if self._server is None or self._server.path.exists():
            self._timer = self._loop.after(_RENEW_EVERY, partial(self._renew, runtime, renew))
        else:
            self._server.close()
            self._server = None
            self.open(runtime, renew)

    def close(self) -> None:
        """Close the socket. You may call it twice."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()

    def answer(self, question: Message) -> Message | Later:
        asked = question.get("ask")
        if asked == "status" and question.get("everywhere") is True and self._others is not None:
            return self._everywhere(self._others, question)
        if asked == "status":
            return self._job_status.fields()
        if asked == "stop":
            return self._stop(question)
        if asked == "restart":
            return self._restart(question)
        if asked == "servers":
            return self._job_status.servers()
        if asked == "store" and self.address:
            return self.address
        if asked == "why":
            whole = question.get("states") is True
            detail = Detail.ALL if whole else Detail.OUTSIDE
            return lambda reply: self._why(detail, lambda findings: reply(_findings_fields(findings, whole)))
        return {"error": f"this fleetrun does not know what to answer to {str(asked)[:40]!r}"}

    def _everywhere(self, others: Others, question: Message) -> Later:
        """Collect the answers of other nodes. `node`: the rank of the only node. `all`: every process,
        whatever their number.
        """
        from fleetrun.control.node_status import MANY, with_answers  # late, for the same reason

        rank, nodes = question.get("node"), len(self._job_status.nodes)
        one = rank if isinstance(rank, int) and 0 <= rank < nodes else None
        brief = one is None and question.get("all") is not True and nodes > MANY

        def ask(reply: Reply) -> None:
            def found(answers: Mapping[int, Any]) -> None:
                packed = {each: answer and answer.data for each, answer in answers.items()}
                reply(with_answers(self._job_status.fields(), packed, others.within))

            others.ask("state", {"brief": brief}, found, one)

        return ask

    def _stop(self, question: Message) -> Document:
        now = question.get("now") is True
        by = _named(*question["asker"]) if "asker" in question else ""
        command = f"`fleetrun stop{' --now' if now else ''}`{by}"
        self._loop.after(0, lambda: self._stop_job(command, now))  # after the command has its answer
        facts = self._job_status.launch
        return {"stopping": facts["job"], **{name: facts[name] for name in ("pod", "pid", "guard")}}

    def _restart(self, question: Message) -> Document:
        name = str(question.get("name"))[:_LONGEST_NAME]
        by = _named(*question["asker"]) if "asker" in question else ""
        why_not = self._restart_process(name, f"`fleetrun top`{by}")
        return {"error": why_not} if why_not else {"restarting": name}

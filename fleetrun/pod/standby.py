"""Standby interpreters (`--warm`): a second process for each of a pod, which has imported what the first one
has, and waits before the first statement of the script. A restart continues in it, seconds earlier.

    process: its first step ---> what it has imported, in a file
                                       |
                                 the same command, started again ---> imports in the same order
                                                                 <--- ready
    ... it ends ...              the variables that differ now   ---> the script begins

A standby of a spare node has no process that it copies: it gets the list of imports of a node that runs, and
an environment for some place in the job. The variables that its place will change it must not have seen by
then, so it tells which modules have read them, and another one is started that leaves these to the script.

A standby is started as its process was: command, environment, directory, session, log. So a script cannot
tell the difference, nor can threads, OpenMP or CUDA, as they could after a fork. The probe makes it wait
(`probe/inside/fleetrun_standby.py`), and without one it would run the script a second time: it is started
only once the probe has reported from the very process that it copies, or on a spare from another node's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fleetrun.aliases import Environ, Say, Strings
from fleetrun.envs import contract
from fleetrun.envs.channels import (
    ERROR_FILE_VARIABLES,
    IMPORTS_SUFFIX,
    MEMORY_VARIABLE,
    NOTICE_VARIABLE,
    PROBE_VARIABLE,
    PROGRESS_VARIABLE,
    STANDBY_VARIABLE,
)
from fleetrun.envs.contract import Role
from fleetrun.envs.progress_report import Report
from fleetrun.errors import LaunchError
from fleetrun.files import replace_file
from fleetrun.frozen import frozen
from fleetrun.host.cgroups import Groups
from fleetrun.pod import logs
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.process import Process
from fleetrun.pod.spec import ContainerSpec
from fleetrun.proc import read_stat

_WITHOUT_STEPS = 10.0  # seconds that a process without steps has for its imports
_LONGEST = 300.0  # seconds for the imports of a standby
_LONGEST_WORD = 1 << 16  # bytes that a standby says at once
_STOPPED = "TtZX"  # states of a process that does not go on
_CORES_EACH = 8  # so many cores for each that imports at the same time, beside the training

_MAY_DIFFER = frozenset(
    {
        "PADDLE_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER",
        "PADDLE_MASTER_ENDPOINT", "PADDLE_WORKER_ENDPOINT", "FLEETRUN_MASTER", "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_CURRENT_ENDPOINT", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_COORDINATOR_ENDPOINTS",
        "PADDLE_PORT", "PADDLE_GLOO_FS_PATH", "PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_BACKUP_ENV_PATH",
    }
)  # fmt: skip
"""Variables that count attempts or tell where others are: no library reads them while it is imported."""

_SAME = frozenset({PROGRESS_VARIABLE, NOTICE_VARIABLE, MEMORY_VARIABLE, *ERROR_FILE_VARIABLES})
"""Variables that are the same in all places of a node."""

_PASSES = 5
"""Standbys that are started to find out which modules read the variables of their place."""

_LARGEST_LIST = 16 << 20  # bytes
_SECRET = ("TOKEN", "SECRET", "KEY", "PASS", "CREDENTIAL")
"""In names of variables whose values are not published."""

Imports = Sequence[tuple[str, str, Mapping[str, str | None]]]
"""[name, file, changes of the environment before it]: what `fleetrun_standby.Watch` has noted."""


class Standbys:
    """Of one launch, over all its pods. Containers go by their names on this node. `companions` gets the pids
    of standbys, and `tell` and `warn` a sentence for the console.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        tell: Say,
        warn: Say,
        listed: Callable[[bytes], None] | None = None,
    ) -> None:
        """`listed` gets what the last trainer of this node has imported at its first step, for `prepare` on
        other nodes; None: there are none that wait for it.
        """
        self._loop = loop
        self._companions = companions
        self._tell = tell
        self._warn: Say | None = warn
        self._listed = listed
        self._pod: Pod | None = None
        self._stepping: set[str] = set()
        """Containers that have reported a step in this attempt."""
        self._timers: dict[str, Timer] = {}
        self._queue: list[_Wanted] = []
        self._standbys: dict[str, _Standby] = {}
        self._most = max(1, Groups().cores() // _CORES_EACH)

    def set_pod(self, pod: Pod) -> None:
        """This pod is next."""
        self._pod = pod
        names = {each.spec.name for each in pod.containers}
        for gone in self._standbys.keys() - names:
            self._standbys.pop(gone).end()

    def heard(self, name: str, report: Report) -> None:
        """A process has reported. At its first step most of its imports are done."""
        steps = report.step is not None
        if name in self._stepping or (name in self._timers and not steps) or self._pod is None:
            return
        container = next((each for each in self._pod.containers if each.spec.name == name), None)
        if container is None or not has_imported(container):
            return
        if steps:
            self._forget(name)
            self._stepping.add(name)
        done = steps or container.spec.role is Role.SERVER  # which reports when it begins to serve
        self._timers[name] = self._loop.after(0.0 if done else _WITHOUT_STEPS, partial(self._copy, container))

    def _copy(self, container: Container) -> None:
        """Of the process that this container has now."""
        spec, process = container.spec, container.process
        if self._listed is not None and self._pod is not None:
            trainers = [each.spec for each in self._pod.containers if each.spec.role is Role.TRAINER]
            if spec in trainers[-1:]:
                self._listed(_packed(spec))

        def alive() -> bool:
            return container.alive and container.process is process

        try:
            listed = _listed(spec).read_bytes()
        except OSError:
            return
        self._enqueue(_Wanted(spec, spec.environment(container.restarts), alive, listed=listed))

    def prepare(self, specs: Sequence[ContainerSpec], imports: bytes, *, trusted: bool) -> None:
        """On a spare: standbys for its trainers, whose places in the job are not known yet; these specs have
        others. `imports`: what `listed` got on another node; `trusted`: only nodes of this job can have
        written it. Else its part up to the first change of a variable is used: a variable may name a program.
        Raises ValueError for anything else, OSError if the list cannot be written.
        """
        modules = _unpacked(imports)
        if not trusted:
            modules = _until(modules, bool)
        for spec in specs:
            if spec.role is Role.TRAINER and is_python(spec.argv) and PROBE_VARIABLE in spec.env:
                _list_imports(spec, modules)
                self._enqueue(_Wanted(spec, spec.environment(0), lambda: True, modules))

    def take(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """The standby of a container that starts, if there is one that is ready and like it: its script
        begins now, with this environment.
        """
        self._forget(spec.name)
        self._unqueue(spec.name)
        standby = self._standbys.pop(spec.name, None)
        if standby is None:
            return None
        process = standby.begin(spec, env)
        if process is None:
            standby.end()
        self._start_next()
        return process

    def close(self) -> None:
        """End all. May be called twice."""
        for timer in self._timers.values():
            timer.cancel()
        self._queue.clear()
        while self._standbys:
            self._standbys.popitem()[1].end()
        self._pod = None

    def _forget(self, name: str) -> None:
        self._stepping.discard(name)
        if name in self._timers:
            self._timers.pop(name).cancel()

    def _enqueue(self, wanted: _Wanted) -> None:
        """In place of one that still waits, or that has another list: its process has imported more since."""
        name = wanted.spec.name
        self._unqueue(name)
        if name in self._standbys:
            if self._standbys[name].wanted.listed == wanted.listed:
                return
            self._standbys.pop(name).end()
        self._queue.append(wanted)
        self._start_next()

    def _unqueue(self, name: str) -> None:
        self._queue = [each for each in self._queue if each.spec.name != name]

    def _start_next(self) -> None:
        while self._queue and sum(not each.ready for each in self._standbys.values()) < self._most:
            wanted = self._queue.pop(0)
            name = wanted.spec.name
            if not wanted.alive():
                continue
            with suppress(LaunchError, OSError):  # there will be none for this attempt
                news = partial(self._news, name)
                self._standbys[name] = _Standby(wanted, self._loop, self._companions, news)

    def _news(self, name: str, refused: str | None) -> None:
        """A standby is ready (None), or is not to be (the reason; empty: it has ended)."""
        standby = self._standbys[name]
        if refused is None and standby.wanted.modules is not None and standby.readers:
            self._standbys.pop(name).end()
            self._prepare_without(standby.wanted, standby.readers)
        elif refused is not None:
            self._standbys.pop(name).end()
        if refused and self._warn is not None:
            self._warn(f"restarts will not be warm: {refused} ({name})")
            self._warn = None
        self._start_next()
        standbys = self._standbys.values()
        if standbys and not self._queue and all(each.ready for each in standbys):
            size = sum(each.memory for each in standbys)
            many = "1 standby is" if len(standbys) == 1 else f"{len(standbys)} standbys are"
            self._tell(f"{many} ready for warm restarts, with {size >> 20} MiB of memory")

    def _prepare_without(self, wanted: _Wanted, readers: Mapping[str, Sequence[str]]) -> None:
        """Once more, without modules that have read variables of a place that is not known yet."""
        assert wanted.modules is not None
        above = tuple(f"{name}." for name in readers)
        modules = [
            each for each in wanted.modules if each[0] not in readers and not each[0].startswith(above)
        ]
        if len(modules) < len(wanted.modules) and wanted.passes < _PASSES:
            with suppress(OSError):
                _list_imports(wanted.spec, modules)
                again = _Wanted(wanted.spec, wanted.env, wanted.alive, modules, wanted.passes + 1)
                self._queue.insert(0, again)


@frozen
class _Wanted:
    """A standby to start, if `alive` still says so. `listed`: what its process had imported. `modules`: those
    that it imports where no process of this node has left their list; this is the pass of that number.
    """

    spec: ContainerSpec
    env: Environ
    alive: Callable[[], bool]
    modules: Imports | None = None
    passes: int = 1
    listed: bytes = b""


def is_python(argv: Strings) -> bool:
    """Whether the launcher itself starts this Python, perhaps bound to cores."""
    return sys.executable in (argv[:1] if argv[0] != "taskset" else argv[3:4])


def has_imported(container: Container) -> bool:
    """Whether the process itself, not one that it started, has left a list of its imports."""
    process = container.process
    if process is None or not is_python(container.spec.argv):
        return False
    try:
        with _listed(container.spec).open(encoding="utf-8") as file:
            return file.read(64).startswith(f'{{"pid": {process.pid},')
    except OSError:
        return False


def _listed(spec: ContainerSpec) -> Path:
    return Path(spec.env[PROBE_VARIABLE] + IMPORTS_SUFFIX)


def _list_imports(spec: ContainerSpec, modules: Imports) -> None:
    replace_file(_listed(spec), json.dumps({"modules": modules}))


def _packed(spec: ContainerSpec) -> bytes:
    """The list of its process for other nodes, as far as the script has set no secret for a library. Empty if
    it cannot be read.
    """
    try:
        modules: Imports = json.loads(_listed(spec).read_bytes())["modules"]
    except (OSError, ValueError, KeyError):
        return b""
    return zlib.compress(json.dumps(_until(modules, _is_secret)).encode())


def _until(modules: Imports, ends: Callable[[Mapping[str, str | None]], bool]) -> Imports:
    """Those before the first with such changes: what is imported after it could see other values."""
    end = next((number for number, each in enumerate(modules) if ends(each[2])), len(modules))
    return modules[:end]


def _is_secret(changes: Mapping[str, str | None]) -> bool:
    return any(word in name.upper() for name in changes for word in _SECRET)


def _unpacked(imports: bytes) -> Imports:
    """Raises ValueError for what `_packed` has not made."""
    try:
        unpacker = zlib.decompressobj()
        rows = json.loads(unpacker.decompress(imports, _LARGEST_LIST))
        return [
            (str(name), str(path), {str(each): changes[each] for each in changes})
            for name, path, changes in rows
        ]
    except (zlib.error, TypeError, RecursionError) as error:
        raise ValueError(f"not a list of imports: {error}") from None


class _Standby:
    """One process. `news` gets None when it is ready, and text when it is over."""

    ready = False
    memory = 0
    """Bytes that it shares with no other process."""

    def __init__(
        self, wanted: _Wanted, loop: Loop, companions: set[int], news: Callable[[str | None], None]
    ) -> None:
        """Raises LaunchError or OSError when it cannot be started."""
        self.wanted = wanted
        self.readers: Mapping[str, Sequence[str]] = {}
        """By the names of modules: the variables of their place that they have read when imported."""
        self._spec = spec = wanted.spec
        self._env = wanted.env
        owned = {name for name in self._env if name.startswith(contract.OWNED_PREFIXES)}
        self._placed = (contract.OWNED | owned) - _SAME
        self._loop = loop
        self._companions = companions
        self._news = news
        self._heard = b""
        with contextlib.ExitStack() as opened:
            output = logs.open_log(spec.log)
            opened.callback(os.close, output)
            self._log = os.fstat(output)
            channel, theirs = map(opened.enter_context, socket.socketpair())
            placed = ",".join(sorted(self._placed))
            env = {**self._env, STANDBY_VARIABLE: f"{theirs.fileno()} {placed}"}
            self._process = Process.spawn(spec.argv, env, output, keep=[theirs.fileno()])
            self._channel = channel.dup()
        self._channel.setblocking(False)
        companions.add(self._process.pid)
        loop.add(self._channel.fileno(), self._read)
        loop.add(self._process.fileno(), lambda: news(""))
        self._limit = loop.after(_LONGEST, lambda: news(f"its imports took longer than {_LONGEST:.0f} s"))

    def begin(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """None if it is not ready, or not what this container would be now."""
        if not self._fits(spec, env):
            return None
        changes = {
            "set": {name: value for name, value in env.items() if self._env.get(name) != value},
            "unset": [name for name in self._env if name not in env],
        }
        said = json.dumps(changes).encode()
        try:
            if self._channel.send(said) < len(said):
                return None
        except OSError:
            return None
        self._let_go()
        self._companions.discard(self._process.pid)
        return self._process

    def _fits(self, spec: ContainerSpec, env: Environ) -> bool:
        names = env.keys() | self._env.keys()
        different = {name for name in names if env.get(name) != self._env.get(name)}
        may_differ = _MAY_DIFFER | (self._placed - {name for read in self.readers.values() for name in read})
        if not self.ready or spec.argv != self._spec.argv or not different <= may_differ:
            return False
        try:
            log = spec.log.stat()
            state = read_stat(self._process.pid).state
        except (OSError, ProcessLookupError):
            return False
        return os.path.samestat(log, self._log) and state not in _STOPPED

    def end(self) -> None:
        """Kill it. The loop reaps it, because one that waits for a disk would hold up the launch."""
        self._let_go()
        self._process.signal_group(signal.SIGKILL)
        self._loop.add(self._process.fileno(), self._reap)

    def _reap(self) -> None:
        self._loop.remove(self._process.fileno())
        self._process.reap(with_group=True)
        self._companions.discard(self._process.pid)

    def _let_go(self) -> None:
        self._limit.cancel()
        self._loop.remove(self._channel.fileno())
        self._loop.remove(self._process.fileno())
        self._channel.close()

    def _read(self) -> None:
        try:
            self._heard += self._channel.recv(_LONGEST_WORD)
        except BlockingIOError:
            return
        except OSError:
            pass
        if not self._heard.endswith(b"\n"):
            self._news("")  # it has ended, or is something else
            return
        self._loop.remove(self._channel.fileno())
        self._limit.cancel()
        try:
            said = json.loads(self._heard)
            self.memory = int(said.get("memory", 0))
            refused = said.get("refused")
            self.readers = dict(said.get("readers", {}))
        except (ValueError, AttributeError, TypeError):
            refused = ""
        self.ready = refused is None
        self._news(refused if refused is None else str(refused))

"""Keep a standby interpreter for each process of a pod (`--warm`), so that restarts are faster.

A standby has imported the same modules as its process and waits before the first statement of the script. A
restart continues in it and saves seconds.

    process: its first step ---> what it has imported, in a file
                                       |
                                 the same command, started again ---> imports in the same order
                                                                 <--- ready
    ... it ends ...              the variables that differ now   ---> the script begins

A standby on a spare node cannot copy a local process. It gets the list of imports from a running node, and an
environment for some rank of the job. The standby must not have seen variables that its later rank will
change. It therefore reports which modules have read them, and another standby is started that leaves these
modules to the script.

A standby starts like its process, with the same command, environment, directory, session and log. Scripts,
threads, OpenMP and CUDA therefore work as in a normal start, unlike after a fork. The probe makes the standby
wait (`probe/inside/fleetrun_standby.py`). Without a probe, the standby would run the script a second time. It
therefore starts only after the probe has reported from the copied process itself, or, on a spare, from
another node's process.
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

_WITHOUT_STEPS = 10.0  # seconds for the imports of a process without steps
_LONGEST = 300.0  # seconds for the imports of a standby
_LONGEST_WORD = 1 << 16  # bytes of one message of a standby
_STOPPED = "TtZX"  # states of a process that does not continue
_CORES_EACH = 8  # cores for each standby that imports at the same time, beside the training

_MAY_DIFFER = frozenset(
    {
        "PADDLE_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "PADDLE_MASTER",
        "PADDLE_MASTER_ENDPOINT", "PADDLE_WORKER_ENDPOINT", "FLEETRUN_MASTER", "PADDLE_TRAINER_ENDPOINTS",
        "PADDLE_CURRENT_ENDPOINT", "PADDLE_PSERVERS_IP_PORT_LIST", "PADDLE_COORDINATOR_ENDPOINTS",
        "PADDLE_PORT", "PADDLE_GLOO_FS_PATH", "PADDLE_GLOO_HTTP_ENDPOINT", "PADDLE_BACKUP_ENV_PATH",
    }
)  # fmt: skip
"""Variables that count attempts or hold addresses. Libraries do not read them at import."""

_SAME = frozenset({PROGRESS_VARIABLE, NOTICE_VARIABLE, MEMORY_VARIABLE, *ERROR_FILE_VARIABLES})
"""Variables with equal values for all ranks of a node."""

_PASSES = 5
"""Number of standbys started to find the modules that read variables of their rank."""

_LARGEST_LIST = 16 << 20  # bytes
_SECRET = ("TOKEN", "SECRET", "KEY", "PASS", "CREDENTIAL")
"""Parts of variable names whose values are not published."""

Imports = Sequence[tuple[str, str, Mapping[str, str | None]]]
"""[name, file, changes of the environment before it], as noted by `fleetrun_standby.Watch`."""


class Standbys:
    """The standbys of one run, over all its pods.

    Containers are named as on this node. `companions` receives the pids of standbys. `tell` and `warn`
    receive a sentence for the console.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        tell: Say,
        warn: Say,
        listed: Callable[[bytes], None] | None = None,
    ) -> None:
        """Make the collection of standbys.

        `listed` receives the imports of this node's last trainer at its first step, for `prepare` on other
        nodes. It is None without waiting nodes.
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
        """Set the next pod, and end standbys of processes that it lacks."""
        self._pod = pod
        names = {each.spec.name for each in pod.containers}
        for gone in self._standbys.keys() - names:
            self._standbys.pop(gone).end()

    def heard(self, name: str, report: Report) -> None:
        """Handle a progress report. At the first step, a process has done most of its imports."""
        steps = report.step is not None
        if name in self._stepping or (name in self._timers and not steps) or self._pod is None:
            return
        container = next((each for each in self._pod.containers if each.spec.name == name), None)
        if container is None or not has_imported(container):
            return
        if steps:
            self._forget(name)
            self._stepping.add(name)
        done = steps or container.spec.role is Role.SERVER  # a server reports when it starts to serve
        self._timers[name] = self._loop.after(0.0 if done else _WITHOUT_STEPS, partial(self._copy, container))

    def _copy(self, container: Container) -> None:
        """Start a standby for the current process of this container."""
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
        """Start standbys for the trainers of a spare, whose ranks are not known yet. The ranks in `specs` are
        different ones.

        `imports` is the value that `listed` received on another node. `trusted` means that only nodes of this
        job can have written it. Otherwise only the part before the first change of a variable is used,
        because a variable may name a program. Raises ValueError for invalid `imports`, and OSError if the
        list cannot be written.
        """
        modules = _unpacked(imports)
        if not trusted:
            modules = _until(modules, bool)
        for spec in specs:
            if spec.role is Role.TRAINER and is_python(spec.argv) and PROBE_VARIABLE in spec.env:
                _list_imports(spec, modules)
                self._enqueue(_Wanted(spec, spec.environment(0), lambda: True, modules))

    def take(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """Return the standby of a container that starts, or None unless one is ready and matches.

        Its script starts now, with this environment.
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
        """End all standbys. You may call it twice."""
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
        """Add a standby to the queue.

        It replaces a waiting standby. It also replaces a standby with another list, because its process has
        imported more since then.
        """
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
            with suppress(LaunchError, OSError):  # this attempt then runs without a standby
                news = partial(self._news, name)
                self._standbys[name] = _Standby(wanted, self._loop, self._companions, news)

    def _news(self, name: str, refused: str | None) -> None:
        """Handle a ready standby (None), or a refused one. An empty reason means that it has ended."""
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
        """Try again, without the modules that read variables of the unknown rank."""
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
    """A standby to start, if `alive` still returns True.

    `listed` is the list of imports of its process. `modules` are the modules to import if local processes
    have not left such a list. `passes` is the number of this pass over them.
    """

    spec: ContainerSpec
    env: Environ
    alive: Callable[[], bool]
    modules: Imports | None = None
    passes: int = 1
    listed: bytes = b""


def is_python(argv: Strings) -> bool:
    """Return True if the launcher itself starts this Python, perhaps bound to cores."""
    return sys.executable in (argv[:1] if argv[0] != "taskset" else argv[3:4])


def has_imported(container: Container) -> bool:
    """Return True if the process itself, and not one of its children, has left a list of its imports."""
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
    """Return the list of imports for other nodes, up to the first secret that the script set for a library.

    The result is empty if the list cannot be read.
    """
    try:
        modules: Imports = json.loads(_listed(spec).read_bytes())["modules"]
    except (OSError, ValueError, KeyError):
        return b""
    return zlib.compress(json.dumps(_until(modules, _is_secret)).encode())


def _until(modules: Imports, ends: Callable[[Mapping[str, str | None]], bool]) -> Imports:
    """Return the modules before the first with such changes. Later modules could see other values."""
    end = next((number for number, each in enumerate(modules) if ends(each[2])), len(modules))
    return modules[:end]


def _is_secret(changes: Mapping[str, str | None]) -> bool:
    return any(word in name.upper() for name in changes for word in _SECRET)


def _unpacked(imports: bytes) -> Imports:
    """Unpack a list of imports. Raises ValueError if `_packed` did not make it."""
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
    """One standby process. `news` receives None when it is ready, and text when it has ended or is
    refused.
    """

    ready = False
    memory = 0
    """Bytes that it shares with no other process."""

    def __init__(
        self, wanted: _Wanted, loop: Loop, companions: set[int], news: Callable[[str | None], None]
    ) -> None:
        """Start the process. Raises LaunchError or OSError."""
        self.wanted = wanted
        self.readers: Mapping[str, Sequence[str]] = {}
        """Maps module names to the variables of their rank that the modules read at import."""
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
        """Continue as this spec. Return None if the standby is not ready or does not match the spec."""
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
        """Kill the standby. The loop reaps it, because a process that waits for a disk would delay the
        run.
        """
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
            self._news("")  # it has ended, or is another program
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

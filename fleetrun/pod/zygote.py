"""Keep a zygote for the Python processes of a pod (`--warm`): a process that imports once what they import,
and forks them at each start.

    first start    the imports of the last run, or the first imports of the script ---> zygote
    each start     environment and log of each process --> zygote --> processes, which wait
                   Container.start                                --> the script begins
    first step     what all local processes have imported --> a file for the next run
                                                          --> another zygote, if this one lacks much of it

Processes with the same command and environment share a zygote. Variables that differ by rank or attempt do
not count. A zygote reports which modules have read such a variable, and another one is started that leaves
these modules to the script.

The zygote starts like its processes. The probe makes it wait (`probe/inside/fleetrun_zygote.py`), and checks
that a fork is safe. In all doubtful cases the processes start cold.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from fleetrun.aliases import Callback, Environ, ShowText, Strings
from fleetrun.envs import contract
from fleetrun.envs.channels import (
    IMPORTS_SUFFIX,
    MEMORY_VARIABLE,
    PROBE_VARIABLE,
    PROGRESS_VARIABLE,
    TREE_VARIABLE,
    ZYGOTE_VARIABLE,
)
from fleetrun.envs.contract import Role
from fleetrun.envs.progress_report import Report
from fleetrun.errors import LaunchError
from fleetrun.files import make_run_folder, replacing
from fleetrun.pod import logs
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.loop import Loop
from fleetrun.pod.process import Process
from fleetrun.pod.spec import ContainerSpec
from fleetrun.proc import read_stat

_LONGEST = 300.0  # seconds for the imports of a zygote
_FORKING = 10.0  # seconds for the forks of a message
_AT_ONCE = 100  # forks in a message, which carries at most 253 descriptors
_PIECE = 1 << 16  # bytes
_STOPPED = "tTZX"  # states of a process that does not continue
_FEW = 20  # a zygote may lack one module in so many
_LARGEST_LIST = 16 << 20  # bytes
_SAME = frozenset({PROGRESS_VARIABLE, MEMORY_VARIABLE, *contract.INHERITED})
"""Variables of the contract with equal values for all processes of a node, in all attempts."""

Imports = Sequence[tuple[str, str, Mapping[str, str | None]]]
"""[name, file, changes of the environment before it], as noted by `fleetrun_imports.Watch`."""
Key = tuple[Strings, frozenset[tuple[str, str]]]


class Zygotes:
    """The zygotes of one run, over all its pods.

    Containers are named as on this node. `companions` receives the pids of zygotes, and of processes that
    wait for their start. `show` and `warn` receive a sentence for the console. Lists of imports are kept in
    `folder`. `watch`: see `_state_of`.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        show: ShowText,
        warn: ShowText,
        folder: Path,
        *,
        watch: bool = False,
    ) -> None:
        self._loop = loop
        self._companions = companions
        self._show = show
        self._warn = warn
        self._folder = folder
        self._watch = watch
        self._pod: Pod | None = None
        self._lists: dict[str, bytes] = {}
        """The imports of the processes of this attempt, by container."""
        self._zygotes: dict[Key, _Zygote | None] = {}
        """None: these processes start cold in this run."""
        self._starts: list[tuple[Sequence[Container], Callback]] = []
        """Starts that wait for a zygote."""
        self._forks: dict[str, _Fork] = {}
        """Processes that wait for their start, by container."""
        self._warned: set[str] = set()

    def set_pod(self, pod: Pod) -> None:
        """Set the next pod, and end zygotes that it does not need."""
        self._pod = pod
        for key in self._zygotes.keys() - {_key(each.spec) for each in pod.containers}:
            self._end(self._zygotes.pop(key))

    # ---- Starts

    def ready(self, containers: Sequence[Container], then: Callback) -> None:
        """Fork processes for these containers, and call `then`, which may start them.

        The call follows immediately if all of them start cold.
        """
        for each in containers:
            spec, key = each.spec, _key(each.spec)
            self._lists.pop(spec.name, None)
            zygote = self._zygotes.get(key)
            if zygote is not None and (zygote.stopped or zygote.program != _state_of(spec, self._watch)):
                self._lose(zygote, "")
            self._require(spec, spec.environment(each.restarts))
        self._starts.append((containers, then))
        self._go_on()

    def _go_on(self) -> None:
        """Fork for each start whose zygotes have imported."""
        for start in list(self._starts):
            zygotes = [self._zygotes.get(_key(each.spec)) for each in start[0]]
            if start in self._starts and all(each is None or each.ready for each in zygotes):
                self._starts.remove(start)
                self._fork(*start)

    def _fork(self, containers: Sequence[Container], then: Callback) -> None:
        groups: dict[_Zygote, list[Container]] = {}
        for each in containers:
            zygote = self._zygotes.get(_key(each.spec))
            if zygote is not None:
                groups.setdefault(zygote, []).append(each)
        forks: dict[str, _Fork] = {}

        def arrived(name: str) -> None:
            """Handle a process that waits, or has ended."""
            del forks[name]
            if not forks:
                limit.cancel()
                then()

        for zygote, group in groups.items():
            for first in range(0, len(group), _AT_ONCE):
                forks |= self._order(zygote, group[first : first + _AT_ONCE], arrived)
        if forks:
            limit = self._loop.after(
                _FORKING * (1 + len(forks) // _AT_ONCE), lambda: self._expire(groups, forks, then)
            )
        else:
            then()

    def _expire(self, zygotes: Collection[_Zygote], forks: Mapping[str, _Fork], then: Callback) -> None:
        late = [name for name, fork in forks.items() if self._forks.get(name) is fork]
        if late:  # otherwise another start has taken the place of this one
            for name in late:
                self._forks.pop(name).end()
            for zygote in zygotes:
                self._lose(zygote, f"the zygote did not fork within {_FORKING:.0f} s")
            then()

    def _order(self, zygote: _Zygote, group: Sequence[Container], arrived: ShowText) -> Mapping[str, _Fork]:
        """Order processes. Where this fails, they start cold, which shows the reason."""
        forks: dict[str, _Fork] = {}
        environs: list[Environ] = []
        fds: list[int] = []
        with contextlib.ExitStack() as opened, suppress(LaunchError, OSError):
            for each in group:
                name, env = each.spec.name, each.spec.environment(each.restarts)
                fds.append(logs.open_log(each.spec.log))
                opened.callback(os.close, fds[-1])
                ours, theirs = socket.socketpair()
                fds.append(opened.enter_context(theirs).fileno())
                environs.append(env)
                self._end(self._forks.get(name))
                fork = _Fork(ours, env, self._loop, self._companions, partial(arrived, name))
                self._forks[name] = forks[name] = fork
            zygote.send(environs, fds)
        return forks

    def take(self, spec: ContainerSpec, env: Environ) -> Process | None:
        """Return the forked process of a container that starts, or None for a cold start.

        Its script starts now, with this environment.
        """
        fork = self._forks.pop(spec.name, None)
        process = None if fork is None else fork.begin(env)
        if fork is not None and process is None:
            self._start_cold("a forked process ended before its start")
        return process

    def close(self) -> None:
        """End all zygotes, and processes that wait. You may call it twice."""
        self._starts.clear()
        for each in (*self._forks.values(), *self._zygotes.values()):
            self._end(each)
        self._forks.clear()
        self._zygotes.clear()
        self._pod = None

    # ---- Zygotes

    def _require(self, spec: ContainerSpec, env: Environ) -> None:
        """Start a zygote, unless there is one or the processes start cold."""
        if _key(spec) not in self._zygotes and is_python(spec.argv):
            self._want(spec, env, *self._kept(spec))

    def _want(self, spec: ContainerSpec, env: Environ, modules: Imports | None, without: Strings) -> None:
        """Start a zygote, in place of another one. It reads `modules` from the script if None."""
        key = _key(spec)
        self._end(self._zygotes.pop(key, None))
        with suppress(LaunchError, OSError):  # a cold start raises it again
            program = _state_of(spec, self._watch)
            self._zygotes[key] = _Zygote(
                spec, env, program, modules, without, self._loop, self._companions, self._news
            )

    def _news(self, zygote: _Zygote, refused: str | None) -> None:
        """Handle a zygote that can fork (None), or the reason why it cannot."""
        left = (*zygote.without, *(zygote.readers.keys() - set(zygote.without)))
        if refused is None and len(left) > len(zygote.without):
            self._want(zygote.spec, zygote.env, zygote.modules, left)
        elif refused is None and not zygote.readers:
            self._show(f"ready for warm starts: {len(zygote.names)} modules are imported")
        else:
            read = [f"{name} reads {', '.join(read)}" for name, read in zygote.readers.items()]
            self._lose(zygote, read[0] if refused is None else refused)
            if not zygote.ready or read:
                self._zygotes[zygote.key] = None
        self._go_on()

    def _lose(self, zygote: _Zygote, why: str) -> None:
        if self._zygotes.get(zygote.key) is zygote:
            del self._zygotes[zygote.key]
        zygote.end()
        if why:
            self._start_cold(why)

    def _start_cold(self, why: str) -> None:
        if why not in self._warned:
            self._warned.add(why)
            self._warn(f"processes start cold, as without --warm: {why}")

    @staticmethod
    def _end(each: _Zygote | _Fork | None) -> None:
        if each is not None:
            each.end()

    def prepare(self, specs: Sequence[ContainerSpec]) -> None:
        """Start zygotes for the trainers of a spare, whose ranks are not known yet."""
        for spec in specs:
            if spec.role is Role.TRAINER:
                self._require(spec, spec.environment(0))

    # ---- Lists of imports

    def handle_report(self, name: str, report: Report) -> None:
        """Handle a progress report. At the first step, a process has done most of its imports."""
        for each in self._pod.containers if self._pod is not None and name not in self._lists else ():
            done = report.step is not None or each.spec.role is Role.SERVER  # it reports when it serves
            if each.spec.name == name and each.process is not None and done:
                self.learn(each.spec, each.process.pid)

    def learn(self, spec: ContainerSpec, pid: int) -> None:
        """Read what a process has imported. The last process of a zygote leads to the next one."""
        key, start = _key(spec), b'{"pid": %d, ' % pid  # itself, and not one of its children
        text = b""
        with suppress(OSError, KeyError):
            text = Path(spec.env[PROBE_VARIABLE] + IMPORTS_SUFFIX).read_bytes()
        if self._pod is None or not text.startswith(start):
            return
        self._lists[spec.name] = text[len(start) :]
        same = {each.spec.name for each in self._pod.containers if _key(each.spec) == key}
        zygote = self._zygotes.get(key)
        if not same <= self._lists.keys() or (zygote is None and key in self._zygotes):
            return
        modules = _common({self._lists[name] for name in same})
        without = () if zygote is None else zygote.without
        self._keep(spec, modules, without)
        known = {*without, *(zygote.names if zygote is not None else ())}
        if len({each[0] for each in modules} - known) * _FEW > len(known):
            self._want(spec, spec.environment(0), modules, without)

    def _file(self, spec: ContainerSpec) -> tuple[Path, str]:
        """Return the file with the list of this program, and the state of the program."""
        state = _state_of(spec, self._watch)
        name = zlib.crc32(os.fsencode(state.partition("\n")[0]))
        return self._folder / f"{name:08x}.imports", state

    def _kept(self, spec: ContainerSpec) -> tuple[Imports | None, Strings]:
        """Return the modules of the last run of this script, and those that it left out."""
        path, script = self._file(spec)
        with suppress(OSError, ValueError):
            make_run_folder(self._folder)
            modules, without, same = unpack(path.read_bytes())
            if same == script:
                return modules, without
        return None, ()

    def _keep(self, spec: ContainerSpec, modules: Imports, without: Strings) -> None:
        """Keep a list for the next run, up to the first variable that the script set, which may change."""
        path, script = self._file(spec)
        with suppress(OSError):
            make_run_folder(self._folder)
            with replacing(path) as aside:
                aside.write_bytes(pack(_until_changed(modules), without, script))


def _key(spec: ContainerSpec) -> Key:
    """Return what the processes of a zygote have in common."""
    return spec.argv, frozenset(each for each in spec.env.items() if not _placed(each[0]))


def _state_of(spec: ContainerSpec, watch: bool) -> str:
    """Return the command, and the state of the script and the modules beside it.

    Each of these may decide which variables the script sets before an import, so that a list of another state
    could import too early. With `watch`, where an edit must restart quickly, a module counts only up to the
    last statement that may set a variable. If there is one, modules without such statements count whole,
    because their values may be set.

    With --sync, the copy of the code does not count, unless PYTHONPATH may lead into it.
    """
    script = Path(script_of(spec.argv))
    place = str(script)
    if not re.search("(^|:)(?!/)", spec.env.get("PYTHONPATH", "/")):
        place = place.replace(os.environ.get(TREE_VARIABLE, "\0"), "")
    texts = {}
    for each in filter(Path.is_file, sorted(script.parent.glob("*.py"))):  # a pipe would block
        with suppress(OSError):
            texts[each.name] = each.read_bytes()
    if watch and any(map(_until_set, texts.values())):
        texts = {name: _until_set(text) or text for name, text in texts.items()}
    elif watch:
        texts = dict.fromkeys(texts, b"")
    states = [f"{name} {zlib.crc32(text):08x}" for name, text in texts.items()]
    return "\n".join([f"{spec.role} {place} {_unbound(spec.argv)}", *states])


_KEEPS_ENVIRON = re.compile(rb"environb?\b(?![.\[])")
_SETS = re.compile(
    rb".*(environb?\b(?!\.get\b|\[[^]\n]*\](?!\s*[|+]?=[^=]))|del\s[^\n]*environ|putenv|unsetenv|sys\.path)"
    rb"[^\n]*(\n[ \t)\]}][^\n]*)*",
    re.DOTALL,
)


def _until_set(text: bytes) -> bytes:
    """Return a module up to its last statement that may set a variable, or change `sys.path`.

    Later statements have no influence on imports. A module that passes `os.environ` on counts whole.
    """
    found = _SETS.match(text)
    return text if found and _KEEPS_ENVIRON.search(text) else found[0] if found else b""


def _placed(name: str) -> bool:
    """Return True for a variable that differs by rank or attempt."""
    return contract.is_owned(name) and name not in _SAME


def is_python(argv: Strings) -> bool:
    """Return True if the launcher itself starts this Python, perhaps bound to cores, and it loads the
    probe.
    """
    words = iter(_unbound(argv))
    if next(words) != sys.executable:
        return False
    for word in words:
        if word[0] != "-" or word in ("-m", "-c"):
            return True
        if word in ("-X", "-W"):
            next(words, "")
        elif set(word) & set("EIS"):  # these leave out PYTHONPATH or `sitecustomize`
            return False
    return False


def _unbound(argv: Strings) -> Strings:
    """Return the command without the binding to cores."""
    return argv[3:] if argv[0] == "taskset" else argv


def script_of(argv: Strings) -> str:
    """Return the path of the script of this Python. A module with `-m` has a path that does not exist."""
    words = _unbound(argv)
    return os.path.abspath(words[: 4 if words[2:3] == ("-m",) else 3][-1])  # noqa: PTH100


def _common(lists: Collection[bytes]) -> Imports:
    """Return what all processes have imported, up to the first variable that not all of them set."""
    found, *others = (json.loads(b"{" + each)["modules"] for each in lists)
    for other in others:
        theirs = {each[0]: each for each in other}
        differs = (number for number, each in enumerate(found) if each[2] and each != theirs.get(each[0]))
        end = next(differs, len(found))
        found = [each for each in found[:end] if each == theirs.get(each[0])]
    return found  # type: ignore[no-any-return]


def pack(modules: Imports, without: Strings = (), script: str = "") -> bytes:
    """Return a list of imports for the next run."""
    return zlib.compress(json.dumps([modules, without, script]).encode())


def unpack(imports: bytes) -> tuple[Imports, Strings, str]:
    """Unpack a list of imports. Raises ValueError if `pack` did not make it."""
    try:
        unpacker = zlib.decompressobj()
        rows, without, script = json.loads(unpacker.decompress(imports, _LARGEST_LIST))
        modules = [
            (str(name), str(path), {str(each): changes[each] for each in changes})
            for name, path, changes in rows
        ]
        return modules, tuple(map(str, without)), str(script)
    except (zlib.error, TypeError, RecursionError) as error:
        raise ValueError(f"not a list of imports: {error}") from None


def _until_changed(modules: Imports) -> Imports:
    """Return the modules before the first change of a variable. Later modules could see other values."""
    end = next((number for number, each in enumerate(modules) if each[2]), len(modules))
    return modules[:end]


class _Zygote:
    """One zygote process. `news` receives it and None when it can fork, and else the reason why not."""

    ready = False
    names: Collection[str] = ()
    """The modules that it has imported."""
    readers: Mapping[str, Collection[str]] = {}
    """Maps module names to the variables of their rank that the modules read at import."""

    def __init__(
        self,
        spec: ContainerSpec,
        env: Environ,
        program: str,
        modules: Imports | None,
        without: Strings,
        loop: Loop,
        companions: set[int],
        news: Callable[[_Zygote, str | None], None],
    ) -> None:
        """Start the process. Raises LaunchError or OSError."""
        self.spec, self.env, self.modules, self.without = spec, env, modules, without
        self.key = _key(spec)
        self.program = program
        self._loop = loop
        self._companions = companions
        self._news = news
        self._received = b""
        with contextlib.ExitStack() as opened:
            output = logs.open_log(spec.log)
            opened.callback(os.close, output)
            channel, theirs = map(opened.enter_context, socket.socketpair())
            own = {**env, ZYGOTE_VARIABLE: str(theirs.fileno())}
            self._process = Process.spawn(spec.argv, own, output, keep=[theirs.fileno()])
            self._channel = channel.dup()
        companions.add(self._process.pid)
        placed = list(filter(_placed, contract.OWNED | env.keys()))
        self.send({"placed": placed, "modules": modules, "without": without})
        loop.add(self._channel.fileno(), self._read)
        long = f"the imports took longer than {_LONGEST:.0f} s"
        self._limit = loop.after(_LONGEST, lambda: news(self, long))

    def send(self, what: object, fds: Sequence[int] = ()) -> None:
        """Send a message, and descriptors. Raises OSError."""
        with open(os.memfd_create("order"), "wb") as file:  # noqa: PTH123
            file.write(json.dumps(what).encode())
            file.flush()
            socket.send_fds(self._channel, [b"."], [file.fileno(), *fds])

    @property
    def stopped(self) -> bool:
        try:
            return read_stat(self._process.pid).state in _STOPPED
        except ProcessLookupError:
            return True

    def end(self) -> None:
        """Kill the zygote."""
        self._limit.cancel()
        _close(self._channel, self._process, self._loop, self._companions)

    def _read(self) -> None:
        piece, refused = b"", "" if self.ready else "the zygote has ended"
        with suppress(OSError):
            piece = self._channel.recv(_PIECE)
        self._received += piece
        if piece and not self._received.endswith(b"\n"):
            return
        self._limit.cancel()
        with suppress(ValueError, TypeError, KeyError):
            message, self._received = json.loads(self._received), b""
            refused = message.get("refused")
            if refused is None:
                self.names, self.readers = message["modules"], message["readers"]
                self.ready = True
        self._news(self, refused)


class _Fork:
    """A forked process that waits for its start on a channel. `news` is called when it waits, or has
    ended.
    """

    _process: Process | None = None

    def __init__(
        self, channel: socket.socket, env: Environ, loop: Loop, companions: set[int], news: Callback
    ) -> None:
        self._channel = channel
        self._env = env
        self._loop = loop
        self._companions = companions
        self._news = news
        loop.add(channel.fileno(), self._read)

    def _read(self) -> None:
        self._loop.remove(self._channel.fileno())
        with suppress(OSError, ValueError):
            self._process = Process.adopt(int(self._channel.recv(_PIECE)))
            self._companions.add(self._process.pid)
        self._news()

    def begin(self, env: Environ) -> Process | None:
        """Let the script start. Return None if the process has ended, or has another environment."""
        process = self._process
        with suppress(OSError):
            if process is not None and not process.ended and env == self._env:
                self._channel.send(b"g")
                self._companions.discard(process.pid)
                self._process = None
                self.end()
                return process
        self.end()
        return None

    def end(self) -> None:
        _close(self._channel, self._process, self._loop, self._companions)


def _close(channel: socket.socket, process: Process | None, loop: Loop, companions: set[int]) -> None:
    """Kill a process. The loop reaps it, because a process that waits for a disk would delay the run."""

    def reap() -> None:
        assert process is not None
        loop.remove(process.fileno())
        process.reap(with_group=True)
        companions.discard(process.pid)

    loop.remove(channel.fileno())
    channel.close()
    if process is not None:
        process.signal_group(signal.SIGKILL)
        loop.add(process.fileno(), reap)

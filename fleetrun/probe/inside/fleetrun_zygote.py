"""A zygote (`--warm`). It starts like the processes of the job and imports what they import. It waits before
the first statement of the script, and forks a process for each order of the launcher.

    launcher --- the imports ---> zygote    imports, tries a fork
             <-- ready, or why not ---
             --- an order for each rank --> forks a middle process, which forks the ranks and ends
             <-- its pid ----------------------------- rank    now a child of the launcher
             --- g ----------------------------------> rank    becomes the process, and the script begins

A rank returns from here, so that Python itself runs the script. Any error ends the process, because the
script must never run without an order. A rank whose launcher has ended ends too. The module uses only the
standard library.
"""

import os
import sys

from fleetrun_imports import Reads, Refused, import_all, set_variable

_NAME = "zygote"
_TRIAL = 10.0  # seconds for a few milliseconds of computing
_MOST = 253  # descriptors in a message: its text, and the log and the channel of each rank
_TRACERS = ("coverage", "debugpy", "pydevd")
_PROFILERS = ("NSYS_", "CUDA_INJECTION64_PATH", "COVERAGE_PROCESS_")
_SANITIZERS = ("asan", "lsan", "msan", "tsan", "ubsan")


class Zygote:
    """The zygote in this process. `started` is its environment at the start."""

    def __init__(self, channel, started, watch):
        from _socket import socket

        self._channel = socket(fileno=channel)
        os.set_inheritable(channel, False)
        order, _ = self._receive()
        self._modules, self._without = order["modules"], order["without"]
        self.reads = Reads(order["placed"])
        self._started = started
        self._watch = watch
        self._comm = _comm()
        self._files = {}

    def serve(self):
        """Import, then fork processes. Return only in these processes."""
        try:
            _rename(_NAME)
            output = _divert()
            try:
                _check_environment()
                _retitle({**self._started, "FLEETRUN_CONTAINER": ""})
                self._import()
                _try_fork()
                readers = {name: sorted(read) for name, read in self.reads.readers.items()}
                self._send({"readers": readers, "modules": [each[0] for each in self._watch.imported()]})
            except Refused as refusal:
                self._send({"refused": str(refusal)})
            while not self._forked(*self._receive(), output):
                pass
        except BaseException:
            os._exit(1)

    def _send(self, message):
        import json

        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _receive(self):
        """Return a message of the launcher and its descriptors. End with the launcher."""
        import json
        from _socket import CMSG_SPACE

        message, rights, _, _ = self._channel.recvmsg(1, CMSG_SPACE(4 * _MOST))
        if not message:
            os._exit(0)
        text, *fds = memoryview(rights[0][2]).cast("i").tolist()
        with open(text, "rb") as file:
            file.seek(0)
            return json.loads(file.read()), fds

    # ---- Imports

    def _import(self):
        import ctypes
        import gc
        import random  # noqa: F401  its state is compared

        probe, states, opened = sys.modules["fleetrun_probe"], _states(), _open_files()

        def note(module):
            for name, state in _states().items():
                states.setdefault(name, state)

        finders = [probe.WhenImported(name, note) for name in ("numpy.random.mtrand", "torch")]
        sys.meta_path[:0] = finders
        self.reads.during(None)
        try:
            import_all(self._modules, self._without, self.reads.during)
            if "trainers.ps.tables.warm" in sys.modules:
                sys.modules["trainers.ps.tables.warm"].warm_up_server()  # loads the compiled kernels
        finally:
            self.reads.end()
            sys.meta_path[:] = [each for each in sys.meta_path if each not in finders]
        _check_effects(_open_files() - opened)
        now = _states()
        for name in states:
            if states[name] != now[name]:
                raise Refused("an import draws random numbers from {}".format(name))
        self._files = _identities([each[1] for each in self._watch.imported()])
        for flush in (sys.stdout.flush, sys.stderr.flush, lambda: ctypes.CDLL(None).fflush(None)):
            flush()  # or every fork would write this text
        gc.collect()
        gc.freeze()  # the collector would copy all memory that forks share

    # ---- Forks

    def _forked(self, environs, fds, output):
        """Fork processes with these environments. Return True in each of them.

        Each one has its log and its channel in `fds`.
        """
        if _identities(self._files) != self._files:
            self._send({"refused": "an imported package has been changed"})
            os._exit(0)
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            for fd in fds:
                os.close(fd)
            return False
        middle = os.getpid()
        try:
            for number, environ in enumerate(environs):
                if not os.fork():
                    log, channel = fds[2 * number : 2 * number + 2]
                    for fd in {self._channel.detach(), *fds} - {log, channel}:
                        os.close(fd)
                    self._become(environ, log, channel, output, middle)
                    return True
        except OSError:  # the limit of processes
            pass
        os._exit(0)

    def _become(self, environ, log, channel, output, middle):
        """Become the process of this order, when the launcher holds it."""
        import time

        os.setsid()
        _retitle(environ)
        while os.getppid() == middle:
            time.sleep(0.001)
        os.chdir("/proc/{}/cwd".format(os.getppid()))  # it changes with --watch --sync
        os.write(channel, b"%d" % os.getpid())
        if os.read(channel, 1) != b"g":
            os._exit(1)
        os.close(channel)
        _rename(self._comm)
        address = environ["FLEETRUN_PROBE_SOCKET"]
        for name in self._started.keys() | environ.keys():
            known = name in ("FLEETRUN_PROBE_SOCKET", "FLEETRUN_ZYGOTE")
            if self._started.get(name) != environ.get(name) and not known:
                set_variable(name, environ.get(name))
        self._watch.begin(address)
        sys.modules["fleetrun_probe"].renew(address)
        _renew()
        _restore(output, log)


def _renew():
    """Renew whatever a cold start makes anew, and a fork does not."""
    import importlib
    import time

    numpy, torch, logging, threading, process = map(
        sys.modules.get, ("numpy.random", "torch", "logging", "threading", "multiprocessing.process")
    )  # `random` renews itself
    if numpy is not None:
        numpy.seed()
    if torch is not None:
        torch.default_generator.seed()
    if logging is not None:
        whole = isinstance(logging._startTime, int)  # since Python 3.13
        logging._startTime = time.time_ns() if whole else time.time()
    renew = getattr(threading and threading.main_thread(), "_set_native_id", None)
    if renew is not None:  # stale before Python 3.13
        renew()
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()


def _retitle(environ):
    """Set the variables that /proc/PID/environ shows, by which the launcher finds processes of a container.

    The kernel needs CONFIG_CHECKPOINT_RESTORE for PR_SET_MM_MAP (prctl(2)), and no privilege.
    """
    import ctypes
    import mmap
    import struct

    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    text = b"".join(os.fsencode("{}={}".format(*each)) + b"\0" for each in environ.items())
    place = mmap.mmap(-1, len(text), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place.write(text)
    start = ctypes.addressof(ctypes.c_char.from_buffer(place))
    _places.append(place)
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    places = [int(fields[number - 3]) for number in (26, 27, 45, 46, 47, 28, 48, 49)]  # as in proc(5)
    places[5:5] = [libc.sbrk(0)]
    layout = struct.pack("=12Q2I", *places, start, start + len(text), 0, 0, 0xFFFFFFFF)
    buffer = ctypes.create_string_buffer(layout)
    libc.prctl(35, 14, ctypes.addressof(buffer), len(layout), 0)
    with open("/proc/self/environ", "rb") as file:
        if file.read() != text:
            raise Refused("this kernel cannot change /proc/PID/environ")


_places = []  # keeps the memory of these variables


# ---- Checks


def _check_environment():
    """Refuse tools that watch a process from its start."""
    for name in os.environ:
        if name.startswith(_PROFILERS):
            raise Refused("{} is set".format(name))
    for name in _TRACERS:
        if name in sys.modules:
            raise Refused("{} is loaded".format(name))
    with open("/proc/self/maps") as maps:
        libraries = {os.path.basename(line.rstrip()) for line in maps if "/lib" in line}
    for name in libraries:
        if any(each in name for each in _SANITIZERS):
            raise Refused("{} is loaded".format(name))


def _check_effects(opened):
    if sys.gettrace() or sys.getprofile():
        raise Refused("the interpreter is traced")
    for _, target in sorted(opened):
        raise Refused("the imports open " + ("a connection" if target.startswith("socket:") else target))
    with open("/proc/self/task/{}/children".format(os.getpid())) as children:
        if children.read().strip():
            raise Refused("the imports start a process")


def _open_files():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink("/proc/self/fd/" + number)))
        except OSError:  # the descriptor of the listing
            pass
    return found


def _states():
    """Return the states of generators that all forks would share."""
    found = {}
    if "random" in sys.modules:
        found["random"] = sys.modules["random"].getstate()
    if "numpy.random.mtrand" in sys.modules:
        parts = sys.modules["numpy.random.mtrand"].get_state()
        found["numpy.random.mtrand"] = [getattr(each, "tolist", lambda each=each: each)() for each in parts]
    if hasattr(sys.modules.get("torch"), "default_generator"):
        found["torch"] = sys.modules["torch"].default_generator.get_state().tolist()
    return found


def _identities(paths):
    found = {}
    for path in paths:
        try:
            status = os.stat(path)
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            found[path] = None
    return found


def _try_fork():
    """Check that a forked process computes, and that no thread is missing in it.

    Threads count after the fork, because OpenBLAS ends its threads for it.
    """
    import signal
    import time
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns about the threads of OpenBLAS
        child = os.fork()
    if not child:
        code = 1
        try:
            code = _computes()
        finally:
            os._exit(code)
    threads = [_comm("self/task/" + task) for task in os.listdir("/proc/self/task")]
    ended, deadline = (0, 0), time.monotonic() + _TRIAL
    while not ended[0] and len(threads) == 1 and time.monotonic() < deadline:
        time.sleep(0.002)
        ended = os.waitpid(child, os.WNOHANG)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if len(threads) > 1:
        raise Refused("the imports start a thread ({})".format(threads[-1]))
    if ended != (child, 0):
        raise Refused("a forked process " + ("cannot compute" if ended[0] else "hangs when it computes"))


def _computes():
    """Compute as a script may. Return an exit code."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.linalg.solve(numpy.eye(64), numpy.ones(64))
    if torch is not None:
        if torch.cuda._is_in_bad_fork():
            return 2
        torch.ones(1 << 20).sum()
        many = torch.ones(200, 200, requires_grad=True)
        (many @ many).sum().backward()
    return 0


# ---- Output during imports belongs at the start of the script's output


def _divert():
    """Redirect stdout and stderr into memory, and return its descriptor."""
    memory = os.memfd_create("output of imports")
    os.dup2(memory, 1)
    os.dup2(memory, 2)
    return memory


def _restore(memory, log):
    os.dup2(log, 1)
    os.dup2(log, 2)
    text = os.pread(memory, os.fstat(memory).st_size, 0)
    if text:
        os.write(1, text)
    os.close(memory)
    os.close(log)


def _rename(name):
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def _comm(task="self"):
    with open("/proc/{}/comm".format(task)) as file:
        return file.read().rstrip("\n")

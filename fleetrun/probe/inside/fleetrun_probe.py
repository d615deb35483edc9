"""The probe: what the launcher asks of a process from outside, and what the process leaves for it at its end.

- The stacks of all threads go to stderr, which is the log, at STACKS_SIGNAL: written in C, so also while the
  interpreter is stuck.
- A script that has run to its end says so in its error file (`channels.write_finished`), last of all that
  Python runs: a crash after that, while C++ objects are torn down, loses nothing.
- From `torch.distributed.init_process_group` on, a thread answers on the socket of FLEETRUN_PROBE_SOCKET
  with a JSON object, and closes: `pid`, `time_ns`, `torch` (version), `threads` (the frames of each thread,
  innermost first: file, line, function), `groups` (name: its ranks) and `trace`, torch's flight recorder:
  which collective of which group was entered and completed. It needs the interpreter's lock, which a wait
  in a collective releases.

Nothing of this happens before `torch.distributed` is imported but two registrations. Private names of torch
are looked for, never relied on. Runs in any Python 3, also one without fleetrun: standard library only.
"""

import atexit
import faulthandler
import os
import signal
import sys

_STACKS_SIGNAL = signal.SIGRTMIN + 12  # channels.STACKS_SIGNAL
_STDERR = 2
_FINISHED = '{"finished": true}'  # channels.write_finished
_TORCH = "torch.distributed.distributed_c10d"
_FRAMES = 64
_ENTRIES = 400


def install(address):
    """In the first Python of a container; what it starts has no probe. `address`: where to answer."""
    _show_stacks()
    _Ending(os.environ.get("FLEETRUN_ERROR_FILE", "")).watch()
    sys.meta_path.insert(0, _WhenImported(_TORCH, lambda module: _when_joined(module, address)))


def _show_stacks():
    try:
        if signal.getsignal(_STACKS_SIGNAL) is signal.SIG_DFL:
            os.fstat(_STDERR)
            faulthandler.register(_STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed
        pass


# ---- The end of a script


class _Ending:
    """Knows whether the script has run to its end, and leaves word of it."""

    def __init__(self, path):
        self._path = path
        self._pid = os.getpid()
        self._failed = False

    def watch(self):
        leave = sys.exit

        def exit(*code):
            self._failed = self._failed or bool(code and code[0] not in (None, 0))
            leave(*code)

        exit.__doc__ = leave.__doc__
        sys.exit = exit
        atexit.register(self._at_exit)  # the first one registered is called last

    def _at_exit(self):
        if "torch" not in sys.modules or os.getpid() != self._pid or not self._path:
            return
        if self._failed or hasattr(sys, "last_type") or _may_raise_exit():
            return
        try:
            if not os.path.exists(self._path):  # there may be an error in it
                aside = f"{self._path}.{self._pid}"
                with open(aside, "w") as file:
                    file.write(_FINISHED)
                os.replace(aside, self._path)
        except OSError:
            pass


def _may_raise_exit():
    """Whether code of the user names SystemExit: nothing tells with which code one that it raises itself ends
    the process, unlike `sys.exit`.
    """
    library = os.path.dirname(os.__file__)
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None) or ""
        if not path.endswith(".py") or path.startswith(library) or "-packages" in path or path == __file__:
            continue
        try:
            with open(path, "rb") as file:
                if b"SystemExit" in file.read():
                    return True
        except OSError:  # torch has modules with a name for a file
            pass
    return False


# ---- When torch is there


class _WhenImported:
    """A finder that finds nothing: it calls `then` with one module, right after that was executed."""

    def __init__(self, name, then):
        self._name = name
        self._then = then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            del loader.exec_module
            self._then(module)

        loader.exec_module = exec_module


def _when_joined(module, address):
    """Answer from the moment on when this process joins its first group."""
    import functools

    join = module.init_process_group

    @functools.wraps(join)
    def init_process_group(*args, **kwargs):
        _answer_from_now_on(module, address)  # also while it waits for the others here
        return join(*args, **kwargs)

    module.init_process_group = init_process_group


_answering = []  # the pid of the process that does


def _answer_from_now_on(module, address):
    if os.getpid() in _answering:
        return
    _answering[:] = [os.getpid()]
    import _thread
    import socket

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, address)
        listener.listen(8)
        # Not a `threading.Thread`: scripts count those.
        _thread.start_new_thread(_answer, (module, listener))
    except (OSError, RuntimeError):
        listener.close()


def _bind(listener, address):
    """In place of what an earlier attempt or program of this container left there."""
    folder, name = os.path.split(address)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{descriptor}/{name}"  # an address has 107 bytes at most
        if os.path.lexists(short):
            os.unlink(short)
        listener.bind(short)
    finally:
        os.close(descriptor)


def _answer(module, listener):
    import json

    while True:
        try:
            connection, _ = listener.accept()
            try:
                connection.settimeout(2.0)
                connection.sendall(json.dumps(_state(module)).encode())
            finally:
                connection.close()
        except Exception:  # whoever asked has gone, or the interpreter ends
            if listener.fileno() < 0:
                return


def _state(module):
    import time

    trace = _trace()
    return {
        "pid": os.getpid(),
        "time_ns": time.time_ns(),
        "threads": _threads(),
        "groups": _groups(module),
        "trace": trace,
        "torch": str(getattr(sys.modules.get("torch"), "__version__", "")),
    }


def _threads():
    """The frames of each thread but this one, the main thread first."""
    import _thread
    import threading

    own, main = _thread.get_ident(), threading.main_thread().ident
    frames = sys._current_frames()
    order = sorted((each for each in frames if each != own), key=lambda each: each != main)
    return [_frames(frames[each]) for each in order]


def _frames(frame):
    rows = []
    while frame is not None and len(rows) < _FRAMES:
        rows.append([frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name])
        frame = frame.f_back
    return rows


def _groups(module):
    """name: ranks of the job, and the sequence number of the last collective where torch tells it."""
    world = getattr(module, "_world", None)
    groups = {}
    for group, ranks in dict(getattr(world, "pg_group_ranks", {})).items():
        name = getattr(world, "pg_names", {}).get(group, "")
        sequence = None
        try:
            sequence = group._get_sequence_number_for_group()
        except Exception:
            pass
        groups[name] = {"ranks": sorted(ranks), "sequence": sequence}
    return groups


def _trace():
    """torch's flight recorder: the newest entries and the state of each group; None where it has none."""
    import json

    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return None
    try:
        found = json.loads(dump(True, False))
    except Exception:
        return None
    entries = found.get("entries") or []
    return {"entries": entries[-_ENTRIES:], "groups": found.get("pg_status") or {}}

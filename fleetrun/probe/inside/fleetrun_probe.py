"""The probe: what the launcher asks of a process from outside, and what the process leaves for it at its end.

- The stacks of all threads go to stderr, which is the log, at STACKS_SIGNAL: written in C, so also while the
  interpreter is stuck.
- A script that has run to its end says so in its error file (`channels.read_finished`), last of all that
  Python runs: a crash after that, while C++ objects are torn down, loses nothing. One that an exception ends
  leaves the exception there, as torchrun's `@record` does.
- The first client of MASTER_PORT in rank 0 finds a TCPStore there, as under torchrun.
- Steps of torch's optimizers are counted and reported (`fleetrun_steps`).
- With `--warm`, what has been imported is in a file beside the socket from the first step on, for a standby
  of this process (`fleetrun_standby`).
- From `torch.distributed.init_process_group` on, or from the first call of `also` by fleetrun's own runtime,
  a thread answers on the socket of FLEETRUN_PROBE_SOCKET with a JSON object (`_state`), and closes. It needs
  the interpreter's lock, which a wait in a collective releases. At its end the process leaves its last state
  in a file beside the socket.

Nothing of this costs a step anything: the thread sleeps until it is asked, and torch keeps its record of
collectives (the flight recorder) anyway. Private names of torch are looked for, never relied on. Runs in any
Python 3, also one without fleetrun: standard library only.
"""

import _thread
import atexit
import faulthandler
import os
import signal
import sys

import fleetrun_steps

_STACKS_SIGNAL = signal.SIGRTMIN + 12  # channels.STACKS_SIGNAL
_STDERR = 2
_TORCH = "torch.distributed.distributed_c10d"
_OPTIMIZERS = "torch.optim.optimizer"
_FRAMES = 20
_CALLS = 20
_ARRIVALS = 200


def install(address, imported=None):
    """In the first Python of a container; what it starts has no probe. `address`: where to answer. It may get
    a standby if there is `imported`, which returns the names of modules for that.
    """
    _show_stacks()
    _home[:] = [address, os.getpid()]
    _imported[:] = [imported] if imported is not None else []
    _Ending(os.environ.get("FLEETRUN_ERROR_FILE", ""), address).watch()
    sys.meta_path.insert(0, _WhenImported(_TORCH, _when_joined))
    _count_steps(os.environ.get("FLEETRUN_CONTAINER"), os.environ.get("FLEETRUN_PROGRESS"))


def _count_steps(mark, path):
    if mark and path:
        steps = fleetrun_steps.Steps(mark, path)
        steps.begun = note_imports
        _steps.append(steps)
        _more["step"] = steps.last
        atexit.register(steps.end)
        sys.meta_path.insert(0, _WhenImported(_OPTIMIZERS, steps.watch))


_steps = []
_marked = []  # called once this process is another container than it has read so far
_home = []  # where to answer, and the process that does: not one that it forks
_more = {}
_imported = []  # tells what has been imported, for a standby
_reading = _thread.allocate_lock()  # held while the text of a script is read


def also(name, ask):
    """Answer from now on, with what `ask` returns under that name, for JSON; another thread calls it."""
    _more[name] = ask
    _answer_from_now_on()


def take_mark(take):
    """`take` is called with what `set_mark` says."""
    _marked.append(take)


def set_mark(mark):
    """The container of this process, as FLEETRUN_CONTAINER says; a standby gets to know it late."""
    for steps in _steps:
        steps.mark = mark
    for take in _marked:
        take(mark)


def hand_steps(take, last):
    """Who reports progress takes the number of each step of torch's optimizers from now on, and knows the
    last step of all: its number, how many seconds ago it ended, and how many it took.
    """
    for steps in _steps:
        steps.tell = take
        _more["step"] = last


def _show_stacks():
    try:
        if signal.getsignal(_STACKS_SIGNAL) is signal.SIG_DFL:
            os.fstat(_STDERR)
            faulthandler.register(_STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed
        pass


def note_imports():
    """For a standby of this process, once most of its imports are done."""
    for imported in _imported if os.getpid() in _home else ():
        try:
            _leave(_home[0] + ".imports", {"pid": os.getpid(), "modules": imported()})
        except Exception:  # no room, or something else: then there is no standby
            pass


# ---- The end of a script


class _Ending:
    """Notes whether the script has run to its end, and writes that into the error file."""

    def __init__(self, path, address):
        self._path = path
        self._address = address
        self._pid = os.getpid()
        self._exits_with_error = False

    def watch(self):
        leave = sys.exit

        def exit(*code):
            self._exits_with_error = self._exits_with_error or bool(code and code[0] not in (None, 0))
            leave(*code)

        exit.__doc__ = leave.__doc__
        sys.exit = exit
        atexit.register(self._at_exit)  # the first one registered is called last

    def _at_exit(self):
        mistake = isinstance(getattr(sys, "last_value", None), (ImportError, SyntaxError))
        if not ("torch" in sys.modules or mistake) or os.getpid() != self._pid:
            return
        for leave in (self._leave_state, self._say_how_it_ends, self._end_sooner):
            try:
                leave()
            except Exception:  # each is worth something without the other
                pass

    def _leave_state(self):
        if _answering:
            _leave(self._address + ".last", _state(ends=True))

    def _say_how_it_ends(self):
        if not self._path or _says_more(self._path):  # the runtime may have written an error
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            _leave(self._path, _error_record(error))
        elif not self._exits_with_error and not _may_raise_exit():
            parent = os.getppid()
            _leave(self._path, {"finished": self._pid, "below": [parent, _program(parent)]})

    @staticmethod
    def _end_sooner():
        """The others wait for the end of a process that has failed, and to search the hundred thousands of
        objects of torch for cycles takes most of it. What is in a cycle is left to the kernel; Python does
        not promise more. Files get what was written to them.
        """
        import gc
        import io

        if getattr(sys, "last_value", None) is None or "torch" not in sys.modules:
            return
        for each in gc.get_objects():
            if type(each) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
                try:
                    each.flush()
                except (OSError, ValueError):  # it is closed, or its disk is full
                    pass
        gc.freeze()


def _says_more(path):
    """Whether more is there than the word of an earlier program that it has run to its end."""
    try:
        with open(path, "rb") as file:
            return not file.read(20).startswith(b'{"finished":')
    except FileNotFoundError:
        return False


def _program(pid):
    """What it runs, also of one that has ended: its name for the kernel."""
    with open("/proc/{}/comm".format(pid), "rb") as file:
        return file.read().decode("utf-8", "replace").strip()


def _leave(path, what):
    """The launcher never reads half a file, and no other user reads it."""
    import json

    aside = f"{path}.{os.getpid()}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(what, file)
    os.replace(aside, path)


def _error_record(error):
    """As `channels.write_error` writes it."""
    import traceback

    now = _now_ns()
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    extra = {"py_callstack": "".join(lines), "timestamp": str(now // 1000000000), "time_ns": now}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}


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
            find = getattr(finder, "find_spec", None)  # Python goes past one that has none, too
            spec = find(name, path, target) if find is not None else None
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


def _when_joined(module):
    """Answer from the moment on when this process joins its first group."""
    import functools

    join = module.init_process_group
    try:
        _serve_clients(sys.modules["torch._C._distributed_c10d"].TCPStore)
    except Exception:  # an old torch
        pass

    @functools.wraps(join)
    def init_process_group(*args, **kwargs):
        begun = _now_ns()
        _joined_ns.append(begun)
        _answer_from_now_on()  # also while it waits for the others here
        hosts = False
        try:
            hosts = _await_first(*args, **kwargs)
        except Exception:  # torch will say what is wrong
            pass
        try:
            joined = join(*args, **kwargs)
        except BaseException:
            _joined_ns.pop()  # the script may try again
            raise
        if hosts:
            _early.clear()  # the group has the server now; the next group begins with an empty store
        for steps in _steps:
            steps.alive(joined=[begun / 1e9, _now_ns() / 1e9])
        return joined

    module.init_process_group = init_process_group


_early = []  # what rank 0 serves at MASTER_PORT before it joins


def _serve_clients(store):
    """Rank 0 serves MASTER_PORT as soon as it is a client there itself, not from its start on: a program may
    bind the port for something else, and one that it starts may do it, too.
    """
    import functools

    make = store.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        try:
            place = _place_of_client(*args, **kwargs) if os.getpid() in _home else None
            if place is not None and not _listens(place):
                _early.append(store(*place, is_master=True, wait_for_workers=False, multi_tenant=True))
        except Exception:  # torch will say what is wrong
            pass
        make(self, *args, **kwargs)

    store.__init__ = __init__


def _place_of_client(host_name, port, world_size=None, is_master=False, *rest, **more):
    """Where a client connects to, if this is the rank that serves there."""
    own = not is_master and os.environ["RANK"] == "0" and os.environ["MASTER_PORT"] == str(port)
    return (host_name, port) if own else None


def _listens(place):
    import socket

    try:
        socket.create_connection(place, 1.0).close()
        return True
    except ConnectionRefusedError:
        return False


def _await_first(backend=None, init_method=None, timeout=None, world_size=-1, rank=-1, store=None, **rest):
    """Until rank 0 listens, a second at most: torch waits up to half a second after an attempt in vain.
    Returns whether this is rank 0, and `init_process_group` uses the store at MASTER_PORT.
    """
    import time

    if store is not None or init_method not in (None, "env://"):
        return False
    if os.environ["RANK"] == "0" or rank == 0:
        return True
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline and not _listens(place):
        time.sleep(0.005)
    return False


_joined_ns = []  # when it joined the group of all


def _now_ns():
    import time

    return int(time.time() * 1e9)  # Python 3.6 has no `time_ns`


def _named(group, moment=None):
    """A script that destroys its groups and joins again has other groups of the same names and numbers: those
    of the second time are `0@2`. `moment`: of a call; None: now.
    """
    times = len(_joined_ns) if moment is None else sum(joined <= moment for joined in _joined_ns)
    return f"{group}@{times}" if group and times > 1 else group


_answering = []  # the socket on which it does


def _answer_from_now_on():
    if _answering or os.getpid() not in _home:
        return
    import socket
    import threading  # noqa: F401  it takes the thread that imports it first for the main thread

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _bind(listener, _home[0])
        _remove(_home[0] + ".last")  # of an earlier program of this container
        listener.listen(8)
        # Not a `threading.Thread`: scripts count those.
        _thread.start_new_thread(_answer, (listener,))
        _answering.append(listener)
        for steps in _steps if _imported else ():
            note_imports()
            steps.alive()
    except (OSError, RuntimeError):
        listener.close()


def _bind(listener, address):
    """In place of what an earlier program of this container left there."""
    folder, name = os.path.split(address)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{descriptor}/{name}"  # an address has 107 bytes at most
        _remove(short)
        listener.bind(short)
    finally:
        os.close(descriptor)


def _remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass


def _answer(listener):
    """Until the script closes this descriptor: what has its number then is the script's."""
    import json
    import time

    ours = os.fstat(listener.fileno()).st_ino
    while True:
        try:
            if os.fstat(listener.fileno()).st_ino != ours:
                return
        except OSError:
            return
        try:
            connection, _ = listener.accept()
            try:
                connection.settimeout(2.0)
                connection.sendall(json.dumps(_state()).encode())
            finally:
                connection.close()
        except Exception:
            # The launcher that asked has ended, no descriptor is free, or the interpreter exits.
            time.sleep(0.1)


def _state(ends=False):
    """`pid`; `time_ns`, now; `error`, the exception that ends it; `stack`, that of the exception, else of the
    main thread; `world_rank`, its rank for torch; `peer`, for whom it waits in send or recv; `groups`,
    `calls` and `arrivals`; `step`, the last one (`fleetrun_steps`); and what `also` has added.
    """
    import threading

    module = sys.modules.get(_TORCH)
    ends = ends or not threading.main_thread().is_alive()
    error = getattr(sys, "last_value", None) if ends else None  # else of a shell, which goes on
    entries, complete = _flight_record(module)
    groups = _groups(module, entries, complete)
    entries.sort(key=lambda each: each.get("time_created_ns", 0))
    frames = _frames(ends)[:_FRAMES]
    return {
        "error": "" if error is None else f"{type(error).__name__}: {error}"[:500],
        "pid": os.getpid(),
        "time_ns": _now_ns(),
        "stack": _rows(frames),
        "world_rank": _world_rank(module),
        "peer": _peer(frames, module),
        "groups": groups,
        "calls": [_call(each) for each in entries[-_CALLS:]],
        "arrivals": _arrivals(entries[-_ARRIVALS:]),
        **_told(),
    }


def _told():
    found = {}
    for name, ask in _more.items():
        try:
            found[name] = ask()
        except Exception:  # it changes while it is read
            pass
    return found


def _frames(ends):
    """Frames and their lines, innermost first; none of a script that has ended well."""
    import threading

    found = []
    trace = getattr(sys, "last_traceback", None) if ends else None
    while trace is not None:
        found.insert(0, (trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    frame = None if ends else sys._current_frames().get(threading.main_thread().ident)
    while frame is not None:
        found.append((frame, frame.f_lineno))
        frame = frame.f_back
    return found


def _rows(frames):
    """File, line, function and the text of the line; without the texts where the file cannot be read at once
    (a script lies on the same file system as the data for which it waits).
    """
    import linecache

    rows = [[frame.f_code.co_filename, line, frame.f_code.co_name, ""] for frame, line in frames]

    def read():
        try:
            for row in rows:
                row[3] = linecache.getline(row[0], row[1] or 0).strip()[:120]
        finally:
            _reading.release()

    if _reading.acquire(False):
        try:
            _thread.start_new_thread(read, ())
        except RuntimeError:  # there can be no more threads
            read()
        if _reading.acquire(timeout=0.3):
            _reading.release()
    return rows


def _world_rank(module):
    try:
        return module.get_rank() if module.is_initialized() else None
    except Exception:
        return None


def _peer(frames, module):
    """`["recv", 2, 7]` in `recv(..., src=2)`, the 7th call of its group; None for what is not known."""
    for frame, _ in frames:
        what = frame.f_code.co_name
        if what in ("send", "recv") and frame.f_globals.get("__name__") == _TORCH:
            values, end = frame.f_locals, "dst" if what == "send" else "src"
            group, peer, in_group = values.get("group"), values.get(end), values.get("group_" + end)
            try:
                if peer is None and in_group is not None:
                    peer = in_group if group is None else module.get_global_rank(group, in_group)
                number = _sequence(group or module.GroupMember.WORLD)
            except Exception:  # its groups may be destroyed
                number = None
            return [what, peer if isinstance(peer, int) else None, number]
    return None


def _sequence(group):
    """How many calls of the group there were, if its backend counts them: Gloo counts send and recv too."""
    try:
        return group._get_sequence_number_for_group()
    except Exception:
        return None


def _groups(module, entries, complete):
    """For each process group by its name: `ranks`; the number of the last collective that was `entered`; and
    whether it was made `again` with the same name, so that its numbers mean nothing.
    """
    last, again = {}, set()
    for each in entries:
        key, number = each["group"], each.get("collective_seq_id") or 0
        if not each.get("is_p2p"):
            if number < last.get(key, 0) or (number == last.get(key) and not _queued(each)):
                again.add(key)
            last[key] = number
    groups = {}
    for group, ranks in dict(getattr(getattr(module, "_world", None), "pg_group_ranks", {})).items():
        name, backends = _group_name(module, group), _backends(module, group)
        for key in [_key(name, each, backends) for each in backends] or [name]:
            entered = last.get(key, 0 if complete else _sequence(group))
            groups[key] = {"ranks": sorted(ranks), "entered": entered or 0, "again": key in again}
    return groups


def _group_name(module, group):
    return _named(getattr(module._world, "pg_names", {}).get(group, ""))


def _backends(module, group):
    """Those of `cpu:gloo,cuda:nccl`."""
    found = str(getattr(module._world, "pg_backend_config", {}).get(group, ""))
    return sorted({each.rpartition(":")[2] for each in found.split(",")} - {""})


def _key(name, backend, backends):
    """Each backend of a group has numbers of its own: then it counts for as many groups."""
    return "{} ({})".format(name, backend) if len(backends) > 1 else name


def _flight_record(module):
    """The entries of torch's flight recorders, that of NCCL after that of other backends, each in its order
    (a clock may be set back), with `group`; and whether they are all since the start.
    """
    import json

    backends = {}
    for group in list(getattr(getattr(module, "_world", None), "pg_names", {})):
        backends[_group_name(module, group)] = _backends(module, group)
    c10d = sys.modules.get("torch._C._distributed_c10d")
    entries, complete = [], True
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        try:
            found = json.loads(getattr(c10d, dump)(True, False)).get("entries") or []
        except Exception:
            continue
        complete = complete and (not found or found[0].get("record_id") == 0)
        entries += found
    for each in entries:
        name = _named(each["process_group"][0], each.get("time_created_ns", 0))
        backend = str(each.get("profiling_name", "")).partition(":")[0]
        each["group"] = _key(name, backend, backends.get(name, ()))
    return entries, complete and bool(entries)


def _queued(entry):
    """Whether the program does not wait for the call, but its GPU."""
    return str(entry.get("profiling_name", "")).startswith("nccl")


def _call(entry):
    """A call of a collective or of send and recv; `number` counts them in the group. `aside`: of another
    thread than the main one.
    """
    import threading

    point_to_point = bool(entry.get("is_p2p"))
    main = str(threading.main_thread().ident)
    return {
        "group": entry["group"],
        "operation": str(entry.get("profiling_name", "")).rpartition(":")[2],
        "number": entry.get("p2p_seq_id" if point_to_point else "collective_seq_id"),
        "point_to_point": point_to_point,
        "queued": _queued(entry),
        "aside": str(entry.get("thread_id") or main) != main,
        "sizes": entry.get("input_sizes"),
        "dtypes": entry.get("input_dtypes"),
        "entered_ns": entry.get("time_created_ns"),
        "done": bool(entry.get("retired")) or entry.get("state") == "completed",
    }


def _arrivals(entries):
    """For each group the numbers of its collectives and when they were entered, in microseconds. Not of NCCL:
    there a program runs ahead of its GPU, so that this does not tell who is waited for.
    """
    found = {}
    for each in entries:
        if not each.get("is_p2p") and not _queued(each):
            moment = [each.get("collective_seq_id"), each.get("time_created_ns", 0) // 1000]
            found.setdefault(each["group"], []).append(moment)
    return found

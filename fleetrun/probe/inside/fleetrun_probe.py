"""The probe runs inside a process of the job. It answers the launcher, and leaves information at the end.

- STACKS_SIGNAL writes the stacks of all threads to stderr, which is the log. C code writes them, so it also
  works while the interpreter is stuck.
- A script that reaches its end notes that in its error file (`channels.read_finished`), as the last action of
  Python. A later crash, while C++ objects are destroyed, then loses nothing. A script that ends with an
  exception leaves the exception there, as torchrun's `@record` does.
- The first client of MASTER_PORT in rank 0 finds a TCPStore there, as under torchrun.
- Steps of torch's optimizers are counted and reported (`fleetrun_steps`).
- `breakpoint()`, a signal of `fleetrun debug` and, with `--debug_on_error`, an exception stop in pdb
  (`fleetrun_debug`).
- With `--warm`, a file beside the socket lists the imported modules from the first step on, for the next
  zygote (`fleetrun_zygote`).
- A thread answers on the socket of FLEETRUN_PROBE_SOCKET with a JSON object (`_state`), and closes the
  connection. It starts with `torch.distributed.init_process_group`, or with the first call of `also` by
  fleetrun's runtime. It needs the interpreter's lock, which a wait in a collective releases. At its end the
  process leaves its last state in a file beside the socket.

The probe adds no work to a step. The thread sleeps until a request arrives, and torch keeps its record of
collectives (the flight recorder) anyway. The probe uses private names of torch only if they exist. It runs in
any Python 3, also without fleetrun, so it uses only the standard library.
"""

import _thread
import atexit
import faulthandler
import os
import signal
import sys

import fleetrun_steps

_STACKS_SIGNAL = signal.SIGRTMIN + 12  # channels.STACKS_SIGNAL
_DEBUG_SIGNAL = signal.SIGRTMIN + 13  # channels.DEBUG_SIGNAL
_STDERR = 2
_TORCH = "torch.distributed.distributed_c10d"
_OPTIMIZERS = "torch.optim.optimizer"
_FRAMES = 20
_CALLS = 20
_ARRIVALS = 200


def install(address, imported=None):
    """Install the probe in the first Python of a process of the job. Its child processes have no probe.

    `address`: the path of the socket. `imported` returns the names of modules for a zygote. Without it, no
    list is written.
    """
    _show_stacks()
    _imported[:] = [imported] if imported is not None else []
    _settle(address)
    _ending.watch()
    sys.meta_path.insert(0, WhenImported(_TORCH, _when_joined))
    sys.meta_path.insert(0, WhenImported("pdb", lambda pdb: _load_debugger()))
    signal.signal(_DEBUG_SIGNAL, lambda number, frame: _load_debugger().stop(frame))
    mark, path = map(os.environ.get, ("FLEETRUN_CONTAINER", "FLEETRUN_PROGRESS"))
    if mark and path:
        steps = fleetrun_steps.Steps(mark, path)
        steps.on_start = note_imports
        _steps.append(steps)
        _more["step"] = steps.last
        atexit.register(steps.end)
        sys.meta_path.insert(0, WhenImported(_OPTIMIZERS, steps.watch))


def _settle(address):
    home[:] = [address, os.getpid(), os.environ.get("FLEETRUN_ERROR_FILE", "")]


def renew(address):
    """Become the probe of this process, which a zygote has forked."""
    mark, path = map(os.environ.get, ("FLEETRUN_CONTAINER", "FLEETRUN_PROGRESS"))
    _settle(address)
    for steps in _steps:
        steps.renew(mark, path)
    for take in _marked:
        take(mark)


_steps = []
_marked = []  # called when a process that a zygote has forked gets its name
home = []  # address, the ID of the process that answers, which excludes forks, and the error file
_more = {}
_imported = []  # returns the imported modules, for a zygote
_reading = _thread.allocate_lock()  # held while the text of a script is read


def also(name, ask):
    """Start answering. `ask` returns a value for JSON under `name`, and another thread calls it."""
    _more[name] = ask
    _answer_from_now_on()


def take_mark(take):
    """Register `take`, which `renew` calls with the name of this process as in FLEETRUN_CONTAINER."""
    _marked.append(take)


def hand_steps(take, last):
    """Pass the number of each step of torch's optimizers to `take`, which reports progress instead.

    `last` returns the last step of all: its number, the seconds since its end, and its duration in seconds.
    """
    for steps in _steps:
        steps.report = take
        _more["step"] = last


def _show_stacks():
    try:
        if signal.getsignal(_STACKS_SIGNAL) is signal.SIG_DFL:
            os.fstat(_STDERR)
            faulthandler.register(_STACKS_SIGNAL, file=_STDERR, all_threads=True)
    except (OSError, ValueError, RuntimeError):  # stderr is closed
        pass


def note_imports():
    """Write the list of imports for the next zygote, once most imports are done."""
    for imported in _imported if os.getpid() in home else ():
        try:
            _leave(home[0] + ".imports", {"pid": os.getpid(), "modules": imported()})
        except Exception:  # without room or after another error, there is no list
            pass


# ---- The debugger


def _load_debugger():
    """Load the debugger, late because it imports pdb. It replaces the function that `breakpoint()` calls."""
    sys.path.insert(0, os.path.dirname(__file__))
    import fleetrun_debug

    sys.path.remove(os.path.dirname(__file__))
    return fleetrun_debug


def report(**fields):
    """Report that this process is alive, with these fields."""
    for steps in _steps:
        steps.alive(**fields)


# ---- The end of a script


class _Ending:
    """Notes that the script has reached its end, and writes that into the error file."""

    _exits_with_error = False

    def watch(self):
        leave = sys.exit

        def exit(*code):
            self._exits_with_error = self._exits_with_error or bool(code and code[0] not in (None, 0))
            leave(*code)

        exit.__doc__ = leave.__doc__
        sys.exit = exit
        atexit.register(self._at_exit)  # the first registered function is called last

    def _at_exit(self):
        mistake = isinstance(getattr(sys, "last_value", None), (ImportError, SyntaxError))
        if os.getpid() not in home:
            return
        error = getattr(sys, "last_value", None)
        if os.environ.get("FLEETRUN_DEBUG") == "error" and isinstance(error, Exception):
            _load_debugger().keep(error)
        note_imports()
        if not ("torch" in sys.modules or mistake):
            return
        for leave in (self._leave_state, self._write_end, self._end_sooner):
            try:
                leave()
            except Exception:  # each part is useful without the others
                pass

    def _leave_state(self):
        if _answering:
            _leave(home[0] + ".last", _state(ends=True))

    def _write_end(self):
        path = home[2]
        if not path or _has_more(path):  # the runtime may have written an error
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            _leave(path, _error_record(error))
        elif not self._exits_with_error and not _may_raise_exit():
            parent = os.getppid()
            _leave(path, {"finished": os.getpid(), "below": [parent, _program(parent)]})

    @staticmethod
    def _end_sooner():
        """End a failed process sooner, because others wait for its end.

        Most of that time would go into a search for cycles among the hundreds of thousands of objects of
        torch. The kernel frees objects in cycles, and Python promises no more. Open files are flushed first.
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


_ending = _Ending()


def _has_more(path):
    """Return True if the file holds more than the note of an earlier program that it has reached its end."""
    try:
        with open(path, "rb") as file:
            return not file.read(20).startswith(b'{"finished":')
    except FileNotFoundError:
        return False


def _program(pid):
    """Return the kernel's name of a process, even if it has ended."""
    with open("/proc/{}/comm".format(pid), "rb") as file:
        return file.read().decode("utf-8", "replace").strip()


def _leave(path, what):
    """Write a file that the launcher never sees half written. Other users cannot read it."""
    import json

    aside = f"{path}.{os.getpid()}"
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(what, file)
    os.replace(aside, path)


def _error_record(error):
    """Build the record of an exception, as `channels.write_error` does."""
    import traceback

    now = _now_ns()
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    extra = {"py_callstack": "".join(lines), "timestamp": str(now // 1000000000), "time_ns": now}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}


def _may_raise_exit():
    """Return True if code of the user names SystemExit.

    If the code raises it, the exit code is unknown, unlike with `sys.exit`.
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


# ---- The import of torch


class WhenImported:
    """A finder that only observes. It calls `then` with one module, right after that module was executed."""

    def __init__(self, name, then):
        self._name = name
        self._then = then

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        place = sys.meta_path.index(self)
        del sys.meta_path[place]
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)  # Python skips a finder without it, too
                spec = find(name, path, target) if find is not None else None
                if spec is not None:
                    self._follow(spec.loader)
                    return spec
            return None
        finally:
            sys.meta_path.insert(place, self)  # somebody may only look for the module

    def _follow(self, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            del loader.exec_module
            sys.meta_path.remove(self)
            self._then(module)

        loader.exec_module = exec_module


def _when_joined(module):
    """Start answering when this process joins its first group."""
    import functools

    join = module.init_process_group
    for change, name in ((_serve_clients, "TCPStore"), (_outlive, "Reducer"), (_outlive, "Logger")):
        try:
            change(getattr(sys.modules["torch._C._distributed_c10d"], name))
        except Exception:  # an old torch
            pass

    @functools.wraps(join)
    def init_process_group(*args, **kwargs):
        start = _now_ns()
        _joined_ns.append(start)
        _answer_from_now_on()  # also while it waits for the others here
        hosts = False
        try:
            hosts = _await_first(*args, **kwargs)
        except Exception:  # torch will report the error
            pass
        try:
            joined = join(*args, **kwargs)
        except BaseException:
            _joined_ns.pop()  # the script may try again
            raise
        if hosts:
            _early.clear()  # the group has the server now, and the next group starts with an empty store
        for steps in _steps:
            steps.alive(joined=[start / 1e9, _now_ns() / 1e9])
        return joined

    module.init_process_group = init_process_group


_early = []  # the server of rank 0 at MASTER_PORT before it joins


def _serve_clients(store):
    """Serve MASTER_PORT in rank 0 when it first becomes a client there.

    Serving from the start would be too early. A program, or one that it starts, may bind the port for another
    purpose.
    """
    import functools

    make = store.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        try:
            place = _place_of_client(*args, **kwargs) if os.getpid() in home else None
            if place is not None and not _listens(place):
                _early.append(store(*place, is_master=True, wait_for_workers=False, multi_tenant=True))
        except Exception:  # torch will report the error
            pass
        make(self, *args, **kwargs)

    store.__init__ = __init__


def _outlive(owner):
    """Keep the arguments of a DDP model's reducer, or of its logger, until the object is destroyed.

    A model may outlive `destroy_process_group`. Its reducer then destroys the group, and waits for the
    threads of Gloo while it holds the interpreter's lock, for which these threads may wait
    (pytorch/pytorch#56297). A reference from Python destroys the group without the lock. The logger owns the
    reducer.
    """
    import functools
    import weakref

    make = owner.__init__

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        weakref.finalize(self, id, (args, kwargs)).atexit = False  # it ends after the destructor

    owner.__init__ = __init__


def _place_of_client(host_name, port, world_size=None, is_master=False, *rest, **more):
    """Return the address of a client, if this process is the rank that serves there."""
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
    """Wait until rank 0 listens, at most a second, because torch waits up to half a second after a failed
    attempt.

    Return True if this is rank 0, and `init_process_group` uses the store at MASTER_PORT.
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


_joined_ns = []  # times at which it joined the group of all ranks


def _now_ns():
    import time

    return int(time.time() * 1e9)  # Python 3.6 has no `time_ns`


def _named(group, moment=None):
    """Name a group. A script that destroys its groups and joins again reuses names and numbers, so the second
    group is called `0@2`.

    `moment`: the time of a call. None: now.
    """
    times = len(_joined_ns) if moment is None else sum(joined <= moment for joined in _joined_ns)
    return f"{group}@{times}" if group and times > 1 else group


_answering = []  # the socket on which it answers


def _answer_from_now_on():
    if _answering or os.getpid() not in home:
        return
    import socket
    import threading  # noqa: F401  it takes the thread that imports it first for the main thread

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bind(listener, home[0])
        remove(home[0] + ".last")  # left by an earlier program with this address
        listener.listen(8)
        # Scripts count `threading.Thread` objects, so this thread is not one.
        _thread.start_new_thread(_answer, (listener,))
        _answering.append(listener)
        for steps in _steps if _imported else ():
            note_imports()
            steps.alive()
    except (OSError, RuntimeError):
        listener.close()


def bind(listener, address):
    """Bind the socket, in place of a socket that an earlier program left at this address."""
    folder, name = os.path.split(address)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        short = f"/proc/self/fd/{descriptor}/{name}"  # an address has at most 107 bytes
        remove(short)
        listener.bind(short)
    finally:
        os.close(descriptor)


def remove(path):
    try:
        os.unlink(path)
    except OSError:
        pass


def _answer(listener):
    """Answer until the script closes this descriptor. Its number may then belong to the script."""
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
            # The client has ended, no descriptor is free, or the interpreter exits.
            time.sleep(0.1)


def _state(ends=False):
    """Collect the state of this process, for JSON.

    - `pid`, and `time_ns`, the current time
    - `error`: the exception that ends the process
    - `stack`: the stack of the exception, else of the main thread
    - `world_rank`: its rank for torch
    - `peer`: the rank for which it waits in send or recv
    - `groups`, `calls` and `arrivals`: see `_groups`, `_call` and `_arrivals`
    - `step`: the last step (`fleetrun_steps`)
    - the values of `also`
    """
    import threading

    module = sys.modules.get(_TORCH)
    ends = ends or not threading.main_thread().is_alive()
    # otherwise the exception may belong to a shell, which continues
    error = getattr(sys, "last_value", None) if ends else None
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
        **_offered(),
    }


def _offered():
    found = {}
    for name, ask in _more.items():
        try:
            found[name] = ask()
        except Exception:  # it changes while it is read
            pass
    return found


def _frames(ends):
    """Return frames and their lines, innermost first. Empty for a script that has succeeded."""
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
    """Return file, line, function and source text of each frame.

    The texts are empty if the file cannot be read quickly. A script may be on the same file system as the
    data for which it waits.
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
        except RuntimeError:  # the limit of threads is reached
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
    """Return the call of send or recv, with its peer and its number in its group.

    For example, `["recv", 2, 7]` is `recv(..., src=2)`, the 7th call of its group. Unknown values are None.
    """
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
    """Return the number of calls of the group, if its backend counts them. Gloo counts send and recv too."""
    try:
        return group._get_sequence_number_for_group()
    except Exception:
        return None


def _groups(module, entries, complete):
    """Describe each process group by its name.

    `ranks`: its ranks. `entered`: the number of the last entered collective. `again`: the group was created
    again with the same name, so its numbers are meaningless.
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
    """Return the backends of a group, such as gloo and nccl for `cpu:gloo,cuda:nccl`."""
    found = str(getattr(module._world, "pg_backend_config", {}).get(group, ""))
    return sorted({each.rpartition(":")[2] for each in found.split(",")} - {""})


def _key(name, backend, backends):
    """Name a group and its backend. Each backend counts separately, so it appears as a separate group."""
    return "{} ({})".format(name, backend) if len(backends) > 1 else name


def _flight_record(module):
    """Return the entries of torch's flight recorders, and True if they reach back to the start.

    The entries of NCCL follow the entries of other backends. Entries keep their order, because a clock may be
    set back. Each gets its `group`.
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
    """Return True if the GPU waits for the call, while the program continues."""
    return str(entry.get("profiling_name", "")).startswith("nccl")


def _call(entry):
    """Describe a call of a collective, or of send and recv.

    `number` counts calls in the group. `aside`: the call runs in another thread than the main thread.
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
    """Return for each group the numbers of its collectives and the times of entering them, in microseconds.

    The result omits NCCL. With NCCL, a program runs ahead of its GPU, so these times do not reveal
    stragglers.
    """
    found = {}
    for each in entries:
        if not each.get("is_p2p") and not _queued(each):
            moment = [each.get("collective_seq_id"), each.get("time_created_ns", 0) // 1000]
            found.setdefault(each["group"], []).append(moment)
    return found

"""A standby process (`--warm`). It starts like the process that it may replace and imports the same modules
in the same order. It waits before the first statement of the script.

After the imports, it reports to the launcher which modules read changing environment variables during their
import. When the launcher needs the standby, it sends the changed variables, and the script starts.

Any error ends the standby, because the script must never run in it without a request. It uses only the
standard library.
"""

import os
import sys

ROOM = 1 << 20  # bytes of a list of imports, and of a message of the launcher

_LIBRARY = os.path.dirname(os.__file__) + "/"
_ROOT = os.path.abspath(__file__).rpartition("/fleetrun/")[0]
_OURS = (_ROOT + "/fleetrun/", _ROOT + "/trainers/")
_DEVICES = ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/accel", "/dev/davinci", "/dev/xpu")
_ACT_AT_ONCE = frozenset({"mpi4py.MPI", "pycuda.autoinit"})  # importing them joins MPI or takes a GPU
_NAME = "standby"
_ANOTHER = "{} of the script is another one: {}"


class Refused(Exception):
    """The reason why this process cannot be a standby."""


class Watch:
    """A finder that only observes. It notes the order of imports, and changes of the environment before each
    import.

    Scripts set environment variables for libraries (OMP_NUM_THREADS, HF_HOME) before they import them.
    """

    def __init__(self):
        self._environ = {}
        self._noted = []
        self._names = set()

    def begin(self):
        self._environ = dict(_variables())
        sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        now, changes = _variables(), {}
        if now != self._environ:
            before, self._environ = self._environ, dict(now)
            changes = {each: now.get(each) for each in before.keys() | now.keys()}
            changes = {each: value for each, value in changes.items() if before.get(each) != value}
        if changes or name not in self._names:  # a script may look for a missing module again and again
            self._names.add(name)
            self._noted.append((name, changes))
        return None

    def imported(self):
        """Return [name, file, preceding changes of the environment] of the installed modules that this
        process has imported, in order. The user's modules are omitted.
        """
        found, seen, changes = [], set(), {}
        for name, more in list(self._noted):
            changes.update(more)
            path = _path(sys.modules.get(name))
            if path and _installed(path) and name not in _ACT_AT_ONCE and name not in seen:
                seen.add(name)
                found.append([name, path, {_text(each): _text(value) for each, value in changes.items()}])
                changes = {}
        return found


def _text(value):
    return None if value is None else os.fsdecode(value)


def _variables():
    return getattr(os.environ, "_data", os.environ)  # comparing the bytes takes a microsecond


def _path(module):
    try:
        path = module.__spec__.origin
    except Exception:  # for any object that a library has put there
        return None
    return path if type(path) is str and path.startswith("/") else None


def _installed(path):
    return "-packages/" in path or path.startswith(_LIBRARY) or path.startswith(_OURS)


class Reads:
    """Notes which modules read or set one of these environment variables during their import."""

    def __init__(self, variables):
        self._variables = frozenset(variables)
        self.readers = {}
        """By the name of a module. Modules that were importing the reader are included."""
        self._importing = None

    def begin(self):
        """Start watching. Raises TypeError if `os.environ` has been replaced."""
        reads = self

        class Watched(type(os.environ)):
            def __getitem__(self, key):
                reads._note(key)
                return super().__getitem__(key)

            def __setitem__(self, key, value):
                reads._note(key)
                super().__setitem__(key, value)

            def __delitem__(self, key):
                reads._note(key)
                super().__delitem__(key)

            def __iter__(self):
                reads._note(None)
                return super().__iter__()

        self._before = type(os.environ)
        # the same objects, because modules keep references to them
        os.environ.__class__ = os.environb.__class__ = Watched

    def end(self):
        os.environ.__class__ = os.environb.__class__ = self._before

    def during(self, name):
        """Set the module that is imported from now on. None: no module."""
        self._importing = name

    def _note(self, key):
        """Note an access. None: all variables are read."""
        if isinstance(key, bytes):
            key = os.fsdecode(key)
        if self._importing is None or (key is not None and key not in self._variables):
            return
        names, frame = {self._importing}, sys._getframe(2)
        if key == "FLEETRUN_CONTAINER" and _reads_of(frame).startswith(_OURS):
            return  # it receives the new value through `set_mark` of the probe
        while frame is not None and frame.f_code is not _import.__code__:
            if frame.f_code.co_name == "<module>":
                names.add(frame.f_globals.get("__name__"))
            frame = frame.f_back
        for name in names:
            self.readers.setdefault(name, set()).update(self._variables if key is None else (key,))


def _reads_of(frame):
    """Return the file of the code that reads, outside the methods of a mapping."""
    while frame.f_code.co_filename.startswith("<frozen ") and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


def park(channel, listed, reads):
    """Import the modules listed in the file `listed`, then wait for the launcher's start on the descriptor
    `channel`.

    The variables of `reads` may then have other values. The process ends if the launcher ends, or if the
    imports do anything that a standby must not do.
    """
    import json

    try:
        os.set_inheritable(channel, False)
        before = _name("self")
        _rename(before, _NAME)
        output = _divert()
        said = {}
        try:
            reads.during(None)
            try:
                _import_all(json.loads(_contents(listed))["modules"], reads.during)
            finally:
                reads.end()
            said["memory"] = _own_memory()
            said["readers"] = {name: sorted(read) for name, read in reads.readers.items()}
        except Refused as refusal:
            said["refused"] = str(refusal)
        os.write(channel, json.dumps(said).encode() + b"\n")
        news = _contents(channel)  # waits
        changes = json.loads(news)  # empty if the launcher has ended, which raises an error
        for name in changes["unset"]:
            os.environ.pop(name, None)
        os.environ.update(changes["set"])
        sys.modules["fleetrun_probe"].set_mark(os.environ.get("FLEETRUN_CONTAINER"))
        _restore(output)
        _rename(_NAME, before)
        os.close(channel)
    except BaseException:
        os._exit(1)


def _contents(source):
    with open(source, "rb", closefd=isinstance(source, str)) as file:
        return file.read(ROOM)


def _import_all(modules, during):
    """Import the modules as the script will, and pass each name to `during`.

    The script's directory comes first, so that modules that shadow a library also do so here. The variables
    that the script sets are set before.
    """
    import importlib

    before, open_before = set(sys.modules), _open_files()
    folder = _folder_of_script()
    if folder is not None:
        sys.path.insert(0, folder)
    replaced = {}
    for name, path, changes in modules:
        _set_variables(changes, replaced)
        if name not in sys.modules:
            during(name)
            _import(name, path)
            during(None)
    for name, (ours, was) in replaced.items():
        if os.environ.get(name) == ours:
            _set_variable(name, was)
    if folder is not None:
        sys.path.remove(folder)
        sys.path_importer_cache.pop(folder, None)
    importlib.invalidate_caches()
    _check_modules(set(sys.modules) - before)
    _check_effects(_open_files() - open_before)


def _import(name, path):
    import importlib.util

    before = len(sys.modules)
    try:
        _check_found(name, path)
        importlib.import_module(name)
    except Refused:
        raise
    except Exception as error:
        if len(sys.modules) != before:
            # The remaining part of the module would be missing when the script imports it.
            raise Refused("{} cannot be imported ahead: {!r}".format(name, error)) from None
        return
    if _path(sys.modules.get(name)) != path:
        raise Refused(_ANOTHER.format(name, path))


def _check_found(name, path):
    """Check a module before any of its code runs, because the list of a spare comes from another node.

    A module that cannot be found is left to the import, which then fails.
    """
    import importlib.util  # `_import` has loaded it

    parts = name.split(".")
    if parts[-1] == "__main__":
        raise Refused("{} is a program".format(name))
    for end in range(1, len(parts) + 1):  # Python imports the package to find a module in it
        above = ".".join(parts[:end])
        if above in sys.modules:
            continue
        spec = importlib.util.find_spec(above)
        if spec is None:
            return
        if spec.has_location and not _installed(spec.origin or ""):
            raise Refused("{} is not an installed package: {}".format(above, spec.origin))
        if above == name and spec.origin != path:
            raise Refused(_ANOTHER.format(name, path))


def _set_variables(changes, replaced):
    """Set variables. `replaced` receives the new and the old value, by name."""
    for name, value in changes.items():
        now = os.environ.get(name)
        if now != value:
            replaced[name] = (value, replaced[name][1] if name in replaced else now)
            _set_variable(name, value)


def _set_variable(name, value):
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _folder_of_script():
    """Return the first entry that Python will add to `sys.path`. None: no entry."""
    if getattr(sys.flags, "safe_path", False):
        return None
    if sys.argv[0] == "-m":
        return os.getcwd()
    return os.path.dirname(os.path.realpath(sys.argv[0]))


def _check_modules(names):
    for name in names:
        path = _path(sys.modules.get(name))
        if path and path.endswith(".py") and not _installed(path):
            raise Refused("an installed package imports {}".format(path))


def _open_files():
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink("/proc/self/fd/" + number)))
        except OSError:  # the descriptor of the listing
            pass
    return found


def _check_effects(opened):
    for _, target in sorted(opened):
        if target.startswith(_DEVICES):
            raise Refused("the imports open {}".format(target))
        if target.startswith("socket:"):
            raise Refused("the imports open a connection")
    with open("/proc/self/task/{}/children".format(os.getpid())) as children:
        if children.read().strip():
            raise Refused("the imports start a process")


def _own_memory():
    """Return the bytes that this process shares with no other process."""
    with open("/proc/self/smaps_rollup") as file:
        rows = [line.split() for line in file]
    return sum(int(row[1]) << 10 for row in rows if row[0] in ("Private_Clean:", "Private_Dirty:"))


# ---- Output during imports belongs at the start of the script's output


def _divert():
    """Redirect stdout and stderr into memory. Return both as they were, and the memory."""
    memory = os.memfd_create("output of imports")
    before = (os.dup(1), os.dup(2))
    os.dup2(memory, 1)
    os.dup2(memory, 2)
    return (*before, memory)


def _restore(output):
    out, err, memory = output
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(out, 1)
    os.dup2(err, 2)
    size = os.lseek(memory, 0, os.SEEK_END)
    if size:
        os.write(1, os.pread(memory, size, 0))
    for descriptor in output:
        os.close(descriptor)


def _rename(was, name):
    """Rename all threads that have the old name. Threads that libraries have started inherit it."""
    for task in os.listdir("/proc/self/task"):
        task = "self/task/" + task
        try:
            if _name(task) == was:
                with open("/proc/{}/comm".format(task), "w") as file:
                    file.write(name)
        except OSError:  # the thread has ended
            pass


def _name(task):
    with open("/proc/{}/comm".format(task)) as file:
        return file.read().rstrip("\n")

"""Find, watch and repeat the imports of a script (`--warm`). A rank notes what it imports, and a zygote
(`fleetrun_zygote`) imports it before the script starts.

Without a list of an earlier run, `leading` reads the imports at the start of the script. It uses only the
standard library.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

_LIBRARY = os.path.dirname(os.__file__) + "/"
_ROOT = os.path.abspath(__file__).rpartition("/fleetrun/")[0]
_OURS = (_ROOT + "/fleetrun/", _ROOT + "/trainers/")
_ACT_AT_ONCE = frozenset({"mpi4py.MPI", "pycuda.autoinit"})  # importing them joins MPI or takes a GPU
_LOOK_FOR_OWN = ("numba.core.config", "fsspec.config")  # they read all variables, and use only their own
_ANOTHER = "{} of the script is another one: {}"


class Refused(Exception):
    """The reason why the processes start cold."""


class Watch:
    """A finder that only observes. It notes the order of imports, and changes of the environment before each
    import.

    Scripts set environment variables for libraries (OMP_NUM_THREADS, HF_HOME) before they import them.

    It also writes down the files of the user's modules immediately (`--watch`).
    """

    def __init__(self):
        self._environ = {}
        self._noted = []
        self._names = set()

    def begin(self, address):
        """Watch from now on. A forked process calls it again, with its own environment and probe."""
        self._environ = dict(_variables())
        self._files = address + ".files"
        if self not in sys.meta_path:
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
            self._write_files(name, path)
        return None

    def _write_files(self, name, path):
        """Write the file of a module of the user. For a missing module, write the files that it may get."""
        path = [each for each in (sys.path if path is None else path) if type(each) is str]
        if all(_installed(each + "/") for each in path):
            return
        spec = PathFinder.find_spec(name, path)
        if spec is None and name not in sys.builtin_module_names:
            missing = os.path.join(path[0], name.rpartition(".")[2])
            found = [missing + ".py", missing + "/__init__.py"]
        else:
            found = [spec.origin] if spec and spec.has_location and not _installed(spec.origin) else []
        for each in found:
            try:
                state = os.stat(each).st_mtime_ns if spec else -1  # watch._MISSING
                with open(self._files, "ab") as file:
                    file.write(b"%d %s\n" % (state, os.fsencode(os.path.abspath(each))))
            except OSError:  # a full disk
                pass

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

        class Watched(type(os.environ)):  # the names alone are the same for all ranks
            def __getitem__(self, key):
                reads._note(key)
                return super().__getitem__(key)

            def __setitem__(self, key, value):
                reads._note(key)
                super().__setitem__(key, value)

            def __delitem__(self, key):
                reads._note(key)
                super().__delitem__(key)

        self._before = type(os.environ)
        # the same objects, because modules keep references to them
        os.environ.__class__ = os.environb.__class__ = Watched

    def end(self):
        os.environ.__class__ = os.environb.__class__ = self._before

    def during(self, name):
        """Set the module that is imported from now on. None: no module."""
        self._importing = name

    def _note(self, key):
        key = os.fsdecode(key) if isinstance(key, bytes) else key
        if self._importing is None or key not in self._variables:
            return
        names, frame = {self._importing}, sys._getframe(2)
        while frame.f_code.co_filename.startswith("<frozen ") and frame.f_back is not None:
            frame = frame.f_back  # out of the methods of a mapping
        if key == "FLEETRUN_CONTAINER" and frame.f_code.co_filename.startswith(_OURS):
            return  # it receives the new value through `take_mark` of the probe
        if frame.f_globals.get("__name__") in _LOOK_FOR_OWN:
            return
        while frame is not None and frame.f_code is not _import.__code__:
            if frame.f_code.co_name == "<module>":
                names.add(frame.f_globals.get("__name__"))
            frame = frame.f_back
        for name in names:
            self.readers.setdefault(name, set()).add(key)


def import_all(modules, without, during):
    """Import the modules as the script will, and pass each name to `during`.

    `modules` are those of an earlier run, or None. The directory of the script comes first, so that modules
    that shadow a library also do so here. Variables that the script sets are set before. Modules `without`,
    and the modules in them, are left to the script.
    """
    import importlib

    before, here = set(sys.modules), os.getcwd()
    folder = _folder_of_script()
    if folder is not None:
        sys.path.insert(0, folder)
    replaced, above = {}, tuple(name + "." for name in without)
    for name, path, changes in _first_time(leading()) if modules is None else modules:
        _set_variables(changes, replaced)
        if name not in sys.modules and name not in without and not name.startswith(above):
            during(name)
            _import(name, path)
            during(None)
    for name, (ours, was) in replaced.items():
        if os.environ.get(name) == ours:
            set_variable(name, was)
    if folder is not None:
        sys.path.remove(folder)
        sys.path_importer_cache.pop(folder, None)
    importlib.invalidate_caches()
    _check_modules(set(sys.modules) - before)
    if os.getcwd() != here:
        raise Refused("the imports change the working directory")


def _first_time(names):
    """Yield names as a list of an earlier run has them. The first optimizer of torch imports half as much as
    torch does.
    """
    for name, attribute in names:
        above, _, last = name.rpartition(".")
        if not (attribute and hasattr(sys.modules.get(above), last)):
            yield name, None, {}
    if "torch" in sys.modules:
        yield "torch._dynamo", None, {}


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
    if path is not None and _path(sys.modules.get(name)) != path:
        raise Refused(_ANOTHER.format(name, path))


def _check_found(name, path):
    """Check a module before any of its code runs, because the list of a spare comes from another node.

    A module that cannot be found is left to the import, which then fails.
    """
    import importlib.util

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
        if above == name and path is not None and spec.origin != path:
            raise Refused(_ANOTHER.format(name, path))


def _set_variables(changes, replaced):
    """Set variables. `replaced` receives the new and the old value, by name."""
    for name, value in changes.items():
        now = os.environ.get(name)
        if now != value:
            replaced[name] = (value, replaced[name][1] if name in replaced else now)
            set_variable(name, value)


def set_variable(name, value):
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


# ---- The imports at the start of a script


def leading():
    """Return the installed modules that the script imports before its first statement that acts. True marks a
    name that may be an attribute instead.

    Imports of the user's modules count as long as these modules only import and define. They do not run.
    """
    folder, words = _folder_of_script(), getattr(sys, "orig_argv", [])
    scan, script = _Scan([*([] if folder is None else [folder]), *sys.path]), sys.argv[0]
    if script == "-c":
        scan.text(words[words.index("-c") + 1] if "-c" in words else "", "")
    elif script == "-m":
        name = words[words.index("-m") + 1] if "-m" in words else ""
        if scan.module(name) and name in scan.packages:
            scan.module(name + ".__main__")
    else:
        scan.file(os.path.join(script, "__main__.py") if os.path.isdir(script) else script, "")
    return scan.names


class _Scan:
    def __init__(self, path):
        self.names = []
        self.packages = set()
        self._path = path
        self._defines = {}  # by the name of a module of the user: True if it only imports and defines

    def file(self, path, package):
        """Note the imports of a file in this package. Return True if it only imports and defines."""
        try:
            with open(path, "rb") as file:
                return self.text(file.read(), package)
        except OSError:
            return False

    def text(self, text, package):
        import ast

        try:
            return self._only_defines(ast.parse(text).body, package)
        except (SyntaxError, ValueError, RecursionError):
            return False

    def _only_defines(self, statements, package):
        return all(self._defined(each, package) for each in statements)

    def _defined(self, node, package):
        import ast

        if isinstance(node, ast.Import):
            return all(self.module(each.name) for each in node.names)
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            name = ".".join(filter(None, (*base, node.module)))
            return self.module(name) and all(
                self.module(name + "." + each.name, True) for each in node.names if each.name != "*"
            )
        if isinstance(node, (ast.Try, ast.ClassDef)):
            return self._only_defines(node.body, package)
        if isinstance(node, ast.If):  # no choice but `if TYPE_CHECKING` is known
            return "'TYPE_CHECKING'" in ast.dump(node.test) and not node.orelse
        if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Expr)):
            plain = all(isinstance(each, ast.Name) for each in getattr(node, "targets", ()))
            return plain and not any(isinstance(each, ast.Call) for each in ast.walk(node))
        return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Pass))

    def module(self, name, attribute=False):
        """Note an installed module, or the imports of a module of the user. Return False if that one acts."""
        from importlib.machinery import PathFinder

        parts, path = name.split("."), self._path
        for end in range(1, len(parts) + 1):
            above = ".".join(parts[:end])
            spec = PathFinder.find_spec(above, path)
            if spec is None:  # built in, missing, or an attribute
                return True
            path = spec.submodule_search_locations
            if spec.has_location and _installed(spec.origin or ""):
                self.names.append((name, attribute))
                return True
            if path is not None:
                self.packages.add(above)
            if spec.has_location and above not in self._defines:
                self._defines[above] = True  # also while it is read, for modules that import each other
                package = above if path is not None else above.rpartition(".")[0]
                self._defines[above] = self.file(spec.origin, package)
            if not self._defines.get(above, True):
                return False
            if path is None:
                return True
        return True

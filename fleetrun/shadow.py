"""Find a second module named `trainers`. fleetrun's runtime has this name, and a user's directory or file may
have it too.

Report which of the two Python imports, and load the runtime for `from fleetrun import fleet`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from fleetrun.aliases import Environ
from fleetrun.values import frozen

OURS = Path(__file__).resolve().parents[1] / "trainers"
"""fleetrun's runtime, installed beside the launcher."""

WAY_OUT = "Rename your `trainers`, or move it into a package (`mypackage.trainers`)."

# ---- `from fleetrun import fleet`


def load_fleet() -> ModuleType:
    """Return the module `trainers.fleet` of fleetrun's runtime. Raises ImportError if another `trainers` was
    imported before.
    """
    from importlib import import_module  # late, as below: the launcher works without it

    present = sys.modules.get("trainers")
    if present is None:
        # Load the runtime by its path, because another `trainers` may come first in sys.path.
        from importlib.util import module_from_spec, spec_from_file_location

        spec = spec_from_file_location(
            "trainers", OURS / "__init__.py", submodule_search_locations=[str(OURS)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["trainers"] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules["trainers"]
            raise
    elif not any(Path(each).resolve() == OURS for each in getattr(present, "__path__", ())):
        theirs = present.__file__ or next(iter(present.__path__))
        raise ImportError(
            f"fleetrun's runtime {OURS} cannot be imported: {theirs} was imported as `trainers`. {WAY_OUT}",
            name="trainers",
            path=theirs,
        )
    return import_module("trainers.fleet")


# ---- Another `trainers` where Python looks for modules


@frozen
class Shadow:
    """Another `trainers` on the search path."""

    theirs: Path  # its path
    hides_ours: bool  # True if Python imports it in place of the runtime, else the runtime hides it

    @property
    def sentence(self) -> str:
        """A sentence that names the module that Python finds, and the hidden one."""
        ours = f"fleetrun's runtime {OURS}"
        found, hidden = (self.theirs, ours) if self.hides_ours else (ours, self.theirs)
        return f"`import trainers` finds {found}, not {hidden}"

    @property
    def way_out(self) -> str:
        """The advice to the user."""
        if not self.hides_ours:
            return WAY_OUT
        return f"{WAY_OUT} `from fleetrun import fleet` works if no code imports your `trainers`."


def find_shadow(argv: Sequence[str], environ: Environ) -> Shadow | None:
    """Return the first other `trainers` on the search path of a process `argv`, or None without one."""
    ours_seen = False
    for folder in _search_path(argv, environ):
        place = folder / "trainers"
        if _is_file(place / "__init__.py"):
            if place.resolve() == OURS or _is_file(folder / "fleetrun" / "__main__.py"):
                ours_seen = True  # another copy of fleetrun, which has its own runtime, also counts
            else:
                return Shadow(place, hides_ours=not ours_seen)
        elif _is_file(place.with_suffix(".py")):
            return Shadow(place.with_suffix(".py"), hides_ours=not ours_seen)
        elif place.is_dir():  # a namespace package, which comes after any regular package of this name
            on_path = any(Path(each or ".").resolve() == OURS.parent for each in sys.path)
            return Shadow(place, hides_ours=not ours_seen and not on_path)
    return None


def _search_path(argv: Sequence[str], environ: Environ) -> Iterator[Path]:
    """Yield the directories that Python searches before the installed packages."""
    if not environ.get("PYTHONSAFEPATH"):
        script = source_of(argv)
        yield script.resolve().parent if script is not None and "-m" not in argv[1:3] else Path.cwd()
    paths = environ.get("PYTHONPATH", "")
    yield from (Path(each or ".").absolute() for each in (paths.split(os.pathsep) if paths else ()))


def source_of(argv: Sequence[str]) -> Path | None:
    """Return the file that `python -u script` or `python -u -m module` runs, or None if it cannot be
    determined.
    """
    if len(argv) > 3 and argv[1:3] == ("-u", "-m"):
        parts = argv[3].split(".")
        places = (Path(*parts).with_suffix(".py"), Path(*parts, "__main__.py"))
        return next((each for each in places if _is_file(each)), None)
    return Path(argv[2]) if len(argv) > 2 and argv[1] == "-u" else None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


# ---- Does the shadow affect a script?


def shadow_of_script(argv: Sequence[str], environ: Environ) -> Shadow | None:
    """Return the shadow if it affects the script.

    The shadow does so if the script imports `fleet` from fleetrun, or a name from `trainers` that only the
    hidden module has.
    """
    shadow = find_shadow(argv, environ)
    script = source_of(argv)
    if shadow is None or script is None:
        return None
    found, hidden = (shadow.theirs, OURS) if shadow.hides_ours else (OURS, shadow.theirs)
    names = set(_imported(script))
    if _FROM_FLEETRUN in names:
        return Shadow(shadow.theirs, hides_ours=False)
    missed = (each for each in names if _has(hidden, each) and not _has(found, each))
    return shadow if any(missed) else None


_FROM_FLEETRUN = ""


def _imported(script: Path) -> Iterator[str]:
    """Yield the names that the script imports from `trainers`, such as `fleet`, and `_FROM_FLEETRUN`."""
    import ast  # late: only a shadow needs it

    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from _below_trainers(each.name for each in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from _below_trainers(f"{module}.{each.name}" for each in names)
            case ast.Attribute(value=ast.Name(id=module), attr=name):
                yield from _below_trainers([f"{module}.{name}"])


def _below_trainers(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        package, _, rest = name.partition(".")
        if name == "fleetrun.fleet":
            yield _FROM_FLEETRUN
        elif package == "trainers" and rest:
            yield rest.partition(".")[0]


def _has(package: Path, name: str) -> bool:
    """Return True if the package has a module of this name, or the text of its `__init__.py` contains the
    name.
    """
    if (package / name).is_dir() or _is_file(package / f"{name}.py"):
        return True
    text = package if package.is_file() else package / "__init__.py"
    try:
        return re.search(rf"\b{re.escape(name)}\b", text.read_text(errors="replace")) is not None
    except OSError:
        return False


# ---- Did the shadow make a process fail?

_FAILURES = (
    r"No module named 'trainers\b|cannot import name '\w+' from '(partially initialized module ')?trainers\b"
    r"|module 'trainers' has no attribute|was imported as `trainers`"
)


def shadow_of_failure(text: str, argv: Sequence[str], environ: Environ) -> Shadow | None:
    """Return the shadow if `text`, the error of a process, looks like its effect."""
    return find_shadow(argv, environ) if re.search(_FAILURES, text) else None

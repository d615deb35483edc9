"""Whether the script can be started, found out before anything is. Looks at files; starts nothing."""

from __future__ import annotations

import os
from pathlib import Path

from fleetrun.errors import ScriptNotExecutableError, ScriptNotFoundError


def check_python_script(script: str) -> None:
    """Raises ScriptNotFoundError (exit code 127) or ScriptNotExecutableError (126)."""
    path = Path(script)
    if path.is_dir():
        raise ScriptNotExecutableError(f"{script} is a directory, not a script")
    if not path.exists():
        raise ScriptNotFoundError(f"there is no script {script}", hint=_nearby(path))
    if not os.access(path, os.R_OK):
        raise ScriptNotExecutableError(f"{script} cannot be read: permission denied")


def check_module(module: str) -> None:
    """Looks for the top-level package only: finding more would mean importing it."""
    from importlib.machinery import PathFinder
    from importlib.util import find_spec

    top = module.partition(".")[0]
    here = str(Path.cwd())  # not ".": Python remembers what that was
    if not top.isidentifier() or top == "__main__":
        raise ScriptNotFoundError(
            f"-m {module}: that is not the name of a module", hint="Without -m it is a file."
        )
    if PathFinder.find_spec(top, [here]) is None and find_spec(top) is None:
        raise ScriptNotFoundError(
            f"there is no module {top}", hint="Modules are looked for from the current directory."
        )


def check_program(program: str, path_variable: str) -> None:
    """`program` as it will be started: with a slash a file, without one a name on PATH."""
    if "/" in program:
        path = Path(program)
        if path.is_dir():
            raise ScriptNotExecutableError(f"{program} is a directory, not a program")
        if not path.exists():
            raise ScriptNotFoundError(f"there is no program {program}", hint=_nearby(path))
        if not os.access(path, os.X_OK):
            raise ScriptNotExecutableError(
                f"{program} is not executable",
                hint=f"Try `chmod +x {program}`; Python scripts need a name in .py.",
            )
        return
    if not any(os.access(Path(folder or ".") / program, os.X_OK) for folder in path_variable.split(":")):
        raise ScriptNotFoundError(f"there is no program {program} on PATH, and no file of that name here")


def _nearby(path: Path) -> str | None:
    """A file of that folder with almost that name."""
    import difflib

    try:
        names = [each.name for each in path.parent.iterdir() if each.is_file()]
    except OSError:
        return None
    near = difflib.get_close_matches(path.name, names, 1, 0.75)
    return f"Did you mean {path.parent / near[0]}?" if near else None

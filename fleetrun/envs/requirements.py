"""Packages that not every installation has: asked for before they are needed."""

from __future__ import annotations

from importlib.util import find_spec

from fleetrun.errors import UsageError


def check_package(package: str, what: str, extra: str) -> None:
    """Raises UsageError where `what` needs a package that is not installed; `extra` of fleetrun brings it. A
    folder of that name is no package.
    """
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin is None:
        raise UsageError(
            f"{what} needs the Python package {package.replace('_', '-')}, which is not installed",
            hint=f"pip install 'fleetrun[{extra}]'",
        )

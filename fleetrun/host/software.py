"""List the packages in this node's Python, and compare the nodes of a job."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence

from fleetrun.aliases import Environ, Texts
from fleetrun.envs.settings.parsing import some
from fleetrun.values import frozen

MOST = 16 << 10
"""Most characters of a packed value, enough for about 1500 packages. A longer value keeps only torch."""

_DIST = ".dist-info"
_SHOWN = 4  # most differing packages to show
_MISSING = "missing"


@frozen
class Software:
    """The version of Python and the installed distributions."""

    python: str
    packages: Texts  # versions by normalized name


def search_path(environment: Environ, environ: Environ) -> Sequence[str]:
    """Return the module search path of a child process.

    `environment` holds the variables to set for the process, and `environ` those of this process.
    """
    if "PYTHONPATH" not in environment:
        return sys.path
    inherited = environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [folder for folder in sys.path if folder not in inherited]
    return [*filter(None, environment["PYTHONPATH"].split(os.pathsep)), *others]


def installed(path: Sequence[str] | None = None) -> Software:
    """Return the software of this Python. Reads only directory names, which takes milliseconds for hundreds
    of packages.
    """
    packages: dict[str, str] = {}
    for folder in sys.path if path is None else path:
        try:
            with os.scandir(folder or ".") as entries:
                found = [each.name.removesuffix(_DIST) for each in entries if each.name.endswith(_DIST)]
        except OSError:
            continue
        for each in found:
            name, _, version = each.rpartition("-")
            if name:  # a directory without a name was not made by an installer
                # Python imports the first one.
                packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), version)
    return Software(".".join(map(str, sys.version_info[:3])), packages)


def packed(software: Software) -> str:
    """Pack the software into a short text."""
    import zlib  # late, as below: only multi-node jobs need it
    from binascii import b2a_base64

    packages = dict(sorted(software.packages.items()))
    for listed in (packages, {name: packages[name] for name in ("torch",) if name in packages}):
        data = zlib.compress(json.dumps([software.python, listed]).encode())
        text = b2a_base64(data, newline=False).decode()
        if len(text) <= MOST:
            break
    return text


def unpacked(text: str) -> Software | None:
    """Read a packed text. Return None if another version wrote it."""
    import zlib
    from binascii import a2b_base64

    try:
        python, packages = json.loads(zlib.decompressobj().decompress(a2b_base64(text), 64 * MOST))
        return Software(str(python), {str(name): str(version) for name, version in packages.items()})
    except (ValueError, TypeError, AttributeError, RecursionError, zlib.error):
        return None


# ---- Differences

Kinds = Sequence[tuple[Sequence[str], Software]]
"""Names of nodes that have the same software, and the software."""


def kinds(texts: Sequence[tuple[str, str]]) -> Kinds:
    """Group nodes by software, given each node's name and packed software. Unreadable texts are skipped."""
    names: dict[str, list[str]] = {}
    for name, text in texts:
        names.setdefault(text, []).append(name)
    return [(those, known) for text, those in names.items() if (known := unpacked(text)) is not None]


def differences(found: Kinds) -> tuple[list[str], list[str]]:
    """Return the differences that may break a job (another minor version of Python or torch), and the others,
    as parts of sentences. Both are empty if all nodes agree.
    """
    serious: list[str] = []
    other: list[str] = []
    for what, of in (("Python", lambda software: software.python), ("torch", _version_of("torch"))):
        spread = _spread(found, of)
        if spread:
            worst = len({".".join(of(each).split(".")[:2]) for _, each in found}) > 1
            (serious if worst else other).append(f"{what} is {spread}")
    packages = differing_packages(found)
    return serious, [*other, *([packages] if packages else [])]


def differing_packages(found: Kinds) -> str:
    """Describe the packages that differ, without torch, or return an empty text.

    Example: `2 packages differ: numpy is 1.26.4 on h2, 2.1.0 on the others; rich is missing on h2, ...`.
    """
    listed = [(those, each) for those, each in found if each.packages.keys() - {"torch"}]
    names = sorted({name for _, each in listed for name in each.packages} - {"torch"})
    differ = {name: spread for name in names if (spread := _spread(listed, _version_of(name)))}
    if not differ:
        return ""
    shown = [f"{name} is {spread}" for name, spread in list(differ.items())[:_SHOWN]]
    more = f"; {len(differ) - _SHOWN} more" if len(differ) > _SHOWN else ""
    count = "1 package differs" if len(differ) == 1 else f"{len(differ)} packages differ"
    return f"{count}: {'; '.join(shown)}{more}"


def _version_of(package: str) -> Callable[[Software], str]:
    return lambda software: software.packages.get(package, _MISSING)


def _spread(found: Kinds, of: Callable[[Software], str]) -> str:
    """Describe a value that differs, as in `2.12.0 on h2, 2.13.0 on the others`. Return an empty text if all
    nodes agree.

    "The others" are the nodes with the most frequent value. In a tie, the value of the first node counts.
    """
    nodes: dict[str, list[str]] = {}
    for those, each in found:
        nodes.setdefault(of(each), []).extend(those)
    if len(nodes) < 2:
        return ""
    usual = max(nodes, key=lambda value: len(nodes[value]))
    parts = [f"{value} on {some(those, 3)}" for value, those in nodes.items() if value != usual]
    return f"{', '.join([*parts[:_SHOWN], *(['...'] if len(parts) > _SHOWN else [])])}, {usual} elsewhere"

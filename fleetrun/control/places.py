"""Where the sockets of running launches are, and how a path of any length is reached. Knows no job.

A launcher that was killed leaves its sockets. Whoever meets one that nobody listens at takes it away.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from fleetrun import files

SUFFIX = ".sock"


def folders(environ: Mapping[str, str]) -> list[Path]:
    """Where this user's launches may be: a login, cron and sudo do not agree about XDG_RUNTIME_DIR.

    A folder that somebody chose is the only one.
    """
    first = files.run_folder(environ)
    login = Path(f"/run/user/{os.getuid()}/fleetrun")
    plain = files.run_folder({})
    return list(dict.fromkeys((first, login, plain))) if first in (login, plain) else [first]


def trusted(folder: Path) -> bool:
    """Whether it is a folder of this user, into which nobody else writes."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022


def sockets(folder: Path) -> list[Path]:
    """The control sockets in it, in the order of their names; of a folder that cannot be trusted none."""
    if not trusted(folder):
        return []
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return []
    return [each for each in paths if each.suffix == SUFFIX and each.name[0] != "." and _is_socket(each)]


def _is_socket(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISSOCK(path.lstat().st_mode)
    return False


def take_away(path: Path) -> None:
    """What a launcher that is gone has left: its control socket, at which nobody listens, and its other."""
    for left in (path, path.with_suffix(".progress")):
        if _is_socket(left) and _deaf(left):
            with contextlib.suppress(OSError):
                left.unlink()


def _deaf(path: Path) -> bool:
    """Whether nobody has this socket open any more."""
    kind = socket.SOCK_STREAM if path.suffix == SUFFIX else socket.SOCK_DGRAM
    with socket.socket(socket.AF_UNIX, kind) as probe, contextlib.suppress(OSError):
        probe.setblocking(False)
        try:
            with files.short_socket_path(path) as name:
                probe.connect(name)
        except ConnectionRefusedError:
            return True
    return False

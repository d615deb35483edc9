"""Network namespaces of this test process: made, found, ended. What they are for is not known here.

A namespace's name says which process made it. So those of a run that was killed can be told from those of a
run beside this one, and are swept away by whoever comes next.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path("/var/run/netns")
_PREFIX = "fleettest"
_TOOLS = ("ip", "nft", "ss", "nsenter", "unshare", "sh")


def unavailable() -> str:
    """Why there can be none here; empty when there can."""
    if os.getuid() != 0:
        return "only root can make hosts on this machine"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: iproute2 nftables util-linux)"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "nft", "list", "ruleset"], capture_output=True
    )
    return "" if done.returncode == 0 else f"no namespaces here: {done.stderr.decode()}"


def name_of(group: int, label: str) -> str:
    """For the namespace `label` in a group of namespaces of this process."""
    return f"{_PREFIX}-{os.getpid()}-{_started(os.getpid())}-{group}-{label}"


def path_of(name: str) -> Path:
    return FOLDER / name


def run(*words: str, text: str = "") -> str:
    """A command's output. AssertionError with what it said if it fails."""
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}\n{text}"
    return done.stdout


def configure(lines: str, name: str = "") -> None:
    """Commands of `ip`, a line each, in that namespace."""
    run("ip", *(("-n", name) if name else ()), "-batch", "-", text=lines)


def delete(name: str) -> None:
    """End whatever runs in it, and it. Fine if somebody else just does the same."""
    with contextlib.suppress(OSError):
        _end_processes(name)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def sweep() -> None:
    """End the namespaces of test processes that are no more."""
    for path in FOLDER.glob(f"{_PREFIX}-*"):
        _, pid, started, *_ = path.name.split("-")
        if _started(int(pid)) != started:
            delete(path.name)


def pids_in(name: str) -> list[int]:
    """The processes of a namespace."""
    return _having(path_of(name).stat().st_ino)


def _end_processes(name: str) -> None:
    inode = path_of(name).stat().st_ino
    _until(lambda: not _kill(_having(inode)))


def _kill(pids: list[int]) -> bool:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(pids)


def _until(condition: Callable[[], bool], bound: float = 60.0) -> None:
    deadline = time.monotonic() + bound
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def _having(inode: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "ns/net").stat().st_ino == inode:
                found.append(int(entry.name))
    return found


def _started(pid: int) -> str:
    """When a process began, in the kernel's ticks: a pid may be used again. Empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

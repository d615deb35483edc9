"""`python -m fleetrun.stacks`: the process that a launcher starts when its job hangs, or when a trainer fails
that may be the victim of another. One line of JSON in (of which processes, why, how long it may take, whether
facts of the machine are asked), the stacks into the logs if there is a reason to, one line of JSON out for
each trainer (where it is: `state`) and one for all (where they are).
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from linecache import getline
from pathlib import Path
from typing import Any

from fleetrun.aliases import Document
from fleetrun.envs.contract import Role
from fleetrun.files import last_bytes, short_socket_path
from fleetrun.host.interpreter import helper_command
from fleetrun.probe.states import nccl_timeouts
from fleetrun.stacks.collect import Collection, collect, find_pyspy
from fleetrun.stacks.frames import Frame, Taken, Target, groups
from fleetrun.stacks.text import clean, write_into_logs

MOST_GROUPS = 12


def main() -> None:
    asked: Document = json.loads(sys.stdin.readline())
    targets = [Target.of_json(each) for each in asked["targets"]]
    within = float(asked["within"])
    facts = _Facts(asked["facts"]) if asked.get("facts") else None
    states = ask_ranks(asked["ranks"], min(1.0, within / 2) if targets else within)
    silent = {each["title"] for each in states if each["alive"] and not each["probe"]} & _wanted(states)
    # All of them for the logs; for a verdict those that do not answer for themselves.
    looked = targets if asked["why"] else [each for each in targets if each.title in silent]
    # A look without a reason leaves no trace in a log, whose growth is a sign of life.
    found = collect(looked, within, find_pyspy(), asks=bool(asked["why"]))
    told = [completed(state, found.processes) for state in states]
    if facts is not None and told:
        told[0]["machine"] = facts.taken()
    for state in told:
        sys.stdout.write(json.dumps({"state": state}) + "\n")
    written = write_into_logs(found.processes, str(asked["why"]), time.time()) if asked["why"] else 0
    sys.stdout.write(json.dumps({"stacks": summary(found), "written": written}) + "\n")
    sys.stdout.flush()


def _wanted(states: Sequence[Document]) -> set[str]:
    """The titles of trainers, and of servers for which one of them waits."""
    waits = [(each["probe"] or {}).get("ps") or {} for each in states]
    servers = {each["server"] for each in waits if not each.get("trainers", True)}
    return {each["title"] for each in states if each["role"] != Role.SERVER or each["rank"] in servers}


class _Facts:
    """What `doctor` measures of this machine, as far as it answers soon."""

    def __init__(self, asked: Document) -> None:
        words = [asked["log_dir"], *asked["devices"]]
        self._began = time.monotonic()
        self._doctor = subprocess.Popen(
            helper_command("fleetrun.doctor", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )

    def taken(self) -> Document | None:
        left = max(0.1, self._began + _FACTS_WITHIN - time.monotonic())
        with suppress(ValueError, subprocess.TimeoutExpired):
            return _object(self._doctor.communicate(timeout=left)[0])
        self._doctor.kill()
        return None


_FACTS_WITHIN = 2.0  # seconds


# ---- The probes of the trainers


def ask_ranks(ranks: Sequence[Document], within: float) -> list[Document]:
    """Each with what its probe says in `probe`, None where it says nothing within so many seconds."""
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return list(pool.map(lambda rank: {**rank, "probe": _said(rank, within)}, ranks))


def _said(rank: Document, within: float) -> Any:
    """Of a process that lives, on its socket; of one that has ended, perhaps just now, in the file that it
    left.
    """
    address = Path(str(rank["probe"]))
    with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(within)
        with short_socket_path(address) as short:
            asked.connect(short)
        return _object(b"".join(iter(lambda: asked.recv(1 << 16), b"")))
    with suppress(OSError, ValueError):
        return _object(address.with_name(f"{address.name}.last").read_bytes())
    return None


def _object(text: bytes) -> Document | None:
    """None for what no probe writes: the script may answer there, too."""
    said = json.loads(text)
    return said if isinstance(said, dict) else None


def completed(state: Document, processes: Sequence[Taken]) -> Document:
    """With its stack, from its probe or from outside, and what is unusual about the process."""
    own = next((each for each in processes if each.target.title == state["title"] and not each.below), None)
    outside = own.threads[0].frames if own is not None and own.threads else ()
    rows = _rows(outside[:20])
    note = _STOPPED.get(own.state, "") if own is not None else ""
    said = state["probe"] or {}
    log = state.pop("log", "")
    ending = "" if state["alive"] else _ending(str(log))
    timeouts = [] if said else nccl_timeouts(ending, time.time())
    told = {"said": _last_words(ending), "timeouts": timeouts}
    return {**state, "stack": said.get("stack") or rows, "note": note, **told}


def _rows(frames: Sequence[Frame]) -> list[list[Any]]:
    """With the text of each line, if it can be read at once: what a process waits for may be the file system
    on which its script lies.
    """
    rows: list[list[Any]] = [[each.file, each.line, each.function, ""] for each in frames]

    def read() -> None:
        for row in rows:
            row[3] = getline(row[0], row[1]).strip()

    if not any(each.is_alive() for each in _readers):
        _readers.append(threading.Thread(target=read, daemon=True))
        _readers[-1].start()
        _readers[-1].join(0.3)
    return rows


_readers: list[threading.Thread] = []


def _ending(log: str) -> str:
    """The end of the log of the last attempt; empty if it cannot be read."""
    with suppress(OSError):
        end, _ = last_bytes(Path(log), _TAIL)
        return end.rpartition(b"\n--- fleetrun: restart ")[2].decode(errors="replace")
    return ""


def _last_words(ending: str) -> str:
    """The exception of C++ that has ended a process, or what torch's watchdog said before it did; empty if
    there is none.
    """
    _, what, said = ending.rpartition("  what():  ")
    lines = [said.partition("\n")[0]] if what else re.findall(_FATAL, ending)
    return str(lines[-1])[:500] if lines else ""


_FATAL = r"\[F\d[^\n]{0,200} ProcessGroup\w{1,40}\.cpp[^\n]*"  # bounded, as a progress bar is one line


_TAIL = 256 << 10  # the watchdogs of NCCL print stacks of C++ after what they have seen

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}


def summary(found: Collection) -> list[str]:
    """A line for each place where processes are, the outlier first."""
    there = groups(found.processes)
    lines = [clean(f"{group.title}: {group.where}") for group in there[:MOST_GROUPS]]
    if len(there) > MOST_GROUPS:
        lines.append(f"and {len(there) - MOST_GROUPS} places more")
    return [*lines, *([found.hint] if found.hint else [])]


if __name__ == "__main__":
    main()

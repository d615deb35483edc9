"""Take stacks in a helper process: `python -m fleetrun.stacks`. A launcher starts it when its job hangs, or
when a trainer fails that may be the victim of another.

It reads one line of JSON: the processes, the reason, the time limit, and whether to add facts of the node.
With a reason, it writes the stacks into the logs. It prints one line of JSON for each trainer (its `state`),
and one with all places.
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
from fleetrun.decoding import read_object
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
    targets = [Target(**each) for each in asked["targets"]]
    within = float(asked["within"])
    facts = _Facts(asked["facts"]) if asked.get("facts") else None
    states = ask_ranks(asked["ranks"], min(1.0, within / 2) if targets else within)
    silent = {each["title"] for each in states if each["alive"] and not each["probe"]} & _wanted(states)
    # With a reason, all stacks go into the logs. A diagnosis needs only processes whose probes do not answer.
    looked = targets if asked["why"] else [each for each in targets if each.title in silent]
    # Without a reason, a log must not change, because its growth counts as activity.
    found = collect(looked, within, find_pyspy(), asks=bool(asked["why"]))
    finished = [completed(state, found.processes) for state in states]
    if facts is not None and finished:
        finished[0]["machine"] = facts.taken()
    for state in finished:
        sys.stdout.write(json.dumps({"state": state}) + "\n")
    written = write_into_logs(found.processes, str(asked["why"]), time.time()) if asked["why"] else 0
    sys.stdout.write(json.dumps({"stacks": summary(found), "written": written}) + "\n")
    sys.stdout.flush()


def _wanted(states: Sequence[Document]) -> set[str]:
    """Return the titles of trainers, and of servers for which a trainer waits."""
    waits = [(each["probe"] or {}).get("ps") or {} for each in states]
    servers = {each["server"] for each in waits if not each.get("trainers", True)}
    return {each["title"] for each in states if each["role"] != Role.SERVER or each["rank"] in servers}


class _Facts:
    """Runs `doctor` for facts of this node, as far as it answers soon."""

    def __init__(self, asked: Document) -> None:
        words = [asked["log_dir"], *asked["devices"]]
        self._began = time.monotonic()
        self._doctor = subprocess.Popen(
            helper_command("fleetrun.doctor", *words), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )

    def taken(self) -> Document | None:
        left = max(0.1, self._began + _FACTS_WITHIN - time.monotonic())
        with suppress(subprocess.TimeoutExpired):
            return read_object(self._doctor.communicate(timeout=left)[0])
        self._doctor.kill()
        return None


_FACTS_WITHIN = 2.0  # seconds


# ---- The probes of the trainers


def ask_ranks(ranks: Sequence[Document], within: float) -> list[Document]:
    """Add the answer of its probe to each rank, as `probe`.

    Return None if it does not answer within `within` seconds.
    """
    with ThreadPoolExecutor(max(1, len(ranks))) as pool:
        return list(pool.map(lambda rank: {**rank, "probe": _probe_answer(rank, within)}, ranks))


def _probe_answer(rank: Document, within: float) -> object:
    """Ask the probe of a living process on its socket.

    Read the file that a process left at its end, which may have been just now.
    """
    address = Path(str(rank["probe"]))
    with suppress(OSError), socket.socket(socket.AF_UNIX) as asked:
        asked.settimeout(within)
        with short_socket_path(address) as short:
            asked.connect(short)
        if (answer := read_object(b"".join(iter(lambda: asked.recv(1 << 16), b"")))) is not None:
            return answer
    with suppress(OSError, ValueError):
        return read_object(address.with_name(f"{address.name}.last").read_bytes())
    return None


def completed(state: Document, processes: Sequence[Taken]) -> Document:
    """Add the stack, from its probe or from outside, and the unusual state of the process."""
    own = next((each for each in processes if each.target.title == state["title"] and not each.below), None)
    outside = own.threads[0].frames if own is not None and own.threads else ()
    rows = _rows(outside[:20])
    note = _STOPPED.get(own.state, "") if own is not None else ""
    probe = state["probe"] or {}
    log = state.pop("log", "")
    ending = "" if state["alive"] else _ending(str(log))
    timeouts = [] if probe else nccl_timeouts(ending, time.time())
    facts = {"said": _last_words(ending), "timeouts": timeouts}
    return {**state, "stack": probe.get("stack") or rows, "note": note, **facts}


def _rows(frames: Sequence[Frame]) -> list[list[object]]:
    """Return rows with the text of each line, if it can be read quickly.

    A process may be waiting for the file system that holds its script.
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
    """Return the end of the log of the last attempt. Return "" if the log cannot be read."""
    with suppress(OSError):
        end, _ = last_bytes(Path(log), _TAIL)
        return end.rpartition(b"\n--- fleetrun: restart ")[2].decode(errors="replace")
    return ""


def _last_words(ending: str) -> str:
    """Return the C++ exception that ended a process, or the last message of torch's watchdog.

    Return "" if neither exists.
    """
    _, what, message = ending.rpartition("  what():  ")
    lines = [message.partition("\n")[0]] if what else re.findall(_FATAL, ending)
    return str(lines[-1])[:500] if lines else ""


_FATAL = r"\[F\d[^\n]{0,200} ProcessGroup\w{1,40}\.cpp[^\n]*"  # bounded, because a progress bar is one line


_TAIL = 256 << 10  # NCCL's watchdogs print C++ stacks after their messages

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger"}


def summary(found: Collection) -> list[str]:
    """Return a line for each place with processes, the outlier first."""
    there = groups(found.processes)
    lines = [clean(f"{group.title}: {group.where}") for group in there[:MOST_GROUPS]]
    if len(there) > MOST_GROUPS:
        lines.append(f"and {len(there) - MOST_GROUPS} places more")
    return [*lines, *([found.hint] if found.hint else [])]


if __name__ == "__main__":
    main()

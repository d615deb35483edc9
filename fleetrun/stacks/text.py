"""Format stacks as lines of text, for a terminal, as JSON, or below the output in the log of their process.

Control characters in names are escaped. Logs that are not regular files are left alone, and errors of a full
disk are ignored.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from fleetrun.aliases import Document, Fields
from fleetrun.envs.settings.parsing import some
from fleetrun.files import open_plain
from fleetrun.stacks.frames import MOST_FRAMES, MOST_THREADS, Frame, Group, Taken, Target, Thread
from fleetrun.stacks.processes import STATES

# ---- Stacks as lines of text

_FRAMES = 40
_MOST_PIDS = 8
_LONGEST_LINE = 120


def grouped_lines(groups: Sequence[Group]) -> Iterator[str]:
    """Format stacks for a person. Each place appears once, the outlier first."""
    for number, group in enumerate(groups):
        if number:
            yield ""
        count = f"{len(group.members)} processes" if len(group.members) > 1 else "1 process"
        yield clean(f"{group.title}: {count}, {_places(group.members)}")
        yield from stack_lines(group.first)


def _places(members: Sequence[Taken]) -> str:
    """List pids, such as `pids 17, 18`, or `node 0: pids 17, 18; node 1: pid 9` for several nodes."""
    nodes: dict[int | None, list[int]] = {}
    for each in members:
        nodes.setdefault(each.target.node, []).append(each.pid)
    return "; ".join(
        _pids(pids) if node is None else f"node {node}: {_pids(pids)}"
        for node, pids in list(nodes.items())[:_MOST_PIDS]
    )


def _pids(pids: Sequence[int]) -> str:
    return f"pid{'s' if len(pids) > 1 else ''} {some(list(map(str, pids)), _MOST_PIDS)}"


def stack_lines(taken: Taken) -> Iterator[str]:
    """Format the stacks of one process, the innermost call first."""
    if taken.state in ("D", "T", "t"):
        yield f"  {STATES[taken.state]}"
    if not taken.threads:
        yield clean(f"  {taken.command or 'a process'}: {taken.note}")
    for thread in taken.threads:
        yield clean(f"  {thread.name}, most recent call first:")
        yield from (clean(f"    {line}") for line in _frames(thread))


def _frames(thread: Thread) -> Iterable[str]:
    lines = [str(frame) for frame in thread.frames] or ["no Python runs in it"]
    cut = thread.cut
    if len(lines) > _FRAMES:
        tail = 5
        cut += len(lines) - _FRAMES
        lines = [*lines[: _FRAMES - tail], f"... {cut} more calls ...", *lines[-tail:]]
    elif cut:
        lines.append(f"... {cut} more calls ...")
    return lines


def clean(text: str) -> str:
    """Return one line without effect on a terminal, which can be encoded."""
    cut = text if len(text) <= 10 * _LONGEST_LINE else f"{text[: 10 * _LONGEST_LINE]} ..."
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode()
        for char in cut
    )


def as_json(taken: Taken) -> Document:
    """Convert to JSON for another program. Strings are not escaped."""
    return {
        "role": taken.target.role,
        "rank": taken.target.rank,
        "title": taken.title,
        "pid": taken.pid,
        "command": taken.command,
        "state": taken.state,
        "note": taken.note,
        "below": taken.below,
        **({} if taken.target.node is None else {"node": taken.target.node}),
        "threads": list(map(asdict, taken.threads)),
    }


def of_json(fields: Fields, node: int) -> Taken:
    """Read the JSON of `as_json` from another node. Raises the exceptions of malformed JSON."""
    command, pid = str(fields["command"]), int(fields["pid"])
    target = Target(
        role=str(fields["role"]),
        rank=int(fields["rank"]),
        title=str(fields["title"]).removesuffix(f", its {command}"),
        pid=0 if fields["below"] else pid,
        log="",
        mark="",
        node=node,
    )
    threads = tuple(_thread(each) for each in fields["threads"][:MOST_THREADS])
    state, note = str(fields["state"]), str(fields["note"])
    return Taken(target=target, pid=pid, command=command, state=state, threads=threads, note=note)


def _thread(fields: Fields) -> Thread:
    frames = fields["frames"][:MOST_FRAMES]
    found = tuple(Frame(str(each["function"]), str(each["file"]), int(each["line"])) for each in frames)
    return Thread(str(fields["name"]), found, int(fields["cut"]))


# ---- Stacks written into the logs of their processes. A log that is not a regular file is left alone


def write_into_logs(taken: Sequence[Taken], why: str, now: float) -> int:
    """Write the stacks of each process into its log.

    Return the number of logs written. `now`: seconds since the epoch.
    """
    logs: dict[str, list[Taken]] = {}
    for each in taken:
        logs.setdefault(each.target.log, []).append(each)
    return sum(_append(Path(log), _log_text(members, why, now)) for log, members in logs.items())


def _log_text(members: Sequence[Taken], why: str, now: float) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now))
    lines = [f"--- fleetrun: {clean(why)}: the stacks of {members[0].target.title}, {stamp} ---"]
    for each in members:
        lines.append(clean(f"{each.title}, pid {each.pid}:"))
        lines += stack_lines(each)
    return "\n".join([*lines, "--- fleetrun: end of the stacks ---", ""])


def _append(log: Path, text: str) -> bool:
    with suppress(OSError):
        flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW
        with os.fdopen(open_plain(log, flags), "r+b", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            begins = not size or os.pread(file.fileno(), 1, size - 1) == b"\n"
            data = (text if begins else f"\n{text}").encode("utf-8", "backslashreplace")
            return file.write(data) == len(data)
    return False

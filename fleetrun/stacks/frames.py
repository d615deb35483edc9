"""Stacks as frames and threads, read from the output of py-spy and faulthandler.

Equal stacks of processes form groups, with the odd group first. All functions are pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fleetrun.aliases import Fields
from fleetrun.envs.settings.parsing import ranks_in_words
from fleetrun.frozen import frozen, frozen_by_name

# ---- Stacks in the output of py-spy and faulthandler

MOST_FRAMES = 200
"""Limit for one thread, from the innermost frame outwards. An endless recursion is cut off there."""

MOST_THREADS = 100

_HEAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@frozen
class Frame:
    """One call on a stack."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@frozen
class Thread:
    """One thread.

    `frames` start with the innermost call. `cut` counts the outermost frames that were dropped.
    """

    name: str
    frames: tuple[Frame, ...]
    cut: int = 0


Threads = tuple[Thread, ...]


def of_pyspy(text: str) -> Threads:
    """Read the threads of `py-spy dump --json`, the main thread first. Raises ValueError for other text."""
    document = json.loads(text)
    if not isinstance(document, list) or not all(isinstance(each, dict) for each in document):
        raise ValueError("no list of threads")
    main_first = sorted(document, key=lambda each: each.get("os_thread_id") != each.get("pid"))
    return tuple(_thread(each) for each in main_first[:MOST_THREADS])


def _thread(fields: Fields) -> Thread:
    frames = fields.get("frames")
    if not isinstance(frames, list) or not all(isinstance(each, dict) for each in frames):
        raise ValueError("a thread without frames")
    number = fields.get("os_thread_id") or fields.get("thread_id")
    unnamed = "MainThread" if number == fields.get("pid") else f"thread {number}"
    name = str(fields.get("thread_name") or unnamed)
    kept = tuple(
        Frame(str(each.get("name")), str(each.get("filename")), _number(each.get("line")))
        for each in frames[:MOST_FRAMES]
    )
    return Thread(name, kept, len(frames) - len(kept))


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def of_faulthandler(text: str) -> Threads:
    """Read the threads that `faulthandler.dump_traceback` wrote. Other output may be between its lines."""
    threads: list[Thread] = []
    for line in text.splitlines():
        if (head := _HEAD.search(line)) is not None:
            threads.append(Thread(head[1] or f"thread {len(threads) + 1}", ()))
        elif threads and (frame := _FRAME.fullmatch(line)) is not None:
            found = Frame(frame[3], frame[1], int(frame[2]) if frame[2].isdigit() else 0)
            last = threads[-1]
            kept = (*last.frames, found)
            full = len(last.frames) >= MOST_FRAMES
            threads[-1] = replace(last, cut=last.cut + 1) if full else replace(last, frames=kept)
    return tuple(threads[:MOST_THREADS])


def place(threads: Threads) -> str:
    """Describe the position of a process in a few words.

    It is the innermost call of its first thread, with the innermost call outside installed packages if that
    differs.
    """
    frames = threads[0].frames if threads else ()
    if not frames:
        return "no Python runs in it"
    inner = frames[0]
    own = next((each for each in frames if not _installed(each.file)), inner)
    text = _short(inner)
    return text if own is inner else f"{text}, called from {_short(own)}"


def _short(frame: Frame) -> str:
    return f"{frame.function} ({Path(frame.file).name}:{frame.line})"


def _installed(file: str) -> bool:
    return "site-packages/" in file or "dist-packages/" in file or "/lib/python" in file or file[:1] == "<"


# ---- Results per process


@frozen_by_name
class Target:
    """A running process of the job."""

    role: str
    rank: int
    title: str
    """Its name in messages, such as `trainer 3`."""
    pid: int
    log: str
    mark: str
    """The value of FLEETRUN_CONTAINER in its environment."""
    node: int | None = None
    """Rank of its node, in a job on several nodes."""


@frozen_by_name
class Taken:
    """The stacks of one process of the job, or of a child process that it started (`below`)."""

    target: Target
    pid: int
    command: str
    state: str
    """The letter of `ps`."""
    threads: Threads = ()
    note: str = ""
    """The reason for missing threads."""

    @property
    def below(self) -> bool:
        """True for a child process."""
        return self.pid != self.target.pid

    @property
    def title(self) -> str:
        return f"{self.target.title}, its {self.command}" if self.below else self.target.title


# ---- Groups of equal stacks

_STOPPED = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "uninterruptible, in the kernel"}


@frozen
class Group:
    """Processes at the same place."""

    members: tuple[Taken, ...]

    @property
    def first(self) -> Taken:
        return self.members[0]

    @property
    def title(self) -> str:
        """Names of the members, such as `trainers 0-2, 5 and server 0`."""
        own: dict[tuple[str, str], list[int]] = {}
        for each in self.members:
            what = each.target.title.rpartition(" ")[0] or each.target.title
            own.setdefault((what, each.command if each.below else ""), []).append(each.target.rank)
        return " and ".join(_named(what, below, numbers) for (what, below), numbers in own.items())

    @property
    def where(self) -> str:
        """The place in a few words."""
        position = place(self.first.threads) if self.first.threads else self.first.note
        return f"{_STOPPED[self.first.state]}, in {position}" if self.first.state in _STOPPED else position


def groups(taken: Sequence[Taken]) -> list[Group]:
    """Group processes by place. Stopped processes come first, then the smallest group, so that a single rank
    with many waiting ranks comes first.

    Groups of the same size stay in order.
    """
    together: dict[Hashable, list[Taken]] = {}
    for each in taken:
        together.setdefault(_key(each), []).append(each)
    found = (Group(tuple(each)) for each in together.values())
    return sorted(found, key=lambda group: (group.first.state not in _STOPPED, len(group.members)))


def _key(each: Taken) -> Hashable:
    """Return the key of a place. A stopped process never equals a process that waits at the same place."""
    stopped = each.state if each.state in _STOPPED else ""
    return each.below, stopped, each.note, tuple((thread.frames, thread.cut) for thread in each.threads)


def _named(what: str, below: str, numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    several = "s" if len(found) > 1 else ""
    name = f"{what}{several} {ranks_in_words(found)}"
    return f"{below} of {name}" if below else name

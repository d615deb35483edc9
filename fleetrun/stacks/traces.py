"""What a stack is, and how it is read out of what py-spy and faulthandler write. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

MOST_FRAMES = 200
"""Of one thread, from the innermost outwards: a recursion without end is shown as far as that."""

MOST_THREADS = 100

_HEAD = re.compile(r"(?:Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(.*)\])? \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


@dataclass(frozen=True, slots=True)
class Frame:
    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class Thread:
    """`frames` begin with the innermost call. `cut` counts the outermost ones that were left out."""

    name: str
    frames: tuple[Frame, ...]
    cut: int = 0


def of_pyspy(text: str) -> tuple[Thread, ...]:
    """`py-spy dump --json`: its threads, the main one first. Raises ValueError for anything else."""
    document = json.loads(text)
    if not isinstance(document, list) or not all(isinstance(each, dict) for each in document):
        raise ValueError("no list of threads")
    main_first = sorted(document, key=lambda each: each.get("os_thread_id") != each.get("pid"))
    return tuple(_thread(each) for each in main_first[:MOST_THREADS])


def _thread(said: Mapping[str, Any]) -> Thread:
    frames = said.get("frames")
    if not isinstance(frames, list) or not all(isinstance(each, dict) for each in frames):
        raise ValueError("a thread without frames")
    number = said.get("os_thread_id") or said.get("thread_id")
    unnamed = "MainThread" if number == said.get("pid") else f"thread {number}"
    name = str(said.get("thread_name") or unnamed)
    kept = tuple(
        Frame(str(each.get("name")), str(each.get("filename")), _number(each.get("line")))
        for each in frames[:MOST_FRAMES]
    )
    return Thread(name, kept, len(frames) - len(kept))


def _number(said: Any) -> int:
    return said if isinstance(said, int) else 0


def of_faulthandler(text: str) -> tuple[Thread, ...]:
    """What `faulthandler.dump_traceback` wrote, with anything else between its lines: its threads."""
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


def place(threads: tuple[Thread, ...]) -> str:
    """Where a process stands, in few words: the innermost call of its first thread, and the innermost one
    that is not of an installed package, if that is another.
    """
    frames = threads[0].frames if threads else ()
    if not frames:
        return "no Python runs in it"
    inner = frames[0]
    own = next((each for each in frames if not _installed(each.file)), inner)
    said = _short(inner)
    return said if own is inner else f"{said}, called from {_short(own)}"


def _short(frame: Frame) -> str:
    return f"{frame.function} ({Path(frame.file).name}:{frame.line})"


def _installed(file: str) -> bool:
    return "site-packages/" in file or "dist-packages/" in file or "/lib/python" in file or file[:1] == "<"

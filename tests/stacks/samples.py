"""Stacks without processes."""

from __future__ import annotations

from fleetrun.stacks.frames import Frame, Taken, Target, Thread


def target(rank: int = 0, *, role: str = "trainer", pid: int = 0, log: str = "/log/x.log") -> Target:
    title = f"{'server' if role == 'ps' else role} {rank}"
    mark = f"abcdef.{role}.{rank}"
    return Target(role=role, rank=rank, title=title, pid=pid or 100 + rank, log=log, mark=mark)


def thread(*frames: str, name: str = "MainThread", cut: int = 0) -> Thread:
    """`wait /a/x.py 3`, the innermost first."""
    made = []
    for each in frames:
        function, file, line = each.split()
        made.append(Frame(function, file, int(line)))
    return Thread(name, tuple(made), cut)


def taken(
    rank: int = 0, *frames: str, role: str = "trainer", pid: int = 0, state: str = "S", note: str = "",
    command: str = "python",
) -> Taken:  # fmt: skip
    """A process at this place; `pid` other than its container's: one below it."""
    whose = target(rank, role=role)
    threads = (thread(*frames),) if frames else ()
    return Taken(target=whose, pid=pid or whose.pid, command=command, state=state, threads=threads, note=note)

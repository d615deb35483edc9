"""Where one rank stood when it was asked, or when it ended: what its probe said, and what the launcher knows
of its process. Pure.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from fleetrun.aliases import Fields, Strings
from fleetrun.envs.channels import cause_in
from fleetrun.frozen import frozen
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit

MALFORMED = (ValueError, KeyError, TypeError, AttributeError)
"""What reading other people's JSON raises."""


_OURS = Path(__file__).parents[2]
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", f"{_OURS}/trainers/", f"{_OURS}/fleetrun/")


@frozen
class Frame:
    """`code` is the text of the line, empty if unknown."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def installed(self) -> bool:
        """Whether it belongs to a library, as far as its path tells."""
        return self.file[:1] == "<" or any(part in self.file for part in _LIBRARIES)

    @property
    def of_torch(self) -> bool:
        """Whether what it calls may be a collective. Data loaders have waits of their own."""
        return "/torch/" in self.file and "/torch/utils/data/" not in self.file

    @property
    def waits(self) -> bool:
        """Whether it is in `wait` of a call that was begun before: written in C++, it has no frame."""
        return (self.of_torch or not self.installed) and ".wait(" in self.code


@frozen
class Group:
    """`ranks` of the job; `entered` is the number of the last collective that was entered, from 1. `again`:
    it was made more than once with this name, so that numbers of its calls mean nothing.
    """

    ranks: tuple[int, ...]
    entered: int
    again: bool = False


@frozen
class Call:
    """Of a collective; `number` counts those of its group from 1. `entered` in seconds since the epoch.
    `queued`: for a GPU, so that the program may be elsewhere. `aside`: of another thread than the main one.
    `watched`: told by NCCL's watchdog, without types, a second more or less, and with names of its own.
    """

    group: str
    operation: str
    number: int
    sizes: tuple[tuple[int, ...], ...]
    dtypes: str
    entered: float
    done: bool
    queued: bool = False
    aside: bool = False
    watched: bool = False

    @property
    def title(self) -> str:
        return f"{self.operation} #{self.number}"

    @property
    def signature(self) -> str:
        """Operation, sizes and types, where all ranks must agree on them."""
        if self.operation not in _SAME_SIZES:
            return self.operation
        sizes = " ".join(str(list(each)) for each in self.sizes)
        return f"{self.operation} of {self.dtypes} {sizes}" if self.dtypes else f"{self.operation} of {sizes}"

    def agrees(self, other: Call) -> bool:
        """Whether torch takes both for the same collective: of equally many values, whatever their shape."""
        if self.operation != other.operation or self.operation not in _SAME_SIZES:
            return self.operation == other.operation
        mine, theirs = (sum(map(math.prod, each.sizes)) for each in (self, other))
        return (self.dtypes, mine) == (other.dtypes, theirs)


_SAME_SIZES = frozenset(
    {
        "all_reduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "reduce_scatter",
        "_reduce_scatter_base",
    }
)  # fmt: skip


@frozen
class Served:
    """What a trainer of parameter servers waits in, for `seconds`, at server number `server`. `ranks` have
    not come to it; none: it is the server that is waited for, `why` says what it does if that is known.
    """

    server: int
    what: str
    ranks: tuple[int, ...]
    why: str
    seconds: float


@frozen
class Peer:
    """A rank waits in `operation`, send or recv, for another; `rank` is None if it is not known for which.
    `number` counts the calls of the group, 0 if nothing does.
    """

    operation: str
    rank: int | None = None
    number: int = 0


@frozen
class LastStep:
    """It ended `ago` seconds before the process was asked, and took `seconds`, None if that is not known."""

    number: int
    ago: float
    seconds: float | None


_COMMUNICATES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/rendezvous.py")
_ALONE = ("destroy_process_group", "_object_to_tensor", "_tensor_to_object")
"""Functions there that wait for nobody."""

_SHOWN = 8


@frozen(kw_only=True)
class RankState:
    """Of a trainer, or of a server (`role` is `ps`). `alive` is False for a process that has ended, `how` it
    did in words, `ok` with success. `note` says what is unusual about a process that lives (stopped by a
    signal). `node` is where it runs, empty for the node that asks. `answered`: its probe has, now or at its
    end; without that `stack` may still be known from outside. `symptom`: it may have failed because of a
    collective, not of itself. `world_rank`: its rank for torch, None if that is not known. `said`: the
    exception of C++ that has ended it.
    """

    rank: int
    title: str
    role: str = "trainer"
    node: str = ""
    alive: bool = True
    ok: bool = False
    how: str = ""
    symptom: bool = False
    said: str = ""
    note: str = ""
    answered: bool = False
    now: float = 0.0
    stack: tuple[Frame, ...] = ()
    world_rank: int | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    peer: Peer | None = None
    served: Served | None = None
    step: LastStep | None = None
    arrivals: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """When it entered the last collectives of each group, by their numbers; seconds since the epoch."""
    ahead: float = 0.0
    """Seconds by which the clock of its node is ahead of the asking one's, give or take `unsure`."""
    unsure: float = 0.0

    @property
    def waits_in(self) -> Call | None:
        """The collective that it has entered and not completed: the one of its innermost call, else the
        oldest. torch takes one that failed for completed.
        """
        if self.peer is not None:
            return None
        if not self.alive:
            queued = next((each for each in self.calls if each.queued and not each.done), None)
            return queued or self.calls[-1] if self.symptom and self.calls else None
        elsewhere = self._elsewhere
        pending = [
            each for each in self.calls if not each.done and (each.queued or each.aside or not elsewhere)
        ]
        inner = [each for each in pending if self.stack and each.operation == self.stack[0].function]
        return inner[-1] if inner else pending[0] if pending else None

    @property
    def _elsewhere(self) -> bool:
        """Whether its main thread waits for nothing that torch does, though a call of it may be under way."""
        if not self.stack or self.note:
            return bool(self.note)
        inner = self.stack[0]
        return not (inner.of_torch or inner.waits or inner.file.endswith(("/threading.py", "/queue.py")))

    @property
    def waits_unknown(self) -> bool:
        """Whether it waits in torch, or has failed there, and it is not known for whom."""
        if self.peer is not None and (self.alive or self.symptom):
            return self.peer.rank is None
        if not self.alive:
            return self.symptom and self.waits_in is None
        if self.note or self.waits_in is not None or self.joining or not self.stack:
            return False
        inner = self.stack[0]
        communicates = inner.file.endswith(_COMMUNICATES) and inner.function not in _ALONE
        return communicates or inner.waits

    @property
    def gave_up(self) -> bool:
        """Whether it has waited for others until its time was over."""
        return not self.alive and self.symptom and re.search(r"timed? ?out", self.how, re.I) is not None

    @property
    def joining(self) -> bool:
        return (
            self.answered
            and not self.groups
            and any(each.function == "init_process_group" for each in self.stack)
        )

    def entered(self, group: str) -> int:
        """How many collectives of this group; 0 if it has none, or that is not known."""
        if group in self.groups:
            return self.groups[group].entered
        return max((each.number for each in self.calls if each.group == group), default=0)

    def held_up(self, call: Call) -> bool:
        """Whether it has put this call of a GPU behind another one that is not over."""
        first = self.waits_in
        if first is None or not (first.queued and call.queued) or first.watched:
            return False
        behind = self.calls[self.calls.index(first) + 1 :]
        return any((each.group, each.number) == (call.group, call.number) for each in behind)

    def call(self, group: str, number: int) -> Call | None:
        return next((each for each in self.calls if (each.group, each.number) == (group, number)), None)

    @property
    def stack_lines(self) -> Strings:
        """Its innermost calls."""
        return tuple(
            f"{each.file}:{each.line} in {each.function}{f': {each.code}' if each.code else ''}"
            for each in self.stack[:_SHOWN]
        )

    @property
    def place(self) -> str:
        """`train.py:31 in load: time.sleep(60)`: the innermost frame of the user's own code."""
        frames = [each for each in self.stack if not each.installed] or list(self.stack)
        if not frames:
            return ""
        own = frames[0]
        code = f": {own.code}" if own.code else ""
        return f"{own.file.rpartition('/')[2]}:{own.line} in {own.function}{code}"


def read_state(said: Fields) -> RankState:
    """What `fleetrun.stacks` writes of one rank. Raises MALFORMED."""
    probe = said.get("probe") or {}
    error = str(probe.get("error", ""))
    ending = bool(said["alive"]) and bool(error)  # it exits at the moment
    symptom = bool(said.get("symptom")) or (ending and is_symptom(Exit(1), error))
    stack = tuple(
        Frame(str(file), int(line or 0), str(function), str(code))
        for file, line, function, code in said.get("stack", ())
    )
    world_rank = probe.get("world_rank")
    timeouts = said.get("timeouts", ())
    groups = {
        str(name): Group(tuple(map(int, each["ranks"])), int(each.get("entered", 0)), bool(each.get("again")))
        for name, each in probe.get("groups", {}).items()
        if name and "ranks" in each
    }
    calls = probe.get("calls", ())
    return RankState(
        rank=int(said["rank"]),
        title=str(said["title"]),
        role=str(said.get("role", "trainer")),
        node=str(said.get("node", "")),
        alive=bool(said["alive"]) and not ending,
        ok=bool(said.get("ok")),
        how=f"failed ({cause_in(error)})" if ending else str(said.get("how", "")),
        symptom=symptom
        and (
            bool(timeouts)
            or _failed_together(str(said.get("how", "")), error, str(said.get("said", "")), stack)
        ),
        said=str(said.get("said", "")),
        note=str(said.get("note", "")),
        answered=bool(probe),
        now=max((float(each[5]) for each in timeouts), default=probe.get("time_ns", 0) / 1e9),
        stack=stack,
        world_rank=int(world_rank) if world_rank is not None else None,
        groups=groups,
        calls=tuple(map(_timed_out, timeouts))
        or tuple(_call(each) for each in calls if not each["point_to_point"]),
        peer=_peer(probe.get("peer")) or _queued_peer(calls, groups),
        served=_served(probe.get("ps")),
        step=_step(probe.get("step")),
        arrivals={
            str(group): {int(number): int(entered) / 1e6 for number, entered in each}
            for group, each in probe.get("arrivals", {}).items()
        },
        ahead=float(said.get("ahead", 0.0)),
        unsure=float(said.get("unsure", 0.0)),
    )


_REST = r"[^\n]{0,200}"  # bounded: a progress bar, or data, may be a line of all of the log
_TIMEOUT = re.compile(
    rf"\[E(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) {_REST} Watchdog caught collective operation timeout: "
    rf"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+),{_REST} ran for (\d+) milliseconds{_REST}\n"
    rf"{_REST} PG GUID (\w+)"
)
_ZONES = 15 * 60  # seconds: time zones, and years, differ by a multiple of this
_OPERATIONS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
}  # fmt: skip


def nccl_timeouts(log: str, now: float) -> list[list[Any]]:
    """The collectives that were not over in time, one of each group, from what NCCL's watchdogs have written:
    when they end a process, no probe answers any more. `[group, operation, number, values, moment at which it
    was entered, moment of the timeout]`. The log has neither a year nor a time zone, and that may be the
    job's own: they are those in which the last timeout was about `now`.
    """
    found = []
    for month, day, hour, minute, second, number, operation, values, waited, group in _TIMEOUT.findall(log):
        if operation in ("SEND", "RECV", "COALESCED"):
            continue
        date = (time.localtime(now).tm_year, int(month), int(day), int(hour), int(minute), 0, 0, 0, -1)
        moment = time.mktime(date) + float(second)
        name = _OPERATIONS.get(operation, operation.lower())
        found.append([group, name, int(number), int(values), moment - int(waited) / 1000, moment])
    last = max((each[5] for each in found), default=now)
    ahead = round((now - last) / _ZONES) * _ZONES
    shifted = ([*each[:4], each[4] + ahead, each[5] + ahead] for each in found)
    return sorted(shifted, key=lambda each: each[4])


def _timed_out(said: Sequence[Any]) -> Call:
    group, operation, number, values, entered, _ = said
    sizes = ((int(values),),)
    moment = float(entered)
    return Call(str(group), str(operation), int(number), sizes, "", moment, False, queued=True, watched=True)


_OF_TORCH = re.compile(r"gloo|nccl|DistNetwork|DistStore|DistBackend|TCPStore|watchdog", re.IGNORECASE)


def _failed_together(how: str, error: str, said: str, stack: tuple[Frame, ...]) -> bool:
    """Whether what reads like a symptom came from a call to others: a request to a storage service times out,
    too, and a library of the script's own may abort. torch aborts with an exception of C++, in `said`.
    """
    if _OF_TORCH.search(f"{error}\n{said}"):
        return True
    if not stack:
        return "SIGABRT" not in how
    inner = stack[0]
    return inner.of_torch or inner.waits or inner.file.startswith(f"{_OURS}/trainers/")


def _peer(said: Sequence[Any] | None) -> Peer | None:
    if not said:
        return None
    operation, rank, number = said
    return Peer(str(operation), int(rank) if rank is not None else None, int(number or 0))


def _queued_peer(calls: Sequence[Fields], groups: Mapping[str, Group]) -> Peer | None:
    """Where a GPU waits in send or recv, before all that is queued behind it."""
    waits = next((each for each in calls if each.get("queued") and not each["done"]), None)
    if waits is None or not waits["point_to_point"]:
        return None
    found = _BETWEEN.fullmatch(str(waits["operation"]))
    ranks = groups[waits["group"]].ranks if waits["group"] in groups else ()
    if found is None or int(found[2]) >= len(ranks):
        return Peer(str(waits["operation"]))
    return Peer(found[1], ranks[int(found[2])], int(waits["number"]))


_BETWEEN = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
"""As torch's flight recorder names them, with the ranks in their group."""


def _served(said: Fields | None) -> Served | None:
    if not said:
        return None
    return Served(
        server=int(said["server"]),
        what=str(said["what"]),
        ranks=tuple(map(int, said["trainers"])),
        why=str(said["why"]),
        seconds=float(said["seconds"]),
    )


def _step(said: Sequence[Any] | None) -> LastStep | None:
    if not said:
        return None
    number, ago, seconds = said
    return LastStep(int(number), float(ago), float(seconds) if seconds is not None else None)


def _call(said: Fields) -> Call:
    return Call(
        group=str(said["group"]),
        operation=str(said["operation"]),
        number=int(said["number"]),
        sizes=tuple(tuple(map(int, each)) for each in said["sizes"] or ()),
        dtypes=" ".join(map(str, said["dtypes"] or ())),
        entered=said["entered_ns"] / 1e9,
        done=bool(said["done"]),
        queued=bool(said.get("queued")),
        aside=bool(said.get("aside")),
    )

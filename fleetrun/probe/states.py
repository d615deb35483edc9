"""The state of one rank, now or at its end.

It combines the answer of its probe with the launcher's facts about its process. All functions are pure.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from fleetrun.aliases import Fields, Integers, Strings
from fleetrun.envs.channels import cause_in
from fleetrun.frozen import frozen
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit

_OURS = Path(__file__).parents[2]
_LIBRARIES = ("site-packages/", "dist-packages/", "/lib/python", f"{_OURS}/trainers/", f"{_OURS}/fleetrun/")


@frozen
class Frame:
    """One frame of a stack. `code` is the text of the line, empty if unknown."""

    file: str
    line: int
    function: str
    code: str = ""

    @property
    def installed(self) -> bool:
        """True if its path belongs to a library."""
        return self.file[:1] == "<" or any(part in self.file for part in _LIBRARIES)

    @property
    def of_torch(self) -> bool:
        """True if it may call a collective. Data loaders wait in other ways."""
        return "/torch/" in self.file and "/torch/utils/data/" not in self.file

    @property
    def waits(self) -> bool:
        """True if it is in `wait` of an earlier call. That wait runs in C++, without a frame."""
        return (self.of_torch or not self.installed) and ".wait(" in self.code


@frozen
class Group:
    """A process group."""

    ranks: Integers
    """Ranks of the job."""
    entered: int
    """The number of the last entered collective, counted from 1."""
    again: bool = False
    """The group was created more than once with this name, so numbers of its calls are meaningless."""


@frozen
class Call:
    """A call of a collective."""

    group: str
    operation: str
    number: int
    """Counts the collectives of the group from 1."""
    sizes: tuple[Integers, ...]
    dtypes: str
    entered: float
    """In seconds since the epoch."""
    done: bool
    queued: bool = False
    """The call waits for a GPU, so the program may be elsewhere."""
    aside: bool = False
    """The call belongs to another thread than the main thread."""
    watched: bool = False
    """Reported by NCCL's watchdog, without types, with its own names, and up to a second early or late."""

    @property
    def title(self) -> str:
        return f"{self.operation} #{self.number}"

    @property
    def signature(self) -> str:
        """Operation, sizes and types, as far as all ranks must agree on them."""
        if self.operation not in _SAME_SIZES:
            return self.operation
        sizes = " ".join(str(list(each)) for each in self.sizes)
        return f"{self.operation} of {self.dtypes} {sizes}" if self.dtypes else f"{self.operation} of {sizes}"

    def agrees(self, other: Call) -> bool:
        """Return True if torch accepts both as the same collective.

        The number of values counts, not their shape.
        """
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
    """A wait of a trainer for parameter servers."""

    server: int
    """Number of the server."""
    what: str
    """The call in which the trainer waits."""
    ranks: Integers
    """Ranks that have not reached the call. Empty: the trainer waits for the server itself."""
    why: str
    """The current work of the server, if known."""
    seconds: float
    """Duration of the wait."""


@frozen
class Peer:
    """A wait of a rank in send or recv."""

    operation: str
    """send or recv."""
    rank: int | None = None
    """The awaited rank. None: unknown."""
    number: int = 0
    """The number of the call in the group. 0: not counted."""


@frozen
class LastStep:
    """The last step of a process."""

    number: int
    ago: float
    """Seconds from its end until the process was asked."""
    seconds: float | None
    """Duration in seconds. None: unknown."""


_COMMUNICATES = ("/torch/distributed/distributed_c10d.py", "/torch/distributed/rendezvous.py")
_ALONE = ("destroy_process_group", "_object_to_tensor", "_tensor_to_object")
"""Functions of these files that wait for no other rank."""

_SHOWN = 8


@frozen(kw_only=True)
class RankState:
    """The state of a trainer, or of a parameter server (`role` is `ps`)."""

    rank: int
    title: str
    role: str = "trainer"
    node: str = ""
    """The node of the process. Empty for the node that asks."""
    alive: bool = True
    """False for a process that has ended."""
    ok: bool = False
    """The process ended with success."""
    how: str = ""
    """The end of the process in words."""
    symptom: bool = False
    """The process may have failed because of a collective, without a fault of its own."""
    last_words: str = ""
    """The C++ exception that ended the process."""
    note: str = ""
    """The unusual state of a process that lives, such as stopped by a signal."""
    answered: bool = False
    """Its probe has answered, now or at its end. Otherwise `stack` may still be known from outside."""
    now: float = 0.0
    stack: tuple[Frame, ...] = ()
    world_rank: int | None = None
    """Its rank for torch. None: unknown."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    peer: Peer | None = None
    served: Served | None = None
    step: LastStep | None = None
    arrivals: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Times of entering the last collectives of each group, by their numbers, in seconds since the epoch."""
    ahead: float = 0.0
    """Seconds by which the clock of its node is ahead of the asking node's clock, plus or minus `unsure`."""
    unsure: float = 0.0

    @property
    def waits_in(self) -> Call | None:
        """The collective that it has entered and not completed.

        The collective of its innermost call takes precedence over the oldest collective. torch treats a
        failed collective as completed.
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
        """True if its main thread does not wait in torch, although one of its calls may be in progress."""
        if not self.stack or self.note:
            return bool(self.note)
        inner = self.stack[0]
        return not (inner.of_torch or inner.waits or inner.file.endswith(("/threading.py", "/queue.py")))

    @property
    def waits_unknown(self) -> bool:
        """True if it waits in torch, or has failed there, for an unknown rank."""
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
        """True if it has waited for others until its timeout."""
        return not self.alive and self.symptom and re.search(r"timed? ?out", self.how, re.I) is not None

    @property
    def joining(self) -> bool:
        """True if it is waiting for other ranks in `init_process_group`."""
        return (
            self.answered
            and not self.groups
            and any(each.function == "init_process_group" for each in self.stack)
        )

    def entered(self, group: str) -> int:
        """Return the number of entered collectives of this group. 0 if there are none, or if unknown."""
        if group in self.groups:
            return self.groups[group].entered
        return max((each.number for each in self.calls if each.group == group), default=0)

    def held_up(self, call: Call) -> bool:
        """Return True if it has queued this GPU call behind another call that has not ended."""
        first = self.waits_in
        if first is None or not (first.queued and call.queued) or first.watched:
            return False
        behind = self.calls[self.calls.index(first) + 1 :]
        return any((each.group, each.number) == (call.group, call.number) for each in behind)

    def call(self, group: str, number: int) -> Call | None:
        """Return the call with this number in the group, else None."""
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
        """The innermost frame of the user's code, such as `train.py:31 in load: time.sleep(60)`."""
        frames = [each for each in self.stack if not each.installed] or list(self.stack)
        if not frames:
            return ""
        own = frames[0]
        code = f": {own.code}" if own.code else ""
        return f"{own.file.rpartition('/')[2]}:{own.line} in {own.function}{code}"


def read_state(fields: Fields) -> RankState:
    """Read the state that `fleetrun.stacks` writes for one rank. Raises one of `decoding.WRONG`."""
    probe = fields.get("probe") or {}
    error = str(probe.get("error", ""))
    ending = bool(fields["alive"]) and bool(error)  # it is exiting
    symptom = bool(fields.get("symptom")) or (ending and is_symptom(Exit(1), error))
    stack = tuple(
        Frame(str(file), int(line or 0), str(function), str(code))
        for file, line, function, code in fields.get("stack", ())
    )
    world_rank = probe.get("world_rank")
    timeouts = fields.get("timeouts", ())
    groups = {
        str(name): Group(tuple(map(int, each["ranks"])), int(each.get("entered", 0)), bool(each.get("again")))
        for name, each in probe.get("groups", {}).items()
        if name and "ranks" in each
    }
    calls = probe.get("calls", ())
    return RankState(
        rank=int(fields["rank"]),
        title=str(fields["title"]),
        role=str(fields.get("role", "trainer")),
        node=str(fields.get("node", "")),
        alive=bool(fields["alive"]) and not ending,
        ok=bool(fields.get("ok")),
        how=f"failed ({cause_in(error)})" if ending else str(fields.get("how", "")),
        symptom=symptom
        and (
            bool(timeouts)
            or _failed_together(str(fields.get("how", "")), error, str(fields.get("said", "")), stack)
        ),
        last_words=str(fields.get("said", "")),
        note=str(fields.get("note", "")),
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
        ahead=float(fields.get("ahead", 0.0)),
        unsure=float(fields.get("unsure", 0.0)),
    )


_REST = r"[^\n]{0,200}"  # bounded, because a progress bar or data may be one line as long as the log
_TIMEOUT = re.compile(
    rf"\[E(\d\d)(\d\d) (\d\d):(\d\d):(\d\d\.\d+) {_REST} Watchdog caught collective operation timeout: "
    rf"WorkNCCL\(SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+),{_REST} ran for (\d+) milliseconds{_REST}\n"
    rf"{_REST} PG GUID (\w+)"
)
_ZONES = 15 * 60  # seconds; time zones and years differ by a multiple of it
_OPERATIONS = {
    "ALLREDUCE": "all_reduce", "ALLGATHER": "all_gather", "_ALLGATHER_BASE": "_all_gather_base",
    "_REDUCE_SCATTER_BASE": "_reduce_scatter_base",
}  # fmt: skip


def nccl_timeouts(log: str, now: float) -> list[list[object]]:
    """Parse the messages of NCCL's watchdogs about collectives that timed out, one per group. When a watchdog
    ends a process, no probe answers.

    Each result is `[group, operation, number, values, time of entry, time of the timeout]`. The log has
    neither a year nor a time zone, and the job may have its own time zone. Both are chosen so that the last
    timeout was at about `now`.
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


def _timed_out(row: Sequence[Any]) -> Call:
    group, operation, number, values, entered, _ = row
    sizes = ((int(values),),)
    moment = float(entered)
    return Call(str(group), str(operation), int(number), sizes, "", moment, False, queued=True, watched=True)


_OF_TORCH = re.compile(r"gloo|nccl|DistNetwork|DistStore|DistBackend|TCPStore|watchdog", re.IGNORECASE)


def _failed_together(how: str, error: str, last_words: str, stack: tuple[Frame, ...]) -> bool:
    """Return True if an apparent symptom came from a call to other ranks.

    A request to a storage service can time out too, and a library of the script may abort. torch aborts with
    a C++ exception, in `last_words`.
    """
    if _OF_TORCH.search(f"{error}\n{last_words}"):
        return True
    if not stack:
        return "SIGABRT" not in how
    inner = stack[0]
    return inner.of_torch or inner.waits or inner.file.startswith(f"{_OURS}/trainers/")


def _peer(row: Sequence[Any] | None) -> Peer | None:
    if not row:
        return None
    operation, rank, number = row
    return Peer(str(operation), int(rank) if rank is not None else None, int(number or 0))


def _queued_peer(calls: Sequence[Fields], groups: Mapping[str, Group]) -> Peer | None:
    """Return the send or recv in which a GPU waits, before all calls that are queued behind it."""
    waits = next((each for each in calls if each.get("queued") and not each["done"]), None)
    if waits is None or not waits["point_to_point"]:
        return None
    found = _BETWEEN.fullmatch(str(waits["operation"]))
    ranks = groups[waits["group"]].ranks if waits["group"] in groups else ()
    if found is None or int(found[2]) >= len(ranks):
        return Peer(str(waits["operation"]))
    return Peer(found[1], ranks[int(found[2])], int(waits["number"]))


_BETWEEN = re.compile(r"(send|recv) \d+(?:->|<-)(\d+)")
"""Names of torch's flight recorder, with the ranks in their group."""


def _served(fields: Fields | None) -> Served | None:
    if not fields:
        return None
    return Served(
        server=int(fields["server"]),
        what=str(fields["what"]),
        ranks=tuple(map(int, fields["trainers"])),
        why=str(fields["why"]),
        seconds=float(fields["seconds"]),
    )


def _step(row: Sequence[Any] | None) -> LastStep | None:
    if not row:
        return None
    number, ago, seconds = row
    return LastStep(int(number), float(ago), float(seconds) if seconds is not None else None)


def _call(fields: Fields) -> Call:
    return Call(
        group=str(fields["group"]),
        operation=str(fields["operation"]),
        number=int(fields["number"]),
        sizes=tuple(tuple(map(int, each)) for each in fields["sizes"] or ()),
        dtypes=" ".join(map(str, fields["dtypes"] or ())),
        entered=fields["entered_ns"] / 1e9,
        done=bool(fields["done"]),
        queued=bool(fields.get("queued")),
        aside=bool(fields.get("aside")),
    )

"""Find the places of a job's processes when it hangs, or when one fails that may be the victim of another.

A helper process does the work, because the launcher's loop must never wait for a process that hangs.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from fleetrun.aliases import Callback, Document, Strings
from fleetrun.decoding import WRONG
from fleetrun.envs.channels import PROBE_VARIABLE
from fleetrun.envs.contract import VISIBLE_VARIABLE, Role
from fleetrun.errors import LaunchError
from fleetrun.files import end_of
from fleetrun.frozen import frozen
from fleetrun.host.interpreter import helper_command
from fleetrun.pod.companion import Companion
from fleetrun.pod.container import Container
from fleetrun.pod.events import Detail, Findings
from fleetrun.pod.hangs import HangWatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit
from fleetrun.probe.lateness import ENOUGH, lateness, straggler
from fleetrun.probe.states import RankState, read_state
from fleetrun.probe.tree import merged
from fleetrun.probe.verdict import decide, waiting
from fleetrun.stacks.frames import Target

# ---- Collecting stacks in a helper process

WITHIN = 20.0
"""Seconds for all stacks together."""

_MORE = 10.0  # for a slow node to start the helper, and to signal a process
_MOST_LINES = 20
_LONGEST = 500


State = Document
"""The state of a rank, as `probe.states.read_state` reads it."""

Taken = Callable[[Strings, list[State]], None]


class Taker:
    """Takes stacks for one launch, in a helper process.

    `companions` holds the pid of the helper while it runs. `why` is printed above the stacks in the logs. If
    `why` is empty, the logs stay unchanged. `outside`: processes whose probes do not answer are read from
    outside, which may write their stacks into their logs. `facts`: the state of the first rank includes the
    facts of this node, as `machine`.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        why: str = "",
        *,
        outside: bool = True,
        facts: bool = False,
        within: float = WITHIN,
        more: float = _MORE,
    ) -> None:
        self.outside = outside
        self._facts = facts
        self._loop = loop
        self._companions = companions
        self._why = why
        self._within = within
        self._more = more

    def take(self, containers: Sequence[Container], then: Taken) -> Callback:
        """Start taking stacks. Return a function that cancels.

        `then` receives a line for each place with processes, or the reason why it is unknown, and the state
        of each rank.
        """
        limit = self._within + self._more
        taking = _Taking(self._loop, self._companions, containers, then, limit)
        return taking.begin(helper_command("fleetrun.stacks"), self._request(containers))

    def _request(self, containers: Sequence[Container]) -> bytes:
        request = {
            "targets": [asdict(target_of(each)) for each in containers if self.outside and each.alive],
            "ranks": [
                {
                    **_rank_fields(each),
                    "probe": each.spec.env.get(PROBE_VARIABLE, ""),
                    "log": str(each.spec.log),
                }
                for each in _ranked(containers)
            ],
            "why": self._why,
            "facts": _facts_asked(containers) if self._facts else None,
            "within": self._within,
        }
        return json.dumps(request).encode() + b"\n"


def _facts_asked(containers: Sequence[Container]) -> Document:
    visible = (each.spec.env.get(VISIBLE_VARIABLE["gpu"], "") for each in containers)
    devices = {device for each in visible for device in each.split(",") if device}
    return {"log_dir": str(containers[0].spec.log.parent), "devices": sorted(devices)} if containers else {}


def _ranked(containers: Sequence[Container]) -> list[Container]:
    """Return the processes that others may wait for."""
    return [each for each in containers if each.spec.role in (Role.TRAINER, Role.SERVER)]


def _rank_fields(container: Container) -> Document:
    """Return the launcher's facts about a rank."""
    spec, ended = container.spec, container.ended if not container.alive else None
    message = ended.message if ended is not None else ""
    how = str(ended.exit) if ended is not None else ""
    return {
        "rank": spec.rank,
        "role": str(spec.role),
        "title": spec.title,
        "alive": container.alive,
        "ok": ended is not None and ended.ok,
        "how": f"{how} ({message.splitlines()[0][:200]})" if message else how,
        "symptom": ended is not None and is_symptom(ended.exit, message),
    }


def target_of(container: Container) -> Target:
    spec = container.spec
    assert container.process is not None
    return Target(
        role=spec.label or str(spec.role),
        rank=spec.rank,
        title=spec.title,
        pid=container.process.pid,
        log=str(spec.log),
        mark=spec.mark.partition("=")[2],
    )


class _Taking:
    """One request."""

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        containers: Sequence[Container],
        then: Taken,
        limit: float,
    ) -> None:
        self._loop = loop
        self._companions = companions
        self._containers = containers
        self._then: Taken | None = then
        self._companion: Companion | None = None
        self._states: dict[str, State] = {}
        self._last = b""
        self._seconds = limit
        self._limit = loop.after(limit, self._too_long)

    def begin(self, argv: Sequence[str], request: bytes) -> Callback:
        try:
            self._companion = Companion(
                self._loop,
                self._companions,
                argv,
                received=self._received,
                ended=self._ended,
            )
        except LaunchError as error:
            why = f"cannot take the stacks: {error.message}"
            self._loop.after(0.0, lambda: self._finish((why,)))
        else:
            self._companion.write(request)
        return self._call_off

    def _received(self, line: bytes) -> None:
        """Receive a line for each rank, then the line with all places."""
        self._last = line
        with suppress(*WRONG):
            state = json.loads(line)["state"]
            self._states[state["title"]] = state

    def _ended(self, exit: Exit) -> None:
        """Finish. The last line counts, not the exit code."""
        with suppress(*WRONG):
            lines = json.loads(self._last)["stacks"]
            self._finish(tuple(str(line)[:_LONGEST] for line in lines[:_MOST_LINES]))
            return
        text = self._last.decode("utf-8", "backslashreplace")[:_LONGEST]
        self._finish((f"cannot take the stacks: {text or exit}",))

    def _too_long(self) -> None:
        self._kill()
        self._finish((f"cannot take the stacks within {self._seconds:g} s",))

    def _finish(self, lines: Strings) -> None:
        self._limit.cancel()
        if self._then is not None:
            then, self._then = self._then, None
            then(lines, self._ranks())

    def _ranks(self) -> list[State]:
        """Return the states of the ranks, with the ends of processes that have ended since."""
        return [
            {**self._states.get(each.spec.title, {}), **_rank_fields(each)}
            for each in _ranked(self._containers)
        ]

    def _call_off(self) -> None:
        self._then = None
        self._limit.cancel()
        self._kill()

    def _kill(self) -> None:
        if self._companion is not None:
            companion, self._companion = self._companion, None  # a second close might wait again
            companion.close()


# ---- The ranks that a job waits for, from the states of ranks on all nodes

AskOthers = Callable[[Detail, Callable[[list[State], str], None]], None]
"""Requests the states of all ranks of the other nodes, in the given detail, and this node's name. Calls back
exactly once, within a few seconds.
"""


@frozen
class Finder:
    """Finds the ranks that a job waits for. One per launch. `others` is None without other nodes."""

    taker: Taker
    others: AskOthers | None
    detail: Detail = Detail.OUTSIDE

    def begin(self, containers: Sequence[Container], then: Callable[[Findings], None]) -> Callback:
        """Implement `Take` of `pod.hangs`."""
        finding = _Finding(then, alone=self.others is None)
        cancel = finding.begin(self.taker, containers)
        if self.others is not None:
            self.others(self.detail, finding.handle_answers)
        return cancel


class _Finding:
    """One request."""

    def __init__(self, then: Callable[[Findings], None], *, alone: bool) -> None:
        self._then: Callable[[Findings], None] | None = then
        self._lines: Strings | None = None
        self._states: list[State] = []
        self._others: list[State] | None = [] if alone else None
        self._node = ""

    def begin(self, taker: Taker, containers: Sequence[Container]) -> Callback:
        cancel = taker.take(containers, self._taken)

        def call_off() -> None:
            self._then = None
            cancel()

        return call_off

    def _taken(self, lines: Strings, states: list[State]) -> None:
        self._lines, self._states = lines, states
        self._finish()

    def handle_answers(self, states: list[State], node: str) -> None:
        self._others, self._node = states, node
        self._finish()

    def _finish(self) -> None:
        """Call back once both parts have arrived."""
        if self._lines is not None and self._others is not None and self._then is not None:
            then, self._then = self._then, None
            here = [{**each, "node": self._node} for each in self._states]
            answers = (*here, *self._others)
            states = _read(answers)
            late = lateness(states)
            then(
                Findings(
                    self._lines,
                    merged(states),
                    decide(states),
                    waiting(states),
                    late,
                    straggler(states, late),
                    states=answers,
                )
            )


def _read(states: Sequence[State]) -> list[RankState]:
    """Read the well-formed states. They come from processes of scripts and from other nodes.

    With many ranks, fewer arrivals of each rank are read, because the launcher's loop waits meanwhile.
    """
    frames, calls, arrivals, _ = _ENOUGH[0]
    arrivals = min(arrivals, max(_FEW, _MOST_ARRIVALS // max(1, len(states))))
    found = []
    for state in states:
        with suppress(*WRONG):
            found.append(read_state(_cut(state, frames, calls, arrivals, 0)))
    return found


_MOST_ARRIVALS = 40_000  # of all ranks
_FEW = 2 * ENOUGH


_ENOUGH = ((20, 20, 200, 1 << 18), (20, 20, 60, 1 << 16), (6, 6, 20, 1 << 13), (2, 2, 2, 0), (0, 1, 0, 0))
"""Limits for frames, calls and arrivals of each rank, and for bytes of its log, from large to small. The
facts of the node are dropped with the last bytes of the log.
"""


def with_logs(states: Sequence[State], containers: Sequence[Container]) -> list[State]:
    """Add the ends of their logs to the states, for another node."""
    logs = {each.spec.title: each.spec.log for each in containers}
    found = []
    for state in states:
        with suppress(OSError):
            path = logs[state["title"]]
            state = {**state, "log": {"name": path.name, "end": end_of(path, _ENOUGH[0][3])}}
        found.append(state)
    return found


def pack_states(states: Sequence[State], most: int, asked: float) -> bytes:
    """Encode states for another node, in at most `most` bytes. Parts that do not fit are dropped.

    `asked`: the time of the request on this node's clock, in seconds since the epoch.
    """
    for enough in _ENOUGH:
        fields = {"asked": asked, "answered": time.time(), "states": [_cut(each, *enough) for each in states]}
        text = json.dumps(fields, separators=(",", ":")).encode()
        data = zlib.compress(text)
        if len(data) <= most and len(text) <= _LARGEST:
            return data
    return zlib.compress(b"{}")


def _cut(state: State, frames: int, calls: int, arrivals: int, end: int) -> State:
    probe, log = state.get("probe"), state.get("log")
    if log:
        text = log["end"]
        if len(text) > end:  # keep whole lines, because masking needs the names of secrets
            text = text[len(text) - end :].partition("\n")[2]
        state = {**state, "log": {**log, "end": text}}
    if not end:
        state = {name: value for name, value in state.items() if name != "machine"}
    if probe:
        last = {group: each[max(0, len(each) - arrivals) :] for group, each in _arrivals(probe).items()}
        probe = {**probe, "stack": [], "calls": probe.get("calls", [])[-calls:], "arrivals": last}
    return {**state, "stack": state.get("stack", [])[:frames], "probe": probe}


def _arrivals(probe: State) -> dict[str, list[object]]:
    found = probe.get("arrivals")
    return found if isinstance(found, dict) else {}


def unpack_states(data: bytes, asked: float, received: float, node: str) -> list[State]:
    """Decode the states of the ranks of `node`. Return an empty list if they are malformed.

    `asked` and `received` are the times of request and answer on this node's clock. The offset of the other
    clock follows as in NTP, which assumes that both directions take equally long.
    """
    try:
        unpacker = zlib.decompressobj()
        fields = json.loads(unpacker.decompress(data, _LARGEST))
        ahead = (fields["asked"] - asked + fields["answered"] - received) / 2
        unsure = abs(received - asked - (fields["answered"] - fields["asked"])) / 2
        return [{**each, "node": node, "ahead": ahead, "unsure": unsure} for each in fields["states"]]
    except (*WRONG, zlib.error):
        return []


_LARGEST = 4 << 20  # bytes of an answer, unpacked


# ---- --hang_timeout, and a failure that may be a symptom

_SOON = 1.5  # seconds in which processes answer, or are read from outside
_LATER = 1.5  # additional seconds, for a slow node


def quick_taker(loop: Loop, companions: set[int], detail: Detail, *, facts: bool = False) -> Taker:
    """Build a Taker for a failure, or for a look at a running job. It takes at most 3 seconds."""
    outside = detail is not Detail.PROBES
    return Taker(loop, companions, outside=outside, facts=facts, within=_SOON, more=_LATER)


def watch_for_hangs(
    loop: Loop,
    companions: set[int],
    limit: float,
    report: Callable[[Findings], None],
    others: AskOthers | None = None,
) -> HangWatch:
    """Watch for hangs.

    `companions` are helper processes of the launcher. `limit` is in seconds of silence. `report` is passed to
    `HangWatch`.
    """
    why = f"no activity for {limit:g} s (--hang_timeout)"
    taker = Finder(Taker(loop, companions, why), others)
    return HangWatch(loop, limit, taker.begin, report, partial(_ask_signs, others))


def _ask_signs(others: AskOthers | None, then: Callable[[list[float | None]], None]) -> None:
    """Implement `Ask` of `pod.hangs`. A node that does not answer does not count as silent."""
    if others is None:
        then([])
    else:
        others(Detail.SIGNS, lambda states, node: then([_quiet(each.get("quiet", 0.0)) for each in states]))


def _quiet(value: object) -> float | None:
    return value if value is None or isinstance(value, float) else 0.0

"""Finds out where the containers of a job are when it hangs, or when one fails that may be the victim of
another: in a helper process, because the launcher's loop never waits for a process that hangs.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fleetrun.aliases import Callback, Document, Strings
from fleetrun.envs.channels import PROBE_VARIABLE
from fleetrun.envs.contract import VISIBLE_VARIABLE, Role
from fleetrun.errors import LaunchError
from fleetrun.files import end_of
from fleetrun.host.interpreter import helper_command
from fleetrun.pod.companion import Companion
from fleetrun.pod.container import Container
from fleetrun.pod.events import Detail, Findings
from fleetrun.pod.hangs import HangWatch
from fleetrun.pod.loop import Loop
from fleetrun.pod.policy import is_symptom
from fleetrun.pod.process import Exit
from fleetrun.probe.lateness import ENOUGH, lateness, straggler
from fleetrun.probe.states import MALFORMED, RankState, read_state
from fleetrun.probe.tree import merged
from fleetrun.probe.verdict import decide, waiting
from fleetrun.stacks.frames import Target

# ---- Collecting stacks in a helper process

WITHIN = 20.0
"""Seconds for all stacks together."""

_MORE = 10.0  # for a slow machine to start that process, and to ask a process itself
_MOST_LINES = 20
_LONGEST = 500


State = Document
"""Where a rank is: what `probe.states.read_state` reads."""

Taken = Callable[[Strings, list[State]], None]


class Taker:
    """One for a launch. `companions` gets the pid of the process while it runs, which `argv` starts; `why`
    is printed above the stacks in the logs, where they are not written if it is empty. `outside`: processes
    that do not answer for themselves are read from outside, which may write their stacks into their logs.
    `facts`: the state of the first rank has what `doctor` measures of this machine, as `machine`.
    """

    def __init__(
        self,
        loop: Loop,
        companions: set[int],
        why: str = "",
        argv: Sequence[str] = (),
        *,
        outside: bool = True,
        facts: bool = False,
        within: float = WITHIN,
        more: float = _MORE,
    ) -> None:
        self.outside = outside
        self._facts = facts
        self._argv = argv or helper_command("fleetrun.stacks")
        self._loop = loop
        self._companions = companions
        self._why = why
        self._within = within
        self._more = more

    def take(self, containers: Sequence[Container], then: Taken) -> Callback:
        """Begin; `then` gets a line for each place where processes are, or why that is not known, and where
        each trainer is. Returns a function that cancels it.
        """
        limit = self._within + self._more
        taking = _Taking(self._loop, self._companions, containers, then, limit)
        return taking.begin(self._argv, self._request(containers))

    def _request(self, containers: Sequence[Container]) -> bytes:
        said = {
            "targets": [target_of(each).as_json() for each in containers if self.outside and each.alive],
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
        return json.dumps(said).encode() + b"\n"


def _facts_asked(containers: Sequence[Container]) -> Document:
    visible = (each.spec.env.get(VISIBLE_VARIABLE["gpu"], "") for each in containers)
    devices = {device for each in visible for device in each.split(",") if device}
    return {"log_dir": str(containers[0].spec.log.parent), "devices": sorted(devices)} if containers else {}


def _ranked(containers: Sequence[Container]) -> list[Container]:
    """Those that others may wait for."""
    return [each for each in containers if each.spec.role in (Role.TRAINER, Role.SERVER)]


def _rank_fields(container: Container) -> Document:
    """What the launcher knows of a rank."""
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
    """One time."""

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
                heard=self._heard,
                ended=self._ended,
            )
        except LaunchError as error:
            why = f"the stacks could not be taken: {error.message}"
            self._loop.after(0.0, lambda: self._finish((why,)))
        else:
            self._companion.write(request)
        return self._call_off

    def _heard(self, line: bytes) -> None:
        """A line for each rank, then that of the stacks."""
        self._last = line
        with suppress(*MALFORMED):
            state = json.loads(line)["state"]
            self._states[state["title"]] = state

    def _ended(self, exit: Exit) -> None:
        """Its exit code is not asked: the line counts."""
        self._companion = None
        with suppress(ValueError, TypeError, LookupError):
            lines = json.loads(self._last)["stacks"]
            self._finish(tuple(str(line)[:_LONGEST] for line in lines[:_MOST_LINES]))
            return
        said = self._last.decode("utf-8", "backslashreplace")[:_LONGEST]
        self._finish((f"the stacks could not be taken: {said or exit}",))

    def _too_long(self) -> None:
        self._kill()
        self._finish((f"the stacks could not be taken within {self._seconds:g} s",))

    def _finish(self, lines: Strings) -> None:
        self._limit.cancel()
        if self._then is not None:
            then, self._then = self._then, None
            then(lines, self._ranks())

    def _ranks(self) -> list[State]:
        """Where they stood, and how those have ended that have since."""
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
            companion, self._companion = self._companion, None
            companion.close()


# ---- What a job waits for: where its ranks are, here and on the other nodes

AskOthers = Callable[[Detail, Callable[[list[State], str], None]], None]
"""Gets the states of the ranks of all other nodes, in this detail, and what this node is called; calls back
exactly once, seconds later at most.
"""


class Finder:
    """One for a launch. `others` is None where there is no other node."""

    def __init__(self, taker: Taker, others: AskOthers | None, detail: Detail = Detail.OUTSIDE) -> None:
        self._taker = taker
        self._others = others
        self._detail = detail

    def begin(self, containers: Sequence[Container], then: Callable[[Findings], None]) -> Callback:
        """`Take` of `pod.hangs`."""
        finding = _Finding(then, alone=self._others is None)
        cancel = finding.begin(self._taker, containers)
        if self._others is not None:
            self._others(self._detail, finding.told)
        return cancel


class _Finding:
    """One time."""

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

    def told(self, states: list[State], node: str) -> None:
        self._others, self._node = states, node
        self._finish()

    def _finish(self) -> None:
        """Once both are there."""
        if self._lines is not None and self._others is not None and self._then is not None:
            then, self._then = self._then, None
            here = [{**each, "node": self._node} for each in self._states]
            said = (*here, *self._others)
            states = _read(said)
            late = lateness(states)
            then(
                Findings(
                    self._lines,
                    merged(states),
                    decide(states),
                    waiting(states),
                    late,
                    straggler(states, late),
                    states=said,
                )
            )


def _read(states: Sequence[State]) -> list[RankState]:
    """Those that can be read: they come from scripts' processes and other machines. Of many ranks fewer
    arrivals are looked at each: the launcher's loop waits meanwhile.
    """
    frames, calls, arrivals, _ = _ENOUGH[0]
    arrivals = min(arrivals, max(_FEW, _MOST_ARRIVALS // max(1, len(states))))
    found = []
    for state in states:
        with suppress(*MALFORMED):
            found.append(read_state(_cut(state, frames, calls, arrivals, 0)))
    return found


_MOST_ARRIVALS = 40_000  # of all ranks
_FEW = 2 * ENOUGH


_ENOUGH = ((20, 20, 200, 1 << 18), (20, 20, 60, 1 << 16), (6, 6, 20, 1 << 13), (2, 2, 2, 0), (0, 1, 0, 0))
"""Frames, calls and arrivals of each rank, and bytes of its log, less and less; the facts of the machine go
with its last bytes.
"""


def with_logs(states: Sequence[State], containers: Sequence[Container]) -> list[State]:
    """With the ends of their logs, for another node."""
    logs = {each.spec.title: each.spec.log for each in containers}
    found = []
    for state in states:
        with suppress(OSError):
            path = logs[state["title"]]
            state = {**state, "log": {"name": path.name, "end": end_of(path, _ENOUGH[0][3])}}
        found.append(state)
    return found


def pack_states(states: Sequence[State], most: int, asked: float) -> bytes:
    """For another node, in at most so many bytes: what does not fit is left out. `asked`: when it was here
    that the node asked, seconds since the epoch.
    """
    for enough in _ENOUGH:
        said = {"asked": asked, "answered": time.time(), "states": [_cut(each, *enough) for each in states]}
        text = json.dumps(said, separators=(",", ":")).encode()
        data = zlib.compress(text)
        if len(data) <= most and len(text) <= _LARGEST:
            return data
    return zlib.compress(b"{}")


def _cut(state: State, frames: int, calls: int, arrivals: int, end: int) -> State:
    probe, log = state.get("probe"), state.get("log")
    if log:
        state = {**state, "log": {**log, "end": _last_lines(log["end"], end)}}
    if not end:
        state = {name: value for name, value in state.items() if name != "machine"}
    if probe:
        last = {group: each[max(0, len(each) - arrivals) :] for group, each in _arrivals(probe).items()}
        probe = {**probe, "stack": [], "calls": probe.get("calls", [])[-calls:], "arrivals": last}
    return {**state, "stack": state.get("stack", [])[:frames], "probe": probe}


def _last_lines(text: str, most: int) -> str:
    """Whole lines: what masks secrets has to see their names."""
    return text if len(text) <= most else text[len(text) - most :].partition("\n")[2]


def _arrivals(probe: State) -> dict[str, list[Any]]:
    found = probe.get("arrivals")
    return found if isinstance(found, dict) else {}


def unpack_states(data: bytes, asked: float, heard: float, node: str) -> list[State]:
    """Of the ranks of `node`, which was asked and heard at these times of this node's clock; none if that
    cannot be read. How far its clock is ahead follows as in NTP: the way there and back is taken to be
    equally long.
    """
    try:
        unpacker = zlib.decompressobj()
        said = json.loads(unpacker.decompress(data, _LARGEST))
        ahead = (said["asked"] - asked + said["answered"] - heard) / 2
        unsure = abs(heard - asked - (said["answered"] - said["asked"])) / 2
        return [{**each, "node": node, "ahead": ahead, "unsure": unsure} for each in said["states"]]
    except (*MALFORMED, zlib.error, RecursionError):
        return []


_LARGEST = 4 << 20  # bytes of an answer, unpacked


# ---- --hang_timeout, and a failure that may be a symptom

_SOON = 1.5  # seconds in which processes answer, or are read from outside
_LATER = 1.5  # more, for a slow machine


def quick_taker(loop: Loop, companions: set[int], detail: Detail, *, facts: bool = False) -> Taker:
    """For a failure, or to look how a job fares: it takes 3 seconds at most."""
    outside = detail is not Detail.PROBES
    return Taker(loop, companions, outside=outside, facts=facts, within=_SOON, more=_LATER)


def watch_for_hangs(
    loop: Loop,
    companions: set[int],
    limit: float,
    tell: Callable[[Findings], None],
    others: AskOthers | None = None,
) -> HangWatch:
    """`companions` are helper processes of the launcher, `limit` the seconds of silence; `tell` is
    `HangWatch`'s.
    """
    why = f"no sign of life for {limit:g} s (--hang_timeout)"
    taker = Finder(Taker(loop, companions, why), others)
    return HangWatch(loop, limit, taker.begin, tell, partial(_ask_signs, others))


def _ask_signs(others: AskOthers | None, then: Callable[[list[float | None]], None]) -> None:
    """`Ask` of `pod.hangs`. A node that does not answer is not taken to be silent."""
    if others is None:
        then([])
    else:
        others(Detail.SIGNS, lambda states, node: then([_quiet(each.get("quiet", 0.0)) for each in states]))


def _quiet(value: object) -> float | None:
    return value if value is None or isinstance(value, float) else 0.0

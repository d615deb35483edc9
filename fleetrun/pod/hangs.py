"""Recognises a job that runs and does nothing: looks at the logs of its trainers now and then, counts their
reports, and has the stacks of all processes taken before it reports a hang. What follows the supervisor
decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from fleetrun.aliases import Callback, Fields
from fleetrun.envs.contract import Role
from fleetrun.pod.container import Container, Pod
from fleetrun.pod.events import (
    HUNG,
    Ending,
    Findings,
    Hang,
    Late,
    Leaving,
    RestartAsked,
    Restarting,
    Started,
    Verdict,
)
from fleetrun.pod.loop import Loop, Timer
from fleetrun.values import frozen, replace

# ---- The decision: pure, from looks at the trainers

LOOKS = 4
"""In so many looks, one after the other at equal distances, a hang is seen."""


class Silence:
    """Counts checks that found no sign of life, not time: while the launcher could not check (it was stopped
    with Ctrl-Z, or the machine was suspended) no trainer counts as silent.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._seen: dict[str, Hashable] = {}

    def look(self, seen: Mapping[str, Hashable]) -> bool:
        """`seen` has for each trainer that runs a value that changes with its signs of life. True when none
        of them has given one in `LOOKS` looks; one that has is enough, and one that has ended is not
        waited for.
        """
        alive = not seen or any(
            name not in self._seen or self._seen[name] != value for name, value in seen.items()
        )
        self._quiet = 0 if alive else self._quiet + 1
        self._seen = dict(seen)
        return self._quiet >= LOOKS


# ---- The watch: looks at logs, counts reports, has the stacks taken

Take = Callable[[Sequence[Container], Callable[[Findings], None]], Callback]
"""Begins to find out where these containers are, those that have ended included, and to write the stacks into
their logs; calls back exactly once, later. Returns a function that cancels it.
"""


Ask = Callable[[Callable[[Sequence[float | None]], None]], None]
"""Gets from each other node for how many seconds its trainers have given no sign of life, None where none
runs; calls back exactly once, later.
"""


def _nothing_taken(containers: Sequence[Container], then: Callable[[Findings], None]) -> Callback:
    then(Findings())
    return lambda: None


class _Watch:
    """Of trainers' signs of life: what they print and report. It has a timer or is finding out where ranks
    are, and both can be called off.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._reports: Counter[str] = Counter()
        self._timer: Timer | None = None
        self._cancel: Callback | None = None

    def reported(self, container: str) -> None:
        """A sign of life that no log shows."""
        self._reports[container] += 1

    def close(self) -> None:
        """Watch no more: processes that are being stopped may be silent. May be called twice."""
        self._reports.clear()
        if self._cancel is not None:
            cancel, self._cancel = self._cancel, None
            cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sign(self, container: Container) -> Hashable:
        """Something else after each sign of life, and in each attempt."""
        reports = self._reports[container.spec.name]
        try:
            found = container.spec.log.stat()
            return container.restarts, reports, found.st_size, found.st_mtime_ns
        except OSError:  # the script took its log away
            return container.restarts, reports, 0, 0


class HangWatch(_Watch):
    """One for a launch, over all its pods: wakes a few times within `limit` seconds, not oftener, and without
    a limit never. The node of the job's first trainer decides, when it has asked the others.
    """

    def __init__(
        self,
        loop: Loop,
        limit: float | None = None,
        take: Take = _nothing_taken,
        tell: Callable[[Findings], None] = lambda findings: None,
        ask: Ask = lambda then: then(()),
    ) -> None:
        """`tell` is called with where all processes here are when the job hangs on another machine."""
        super().__init__(loop)
        self._limit = limit
        self._take = take
        self._tell = tell
        self._ask = ask
        self._asking = False
        self._silence = Silence()
        self._pod: Pod | None = None
        self._hung: Callable[[float, Findings], None] = lambda seconds, findings: None

    def watch(self, pod: Pod, hung: Callable[[float, Findings], None]) -> None:
        """From now on; `hung` is called with the seconds of silence and with where all processes are."""
        self.close()
        self._pod, self._hung = pod, hung
        self._silence = Silence()
        if self._limit is not None:
            self._look()

    def last_look(self, reason: str, then: Callback) -> None:
        """Before a stop for this reason of another machine: if that is a hang, have the stacks taken here
        too, for what all wait for may be here. `then` is called after that, unless it is called off.
        """
        if self._limit is None or self._pod is None or not reason.endswith(HUNG):
            then()
            return

        def looked(seconds: float, findings: Findings) -> None:
            self._tell(findings)
            then()

        self._hung = looked
        if self._cancel is None:
            self._cancel = self._take(self._pod.containers, partial(self._taken, self._limit))

    def _look(self) -> None:
        assert self._pod is not None
        assert self._limit is not None
        self._timer = self._loop.after(self._limit / LOOKS, self._look)
        trainers = [each for each in self._pod.containers if each.spec.role is Role.TRAINER]
        signs = {each.spec.name: self._sign(each) for each in trainers if each.alive}
        silent = self._silence.look(signs)
        first = any(each.spec.rank == 0 for each in trainers)
        if first and (silent or not signs) and self._cancel is None and not self._asking:
            self._asking = True
            self._ask(partial(self._told, self._silence, [self._limit] if silent else []))

    def _told(self, asked: Silence, here: Sequence[float], others: Sequence[float | None]) -> None:
        """The answers are here. The job hangs if no trainer that runs has given a sign."""
        assert self._pod is not None
        assert self._limit is not None
        self._asking = False
        quiet = min((each for each in (*here, *others) if each is not None), default=0.0)
        still = asked is self._silence and self._timer is not None and self._cancel is None
        if still and quiet >= self._limit:
            self._cancel = self._take(self._pod.containers, partial(self._taken, self._limit))

    def one_hangs(self, container: Container, silent_for: float) -> None:
        """As if all were silent."""
        if self._pod is not None and self._cancel is None:
            taken = partial(self._taken, silent_for, alone=container.spec.title)
            self._cancel = self._take(self._pod.containers, taken)

    def _taken(self, silent_for: float, findings: Findings, alone: str = "") -> None:
        self._cancel = None
        self._silence = Silence()
        self._hung(silent_for, replace(findings, alone=alone))


# ---- A warning, without --hang_timeout: in two looks the same ranks wait in the same collective, or one rank
# is silent while others are not

FIRST_LOOK = 30.0
"""Seconds of silence before the first look, and between two where ranks wait."""

_LONGEST_PERIOD = 300.0


class Rhythm:
    """How often a process gives a sign of life: what is unusual for it is learned from it."""

    def __init__(self, sign: Hashable, now: float) -> None:
        self._sign = sign
        self._signs = 0
        self._longest = 0.0
        self.since = now
        """When its last sign was seen."""
        self.quiet = 0.0
        """Seconds for which it has given none."""

    def look(self, sign: Hashable, now: float) -> None:
        if sign == self._sign:
            self.quiet = now - self.since
        else:
            self._longest = max(self._longest, self.quiet)
            self._sign, self._signs, self.since, self.quiet = sign, self._signs + 1, now, 0.0

    def silent(self, least: float, times: float) -> bool:
        """Whether it has been for unusually long: so many times the longest silence so far, and `least`
        seconds. One that gave few signs of life owes none.
        """
        return self._signs >= _REGULAR and self.quiet >= max(least, times * self._longest)


_REGULAR = 4
_MINUTE = 60.0

Busy = Callable[[str], bool]
"""Whether the container of this name has told an activity that has not ended: it may be silent."""


class PodWatch(_Watch):
    """One for a launch, over all its pods; a listener of their events."""

    def __init__(self, loop: Loop, busy: Busy = lambda container: False) -> None:
        super().__init__(loop)
        self._busy = busy
        self._containers: list[Container] = []
        self._rhythms: dict[str, Rhythm] = {}

    def handle(self, event: object) -> None:
        """Watch from the start of processes until they are stopped."""
        if isinstance(event, Started):
            new = {each.spec.name for each in event.containers}
            kept = [each for each in self._containers if each.spec.name not in new]
            self._containers = [*kept, *event.containers]
            self._rhythms = {name: each for name, each in self._rhythms.items() if name not in new}
            self._started(new)
        elif isinstance(event, Hang | RestartAsked | Restarting | Leaving | Ending):
            self.close()

    def heard(self, container: str, report: object) -> None:
        """A listener of progress."""
        self.reported(container)

    def _started(self, names: set[str]) -> None:
        """These containers have a new process."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._rhythms.clear()

    @property
    def _trainers(self) -> list[Container]:
        return [each for each in self._containers if each.spec.role is Role.TRAINER]

    def _hear(self, least: float, times: float = 20.0) -> list[Container]:
        """The trainers that are silent for so long now, and unusually long for each."""
        now = self._loop.clock()
        silent = []
        for each in self._trainers:
            sign = self._sign(each)
            rhythm = self._rhythms.setdefault(each.spec.name, Rhythm(sign, now))
            rhythm.look(sign, now)
            running = each.alive or each.ended is None
            if running and rhythm.silent(least, times) and not self._busy(each.spec.name):
                silent.append(each)
        return silent

    def _quiet(self, container: Container) -> float:
        return self._rhythms[container.spec.name].quiet


class WaitWatch(PodWatch):
    """While all trainers of this node are silent, or one is for unusually long, it finds out where all ranks
    are, less and less often as long as they make progress. `find` is `Take`; `tell` gets what was seen in two
    looks, once: not of a rank that tells what it does, nor of a wait at most twice as long as one before it
    after which the job went on.
    """

    def __init__(
        self,
        loop: Loop,
        find: Take,
        tell: Callable[[Verdict], None],
        busy: Busy = lambda container: False,
    ) -> None:
        super().__init__(loop, busy)
        self._find = find
        self._tell = tell
        self._since: float | None = None
        """When the wait that is seen now was first seen."""
        self._usual = 0.0
        """Seconds of the longest wait after which the job went on."""
        self._period = FIRST_LOOK
        self._signs: Hashable = None
        self._seen: Hashable = None
        self._told: set[Hashable] = set()

    def _started(self, names: set[str]) -> None:
        self._again()

    def close(self) -> None:
        super().close()
        self._period, self._signs, self._seen, self._since = FIRST_LOOK, None, None, None

    def _again(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.after(self._period, self._look)

    def _look(self) -> None:
        signs = tuple(self._sign(each) for each in self._trainers)
        alive = signs != self._signs
        self._signs = signs
        silent = self._hear(_MINUTE)
        if not alive or silent:
            self._cancel = self._find(self._containers, partial(self._found, silent if alive else []))
        else:
            if self._since is not None:
                self._usual = max(self._usual, self._loop.clock() - self._since)
            self._seen, self._since, self._period = None, None, FIRST_LOOK
            self._again()

    def _found(self, silent: Sequence[Container], findings: Findings) -> None:
        """`silent` are so while others are not."""
        self._cancel = None
        verdict = findings.verdict
        alone = next((each for each in silent if each.spec.rank not in findings.waiting), None)
        seen: Hashable = None
        if verdict is not None and (verdict.call or verdict.kind != "server"):  # a save may take its time
            seen = (verdict.kind, verdict.ranks, verdict.call or verdict.sentence)
        elif alone is not None:
            verdict = self._of_silent(alone)
            seen = (verdict.kind, alone.spec.name, self._rhythms[alone.spec.name].since)
        if self._since is None or seen != self._seen:
            self._since = None if seen is None else self._loop.clock()
        elif verdict is not None and seen not in self._told and self._is_unusual(verdict, self._since):
            self._told.add(seen)
            self._tell(verdict)
        nothing_new = seen is None or seen in self._told
        self._period = min(2 * self._period, _LONGEST_PERIOD) if nothing_new else FIRST_LOOK
        self._seen = seen
        self._again()

    def _is_unusual(self, verdict: Verdict, since: float) -> bool:
        names = (each.spec.name for each in self._trainers if each.spec.rank in verdict.ranks)
        return self._loop.clock() - since > 2 * self._usual and not any(map(self._busy, names))

    def _of_silent(self, container: Container) -> Verdict:
        quiet = self._quiet(container)
        sentence = (
            f"{container.spec.title} has printed and reported nothing for {quiet:.0f} s, and others have"
        )
        return Verdict(kind="silent", sentence=sentence, ranks=(container.spec.rank,))


class AloneWatch(PodWatch):
    """With a `limit`: recognises a trainer that hangs while others go on. It has been silent for so many
    seconds, unusually long for it, and in `LOOKS` looks it waits for no other and does not move.
    """

    def __init__(
        self, loop: Loop, limit: float, find: Take, hangs: Callable[[Container, float], None], busy: Busy
    ) -> None:
        super().__init__(loop, busy)
        self._limit = limit
        self._find = find
        self._hangs = hangs
        self._still: dict[str, tuple[int, _Stand]] = {}

    def close(self) -> None:
        super().close()
        self._still.clear()

    def _started(self, names: set[str]) -> None:
        if self._timer is None and self._cancel is None:
            self._look()

    def _look(self) -> None:
        self._timer = None
        silent = self._hear(self._limit, 3.0)  # its user has said how long is too long
        if silent:
            self._cancel = self._find(self._containers, partial(self._found, silent))
        else:
            self._found([], Findings())

    def _found(self, silent: Sequence[Container], findings: Findings) -> None:
        self._cancel = None
        self._timer = self._loop.after(self._limit / LOOKS, self._look)
        before, self._still = self._still, {}
        for each in silent:
            if each.spec.rank not in findings.waiting:
                looks, last = before.get(each.spec.name, (0, None))
                now = _Stand.of(each, findings.states)
                looks = looks + 1 if last is not None and last.is_still(now) else 1
                self._still[each.spec.name] = looks, now
                if looks == LOOKS:
                    self._hangs(each, round(self._quiet(each)))


@frozen
class _Stand:
    """Where a process was in a look; `pauses`: how often it had begun to wait."""

    place: Hashable
    pauses: int

    @classmethod
    def of(cls, container: Container, states: Sequence[Fields]) -> _Stand:
        state = next((each for each in states if each.get("title") == container.spec.title), {})
        probe = state.get("probe")
        calls = probe.get("calls") if isinstance(probe, dict) else None
        pauses = container.process.pauses() if container.process is not None else 0
        return cls(f"{state.get('stack')} {calls}", pauses)

    def is_still(self, later: _Stand) -> bool:
        """Whether it has not moved since: one that sleeps again and again, as a script does that waits for a
        file, moves.
        """
        return self.place == later.place and later.pauses - self.pauses <= _OF_A_LOOK


_OF_A_LOOK = 4
"""So often a process pauses because somebody looks at it from outside."""


# ---- Ranks that keep the others waiting, of a job that makes progress

LATENESS_PERIOD = 60.0
"""Seconds between two looks: to tell all its collectives takes a process up to 0.1 s."""

STRAGGLES = 5
"""In so many looks, one after the other, the same rank is late: of equally fast ranks it is another one."""


class LateWatch(PodWatch):
    """Looks which ranks come late to collectives, less and less often where none is known to have any. `tell`
    gets what each look finds; `warn` a rank that was late in all of the last looks, once.
    """

    def __init__(
        self,
        loop: Loop,
        find: Take,
        tell: Callable[[tuple[Late, ...]], None],
        warn: Callable[[Verdict], None],
    ) -> None:
        super().__init__(loop)
        self._find = find
        self._tell = tell
        self._warn = warn
        self._period = LATENESS_PERIOD
        self._looks: Counter[int] = Counter()
        """In how many looks, up to the last one, a rank was late."""
        self._told: set[int] = set()

    def close(self) -> None:
        super().close()
        self._period = LATENESS_PERIOD
        self._looks.clear()

    def _started(self, names: set[str]) -> None:
        if self._timer is None and self._cancel is None:
            self._timer = self._loop.after(self._period, self._look)

    def _look(self) -> None:
        self._timer = None
        self._cancel = self._find(self._containers, self._found)

    def _found(self, findings: Findings) -> None:
        self._cancel = None
        self._period = LATENESS_PERIOD if findings.late else min(2 * self._period, _LONGEST_PERIOD)
        self._tell(findings.late)
        verdict = findings.straggler
        ranks = verdict.ranks if verdict is not None else ()
        self._looks = Counter({rank: 1 + self._looks[rank] for rank in ranks})
        if verdict is not None and self._looks[ranks[0]] >= STRAGGLES and ranks[0] not in self._told:
            self._told.add(ranks[0])
            self._warn(verdict)
        self._timer = self._loop.after(self._period, self._look)

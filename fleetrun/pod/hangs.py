"""Detect a job that runs without progress.

The watches look at the logs of trainers periodically and count their reports. Before they report a hang, they
collect the stacks of all processes. The supervisor decides what follows.
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
"""Number of consecutive looks, at equal distances, that show a hang."""


class Silence:
    """Counts looks without activity.

    It counts looks and not time. Time in which the launcher cannot look (after Ctrl-Z, or on a suspended
    node) therefore does not count.
    """

    def __init__(self) -> None:
        self._quiet = 0
        self._seen: dict[str, Hashable] = {}

    def look(self, seen: Mapping[str, Hashable]) -> bool:
        """Return True if all trainers have been silent in `LOOKS` looks.

        `seen` maps each running trainer to a value that changes with its activity. Activity of one trainer is
        enough, and trainers that ended do not count.
        """
        alive = not seen or any(
            name not in self._seen or self._seen[name] != value for name, value in seen.items()
        )
        self._quiet = 0 if alive else self._quiet + 1
        self._seen = dict(seen)
        return self._quiet >= LOOKS


# ---- The watch: looks at logs, counts reports, and collects stacks

Take = Callable[[Sequence[Container], Callable[[Findings], None]], Callback]
"""Starts to find where these containers are, including ended ones, and to write their stacks into their logs.

It calls back exactly once, later, and returns a function that cancels the search.
"""


Ask = Callable[[Callable[[Sequence[float | None]], None]], None]
"""Gets from each other node the seconds since its trainers showed activity, or None if no trainer runs there.

It calls back exactly once, later.
"""


def _nothing_taken(containers: Sequence[Container], then: Callable[[Findings], None]) -> Callback:
    then(Findings())
    return lambda: None


class _Watch:
    """Tracks the activity of trainers, their output and their reports.

    The watch either has a timer or is finding where ranks are. Both can be cancelled.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._reports: Counter[str] = Counter()
        self._timer: Timer | None = None
        self._cancel: Callback | None = None

    def reported(self, container: str) -> None:
        """Count activity that is missing from the logs."""
        self._reports[container] += 1

    def close(self) -> None:
        """Stop watching, because processes that are being stopped may be silent. You may call it twice."""
        self._reports.clear()
        if self._cancel is not None:
            cancel, self._cancel = self._cancel, None
            cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sign(self, container: Container) -> Hashable:
        """Return a value that changes with each activity and with each attempt."""
        reports = self._reports[container.spec.name]
        try:
            found = container.spec.log.stat()
            return container.restarts, reports, found.st_size, found.st_mtime_ns
        except OSError:  # the script removed its log
            return container.restarts, reports, 0, 0


class HangWatch(_Watch):
    """Detects hangs of one run, over all its pods.

    With a `limit` in seconds, the watch wakes a few times within it. The node of the job's first trainer
    decides, after asking the other nodes.
    """

    def __init__(
        self,
        loop: Loop,
        limit: float | None = None,
        take: Take = _nothing_taken,
        report: Callable[[Findings], None] = lambda findings: None,
        ask: Ask = lambda then: then(()),
    ) -> None:
        """Make the watch. If the job hangs on another node, `report` receives where all processes here
        are.
        """
        super().__init__(loop)
        self._limit = limit
        self._take = take
        self._report = report
        self._ask = ask
        self._asking = False
        self._silence = Silence()
        self._pod: Pod | None = None
        self._hung: Callable[[float, Findings], None] = lambda seconds, findings: None

    def watch(self, pod: Pod, hung: Callable[[float, Findings], None]) -> None:
        """Start watching. `hung` receives the seconds of silence and where all processes are."""
        self.close()
        self._pod, self._hung = pod, hung
        self._silence = Silence()
        if self._limit is not None:
            self._look()

    def last_look(self, reason: str, then: Callback) -> None:
        """Collect the stacks on this node before a stop that another node requested because of a hang.

        The process that blocks all others may be here. The watch then calls `then`, unless it is cancelled.
        For any other reason it calls `then` directly.
        """
        if self._limit is None or self._pod is None or not reason.endswith(HUNG):
            then()
            return

        def looked(seconds: float, findings: Findings) -> None:
            self._report(findings)
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
            self._ask(partial(self._receive_answers, self._silence, [self._limit] if silent else []))

    def _receive_answers(self, asked: Silence, here: Sequence[float], others: Sequence[float | None]) -> None:
        """Handle the answers of the other nodes. The job hangs if all running trainers were silent."""
        assert self._pod is not None
        assert self._limit is not None
        self._asking = False
        quiet = min((each for each in (*here, *others) if each is not None), default=0.0)
        still = asked is self._silence and self._timer is not None and self._cancel is None
        if still and quiet >= self._limit:
            self._cancel = self._take(self._pod.containers, partial(self._taken, self._limit))

    def one_hangs(self, container: Container, silent_for: float) -> None:
        """Report a hang of one trainer, as if all trainers were silent."""
        if self._pod is not None and self._cancel is None:
            taken = partial(self._taken, silent_for, alone=container.spec.title)
            self._cancel = self._take(self._pod.containers, taken)

    def _taken(self, silent_for: float, findings: Findings, alone: str = "") -> None:
        self._cancel = None
        self._silence = Silence()
        self._hung(silent_for, replace(findings, alone=alone))


# ---- A warning, without --hang_timeout: two looks find the same ranks in the same collective, or one silent
# rank among active ones

FIRST_LOOK = 30.0
"""Seconds of silence before the first look, and between two looks while ranks wait."""

_LONGEST_PERIOD = 300.0


class Rhythm:
    """How often a process shows activity. It learns which silence is unusual for the process."""

    def __init__(self, sign: Hashable, now: float) -> None:
        self._sign = sign
        self._signs = 0
        self._longest = 0.0
        self.since = now
        """When its last activity was seen."""
        self.quiet = 0.0
        """Seconds since its last activity."""

    def look(self, sign: Hashable, now: float) -> None:
        if sign == self._sign:
            self.quiet = now - self.since
        else:
            self._longest = max(self._longest, self.quiet)
            self._sign, self._signs, self.since, self.quiet = sign, self._signs + 1, now, 0.0

    def silent(self, least: float, times: float) -> bool:
        """Return True if the process has been silent for unusually long.

        The silence must last at least `least` seconds, and `times` its longest silence so far. A process with
        little activity so far is never unusual.
        """
        return self._signs >= _REGULAR and self.quiet >= max(least, times * self._longest)


_REGULAR = 4
_MINUTE = 60.0

Busy = Callable[[str], bool]
"""Returns True if the container with this name reported an activity that has not ended, and so may be
silent.
"""


class PodWatch(_Watch):
    """Watches one run, over all its pods. It listens to their events."""

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

    def count_report(self, container: str, report: object) -> None:
        """Count a progress report."""
        self.reported(container)

    def _started(self, names: set[str]) -> None:
        """Handle new processes of these containers."""
        raise NotImplementedError

    def close(self) -> None:
        super().close()
        self._rhythms.clear()

    @property
    def _trainers(self) -> list[Container]:
        return [each for each in self._containers if each.spec.role is Role.TRAINER]

    def _silent_trainers(self, least: float, times: float = 20.0) -> list[Container]:
        """Return the trainers that have been silent for `least` seconds and unusually long for each of
        them.
        """
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
    """Finds where all ranks wait, and warns about it.

    The watch looks while all trainers of this node are silent, or while one is silent for unusually long. As
    long as ranks make progress, the looks become less frequent. `find` is `Take`. `report` receives a wait
    that two looks found, once. The watch skips a rank that reports an activity, and a wait at most twice as
    long as an earlier one that ended by itself.
    """

    def __init__(
        self,
        loop: Loop,
        find: Take,
        report: Callable[[Verdict], None],
        busy: Busy = lambda container: False,
    ) -> None:
        super().__init__(loop, busy)
        self._find = find
        self._report = report
        self._since: float | None = None
        """When the current wait was first seen."""
        self._usual = 0.0
        """Seconds of the longest wait that ended by itself."""
        self._period = FIRST_LOOK
        self._signs: Hashable = None
        self._seen: Hashable = None
        self._reported: set[Hashable] = set()

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
        silent = self._silent_trainers(_MINUTE)
        if not alive or silent:
            self._cancel = self._find(self._containers, partial(self._found, silent if alive else []))
        else:
            if self._since is not None:
                self._usual = max(self._usual, self._loop.clock() - self._since)
            self._seen, self._since, self._period = None, None, FIRST_LOOK
            self._again()

    def _found(self, silent: Sequence[Container], findings: Findings) -> None:
        """Handle the findings. `silent` are trainers that are silent while others are active."""
        self._cancel = None
        verdict = findings.verdict
        alone = next((each for each in silent if each.spec.rank not in findings.waiting), None)
        seen: Hashable = None
        if verdict is not None and (verdict.call or verdict.kind != "server"):  # a save may take long
            seen = (verdict.kind, verdict.ranks, verdict.call or verdict.sentence)
        elif alone is not None:
            quiet = self._quiet(alone)
            sentence = (
                f"{alone.spec.title} has printed and reported nothing for {quiet:.0f} s, and others have"
            )
            verdict = Verdict(kind="silent", sentence=sentence, ranks=(alone.spec.rank,))
            seen = (verdict.kind, alone.spec.name, self._rhythms[alone.spec.name].since)
        if self._since is None or seen != self._seen:
            self._since = None if seen is None else self._loop.clock()
        elif verdict is not None and seen not in self._reported and self._is_unusual(verdict, self._since):
            self._reported.add(seen)
            self._report(verdict)
        nothing_new = seen is None or seen in self._reported
        self._period = min(2 * self._period, _LONGEST_PERIOD) if nothing_new else FIRST_LOOK
        self._seen = seen
        self._again()

    def _is_unusual(self, verdict: Verdict, since: float) -> bool:
        names = (each.spec.name for each in self._trainers if each.spec.rank in verdict.ranks)
        return self._loop.clock() - since > 2 * self._usual and not any(map(self._busy, names))


class AloneWatch(PodWatch):
    """Detects a trainer that hangs while other trainers continue.

    The trainer must have been silent for `limit` seconds, and unusually long for it. In `LOOKS` looks it must
    not move, and must not wait for other ranks.
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
        silent = self._silent_trainers(self._limit, 3.0)  # the user chose how long is too long
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
    """The state of a process in one look. `pauses` counts how often it had started to wait."""

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
        """Return True if the process has not moved since this look.

        A process that sleeps repeatedly, such as a script that waits for a file, moves.
        """
        return self.place == later.place and later.pauses - self.pauses <= _OF_A_LOOK


_OF_A_LOOK = 4
"""Pauses that a look from outside may cause."""


# ---- Ranks that keep others waiting in a job with progress

LATENESS_PERIOD = 60.0
"""Seconds between two looks. A process needs up to 0.1 s to list all its collectives."""

STRAGGLES = 5
"""Consecutive looks in which the same rank is late. Among equally fast ranks, the late rank changes."""


class LateWatch(PodWatch):
    """Finds which ranks come late to collectives. The looks become less frequent while all ranks are
    punctual.

    `report` receives the result of each look. `warn` receives a rank that was late in all of the last looks,
    once.
    """

    def __init__(
        self,
        loop: Loop,
        find: Take,
        report: Callable[[tuple[Late, ...]], None],
        warn: Callable[[Verdict], None],
    ) -> None:
        super().__init__(loop)
        self._find = find
        self._report = report
        self._warn = warn
        self._period = LATENESS_PERIOD
        self._looks: Counter[int] = Counter()
        """Number of consecutive looks, up to the last one, in which a rank was late."""
        self._reported: set[int] = set()

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
        self._report(findings.late)
        verdict = findings.straggler
        ranks = verdict.ranks if verdict is not None else ()
        self._looks = Counter({rank: 1 + self._looks[rank] for rank in ranks})
        if verdict is not None and self._looks[ranks[0]] >= STRAGGLES and ranks[0] not in self._reported:
            self._reported.add(ranks[0])
            self._warn(verdict)
        self._timer = self._loop.after(self._period, self._look)

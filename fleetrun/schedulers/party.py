"""All hosts of a job that ssh started: when one fails the others end, and what the exit code is."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fleetrun.pod.guardian import Guard
from fleetrun.pod.loop import Loop
from fleetrun.pod.signals import PASSED_ON, Signals
from fleetrun.schedulers.base import Console
from fleetrun.schedulers.clients import asked_to_end
from fleetrun.schedulers.farewell import Verdict, judge
from fleetrun.schedulers.link import Farewell, Link, Orders

_BEATS = 4  # signs of life within the time after which a silent side is given up
_MARGIN = 5.0  # seconds for what ends by itself to say so


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """In seconds: silence after which a host is lost, and how long processes may take to stop."""

    heartbeat_timeout: float
    stop_timeout: float

    @property
    def grace(self) -> float:
        """How long a fleetrun that was asked to end may take: workers, then servers."""
        return 2 * self.stop_timeout + _MARGIN


class Party:
    """Runs one connection per host until all have ended."""

    def __init__(self, console: Console, signals: Signals, guard: Guard, pace: Pace) -> None:
        self._console = console
        self._signals = signals
        self._guard = guard
        self._pace = pace
        self._loop = Loop()
        self._links: list[Link] = []
        self._code = 0
        self._asked = 0

    def run(self, commands: dict[str, list[str]], env: dict[str, str]) -> int:
        """`commands` by host. Returns the exit code: that of the first failure."""
        console, loop = self._console, self._loop
        width = max(map(len, commands))
        console.attach(loop, self._room)
        loop.add(self._signals.fileno(), self._signalled)
        loop.add(self._guard.fileno(), self._guard_lost)
        orders = Orders(env=env, patience=self._pace.heartbeat_timeout, grace=self._pace.grace)
        for number, (host, argv) in enumerate(commands.items()):
            label = console.label(host, width, number) if len(commands) > 1 else b""
            link = Link(host, partial(self._show, label), self._over)
            self._links.append(link)
            link.open(loop, argv, orders)
        self._beat()
        loop.run()
        return self._code

    @property
    def _alive(self) -> list[Link]:
        return [link for link in self._links if link.alive]

    def _beat(self) -> None:
        for link in self._alive:
            link.beat()
        self._loop.after(self._pace.heartbeat_timeout / _BEATS, self._beat)

    # ---- output

    def _show(self, label: bytes, stream: int, lines: bytes) -> None:
        output = self._console.out if stream == 1 else self._console.err
        output.write(label + lines[:-1].replace(b"\n", b"\n" + label) + b"\n" if label else lines)
        if not self._console.out.room:
            for link in self._alive:
                link.pause()

    def _room(self) -> None:
        for link in self._alive:
            link.resume()

    # ---- endings

    def _over(self, link: Link, farewell: Farewell) -> None:
        verdict = judge(link.host, farewell)
        if verdict.code != 0 and self._code == 0:
            self._code = verdict.code
            self._end_rest(verdict)
        if verdict.message and not self._asked:
            self._console.error(verdict.message)
        if not self._alive:
            self._loop.stop()

    def _end_rest(self, verdict: Verdict) -> None:
        """The others learn of it by themselves, and say what they saw. Only if they do not they are asked."""
        if not verdict.begun:
            patience = 0.0  # they would wait for a machine that never comes
        elif verdict.lost:
            patience = self._pace.heartbeat_timeout + _MARGIN
        else:
            patience = self._pace.grace
        self._loop.after(patience, lambda: self._ask(signal.SIGTERM))

    def _ask(self, number: int) -> None:
        for link in self._alive:
            link.signal(number)
        self._loop.after(self._pace.grace + _MARGIN, self._cut)

    def _cut(self) -> None:
        for link in self._alive:
            link.cut()

    # ---- from outside

    def _signalled(self) -> None:
        numbers = self._signals.read()
        for number in numbers:
            if number in PASSED_ON:
                self._each(lambda link, number=number: link.signal(number))  # type: ignore[misc]
        for number in asked_to_end(numbers):
            self._asked += 1
            self._code = self._code or 128 + number
            if self._asked > 2:
                self._cut()
            else:
                self._ask(number)

    def _each(self, act: Callable[[Link], None]) -> None:
        for link in self._alive:
            if link.begun:
                act(link)

    def _guard_lost(self) -> None:
        self._loop.remove(self._guard.fileno())
        self._code = self._code or 125
        self._cut()

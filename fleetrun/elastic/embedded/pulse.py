"""A client's own rhythm: when to say that it lives, how long the store has been silent. Knows the loop."""

from __future__ import annotations

from collections.abc import Callable

from fleetrun.elastic.embedded.silence import Silence
from fleetrun.pod.loop import Loop, Timer


class Pulse:
    """From `start` to `stop` calls `beat(silent, speak)` eight times in a lease: for how many seconds nothing
    was heard, and, every second time, that one should say something.
    """

    def __init__(self, loop: Loop, lease: float, beat: Callable[[float, bool], None]) -> None:
        self.lease = lease
        self._loop = loop
        self._beat = beat
        self._silence = Silence(lease / 2, loop.clock())
        self._speak = False
        self._timer: Timer | None = None

    def start(self) -> None:
        self.stop()
        self._silence = Silence(self.lease / 2, self._loop.clock())
        self._timer = self._loop.after(self.lease / 8, self._tick)

    def keep_to(self, lease: float) -> None:
        """The store's lease is the one that counts."""
        if lease != self.lease:
            self.lease = lease
            self.start()

    def heard(self) -> None:
        self._silence.heard(self._loop.clock())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = self._loop.after(self.lease / 8, self._tick)
        self._speak = not self._speak
        self._beat(self._silence.look(self._loop.clock()), self._speak)

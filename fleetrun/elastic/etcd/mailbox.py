"""From threads to the loop: what is posted anywhere is called in the loop's thread, in the same order."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

from fleetrun.pod.loop import Loop


class Mailbox:
    def __init__(self, loop: Loop, emptied: Callable[[], None]) -> None:
        """`emptied` is called after everything that lay there was."""
        self._loop = loop
        self._emptied = emptied
        self._letters: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._open = True
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add(self._bell, self._empty)

    def post(self, letter: Callable[[], None]) -> None:
        """From any thread. After `close` it does nothing."""
        with self._lock:  # a descriptor that was closed may be another one by now
            if self._open:
                self._letters.append(letter)
                os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """What lies there is never called."""
        with self._lock:
            if self._open:
                self._open = False
                self._letters.clear()
                self._loop.remove(self._bell)
                os.close(self._bell)

    def _empty(self) -> None:
        os.eventfd_read(self._bell)
        while self._letters:
            self._letters.popleft()()
        if self._open:
            self._emptied()

"""Calls that threads leave for an event loop."""

from __future__ import annotations

import os
import threading
from collections import deque

from fleetrun.aliases import Callback
from fleetrun.pod.loop import Loop


class Mailbox:
    """Calls from threads, made in the loop."""

    def __init__(self, loop: Loop, emptied: Callback = lambda: None) -> None:
        """`emptied` is called after the calls that were posted."""
        self._loop = loop
        self._emptied = emptied
        self._calls: deque[Callback] = deque()
        self._lock = threading.Lock()
        self._open = True
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add(self._event, self._empty)

    def post(self, call: Callback) -> None:
        """From any thread. After `close` it does nothing."""
        with self._lock:  # the number of a closed descriptor may be another's by now
            if self._open:
                self._calls.append(call)
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Calls that were not made are dropped."""
        with self._lock:
            if self._open:
                self._open = False
                self._calls.clear()
                self._loop.remove(self._event)
                os.close(self._event)

    def _empty(self) -> None:
        os.eventfd_read(self._event)
        while self._calls:
            self._calls.popleft()()
        if self._open:
            self._emptied()

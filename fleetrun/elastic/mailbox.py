"""Pass calls from threads to an event loop."""

from __future__ import annotations

import os
import threading
from collections import deque

from fleetrun.aliases import Callback
from fleetrun.pod.loop import Loop


class Mailbox:
    """A queue of calls. Threads post them, and the loop makes them."""

    def __init__(self, loop: Loop, emptied: Callback = lambda: None) -> None:
        """Add the mailbox to the loop. `emptied` is called after each batch of posted calls."""
        self._loop = loop
        self._emptied = emptied
        self._calls: deque[Callback] = deque()
        self._lock = threading.Lock()
        self._open = True
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add(self._event, self._empty)

    def post(self, call: Callback) -> None:
        """Post a call from any thread. After `close`, the call is dropped."""
        with self._lock:  # after `close`, the descriptor's number may belong to another file
            if self._open:
                self._calls.append(call)
                os.eventfd_write(self._event, 1)

    def close(self) -> None:
        """Close the mailbox and drop the remaining calls."""
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

"""Syncing: when written bytes are made safe from a power failure. Knows fdatasync and the clock; leaves what
is written to `journal`.
"""

from __future__ import annotations

import os
import threading
from typing import Literal

from trainers.ps.durable.errors import DurabilityError

Fsync = Literal["no", "everysec", "always"]
"""What a power failure may take. `no`: what the kernel had not written by itself (half a minute, say), in any
order, so that the folder may be found damaged; `everysec`: about the last second; `always`: nothing. The end
of the process, SIGKILL included, takes nothing in any of them: what was written is in the kernel's hands.
"""

_EVERY_S = 1.0


class Syncing:
    """Makes the writes to one descriptor durable as the policy says. A failed fdatasync is final: the kernel
    reports it once, marks the pages clean and may drop them, so that asking again would succeed although
    the data is lost (known as fsyncgate). Every later call raises DurabilityError.
    """

    def __init__(self, policy: Fsync, where: str) -> None:
        self.policy = policy
        self._where = where
        self._failure: OSError | None = None
        self._descriptor = -1
        self._dirty = False
        self._ended = False
        self._change = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        if policy == "everysec":
            self._thread = threading.Thread(target=self._run, name="journal fsync", daemon=True)
            self._thread.start()

    def follow(self, descriptor: int) -> None:
        """From now on this descriptor, after a last sync of the former one (but for `no`): only the last file
        of a folder may have a torn tail. Raises DurabilityError.
        """
        if self._descriptor >= 0 and self.policy != "no":
            self.sync()
        with self._change:
            self._descriptor = descriptor

    def written(self) -> None:
        """Something was written to the descriptor."""
        with self._change:
            self._dirty = True
            self._change.notify()

    def check(self) -> None:
        """Raises DurabilityError when an fdatasync has failed, here or in the background."""
        if self._failure is not None:
            raise DurabilityError(
                f"writes to {self._where} could not be made durable: {self._failure}. Acknowledged pushes "
                "may be lost on that disk, so this server stops; look after the disk and restart it."
            )

    def sync(self) -> None:
        """fdatasync now, whatever the policy. Raises DurabilityError."""
        self.check()
        with self._change:
            self._dirty = False
        self._sync(self._descriptor)
        self.check()

    def close(self) -> None:
        """End the thread. The last sync is the caller's."""
        with self._change:
            self._ended = True
            self._change.notify()
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._dirty or self._ended)
                if self._ended:
                    return
                self._dirty = False
                # A duplicate: `follow` may change the file, and its owner close it, while this one is synced.
                descriptor = os.dup(self._descriptor)
            try:
                self._sync(descriptor)
            finally:
                os.close(descriptor)
            if self._failure is not None or self._stop.wait(_EVERY_S):
                return

    def _sync(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError as error:
            self._failure = error

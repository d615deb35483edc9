"""Receive the notice that this process must stop.

The notice consists of a signal, and of a file in which the launcher writes reason and deadline.
`collective.group` handles the agreement with other ranks.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import FrameType
from typing import Any

from fleetrun.aliases import Environ
from fleetrun.envs import channels
from fleetrun.frozen import frozen
from trainers.errors import UsageError

OTHERS_ENDED = frozenset({"failure", "lost"})
"""Reasons that mean that other ranks have ended, so that agreeing or saving with them is impossible."""


@frozen
class Notice:
    """The reason and deadline of a stop.

    `why` is "stop", "membership" or another reason from the launcher. Without one, it is "signal SIGTERM".
    `deadline` is when this process will be killed, in seconds since the epoch, or infinity if unknown.
    """

    why: str
    deadline: float = math.inf

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.time())


class StopSignals:
    """Signals that only leave a mark after `listen`. Without `listen`, they keep their effect."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._before: dict[int, Any] = {}
        self._arrived: int | None = None
        self._notice: Notice | None = None
        self._wakes = False

    def listen(self, numbers: Collection[int], *, with_others: bool = False) -> None:
        """Listen for these signals too. An earlier handler is called after the mark is set.

        Under fleetrun, SIGINT is included, because the launcher passes Ctrl-C on as SIGINT. `with_others` is
        True if this process waits for other ranks. SIGTERM then still ends it after they have ended. Raises
        UsageError outside the main thread, where Python cannot set handlers.
        """
        interrupt = {signal.SIGINT} if self._file is not None else set()
        new = [number for number in {*numbers, *interrupt} if number not in self._before]
        if not new:
            return
        if threading.current_thread() is not threading.main_thread():
            raise UsageError("Make the first call of fleet.stop_requested() in the main thread.")
        if not self._before:
            os.register_at_fork(after_in_child=self._restore)
            if with_others:
                self._leave_when_others_ended()
        for number in new:
            self._before[number] = signal.getsignal(number)
            signal.signal(number, self._mark)

    def notice(self) -> Notice | None:
        """Return the meaning of the last signal, or None if no signal has arrived."""
        if self._arrived is not None:
            number, self._arrived = self._arrived, None
            self._notice = read_notice(self._file) or Notice(f"signal {signal.Signals(number).name}")
        return self._notice

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._arrived = number
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _leave_when_others_ended(self) -> None:
        """Start a thread that ends this process when other ranks have ended.

        The main thread may be waiting for them in a collective, where no handler runs. If another library
        (asyncio) has the wake-up descriptor, no thread starts.
        """
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            os.close(reading)
            os.close(writing)
            return

        self._wakes = True

        def wait() -> None:
            while numbers := os.read(reading, 64):
                notice = read_notice(self._file) if signal.SIGTERM in numbers else None
                if notice is not None and notice.why in OTHERS_ENDED:
                    os._exit(128 + signal.SIGTERM)

        threading.Thread(target=wait, name="waits for the loss of others", daemon=True).start()

    def _restore(self) -> None:
        if self._wakes:
            signal.set_wakeup_fd(-1)  # a child's signals are not its parent's
        # A forked child must end on the SIGTERM from its parent.
        for number, before in self._before.items():
            if signal.getsignal(number) == self._mark:
                signal.signal(number, signal.SIG_DFL if before is None else before)


def notice_file(environ: Environ) -> Path | None:
    name = environ.get(channels.NOTICE_VARIABLE)
    return Path(name) if name else None


def read_notice(file: Path | None) -> Notice | None:
    """Return the launcher's notice, or None if it is missing or malformed."""
    if file is None:
        return None
    try:
        found = channels.read_notice(file.read_bytes())
    except OSError:
        return None
    return None if found is None else Notice(*found)


def outlive_notice(worker: int = 0, leave: Callable[[int], object] = os._exit) -> None:
    """Keep a DataLoader worker alive until its trainer has saved. Pass it as `worker_init_fn`.

    The launcher's signals reach the whole process group. They would end the workers immediately, and the
    trainer with them. After this call, the process obeys only its parent's SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        leave(0)

    threading.Thread(target=wait, name=f"worker {worker} waits for SIGTERM", daemon=True).start()

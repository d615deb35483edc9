"""The notifier process. It reads messages from the launcher and delivers them, in a limited number of
attempts.

Each notifier has a thread and a queue, so that notifiers never wait for each other. The process ends once the
launcher has closed its input and all messages are delivered or given up. The launcher waits only briefly for
that. Warnings go to the launcher, which shows them.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from fleetrun import plugins
from fleetrun.aliases import Fields, ShowText
from fleetrun.notifiers.base import Notifier, Undelivered
from fleetrun.pod.companion import send_line, warning_message
from fleetrun.pod.linux import become_subreaper

_ATTEMPTS = 4
_BACKOFF = 1.0  # seconds before the second attempt, doubled for each further attempt
_LONGEST_PAUSE = 60.0  # seconds, the limit for pauses that an answer requests
# seconds, the limit after the end of the job, because the launcher waits for less than twice that
_AT_THE_END = 3.0
_MOST_WAITING = 100  # messages
_PATIENCE = 40.0  # seconds for a whole attempt, including a slow name server or a slow answer


def deliver(send: Callable[[], BaseException | None], pause: Callable[[float], bool]) -> str | None:
    """Deliver a message. Return None, or the reason of the failure.

    `send` makes an attempt. `pause` waits, and returns True if there is time for another attempt.
    """
    for number in range(_ATTEMPTS):
        error = send()
        if error is None:
            return None
        failed = error if isinstance(error, Undelivered) else Undelivered(f"{type(error).__name__}: {error}")
        if not failed.again:
            return failed.why
        wait = min(_LONGEST_PAUSE, max(failed.after, _BACKOFF * 2**number))
        if number + 1 == _ATTEMPTS or not pause(wait):
            break
    times = "1 attempt" if number == 0 else f"{number + 1} attempts"
    return f"{failed.why} ({times})"


class Delivery:
    """The queue of one notifier. `title` is its name for the user. `secret` is never shown."""

    def __init__(
        self, notifier: Notifier, title: str, secret: str, warn: ShowText, over: threading.Event
    ) -> None:
        self._notifier = notifier
        self._title = title
        self._secret = secret
        self._warn = warn
        self._over = over
        self._waiting: queue.Queue[Fields | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def put(self, message: Fields) -> None:
        """Queue a message, or warn if the queue is full."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._report_failure(f"{_MOST_WAITING} notifications are waiting already", message)

    def finish(self) -> None:
        """Wait until all messages are delivered or given up."""
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._waiting.get()) is not None:
            why = deliver(partial(self._attempt, message), self._pause)
            if why is not None:
                self._report_failure(why, message)

    def _attempt(self, message: Fields) -> BaseException | None:
        """Make an attempt. An attempt that takes too long is abandoned in its thread."""
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def run() -> None:
            try:
                self._notifier.send(message)
                ended.put(None)
            except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever another package raises)
                ended.put(error)

        threading.Thread(target=run, daemon=True).start()
        try:
            return ended.get(timeout=_PATIENCE)
        except queue.Empty:
            return Undelivered(f"the attempt took longer than {_PATIENCE:g} s")

    def _pause(self, seconds: float) -> bool:
        if not self._over.wait(seconds):
            return True
        if seconds > _AT_THE_END:
            return False
        time.sleep(seconds)
        return True

    def _report_failure(self, why: str, message: Fields) -> None:
        why = why.replace(self._secret, "...") if self._secret else why
        self._warn(f"cannot notify {self._title} of the {message['event']}: {why}")


def run(incoming: Iterable[bytes], write: Callable[[bytes], None]) -> None:
    """Deliver messages until the end of `incoming`.

    The first line is a list of (name, argument, title). Each further line is a message.
    """

    def warn(text: str) -> None:
        write(warning_message(text))

    over = threading.Event()
    lines = (json.loads(line) for line in incoming)
    deliveries = []
    for name, argument, title in next(lines, ()):
        try:
            notifier: Notifier = plugins.load("notifiers", name, has="__call__")(argument)
            deliveries.append(Delivery(notifier, title, argument, warn, over))
        except (Exception, SystemExit) as error:  # noqa: BLE001  (whatever another package raises)
            why = plugins.described("notifiers", name, error)
            warn(f"{why.replace(argument, '...') if argument else why}; this notifier sends no notifications")
    for message in lines:
        for each in deliveries:
            each.put(message)
    over.set()
    for each in deliveries:
        each.finish()


def main() -> None:
    os.nice(10)  # the processors belong to the job
    # A command may leave processes behind. They stay below this process, so that the launcher can end them.
    become_subreaper()
    run(sys.stdin.buffer, send_line)


if __name__ == "__main__":
    main()

"""What a notifier is: made once in the notifier process, then given each message, in a thread of its own."""

from __future__ import annotations

from typing import Protocol

from fleetrun.aliases import Fields


class Notifier(Protocol):
    """Made by calling the plug-in with its argument, the text after `NAME:`."""

    def send(self, message: Fields) -> None:
        """Deliver it. `docs/plugins.md` lists the fields. It may take its time: only the later messages of
        this notifier wait for it. Raises Undelivered; anything else counts as `Undelivered(again=True)`.
        """


class Undelivered(Exception):
    """It could not be delivered. `again`: another attempt may help, not before `after` seconds.

    The text is shown to the user: it must not have what is secret in the notifier's argument.
    """

    def __init__(self, why: str, *, again: bool = True, after: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.again = again
        self.after = after

"""The interface of a notifier.

The notifier process creates it once, and gives it each message in a separate thread.
"""

from __future__ import annotations

from typing import Protocol

from fleetrun.aliases import Fields


class Notifier(Protocol):
    """Delivers messages. It is created by calling the plug-in with its argument, the text after `NAME:`."""

    def send(self, message: Fields) -> None:
        """Deliver a message. `docs/plugins.md` lists its fields.

        The call may take long, because only later messages of this notifier wait for it. Raises Undelivered.
        Any other exception counts as `Undelivered(again=True)`.
        """


class Undelivered(Exception):
    """The message could not be delivered. `again`: another attempt may help after `after` seconds.

    The text is shown to the user. It must not contain secrets of the notifier's argument.
    """

    def __init__(self, why: str, *, again: bool = True, after: float = 0.0) -> None:
        super().__init__(why)
        self.why = why
        self.again = again
        self.after = after

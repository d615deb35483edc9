"""What can go wrong with a server's durable folder. Every message names the file and says what to do."""

from __future__ import annotations

from trainers.errors import FleetError


class DurabilityError(FleetError):
    """What was asked cannot be made or found durable. The server must not go on acknowledging."""


class JournalFullError(DurabilityError):
    """No room for this record. Nothing of it is in the journal; the server may refuse the request and go
    on, and the next append may find room again.
    """


class DamagedError(DurabilityError):
    """A file of the folder is not as it was written."""

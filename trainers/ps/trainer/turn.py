"""Track the stream batch that the current step trains. The push of the step lists its records."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.data.positions import Records, encode_records
from trainers.errors import UsageError
from trainers.ps.wire import Field, Part, bytes_part

On = tuple[bool, ...] | None
"""The servers that have the records of a batch. None means that no server has them."""


class Turn:
    """The turn of one batch. One batch of a stream is trained at a time."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._on: On = None
        self._left: Records | None = None

    def give(self, records: Records, on: On = None) -> None:
        """Start the turn of a batch with these records, which the servers `on` have.

        Raises UsageError if the batch before it was not trained.
        """
        if self._records is not None:
            start, stop, shard = self._records.start, self._records.stop, self._records.shard
            self._records = None
            raise UsageError(
                f"The script took a batch of the stream {records.stream!r} before the optimizer's step for "
                f"the previous batch, [{start}, {stop}) of {shard!r}. Make one step for each batch, even if "
                "the batch adds nothing. Do not take batches ahead (only fleet.prefetch may)."
            )
        self._records, self._on, self._left = records, on, None

    def forget(self, records: Records) -> None:
        """End a loop that gave these records. Without a step, the records are not counted."""
        if self._records is records:
            self._records, self._left = None, records

    def take(self) -> tuple[list[Records], On]:
        """Return the records of the batch at its step, if there is one, and the servers that have them.

        Raises UsageError if the loop was left earlier, because the step may belong to its batch or to
        something else.
        """
        if self._left is not None:
            stream, shard, start, stop = self._left
            raise UsageError(
                f"The script left the loop over the stream {stream!r} before the optimizer's step for the "
                f"last batch, [{start}, {stop}) of {shard!r}. The stream returns these records again, so a "
                "step now could train them twice. Keep the iterator until the step, and leave the loop "
                "after a step. To take a fixed number of batches, use itertools.islice."
            )
        records, on = self._records, self._on
        self._records = self._on = None
        return ([], None) if records is None else ([records], on)


def records_part(records: Sequence[Records]) -> list[Part]:
    """Return the first part of a push, or nothing if the push has no stream records."""
    return [bytes_part(Field.RECORDS, encode_records(records))] if records else []

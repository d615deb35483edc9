"""The batch of a stream whose step it is: its push says which records it has."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.data.positions import Records, encode_records
from trainers.errors import UsageError
from trainers.ps.wire import Field, Part, bytes_part

On = tuple[bool, ...] | None
"""Which servers have the records of a batch; None: none has."""


class Turn:
    """One batch of a stream is trained at a time."""

    def __init__(self) -> None:
        self._records: Records | None = None
        self._on: On = None
        self._left: Records | None = None

    def give(self, records: Records, on: On = None) -> None:
        """The script has got a batch with these, which these servers have. Raises UsageError when the one
        before was not trained.
        """
        if self._records is not None:
            start, stop, shard = self._records.start, self._records.stop, self._records.shard
            self._records = None
            raise UsageError(
                f"a batch of the stream {records.stream!r} was taken before the optimizer's step of the one "
                f"before it, [{start}, {stop}) of {shard!r}; make one step for each batch, also for one that "
                "adds nothing, and take no batch ahead (fleet.prefetch may)"
            )
        self._records, self._on, self._left = records, on, None

    def forget(self, records: Records) -> None:
        """The loop that gave these is over: without a step they are not counted."""
        if self._records is records:
            self._records, self._left = None, records

    def take(self) -> tuple[list[Records], On]:
        """It is stepped: its records, if there is one, and which servers have them. Raises UsageError when
        its loop was left before: the step may be that of its batch, or of something else.
        """
        if self._left is not None:
            stream, shard, start, stop = self._left
            raise UsageError(
                f"the loop over the stream {stream!r} was left before the optimizer's step of its last "
                f"batch, [{start}, {stop}) of {shard!r}. Those records come again: if this step is theirs, "
                "they would be trained twice. Keep the iterator until the step, and leave the loop behind "
                "one (for so many batches: itertools.islice)"
            )
        records, on = self._records, self._on
        self._records = self._on = None
        return ([], None) if records is None else ([records], on)


def records_part(records: Sequence[Records]) -> list[Part]:
    """The first part of a push; none if it has no records of a stream."""
    return [bytes_part(Field.RECORDS, encode_records(records))] if records else []

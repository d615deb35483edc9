"""The batch of a stream whose step it is: its push says which records it has."""

from __future__ import annotations

from collections.abc import Sequence

from trainers.data.positions import Records, encode_records
from trainers.errors import UsageError
from trainers.ps.wire import Field, Part, bytes_part


class Turn:
    """One batch of a stream is trained at a time."""

    def __init__(self) -> None:
        self._records: Records | None = None

    def give(self, records: Records) -> None:
        """The script has got a batch with these. Raises UsageError when the one before was not trained."""
        if self._records is not None:
            start, stop, shard = self._records.start, self._records.stop, self._records.shard
            self._records = None
            raise UsageError(
                f"a batch of the stream {records.stream!r} was taken before the optimizer's step of the one "
                f"before it, [{start}, {stop}) of {shard!r}; make one step for each batch, also for one that "
                "adds nothing, and take no batch ahead (fleet.prefetch may)"
            )
        self._records = records

    def forget(self, records: Records) -> None:
        """The loop that gave these is over: without a step they are not counted."""
        if self._records is records:
            self._records = None

    def take(self) -> list[Records]:
        """It is stepped: its records, if there is one."""
        records, self._records = self._records, None
        return [] if records is None else [records]


def records_part(records: Sequence[Records]) -> list[Part]:
    """The first part of a push; none if it has no records of a stream."""
    return [bytes_part(Field.RECORDS, encode_records(records))] if records else []

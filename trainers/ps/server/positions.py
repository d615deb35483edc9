"""Track which stream records are in the tables of a server, including pushes that wait for other trainers."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from fleetrun.aliases import Document
from trainers.data.positions import Intervals, Records
from trainers.errors import DataError


class Positions:
    """The counted records, by stream and shard. A push is counted as a whole or not at all."""

    def __init__(self) -> None:
        self._streams: dict[str, dict[str, Intervals]] = {}
        self._last: dict[int, Sequence[Records]] = {}
        """The records that were counted with the last push of each trainer."""

    def are_new(self, records: Sequence[Records]) -> bool | None:
        """Return True if these records are new, False if they are counted already, and None without records.

        Raises DataError if some are counted and others are not.
        """
        if not records:
            return None
        has = [self._has(each) for each in records]
        if any(has) == all(has) and None not in has:
            return not has[0]
        each = records[has.index(None) if None in has else has.index(True)]
        raise DataError(
            f"this server has counted some of the records [{each.start}, {each.stop}) of {each.shard!r} in "
            f"the stream {each.stream!r}, but not other records of this push. Either two trainers read that "
            "shard, or its positions have changed"
        )

    def count(self, rank: int, records: Sequence[Records]) -> None:
        """Count the records of a push of this trainer. Without records, the push contains nothing new."""
        for stream, shard, start, stop in records:
            self._streams.setdefault(stream, {}).setdefault(shard, Intervals()).add(start, stop)
        if records or self._last:
            self._last[rank] = tuple(records)

    def take_back(self, ranks: Collection[int]) -> None:
        """Remove the records of the last pushes of these trainers, because the pushes were dropped.

        The last pushes of all other trainers can no longer be taken back.
        """
        for rank in ranks:
            for stream, shard, start, stop in self._last.get(rank, ()):
                self._streams[stream][shard].remove(start, stop)
        self._last = {}

    def of(self, stream: str) -> bytes:
        """Return the intervals of each shard as JSON, `{shard: [start, stop, start, stop, ...]}`."""
        shards = self._streams.get(stream, {})
        return json.dumps({shard: each.ends for shard, each in shards.items()}).encode()

    def dump(self) -> Document:
        """Return the content for JSON."""
        streams = {
            stream: {shard: each.ends for shard, each in shards.items()}
            for stream, shards in self._streams.items()
        }
        return {"streams": streams, "last": {str(rank): each for rank, each in self._last.items()}}

    @classmethod
    def load(cls, content: Document) -> Positions:
        """Restore the result of `dump`."""
        made = cls()
        for stream, shards in content["streams"].items():
            made._streams[stream] = {shard: Intervals(ends) for shard, ends in shards.items()}
        made._last = {
            int(rank): [Records(*each) for each in records] for rank, records in content["last"].items()
        }
        return made

    def _has(self, records: Records) -> bool | None:
        found = self._streams.get(records.stream, {}).get(records.shard)
        return False if found is None else found.has(records.start, records.stop)

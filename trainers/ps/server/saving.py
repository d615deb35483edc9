"""What trainers ask of the tables as a whole: a server's part of a save, and the removal of rows. Knows which
save is under way and what waits for it; files belong to `saves`.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass

from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.write import SaveOrder, SaveTask, close_cuts, cut_tables
from trainers.ps.server.members import Member, Members, Refusal
from trainers.ps.server.store import AnyTable, Store
from trainers.ps.wire import Code, Field, Kind, Message, bytes_part

_LONGEST_ORDER = 8192
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Ordered:
    """What a trainer orders: where, which id (`manifest.new_id`), which mode, and after which save."""

    where: str
    id: str
    mode: int
    after: str | None = None

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: str) -> Ordered:
        """Raises Refusal for text that is no order."""
        if len(text) > _LONGEST_ORDER:
            raise Refusal(Code.BAD_MESSAGE, f"a SAVE with an order of {len(text)} characters")
        try:
            content = json.loads(text)
            after = content["after"]
            return cls(
                str(content["where"]),
                str(content["id"]),
                SaveMode(content["mode"]),
                None if after is None else str(after),
            )
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal(Code.BAD_MESSAGE, f"a SAVE with the order {text!r}: {error}") from error


class Saving:
    """At most one save at a time, and none while something else is `reading` the tables. `wake` is called
    in another thread when one has been written. `since`: the save since which tables note what changes.
    """

    def __init__(
        self, index: int, servers: int, *, wake: Callable[[], None], reading: Callable[[], bool]
    ) -> None:
        self._index = index
        self._servers = servers
        self._wake = wake
        self._reading = reading
        self._order: Ordered | None = None
        self._over: deque[str] = deque(maxlen=_REMEMBERED)
        self._task: SaveTask | None = None
        self.orderer: tuple[int, int] | None = None
        """Rank and incarnation of the trainer whose save is under way."""
        self.since: str | None = None

    @property
    def busy(self) -> bool:
        """Whether the tables are being read for a save."""
        return self._task is not None

    @property
    def reading(self) -> bool:
        """Whether the tables are being read for anything."""
        return self.busy or self._reading()

    def part(
        self, order: Ordered, by: tuple[int, int], step: int, tables: Collection[AnyTable]
    ) -> bytes | None:
        """The record of this server's part, as JSON; None while it is being written. Begins to write at the
        first call, when no other save is under way. Empty when the save is over: it was given up while this
        request waited. Raises Refusal when it is impossible or has failed.
        """
        if order.id in self._over:
            return b""
        if self._task is None and not self._reading():
            self._begin(order, step, tables)
            self.orderer = by
        if self._task is None or self._order is None or self._order.id != order.id or not self._task.ended:
            return None
        with _refusing(order, at_error=lambda: self.end(order.id, saved=False)):
            return json.dumps(asdict(self._task.result())).encode()

    def end(self, id: str, *, saved: bool) -> None:
        """This save was committed, or given up: the tables need not keep anything for it any more. A late
        copy of its order begins nothing.
        """
        self._over.append(id)
        if self._task is None or self._order is None or self._order.id != id:
            return
        self._task.cancel()
        self._task.wait()
        self._task.close(saved=saved)
        if saved and self._order.mode is not SaveMode.VALUES:
            self.since = id
        self._task = self._order = self.orderer = None

    def give_up(self) -> None:
        """End whatever is under way."""
        if self._order is not None:
            self.end(self._order.id, saved=False)

    def _begin(self, order: Ordered, step: int, tables: Collection[AnyTable]) -> None:
        mode = SaveMode(order.mode)
        if mode is SaveMode.DELTA and order.after != self.since:
            raise Refusal(
                Code.FAILED,
                f"a save of what has changed since {order.after}; this server knows what has changed since "
                f"{self.since}. Save with mode 0",
            )
        with _refusing(order), contextlib.ExitStack() as half:
            orders = SaveOrder(id=order.id, mode=mode, step=step, server=self._index, servers=self._servers)
            cuts = cut_tables(tables, mode)
            half.callback(close_cuts, cuts, saved=False)
            self._task = SaveTask(order.where, orders, cuts, done=lambda task: self._wake())
            half.pop_all()
        self._order = order


@contextlib.contextmanager
def _refusing(order: Ordered, at_error: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A storage library may raise anything, and the server must go on: whatever it is, is a Refusal."""
    try:
        yield
    except Exception as error:
        at_error()
        raise Refusal(Code.FAILED, f"cannot save to {order.where!r}: {error or repr(error)}") from error


class Upkeep:
    """Every method answers one kind of request; None: later."""

    def __init__(
        self, members: Members, store: Store, saving: Saving, record: Callable[[Message], None]
    ) -> None:
        self._members = members
        self._store = store
        self._saving = saving
        self._record = record

    def save(self, member: Member, request: Message, step: int) -> Message | None:
        """Write this server's part of a save, as of now."""
        order = Ordered.decode(request.text)
        by = (request.rank, request.incarnation)
        record = self._saving.part(order, by, step, list(self._store.tables.values()))
        return None if record is None else request.reply(Kind.DONE, parts=(bytes_part(Field.TEXT, record),))

    def saved(self, member: Member, request: Message) -> Message:
        """A save was committed, or given up."""
        self._saving.end(request.text, saved=request.number == 1)
        return request.reply(Kind.DONE)

    def shrink(self, member: Member, request: Message) -> Message | None:
        """A day has passed in some tables."""
        if self._saving.reading:
            return None
        if request.sequence in member.applied:
            return request.reply(Kind.DONE)
        checked = self._store.read_shrink(request.parts)
        self._record(request)
        member.applied.add(request.sequence)
        self._saving.since = None  # a delta does not tell which rows went
        return request.reply(Kind.DONE, number=self._store.shrink(checked))

    def release(self) -> None:
        """A save whose trainer is gone will not be committed."""
        if self._saving.orderer is None:
            return
        rank, incarnation = self._saving.orderer
        lost = {member.rank for member in self._members.lost()}
        if self._members.incarnation(rank) != incarnation or rank in lost:
            self._saving.give_up()

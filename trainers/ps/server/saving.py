"""A server's part of one save, requested by a trainer: which save is running, and its result. Files belong to
`saves`.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass

from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.write import SaveSpec, SaveTask, close_cuts, cut_tables
from trainers.ps.server.members import Refusal
from trainers.ps.server.store import AnyTable
from trainers.ps.wire import Code

_MAX_REQUEST_CHARS = 8192
_REMEMBERED_IDS = 64


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a trainer requests: where, under which id (`manifest.new_id`), in which mode. `after`: of a delta,
    the last saves of the folder.
    """

    where: str
    id: str
    mode: int
    after: Sequence[str] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: str) -> SaveRequest:
        """Raises Refusal for text that is not a request."""
        if len(text) > _MAX_REQUEST_CHARS:
            raise Refusal(Code.BAD_MESSAGE, f"the text of a SAVE has {len(text)} characters")
        try:
            content = json.loads(text)
            after = tuple(map(str, content["after"]))
            return cls(str(content["where"]), str(content["id"]), SaveMode(content["mode"]), after)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise Refusal(Code.BAD_MESSAGE, f"the text of a SAVE is {text!r}: {error}") from error


class SaveRunner:
    """Runs at most one save at a time, and none while something else reads the tables (`reading`). `wake` is
    called in another thread when a save has been written. `last_save`: the save since which tables record
    what changes.
    """

    def __init__(
        self, index: int, servers: int, *, wake: Callable[[], None], reading: Callable[[], bool]
    ) -> None:
        self._index = index
        self._servers = servers
        self._wake = wake
        self._reading = reading
        self._request: SaveRequest | None = None
        self._task: SaveTask | None = None
        self._ended_ids: deque[str] = deque(maxlen=_REMEMBERED_IDS)
        self.requester: tuple[int, int] | None = None
        """Rank and incarnation of the trainer whose save is running."""
        self.last_save: str | None = None

    @property
    def busy(self) -> bool:
        """Whether the tables are being read for a save."""
        return self._task is not None

    @property
    def tables_in_use(self) -> bool:
        """Whether the tables are being read for anything."""
        return self.busy or self._reading()

    def run(
        self, request: SaveRequest, requester: tuple[int, int], step: int, tables: Collection[AnyTable]
    ) -> bytes | None:
        """The record of this server's part as JSON, or None while it is being written. The first call starts
        the save unless another one is running. Empty when the save was abandoned while this request waited.
        Raises Refusal when the save is impossible or has failed.
        """
        if request.id in self._ended_ids:
            return b""
        if self._task is None and not self._reading():
            self._start(request, step, tables)
            self.requester = requester
        if self._task is None or self._request is None or self._request.id != request.id:
            return None
        if not self._task.ended:
            return None
        with _refusing(request, at_error=lambda: self.end(request.id, saved=False)):
            return json.dumps(asdict(self._task.result())).encode()

    def end(self, id: str, *, saved: bool) -> None:
        """This save was committed or abandoned, so the tables need not keep anything for it. A late copy of
        its request starts nothing.
        """
        self._ended_ids.append(id)
        if self._task is None or self._request is None or self._request.id != id:
            return
        self._task.cancel()
        self._task.wait()
        self._task.close(saved=saved)
        if saved and self._request.mode is not SaveMode.VALUES:
            self.last_save = id
        self._task = self._request = self.requester = None

    def abandon(self) -> None:
        """End the running save, if any, without committing it."""
        if self._request is not None:
            self.end(self._request.id, saved=False)

    def _start(self, request: SaveRequest, step: int, tables: Collection[AnyTable]) -> None:
        mode = SaveMode(request.mode)
        # The last of them, or an earlier one where this server was never told that a later one was committed:
        # then this part has what the later one has, too.
        if mode is SaveMode.DELTA and self.last_save not in request.after:
            wanted = " ".join(request.after[-1:])
            since = f"changes since {self.last_save}" if self.last_save else "none, as it was started later"
            raise Refusal(
                Code.FAILED,
                f"cannot save what has changed since {wanted}: this server has recorded {since}. Save with "
                "mode 0",
            )
        with _refusing(request), contextlib.ExitStack() as undo:
            spec = SaveSpec(id=request.id, mode=mode, step=step, server=self._index, servers=self._servers)
            cuts = cut_tables(tables, mode)
            undo.callback(close_cuts, cuts, saved=False)
            self._task = SaveTask(request.where, spec, cuts, done=lambda task: self._wake())
            undo.pop_all()
        self._request = request


@contextlib.contextmanager
def _refusing(request: SaveRequest, at_error: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turns every error into a Refusal: a storage library may raise anything, and the server must go on."""
    try:
        yield
    except Exception as error:
        at_error()
        raise Refusal(Code.FAILED, f"cannot save to {request.where!r}: {error or repr(error)}") from error

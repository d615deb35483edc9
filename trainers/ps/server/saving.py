"""A server's part of one save: which save is running, and its result. A trainer requests a save, the
publisher of the job a version of a published folder. Files belong to `saves`.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.ps.kernels.rows import UNPUBLISHED, UNSAVED
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.publication import Buffers, buffer_cuts, merge_part
from trainers.ps.saves.write import SaveSpec, SaveTask, close_cuts, cut_tables, lower_priority
from trainers.ps.server.members import Refusal
from trainers.ps.server.store import AnyTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.wire import Code
from trainers.storage.manifest import FileRecord

_MAX_REQUEST_CHARS = 65_536
_REMEMBERED_IDS = 64
_REMEMBERED_CUTS = 4096


@frozen
class SaveRequest:
    """What is requested: where, under which id (`manifest.new_id`), in which mode. `after`: of a delta or a
    version, the last ones of the folder; of a merge, those to merge. `version`: its number in a published
    folder, 0 for others, and `row_type` its type (see `write.SaveSpec`). `turn`: only a request for the turn
    to save this, of this kind (see SaveTurns).
    """

    where: str
    id: str
    mode: int
    after: Sequence[str] = ()
    version: int = 0
    row_type: str = ""
    turn: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: str) -> SaveRequest:
        """Raises Refusal for text that is not a request."""
        if len(text) > _MAX_REQUEST_CHARS:
            raise Refusal(Code.BAD_MESSAGE, f"the text of a SAVE has {len(text)} characters")
        try:
            content = json.loads(text)
            after, mode = tuple(map(str, content["after"])), SaveMode(content["mode"])
            version = int(content.get("version", 0))
            row_type, turn = (str(content.get(name, "")) for name in ("row_type", "turn"))
            return cls(str(content["where"]), str(content["id"]), mode, after, version, row_type, turn)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise Refusal(Code.BAD_MESSAGE, f"the text of a SAVE is {text!r}: {error}") from error


Sender = tuple[int, int]
"""Rank and incarnation."""
State = tuple[int, int]
"""Steps, and other changes of the tables, so far."""


@dataclass(slots=True)
class _Saved:
    """`answered`: the turn that each sender requested and does not need, or has used."""

    id: str
    state: State
    answered: dict[Sender, str]


class SaveTurns:
    """Which trainer may save: one at a time, because each waits for all servers. The first server decides. If
    another trainer has saved the same and no table has changed since, a trainer need not save. `state`: of
    the tables when the holder's save was cut.
    """

    def __init__(self) -> None:
        self.holder: Sender | None = None
        self.state: State = (0, 0)
        self._request: SaveRequest | None = None
        self._saved: dict[SaveRequest, _Saved] = {}

    @property
    def id(self) -> str:
        return "" if self._request is None else self._request.id

    def take(self, request: SaveRequest, sender: Sender, state: State) -> str | None:
        """Return "" if it is the sender's turn, the id of the turn in which another trainer has saved the
        same, or None while another trainer saves.
        """
        if request.id == self.id:
            return ""  # sent again
        if self.holder is not None:
            return None
        saved = self._saved.get(replace(request, id=""))
        if saved and saved.state == state and saved.answered.setdefault(sender, request.id) == request.id:
            return saved.id
        self.holder, self._request, self.state = sender, request, state
        return ""

    def end(self, id: str, *, saved: bool) -> None:
        """End this turn, if it is the current one."""
        if self._request is None or self.holder is None or self._request.id != id:
            return
        self._saved = {key: each for key, each in self._saved.items() if each.state == self.state}
        if saved:
            key = replace(self._request, id="")
            self._saved[key] = _Saved(id, self.state, {self.holder: id})
        self.holder = self._request = None


class SaveRunner:
    """Runs at most one save at a time, and none while something else reads the tables (`reading`). `wake` is
    called in another thread when a save has been written. `last_save`: the save since which tables record
    what changes. `published`: the folder of versions, if there is one.
    """

    def __init__(
        self,
        index: int,
        servers: int,
        *,
        wake: Callback,
        reading: Callable[[], bool],
        published: str = "",
    ) -> None:
        self._index = index
        self._servers = servers
        self._wake = wake
        self._reading = reading
        self._published = published
        self._request: SaveRequest | None = None
        self._task: SaveTask | None = None
        self._merging: MergeTask | None = None
        self._ended_ids: deque[str] = deque(maxlen=_REMEMBERED_IDS)
        self.requester: Sender | None = None
        """Rank and incarnation of the trainer whose save is running."""
        self.last_save: str | None = None
        self._abandoned = False
        """The task is to be closed when it has ended."""
        self._cut_here: deque[str] = deque(maxlen=_REMEMBERED_CUTS)
        """Versions that were cut here, or are in the log of this server."""
        self._since: list[str] = []
        """The tables have recorded what has changed since any of these versions was cut."""

    @property
    def busy(self) -> bool:
        """Whether the tables are being read for a save."""
        if self._abandoned and self._task is not None and self._task.ended:
            self._close(saved=False)
        return self._task is not None

    @property
    def of_version(self) -> bool:
        """Whether it is a version that is being written."""
        return self._request is not None and self._request.version > 0

    @property
    def tables_in_use(self) -> bool:
        """Whether the tables are being read for anything."""
        return self.busy or self._reading()

    def run(
        self, request: SaveRequest, requester: Sender, step: int, tables: Collection[AnyTable]
    ) -> bytes | None:
        """The record of this server's part as JSON, or None while it is being written. The first call starts
        the save unless another one is running. Empty when the save was abandoned while this request waited.
        Raises Refusal when the save is impossible or has failed.
        """
        if request.id in self._ended_ids:
            return b""
        if not self.tables_in_use:
            self._start(request, step, tables)
            self.requester = requester
        return None if self._request is None or self._request.id != request.id else self.written(request.id)

    def written(self, id: str) -> bytes | None:
        """As `run`, for a save that was started; empty for any other."""
        if self._task is None or self._abandoned or self._request is None or self._request.id != id:
            return b""
        if not self._task.ended:
            return None
        with _refusing(self._request, at_error=lambda: self.end(id, saved=False)):
            return json.dumps(asdict(self._task.result())).encode()

    def end(self, id: str, *, saved: bool) -> None:
        """This save was committed or abandoned, so the tables need not keep anything for it. A late copy of
        its request starts nothing.
        """
        self._ended_ids.append(id)
        request = self._request
        if self._task is None or request is None or request.id != id:
            return
        self._task.cancel()
        if request.version and not saved and not self._task.ended:  # a slow disk must not stop training
            self._abandoned = True
            return
        self._task.wait()
        self._close(saved=saved)

    def _close(self, *, saved: bool) -> None:
        """The task has ended."""
        request, task = self._request, self._task
        assert request is not None
        assert task is not None
        task.close(saved=saved)
        if saved and request.version:
            self._since = [request.id]
        elif saved and request.mode is not SaveMode.VALUES:
            self.last_save = request.id
        self._task = self._request = self.requester = None
        self._abandoned = False

    def abandon(self) -> None:
        """End the running save, if any, without committing it."""
        if self._request is not None and self._task is not None:
            self._ended_ids.append(self._request.id)
            self._task.cancel()
            self._task.wait()
            self._close(saved=False)

    def close(self) -> None:
        """Abandon everything."""
        self.abandon()
        if self._merging is not None:
            self._merging.cancel()

    def publish(
        self,
        request: SaveRequest,
        step: int,
        tables: Collection[AnyTable],
        buffers: Buffers,
        record: Callback,
    ) -> bool:
        """Start the part of a version, after `record`; whether that was possible. `buffers`: to be in it too.
        Raises Refusal.
        """
        if request.mode is SaveMode.INCREMENT and not self._may_follow(request, tables):
            return False
        record()
        self._start(request, step, tables, buffers)
        self._cut_here.append(request.id)
        return True

    def known(self, id: str) -> bool:
        """Whether this one is running, or has ended."""
        return id in self._ended_ids or (self._request is not None and self._request.id == id)

    def end_former(self, request: SaveRequest) -> None:
        """End a version that a publisher has left behind which was killed; this request of the next one says
        whether it was committed.
        """
        former = self._request
        if former is not None and former.version and former.id != request.id:
            self.end(former.id, saved=former.id in request.after)

    def replay(self, id: str, tables: Iterable[AnyTable]) -> None:
        """This version was cut here, before this server was started again. What has changed since then is
        recorded: rows by their flags, as they have changed since the snapshot, and removed keys from the
        first one on.
        """
        self._since.append(id)
        self._cut_here.append(id)
        if len(self._since) == 1:
            for table in tables:
                if isinstance(table, SparseTable):
                    table.follow_removed(UNPUBLISHED)

    def merge(self, request: SaveRequest) -> bytes | None:
        """The record of this server's part of a merged base as JSON, or None while it is being written.
        Raises Refusal.
        """
        self._check_folder(request)
        if self._merging is None or self._merging.id != request.id:
            if self._merging is not None:
                self._merging.cancel()
            with _refusing(request):
                self._merging = MergeTask(request, self._spec(request, 0), self._wake)
        if not self._merging.future.done():
            return None
        with _refusing(request):
            return json.dumps(asdict(self._merging.future.result())).encode()

    def _may_follow(self, request: SaveRequest, tables: Iterable[AnyTable]) -> bool:
        sparse = (table for table in tables if isinstance(table, SparseTable))
        # The last one must have been cut here too: what a power failure took from the log, it may have.
        known = request.after[-1:] and request.after[-1] in self._cut_here
        known = known and not set(self._since).isdisjoint(request.after)
        return bool(known) and all(table.reports_removed(UNPUBLISHED) for table in sparse)

    def _spec(self, request: SaveRequest, step: int) -> SaveSpec:
        return SaveSpec(
            id=request.id,
            mode=SaveMode(request.mode),
            step=step,
            server=self._index,
            servers=self._servers,
            row_type=request.row_type,
        )

    def _check_folder(self, request: SaveRequest) -> None:
        if request.where != self._published:
            raise Refusal(
                Code.MISMATCH,
                f"this server publishes to {self._published or 'no folder'!r}, and was asked to publish to "
                f"{request.where!r}; set the same ps_configs publish for all servers",
            )

    def _start(
        self,
        request: SaveRequest,
        step: int,
        tables: Collection[AnyTable],
        buffers: Buffers = MappingProxyType({}),
    ) -> None:
        mode = SaveMode(request.mode)
        if request.version:
            self._check_folder(request)
        elif mode is SaveMode.INCREMENT:
            raise Refusal(Code.BAD_MESSAGE, "a save of mode 4 without a version")
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
            cuts = cut_tables(tables, mode, of=UNPUBLISHED if request.version else UNSAVED)
            undo.callback(close_cuts, cuts, saved=False)
            spec = self._spec(request, step)
            cuts += buffer_cuts(buffers)
            self._task = SaveTask(request.where, spec, cuts, done=lambda task: self._wake())
            undo.pop_all()
        self._request = request


class MergeTask:
    """A part that is merged in the background; starts at construction."""

    def __init__(self, request: SaveRequest, spec: SaveSpec, wake: Callback) -> None:
        self.id = request.id
        self._cancelled = threading.Event()
        thread = ThreadPoolExecutor(1, "merge", initializer=lower_priority)
        self.future: Future[FileRecord] = thread.submit(
            merge_part, request.where, spec, request.after, self._cancelled.is_set
        )
        self.future.add_done_callback(lambda _: wake())
        thread.shutdown(wait=False)

    def cancel(self) -> None:
        """Stop soon."""
        self._cancelled.set()


@contextlib.contextmanager
def _refusing(request: SaveRequest, at_error: Callback = lambda: None) -> Iterator[None]:
    """Turns every error into a Refusal: a storage library may raise anything, and the server must go on."""
    try:
        yield
    except Exception as error:
        at_error()
        raise Refusal(Code.FAILED, f"cannot save to {request.where!r}: {error or repr(error)}") from error

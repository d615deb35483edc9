"""Run a server's part of saving its tables, and keep its result. A trainer requests saved tables. The
publisher of the job requests a version in a published directory. `saves` handles the files.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.ps.kernels.rows import UNPUBLISHED, UNSAVED
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.saves.publication import Buffers, buffer_cuts, merge_part
from trainers.ps.saves.write import PartTask, SaveSpec, SaveTask, close_cuts, cut_tables
from trainers.ps.server.members import Refusal
from trainers.ps.server.store import AnyTable
from trainers.ps.tables.sparse import SparseTable
from trainers.ps.wire import Code

_MAX_REQUEST_CHARS = 65_536
_REMEMBERED_IDS = 64
_REMEMBERED_CUTS = 4096


@frozen
class SaveRequest:
    """A request to save the tables."""

    where: str
    """The directory or URL to save to."""
    id: str
    """The id of the saved tables (see `manifest.new_id`)."""
    mode: int
    after: Sequence[str] = ()
    """For an incremental save or a version, the last ids in the directory. For a merge, the ids to merge."""
    version: int = 0
    """The number of the version in a published directory, or 0 elsewhere."""
    row_type: str = ""
    """The type of rows in a version (see `write.SaveSpec`)."""
    turn: str = ""
    """If set, request only the turn to save tables of this kind (see SaveTurns)."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, text: str) -> SaveRequest:
        """Return the request in this text. Raises Refusal if the text is not a request."""
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
"""Rank and incarnation of a trainer."""
State = tuple[int, int]
"""The number of steps, and the number of other changes of the tables."""


@dataclass(slots=True)
class _Saved:
    """The tables that a turn has saved."""

    id: str
    state: State
    answered: dict[Sender, str]
    """The turn that each sender requested and does not need, or has used."""


class SaveTurns:
    """Decide which trainer may save. Only one saves at a time, because each waits for all servers.

    The first server decides. A trainer need not save if another trainer has saved the same and the tables are
    unchanged since. `state` is the state of the tables when the holder's save was cut.
    """

    def __init__(self) -> None:
        self.holder: Sender | None = None
        self.number = 0
        """The step of the holder."""
        self.state: State = (0, 0)
        self._request: SaveRequest | None = None
        self._saved: dict[SaveRequest, _Saved] = {}
        self._answers: dict[str, str] = {}
        """The answers to the last requests. Nobody would end a second turn, which a late copy would start."""

    @property
    def id(self) -> str:
        return "" if self._request is None else self._request.id

    def take(self, request: SaveRequest, sender: Sender, state: State) -> str | None:
        """Return "" if it is the sender's turn, the id of the turn in which another trainer has saved the
        same, or None while another trainer saves.
        """
        if request.id == self.id:
            return ""
        if request.id in self._answers:
            return self._answers[request.id]
        if self.holder is not None:
            return None
        saved = self._saved.get(replace(request, id=""))
        if saved and saved.state == state and saved.answered.setdefault(sender, request.id) == request.id:
            self._remember(request.id, saved.id)
            return saved.id
        self.holder, self._request, self.state = sender, request, state
        return ""

    def end(self, id: str, *, saved: bool) -> None:
        """End this turn if it is the current one."""
        if self._request is None or self.holder is None or self._request.id != id:
            return
        self._remember(id, "")
        self._saved = {key: each for key, each in self._saved.items() if each.state == self.state}
        if saved:
            key = replace(self._request, id="")
            self._saved[key] = _Saved(id, self.state, {self.holder: id})
        self.holder = self._request = None

    def _remember(self, id: str, answer: str) -> None:
        self._answers[id] = answer
        if len(self._answers) > _REMEMBERED_IDS:
            del self._answers[next(iter(self._answers))]


class SaveRunner:
    """Run at most one save at a time, and none while something else reads the tables (`reading`).

    `wake` is called in another thread when a save has been written. `last_save` is the save since which
    tables record their changes. `published` is the directory of versions, if there is one.
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
        self._merging: tuple[str, PartTask] | None = None
        """The id and the task of the last merge."""
        self._ended_ids: deque[str] = deque(maxlen=_REMEMBERED_IDS)
        self.requester: Sender | None = None
        """Rank and incarnation of the trainer whose save is running."""
        self.last_save: str | None = None
        self._abandoned = False
        """True if the task must be closed when it has ended."""
        self._cut_here: deque[str] = deque(maxlen=_REMEMBERED_CUTS)
        """Versions that were cut here, or that are in the write-ahead log of this server."""
        self._since: list[str] = []
        """The tables have recorded their changes since any of these versions was cut."""

    @property
    def busy(self) -> bool:
        """True while a save reads the tables."""
        if self._abandoned and self._task is not None and self._task.ended:
            self._close(saved=False)
        return self._task is not None

    @property
    def tables_in_use(self) -> bool:
        """True while a save or another task reads the tables."""
        return self.busy or self._reading()

    def run(self, request: SaveRequest, requester: Sender, tables: Collection[AnyTable]) -> bytes | None:
        """Return the record of this server's part as JSON, or None while the part is being written.

        The first call starts the save unless another save is running. The result is empty if the save was
        abandoned while this request waited. Raises Refusal if the save is impossible or has failed.
        """
        if request.id in self._ended_ids:
            return b""
        if not self.tables_in_use:
            self._start(request, tables)
            self.requester = requester
        return None if self._request is None or self._request.id != request.id else self.written(request.id)

    def written(self, id: str) -> bytes | None:
        """Return the same as `run` for a save that was started. The result is empty for any other save."""
        if self._task is None or self._abandoned or self._request is None or self._request.id != id:
            return b""
        if not self._task.ended:
            return None
        with _refusing(self._request, at_error=lambda: self.end(id, saved=False)):
            return json.dumps(asdict(self._task.result())).encode()

    def end(self, id: str, *, saved: bool) -> None:
        """End a save that was committed or abandoned, so the tables can drop the data that they keep for it.

        A late copy of its request is ignored.
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
        """Release the tables after the task has ended."""
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
        """Abandon the running save and the running merge."""
        self.abandon()
        self._cancel_merge()

    def publish(
        self,
        request: SaveRequest,
        tables: Collection[AnyTable],
        buffers: Buffers,
        record: Callback,
    ) -> bool:
        """Start the part of a version after a call of `record`. Return False if that was impossible.

        `buffers` is written to the version too. Raises Refusal if the request is invalid.
        """
        if request.mode is SaveMode.INCREMENT and not self._may_follow(request, tables):
            return False
        record()
        self._start(request, tables, buffers)
        self._cut_here.append(request.id)
        return True

    def known(self, id: str) -> bool:
        """Return True if this save is running or has ended."""
        return id in self._ended_ids or (self._request is not None and self._request.id == id)

    def end_left(self, committed: int) -> None:
        """End a version for which no publisher waits any more. `committed` is the last committed version."""
        left = self._request
        if left is not None and left.version:
            self.end(left.id, saved=left.version <= committed)

    def replay(self, id: str, tables: Iterable[AnyTable]) -> None:
        """Register a version that was cut here before this server restarted.

        Changes since then are recorded. Rows have their flags, because they have changed since the snapshot.
        Removed keys are recorded from the first such version on.
        """
        self._since.append(id)
        self._cut_here.append(id)
        if len(self._since) == 1:
            for table in tables:
                if isinstance(table, SparseTable):
                    table.follow_removed(UNPUBLISHED)

    def merge(self, request: SaveRequest) -> bytes | None:
        """Return the record of this server's part of a merged full version as JSON, or None while it is being
        written.

        Raises Refusal if the merge is impossible or has failed.
        """
        self._check_folder(request)
        if self._merging is None or self._merging[0] != request.id:
            self._cancel_merge()
            with _refusing(request):
                write = partial(merge_part, request.where, self._spec(request), request.after)
                self._merging = request.id, PartTask("merge", write, self._wake)
        task = self._merging[1]
        if not task.ended:
            return None
        with _refusing(request):
            return json.dumps(asdict(task.result())).encode()

    def _cancel_merge(self) -> None:
        if self._merging is not None:
            self._merging[1].cancel()

    def _may_follow(self, request: SaveRequest, tables: Iterable[AnyTable]) -> bool:
        sparse = (table for table in tables if isinstance(table, SparseTable))
        # The last version must also have been cut here. It may contain changes that a power failure removed
        # from the write-ahead log.
        known = request.after[-1:] and request.after[-1] in self._cut_here
        known = known and not set(self._since).isdisjoint(request.after)
        return bool(known) and all(table.reports_removed(UNPUBLISHED) for table in sparse)

    def _spec(self, request: SaveRequest) -> SaveSpec:
        return SaveSpec(
            id=request.id,
            mode=SaveMode(request.mode),
            server=self._index,
            servers=self._servers,
            row_type=request.row_type,
        )

    def _check_folder(self, request: SaveRequest) -> None:
        if request.where != self._published:
            raise Refusal(
                Code.MISMATCH,
                f"this server publishes to {self._published or 'no directory'}, but was asked to publish to "
                f"{request.where!r}. Set the same ps_configs publish on all servers",
            )

    def _start(
        self,
        request: SaveRequest,
        tables: Collection[AnyTable],
        buffers: Buffers = MappingProxyType({}),
    ) -> None:
        mode = SaveMode(request.mode)
        if request.version:
            self._check_folder(request)
        elif mode is SaveMode.INCREMENT:
            raise Refusal(Code.BAD_MESSAGE, "a save of mode 4 without a version")
        # Accept the last save, or an earlier one if the commit of a later one did not arrive here. In that
        # case this part also contains the later save's changes.
        if mode is SaveMode.DELTA and self.last_save not in request.after:
            wanted = " ".join(request.after[-1:])
            since = (
                f"changes since {self.last_save}"
                if self.last_save
                else "no changes, because it started later"
            )
            raise Refusal(
                Code.FAILED,
                f"this server cannot save the changes since {wanted}: it has recorded {since}. Save with "
                "mode 0",
            )
        with _refusing(request), contextlib.ExitStack() as undo:
            cuts = cut_tables(tables, mode, of=UNPUBLISHED if request.version else UNSAVED)
            undo.callback(close_cuts, cuts, saved=False)
            spec = self._spec(request)
            cuts += buffer_cuts(buffers)
            self._task = SaveTask(request.where, spec, cuts, done=lambda task: self._wake())
            undo.pop_all()
        self._request = request


@contextlib.contextmanager
def _refusing(request: SaveRequest, at_error: Callback = lambda: None) -> Iterator[None]:
    """Turn every error into a Refusal. A storage library may raise anything, and the server must continue."""
    try:
        yield
    except Exception as error:
        at_error()
        raise Refusal(Code.FAILED, f"cannot save to {request.where!r}: {error or repr(error)}") from error

"""The publisher is a thread of server 0. It publishes versions made of the parts of all servers, whose client
it is. `saves.publication` handles the files, and `saving` handles a server's part.

    cut        every server cuts its tables: in sync training as of the same step, else on arrival
    written    every server writes its part in the background
    commit     the manifest names the version; then the servers forget the changes in it

In sync training, servers pass the same steps, but not at the same moment. The publisher requests a step a
little ahead of the latest step. If a server has already passed the requested step, the publisher requests a
step further ahead. If training pauses, it requests the latest step itself.

If server 0 is killed at any point, it continues from the manifest of the directory. A server that was killed
finds in its write-ahead log if it still has the list of changes. Otherwise the next version is a full
version.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from fleetrun.aliases import Callback
from fleetrun.frozen import frozen
from trainers.errors import FleetError, ServerError
from trainers.process.log import glog
from trainers.ps.client import Client, PendingReplies, to_all
from trainers.ps.configs import PsConfigs
from trainers.ps.saves.manifest import Save, SaveMode, new_id
from trainers.ps.saves.publication import (
    Buffers,
    OthersError,
    Published,
    others_text,
    published_buffers,
)
from trainers.ps.server.saving import SaveRequest
from trainers.ps.transport import CurveKeys
from trainers.ps.wire import NO_TRAINER, Code, Kind, Message, text_part
from trainers.storage.errors import SaveError
from trainers.storage.manifest import FileRecord

_POLL_S = 0.05
_CUT_S = 1.0
"""The time in which servers must reach a step. After it, training counts as paused."""
_PAUSE_S = 0.5
"""The pause after servers were not ready, or after a step was not reached."""
_AGAIN_S = 30.0
"""The longest pause after a failure."""
_COMPLAIN_S = 60.0


class _StoppedError(Exception):
    """The server ends."""


@frozen
class _Merge:
    """A full version that the servers are merging from earlier versions."""

    request: SaveRequest
    replies: PendingReplies


class Publisher:
    """Publishes versions until `close`. `wake` is called in its thread after each version or failure. The
    constructor raises OthersError if the directory holds saved tables of another kind.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        where: str,
        configs: PsConfigs,
        *,
        sync: bool,
        keys: CurveKeys | None,
        wake: Callback,
    ) -> None:
        self._endpoints, self._where, self._configs = endpoints, where, configs
        self._sync, self._keys, self._wake = sync, keys, wake
        self._published: Published | None = None
        """None if the directory may have changed since it was last read."""
        self._own: set[str] = set()
        """Cuts that were found or committed here. Some may be uncommitted, because an error can follow the
        write.
        """
        self._kept: Buffers = {}
        self._of_folder: Buffers = {}
        self._take_buffers = False
        self._client: Client | None = None
        self._stopped = threading.Event()
        self._asked_for = threading.Event()
        self._asked = self._answered = 0
        self._answer: int | str = 0
        self._seen: list[tuple[int, str]] = []
        """The state of the servers in the last version: their steps, and counts of other changes."""
        self._base_due = False
        self._others = ""
        """The reason why publishing has stopped for good."""
        self._merge: _Merge | None = None
        self._complained = -_COMPLAIN_S
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        try:
            Published.open(where)
        except OthersError:
            raise
        except Exception as error:  # noqa: BLE001  (a storage library may raise anything)
            self._complain(error)

    def continues(self) -> None:
        """Note that server 0 has recovered its tables, so the buffers in the directory belong to them."""
        self._take_buffers = True

    @property
    def buffers(self) -> Buffers:
        """The buffers of a trainer's model, for the part of server 0. Buffers that trainers sent replace
        buffers of the directory. The server's thread sets the former, and the publisher's thread sets the
        latter.
        """
        return {**self._of_folder, **self._kept}

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End soon. An uncommitted version does not count."""
        self._stopped.set()
        self._asked_for.set()
        self._thread.join(_COMPLAIN_S)

    def keep(self, buffers: Buffers) -> None:
        """Add these buffers to the next version and to later ones. Other buffers stay as they are."""
        self._kept = {**self._kept, **buffers}

    def ask(self) -> int:
        """Return a ticket for the next version that starts."""
        self._asked += 1
        self._asked_for.set()
        return self._asked

    def answer(self, ticket: int) -> int | str | None:
        """Return the version for this ticket, or the reason for its failure. None means later."""
        return self._answer if ticket <= self._answered else None

    def _run(self) -> None:
        due = time.monotonic()
        with suppress(_StoppedError):
            while True:
                asked = self._asked
                try:
                    self._wait_until(due)
                    self._asked_for.clear()  # before the count is read, because a later request sets it again
                    started, asked = time.monotonic(), self._asked
                    due = started + self._configs.publish_interval_s
                    number = self._round(forced=asked > self._answered)
                    if number is None:
                        due = started + _PAUSE_S
                    elif number:
                        self._settle(asked, number)
                except _StoppedError:
                    raise
                except Exception as error:  # noqa: BLE001  (a storage library may raise anything)
                    self._failed(error)
                    due = min(due, time.monotonic() + _AGAIN_S)
                    self._settle(asked, f"The version could not be published: {error}")
        if self._client is not None:
            self._client.close()

    def _settle(self, asked: int, answer: int | str) -> None:
        self._answer, self._answered = answer, asked
        self._wake()

    def _wait_until(self, due: float) -> None:
        """Wait until `due`, or until a trainer requests a version. Meanwhile, a full version may be
        merged.
        """
        while not self._stopped.is_set():
            self._end_merge()
            left = due - time.monotonic()
            if left <= 0 or self._asked_for.is_set():
                return
            if self._merge is None:
                self._asked_for.wait(left)
            else:
                self._client_now().poll(_POLL_S)
        raise _StoppedError

    def _round(self, *, forced: bool) -> int | None:
        """Publish a version if anything has changed. Return its number, 0 without changes, or None if the
        servers were not ready.
        """
        if self._others:
            raise SaveError(self._others)
        published = self._open()
        answers = self._ask(Kind.PUBLISH, published.number)
        if any(answer.code is Code.NOT_READY for answer in answers):
            return None
        seen = [(answer.number, answer.text) for answer in answers]
        if seen == self._seen and not forced:
            return 0
        steps = [answer.number for answer in answers]
        mode = SaveMode.VALUES if self._base_due or not published.number else SaveMode.INCREMENT
        cut = self._cut(published, steps, mode, forced)
        if cut is None and self._base_due and mode.changes:
            cut = self._cut(published, steps, SaveMode.VALUES, forced)
        if cut is None:
            return None
        save, steps = cut
        published = self._commit(published, save)
        self._seen = [(step, text) for step, (_, text) in zip(steps, seen, strict=True)]
        if self._merge is None and published.long:
            request = SaveRequest(
                self._where,
                published.merged_id,
                int(SaveMode.VALUES),
                published.ids,
                published.number,
                self._configs.publish_dtype,
            )
            self._merge = _Merge(request, self._send(Kind.MERGE, 0, request.encode()))
        return published.number

    def _open(self) -> Published:
        """Return the content of the directory. Raises OthersError if the content belongs to another job."""
        if self._published is None:
            found = Published.open(self._where)
            if self._own and found.number and found.cuts[-1] not in self._own:
                raise OthersError(others_text(found.folder))
            if self._take_buffers and found.number:
                self._of_folder, self._take_buffers = published_buffers(self._where), False
            self._own.update(found.cuts[-1:])
            self._base_due |= found.row_type != self._configs.publish_dtype
            self._published = found
        return self._published

    def _cut(
        self, published: Published, steps: list[int], mode: SaveMode, forced: bool
    ) -> tuple[Save, list[int]] | None:
        """Let every server cut a version. Return the version and the servers' steps, or None if the servers
        are not ready or `_base_due` is set.
        """
        ahead, row_type = 0 if forced or not self._sync else 1, self._configs.publish_dtype
        while True:
            step = max(steps) + ahead
            id, now = new_id(step), time.time()
            request = SaveRequest(self._where, id, int(mode), published.cuts, published.number + 1, row_type)
            replies = self._send(Kind.PUBLISH, step, request.encode())
            complete = self._wait(replies, _CUT_S)
            answers = replies.replies
            self._base_due |= any(answer.code is Code.MISMATCH for answer in answers)
            passed = self._sync and any(answer.number != step for answer in answers)
            if complete and not passed and not any(answer.code for answer in answers):
                save = Save(id, mode, step, (), time=now, row_type=row_type)
                return save, [answer.number for answer in answers]
            steps = [answer.number for answer in self._ask(Kind.PUBLISHED, 0, id.encode())]
            if (self._base_due and mode.changes) or not (self._sync and (passed or ahead)):
                return None
            ahead = max(1, 2 * ahead) if passed else 0

    def _commit(self, published: Published, save: Save) -> Published:
        id = save.id.encode()
        try:
            parts = list(map(_record, self._ask(Kind.WRITTEN, 0, id)))
            self._own.add(save.id)
            self._published = published = published.follow(save, parts)
        except Exception:
            for _ in self._endpoints:  # late answers to the failed request may fail too
                with suppress(FleetError):
                    self._ask(Kind.PUBLISHED, 0, id)
                    break
            raise
        self._ask(Kind.PUBLISHED, 1, id)
        if not save.mode.changes:
            self._base_due, self._merge = False, None
            glog(f"published version {published.number} to {self._where} as a full version")
        return published

    def _end_merge(self) -> None:
        """Commit the full version after all servers have merged it. If that fails, the next version
        is full.
        """
        if self._merge is None or self._published is None or self._merge.replies.open:
            return
        merge, self._merge = self._merge, None
        try:
            parts = list(map(_record, merge.replies.replies))
            base = Save(merge.request.id, SaveMode.VALUES, 0, ())
            self._published = self._published.merge(base, parts, merge.request.after)
        except FleetError:
            self._base_due = True
            raise

    def _ask(self, kind: Kind, number: int = 0, text: bytes = b"") -> list[Message]:
        replies = self._send(kind, number, text)
        self._wait(replies)
        return replies.replies

    def _send(self, kind: Kind, number: int = 0, text: bytes = b"") -> PendingReplies:
        parts = [text_part(text)] if text else []
        return self._client_now().send(to_all(len(self._endpoints), kind, number, *parts))

    def _wait(self, replies: PendingReplies, limit: float | None = None) -> bool:
        """Wait for replies, up to `limit` seconds. Return True if all have arrived."""
        client, until = self._client_now(), None if limit is None else time.monotonic() + limit
        while replies.open:
            if self._stopped.is_set():
                raise _StoppedError
            if until is not None and time.monotonic() > until:
                return False
            client.poll(_POLL_S)
        return True

    def _client_now(self) -> Client:
        if self._client is None:
            self._client = Client(
                self._endpoints, NO_TRAINER, self._configs, keys=self._keys, name="the publisher"
            )
        return self._client

    def _failed(self, error: Exception) -> None:
        """Log why a version failed. The next version starts from the directory's content at that time."""
        if isinstance(error, OthersError) and self._is_of_others():
            self._others = str(error)
        self._complain(error)
        if self._client is not None:
            self._client.close()
        self._client = self._merge = self._published = None

    def _is_of_others(self) -> bool:
        """Return True if the directory holds content that is not of this job. A directory that was
        unavailable for a while and is back holds a version of this job. A directory that cannot be read now
        is read again at the next attempt.
        """
        try:
            found = Published.open(self._where)
        except Exception as error:  # noqa: BLE001  (a storage library may raise anything)
            return isinstance(error, OthersError)
        return found.number > 0 and found.cuts[-1] not in self._own

    def _complain(self, error: Exception) -> None:
        if time.monotonic() - self._complained >= _COMPLAIN_S:
            self._complained = time.monotonic()
            glog(f"Could not publish a version and will retry: {error or repr(error)}")


def _record(reply: Message) -> FileRecord:
    if reply.code is Code.FAILED:
        raise ServerError(reply.text)
    if not reply.text:
        raise ServerError("a server restarted while it wrote its part")
    return FileRecord(**json.loads(reply.text))

"""Answer requests about versions of the tables. They come from the publisher, a client that is not a trainer,
and from trainers that need a version now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trainers.ps.server.members import Refusal
from trainers.ps.server.publisher import Publisher
from trainers.ps.server.saving import SaveRequest, SaveRunner
from trainers.ps.server.steps import Steps
from trainers.ps.server.store import Store
from trainers.ps.wire import Code, Field, Kind, Message, Part, text_part

OF_PUBLISHER = (Kind.PUBLISH, Kind.WRITTEN, Kind.PUBLISHED, Kind.MERGE)
"""The kinds of requests that the publisher sends."""


class Versions:
    """Answers about versions. `record`, `answer` and `refresh` may raise Refusal. The answer None means
    later.
    """

    def __init__(
        self,
        store: Store,
        steps: Steps,
        saving: SaveRunner,
        publisher: Publisher | None,
        *,
        sync: bool,
        record: Callable[[Message], None],
    ) -> None:
        self._store, self._steps, self._saving = store, steps, saving
        self._publisher = publisher
        self._sync = sync
        self._record = record
        self._life = 0
        """The incarnation of the publisher that sent the last request."""
        self._refreshes: dict[tuple[int, int], tuple[int, int]] = {}
        """For each trainer, the sequence of its last REFRESH and the publisher's ticket."""

    def is_of_another(self, request: Message) -> bool:
        """Return True if the publisher has changed, because the former one was killed or has restarted."""
        before, self._life = self._life, request.incarnation
        return before != self._life

    def answer(self, request: Message) -> Message | None:
        """Answer a request of the publisher. `request.kind` is one of OF_PUBLISHER."""
        match request.kind:
            case Kind.PUBLISH if request.parts:
                return self._cut(request)
            case Kind.PUBLISH:
                return self._state(request)
            case Kind.WRITTEN:
                return done_with(request, self._saving.written(request.text))
            case Kind.MERGE:
                return self._merge(request)
            case _:
                self._saving.end(request.text, saved=request.number == 1)
                return request.reply(Kind.DONE, number=self._steps.step)

    def refresh(self, request: Message) -> Message | None:
        """Return the answer to a trainer's request for a version. The version must contain everything that
        the trainer has pushed, and the buffers that it sends.
        """
        if self._publisher is None:
            raise Refusal(Code.FAILED, "server 0 does not publish; set ps_configs publish on the servers")
        sender = request.rank, request.incarnation
        sequence, ticket = self._refreshes.get(sender, (0, 0))
        if request.sequence > sequence:
            self._publisher.keep(_buffers(request.parts))
            ticket = self._publisher.ask()
            self._refreshes[sender] = request.sequence, ticket
        answer = self._publisher.answer(ticket)
        if isinstance(answer, str):
            raise Refusal(Code.FAILED, answer)
        return None if answer is None else request.reply(Kind.DONE, number=answer)

    def _state(self, request: Message) -> Message:
        """Return the step. `request.number` is the last version that was committed. The publisher waits for
        no version now, and a part that it has left behind must not keep trainers from saving.
        """
        self._saving.end_left(request.number)
        busy = self._store.shrinking or self._saving.tables_in_use
        code = Code.NOT_READY if busy or not self._store.ready else Code.NONE
        return request.reply(Kind.DONE, number=self._steps.step, code=code, text=str(self._store.changes))

    def _cut(self, request: Message) -> Message | None:
        """Cut the tables. In sync training, cut at the requested step, which all servers reach."""
        step, version = self._steps.step, SaveRequest.decode(request.text)
        if self._saving.known(version.id):
            return request.reply(Kind.DONE, number=request.number if self._sync else step)
        if self._sync and self._store.ready and step > request.number:
            return request.reply(Kind.DONE, number=step)
        if not self._store.ready or (self._sync and step < request.number):
            return None
        self._saving.end_left(version.version - 1)
        if self._saving.tables_in_use or self._store.shrinking:
            return None
        tables = list(self._store.tables.values())
        buffers = {} if self._publisher is None else self._publisher.buffers
        cut = Message(kind=Kind.PUBLISH, parts=(text_part(version.id),))
        follows = self._saving.publish(version, tables, buffers, lambda: self._record(cut))
        return request.reply(Kind.DONE, number=step, code=Code.NONE if follows else Code.MISMATCH)

    def _merge(self, request: Message) -> Message | None:
        try:
            return done_with(request, self._saving.merge(SaveRequest.decode(request.text)))
        # Answer instead of refusing, because the publisher has other requests under way.
        except Refusal as refusal:
            return request.reply(Kind.DONE, code=Code.FAILED, text=str(refusal))


def done_with(request: Message, text: str | bytes | None) -> Message | None:
    """Return an answer with this text, or None if the text is None, which means later."""
    return None if text is None else request.reply(Kind.DONE, text=text)


def _buffers(parts: Sequence[Part]) -> dict[str, torch.Tensor]:
    names, values = parts[::2], parts[1::2]
    if [part.field for part in parts] != [Field.TEXT, Field.VALUES] * len(values):
        raise Refusal(Code.BAD_MESSAGE, "a REFRESH needs a TEXT and a VALUES part for each buffer")
    return {
        name.data.numpy().tobytes().decode("utf-8", "replace"): each.data.float()
        for name, each in zip(names, values, strict=True)
    }

"""What a client has asked of a store and not been told yet. Knows numbers and order; no socket."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fleetrun.elastic.embedded import wire


@dataclass(frozen=True, slots=True)
class _Question:
    frames: tuple[bytes, ...]
    then: Callable[[Any], None] | None
    repeat: bool


class Questions:
    """While nobody listens, they wait in their order."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._number = 0
        self._waiting: dict[int, _Question] = {}
        self._asked: dict[int, _Question] = {}
        self._open = False
        self._closed = False

    def ask(
        self,
        message: Callable[[int], Any],
        then: Callable[[Any], None] | None,
        *body: bytes,
        repeat: bool = False,
    ) -> int:
        """`message` makes one of a number; that one is returned. `repeat`: ask again after a broken
        connection; else the answer is False then.
        """
        self._number += 1
        question = _Question((wire.encode(message(self._number)), *body), then, repeat)
        if self._open:
            self._asked[self._number] = question
            self._send(*question.frames)
        else:
            self._waiting[self._number] = question
        return self._number

    def open(self) -> None:
        """Somebody listens: ask all that waits."""
        self._open = True
        waiting, self._waiting = self._waiting, {}
        for number, question in waiting.items():
            self._asked[number] = question
            self._send(*question.frames)

    def answer(self, number: int, answer: Any) -> None:
        question = self._asked.pop(number, None)
        if question is not None and question.then is not None:
            question.then(answer)

    def unanswered(self) -> None:
        """The connection is gone, and with it the answers to what was asked."""
        self._open = False
        asked, self._asked = self._asked, {}
        self._waiting |= {number: question for number, question in asked.items() if question.repeat}
        for question in asked.values():
            if not question.repeat and question.then is not None and not self._closed:
                question.then(False)

    def close(self) -> None:
        """Nobody wants to know any longer."""
        self._closed = True
        self._waiting.clear()
        self._asked.clear()

"""What a running launcher answers, and what it does when asked to end: all that a launch has of this."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fleetrun import files
from fleetrun.control.board import Board
from fleetrun.control.server import Later, Message, Say, Server
from fleetrun.pod.loop import Loop

Interrupt = Callable[[int], None]


class Others(Protocol):
    """Asks the launchers of the job's other machines."""

    within: float
    """Seconds in which they answer."""

    def ask(
        self, rank: int | None, brief: bool, then: Callable[[Mapping[int, bytes | None]], None], /
    ) -> None:
        """`then` hears what all, or the one of this rank, said (`elsewhere.pack`); None: nothing."""
        ...


class Control:
    """Between the socket and the job. `interrupt` ends the job as this signal would."""

    def __init__(self, loop: Loop, board: Board, told: Callable[[str], None]) -> None:
        """`told`: what a person at the launcher's terminal should know of it."""
        self.board = board
        self.interrupt: Interrupt | None = None
        self.others: Others | None = None
        """Of a job on several machines."""
        self._loop = loop
        self._told = told
        self._server: Server | None = None

    def open(self, runtime: Path) -> None:
        """From now on people can ask. Without a place for the socket the job runs all the same."""
        try:
            files.make_run_folder(runtime)
            path = files.control_socket(runtime, self.board.facts.pod)
            self._server = Server(self._loop, path, self.answer)
        except OSError as error:
            why = error.strerror or error
            self._told(f"`fleetrun status` will not find this job: no socket in {runtime}: {why}")

    def close(self) -> None:
        """May be called twice."""
        if self._server is not None:
            self._server.close()

    def answer(self, question: Message) -> Message | Later:
        asked = question.get("ask")
        if asked == "status" and question.get("everywhere") is True and self.others is not None:
            return self._everywhere(self.others, question)
        if asked == "status":
            return self.board.status()
        if asked == "stop":
            return self._stop(question)
        return {"error": f"this fleetrun does not know what to answer to {str(asked)[:40]!r}"}

    def tell(self, brief: bool, most: int) -> bytes:
        """How the job stands here, for another machine: at most so many bytes."""
        from fleetrun.control.elsewhere import pack  # late: for jobs on several machines

        return pack(self.board.status(), brief, most)

    def _everywhere(self, others: Others, question: Message) -> Later:
        """`node`: its rank, if it is about one; `all`: every process, however many there are."""
        from fleetrun.control.elsewhere import MANY, with_answers  # late, too

        rank = question.get("node")
        one = rank if isinstance(rank, int) and 0 <= rank < self.board.nodes else None
        brief = one is None and question.get("all") is not True and self.board.nodes > MANY

        def ask(say: Say) -> None:
            others.ask(one, brief, lambda found: say(with_answers(self.board.status(), found, others.within)))

        return ask

    def _stop(self, question: Message) -> dict[str, Any]:
        if self.interrupt is None:
            return {"error": "the job has not begun"}
        now = question.get("now") is True
        self._told(f"`fleetrun stop{' --now' if now else ''}` asks this job to end")
        self._loop.after(0, lambda: self._end(now))  # whoever asked has the answer by then
        facts = self.board.facts
        return {"stopping": facts.job, "pod": facts.pod, "pid": facts.pid, "guard": facts.guard}

    def _end(self, now: bool) -> None:
        if self.interrupt is not None:
            self.interrupt(signal.SIGTERM)
            if now:
                self.interrupt(signal.SIGQUIT)  # the second one kills what is left

"""What a running launcher answers, and what it does when asked to end: all that a launch has of this."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fleetrun.control.board import Board
from fleetrun.control.server import Message, Server
from fleetrun.envs import runfolder
from fleetrun.pod.loop import Loop

Interrupt = Callable[[int], None]


class Control:
    """Between the socket and the job. `interrupt` ends the job as this signal would."""

    def __init__(self, loop: Loop, board: Board, told: Callable[[str], None]) -> None:
        """`told`: what a person at the launcher's terminal should know of it."""
        self.board = board
        self.interrupt: Interrupt | None = None
        self._loop = loop
        self._told = told
        self._server: Server | None = None

    def open(self, runtime: Path) -> None:
        """From now on people can ask. Without a place for the socket the job runs all the same."""
        try:
            runfolder.make(runtime)
            path = runfolder.control_socket(runtime, self.board.facts.pod)
            self._server = Server(self._loop, path, self.answer)
        except OSError as error:
            why = error.strerror or error
            self._told(f"`fleetrun status` will not find this job: no socket in {runtime}: {why}")

    def close(self) -> None:
        """May be called twice."""
        if self._server is not None:
            self._server.close()

    def answer(self, question: Message) -> Message:
        asked = question.get("ask")
        if asked == "status":
            return self.board.status()
        if asked == "stop":
            return self._stop(question)
        return {"error": f"this fleetrun does not know what to answer to {str(asked)[:40]!r}"}

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

"""Receive progress reports at a datagram socket, pass them on, and write them to the event log from time to
time. The module `progress_report`, loaded with the first report, defines their form.

Each process of the pod reports its steps. A program that it starts, such as an evaluation between steps,
inherits its identity and may report too. While the first process with a reported step lives, reports of other
processes only show activity.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun import files
from fleetrun.aliases import Document
from fleetrun.envs.channels import LARGEST_DATAGRAM
from fleetrun.pod.container import Ended
from fleetrun.pod.events import Hang, Started
from fleetrun.pod.loop import Loop
from fleetrun.pod.spec import PodSpec

if TYPE_CHECKING:
    from fleetrun.envs.progress_report import Report
    from fleetrun.progress.track import Track


_AT_ONCE = 64  # datagrams in a row before other handlers have their turn
_SENDER = struct.Struct("3i")  # pid, uid, gid
_SENDER_SPACE = socket.CMSG_SPACE(_SENDER.size)
_WORTH = 0.1  # seconds of an activity that is worth a line in the event log
_QUEUE = 1024  # datagrams that may wait; the kernel allows 10 or 512 (net.unix.max_dgram_qlen)

Listener = Callable[[str, "Report"], None]
"""Called with the process's name and the unchanged report."""


class ProgressReceiver:
    """The receiver of one launch, over all its pods. Processes go by their names on this node: `trainer.0`.

    `write` is `Journal.write`, which appends to the event log. Without `open`, or if the socket cannot be
    made, the job runs without reports.
    """

    def __init__(self, loop: Loop, path: Path, write: Callable[..., None]) -> None:
        self._loop = loop
        self._path = path
        self._write = write
        self._socket: socket.socket | None = None
        self._pod = ""
        self._names: dict[tuple[str, int], str] = {}
        self._tracks: dict[str, Track] = {}
        self._speakers: dict[str, int] = {}
        self._listeners: list[Listener] = []

    def open(self) -> OSError | None:
        """Make the directory and the socket. Return the error that prevented it, or None after success."""
        try:
            self._socket = files.socket_at(self._path, socket.SOCK_DGRAM)
        except OSError as error:
            return error
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add(self._socket.fileno(), self._read)
        return None

    def pod(self, spec: PodSpec) -> None:
        """Set the pod that reports from now on. Facts about the previous pod are forgotten."""
        self.settle()
        self._pod = spec.name
        self._names = {(str(each.role), each.rank): each.name for each in spec.containers}
        self._tracks, self._speakers = {}, {}

    def handle(self, event: object) -> None:
        """Follow the starts and ends of processes. Reports before a hang come before the hang in the event
        log.
        """
        if isinstance(event, Started):
            for each in event.containers:
                self.started(each.spec.name)
        elif isinstance(event, Ended):
            self.ended(event.spec.name)
        elif isinstance(event, Hang):
            self.settle()

    def started(self, name: str) -> None:
        """Handle the start of a process. Facts about its predecessor are forgotten."""
        self._tracks.pop(name, None)
        self._speakers.pop(name, None)
        self.renew()

    def renew(self) -> None:
        """Make the socket again if a cleaner of old files, or the end of a login, removed it."""
        if self._socket is not None and not self._path.exists():
            self.close()
            self.open()

    def ended(self, name: str) -> None:
        """Handle the end of a process. Its last reports come before its exit in the event log."""
        self._read(_QUEUE)
        self._note(name)

    def latest(self, name: str) -> Report | None:
        """Return the state of a process: the newest value of each field that the present process reported."""
        track = self._tracks.get(name)
        return track.latest if track is not None else None

    def age(self, name: str) -> float | None:
        """Return the seconds since the last report of the present process, or None without a report."""
        latest = self.latest(name)
        return None if latest is None else self._loop.clock() - latest.received

    def last_step(self, names: Iterable[str]) -> int | None:
        """Return the last step that any of these processes has reported, or None without such a report."""
        self._read(_QUEUE)
        reports = [self.latest(name) for name in names]
        steps = [each.step for each in reports if each is not None and each.step is not None]
        return max(steps, default=None)

    def has_saved(self, name: str) -> bool:
        """Return True if the present or last process has made a checkpoint."""
        latest = self.latest(name)
        return latest is not None and latest.saved

    def speeds(self, name: str) -> tuple[float | None, float | None, float | None]:
        """Return samples per second, seconds of a step, and seconds to the last step.

        The first two cover about the last ten seconds. The third is None if the process has not reported its
        last step.
        """
        track, now = self._tracks.get(name), self._loop.clock()
        return (None,) * 3 if track is None else (track.rate(now), track.step_seconds(now), track.left(now))

    def averages(self, name: str) -> tuple[float | None, float | None]:
        """Return samples per second and seconds of a step over all reports of the process."""
        track = self._tracks.get(name)
        return (None, None) if track is None else (track.average, track.pace)

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def settle(self) -> None:
        """Read all waiting reports, and record all facts that are not in the event log."""
        self._read(_QUEUE)
        for name in self._tracks:
            self._note(name)

    def close(self) -> None:
        """Close the socket. You may call it twice."""
        if self._socket is None:
            return
        self.settle()
        self._loop.remove(self._socket.fileno())
        self._socket.close()
        self._socket = None
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _read(self, most: int = _AT_ONCE) -> None:
        if self._socket is None:
            return
        for _ in range(most):
            try:
                datagram, sender, _, _ = self._socket.recvmsg(LARGEST_DATAGRAM + 1, _SENDER_SPACE)
            except OSError:  # usually because no datagram waits
                return
            from fleetrun.envs.progress_report import (
                read_report,  # late: a launch comes before its first report
            )

            report = read_report(datagram, self._loop.clock())
            if report is not None:
                self._take(report, _SENDER.unpack(sender[0][2])[0] if sender else 0)

    def _take(self, report: Report, pid: int) -> None:
        name = self._names.get((report.role, report.rank))
        if name is None or report.pod != self._pod:
            return
        from fleetrun.progress.track import Track

        track = self._tracks.setdefault(name, Track())
        if report.joined is not None:
            self._write("joined", container=name, joining=report.joined[0], joined=report.joined[1])
            report = track.only_alive(report)
        elif self._speaks(name, report, pid):
            # Record the end of an activity without steps.
            over = track.stall_over(report)
            if over is not None and over[1] >= _WORTH:
                self._write("activity", container=name, what=over[0], seconds=round(over[1], 3))
            track.take(report)
            if track.due:
                self._note(name)
        else:
            report = track.only_alive(report)
        for listener in self._listeners:
            listener(name, report)

    def _speaks(self, name: str, report: Report, pid: int) -> bool:
        """Return True if this process may report. A process in another pid namespace has the pid 0."""
        first = self._speakers.get(name)
        if first not in (None, pid) and os.path.exists(f"/proc/{first}"):  # noqa: PTH110 - no Path for each report
            return False
        if report.step is not None:
            self._speakers[name] = pid
        return True

    def _note(self, name: str) -> None:
        track = self._tracks.get(name)
        if track is not None and track.unnoted:
            noted: Document = track.note(self._loop.clock())
            self._write("progress", container=name, **noted)

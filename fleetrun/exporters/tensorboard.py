"""A TensorBoard event file, by TensorBoard's own record writer and messages. Each record is in the file when
`write` returns, whole or not at all.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from fleetrun.exporters.job_state import Point

_VERSION = "brain.Event:2"
_WRITER = "fleetrun"


class EventFile:
    """One in the folder of a run, made now. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = (
            f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.path = folder / name
        self._file = _Whole(os.open(self.path, flags, 0o644))
        self._writer = RecordWriter(self._file)
        about = event_pb2.SourceMetadata(writer=_WRITER)
        try:
            self._add(event_pb2.Event(wall_time=now, file_version=_VERSION, source_metadata=about))
        except OSError:  # on a full disk each report comes here: none may leave a file, or keep one open
            self._file.close()
            self.path.unlink(missing_ok=True)
            raise

    def write(self, point: Point, wall: float) -> None:
        """Raises OSError; the file is as before then."""
        if point.again:  # readers drop what an earlier attempt wrote for later steps
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._add(event_pb2.Event(wall_time=wall, step=point.step, session_log=start))
        values = [
            summary_pb2.Summary.Value(tag=tag, simple_value=value) for tag, value in point.scalars.items()
        ]
        self._add(event_pb2.Event(wall_time=wall, step=point.step, summary=summary_pb2.Summary(value=values)))

    @property
    def deleted(self) -> bool:
        """Whether nobody will ever read what is written. One that was moved is none."""
        return self._file.deleted

    def close(self) -> None:
        self._file.close()

    def _add(self, event: event_pb2.Event) -> None:
        self._writer.write(event.SerializeToString())


class _Whole:
    """A file that takes a record whole or not at all: a torn one would hide all that follows it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._size = 0

    def write(self, data: bytes) -> None:
        try:
            written = os.pwrite(self._fd, data, self._size)
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._fd, self._size)
            raise
        self._size += written

    @property
    def deleted(self) -> bool:
        try:
            return os.fstat(self._fd).st_nlink == 0
        except OSError:  # on a disk of another machine
            return True

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        os.close(self._fd)

"""Data sets of files, in the words of Paddle's API: what every one of them is told, and the one that streams.
Knows settings; leaves reading to `reading`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from trainers.data.batch import Batch
from trainers.data.multislot import BrokenLines
from trainers.data.reading import Pass, Reading
from trainers.data.slots import Layout, UseVar
from trainers.data.sources import AS_IT_IS
from trainers.errors import NotSupportedError, UsageError
from trainers.glog import glog

_AHEAD = 64


class Dataset(Protocol):
    """What a training loop needs."""

    def __iter__(self) -> Iterator[Batch]: ...

    @property
    def skipped_lines(self) -> int:
        """Broken lines that the last pass skipped."""
        ...


class FileDataset:
    """The settings that all data sets of files share. Every one can be given to `init` or set on its own."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._paths: tuple[str, ...] = ()
        self._command = AS_IT_IS
        self._batch_size = 1
        self._threads = 1
        self._ahead = _AHEAD
        self._max_bad_lines = 0
        self._broken = BrokenLines()
        self._told: set[str] = set()

    def init(
        self,
        *,
        use_var: UseVar,
        pipe_command: str = AS_IT_IS,
        batch_size: int = 1,
        thread_num: int = 1,
        queue_size: int = _AHEAD,
        max_bad_lines: int = 0,
        input_type: int = 0,
        fs_name: str = "",
        fs_ugi: str = "",
        download_cmd: str = AS_IT_IS,
    ) -> None:
        """Say what a line consists of and how it is read.

        `use_var`: the slots in the order of the text. `pipe_command`: a shell command that turns each file
        (its standard input) into MultiSlot text. `thread_num`: files read at the same time; with one, the
        order of the examples is that of the files. `queue_size`: batches that may wait. `max_bad_lines`:
        broken lines that a pass skips and counts before one is an error. The last four are Paddle's; only
        their defaults are supported: remote files are named by URLs, `s3://bucket/part-0`.
        """
        if input_type != 0 or fs_name or fs_ugi or download_cmd != AS_IT_IS:
            raise NotSupportedError(
                "input_type, fs_name, fs_ugi and download_cmd are not supported; name remote files by their "
                "URLs in set_filelist, such as s3://bucket/part-0 or hdfs://host/part-0"
            )
        self.set_use_var(use_var)
        self.set_pipe_command(pipe_command)
        self.set_batch_size(batch_size)
        self.set_thread(thread_num)
        self._ahead = _at_least("queue_size", queue_size, 1)
        self._max_bad_lines = _at_least("max_bad_lines", max_bad_lines, 0)

    def set_use_var(self, use_var: UseVar) -> None:
        """The slots of a line, in order."""
        self._layout = Layout.of(use_var)

    def set_pipe_command(self, pipe_command: str) -> None:
        """A shell command for every file; "cat" reads it as it is, without a process."""
        if not pipe_command.strip():
            raise UsageError('pipe_command is empty; "cat" takes the files as they are')
        self._command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        self._batch_size = _at_least("batch_size", batch_size, 1)

    def set_thread(self, thread_num: int) -> None:
        self._threads = _at_least("thread_num", thread_num, 1)

    def set_filelist(self, filelist: Sequence[str | os.PathLike[str]]) -> None:
        """The files of this trainer: paths, or URLs for fsspec."""
        if isinstance(filelist, str | os.PathLike):
            raise UsageError(f"set_filelist takes a list of paths, not {os.fspath(filelist)!r}")
        self._paths = tuple(os.fspath(path) for path in filelist)

    @property
    def skipped_lines(self) -> int:
        """Broken lines that the last pass over the files skipped."""
        return self._broken.count

    def _slots(self) -> Layout:
        if self._layout is None:
            raise UsageError("the data set has no slots; call init(use_var=[Slot(...), ...]) first")
        return self._layout

    def _reading(self, rows: int, ahead: int) -> Reading:
        """A new pass over the files."""
        wanted = Pass(
            layout=self._slots(),
            paths=self._paths,
            command=self._command,
            rows=rows,
            threads=self._threads,
            ahead=ahead,
        )
        self._broken = BrokenLines(self._max_bad_lines)
        return Reading(wanted, self._broken)

    def _tell(self, reading: Reading) -> None:
        """After a pass: what was skipped, and each empty file once."""
        for path in reading.empty:
            if path not in self._told:
                self._told.add(path)
                glog(f"{path} has no examples")
        if reading.broken.count:
            glog(f"{reading.broken.count} broken lines were skipped; the first: {reading.broken.first}")


class QueueDataset(FileDataset):
    """Streams its files: every iteration is one pass, and holds a bounded number of batches.

    One pass at a time. The threads and processes of a pass are gone when its iterator is: at the end, when a
    loop is left, or on an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._one_pass = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        if not self._one_pass.acquire(blocking=False):
            raise UsageError("this data set is being read; finish or close that pass before the next")
        try:
            size = self._batch_size
            reading = self._reading(size, self._ahead)
            for columns in reading.columns():
                for start in range(0, len(columns), size):
                    yield columns.rows(start, min(start + size, len(columns))).batch()
            self._tell(reading)
        finally:
            self._one_pass.release()


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name} is {value!r}; it must be a whole number of at least {least}")
    return value

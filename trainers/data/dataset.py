"""Provide Paddle's data sets of files. One streams its files, the other keeps them in memory to shuffle them.

The module has the settings and the order of the examples. `reading` reads files, and `exchange` shuffles
among trainers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fleetrun.aliases import Strings
from trainers import progress
from trainers.checks import whole
from trainers.data.exchange import exchange, peers_of, total_of
from trainers.data.multislot import BrokenLines
from trainers.data.reading import HandOver, Pass, Reading
from trainers.data.slots import Batch, Kind, Layout, UseVar
from trainers.data.sources import AS_IT_IS
from trainers.data.store import Store
from trainers.errors import NotSupportedError, UsageError
from trainers.process.log import glog
from trainers.roles.environment import current_identity
from trainers.storage.folder import Where

# ---- Settings of all data sets, and the data set that streams its files

_AHEAD = 64


class FileDataset:
    """The settings that all data sets of files share. Pass them to `init`, or set each one separately."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._paths: Strings | None = None
        self._command = AS_IT_IS
        self._batch_size = 1
        self._threads = 1
        self._ahead = _AHEAD
        self._max_bad_lines = 0
        self._broken = BrokenLines()
        self._reported: set[str] = set()

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
        """Set the slots of a line, and how to read the files.

        `use_var` are the slots in the order of the text. `pipe_command` is a shell command that turns each
        file (its standard input) into MultiSlot text. `thread_num` is the number of files read at the same
        time. With one thread, examples keep the order of the files. `queue_size` is the number of batches
        that may wait. `max_bad_lines` is the number of broken lines that a pass skips and counts before it
        fails.

        The last four arguments are Paddle's, and only their defaults are supported. Use URLs for remote
        files, such as `s3://bucket/part-0`. Raises NotSupportedError for other values, and UsageError for
        invalid settings.
        """
        if input_type != 0 or fs_name or fs_ugi or download_cmd != AS_IT_IS:
            raise NotSupportedError(
                "input_type, fs_name, fs_ugi and download_cmd are not supported. Pass the URLs of remote "
                "files to set_filelist, such as s3://bucket/part-0 or hdfs://host/part-0."
            )
        self.set_use_var(use_var)
        self.set_pipe_command(pipe_command)
        self.set_batch_size(batch_size)
        self.set_thread(thread_num)
        self._ahead = whole("queue_size", queue_size, 1)
        self._max_bad_lines = whole("max_bad_lines", max_bad_lines, 0)

    def set_use_var(self, use_var: UseVar) -> None:
        """Set the slots of a line, in order."""
        self._layout = Layout.of(use_var)

    def set_pipe_command(self, pipe_command: str) -> None:
        """Set a shell command for every file. "cat" reads files unchanged, without a process."""
        if not pipe_command.strip():
            raise UsageError('pipe_command is empty. Use "cat" to read the files unchanged.')
        self._command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        self._batch_size = whole("batch_size", batch_size, 1)

    def set_thread(self, thread_num: int) -> None:
        self._threads = whole("thread_num", thread_num, 1)

    def set_filelist(self, filelist: Sequence[Where]) -> None:
        """Set the files of this trainer, as paths or as URLs for fsspec.

        With more trainers than files, the list may be empty on any trainer except the first. A pass on that
        trainer is then empty.
        """
        if isinstance(filelist, str | os.PathLike):
            raise UsageError(f"set_filelist was given {os.fspath(filelist)!r}; it must be a list of paths")
        self._paths = tuple(os.fspath(path) for path in filelist)

    @property
    def skipped_lines(self) -> int:
        """The number of broken lines that the last pass skipped."""
        return self._broken.count

    def _slots(self) -> Layout:
        if self._layout is None:
            raise UsageError("The data set has no slots. Call init(use_var=[Slot(...), ...]) first.")
        return self._layout

    def _files(self) -> Strings:
        if self._paths is None:
            raise UsageError("The data set has no files. Call set_filelist([...]) first.")
        if not self._paths:
            rank = current_identity().index
            if rank == 0:
                raise UsageError(
                    "The data set has no files. Call set_filelist with at least one file on trainer 0. If "
                    "you use a pattern, check that it matches files."
                )
            self._report_once(f"Trainer {rank} has no files and takes part without data.")
        return self._paths

    def _report_once(self, line: str) -> None:
        if line not in self._reported:
            self._reported.add(line)
            glog(line)

    def _reading(self, rows: int, ahead: int) -> Reading:
        """Start a new pass over the files."""
        wanted = Pass(
            layout=self._slots(),
            paths=self._files(),
            command=self._command,
            rows=rows,
            threads=self._threads,
            ahead=ahead,
        )
        self._broken = BrokenLines(self._max_bad_lines)
        return Reading(wanted, self._broken)

    def _report(self, reading: Reading) -> None:
        """Log the skipped lines after a pass, and each empty file once."""
        for path in reading.empty:
            self._report_once(f"{path} has no examples")
        if reading.broken.count:
            glog(f"skipped {reading.broken.count} broken lines; the first: {reading.broken.first}")


class QueueDataset(FileDataset):
    """Streams its files. Every iteration is one pass, with a limited number of batches in memory.

    Only one pass can run at a time. The threads and processes of a pass end with its iterator, at the end,
    after a `break`, or on an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self._one_pass = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        if not self._one_pass.acquire(blocking=False):
            raise UsageError(
                "This data set is being read. Finish or close this pass before you start the next."
            )
        try:
            size = self._batch_size
            reading = self._reading(size, self._ahead)
            for columns in reading.columns():
                for start in range(0, len(columns), size):
                    yield columns.rows(start, min(start + size, len(columns))).batch()
            self._report(reading)
        finally:
            self._one_pass.release()


# ---- The data set that is read once and kept in memory, so that it can be shuffled

_BLOCK_BYTES = 4 << 20


class InMemoryDataset(FileDataset):
    """Reads its files into memory, as arrays.

    Memory is about the size of the values (4 bytes a float, 8 an id), plus 16 bytes per example. After
    `load_into_memory`, every iteration is a pass over the examples in the order of the last shuffle. Shuffles
    depend on the seed and the number of earlier shuffles, so you can repeat a run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: Store | None = None
        self._order: NDArray[np.int64] | None = None
        self._seed = 0
        self._shuffles = 0
        self._shuffled = 0
        self._loading: _Loading | None = None

    def set_shuffle_seed(self, seed: int) -> None:
        """Set the seed of later shuffles. Use the same seed on every trainer."""
        self._seed = seed

    def load_into_memory(self) -> None:
        """Read all files, and replace the examples in memory. Broken lines and files raise errors here."""
        try:
            self.preload_into_memory()
            self.wait_preload_done()
        except KeyboardInterrupt:
            if self._loading is not None:  # the interrupt came before the wait
                self._loading.end()
                self._loading = None
            raise

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Start to read, and return immediately. `wait_preload_done` waits. `thread_num` works as in
        set_thread.
        """
        if self._loading is not None:
            raise UsageError("The data set is being loaded. Call wait_preload_done() first.")
        if thread_num is not None:
            self.set_thread(thread_num)
        self.release_memory()
        widths = self._slots().widths
        row = 4 * widths[Kind.DENSE] + 8 * (widths[Kind.IDS] + 2) + 4 * self._slots().varying
        self._loading = _Loading(self._slots(), self._reading(rows=max(1, _BLOCK_BYTES // row), ahead=2))
        self._loading.start()

    def wait_preload_done(self) -> None:
        """Wait for `preload_into_memory`. Raises the errors of the reading."""
        if self._loading is None:
            raise UsageError("The data set is not being loaded. Call preload_into_memory() first.")
        try:
            self._store = self._loading.wait()
        finally:
            loading, self._loading = self._loading, None
        self._report(loading.reading)

    def local_shuffle(self) -> None:
        """Shuffle this trainer's examples."""
        store = self._loaded("local_shuffle")
        random = np.random.default_rng([self._seed, self._shuffles])
        self._order = random.permutation(len(store))
        self._shuffles += 1

    def global_shuffle(self, fleet: object = None, thread_num: int = 0, *, group: object = None) -> None:
        """Send every example to a random trainer, and shuffle the received examples. All trainers must call
        it.

        `group` is a process group of the trainers whose backend accepts CPU tensors (Gloo), or a callable
        that makes one. The default is the job's own group. `fleet` and `thread_num` are Paddle's and are
        ignored. With a single trainer, the call is a `local_shuffle`. Raises TrainerLostError if another
        trainer has ended. You must then load the examples again.
        """
        store = self._loaded("global_shuffle")
        peers = peers_of(group)
        if peers is not None:
            self._store = self._order = None
            with progress.activity("shuffling among all trainers"):
                self._store = exchange(store, self._slots(), peers, self._seed, self._shuffles)
        self.local_shuffle()
        self._shuffled = len(self._store or ())

    def release_memory(self) -> None:
        """Remove the examples and free their memory."""
        self._store = self._order = None
        self._shuffled = 0

    def get_memory_data_size(self, fleet: object = None) -> int:
        """Return the number of examples in memory.

        With Paddle's `fleet` (or a process group), the number is the sum over all trainers, which must all
        call it.
        """
        return self._everywhere(fleet, len(self._store or ()))

    def get_shuffle_data_size(self, fleet: object = None) -> int:
        """Return the number of examples after the last global_shuffle. `fleet` works as in
        get_memory_data_size.
        """
        return self._everywhere(fleet, self._shuffled)

    def __iter__(self) -> Iterator[Batch]:
        store = self._loaded("a pass over the data set")
        columns, order, size = store.columns(), self._order, self._batch_size
        for start in range(0, len(store), size):
            stop = min(start + size, len(store))
            yield columns.gather(np.arange(start, stop) if order is None else order[start:stop])

    def _everywhere(self, fleet: object, count: int) -> int:
        peers = None if fleet is None else peers_of(fleet)
        return count if peers is None else total_of(count, peers)

    def _loaded(self, call: str) -> Store:
        if self._loading is not None:
            raise UsageError(
                f"{call} was called while the data set is being loaded. Call wait_preload_done() first."
            )
        if self._store is None:
            raise UsageError(f"{call} needs examples in memory. Call load_into_memory() first.")
        return self._store


class _Loading:
    """A thread that reads all files into a new store."""

    def __init__(self, layout: Layout, reading: Reading) -> None:
        self.reading = reading
        self._layout = layout
        self._result: HandOver[Store] = HandOver(1, producers=1)
        self._thread = threading.Thread(target=self._load, name="reader-of-all", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wait(self) -> Store:
        """Return the examples in order of arrival. Raises the errors of the reading. An interrupt ends it."""
        try:
            store = self._result.get()
        finally:
            self.end()
        assert store is not None, "nobody else stops it"
        return store

    def end(self) -> None:
        """Stop reading, and wait for the thread."""
        self.reading.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _load(self) -> None:
        reading = self.reading
        loading = progress.activity("loading the data set", of=reading.files)
        with self._result.producer(), loading:
            store = Store(self._layout)
            for columns in reading.columns():
                store.extend(columns)
                loading.at(reading.read)
            self._result.put(store)

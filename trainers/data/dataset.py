"""Data sets of files, in the words of Paddle's API: one that streams its files, and one that keeps them in
memory to shuffle them.

Settings, and the order of the examples; reading is in `reading`, and shuffling among trainers in
`exchange`.
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

# ---- Data sets of files, in the words of Paddle's API: what all of them are set to, and the one that
# streams. Knows settings; leaves reading to `reading`.

_AHEAD = 64


class FileDataset:
    """The settings that all data sets of files share. Every one can be given to `init` or set on its own."""

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._paths: Strings | None = None
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
        self._ahead = whole("queue_size", queue_size, 1)
        self._max_bad_lines = whole("max_bad_lines", max_bad_lines, 0)

    def set_use_var(self, use_var: UseVar) -> None:
        """The slots of a line, in order."""
        self._layout = Layout.of(use_var)

    def set_pipe_command(self, pipe_command: str) -> None:
        """A shell command for every file; "cat" reads it as it is, without a process."""
        if not pipe_command.strip():
            raise UsageError('pipe_command is empty; "cat" takes the files as they are')
        self._command = pipe_command

    def set_batch_size(self, batch_size: int) -> None:
        self._batch_size = whole("batch_size", batch_size, 1)

    def set_thread(self, thread_num: int) -> None:
        self._threads = whole("thread_num", thread_num, 1)

    def set_filelist(self, filelist: Sequence[Where]) -> None:
        """The files of this trainer: paths, or URLs for fsspec. With more trainers than files, the list may
        be empty on any trainer but the first: a pass has no batches there.
        """
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

    def _files(self) -> Strings:
        if self._paths is None:
            raise UsageError("the data set has no files; call set_filelist([...]) first")
        if not self._paths:
            rank = current_identity().index
            if rank == 0:
                raise UsageError(
                    "the data set has no files; call set_filelist with at least one on trainer 0. Does a "
                    "pattern match nothing?"
                )
            self._say_once(f"trainer {rank} has no files: it takes part without data")
        return self._paths

    def _say_once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            glog(line)

    def _reading(self, rows: int, ahead: int) -> Reading:
        """A new pass over the files."""
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

    def _tell(self, reading: Reading) -> None:
        """After a pass: what was skipped, and each empty file once."""
        for path in reading.empty:
            self._say_once(f"{path} has no examples")
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


# ---- A data set that is read once and kept, so that it can be shuffled. Knows the order of its examples;
# leaves reading to `reading` and other trainers to `exchange`.

_BLOCK_BYTES = 4 << 20


class InMemoryDataset(FileDataset):
    """Reads its files into memory, as arrays: about as many bytes as the values have (4 a float, 8 an id),
    and 16 more an example.

    After `load_into_memory` every iteration is a pass over the examples, in the order of the last shuffle.
    Shuffles depend on the seed and on how many there were before, so a run can be repeated.
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
        """What the shuffles to come depend on; the same on every trainer."""
        self._seed = seed

    def load_into_memory(self) -> None:
        """Read all files, in place of what was there before. Broken lines and files are errors here."""
        try:
            self.preload_into_memory()
            self.wait_preload_done()
        except KeyboardInterrupt:
            if self._loading is not None:  # it came before anybody waited
                self._loading.end()
                self._loading = None
            raise

    def preload_into_memory(self, thread_num: int | None = None) -> None:
        """Begin to read, and come back at once: `wait_preload_done` waits. `thread_num` is set_thread's."""
        if self._loading is not None:
            raise UsageError("the data set is being loaded; call wait_preload_done() first")
        if thread_num is not None:
            self.set_thread(thread_num)
        self.release_memory()
        widths = self._slots().widths
        row = 4 * widths[Kind.DENSE] + 8 * (widths[Kind.IDS] + 2) + 4 * self._slots().varying
        self._loading = _Loading(self._slots(), self._reading(rows=max(1, _BLOCK_BYTES // row), ahead=2))
        self._loading.start()

    def wait_preload_done(self) -> None:
        """Wait for `preload_into_memory`. Raises what went wrong in it."""
        if self._loading is None:
            raise UsageError("nothing is being loaded; call preload_into_memory() first")
        try:
            self._store = self._loading.wait()
        finally:
            loading, self._loading = self._loading, None
        self._tell(loading.reading)

    def local_shuffle(self) -> None:
        """A new random order of this trainer's examples."""
        store = self._loaded("local_shuffle")
        random = np.random.default_rng([self._seed, self._shuffles])
        self._order = random.permutation(len(store))
        self._shuffles += 1

    def global_shuffle(self, fleet: object = None, thread_num: int = 0, *, group: object = None) -> None:
        """Give every example to a trainer chosen at random, and shuffle what came. All trainers must call it.

        `group`: a process group of the trainers whose backend takes tensors of the CPU (Gloo), or a callable
        that makes one; by default the job's own. `fleet` and `thread_num` are Paddle's and change nothing.
        For a single trainer this is `local_shuffle`. Raises TrainerLostError when another trainer is gone:
        the examples must be loaded again then.
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
        """Forget the examples and give their memory back."""
        self._store = self._order = None
        self._shuffled = 0

    def get_memory_data_size(self, fleet: object = None) -> int:
        """How many examples are in memory here; with Paddle's `fleet` (or a process group) on all trainers
        together, which all must call.
        """
        return self._everywhere(fleet, len(self._store or ()))

    def get_shuffle_data_size(self, fleet: object = None) -> int:
        """How many examples came with the last global_shuffle; with `fleet` as in get_memory_data_size."""
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
                f"{call} came while the data set is being loaded; call wait_preload_done() first"
            )
        if self._store is None:
            raise UsageError(f"{call} needs examples in memory; call load_into_memory() first")
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
        """The examples in the order of arrival. Raises what went wrong; an interrupt ends the reading."""
        try:
            store = self._result.get()
        finally:
            self.end()
        assert store is not None, "nobody else stops it"
        return store

    def end(self) -> None:
        """Read no more, and wait for the thread."""
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

"""A data set that is read once and kept, so that it can be shuffled. Knows the order of its examples; leaves
reading to `reading` and other trainers to `exchange`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trainers import progress
from trainers.data.batch import Batch
from trainers.data.dataset import FileDataset
from trainers.data.exchange import exchange, total_of
from trainers.data.handover import HandOver
from trainers.data.peers import peers_of
from trainers.data.reading import Reading
from trainers.data.slots import Kind, Layout
from trainers.data.store import Store
from trainers.errors import UsageError

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
        columns, order = store.columns(), self._order
        for start in range(0, len(store), self._batch_size):
            stop = min(start + self._batch_size, len(store))
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

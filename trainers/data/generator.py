"""Provide the base class of readers, which are pipe commands written in Python.

A subclass defines the examples of one line of a raw file, and the base class writes them as MultiSlot text.
The module avoids slow imports, because a reader starts once for every file.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from fleetrun.aliases import Strings

Sample = Sequence[tuple[str, Sequence[object]]]
"""One example: (slot, values) in the order of the slots."""

_OUT_BYTES = 1 << 18
_IN_BYTES = 1 << 20


class MultiSlotDataGenerator:
    """The base of a reader.

        class Reader(MultiSlotDataGenerator):
            def generate_sample(self, line):
                def samples():
                    label, *words = line.split()
                    yield [("words", [int(word) for word in words]), ("label", [int(label)])]

                return samples

        Reader().run_from_stdin()

    Use it with `pipe_command="python reader.py"`. Every example has the same slots in the same order. A slot
    of fixed length always has the same number of values.
    """

    def __init__(self) -> None:
        self.line_number = 0
        self._batch_size = 32
        self._names: Strings = ()

    def generate_sample(self, line: str | None) -> Callable[[], Iterable[Sample | None]]:
        """Return a function that yields the examples of a line, or None for a skipped example.

        The line ends as in the file. It is None in `run_from_memory`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generate_sample(line)")

    def generate_batch(self, samples: list[Sample]) -> Callable[[], Iterable[Sample]]:
        """Process `set_batch` examples together, for instance to pad them. Return a function that
        yields them.
        """
        return lambda: samples

    def set_batch(self, batch_size: int) -> None:
        """Set the number of examples that `generate_batch` receives."""
        if batch_size < 1:
            raise ValueError(f"set_batch was given {batch_size}; a batch has at least 1 example")
        self._batch_size = batch_size

    def run_from_stdin(self) -> None:
        """Read lines from standard input and write their examples to standard output, until either ends."""
        # avoids a traceback if the reader closes the pipe early
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        lines = os.fdopen(
            0,
            "r",
            buffering=_IN_BYTES,
            encoding="utf-8",
            errors="surrogateescape",
            newline="\n",
            closefd=False,
        )
        self._run(lines)

    def run_from_memory(self) -> None:
        """Write the examples of `generate_sample(None)` to standard output."""
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        self._run([None])

    def text_of(self, sample: Sample) -> str:
        """Return one line without its end, `n v1 .. vn` for each slot.

        Raises ValueError for a sample whose slots differ from the first one.
        """
        names = tuple([name for name, _ in sample])
        if names != self._names:
            self._check(names)
        words: list[str] = []
        for _, values in sample:
            words.append(str(len(values)))
            words += map(str, values)
        return " ".join(words)

    def _check(self, names: Strings) -> None:
        if self._names or not names:
            raise ValueError(
                f"a sample has slots {list(names)}, but the first sample had {list(self._names)}"
            )
        self._names = names

    def _run(self, lines: Iterable[str | None]) -> None:
        text: list[str] = []
        size = 0
        try:
            for sample in self._samples(lines):
                text.append(self.text_of(sample))
                size += len(text[-1])
                if size > _OUT_BYTES:
                    _write(text)
                    text, size = [], 0
        except BaseException as error:
            error.add_note(f"at line {self.line_number} of the input")
            raise
        _write(text)
        sys.stdout.buffer.flush()

    def _samples(self, lines: Iterable[str | None]) -> Iterator[Sample]:
        batched = type(self).generate_batch is not MultiSlotDataGenerator.generate_batch
        waiting: list[Sample] = []
        for self.line_number, line in enumerate(lines, start=1):
            for sample in self.generate_sample(line)():
                if sample is None:
                    continue
                if not batched:
                    yield sample
                    continue
                waiting.append(sample)
                if len(waiting) == self._batch_size:
                    yield from self.generate_batch(waiting)()
                    waiting = []
        if waiting:
            yield from self.generate_batch(waiting)()


def _write(text: list[str]) -> None:
    if text:
        sys.stdout.buffer.write(("\n".join(text) + "\n").encode())

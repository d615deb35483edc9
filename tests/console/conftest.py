"""A console that can be read."""

import os

import pytest

from fleetrun.console.console import Console, Sink


class Said:
    """A console that writes into two files."""

    def __init__(self, folder, level="INFO", **options):
        self._fds = [os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("out", "err")]
        self._folder = folder
        self.console = Console(*map(Sink, self._fds), level, **options)

    @property
    def out(self):
        return (self._folder / "out").read_bytes()

    @property
    def err(self):
        return (self._folder / "err").read_bytes().decode("utf-8", "surrogateescape")

    def close(self):
        for fd in self._fds:
            os.close(fd)


@pytest.fixture
def said(tmp_path):
    made = []

    def make(*arguments, **options):
        made.append(Said(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()

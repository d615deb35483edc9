"""A few files under one manifest: whole, the former, or an error that says which is damaged."""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from trainers.errors import UsageError
from trainers.serving.bundle import read_bundle, write_bundle
from trainers.storage.errors import LoadError, SaveError

PARTS = ("one", "two")


def write(where: str | Path, number: int, size: int = 10) -> None:
    files = {part: (".bin", [b"%d " % number, b"x" * size]) for part in PARTS}
    write_bundle(where, "thing", {"number": number}, files)


def number_in(where: str | Path) -> int:
    """Of a bundle all of which is of one writing."""
    bundle = read_bundle(where, "thing", PARTS)
    numbers = {int(bytes(bundle.contents[part].numpy()).partition(b" ")[0]) for part in PARTS}
    assert numbers == {bundle.about["number"]}
    return numbers.pop()


def test_the_newer_one_takes_the_place_of_the_former(tmp_path: Path) -> None:
    where = tmp_path / "not" / "there"
    write(where, 1)
    assert number_in(where) == 1
    (where / "other-file").touch()
    write_bundle(where, "other", {}, {"one": ("", [b"1"])})
    write(where, 2)
    assert number_in(where) == 2
    assert len(list(where.iterdir())) == 3 + 2 + 1, "only its own former files go"


def test_a_url(tmp_path: Path) -> None:
    for number in (1, 2):
        write("memory://bundles/a", number)
        assert number_in("memory://bundles/a") == number
    with pytest.raises(UsageError, match="cannot be opened"):
        write("nothing://bundles", 1)


def _flip(where: Path) -> None:
    path = next(where.glob("thing-two-*"))
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    path.write_bytes(content)


def _cut(where: Path) -> None:
    path = next(where.glob("thing-one-*"))
    path.write_bytes(path.read_bytes()[:-1])


def _manifest(where: Path, change: Callable[[dict[str, object]], object]) -> None:
    body = json.loads((where / "thing.json").read_text())
    change(body)
    (where / "thing.json").write_text(json.dumps(body))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_flip, r"thing-two-\w+\.bin is damaged"),
        (_cut, r"thing-one-\w+\.bin is damaged"),
        (lambda where: next(where.glob("thing-two-*")).unlink(), r"thing-two-.* cannot be read"),
        (lambda where: (where / "thing.json").write_text("{"), "thing.json cannot be used: the file is not"),
        (lambda where: (where / "thing.json").write_text("[]"), "thing.json cannot be used: the file is not"),
        (lambda where: _manifest(where, lambda body: body.update(about={"number": 2})), "checksum"),
        (lambda where: (where / "thing.json").unlink(), "has no thing.json.*It has: thing-"),
    ],
)
def test_damage_is_found_and_named(tmp_path: Path, damage: Callable[[Path], object], words: str) -> None:
    write(tmp_path, 1)
    damage(tmp_path)
    with pytest.raises(LoadError, match=words):
        number_in(tmp_path)


def test_a_part_that_was_not_saved(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(LoadError, match="was saved without three"):
        read_bundle(tmp_path, "thing", ("three",))


def test_a_save_that_fails_leaves_the_former_one_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(SaveError, match=r"File too large.*still valid"):
            write(tmp_path, 2, size=100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert number_in(tmp_path) == 1
    assert len(list(tmp_path.iterdir())) == 3


class Watched(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """`before(mode, path)` is called before every operation."""

    protocol = "watched"
    before: ClassVar[Callable[[str, str], None] | None] = None

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        self._tell(mode, path)
        return super()._open(path, mode, **options)

    def rm(self, path: str, *rest: object, **options: object) -> None:
        self._tell("rm", path)
        super().rm(path, *rest, **options)

    def _tell(self, mode: str, path: str) -> None:
        tell, Watched.before = Watched.before, None  # not of what the listener does
        if tell is not None:
            tell(mode, path)
            Watched.before = tell


@pytest.fixture
def watched() -> Iterator[str]:
    fsspec.register_implementation("watched", Watched, clobber=True)
    yield "watched://bundles"
    Watched.before = None
    Watched.store.clear()


def test_between_any_two_operations_of_a_save_there_is_a_whole_one(watched: str) -> None:
    write(watched, 1)
    seen: list[tuple[str, int]] = []
    Watched.before = lambda mode, path: seen.append((mode, number_in(watched)))
    write(watched, 2)
    Watched.before = None
    assert seen == [("wb", 1)] * 3 + [("rm", 2)] * 2


def test_who_reads_while_it_is_replaced_gets_the_new_one(watched: str) -> None:
    write(watched, 1)

    def replace(mode: str, path: str) -> None:
        if "thing-one" in path and number_in(watched) == 1:
            write(watched, 2)

    Watched.before = replace
    assert number_in(watched) == 2


def _write_on(where: Path, said: Connection) -> None:
    for number in range(1_000_000):
        write(where, number, size=5000)
        said.send(number)


@pytest.mark.slow
def test_killed_at_any_moment_there_is_a_whole_one(tmp_path: Path) -> None:
    chance = random.Random(0)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        hear, tell = context.Pipe(duplex=False)
        writer = context.Process(target=_write_on, args=(tmp_path, tell))
        writer.start()
        tell.close()
        for _ in range(chance.randrange(1, 20)):
            last = hear.recv()
        assert number_in(tmp_path) >= last
        writer.kill()
        writer.join()
        assert number_in(tmp_path) >= last
    write(tmp_path, 7)
    assert len(list(tmp_path.iterdir())) == 3, "what was interrupted is gone"

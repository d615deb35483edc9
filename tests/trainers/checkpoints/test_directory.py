"""Directories of checkpoints: what is complete, damaged, what goes; in a folder, in a store of objects,
and where half a file is seen. No tensor and no other process.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import xxhash

from tests.support.stores import register
from trainers.checkpoints import directory as checkpoint_directory
from trainers.checkpoints.directory import CheckpointDirectory, LocalDirectory, open_directory, step_of
from trainers.checkpoints.manifest import CheckpointError, Manifest
from trainers.errors import NotSupportedError, UsageError

KINDS = ("", "file://", "objects://", "torn://")


@dataclass
class Case:
    checkpoints: CheckpointDirectory

    def begun(self, step: int, content: bytes = b"abc") -> str:
        name = self.checkpoints.begin(step)
        self.put(name, "data", content)
        return name

    def written(self, step: int, content: bytes = b"abc") -> str:
        files = {"data": (len(content), xxhash.xxh3_128_hexdigest(content))}
        about = Manifest(step=step, world=2, files=files, index={}, parts={"state": {}})
        return checkpoint_directory.commit(self.checkpoints, self.begun(step, content), about)

    def put(self, name: str, file: str, content: bytes) -> None:
        with self.checkpoints.open(name, file, "wb") as stream:
            stream.write(content)

    def get(self, name: str, file: str) -> bytes:
        with self.checkpoints.open(name, file, "rb") as stream:
            return stream.read()

    def steps(self) -> list[int]:
        return [step_of(name) for name in self.checkpoints.complete()]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    register()
    return Case(open_directory(f"{request.param}{tmp_path}/saved"))


def test_what_is_written_is_read(case: Case) -> None:
    assert case.checkpoints.complete() == case.checkpoints.interrupted() == []
    name = case.written(7)
    manifest = checkpoint_directory.read_manifest(case.checkpoints, name)
    assert (manifest.step, manifest.world, manifest.parts) == (7, 2, {"state": {}})
    assert checkpoint_directory.damage(case.checkpoints, name, manifest.files) is None
    assert case.checkpoints.path(name, "data").endswith(f"/saved/{name}/data")
    assert name.startswith("step-00000007")
    assert case.steps() == [7]


def test_only_what_a_finished_save_has_left_counts(case: Case) -> None:
    for step in (9, 100, 123456789, 20):
        case.written(step)
    under_way = case.begun(300)
    assert case.steps() == [123456789, 100, 20, 9]
    assert case.checkpoints.interrupted() == [under_way]


def test_in_a_folder_names_count(tmp_path: Path) -> None:
    for name in ("step-5", "notes", "step-00000001.tmp", "step-00000002.01234567"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000400").write_text("a file")
    assert LocalDirectory(tmp_path).complete() == LocalDirectory(tmp_path).interrupted() == []


def test_a_save_clears_away_what_interrupted_ones_left(case: Case) -> None:
    left, now = case.begun(1), case.begun(1)
    assert case.checkpoints.interrupted() == [now]
    assert now != left


def test_the_newest_stay_and_damaged_ones_do_not_count(case: Case) -> None:
    names = [case.written(step) for step in range(1, 6)]
    checkpoint_directory.prune(case.checkpoints, 2, {case.checkpoints.path(names[4])})
    assert case.steps() == [5, 4, 3]
    checkpoint_directory.prune(case.checkpoints, 1)
    assert case.steps() == [5]
    assert case.checkpoints.interrupted() == []


def test_a_damaged_one_is_replaced(case: Case) -> None:
    case.written(1, b"before")
    name = case.written(1, b"after")
    assert case.get(name, "data") == b"after"
    assert case.checkpoints.complete() == [name]
    assert case.checkpoints.interrupted() == []


def test_a_file_that_another_machine_has_written_elsewhere_is_missed(case: Case) -> None:
    name = case.begun(1)
    manifest = Manifest(step=1, world=2, files={"other": (3, "")}, index={}, parts={})
    with pytest.raises(CheckpointError, match="Use a directory that all nodes of the job share"):
        checkpoint_directory.commit(case.checkpoints, name, manifest)
    assert case.steps() == []


def test_without_a_rename_the_end_of_the_manifest_counts(tmp_path: Path) -> None:
    """A save that is killed while it writes the manifest where that can be seen has not taken place."""
    register()
    case = Case(open_directory(f"torn://{tmp_path}/saved"))
    name = case.written(1)
    whole = case.get(name, "checkpoint.json")
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        case.put(name, "checkpoint.json", whole[:length])
        assert case.checkpoints.complete() == []
        assert case.checkpoints.interrupted() == [name]
    case.put(name, "checkpoint.json", whole)
    assert case.checkpoints.complete() == [name]


def test_a_copy_of_a_folder_is_a_checkpoint_elsewhere(tmp_path: Path) -> None:
    """As `aws s3 cp --recursive` makes it: the name of a folder, and no rename."""
    register()
    name = Case(LocalDirectory(tmp_path / "saved")).written(3)
    other = open_directory(f"torn://{tmp_path}/saved")
    assert other.complete() == [name]
    assert checkpoint_directory.read_manifest(other, name).step == 3


def _cut(case: Case, name: str) -> None:
    case.put(name, "data", b"ab")


def _gone(case: Case, name: str) -> None:
    case.checkpoints.rename(name, "data", "elsewhere")


def _no_manifest(case: Case, name: str) -> None:
    case.checkpoints.rename(name, "checkpoint.json", "elsewhere")


def _half_manifest(case: Case, name: str) -> None:
    text = case.get(name, "checkpoint.json")
    case.put(name, "checkpoint.json", text[: len(text) // 2])


def _changed_manifest(case: Case, name: str) -> None:
    text = case.get(name, "checkpoint.json")
    case.put(name, "checkpoint.json", text.replace(b'\\"step\\": 3', b'\\"step\\": 4'))


def _other_json(case: Case, name: str) -> None:
    case.put(name, "checkpoint.json", b"[1, 2]")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, "has 2 bytes, but the manifest lists 3"),
        (_gone, "has None bytes, but the manifest lists 3"),
        (_no_manifest, r"checkpoint\.json is missing or cannot be read: FileNotFoundError"),
        (_half_manifest, r"checkpoint\.json is damaged: JSONDecodeError"),
        (_changed_manifest, "is damaged: its checksum does not match"),
        (_other_json, "is damaged: TypeError"),
    ],
)
def test_what_a_look_at_names_and_sizes_finds(
    case: Case, spoil: Callable[[Case, str], None], words: str
) -> None:
    name = case.written(3)
    spoil(case, name)
    with pytest.raises(CheckpointError, match=words):
        checkpoint_directory.read_manifest(case.checkpoints, name)


def test_a_flipped_bit_is_found_by_reading(case: Case) -> None:
    name = case.written(3)
    about = checkpoint_directory.read_manifest(case.checkpoints, name).files
    case.put(name, "data", b"abb")
    checkpoint_directory.read_manifest(case.checkpoints, name)
    assert "its checksum does not match" in str(checkpoint_directory.damage(case.checkpoints, name, about))
    case.checkpoints.rename(name, "data", "elsewhere")
    assert "cannot be read" in str(checkpoint_directory.damage(case.checkpoints, name, about))


def test_a_later_format_is_not_taken_for_damage(case: Case) -> None:
    name = case.written(3)
    told = json.loads(json.loads(case.get(name, "checkpoint.json"))["manifest"])
    body = json.dumps({**told, "format": 2})
    outer = {"xxh3": xxhash.xxh3_128_hexdigest(body.encode()), "manifest": body}
    case.put(name, "checkpoint.json", json.dumps(outer).encode())
    with pytest.raises(NotSupportedError, match=r"has format 2, but .* reads only format 1"):
        checkpoint_directory.read_manifest(case.checkpoints, name)


@pytest.mark.parametrize(
    ("directory", "words"),
    [
        ("", "is an empty string"),
        ("file://", "is an empty string"),
        ("nonsense://a/b", "'nonsense://a/b' cannot be opened"),
    ],
)
def test_directories_that_are_none(directory: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        open_directory(directory)

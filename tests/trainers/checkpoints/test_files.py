"""Folders of checkpoints: what is complete, what is damaged, what goes. No tensor and no other process."""

import json
from pathlib import Path

import pytest

from trainers.checkpoints import files
from trainers.checkpoints.files import CheckpointError, Manifest
from trainers.errors import NotSupportedError, UsageError


def written(folder: Path, step: int, content: bytes = b"abc") -> Path:
    aside = files.begin(folder, step)
    (aside / "data").write_bytes(content)
    about = {"data": files.seal(aside / "data")}
    final = files.path_of(folder, step)
    files.commit(aside, final, Manifest(step=step, world=2, files=about, index={}, parts={"state": {}}))
    return final


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "a" / "b", 7)
    manifest = files.read_manifest(path)
    assert (manifest.step, manifest.world, manifest.parts) == (7, 2, {"state": {}})
    assert files.damage(path, manifest.files) is None
    assert path.name == "step-00000007"
    assert files.complete(tmp_path / "a" / "b") == [7]


def test_only_names_count_that_a_finished_save_gave(tmp_path: Path) -> None:
    for step in (9, 100, 123456789, 20):
        written(tmp_path, step)
    under_way = files.begin(tmp_path, 300)
    (tmp_path / "step-00000400").write_text("a file")
    (tmp_path / "step-5").mkdir()
    (tmp_path / "notes").mkdir()
    assert files.complete(tmp_path) == [123456789, 100, 20, 9]
    assert files.interrupted(tmp_path) == [under_way]
    assert files.complete(tmp_path / "nowhere") == files.interrupted(tmp_path / "nowhere") == []


def test_a_save_clears_away_what_interrupted_ones_left(tmp_path: Path) -> None:
    left = files.begin(tmp_path, 1)
    (left / "data").write_bytes(b"half")
    now = files.begin(tmp_path, 1)
    assert files.interrupted(tmp_path) == [now]
    assert now != left


def test_the_newest_stay_and_damaged_ones_do_not_count(tmp_path: Path) -> None:
    paths = [written(tmp_path, step) for step in range(1, 6)]
    files.prune(tmp_path, 2, {paths[4]})
    assert files.complete(tmp_path) == [5, 4, 3]
    files.prune(tmp_path, 1)
    assert files.complete(tmp_path) == [5]
    assert files.interrupted(tmp_path) == []


def test_a_damaged_one_is_replaced(tmp_path: Path) -> None:
    written(tmp_path, 1, b"before")
    path = written(tmp_path, 1, b"after")
    assert (path / "data").read_bytes() == b"after"
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]


def test_a_file_that_another_machine_has_written_elsewhere_is_missed(tmp_path: Path) -> None:
    aside = files.begin(tmp_path, 1)
    manifest = Manifest(step=1, world=2, files={"data": (3, "")}, index={}, parts={})
    with pytest.raises(CheckpointError, match="must be one that all machines of the job share"):
        files.commit(aside, files.path_of(tmp_path, 1), manifest)
    assert files.complete(tmp_path) == []


def _cut(path: Path) -> None:
    (path / "data").write_bytes(b"ab")


def _gone(path: Path) -> None:
    (path / "data").unlink()


def _no_manifest(path: Path) -> None:
    (path / "checkpoint.json").unlink()


def _half_manifest(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text[: len(text) // 2])


def _changed_manifest(path: Path) -> None:
    text = (path / "checkpoint.json").read_text()
    (path / "checkpoint.json").write_text(text.replace('\\"step\\": 3', '\\"step\\": 4'))


def _other_json(path: Path) -> None:
    (path / "checkpoint.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_cut, "has 2 bytes; the manifest says 3"),
        (_gone, "has None bytes; the manifest says 3"),
        (_no_manifest, "missing or damaged: FileNotFoundError"),
        (_half_manifest, "missing or damaged: JSONDecodeError"),
        (_changed_manifest, "its checksum does not fit"),
        (_other_json, "missing or damaged: TypeError"),
    ],
)
def test_what_a_look_at_names_and_sizes_finds(tmp_path: Path, spoil: object, words: str) -> None:
    path = written(tmp_path, 3)
    assert callable(spoil)
    spoil(path)
    with pytest.raises(CheckpointError, match=words):
        files.read_manifest(path)


def test_a_flipped_bit_is_found_by_reading(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    about = files.read_manifest(path).files
    (path / "data").write_bytes(b"abb")
    files.read_manifest(path)
    assert "its checksum does not fit" in str(files.damage(path, about))
    (path / "data").unlink()
    assert "cannot be read" in str(files.damage(path, about))


def test_a_later_format_is_not_taken_for_damage(tmp_path: Path) -> None:
    path = written(tmp_path, 3)
    body = json.dumps(
        {**json.loads(json.loads((path / "checkpoint.json").read_text())["manifest"]), "format": 2}
    )
    digest = files.xxhash.xxh3_128_hexdigest(body.encode())
    (path / "checkpoint.json").write_text(json.dumps({"xxh3": digest, "manifest": body}))
    with pytest.raises(NotSupportedError, match="has format 2; this version reads 1"):
        files.read_manifest(path)


def test_directories_that_are_none() -> None:
    with pytest.raises(NotSupportedError, match="not to 's3://bucket/run'"):
        files.folder_of("s3://bucket/run")
    with pytest.raises(UsageError, match="is empty"):
        files.folder_of("")

"""Files, then the manifest, then the removal of former files: in this order on disk, and in these formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.disk import watched, written
from tests.support.stores import LOST, LossError, register
from trainers.checkpoints import directory as checkpoint_directory
from trainers.checkpoints.directory import LocalDirectory
from trainers.checkpoints.manifest import Manifest as CheckpointManifest
from trainers.ps.saves.manifest import Manifest, Save, SaveMode
from trainers.serving.bundle import read_bundle, write_bundle
from trainers.storage.folder import Buffer, Folder, LocalFolder, open_folder
from trainers.storage.manifest import FileRecord
from trainers.storage.publication import current, publish, sweep, withdraw


def test_a_bundle_is_durable_before_its_manifest_and_the_former_one_goes_last(tmp_path: Path) -> None:
    write_bundle(tmp_path, "thing", {}, {"one": (".bin", [b"1"])})
    (former,) = tmp_path.glob("thing-one-*")
    with watched(tmp_path) as events:
        write_bundle(tmp_path, "thing", {}, {"one": (".bin", [b"2"]), "two": (".bin", [b"2"])})
    one, two = (next(path.name for path in tmp_path.glob(f"thing-{part}-*")) for part in ("one", "two"))
    assert events == [
        *written(".", one),
        *written(".", two),
        *written(".", "thing.json"),
        ("remove", former.name),
    ]


def test_a_checkpoint_is_durable_before_its_name_and_the_name_before_the_end(tmp_path: Path) -> None:
    checkpoints = LocalDirectory(tmp_path)
    about = CheckpointManifest(step=7, world=1, files={"data": (3, "")}, index={}, parts={})
    for again in (False, True):
        with watched(tmp_path) as events:
            aside = checkpoints.begin(7)
            with checkpoints.open(aside, "data", "wb") as stream:
                stream.write(b"abc")
            final = checkpoint_directory.commit(checkpoints, aside, about)
        removed = [event for event in events if event[0] == "remove"]
        former = [event for event in events if event[1].endswith(".tmp") and event[0] == "rename"]
        assert [event for event in events if event not in removed] == [
            ("fsync", f"{aside}/data"),
            *written(aside, "checkpoint.json"),
            *former,
            ("rename", final),
            ("fsync", "."),
        ]
        assert (len(former), len(removed)) == ((1, 2) if again else (0, 0))
        assert events.index(("fsync", aside)) < min(map(events.index, [*former, *removed]), default=99)


class Broken(LocalFolder):
    """A folder whose writes raise an error, after they took effect or before."""

    def __init__(self, path: Path, after: bool) -> None:
        super().__init__(path)
        self._after = after

    def write(self, name: str, content: Sequence[Buffer]) -> None:
        if self._after:
            super().write(name, content)
        raise OSError("the reply was lost")


def test_a_manifest_that_was_written_in_spite_of_an_error_counts_and_is_not_durable(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path)
    assert current(folder, "m.json") is None
    assert publish(folder, "m.json", b"1") is True
    assert publish(Broken(tmp_path, after=True), "m.json", b"2") is False
    assert current(folder, "m.json") == b"2"
    with pytest.raises(OSError, match="reply was lost"):
        publish(Broken(tmp_path, after=False), "m.json", b"3")
    assert current(folder, "m.json") == b"2"


def test_the_former_bundle_stays_while_the_manifest_of_the_new_one_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_bundle(tmp_path, "thing", {}, {"one": (".bin", [b"1"])})
    monkeypatch.setattr(
        "trainers.serving.bundle.publish", lambda folder, *rest: publish(folder, *rest) and False
    )
    write_bundle(tmp_path, "thing", {}, {"one": (".bin", [b"2"])})
    assert bytes(read_bundle(tmp_path, "thing", ("one",)).contents["one"].numpy()) == b"2"
    assert len(list(tmp_path.glob("thing-one-*"))) == 2


def _files(folder: Folder) -> list[str]:
    for name in ("save-1", "save-2", "save-3", "other"):
        folder.write(name, [b""])
    publish(folder, "m.json", json.dumps({"saves": ["save-2"]}).encode())
    return folder.names()


@pytest.mark.parametrize("where", ["", "memory://publications/"])
def test_only_what_is_ours_and_not_named_goes(tmp_path: Path, where: str) -> None:
    folder = open_folder(where + str(tmp_path))
    every = _files(folder)
    withdraw(folder, "m.json", ["save-2", "save-3"])
    assert folder.names() == [name for name in every if name != "save-3"]
    sweep(folder, lambda name: name.startswith("save-"), {"save-2"})
    assert folder.names() == ["m.json", "other", "save-2"]


def test_nothing_is_withdrawn_while_the_manifest_cannot_be_read() -> None:
    register()
    LOST[:] = [""]
    folder = open_folder("lossy://withdrawn")
    folder.write("save-1", [b""])
    publish(folder, "manifest.json", b"save-1")
    LOST[:] = ["reads"]
    with pytest.raises(LossError):
        current(folder, "manifest.json")
    withdraw(folder, "manifest.json", ["save-1"])
    LOST[:] = [""]
    assert folder.names() == ["manifest.json", "save-1"]


def test_a_sweep_that_fails_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = LocalFolder(tmp_path)
    _files(folder)
    monkeypatch.setattr(folder, "remove", lambda name: (_ for _ in ()).throw(PermissionError(name)))
    sweep(folder, lambda name: name.startswith("save-"), ())
    assert "no longer needed but could not be removed: save-1" in capfd.readouterr().err
    assert (tmp_path / "save-1").exists()


# ---- What earlier versions wrote, to the byte


def test_the_manifest_of_a_bundle_is_what_it_always_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "5c3e9a01")
    write_bundle(tmp_path, "thing", {"number": 1}, {"one": (".bin", [b"abc", b"d"])})
    assert (tmp_path / "thing.json").read_text() == BUNDLE
    (tmp_path / "thing.json").write_text(BUNDLE)
    assert read_bundle(tmp_path, "thing", ("one",)).about == {"number": 1}


def test_the_manifest_of_saves_is_what_it_always_was() -> None:
    parts = (FileRecord("server-0.json", 3, "ab"),)
    save = Save("save-1", SaveMode.ALL, 3, parts)
    assert Manifest((save,)).encode().decode() == SAVES
    assert Manifest.decode(SAVES.encode()) == Manifest((save,))


BUNDLE = """\
{
 "format": "fleetrun thing",
 "version": 1,
 "files": {
  "one": {
   "name": "thing-one-5c3e9a01.bin",
   "size": 4,
   "xxh3_64": "6497a96f53a89890"
  }
 },
 "about": {
  "number": 1
 },
 "checksum": "da3786d2a010023f"
}
"""

SAVES = """\
{
 "format": "fleetrun saved tables",
 "version": 3,
 "saves": [
  {
   "id": "save-1",
   "mode": 0,
   "step": 3,
   "parts": [
    {
     "name": "server-0.json",
     "size": 3,
     "xxh3_64": "ab"
    }
   ]
  }
 ],
 "checksum": "923f4ff36599c095"
}
"""

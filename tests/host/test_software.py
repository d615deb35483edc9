"""What machines have installed, and the sentences about what differs."""

from __future__ import annotations

import sys
import zlib
from base64 import b64encode
from importlib.metadata import distributions, version
from pathlib import Path

import pytest

from fleetrun.host.software import (
    MOST,
    Software,
    differences,
    differing_packages,
    installed,
    kinds,
    packed,
    search_path,
    unpacked,
)

CPU = "2.13.0+cpu"
SAME = {"torch": "2.13.0+cpu", "numpy": "2.1.0"}


def told(*software: Software) -> tuple[list[str], list[str]]:
    return differences(kinds([(f"node {rank}", packed(each)) for rank, each in enumerate(software)]))


def test_it_is_what_importlib_finds():
    found = installed()
    assert found.python == ".".join(map(str, sys.version_info[:3]))
    assert found.packages["numpy"] == version("numpy")
    assert len(found.packages) > 0.9 * len({each.name for each in distributions()})


def test_of_two_folders_the_first_counts(tmp_path: Path):
    for folder, names in {
        "a": ["Foo_Bar-1.0.dist-info"],
        "b": ["foo.bar-2.0.dist-info", "x-3.dist-info"],
    }.items():
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
    (tmp_path / "b" / "-.dist-info").mkdir()
    path = [str(tmp_path / name) for name in ("none", "a", "b")]
    assert installed(path).packages == {"foo-bar": "1.0", "x": "3"}


def test_the_jobs_python_path_replaces_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", ["", "/own", "/lib"])
    inherited = {"PYTHONPATH": "/own:/own2"}
    assert search_path({"A": "1"}, inherited) == ["", "/own", "/lib"]
    assert search_path({"PYTHONPATH": "/a:/b:"}, inherited) == ["/a", "/b", "", "/lib"]
    assert search_path({"PYTHONPATH": "/a:/own"}, inherited) == ["/a", "/own", "", "/lib"]


def test_it_comes_back_and_of_too_many_torch_is_left():
    small = Software("3.11.7", SAME)
    assert unpacked(packed(small)) == small
    large = Software("3.11.7", {**SAME, **{f"p{hash(str(n))}": str(hash(str(-n))) for n in range(5000)}})
    text = packed(large)
    assert len(text) <= MOST
    assert unpacked(text) == Software("3.11.7", {"torch": "2.13.0+cpu"})


@pytest.mark.parametrize("text", ["", "x", "A" * 100, b64encode(zlib.compress(b"[1]")).decode(), "\udc80"])
def test_what_is_no_such_text_is_nothing(text: str):
    assert unpacked(text) is None
    assert differences(kinds([("node 0", packed(Software("3.11.7", SAME))), ("node 1", text)])) == ([], [])


@pytest.mark.parametrize(
    ("other", "serious", "rest"),
    [
        (Software("3.11.7", SAME), [], []),
        (Software("3.11.9", SAME), [], ["Python is 3.11.9 on node 1, 3.11.7 elsewhere"]),
        (Software("3.12.1", SAME), ["Python is 3.12.1 on node 1, 3.11.7 elsewhere"], []),
        (Software("3.11.7", {**SAME, "torch": "2.13.1"}), [],
         ["torch is 2.13.1 on node 1, CPU elsewhere"]),
        (Software("3.11.7", {**SAME, "torch": "2.12.0"}),
         ["torch is 2.12.0 on node 1, CPU elsewhere"], []),
        (Software("3.11.7", {"numpy": "2.1.0"}), ["torch is missing on node 1, CPU elsewhere"], []),
        (
            Software("3.11.7", {"torch": "2.13.0+cpu", "rich": "14"}), [],
            ["2 packages differ: numpy is missing on node 1, 2.1.0 elsewhere; "
             "rich is 14 on node 1, missing elsewhere"],
        ),
        (Software("3.11.7", {"torch": "2.13.0+cpu"}), [], []),
    ],
)  # fmt: skip
def test_what_differs_is_said_of_the_few(other: Software, serious: list[str], rest: list[str]):
    usual = Software("3.11.7", SAME)
    serious, rest = ([text.replace("CPU", CPU) for text in texts] for texts in (serious, rest))
    assert told(usual, other) == (serious, rest), "of two, the others are the first"
    assert told(usual, other, usual) == (serious, rest)


def test_many_are_counted():
    one = Software("3.11.7", {f"p{number}": "1" for number in range(9)})
    other = Software("3.11.7", {f"p{number}": "2" for number in range(9)})
    said = differing_packages([("a", one), ("bcdef", other)])
    assert said.startswith("9 packages differ: p0 is 1 on a, 2 elsewhere; p1 is ")
    assert said.endswith("; 5 more")
    said = differing_packages([("bcdef", one), ("ghijkl", other)])
    assert "p0 is 1 on b, c, d and 2 more, 2 elsewhere" in said

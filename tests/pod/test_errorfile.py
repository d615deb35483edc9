"""What a process wrote about its failure: in torch's shape, in ours, and in none."""

import json
import os
import socket
from pathlib import Path

import pytest

from fleetrun.envs.channels import ErrorRecord
from fleetrun.pod.container import read_dismissed, read_error

CALLSTACK = "Traceback (most recent call last):\nValueError: 坏\n"


@pytest.fixture
def written(tmp_path):
    """The record of a file with this text, written at second 1000."""

    def write(text, name="error.json"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(path, (1000.0, 1000.0))
        return path

    return write


def of_torch(**extra):
    inner = {"py_callstack": CALLSTACK, "timestamp": "999", **extra}
    return json.dumps({"message": {"message": "ValueError: 坏", "extraInfo": inner}})


def test_our_own(written):
    path = written(of_torch(time_ns=999_123_456_789))
    assert read_error(path) == ErrorRecord("ValueError: 坏", CALLSTACK, 999.123456789)


def test_torchs_own_has_whole_seconds_only_so_the_files_time_counts(written):
    assert read_error(written(of_torch())) == ErrorRecord("ValueError: 坏", CALLSTACK, 1000.0)


def test_torchs_shape_for_what_is_no_exception(written):
    assert read_error(written('{"message": "killed"}')) == ErrorRecord("killed", "", 1000.0)


@pytest.mark.parametrize("time_ns", [-1, 5_000 * 10**9, 10**40, 10**400])
def test_a_moment_that_cannot_be(written, time_ns):
    """A report must be able to show it, and it must not win over real ones."""
    record = read_error(written(of_torch(time_ns=time_ns)))
    assert record is None or record.time == 1000.0


GARBAGE = [
    b"",
    b"{",
    b"null",
    b"3",
    b"[]",
    b'"text"',
    b"{}",
    b'{"message": null}',
    b'{"message": []}',
    b'{"message": {}}',
    b'{"message": {"message": "x"}}',
    b'{"message": {"message": "x", "extraInfo": []}}',
    b'{"message": {"message": "x", "extraInfo": 3}}',
    b'{"message": {"message": "x", "extraInfo": {}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": "soon"}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": []}}}',
    b'{"message": {"message": "x", "extraInfo": {"py_callstack": "", "time_ns": Infinity}}}',
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"message": "' + b"x" * (2 << 20) + b'"}',
]


@pytest.mark.parametrize("text", GARBAGE, ids=[text[:70].decode("latin-1") for text in GARBAGE])
def test_garbage_is_no_record(written, text):
    assert read_error(written(text)) is None
    assert read_dismissed(written(text)) is False


def test_no_file(tmp_path):
    assert read_error(None) is None
    assert read_error(tmp_path / "none") is None
    assert read_error(tmp_path) is None
    assert read_dismissed(None) is False
    assert read_dismissed(tmp_path / "none") is False


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: path.symlink_to(path),
        a_socket,
    ],
    ids=["fifo", "folder", "zero", "loop", "socket"],
)
def test_what_is_no_file_is_not_waited_for(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)  # names of sockets are short
    make(Path("error.json"))
    assert read_error(Path("error.json")) is None
    assert read_dismissed(Path("error.json")) is False


def test_a_huge_file_is_not_read_whole(tmp_path):
    path = tmp_path / "error.json"
    path.touch()
    os.truncate(path, 1 << 40)
    assert read_error(path) is None
    assert read_dismissed(path) is False


def test_dismissed(written):
    assert read_dismissed(written('{"dismissed": true}'))
    assert not read_dismissed(written('{"dismissed": false}'))
    assert not read_dismissed(written('{"dismissed": true, "message": "x"}'))
    assert not read_dismissed(written(of_torch()))

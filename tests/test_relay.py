"""The helper process that runs a command for another host: one process, which prints on request."""

import json
import os
import subprocess
import sys
import zlib
from base64 import b64decode
from contextlib import contextmanager
from pathlib import Path

import pytest

from fleetrun.relay import PIECE

BUSY = """
import os, sys
from pathlib import Path
from fleetrun import relay

def compute(words, environ, launch):
    path = Path(words[0])
    while not path.exists():
        pass
    print("computed")
    return 7

relay._SIGN_OF_LIFE, relay.command = 0.05, compute
relay.main(sys.argv[1:])
"""
WRITES = """
import sys
from fleetrun import relay

def write(words, environ, launch):
    sys.stdout.buffer.write(b"x" * int(words[0]))
    sys.stdout.flush()
    print("warning: y", file=sys.stderr)
    sys.stdout.write("\\u00e9")
    return 0

relay.command = write
relay.main(sys.argv[1:])
"""


@contextmanager
def relay(*command):
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def more(process):
    """The next line of the process."""
    process.stdin.write(b"more\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def data_of(line):
    return zlib.decompress(b64decode(line["data"]))


def test_it_prints_one_piece_for_each_request():
    with relay("-c", WRITES, str(2 * PIECE + 1)) as process:
        sizes = [len(data_of(more(process))) for _ in range(3)]
        assert sizes == [PIECE, PIECE, 1]
        assert data_of(more(process)) == "\u00e9".encode()
        assert json.loads(process.stdout.readline()) == {"code": 0, "error": "warning: y\n"}
        assert process.wait() == 0


def test_it_prints_nothing_without_a_request():
    with relay("-c", WRITES, str(9 * PIECE)) as process:
        assert len(data_of(more(process))) == PIECE
        process.stdin.close()
        assert process.stdout.read() == b""


def test_it_runs_the_command_in_its_own_process():
    with relay("-m", "fleetrun.relay", "help", "events") as process:
        assert b"events" in data_of(more(process)).lower()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        assert children == ""
        assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10


def test_it_reports_the_error_and_the_exit_code():
    with relay("-m", "fleetrun.relay", "logs", "--lines=-3") as process:
        line = json.loads(process.stdout.readline())
    assert line["code"] == 2
    assert line["error"].startswith("fleetrun: error: -n is -3")


def test_it_shows_that_the_command_computes(tmp_path):
    path = tmp_path / "done"
    with relay("-c", BUSY, str(path)) as process:
        assert more(process) == {}
        assert more(process) == {}
        path.touch()
        line = more(process)
        while not line:
            line = more(process)
        assert data_of(line) == b"computed\n"
        assert json.loads(process.stdout.readline())["code"] == 7


@pytest.mark.parametrize("command", [(BUSY, "never"), (WRITES, "1")], ids=["computing", "writing"])
def test_it_ends_with_stdin_at_any_time(command):
    with relay("-c", *command) as process:
        process.stdin.close()
        assert process.wait() == 1

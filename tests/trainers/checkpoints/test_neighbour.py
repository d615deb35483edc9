"""Copies on the next machine, of a rank that is its own neighbour: real sockets, one process."""

import contextlib
import dataclasses
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.traces import wait_until
from trainers.checkpoints.neighbour import Neighbour
from trainers.checkpoints.ranks import Ranks
from trainers.checkpoints.slots import Head, Packed, Slot


@pytest.fixture
def copies() -> Iterator[list[Slot]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield []
    dist.destroy_process_group()


def neighbour(copies: list[Slot]) -> Neighbour:
    def room(owner: int) -> Slot:
        copies.append(Slot.new(f"copy of {owner}"))
        return copies[-1]

    return Neighbour(Ranks(), room, 0)


def port(made: Neighbour) -> int:
    return int(made._listener.getsockname()[1])


def version(number: int) -> Slot:
    packed = Packed({"s": {"v": torch.full((100_000,), number)}})
    slot = Slot.new("own")
    head = Head(number, number, 1, 1, number, packed.size, len(packed.values))
    slot.write(head, packed.tensors, packed.values)
    return slot


def is_copied(made: Neighbour, copies: list[Slot], number: int) -> None:
    made.offer(version(number))
    wait_until(lambda: made._sent == number)
    assert copies[-1].head.number == number
    assert set(copies[-1].read(dict)["s"]["v"].tolist()) == {number}


def test_versions_are_copied_and_strangers_change_nothing(copies: list[Slot]):
    made = neighbour(copies)
    is_copied(made, copies, 1)
    with socket.create_connection(("127.0.0.1", port(made))) as stranger:
        stranger.sendall(bytes(40))
        assert len(stranger.recv(64)) == 32, "another challenge each time: an answer cannot be used twice"
        assert stranger.recv(1) == b""
    is_copied(made, copies, 2)
    assert [copy.head.number for copy in copies] == [1, 2]


def test_strangers_that_say_nothing_make_room_for_others(copies: list[Slot]):
    made = neighbour(copies)
    with contextlib.ExitStack() as connected:
        strangers = [
            connected.enter_context(socket.create_connection(("127.0.0.1", port(made)))) for _ in range(40)
        ]
        for each in strangers[:8]:
            while each.recv(64):
                pass
        is_copied(made, copies, 1)
        # One that made room may not have ended yet.
        wait_until(lambda: sum("_take_all" in each.name for each in threading.enumerate()) <= 33)


def test_the_copied_version_of_the_run_before_stays_until_there_is_a_newer_one(copies: list[Slot]):
    before, first, second = version(5), version(6), version(7)
    made = Neighbour(Ranks(), lambda owner: Slot.new("copy"), 0, before)
    assert made.pinned() == [before]
    made.offer(first)
    assert made.pinned() == [first, before]
    wait_until(lambda: made._sent == 6)
    assert made.pinned() == [first, before], "the other ranks may not be so far"
    made.offer(second)
    assert made.pinned() == [second, first]


def send(connection: socket.socket, slot: Slot, part: float = 1.0) -> None:
    connection.sendall(struct.pack("<7q", *dataclasses.astuple(slot.head)))
    with slot.content() as content:
        connection.sendall(content[: int(part * len(content))])


def test_of_two_connections_of_a_rank_only_the_later_one_writes(copies: list[Slot]):
    """The earlier one was cut off, without a word from either end, and its last bytes come late."""
    only = Slot.new("copy")
    made = Neighbour(Ranks(), lambda owner: only, 0)
    with made._connected() as stale:
        send(stale, version(8), 0.5)
        wait_until(lambda: not only.head.number and only._memory is not None)
        late = made._connected()
        send(late, version(9))
        assert struct.unpack("<q", late.recv(8)) == (9,)
        with contextlib.suppress(OSError):
            stale.sendall(bytes(only.head.size - only.head.size // 2))
        with contextlib.suppress(OSError):
            assert stale.recv(8) == b""
    late.close()
    assert only.head.number == 9
    assert set(only.read(dict)["s"]["v"].tolist()) == {9}


CONNECT = """
import socket
input()
keep = socket.create_connection(("127.0.0.1", {}))
print(flush=True)
input()
"""


def test_copies_go_on_after_a_time_without_descriptors(copies: list[Slot]):
    made = neighbour(copies)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    program = [sys.executable, "-c", CONNECT.format(port(made))]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            os.write(other.stdin.fileno(), b"\n")
            os.read(other.stdout.fileno(), 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        is_copied(made, copies, 1)
        other.kill()

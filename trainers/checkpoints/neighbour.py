"""Copy versions in memory to the next node, so that a lost node loses no version.

Each rank sends its versions to a rank of the next node, in a thread beside the training. Ranks copy one
version at a time, the same on all ranks. A save chooses it, after all ranks agree that the copy before it is
complete. Until then the version before stays on both sides. At any time there is a version of which every
rank has its own or a copy.

A rank listens for the sending rank and first sends it 32 random bytes. The sender answers with its rank and
the HMAC of both under a secret that all ranks share. A connection without it is closed. Then the sender sends
head and content of each version, unencrypted. The receiver returns 8 bytes with the number when a copy is
complete.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple

import torch
import torch.distributed as dist

from trainers.checkpoints.manifest import CheckpointError
from trainers.checkpoints.ranks import Ranks
from trainers.checkpoints.slots import Head, Slot
from trainers.process.log import glog

_HEAD = struct.Struct("<7q")
_NUMBER = struct.Struct("<q")
_LARGEST = 1 << 46  # bytes of a version; a larger size is invalid
_PIECE = 1 << 24  # bytes
_WITHIN = 60.0  # seconds for a piece of a transfer
_AGAIN = 1.0  # seconds
_PROOF = 10.0  # seconds for a connection to prove that it comes from a rank of this job
_STRANGERS = 32  # connections without proof so far; the oldest makes room for a new one
_CHALLENGE = 32  # bytes


def place_on_node() -> tuple[str, int]:
    """Return the node of this rank, and its place there."""
    return os.environ.get("GROUP_RANK", "0"), int(os.environ.get("LOCAL_RANK", "0"))


def neighbours(places: Sequence[tuple[str, int]]) -> list[int] | None:
    """Return the target of each rank, from the places of all ranks, or None on a single node.

    If a node has more ranks than the next one, several ranks send to the same target.
    """
    nodes = list(dict.fromkeys(node for node, _ in places))
    if len(nodes) == 1:
        return None
    ranks = {node: [rank for rank, (where, _) in enumerate(places) if where == node] for node in nodes}
    found = []
    for rank, (node, _) in enumerate(places):
        there = ranks[nodes[(nodes.index(node) + 1) % len(nodes)]]
        found.append(there[ranks[node].index(rank) % len(there)])
    return found


class NoNeighbour:
    """The neighbour of a job on one node."""

    def pinned(self) -> list[Slot]:
        return []

    def offer(self, slot: Slot | None) -> None:
        """Do nothing, because a single node has no copies."""

    def has_copies_of(self, run: int) -> bool:
        """Return True, because no copies are awaited."""
        return True


class Neighbour:
    """Sends versions of this rank, and keeps copies from other ranks. All ranks must make it together.

    `room` returns the slot for another version of a rank. `copied` is the version of the run before that has
    copies.
    """

    @classmethod
    def of(cls, ranks: Ranks, room: Callable[[int], Slot], copied: Slot | None) -> Neighbour | NoNeighbour:
        """Make a neighbour on all ranks together."""
        places = ranks.gather(place_on_node)
        targets = neighbours(places)
        return NoNeighbour() if targets is None else cls(ranks, room, targets[ranks.rank], copied)

    def __init__(
        self, ranks: Ranks, room: Callable[[int], Slot], target: int, copied: Slot | None = None
    ) -> None:
        self._rank = ranks.rank
        self._room = room
        self._group = dist.new_group(backend="gloo")
        self._sent = -1
        self._chosen: Slot | None = None
        self._before = copied
        self._failed = False
        secret = ranks.broadcast(lambda: secrets.token_bytes(32))
        host = os.environ.get("PADDLE_CURRENT_ENDPOINT", "127.0.0.1:0").rpartition(":")[0].strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=64)
        addresses = ranks.gather(lambda: (host, self._listener.getsockname()[1]))
        self._target: tuple[str, int] = addresses[target]
        self._secret = secret
        self._unproven: list[socket.socket] = []
        self._senders: dict[int, tuple[socket.socket, threading.Lock]] = {}
        self._lock = threading.Lock()
        self._wake = threading.Condition()
        for work in (self._serve, self._send_all):
            threading.Thread(target=work, name="fleet-neighbour", daemon=True).start()

    def pinned(self) -> list[Slot]:
        """Return the slots to keep: the version being copied, and the last version with copies everywhere."""
        return [slot for slot in (self._chosen, self._before) if slot is not None]

    def has_copies_of(self, run: int) -> bool:
        """Return True if a version of this run has copies everywhere."""
        return self._before is not None and self._before.head.run == run

    def offer(self, slot: Slot | None) -> None:
        """Offer the version that all ranks save now, or None if the save failed.

        It is copied next if the copy before it is complete everywhere.
        """
        delivered = self._chosen is None or self._sent == self._chosen.head.number
        agreed = torch.tensor([int(delivered and slot is not None)])
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._group)
        if agreed.item():
            with self._wake:
                self._before, self._chosen = self._chosen or self._before, slot
                self._wake.notify()

    # ---- sending

    def _send_all(self) -> None:
        connection: socket.socket | None = None
        while True:
            with self._wake:
                while self._chosen is None or self._sent == self._chosen.head.number:
                    self._wake.wait()
                slot = self._chosen
            try:
                connection = connection or self._connected()
                connection.sendall(_HEAD.pack(*astuple(slot.head)))
                with slot.content() as content:
                    for at in range(0, len(content), _PIECE):  # the timeout applies to a whole `sendall`
                        connection.sendall(content[at : at + _PIECE])
                number = bytearray(_NUMBER.size)
                _receive(connection, memoryview(number))
                self._sent = _NUMBER.unpack(number)[0]
            except OSError as error:
                if connection is not None:
                    connection.close()
                    connection = None
                self._warn(f"No copy of the checkpoint on the next node: {error}")
                threading.Event().wait(_AGAIN)

    def _connected(self) -> socket.socket:
        connection = socket.create_connection(self._target, _WITHIN)
        try:
            challenge = bytearray(_CHALLENGE)
            _receive(connection, memoryview(challenge))
            rank = _NUMBER.pack(self._rank)
            connection.sendall(rank + self._proof(bytes(challenge), rank))
        except OSError:
            connection.close()
            raise
        return connection

    def _proof(self, challenge: bytes, rank: bytes) -> bytes:
        return hmac.digest(self._secret, challenge + rank, "sha256")

    # ---- receiving

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                with self._lock:
                    self._unproven.append(connection)
                    while len(self._unproven) > _STRANGERS:
                        with suppress(OSError):
                            self._unproven.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
                threading.Thread(target=self._take_all, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no descriptor or thread is available at the moment
                threading.Event().wait(_AGAIN)

    def _owner(self, connection: socket.socket) -> int | None:
        """Return the sending rank, or None if it does not belong to this job."""
        rank, proof = bytearray(_NUMBER.size), bytearray(32)
        challenge = secrets.token_bytes(_CHALLENGE)
        until = time.monotonic() + _PROOF
        try:
            connection.settimeout(_PROOF)
            connection.sendall(challenge)
            _receive(connection, memoryview(rank), until)
            _receive(connection, memoryview(proof), until)
        except OSError:
            return None
        finally:
            with self._lock:
                if connection in self._unproven:
                    self._unproven.remove(connection)
        if not hmac.compare_digest(bytes(proof), self._proof(challenge, bytes(rank))):
            return None
        owner = int(_NUMBER.unpack(rank)[0])
        with self._lock:
            before, lock = self._senders.get(owner, (None, threading.Lock()))
            self._senders[owner] = connection, lock
        if before is not None:
            with suppress(OSError):
                before.shutdown(socket.SHUT_RDWR)  # its reader stops, and lets the next one write
        return owner

    def _take_all(self, connection: socket.socket) -> None:
        try:
            with connection:
                owner = self._owner(connection)
                while owner is not None:
                    connection.settimeout(None)  # until the next version
                    if not connection.recv(1, socket.MSG_PEEK):
                        return
                    connection.settimeout(_WITHIN)
                    data = bytearray(_HEAD.size)
                    _receive(connection, memoryview(data))
                    head = Head(*_HEAD.unpack(data))
                    if not (0 <= head.tensors <= _LARGEST and 0 <= head.values <= _LARGEST):
                        return
                    with self._only_writer(owner, connection):
                        self._room(owner).fill(head, lambda room: _receive(connection, room))
                    connection.sendall(_NUMBER.pack(head.number))
        except (OSError, CheckpointError) as error:
            self._warn(f"Could not receive a checkpoint copy from another node: {error}")

    @contextlib.contextmanager
    def _only_writer(self, owner: int, connection: socket.socket) -> Iterator[None]:
        """Allow only the latest connection of a rank to write. Raises ConnectionError for an earlier one.

        Otherwise two connections of a rank could write one slot, if the earlier one was cut off without
        noticing.
        """
        with self._senders[owner][1]:
            if self._senders[owner][0] is not connection:
                raise ConnectionError("the sender has connected again")
            yield

    def _warn(self, what: str) -> None:
        if not self._failed:
            self._failed = True
            glog(f"warning: {what}")


def _receive(connection: socket.socket, room: memoryview, until: float | None = None) -> None:
    """Fill `room`. Raises OSError, ConnectionError at the end of the connection, and TimeoutError
    after `until`.
    """
    at = 0
    while at < len(room):
        if until is not None:
            connection.settimeout(max(0.001, until - time.monotonic()))
        count = connection.recv_into(room[at:])
        if not count:
            raise ConnectionError("the connection has ended")
        at += count

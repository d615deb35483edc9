"""Records: the journal's bytes. Pure: sequences of frames to bytes and back; leaves files and fsync to
others.

A journal file, integers little-endian:

    8s  "FLTJRNL1"      Q number of its first record      Q salt, random      Q xxh3-64 of the 24 bytes before

and then records, without gaps:

    8s  mark            Q number      Q bytes after this head     Q frames     Q xxh3-64 of those bytes
    Q   xxh3-64 of the 40 bytes before
    Q   length of each frame
    the frames

The salt is the seed of every checksum in the records, so that bytes inside of a frame do not pass for a
record. The head has a checksum of its own: a record whose head is sound and which ends after the file's end
was cut off by a crash, whereas a damaged length would look the same without it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from trainers.ps.saved.descriptors import Buffer

MAGIC = b"FLTJRNL1"
MARK = b"\xf1record\n"
_FILE = struct.Struct("<8sQQ")
_HEAD = struct.Struct("<8sQQQQ")
_SUM = struct.Struct("<Q")
FILE_HEAD = _FILE.size + _SUM.size
RECORD_HEAD = _HEAD.size + _SUM.size
_SEARCH = 1 << 20


class BadRecordError(ValueError):
    """The bytes from here on are not the record that should be here."""


@dataclass(frozen=True, slots=True)
class Record:
    """`end`: the offset in the file after it. The frames are views of one buffer of their own, writable."""

    number: int
    frames: list[memoryview]
    end: int


def file_head(first: int, salt: int) -> bytes:
    head = _FILE.pack(MAGIC, first, salt)
    return head + _SUM.pack(xxhash.xxh3_64_intdigest(head))


def read_file_head(content: bytes) -> tuple[int, int]:
    """(number of the first record, salt). Raises BadRecordError."""
    if len(content) < FILE_HEAD:
        raise BadRecordError(f"{len(content)} bytes are no head of a journal file")
    magic, first, salt = _FILE.unpack_from(content)
    (checksum,) = _SUM.unpack_from(content, _FILE.size)
    if magic != MAGIC:
        raise BadRecordError("it is no journal of this version of fleetrun")
    if checksum != xxhash.xxh3_64_intdigest(content[: _FILE.size]):
        raise BadRecordError("the head has a wrong checksum")
    return first, salt


def encode(number: int, salt: int, frames: Sequence[Buffer]) -> list[Buffer]:
    """A record as pieces to be written in one go; the frames are not copied."""
    views = [memoryview(frame).cast("B") for frame in frames]
    lengths = struct.pack(f"<{len(views)}Q", *map(len, views))
    digest = xxhash.xxh3_64(lengths, seed=salt)
    for view in views:
        digest.update(view)
    size = len(lengths) + sum(map(len, views))
    head = _HEAD.pack(MARK, number, size, len(views), digest.intdigest())
    return [head + _SUM.pack(xxhash.xxh3_64_intdigest(head, seed=salt)) + lengths, *views]


def read_record(file: BinaryIO, offset: int, room: int, number: int, salt: int) -> Record:
    """The record at the file's position, which is `offset`; `room` bytes are left. Raises BadRecordError
    when it is not the whole record `number`.
    """
    head = file.read(RECORD_HEAD)
    found = _sound_head(head, salt)
    if found is None:
        raise BadRecordError(
            "the head of a record is damaged" if len(head) == RECORD_HEAD else "a head is cut off"
        )
    size, count, checksum = found[1:]
    if found[0] != number:
        raise BadRecordError(f"it is record {found[0]}, and {number} is due")
    if size > room - RECORD_HEAD:
        raise BadRecordError(f"record {number} is cut off")
    body = bytearray(size)
    file.readinto(body)  # type: ignore[attr-defined]  # every binary file of `open` has it
    if xxhash.xxh3_64_intdigest(body, seed=salt) != checksum or 8 * count > size:
        raise BadRecordError(f"record {number} has a wrong checksum")
    frames, start = [], 8 * count
    for length in struct.unpack_from(f"<{count}Q", body):
        frames.append(memoryview(body)[start : start + length])
        start += length
    return Record(number, frames, offset + RECORD_HEAD + size)


def later_record(file: BinaryIO, offset: int, number: int, salt: int) -> int | None:
    """The offset of a sound head of record `number` or a later one, anywhere after `offset`; None without."""
    position = offset
    while True:
        file.seek(position)
        block = file.read(_SEARCH)
        at = block.find(MARK)
        while at >= 0:
            file.seek(position + at)
            found = _sound_head(file.read(RECORD_HEAD), salt)
            if found is not None and found[0] >= number and position + at > offset:
                return position + at
            at = block.find(MARK, at + 1)
        if len(block) < _SEARCH:
            return None
        position += len(block) - len(MARK) + 1


def _sound_head(head: bytes, salt: int) -> tuple[int, int, int, int] | None:
    """(number, size, frames, checksum) of a whole head with the right checksum."""
    if len(head) < RECORD_HEAD or not head.startswith(MARK):
        return None
    if _SUM.unpack_from(head, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(head[: _HEAD.size], seed=salt):
        return None
    _, number, size, count, checksum = _HEAD.unpack_from(head)
    return number, size, count, checksum

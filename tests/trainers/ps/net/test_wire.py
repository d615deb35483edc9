import random
import struct

import numpy as np
import pytest
import torch
import xxhash

from trainers.ps import wire
from trainers.ps.wire import (
    OWN_FRAME_BYTES,
    Code,
    Field,
    Kind,
    Message,
    Part,
    WireError,
    bytes_part,
    decode,
    encode,
)


def push() -> Message:
    return Message(
        kind=Kind.PUSH,
        rank=3,
        incarnation=2**62,
        sequence=7,
        number=12,
        parts=(
            Part(0, Field.VALUES, torch.arange(5.0), lr=0.1),
            Part(1, Field.KEYS, torch.tensor([-(2**63), 0, 2**63 - 1])),
            Part(1, Field.ROWS, torch.arange(6.0).reshape(3, 2), lr=0.2),
            Part(2, Field.KEYS, torch.empty(0, dtype=torch.int64)),
            Part(2, Field.ROWS, torch.empty(0, 4)),
            bytes_part(Field.TEXT, "学习".encode()),
            Part(3, Field.VALUES, torch.arange(OWN_FRAME_BYTES / 4)),
            Part(4, Field.VALUES, torch.arange(OWN_FRAME_BYTES / 4 - 1)),
        ),
    )


def frames_of(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


def test_a_message_comes_back_as_it_was() -> None:
    sent = push()
    back = decode(frames_of(sent))
    for name in ("kind", "rank", "incarnation", "sequence", "number", "code"):
        assert getattr(back, name) == getattr(sent, name)
    assert back.text == "学习"
    for mine, other in zip(sent.parts, back.parts, strict=True):
        assert (mine.table, mine.field, mine.lr) == (other.table, other.field, other.lr)
        assert torch.equal(mine.data, other.data)
        assert mine.data.shape == other.data.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_may_be_shorter_on_the_wire(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 5).to(dtype)
    frames = frames_of(Message(kind=Kind.DATA, parts=(Part(0, Field.ROWS, rows),)))
    assert len(frames) == 1
    assert len(frames[0]) == 48 + 32 + -(-15 * dtype.itemsize // 8) * 8
    (part,) = decode(frames).parts
    assert part.data.dtype is dtype
    assert torch.equal(part.data, rows)


def test_a_part_that_no_receiver_would_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_PART_BYTES", 1 << 20)
    part = Part(0, Field.VALUES, torch.empty((1 << 18) + 1))
    with pytest.raises(WireError, match="a part of more than 1 MB"):
        encode(Message(kind=Kind.PUSH, parts=(part,)))


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 64, 65, 1000])
def test_a_large_part_has_several_frames(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 1 << 17)
    small = Part(0, Field.KEYS, torch.arange(5))
    large = Part(1, Field.ROWS, torch.arange(rows * 1024.0).view(2 * rows, 512))
    frames = frames_of(Message(kind=Kind.PUSH, parts=(small, large, small)))
    assert len(frames) == 1 + (-(-rows // 32) if rows > 15 else 0)
    assert max(map(len, frames[1:]), default=0) <= 1 << 17
    for part, sent in zip(decode(frames).parts, (small, large, small), strict=True):
        assert torch.equal(part.data, sent.data)
    if len(frames) > 2:
        for wrong in (frames[:-1], [*frames, frames[-1]], [*frames[:-1], frames[-1][:-1]]):
            with pytest.raises(WireError):
                decode(wrong)


def test_a_decoded_tensor_may_be_written_and_may_come_from_an_odd_address() -> None:
    values = torch.arange(float(OWN_FRAME_BYTES))
    small, large = Part(0, Field.VALUES, values[:5]), Part(1, Field.VALUES, values)
    frames = frames_of(Message(kind=Kind.DATA, parts=(small, large, small)))
    shifted = [memoryview(bytearray(b"x" + frame))[1:] for frame in frames]
    for part, sent in zip(decode(shifted).parts, (small, large, small), strict=True):
        part.data.add_(1)
        assert torch.equal(part.data, sent.data + 1)


@pytest.mark.parametrize(
    ("where", "value", "code"),
    [
        (0, b"X", Code.BAD_MESSAGE),  # magic
        (4, b"\x63", Code.BAD_VERSION),
        (12, b"\x07", Code.BAD_MESSAGE),  # number of parts
        (24, b"\xff", Code.BAD_MESSAGE),  # sequence: only the checksum can tell
    ],
)
def test_a_wrong_header_is_refused_with_its_reason(where: int, value: bytes, code: Code) -> None:
    frames = frames_of(push())
    frames[0] = frames[0][:where] + value + frames[0][where + 1 :]
    with pytest.raises(WireError) as refused:
        decode(frames)
    assert refused.value.code is code


def test_no_frames_and_missing_frames_are_refused() -> None:
    frames = frames_of(push())
    for broken in ([], [b""], frames[:1], frames[:-1], [*frames, b""], [frames[0][:30]]):
        with pytest.raises(WireError):
            decode(broken)


@pytest.mark.parametrize(
    "part",
    [
        Part(0, Field.ROWS, torch.arange(3.0)),  # rows without a second dimension
        Part(0, Field.KEYS, torch.arange(3.0)),  # keys that are no integers
        Part(0, Field.VALUES, torch.ones(2, 2)),
        Part(0, Field.VALUES, torch.ones(2), lr=float("nan")),
        Part(0, Field.VALUES, torch.ones(2), lr=float("inf")),
    ],
)
def test_parts_that_contradict_their_field_are_refused(part: Part) -> None:
    with pytest.raises(WireError):
        decode(frames_of(Message(kind=Kind.PUSH, parts=(part,))))


@pytest.mark.parametrize("shape", [(0, 2**63), (0, 2**20), (2**60, 16), (2**63, 0)])
def test_a_shape_without_bytes_is_refused_too(shape: tuple[int, int]) -> None:
    """With a valid checksum: this one was not damaged on its way."""
    frames = frames_of(Message(kind=Kind.PUSH, parts=(Part(2, Field.ROWS, torch.empty(0, 4)),)))
    part = struct.pack("<IBBHdQQ", 2, Field.ROWS, 1, 0, 0.0, *shape)
    head = frames[0][:40]
    checksum = xxhash.xxh3_64_intdigest(head + part)
    with pytest.raises(WireError):
        decode([head + struct.pack("<Q", checksum) + part])


def test_no_mutation_of_a_message_passes() -> None:
    """Bits flipped, frames cut, grown, lost, doubled and swapped: refused every time, with a WireError."""
    rng = random.Random(5)
    original = frames_of(push())
    for _ in range(3000):
        frames = mutate(rng, original)
        if frames == original:
            continue
        with pytest.raises(WireError):
            decode(frames)


def mutate(rng: random.Random, original: list[bytes]) -> list[bytes]:
    frames = list(original)
    which = rng.randrange(len(frames))
    frame = bytearray(frames[which])
    match rng.randrange(6):
        case 0 if frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        case 1:
            frame = frame[: rng.randrange(len(frame) + 1)]
        case 2:
            frame += rng.randbytes(rng.randrange(1, 9))
        case 3:
            return frames[:which] + frames[which + 1 :]
        case 4:
            return [*frames, bytes(frame)]
        case _:
            other = rng.randrange(len(frames))
            frames[which], frames[other] = frames[other], frames[which]
            return frames
    frames[which] = bytes(frame)
    return frames


def test_numpy_is_little_endian_on_the_wire() -> None:
    frames = frames_of(Message(kind=Kind.DATA, parts=(Part(0, Field.KEYS, torch.tensor([1])),)))
    assert frames[0].endswith(np.array([1], dtype="<i8").tobytes())

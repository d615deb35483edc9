"""The bytes of a stream of questions, as a reader sees them that reads by pieces."""

import json

import pytest

from fleetrun.elastic.etcd.wire import in_one_read


def read_like_the_gateway(text: str) -> list[object]:
    """What Go's json.Decoder has in its buffer when the first object is whole: pieces of 512 bytes, then each
    as large as the buffer so far and 512 more.
    """
    decoder = json.JSONDecoder()
    size = 512
    while True:
        try:
            _, end = decoder.raw_decode(text[:size])
            break
        except ValueError:
            size = 2 * size + 512
    found, rest = [json.loads(text[:end])], text[end:size]
    while rest:
        value, end = decoder.raw_decode(rest)
        found.append(value)
        rest = rest[end:]
    return found


@pytest.mark.parametrize("count", [1, 2, 5, 9, 40])
@pytest.mark.parametrize("size", [10, 100, 250, 500, 511, 513, 700, 1600, 5000])
def test_all_questions_are_read_before_the_first_is_answered(size: int, count: int):
    questions = [{"create_request": {"key": "k" * size, "watch_id": number}} for number in range(count)]
    assert read_like_the_gateway(in_one_read(questions)) == questions


def test_without_that_some_are_lost():
    """That the reader above is strict enough."""
    questions = [{"create_request": {"key": "k" * 100, "watch_id": number}} for number in range(9)]
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        read_like_the_gateway("".join(map(json.dumps, questions)))

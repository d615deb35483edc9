"""Addresses of an etcd, and the JSON of a stream of requests as etcd's gateway reads it."""

from __future__ import annotations

import json

import pytest

from fleetrun.elastic.etcd.wire import EtcdAddress, in_one_read, parse_address, password_for
from fleetrun.errors import UsageError


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("etcd://a:2379", EtcdAddress(("a:2379",))),
        ("etcd://a:1,b:2,[::1]:3", EtcdAddress(("a:1", "b:2", "[::1]:3"))),
        ("etcd://etcd:2379", EtcdAddress(("etcd:2379",))),
        ("etcd://etcd-host", EtcdAddress(("etcd-host:2379",))),
        ("etcd://10.0.0.1,[fe80::1]/", EtcdAddress(("10.0.0.1:2379", "[fe80::1]:2379"))),
        ("etcd://a:1?user=me", EtcdAddress(("a:1",), user="me")),
        (
            "etcd://a:1?cacert=%2Fa%20b%2Fca.pem&cert=c.pem&key=k.pem",
            EtcdAddress(("a:1",), cacert="/a b/ca.pem", cert="c.pem", key="k.pem"),
        ),
    ],
)
def test_addresses(url, address):
    assert parse_address(url) == address


def test_tls_is_used_when_a_file_for_it_is_given():
    assert not parse_address("etcd://a:1?user=me").secure
    assert parse_address("etcd://a:1?cacert=x").secure
    assert parse_address("etcd://a:1?cert=x").secure


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("a:2379", "etcd://"),
        ("etcds://a:2379", "etcd://"),
        ("etcd://", "host:port"),
        ("etcd://a:1,,b:2", "host:port"),
        ("etcd://a:1,a:1", "a:1 is listed twice"),
        ("etcd://a:0", "port"),
        ("etcd://a:b", "host:port"),
        ("etcd://::1:2379", "host:port"),
        ("etcd://a:1/path", "host:port"),
        ("etcd://a:1?ca=x", "parameter 'ca'; known are cacert, cert, key, user"),
        ("etcd://a:1?user", "NAME=VALUE"),
        ("etcd://a:1?user=", "user"),
        ("etcd://a:1?user=a&user=b", "user"),
        ("etcd://a:1?key=x", "key without a cert"),
    ],
)
def test_what_is_refused(url, words):
    with pytest.raises(UsageError, match="etcd") as caught:
        parse_address(url)
    assert words in caught.value.message


@pytest.mark.parametrize(
    "url", ["etcd://me:hunter2@a:2379", "etcd://a:1,me:hunter2@b:1", "etcd://a:1?password=hunter2"]
)
def test_a_password_in_an_address_is_refused_and_not_repeated(url):
    with pytest.raises(UsageError) as caught:
        parse_address(url)
    assert "hunter2" not in f"{caught.value.message} {caught.value.hint}"
    assert "FLEETRUN_ETCD_PASSWORD" in str(caught.value.hint)


def test_where_the_password_comes_from():
    address = parse_address("etcd://a:1?user=me")
    assert password_for(address, {"FLEETRUN_ETCD_PASSWORD": "hunter2"}) == "hunter2"
    assert password_for(parse_address("etcd://a:1"), {"FLEETRUN_ETCD_PASSWORD": "hunter2"}) == ""
    with pytest.raises(UsageError, match="FLEETRUN_ETCD_PASSWORD is not set"):
        password_for(address, {})


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
def test_all_requests_are_read_before_the_first_is_answered(size: int, count: int):
    questions = [{"create_request": {"key": "k" * size, "watch_id": number}} for number in range(count)]
    assert read_like_the_gateway(in_one_read(questions)) == questions


def test_without_padding_some_requests_are_lost():
    """That the reader above is strict enough."""
    questions = [{"create_request": {"key": "k" * 100, "watch_id": number}} for number in range(9)]
    with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
        read_like_the_gateway("".join(map(json.dumps, questions)))

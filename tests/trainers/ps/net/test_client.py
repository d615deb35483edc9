"""Retries, deadlines and refusals, against servers that misbehave."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import zmq

from tests.support.cluster import reserved_endpoints
from trainers.errors import ServerError, TrainerLostError
from trainers.ps import wire
from trainers.ps.client import Client, Request
from trainers.ps.configs import PsConfigs
from trainers.ps.wire import (
    VERSION,
    Code,
    Field,
    Kind,
    Message,
    Part,
    bytes_part,
    decode,
    encode,
)

Answer = Callable[[int, Message], list[Message]]


@pytest.fixture(autouse=True)
def early_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.ps.client._FIRST_RETRY_S", 0.02)


@contextmanager
def served_by(answer: Answer, **configs: float) -> Iterator[Client]:
    """A client of a server that answers its n-th message (0, 1, ...) with whatever `answer` says."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    stop_here, stop_there = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    stop_here.bind("inproc://stop")
    stop_there.connect("inproc://stop")
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)

    def serve() -> None:
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(stop_there, zmq.POLLIN)
        count = 0
        while stop_there not in dict(poller.poll()):
            route, *frames = router.recv_multipart()
            if frames == [b""]:  # it begins a connection
                continue
            for reply in answer(count, decode(frames)):
                router.send_multipart([route, *encode(reply)])
            count += 1

    with reserved_endpoints(1) as (endpoint,):
        router.bind(f"tcp://{endpoint}")
        thread = threading.Thread(target=serve)
        thread.start()
        client = Client([endpoint], 0, PsConfigs(**configs))  # type: ignore[arg-type]
        try:
            yield client
        finally:
            client.close()
            stop_here.send(b"")
            thread.join()
            for each in (router, stop_here, stop_there):
                each.close()
            context.term()


ASK = [Request(server=0, kind=Kind.PULL)]


def test_a_lost_answer_is_asked_for_again_with_the_same_sequence() -> None:
    seen = []

    def answer(count: int, request: Message) -> list[Message]:
        seen.append(request.sequence)
        return [request.reply(Kind.DONE, number=9)] if count >= 3 else []

    with served_by(answer) as client:
        assert client.ask(ASK)[0].number == 9
    assert len(seen) >= 4
    assert len(set(seen)) == 1


def test_a_client_draws_nothing_from_the_generators_of_the_script() -> None:
    """Scripts that shuffle alike on all ranks do so by a seed of theirs."""

    def state() -> object:
        name, numbers, *rest = np.random.get_state()
        return random.getstate(), name, numbers.tobytes(), rest, torch.get_rng_state().tolist()  # type: ignore[union-attr]

    seen = []

    def answer(count: int, request: Message) -> list[Message]:
        seen.append(request.sequence)
        return [request.reply(Kind.DONE)] if count >= 3 else []

    before = state()
    with served_by(answer) as client:
        client.ask(ASK)
    assert len(seen) >= 4, "it was sent again, each time after a time drawn at random"
    assert state() == before


def test_a_large_request_is_repeated_only_when_it_could_have_been_answered() -> None:
    """Or a gigabyte would be sent again while the server reads it, and so would its answer."""
    keys = torch.arange(100_000)
    with served_by(lambda count, request: []) as client:
        waits = {}
        for field, data in (
            (Field.KEYS, keys[:1]),
            (Field.KEYS, keys),
            (Field.VALUES, torch.zeros(50_000_000)),
        ):
            (each,) = client.send([Request(server=0, kind=Kind.PULL, parts=(Part(3, field, data),))])._pending
            waits[data.numel()] = each.retry_at - each.since
    first = 0.02
    assert waits == pytest.approx(
        {1: first, 100_000: first + 100_000 * 2048 / 200e6, 50_000_000: first + 1.0}, abs=0.001
    )


def test_a_message_that_no_server_would_take_is_refused_by_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wire, "MAX_PART_BYTES", 1 << 20)
    rows = Part(3, Field.ROWS, torch.empty(513, 512))
    with served_by(lambda count, request: []) as client, pytest.raises(ServerError, match="more than 1 MB"):
        client.ask([Request(server=0, kind=Kind.PUSH, parts=(rows,))])


@pytest.mark.slow
def test_a_server_that_says_wait_is_waited_for_beyond_the_timeout() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        return [request.reply(Kind.DONE if count >= 8 else Kind.WAIT)]

    with served_by(answer, request_timeout_s=1.0) as client:
        assert client.ask(ASK)[0].kind is Kind.DONE


def test_a_silent_server_is_named_after_the_timeout() -> None:
    words = r"server 0 at 127.0.0.1:\d+ did not answer PULL within 0.3 s"
    with (
        served_by(lambda count, request: [], request_timeout_s=0.3) as client,
        pytest.raises(ServerError, match=words),
    ):
        client.ask(ASK)


def test_second_answers_probes_and_answers_to_others_are_passed_over() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        probe = Message(kind=Kind.PROBE)
        other = Message(kind=Kind.DONE, incarnation=1, sequence=request.sequence, number=66)
        mine = request.reply(Kind.DONE, number=request.sequence)
        return [probe, other, mine, mine]

    with served_by(answer) as client:
        assert [client.ask(ASK)[0].number for _ in range(3)] == [1, 2, 3]


def test_requests_are_underway_while_nobody_waits_and_their_answers_come_in_order() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        return [request.reply(Kind.DONE, number=request.number)]

    with served_by(answer) as client:
        tickets = [
            client.send([Request(server=0, kind=Kind.PULL, number=number) for number in (at, at + 1)])
            for at in (10, 20, 30)
        ]
        assert [reply.number for reply in client.wait(tickets[2])] == [30, 31]
        while tickets[0].open or tickets[1].open:
            client.poll()
        assert [reply.number for reply in tickets[0].replies] == [10, 11]
        assert [reply.number for reply in client.wait(tickets[1])] == [20, 21]


def test_a_lost_push_is_sent_again_while_others_are_underway() -> None:
    """The second, which has been answered, is not: by the third one sees what came after that."""
    seen: list[int] = []
    second_is_here = threading.Event()

    def answer(count: int, request: Message) -> list[Message]:
        seen.append(request.sequence)
        lost = request.sequence == 1 and not (second_is_here.is_set() and seen.count(1) >= 3)
        return [] if lost else [request.reply(Kind.DONE)]

    with served_by(answer) as client:
        first, second = client.send(ASK), client.send(ASK)
        client.wait(second)
        assert first.open
        second_is_here.set()
        client.wait(client.send(ASK))
        client.wait(first)
    assert seen.count(1) >= 3
    assert 2 not in seen[seen.index(3) :]


@pytest.mark.slow
def test_time_in_which_nobody_looked_is_not_the_servers_silence() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        return [request.reply(Kind.DONE)] if count >= 2 else []

    with served_by(answer, request_timeout_s=2.0) as client:
        ticket = client.send(ASK)
        threading.Event().wait(2.2)  # the trainer computes
        assert client.wait(ticket)[0].kind is Kind.DONE


class StandsStill:
    """A poller of a process that stands still as it waits: that takes longer, and nothing has been read."""

    def __init__(self, poller: zmq.Poller, seconds: float) -> None:
        self._poller = poller
        self._seconds = seconds

    def poll(self, timeout: int) -> list[tuple[zmq.Socket[bytes], int]]:
        if timeout and self._seconds:
            threading.Event().wait(self._seconds)
            self._seconds = 0.0
            return []
        return self._poller.poll(timeout)


@pytest.mark.slow
def test_time_in_which_this_process_stood_still_is_not_the_servers_silence() -> None:
    with served_by(lambda count, request: [request.reply(Kind.DONE)], request_timeout_s=0.5) as client:
        client._poller = StandsStill(client._poller, 0.6)  # type: ignore[assignment]
        assert client.ask(ASK)[0].kind is Kind.DONE


def test_a_refusal_of_what_is_underway_is_raised_at_the_next_look() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        text = (bytes_part(Field.TEXT, b"NaN"),)
        return [request.reply(Kind.REFUSED, code=Code.NOT_FINITE, parts=text)]

    def look_for_ever(client: Client) -> None:
        while True:
            client.poll()

    with served_by(answer) as client:
        client.send(ASK)
        with pytest.raises(ServerError, match=r"refused PULL \(NOT_FINITE\): NaN"):
            look_for_ever(client)


def test_refusals_become_errors_that_name_the_server() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        text = (bytes_part(Field.TEXT, b"trainer 1 is lost" if count else b"no such table"),)
        code = Code.TRAINER_LOST if count else Code.UNKNOWN_TABLE
        return [request.reply(Kind.REFUSED, code=code, parts=text)]

    with served_by(answer) as client:
        with pytest.raises(
            ServerError, match=r"server 0 at .* refused PULL \(UNKNOWN_TABLE\): no such table"
        ):
            client.ask(ASK)
        with pytest.raises(TrainerLostError, match="trainer 1 is lost, and server 0 at"):
            client.ask(ASK)


def test_another_version_of_the_protocol_is_an_error_at_once() -> None:
    def answer(count: int, request: Message) -> list[Message]:
        text = bytes_part(Field.TEXT, f"protocol version {VERSION}".encode())
        return [Message(kind=Kind.REFUSED, code=Code.BAD_VERSION, parts=(text,))]

    with served_by(answer) as client, pytest.raises(ServerError, match="another version of fleetrun"):
        client.ask(ASK)


def refusing_saves(count: int, request: Message) -> list[Message]:
    if request.kind is Kind.SAVE:
        return [request.reply(Kind.REFUSED, code=Code.FAILED, text="full")]
    return [request.reply(Kind.DONE)] if count > 4 else []


def test_a_second_refusal_of_a_save_does_not_hit_the_next_call() -> None:
    """Two requests are refused, and only the first refusal is raised."""
    with served_by(refusing_saves) as client:
        with pytest.raises(ServerError, match=r"refused SAVE .*full"):
            client.ask([Request(server=0, kind=Kind.SAVE)] * 2)
        client.forget(Kind.SAVE)
        assert [reply.kind for reply in client.ask(ASK)] == [Kind.DONE]


def test_a_push_in_flight_outlives_the_refusal_of_another_call() -> None:
    """Its message is lost. A script may catch the error, and the push must still count."""
    with served_by(refusing_saves) as client:
        push = client.send([Request(server=0, kind=Kind.PUSH)])
        client.send([Request(server=0, kind=Kind.SAVE)])
        with pytest.raises(ServerError, match=r"refused SAVE .*full"):
            client.wait(push)
        client.forget(Kind.SAVE)
        assert [reply.kind for reply in client.wait(push)] == [Kind.DONE]

"""Where all trainers must come: what each gave, to each, and who is not waited for."""

from tests.trainers.ps.server.test_service import GRACE, Bench
from trainers.ps.wire import Code, Field, Kind, Message, bytes_part


def gift(words: str, rank: int, sequence: int, number: int = 0, life: int = 0) -> Message:
    parts = (bytes_part(Field.TEXT, words.encode()),)
    return Message(
        kind=Kind.GATHER, rank=rank, incarnation=life, sequence=sequence, number=number, parts=parts
    )


def told(reply: Message) -> list[str]:
    assert reply.kind is Kind.DATA, reply.text
    return [part.data.numpy().tobytes().decode() for part in reply.parts]


def test_everyone_gets_what_everyone_gave_in_the_order_of_ranks() -> None:
    bench = Bench().opened()
    early = bench.send(gift("b", 1, 500))
    assert (early.kind, early.text) == (Kind.WAIT, "trainer 0")
    assert told(bench.send(gift("a", 0, 501))) == ["a", "b"]
    assert told(bench.late[500]) == ["a", "b"]
    following = bench.late[500].number
    bench.send(gift("c", 0, 502, following))
    assert told(bench.send(gift("d", 1, 503, following))) == ["c", "d"]
    assert told(bench.late[502]) == ["c", "d"]


def test_an_answer_that_was_lost_comes_again() -> None:
    bench = Bench().opened()
    bench.send(gift("b", 1, 500))
    bench.send(gift("a", 0, 501))
    assert told(bench.send(gift("b", 1, 500))) == ["a", "b"]
    bench.send(gift("c", 0, 502, 2))  # trainer 0 is in the next one already
    assert told(bench.send(gift("b", 1, 500))) == ["a", "b"]
    assert bench.late[502].kind is Kind.WAIT


def test_what_a_former_self_gave_does_not_count_and_a_new_one_joins_in() -> None:
    bench = Bench(sync=False).opened()
    bench.send(gift("a", 0, 500))
    bench.send(gift("b", 1, 501))
    bench.send(gift("former", 1, 502, 2))
    bench.gone.add(b"1-0")
    bench.hello(1, life=1, restarts=1)
    assert bench.send(gift("c", 0, 503, 2)).kind is Kind.WAIT
    assert told(bench.send(gift("new", 1, 504, 0, life=1))) == ["c", "new"]
    assert told(bench.late[503]) == ["c", "new"]
    assert bench.late[503].number == 3


def test_who_has_had_an_answer_that_the_others_have_not_is_not_given_another() -> None:
    """A server that was restarted in between: trainer 0 is in its fifth, trainer 1 asks for its fourth
    again.
    """
    bench = Bench().opened()
    bench.send(gift("a", 0, 500, 5))
    refused = bench.send(gift("b", 1, 501, 4))
    assert refused.code is Code.MISMATCH
    assert "gather 4" in refused.text
    assert "gather 5" in refused.text


def test_all_of_the_same_count_go_on_with_a_server_that_was_restarted() -> None:
    bench = Bench().opened()
    bench.send(gift("a", 0, 500, 5))
    assert told(bench.send(gift("b", 1, 501, 5))) == ["a", "b"]
    assert bench.late[501].number == 6


def test_who_has_finished_is_not_left_out() -> None:
    bench = Bench(sync=False).opened()
    bench.send(gift("a", 0, 500))
    bench.ask(Kind.FINISH, 1)
    assert bench.late[500].code is Code.TRAINER_LOST
    assert "trainer 1 has called fleet.stop_worker()" in bench.late[500].text


def test_who_is_gone_is_waited_for_only_so_long() -> None:
    bench = Bench().opened()
    bench.send(gift("a", 0, 500))
    bench.gone.add(b"1-0")
    bench.pass_time(GRACE + 2)
    assert bench.late[500].code is Code.TRAINER_LOST
    assert "trainer 1 is lost" in bench.late[500].text


def test_a_barrier_and_a_gathering_wait_for_each_other_in_vain() -> None:
    bench = Bench().opened()
    barrier = Message(kind=Kind.BARRIER, rank=1, sequence=501, number=1)
    for _ in range(3):
        bench.send(gift("a", 0, 500))
        bench.send(barrier)
    bench.pass_time(1)
    for sequence in (500, 501):
        assert bench.late[sequence].code is Code.DEADLOCK
        said = bench.late[sequence].text
        assert "trainer 1 waits at fleet.barrier_worker(), trainer 0 waits in fleet.util" in said


def test_what_was_given_in_vain_does_not_count_later() -> None:
    bench = Bench().opened()
    barrier = Message(kind=Kind.BARRIER, rank=1, sequence=501, number=1)
    for _ in range(3):
        bench.send(gift("a", 0, 500))
        bench.send(barrier)
    bench.pass_time(1)
    assert bench.late[500].code is Code.DEADLOCK
    assert bench.send(gift("b", 1, 502)).kind is Kind.WAIT
    assert told(bench.send(gift("c", 0, 503))) == ["c", "b"]


def test_a_gift_is_one_text() -> None:
    bench = Bench().opened()
    assert bench.ask(Kind.GATHER).code is Code.BAD_MESSAGE
    assert bench.send(gift("a", 0, 500, 2**63)).code is Code.BAD_MESSAGE

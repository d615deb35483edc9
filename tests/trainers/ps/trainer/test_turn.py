"""Streams in a trainer: one step for each batch, and in which jobs there are any."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from trainers.data.positions import Records, decode_records
from trainers.data.slots import Slot
from trainers.data.stream_files import MultiSlotFiles
from trainers.errors import NotSupportedError, UsageError
from trainers.fleet import Fleet, Role, UserDefinedRoleMaker
from trainers.ps.runtime import TrainerRuntime
from trainers.ps.trainer.turn import Turn, records_part
from trainers.roles.identity import Identity
from trainers.strategy import DistributedStrategy

FIRST, SECOND = Records("clicks", "part-0", 0, 10), Records("clicks", "part-0", 10, 20)


def test_a_batch_is_stepped_before_the_next_one_is_taken() -> None:
    turn = Turn()
    turn.give(FIRST, (True, False))
    assert turn.take() == ([FIRST], (True, False))
    assert turn.take() == ([], None), "a step without a batch of a stream has no records"
    turn.give(FIRST)
    with pytest.raises(UsageError, match=r"for the previous batch, \[0, 10\) of 'part-0'. Make one step"):
        turn.give(SECOND)
    turn.give(FIRST)
    turn.forget(SECOND)
    with pytest.raises(UsageError):
        turn.give(SECOND)
    turn.give(FIRST)
    turn.forget(FIRST)
    with pytest.raises(UsageError, match=r"before the optimizer's step for the last batch, \[0, 10\)"):
        turn.take()
    turn.give(SECOND)
    (part,) = records_part(turn.take()[0])
    assert decode_records(part.data.numpy().tobytes()) == [SECOND]
    assert records_part([]) == []


def geo(strategy: DistributedStrategy) -> None:
    strategy.a_sync = True
    strategy.a_sync_configs = {"k_steps": 10}


def averaged(strategy: DistributedStrategy) -> None:
    strategy.dense = "allreduce"


def asynchronous(strategy: DistributedStrategy) -> None:
    strategy.a_sync = True


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        (geo, NotSupportedError, "Geo training sends changes of several steps"),
        (averaged, NotSupportedError, "every trainer needs equally many batches"),
        (asynchronous, UsageError, "fleet.stream.* between fleet.init_worker"),
    ],
)
def test_where_a_stream_cannot_be_counted(
    tmp_path: Path, setting: Callable[[DistributedStrategy], None], error: type[Exception], message: str
) -> None:
    source = MultiSlotFiles(tmp_path, use_var=[Slot("id")])
    strategy = DistributedStrategy()
    setting(strategy)
    stream = TrainerRuntime(Identity(), strategy).stream(source, batch_size=4)
    with pytest.raises(error, match=message):
        iter(stream)
    server = Fleet()
    server.init(UserDefinedRoleMaker(0, Role.SERVER, 1, ["h:1"], environ={}))
    with pytest.raises(UsageError, match="was called on a server"):
        server.stream(source, batch_size=4)

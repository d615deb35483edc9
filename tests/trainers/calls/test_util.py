"""`fleet.util` and `fleet.metrics` by one trainer, where others play no part."""

import math
from collections.abc import Callable

import pytest
import torch

from trainers.errors import NotSupportedError, UsageError
from trainers.fleet import Fleet
from trainers.metrics import Auc, DistributedMetrics
from trainers.roles.identity import Identity
from trainers.util import Util


class Alone:
    """A runtime without others."""

    def gather(self, mine: bytes, call: str) -> list[bytes]:
        return [mine]


def util(**who: object) -> Util:
    identity = Identity(**who)  # type: ignore[arg-type]
    return Util(lambda call: identity, lambda call: Alone())  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda it: it.all_reduce(1, "mean"), "mode is 'mean'; it must be one of sum, max, min"),
        (lambda it: it.all_reduce(1, comm_world="workers"), "comm_world is 'workers'; it must be \"worker\""),
        (lambda it: it.print_on_rank("x", 2), "rank_id is 2; this job has trainers 0 to 0"),
        (lambda it: it.get_file_shard("one"), "a list of files"),
    ],
)
def test_what_is_refused(call: Callable[[Util], object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(util())


@pytest.mark.parametrize("world", ["server", "all"])
def test_servers_take_no_part(world: str) -> None:
    for call in (util().barrier, lambda comm_world: util().all_gather(1, comm_world)):
        with pytest.raises(NotSupportedError, match='Use comm_world="worker"'):
            call(comm_world=world)


def test_a_server_reads_no_files_and_prints_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    server = util(is_server=True, worker_num=2)
    with pytest.raises(UsageError, match="on a server"):
        server.get_file_shard(["a"])
    server.print_on_rank("said", 0)
    util().print_on_rank("heard", 0)
    assert capsys.readouterr().out == "heard\n"


def test_nothing_before_init() -> None:
    fleet = Fleet()
    for call in (lambda: fleet.util.all_reduce(1), lambda: fleet.metrics.sum(1), fleet.util.barrier):
        with pytest.raises(UsageError, match=r"before fleet\.init\(\)"):
            call()
    assert fleet.util is fleet.util


def test_metrics_of_nothing_are_not_a_number() -> None:
    of = DistributedMetrics(util())
    assert all(
        math.isnan(each) for each in (of.acc(0, 0), of.mae(0, 0), of.rmse([0.0], [0]), of.value(Auc()))
    )
    assert math.isnan(of.auc([0, 0], [1, 2])), "without a click"
    assert of.auc([[0, 1, 1]], torch.tensor([[1, 1, 0]])) == 0.875


def test_metrics_in_paddles_way_of_asking() -> None:
    of = DistributedMetrics(util())
    assert of.acc(3, 4, None, util()) == 0.75
    with pytest.raises(NotSupportedError, match="scope"):
        of.sum(1, scope="a scope")
    with pytest.raises(UsageError, match="no variables by name"):
        of.auc("stat_pos", "stat_neg")
    with pytest.raises(UsageError, match="2 buckets of stat_pos and 3 of stat_neg"):
        of.auc([1, 2], [1, 2, 3])
    with pytest.raises(UsageError, match="numeric"):
        of.mae(object(), 1)

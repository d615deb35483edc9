"""What `fleet.init` found out is what data sets and ranks go by, not what the environment says."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from trainers import fleet, get_rank, get_world_size
from trainers.data.exchange import default_peers
from trainers.errors import UsageError
from trainers.roles.environment import ask_first
from trainers.roles.makers import UserDefinedRoleMaker


@pytest.fixture
def become() -> Iterator[Callable[..., None]]:
    """Be who a UserDefinedRoleMaker says for a while."""

    def begin(**fields: Any) -> None:
        identity = UserDefinedRoleMaker(**fields, environ={}).identity()
        ask_first(lambda: identity)

    former = ask_first(fleet.Fleet().known_identity)
    yield begin
    assert former is not None, "trainers.fleet had put itself there"
    ask_first(former)


def test_the_role_maker_goes_before_the_environment(become: Callable[..., None]) -> None:
    become(current_id=1, worker_num=2, server_endpoints=["h:1"])
    assert (get_rank(), get_world_size()) == (1, 2)


def test_before_init_the_environment_is_asked(become: Callable[..., None]) -> None:
    assert (get_rank(), get_world_size()) == (0, 1)


def test_workers_that_do_not_know_where_to_meet_say_so(become: Callable[..., None]) -> None:
    become(current_id=1, worker_num=2, server_endpoints=["h:1"])
    with pytest.raises(UsageError, match="Pass worker_endpoints to UserDefinedRoleMaker"):
        default_peers()
    become(current_id=0, worker_num=1, server_endpoints=["h:1"])
    assert default_peers() is None

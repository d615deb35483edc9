"""UserDefinedRoleMaker: what a script says about itself, and what it cannot say."""

from typing import Any

import pytest

from trainers.errors import UsageError
from trainers.roles.identity import Identity, Role
from trainers.roles.makers import UserDefinedRoleMaker

SERVERS = ["127.0.0.1:6001", "127.0.0.1:6002"]
WORKERS = ["10.0.0.1:7001", "10.0.0.2:7001", "10.0.0.2:7002"]


def maker(**fields: Any) -> UserDefinedRoleMaker:
    environ = fields.pop("environ", {})
    given = {"worker_num": 3, "server_endpoints": SERVERS}
    return UserDefinedRoleMaker(**given | fields, environ=environ)


def identity(**fields: Any) -> Identity:
    return maker(**fields).identity()


def test_the_worker_of_paddles_document() -> None:
    role = UserDefinedRoleMaker(
        current_id=0, role=Role.WORKER, worker_num=3, server_endpoints=["127.0.0.1:6001", "127.0.0.1:6002"]
    )
    me = role.identity()
    assert (me.index, me.worker_num, me.is_server, me.launched_as_ps) == (0, 3, False, True)
    assert me.servers == ("127.0.0.1:6001", "127.0.0.1:6002")
    assert me.source == "UserDefinedRoleMaker"
    assert not me.alone


def test_a_server_is_counted_among_servers() -> None:
    me = identity(current_id=1, role=Role.SERVER)
    assert (me.index, me.is_server, me.worker_num, me.local_rank) == (1, True, 3, 1)
    assert identity(role=2).is_server, "Paddle's number"


def test_workers_meet_at_the_first() -> None:
    me = identity(current_id=2, worker_num=0, worker_endpoints=WORKERS)
    assert (me.worker_num, me.trainers, me.local_rank) == (3, tuple(WORKERS), 1)
    assert me.meeting() == "10.0.0.1:7001"
    with pytest.raises(
        UsageError, match=r"3 workers of this job need an address .* UserDefinedRoleMaker gives"
    ):
        identity().meeting()


def test_collective_workers() -> None:
    several = identity(server_endpoints=None, worker_endpoints=WORKERS, is_collective=True)
    assert (several.launched_as_ps, several.meeting(), several.servers) == (False, "10.0.0.1:7001", ())
    assert identity(server_endpoints=None, worker_num=1, is_collective=True).alone


def test_the_environment_says_the_rest() -> None:
    environ = {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "FLAGS_selected_gpus": "3",
        "PADDLE_RESTART_COUNT": "2",
        "TRAINING_ROLE": "PSERVER",
        "RANK": "5",
    }
    me = identity(environ=environ)
    assert (me.backend, me.device, me.restart_count) == ("gloo", 3, 2)
    assert (me.is_server, me.index) == (False, 0)
    with pytest.raises(UsageError, match="FLAGS_selected_gpus is 'all'"):
        identity(environ={"FLAGS_selected_gpus": "all"})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"current_id": 3}, r"current_id is 3; the WORKERs of this job are 0 to 2"),
        ({"current_id": 2, "role": Role.SERVER}, r"current_id is 2; the SERVERs of this job are 0 to 1"),
        ({"current_id": -1}, "current_id is -1"),
        ({"current_id": True}, "current_id is True"),
        ({"current_id": "0"}, "current_id is '0'"),
        ({"role": "WORKER"}, r"role is 'WORKER'; it must be Role\.WORKER or Role\.SERVER"),
        ({"role": True}, "role is True"),
        ({"role": 3}, "role is 3"),
        ({"worker_num": 0}, "neither worker_num nor worker_endpoints"),
        ({"worker_num": -1}, "worker_num is -1"),
        ({"worker_num": 2, "worker_endpoints": WORKERS}, "worker_num is 2, but it has 3 worker_endpoints"),
        ({"server_endpoints": []}, "no server_endpoints"),
        ({"server_endpoints": "127.0.0.1:6001"}, "server_endpoints is '127.* it must be a list"),
        ({"server_endpoints": ["127.0.0.1"]}, r"has '127\.0\.0\.1'; an endpoint is"),
        ({"server_endpoints": ["h:0"]}, "has 'h:0'"),
        ({"server_endpoints": ["h:65536"]}, "has 'h:65536'"),
        ({"server_endpoints": [":6001"]}, "has ':6001'"),
        ({"server_endpoints": ["h h:6001"]}, "has 'h h:6001'"),
        ({"server_endpoints": ["::1:6001"]}, "has '::1:6001'"),
        ({"server_endpoints": [6001]}, "has 6001"),
        ({"server_endpoints": ["h:1", "g:1", "h:1"]}, "has 'h:1' twice"),
        ({"worker_endpoints": [*WORKERS[:2], SERVERS[0]]}, r"'127\.0\.0\.1:6001' is in both server_end"),
        ({"is_collective": True}, "Collective jobs have only workers"),
        ({"is_collective": True, "server_endpoints": None}, "3 collective workers but no worker_endpoints"),
        ({"is_collective": 1}, "is_collective is 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said_at_once(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        maker(**fields)


def test_an_ipv6_endpoint_is_in_brackets() -> None:
    assert identity(server_endpoints=["[::1]:6001"]).servers == ("[::1]:6001",)

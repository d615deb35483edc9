"""The variables that Paddle's launchers set, and contradictions in them."""

import pytest

from trainers.errors import NotSupportedError, UsageError
from trainers.roles.environment import identity_of
from trainers.roles.identity import Identity

ENDPOINTS = "10.0.0.1:7001,10.0.0.2:7001,10.0.0.2:7002"
COLLECTIVE = {
    "PADDLE_TRAINER_ID": "2", "PADDLE_TRAINERS_NUM": "3", "PADDLE_TRAINER_ENDPOINTS": ENDPOINTS,
    "PADDLE_CURRENT_ENDPOINT": "10.0.0.2:7002", "FLAGS_selected_gpus": "1,2",
}  # fmt: skip
SERVERS = {
    "PADDLE_PSERVERS_IP_PORT_LIST": "10.0.0.1:8001,10.0.0.2:8001",
    "PADDLE_TRAINERS_NUM": "3",
}
SERVER = SERVERS | {"TRAINING_ROLE": "PSERVER", "POD_IP": "10.0.0.2", "PADDLE_PORT": "8001"}
TRAINER = SERVERS | {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "1"}


def identity(environ: dict[str, str]) -> Identity:
    return identity_of(environ)


def test_a_collective_trainer() -> None:
    me = identity(COLLECTIVE)
    assert (me.index, me.worker_num, me.local_rank, me.device) == (2, 3, 1, 1)
    assert (me.meeting(), me.launched_as_ps, me.source) == ("10.0.0.1:7001", False, "Paddle's launcher")
    assert identity(COLLECTIVE | {"PADDLE_MASTER": "10.0.0.9:9"}).meeting() == "10.0.0.9:9"


def test_one_trainer_is_alone() -> None:
    assert identity({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}).alone


def test_a_server_finds_itself_in_the_list() -> None:
    me = identity(SERVER)
    assert (me.index, me.is_server, me.worker_num) == (1, True, 3)
    assert me.servers == ("10.0.0.1:8001", "10.0.0.2:8001")


def test_a_trainer_with_servers() -> None:
    me = identity(TRAINER)
    assert (me.index, me.is_server, me.worker_num, me.launched_as_ps) == (1, False, 3, True)
    with pytest.raises(UsageError, match="set PADDLE_TRAINER_ENDPOINTS"):
        me.meeting()
    assert identity(TRAINER | {"PADDLE_TRAINER_ENDPOINTS": ENDPOINTS}).meeting() == "10.0.0.1:7001"


def without(environ: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environ.items() if key != name}


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (COLLECTIVE | {"PADDLE_TRAINERS_NUM": "2"}, "PADDLE_TRAINERS_NUM is 2, but .* has 3 endpoints"),
        (COLLECTIVE | {"PADDLE_TRAINER_ID": "3"}, "PADDLE_TRAINER_ID is 3; it must be from 0 to 2"),
        (COLLECTIVE | {"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID is 'x'"),
        (COLLECTIVE | {"PADDLE_TRAINER_ID": "1"}, r"is 1, which is 10\.0\.0\.2:7001 in .*, but PADDLE_CURR"),
        (COLLECTIVE | {"RANK": "1"}, "RANK is '1', but PADDLE_TRAINER_ID .* mean 2, so two launchers"),
        (COLLECTIVE | {"WORLD_SIZE": "4"}, "WORLD_SIZE is '4', but"),
        (COLLECTIVE | {"PADDLE_TRAINER_ENDPOINTS": "h1,h2,h3"}, "PADDLE_TRAINER_ENDPOINTS has 'h1'"),
        (COLLECTIVE | {"PADDLE_MASTER": "http://h1"}, "PADDLE_MASTER has 'http://h1'; an endpoint is"),
        ({"PADDLE_TRAINER_ID": "0"}, "PADDLE_TRAINERS_NUM is not set, but TRAINING_ROLE or"),
        ({"PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "0"}, "PADDLE_TRAINERS_NUM is 0"),
        (without(TRAINER, "PADDLE_PSERVERS_IP_PORT_LIST"), "PADDLE_PSERVERS_IP_PORT_LIST is not set"),
        (without(TRAINER, "PADDLE_TRAINER_ID"), "PADDLE_TRAINER_ID is not set"),
        (without(SERVER, "POD_IP"), "POD_IP is not set"),
        (SERVER | {"PADDLE_PORT": "8002"}, r"this server is 10\.0\.0\.2:8002, which is not in"),
        (SERVER | {"PADDLE_PSERVERS_IP_PORT_LIST": "h:1,h:1"}, "has 'h:1' twice"),
        (SERVER | {"PADDLE_TRAINER_ENDPOINTS": "10.0.0.1:8001"}, r"'10\.0\.0\.1:8001' is in both PADDLE_PS"),
    ],
)  # fmt: skip
def test_contradictions_are_named(environ: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        identity(environ)


def test_a_role_that_does_not_exist_here() -> None:
    with pytest.raises(NotSupportedError, match="TRAINING_ROLE is 'HETER_TRAINER'"):
        identity(TRAINER | {"TRAINING_ROLE": "HETER_TRAINER"})


def test_torchruns_variables_that_agree_are_no_contradiction() -> None:
    assert identity(COLLECTIVE | {"RANK": "2", "WORLD_SIZE": "3"}).index == 2

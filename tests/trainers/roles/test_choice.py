"""Who decides: the role maker that is given, the environment, or neither because they contradict."""

from typing import Any

import pytest

from fleetrun.envs import contract
from fleetrun.envs.contract import Cluster, Member, Mode
from fleetrun.envs.contract import Role as LaunchedRole
from trainers.errors import UsageError
from trainers.roles.identity import Identity
from trainers.roles.makers import (
    MPISymmetricRoleMaker,
    PaddleCloudRoleMaker,
    UserDefinedRoleMaker,
    choose,
    settle,
)

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1",
}  # fmt: skip
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
PADDLE = {"TRAINING_ROLE": "TRAINER", "PADDLE_TRAINER_ID": "0", "PADDLE_TRAINERS_NUM": "1"}
USER = {"worker_num": 1, "server_endpoints": ["h:1"], "environ": {}}


def launched() -> dict[str, str]:
    cluster = Cluster(mode=Mode.PS, trainers=("h:1",), servers=("h:2",), master="h:3")
    return contract.write(Member(cluster=cluster, role=LaunchedRole.TRAINER, rank=0, endpoint="h:1"))


class Told:
    """A role maker of a script's own, which does not say for which kind of training it is."""

    def __init__(self, **fields: Any) -> None:
        self._identity = Identity(**fields)

    def identity(self) -> Identity:
        return self._identity


@pytest.mark.parametrize(
    "environ", [{}, TORCHRUN, PADDLE, launched(), MPIRUN | TORCHRUN, MPIRUN | PADDLE, MPIRUN | launched()]
)
def test_launchers_are_asked(environ: dict[str, str]) -> None:
    assert isinstance(choose(False, environ), PaddleCloudRoleMaker)


def test_under_mpirun_alone_a_job_with_servers_makes_them_itself() -> None:
    assert isinstance(choose(False, MPIRUN), MPISymmetricRoleMaker)
    assert isinstance(choose(True, MPIRUN), PaddleCloudRoleMaker)
    assert isinstance(choose(False, MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}), PaddleCloudRoleMaker)


def test_a_role_maker_says_which_kind_of_training() -> None:
    collective = UserDefinedRoleMaker(worker_num=1, is_collective=True, environ={})
    assert settle(collective, False, {})[0]
    assert settle(collective, True, {})[0]
    assert not settle(UserDefinedRoleMaker(**USER), False, {})[0]
    assert settle(PaddleCloudRoleMaker(True, environ={}), False, {})[0]
    assert settle(Told(), True, {})[0], "one that does not say goes along"
    assert not settle(Told(servers=("h:1",)), False, {})[0]


def test_the_role_makers_word_is_taken_not_the_environments() -> None:
    _, identity = settle(UserDefinedRoleMaker(**USER), False, TORCHRUN)
    assert (identity.worker_num, identity.source) == (1, "UserDefinedRoleMaker")


@pytest.mark.parametrize(
    ("role_maker", "is_collective", "words"),
    [
        (True, False, r"fleet\.init was given True .* Write fleet\.init\(is_collective=True\)"),
        (False, False, r"Write fleet\.init\(is_collective=False\)"),
        (UserDefinedRoleMaker, False, r"the class UserDefinedRoleMaker\. Pass an object"),
        ("cloud", False, "given 'cloud' as its role maker"),
        (None, 1, "is_collective is 1"),
        (UserDefinedRoleMaker(**USER), True, "a UserDefinedRoleMaker for parameter servers"),
        (PaddleCloudRoleMaker(environ={}), True, "a PaddleCloudRoleMaker for parameter servers"),
        (MPISymmetricRoleMaker(environ={}), True, "a MPISymmetricRoleMaker for parameter servers"),
        (
            PaddleCloudRoleMaker(environ=MPIRUN),
            False,
            r"mpirun has none\. You can use fleet\.MPISymm",
        ),
        (PaddleCloudRoleMaker(True, environ=launched()), False, "was started with parameter servers"),
    ],
)
def test_what_does_not_fit_together_is_said(role_maker: Any, is_collective: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        settle(role_maker, is_collective, {})


def test_paddle_cloud_wants_a_bool() -> None:
    with pytest.raises(UsageError, match="is_collective is 'yes'"):
        PaddleCloudRoleMaker("yes")  # type: ignore[arg-type]

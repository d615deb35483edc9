"""What --dry_run prints."""

import json
from pathlib import Path

import pytest

from fleetrun.console import dry_run
from fleetrun.console.text import MASK
from fleetrun.envs.contract import Mode, Role
from fleetrun.pod.spec import ContainerSpec, PodSpec

ENVIRON = {"HOME": "/root", "RANK": "7", "HF_TOKEN": "s3cr3t"}


@pytest.fixture
def spec():
    log_dir = Path("/srv/日志")
    container = ContainerSpec(
        role=Role.TRAINER,
        rank=0,
        index=0,
        argv=("python", "train.py", "--name", "two words"),
        env={"HOME": "/root", "PADDLE_TRAINER_ID": "0", "HF_TOKEN": "s3cr3t", "MY_PASSWORD": "other"},
        log=log_dir / "default.evjsyn.trainer.0.log",
        endpoint="127.0.0.1:6070",
    )
    hook = ContainerSpec(
        role=Role.TRAINER, rank=0, index=0, argv=("make", "data"), env={}, log=log_dir / "x", label="pre_hook"
    )
    return PodSpec(
        name="evjsyn",
        job_id="default",
        mode=Mode.COLLECTIVE,
        containers=(container,),
        log_dir=log_dir,
        pre_hook=hook,
    )


def test_json_is_the_document(spec):
    text = dry_run.plan_as_json(spec, ENVIRON, "")
    assert json.loads(text) == dry_run.plan_document(spec, ENVIRON, "")
    assert "日志" in text


def test_the_document(spec):
    document = dry_run.plan_document(spec, ENVIRON, "")
    (container,) = document.pop("containers")
    assert document == {
        "job": "default",
        "mode": "collective",
        "pod": "evjsyn",
        "replicas": 1,
        "log_dir": "/srv/日志",
        "notify": None,
        "pre_hook": ["make", "data"],
    }
    assert container == {
        "name": "trainer.0",
        "role": "trainer",
        "rank": 0,
        "endpoint": "127.0.0.1:6070",
        "command": ["python", "train.py", "--name", "two words"],
        "log": "/srv/日志/default.evjsyn.trainer.0.log",
        "environment": {"MY_PASSWORD": MASK, "PADDLE_TRAINER_ID": "0"},
        "removed_from_environment": ["RANK"],
    }


@pytest.mark.parametrize(
    "show", [dry_run.plan_as_json, lambda *given: "\n".join(dry_run.plan_as_text(*given))]
)
def test_no_secret_is_shown(spec, show):
    text = show(spec, {}, "")
    assert "s3cr3t" not in text
    assert "other" not in text


def test_the_text_can_be_pasted_into_a_shell(spec):
    lines = dry_run.plan_as_text(spec, ENVIRON, "")
    assert lines[0] == "job default, mode collective: 1 process; nothing was started"
    assert "before each start: make data" in lines
    assert "  command  python train.py --name 'two words'" in lines
    assert "  PADDLE_TRAINER_ID=0" in lines
    assert "trainer.0  127.0.0.1:6070" in lines

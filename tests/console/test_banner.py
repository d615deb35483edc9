"""The first lines of a launch, as in the documents that users come from."""

from pathlib import Path

import pytest

from fleetrun.console import narrator
from fleetrun.console.text import MASK
from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import banner as rows
from fleetrun.pod.spec import ContainerSpec, PodSpec


def container(role, rank, **env):
    log = Path("/srv/log") / f"{role}.{rank}.log"
    return ContainerSpec(role=role, rank=rank, index=rank, argv=("x",), env=env, log=log)


@pytest.fixture
def spec():
    return PodSpec(
        name="evjsyn",
        job_id="default",
        mode=Mode.PS,
        log_dir=Path("/srv/log"),
        containers=(
            container(Role.SERVER, 0, TRAINING_ROLE="PSERVER"),
            container(Role.TRAINER, 0, PADDLE_TRAINER_ID="0", HOME="/root", FLEETRUN_TOKEN="x"),
            container(Role.TRAINER, 1, PADDLE_TRAINER_ID="1"),
        ),
    )


SEED = """\
-----------  Configuration  ----------------------
devices: None
elastic_level: -1
elastic_timeout: 30
gloo_port: 6767
host: None
job_id: default
legacy: False
log_dir: log
log_level: INFO
master: None
max_restart: 3
nnodes: 1
nproc_per_node: None
rank: -1
run_mode: ps  (from --server_num)
server_num: 1  (from --server_num)
servers: \n\
trainer_num: 2  (from --trainer_num)
trainers: \n\
training_script: train.py
training_script_args: []
with_gloo: 0
--------------------------------------------------
"""
"""Seed 002, lines 154 to 177; its run_mode says collective, which the job line after it belies."""


def test_the_configuration_of_the_document():
    resolved = resolve(read(["--server_num=1", "--trainer_num=2", "train.py"]), {})
    assert "\n".join(narrator.configuration_lines(rows(resolved))) + "\n" == SEED


def test_what_is_no_default_says_where_it_comes_from():
    resolved = resolve(
        read(["--nproc-per-node", "4", "train.py", "--lr", "0.1"]), {"PADDLE_LOG_DIR": "/logs"}
    )
    lines = narrator.configuration_lines(rows(resolved))
    assert "nproc_per_node: 4  (from --nproc-per-node)" in lines
    assert "log_dir: /logs  (from PADDLE_LOG_DIR)" in lines
    assert "training_script_args: ['--lr', '0.1']" in lines
    assert "rank: -1" in lines


def test_the_job_and_its_pod(spec):
    line = narrator.job_line("default", Mode.PS, (1, 1))
    assert line == "Job: default, mode ps, replicas 1[1:1], elastic False"
    assert narrator.pod_line("Run", spec, "ready") == "Run Pod: evjsyn, replicas 3, status ready"
    assert (
        narrator.pod_line("Watching", spec, "running") == "Watching Pod: evjsyn, replicas 3, status running"
    )


def test_an_elastic_job():
    line = narrator.job_line("ads", Mode.COLLECTIVE, (2, 4))
    assert line == "Job: ads, mode collective, replicas 4[2:4], elastic True"


def test_a_table_for_the_first_of_each_role(spec):
    lines = narrator.environment_tables(spec)
    heads = [line for line in lines if line.startswith("Local")]
    assert heads == [
        "Local ps start 1 processes. First process distributed environment info (Only For Debug):",
        "Local trainer start 2 processes. First process distributed environment info (Only For Debug):",
    ]
    text = "\n".join(lines)
    assert "PADDLE_TRAINER_ID" in text
    assert text.count("Distributed Envs") == 2
    assert "HOME" not in text, "only what the launcher sets"
    assert MASK in text


def test_the_tables_have_straight_edges(spec):
    table = [line for line in narrator.environment_tables(spec) if line.startswith("    ")]
    assert {len(line) for line in table} == {4 + 89}
    assert table[0] == "    +" + "=" * 87 + "+"


def test_a_long_value_shows_its_end(spec):
    endpoints = ",".join(f"127.0.0.1:{port}" for port in range(6000, 6064))
    env = {"PADDLE_TRAINER_ENDPOINTS": endpoints}
    long = PodSpec(
        name="x",
        job_id="x",
        mode=Mode.PS,
        log_dir=spec.log_dir,
        containers=(container(Role.TRAINER, 0, **env),),
    )
    (row,) = [line for line in narrator.environment_tables(long) if "PADDLE_TRAINER_ENDPOINTS" in line]
    assert "... " in row
    assert row.rstrip(" |").endswith("127.0.0.1:6063")
    assert len(row) == 93

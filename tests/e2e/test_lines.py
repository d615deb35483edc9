"""The lines of the documents that fleetrun takes after, as they stand there."""

import re
from typing import Any

import pytest

from tests.support.command import Fleetrun

STAMP = r"LAUNCH INFO \d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


def lines_of(launch_err: str) -> list[str]:
    return [re.sub(STAMP, "", line) for line in launch_err.splitlines()]


def at_wide_terminal(fleetrun: Fleetrun, *words: str, **options: Any) -> list[str]:
    launch, _ = fleetrun.at_terminal(*words, columns=200, **options)
    assert launch.wait() == 0, launch
    return lines_of(launch.out.replace("\r\n", "\n"))


@pytest.mark.quick
def test_of_a_parameter_server_job(fleetrun: Fleetrun):
    script = fleetrun.script("publish_pid()\nmeet(3)")
    launch = fleetrun.run("--server_num=1", "--trainer_num=2", script)
    assert launch.code == 0
    assert all(re.match(STAMP, line) for line in launch.err.splitlines()), launch
    lines = lines_of(launch.err)
    assert "Job: default, mode ps, replicas 1[1:1], elastic False" in lines
    (ready,) = [line for line in lines if line.startswith("Run Pod: ")]
    (watching,) = [line for line in lines if line.startswith("Watching Pod: ")]
    assert re.fullmatch(r"Run Pod: [a-z]{6}, replicas 3, status ready", ready)
    assert watching == ready.replace("Run", "Watching").replace("ready", "running")
    assert lines.index(ready) < lines.index(watching)


@pytest.mark.quick
def test_of_a_collective_job(fleetrun: Fleetrun):
    launch = fleetrun.run("--nproc_per_node=2", "--job_id=night", fleetrun.script("publish_pid()"))
    assert "Job: night, mode collective, replicas 1[1:1], elastic False" in lines_of(launch.err)


def test_five_lines_say_what_runs_where_and_with_which_settings(fleetrun: Fleetrun):
    script = fleetrun.script("publish_pid()\nmeet(3)\nprint('its first line')")
    words = ("--server_num=1", "--trainer_num=2", "--display", "plain")
    env = {"PADDLE_MAX_RESTART": "0", "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
    lines = at_wide_terminal(fleetrun, *words, script, env=env)
    *opening, end = [line for line in lines if "no process listened" not in line and "its first" not in line]
    assert len(opening) == 5, lines
    pod = opening[3].split()[2].rstrip(",")
    assert opening[1] == f"1 server, 2 trainers of train.py on CPU; logs: log/default.{pod}.*.log"
    assert opening[2] == (
        "Settings: display=plain, max_restart=0 (PADDLE_MAX_RESTART), server_num=1, trainer_num=2 "
        "(-v shows more)"
    )
    assert end.startswith("Pod completed: ")


def test_a_plain_launch_has_nothing_to_say_of_settings(fleetrun: Fleetrun):
    lines = at_wide_terminal(fleetrun, fleetrun.script(""), env={"NO_COLOR": "1", "TERM": "dumb"})
    assert [line.partition(":")[0].split()[0] for line in lines] == ["Job", "1", "Run", "Watching", "Pod"]


def test_quiet_shows_the_script_and_errors_only(fleetrun: Fleetrun):
    well = fleetrun.run("-q", fleetrun.script("print('hello')"))
    assert (well.code, well.out, well.err) == (0, "hello\n", "")
    badly = fleetrun.run("--quiet", "--max_restart", "0", fleetrun.script("print('hello')\nsys.exit(3)"))
    assert badly.out == "hello\n"
    assert "First failure: trainer 0 exited with code 3" in badly.err
    assert "LAUNCH INFO" not in badly.err


def test_the_banner_has_every_setting_and_says_where_it_came_from(fleetrun: Fleetrun):
    script = fleetrun.script("")
    words = ("--max_restart", "2", "--nproc_per_node", "2", script, "--lr", "1")
    launch = fleetrun.run(*words, env={"PADDLE_JOB_ID": "night"})
    lines = lines_of(launch.err)
    first = lines.index("-----------  Configuration  ----------------------")
    last = lines.index("-" * 50)
    rows = lines[first + 1 : last]
    assert rows == sorted(rows)
    for row in (
        "devices: None",
        "elastic_level: -1",
        "elastic_timeout: 30",
        "gloo_port: 6767",
        "host: None",
        "job_id: night  (from PADDLE_JOB_ID)",
        "legacy: False",
        "log_dir: log",
        "log_level: INFO",
        "master: None",
        "max_restart: 2  (from --max_restart)",
        "nnodes: 1",
        "nproc_per_node: 2  (from --nproc_per_node)",
        "rank: -1",
        "run_mode: collective",
        "server_num: None",
        "servers: ",
        "trainer_num: None",
        "trainers: ",
        "training_script: train.py",
        "training_script_args: ['--lr', '1']",
        "with_gloo: 1",
    ):
        assert row in rows, row


def test_the_table_of_environments_when_debugging(fleetrun: Fleetrun):
    words = ("--server_num=1", "--trainer_num=2", "--log_level")
    script = fleetrun.script("publish_pid()\nmeet(3)")
    launch = fleetrun.run(*words, "debug", script, env={"AWS_SECRET_ACCESS_KEY": "sekrit"})
    assert "Local ps start 1 processes. First process distributed environment info" in launch.err
    assert "Local trainer start 2 processes. First process distributed environment info" in launch.err
    rows = [line for line in launch.err.splitlines() if line.startswith("    ")]
    found = dict(row.strip().partition("=")[::2] for row in rows)
    assert found["TRAINING_ROLE"] == "TRAINER"  # of the second table
    assert found["PADDLE_TRAINERS_NUM"] == "2"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", found["PADDLE_PSERVERS_IP_PORT_LIST"])
    assert "sekrit" not in launch.err
    quiet = fleetrun.script("", "quiet.py")  # not the same: it would meet those of the first launch
    assert "Local trainer" not in fleetrun.run(*words, "info", quiet).err


def test_levels_say_less_and_less(fleetrun: Fleetrun):
    script = fleetrun.script("if ATTEMPT == 0: sys.exit(3)\nprint('out')")
    said = [
        fleetrun.run("--log_level", level, script).err
        for level in ("debug", "info", "warning", "error", "critical")
    ]
    lines = [len(text.splitlines()) for text in said]
    assert lines == sorted(lines, reverse=True)
    assert "Configuration" not in said[2]
    assert "restart 1 of 3" in said[3]
    assert said[4] == ""


def test_both_ways_to_call_it_are_the_same(fleetrun: Fleetrun):
    import sys
    from pathlib import Path

    program = Path(sys.executable).with_name("fleetrun")
    assert program.exists(), "the console script is installed with the package"
    script = fleetrun.script("tell('here')")
    launch = fleetrun.run("--nproc_per_node", "2", script, command=(str(program),))
    assert launch.code == 0
    assert len(launch.told("here")) == 2

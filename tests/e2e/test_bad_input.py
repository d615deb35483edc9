"""Section 7: every mistake is told in a few clear lines, with the right exit code, and nothing starts."""

import os
import stat
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch

SERVERS = ("--servers", "127.0.0.1:6170")
TRAINERS = ("--trainers", "127.0.0.1:6171")


def check_refused(fleetrun: Fleetrun, launch: Launch, code: int, *said: str) -> None:
    assert launch.code == code, launch
    lines = launch.err.splitlines()
    assert lines[0].startswith("fleetrun: error: "), launch
    assert len(lines) <= 3, launch
    for text in said:
        assert text in launch.err, launch
    assert "Traceback" not in launch.err
    assert launch.out == ""
    assert not launch.news
    assert not list(fleetrun.folder.rglob("*.log"))


# what was typed before the script, and parts of the answer
WORDS: list[tuple[tuple[str, ...], tuple[str, ...]]] = [
    (("--nproc_per_node", "0"), ("--nproc_per_node", "0")),
    (("--nproc_per_node", "-1"), ("--nproc_per_node",)),
    (("--nproc_per_node", "abc"), ("--nproc_per_node", "abc")),
    (("--nproc_per_node", "1.5"), ("--nproc_per_node", "1.5")),
    (("--nproc_per_node", "100000"), ("--nproc_per_node", "100000")),
    (("--nproc_per_node", "gpux"), ("--nproc_per_node", "gpux", "gpu")),
    (("--nproc_per_node", ""), ("--nproc_per_node",)),
    (("--server_num", "0"), ("--server_num",)),
    (("--trainer_num", "-3"), ("--trainer_num",)),
    (("--worker_num", "many"), ("--worker_num", "many")),
    (("--server_num", "4000", "--trainer_num", "4000"), ("--server_num 4000", "--trainer_num 4000")),
    (("--gpus", "0,0"), ("--gpus", "0,0", "twice")),
    (("--gpus", "0,x y"), ("--gpus", "0,x y")),
    (("--gpus", "0,1,2", "--nproc_per_node", "2"), ("--gpus 0,1,2", "--nproc_per_node 2")),
    (("--devices", "0", "--nproc_per_node", "2"), ("--devices 0", "--nproc_per_node 2")),
    (("--gpus", "0", "--xpus", "1"), ("--gpus 0", "--xpus 1")),
    (("--servers", "127.0.0.1", *TRAINERS), ("--servers", "127.0.0.1", "host:port")),
    (("--servers", "127.0.0.1:99999", *TRAINERS), ("--servers", "1 to 65535")),
    (("--servers", "127.0.0.1:1:2", *TRAINERS), ("--servers",)),
    (("--servers", "127.0.0.1:6170,127.0.0.1:6170", *TRAINERS), ("127.0.0.1:6170",)),
    ((*SERVERS, "--trainers", "127.0.0.1:6170"), ("127.0.0.1:6170", "--servers", "--trainers")),
    (("--servers", "192.0.2.7:6170", *TRAINERS), ("127.0.0.1", "192.0.2.7")),
    (("--host", "192.0.2.7"), ("192.0.2.7",)),
    (("--host", "no such host"), ("--host",)),
    (SERVERS, ("--servers", "--trainers")),
    (TRAINERS, ("--trainers", "--servers")),
    (("--run_mode", "foo"), ("--run_mode", "foo")),
    (("--run_mode", "collectiv"), ("collective",)),
    (("--run_mode", "collective", "--server_num", "1"), ("--server_num 1", "--run_mode collective")),
    (("--nproc_per_node", "2", "--server_num", "1"), ("--nproc_per_node 2", "--server_num 1")),
    (("--start_port", "0"), ("--start_port", "0")),
    (("--start_port", "65535", "--nproc_per_node", "4"), ("65535",)),
    (("--port_range", "9000:8000"), ("9000", "8000")),
    (("--max_restart", "-1"), ("--max_restart",)),
    (("--stop_timeout", "soon"), ("--stop_timeout", "soon")),
    (("--timeout", "-5"), ("--timeout",)),
    (("--log_level", "loud"), ("--log_level", "loud")),
    (("--log_rotate", "much"), ("--log_rotate", "much")),
    (("--follow", "trainr"), ("--follow", "trainr", "trainer")),
    (("--job_id", "../../etc/passwd"), ("--job_id",)),
    (("--nnodes", "2:1"), ("--nnodes", "2:1")),
    (("--nnodes", "2", "--rank", "1"), ("--rank 1", "--master")),
    (("--ips", "192.0.2.8,192.0.2.9"), ("127.0.0.1", "192.0.2.8, 192.0.2.9", "--host")),
    (("--nproc_pre_node", "2"), ("--nproc_pre_node", "--nproc_per_node")),
    (("--auto_tuner_json", "x"), ("--auto_tuner_json",)),
    (("--legacy",), ("--legacy",)),
    (("--metrics_host", "0.0.0.0"), ("--metrics_host", "--metrics_port")),
    (("--log_dir", ""), ("--log_dir",)),
]


SOME = [
    pytest.param(*row, id=" ".join(row[0])[:40], marks=() if number % 6 == 0 else pytest.mark.thorough)
    for number, row in enumerate(WORDS)
]
"""All of them take the same path; tests/envs has what each option refuses."""


@pytest.mark.parametrize(("words", "said"), SOME)
def test_options(fleetrun: Fleetrun, words: tuple[str, ...], said: tuple[str, ...]):
    launch = fleetrun.run(*words, fleetrun.script("tell('started')"))
    check_refused(fleetrun, launch, 2, *said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PADDLE_NPROC_PER_NODE", "two"),
        ("PADDLE_NNODES", "x:y"),
        ("PADDLE_SERVER_NUM", "-1"),
        ("PADDLE_LOG_LEVEL", "noisy"),
        ("FLAGS_START_PORT", "70000"),
        ("PORT_RANGE", "8000"),
        ("FLEETRUN_STOP_TIMEOUT", "-1"),
        ("PADDLE_MAX_RESTART", "often"),
        ("POD_IP", "192.0.2.9"),
    ],
)
def test_variables_are_named_like_options(fleetrun: Fleetrun, name: str, value: str):
    launch = fleetrun.run(fleetrun.script("tell('started')"), env={name: value})
    check_refused(fleetrun, launch, 2, *([] if name == "POD_IP" else [name]), value)


def test_no_words_at_all(fleetrun: Fleetrun):
    launch = fleetrun.run()
    assert launch.code == 2
    assert launch.err.startswith("usage: fleetrun ")


def test_no_script(fleetrun: Fleetrun):
    check_refused(fleetrun, fleetrun.run("--nproc_per_node", "2"), 2, "script")


@pytest.mark.quick
def test_a_script_that_is_not_there(fleetrun: Fleetrun):
    fleetrun.script("tell('started')", "train.py")
    launch = fleetrun.run("trian.py")
    check_refused(fleetrun, launch, 127, "trian.py", "train.py")


def test_a_program_that_is_not_there(fleetrun: Fleetrun):
    check_refused(fleetrun, fleetrun.run("./nothing"), 127, "./nothing")
    check_refused(fleetrun, fleetrun.run("no-such-program"), 127, "no-such-program", "PATH")


def test_a_module_that_is_not_there(fleetrun: Fleetrun):
    check_refused(fleetrun, fleetrun.run("-m", "no_such_module.train"), 127, "no_such_module")


@pytest.mark.parametrize("name", ["folder", "folder.py"])
def test_a_directory(fleetrun: Fleetrun, name: str):
    (fleetrun.folder / name).mkdir()
    check_refused(fleetrun, fleetrun.run(f"./{name}"), 126, f"./{name}", "directory")


def test_a_script_that_is_not_executable(fleetrun: Fleetrun):
    (fleetrun.folder / "train.sh").write_text("#!/bin/sh\necho started\n")
    launch = fleetrun.run("./train.sh")
    check_refused(fleetrun, launch, 126, "chmod +x ./train.sh")


def test_a_script_that_cannot_be_read(as_nobody: Fleetrun):
    script = as_nobody.folder / as_nobody.script("tell('started')")
    script.chmod(stat.S_IWUSR)
    check_refused(as_nobody, as_nobody.run("train.py"), 126, "train.py", "ermission denied")


@pytest.mark.parametrize(
    "content", [b"\x7fELF garbage", b"echo no first line\n", b"#!/no/such/interpreter\n"]
)
def test_a_program_that_the_kernel_cannot_run(fleetrun: Fleetrun, content: bytes):
    program = fleetrun.folder / "program"
    program.write_bytes(content)
    program.chmod(0o755)
    launch = fleetrun.run("--nproc_per_node", "4", "./program")
    assert launch.code == 126, launch
    assert "fleetrun: error: " in launch.err
    assert "./program" in launch.err
    assert "Traceback" not in launch.err


def test_a_pre_hook_that_is_not_there(fleetrun: Fleetrun):
    launch = fleetrun.run("--elastic_pre_hook", "no-such-hook", fleetrun.script("tell('started')"))
    assert launch.code == 127, launch
    assert "no-such-hook" in launch.err
    assert "Traceback" not in launch.err
    assert not launch.news


def test_a_working_directory_that_is_gone(fleetrun: Fleetrun):
    gone = fleetrun.folder / "gone"
    gone.mkdir()
    script = fleetrun.folder / fleetrun.script("tell('started')")
    launch = fleetrun.run(str(script), prefix=("sh", "-c", f'cd {gone} && rmdir {gone} && exec "$@"', "sh"))
    assert launch.code in (2, 125), launch
    assert "Traceback" not in launch.err
    assert not launch.news
    assert not os.path.lexists(gone)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("trainer:9", ("trainer:9", "trainer:0", "trainer:1")),
        ("ps", ("ps",)),
        ("trainer:0+heter:1", ("heter",)),
    ],
)
def test_following_what_is_not_there(fleetrun: Fleetrun, what: str, said: tuple[str, ...]):
    launch = fleetrun.run("--nproc_per_node", "2", "--follow", what, fleetrun.script("tell('here')"))
    check_refused(fleetrun, launch, 2, "--follow", *said)


def test_a_mistake_leaves_no_log_directory(fleetrun: Fleetrun):
    launch = fleetrun.run("--host", "192.0.2.7", fleetrun.script("tell('here')"))
    check_refused(fleetrun, launch, 2, "192.0.2.7")
    assert not (fleetrun.folder / "log").exists()


def test_a_directory_that_is_gone(fleetrun: Fleetrun):
    command = 'mkdir gone; cd gone; rmdir ../gone; exec "$@"'
    launch = fleetrun.run("-m", "json", prefix=("/bin/sh", "-c", command, "sh"))
    check_refused(fleetrun, launch, 2, "directory")


def test_a_plan_that_cannot_be_written(fleetrun: Fleetrun):
    with Path("/dev/full").open("wb") as full:
        launch = fleetrun.run("--dry_run", fleetrun.script("tell('here')"), stdout=full)
    check_refused(fleetrun, launch, 125, "No space left on device")

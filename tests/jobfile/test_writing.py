"""A launch as a job file is the same launch."""

import contextlib
import dataclasses
import re
import stat
import tomllib
from pathlib import Path

import pytest

from fleetrun.envs.settings import toml, write_job_file
from fleetrun.envs.settings.command_line import EngineValue, read
from fleetrun.envs.settings.options import OPTIONS
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import job_file_parts
from fleetrun.envs.settings.write_job_file import document, save, typed
from fleetrun.errors import UsageError
from tests.jobfile.folder import loaded, resolved

LINES = [
    "train.py",
    "--server_num=1 --worker-num=2 train.py --lr ${LR} $${x}",
    "--gpus=0,1 -m pkg.train",
    "--xpus 0 train.py",
    "--nnodes 2:4 --master h:1 --sort_ip train.py",
    "--master_addr h --master_port 5 --nnodes 2 train.py",
    "--elastic_server h:1 --np 2 train.py",
    "--follow trainer:0 --follow ps --run_mode ps --enable_gpu_log=0 train.py",
    "--scheduler slurm --scheduler_option a=b --scheduler_option c=d+e train.py",
    "--heter_worker_num 1;2 --server_num 1 train.py",
    "--stop_timeout 0.123456789 --timeout 2h --log_rotate 100MB train.py",
    "--no_python train.py",
    "--nnodes 2 --rdzv-id a --rdzv-endpoint h:1 --tee 3 --nproc-per-node xpu --shutdown-timeout 5 train.py",
    "--role w --virtual-local-rank --run-path --local-ranks-filter 0,7 train.txt",
]


@pytest.mark.parametrize("line", LINES)
def test_what_was_typed_comes_back(line):
    typed = resolve(read(line.split()), {"PADDLE_LOG_LEVEL": "ERROR"})
    text = document(typed)
    again = resolved(text)
    assert dataclasses.replace(again.settings, config=None) == typed.settings, text


def test_what_a_job_file_said_comes_back_filled_in():
    text = """
        script = "train.py"
        args = ["${LR}", 'it''s "quoted" \\ $${x}', "\\u0007\\n"]
        stop_timeout = "5s"
        [environment]
        A = "${LR}"
        "b.c d" = "$${HOME}"
        [roles.evaluator]
        on = "each"
        args = []
        environment.X = "y"
        resources = {devices = [0], threads = 2}
        [roles.server]
        count = 2
        script = "serve"
        no_python = true
    """.replace("'it''s", "'its")
    first = resolved(text, environ={"LR": "0.1"})
    second = resolved(document(first))

    def without_places(found):
        roles = tuple(dataclasses.replace(wish, where="") for wish in found.settings.roles)
        return dataclasses.replace(found.settings, roles=roles)

    assert without_places(second) == without_places(first)
    assert second.settings.environment == (("A", "0.1"), ("b.c d", "${HOME}"))
    assert job_file_parts(second.settings) == job_file_parts(first.settings)


def test_what_is_one_machines_or_an_engines_is_not_handed_on():
    said = {"sort_ip": EngineValue("1", "ENGINE")}
    found = resolve(
        read(["--nnodes", "2", "--master", "h:1", "--rank", "1", "--dry_run", "--save", "x", "train.py"]),
        {"PADDLE_MAX_RESTART": "4"},
        lambda environ, but: said,
    )
    rows = document(found).splitlines()
    assert "# rank = 1  # of the node on which it was typed" in rows
    assert "max_restart = 4  # from PADDLE_MAX_RESTART" in rows
    assert not [row for row in rows if "sort_ip" in row or "save" in row or "dry_run" in row]


def test_saving_makes_a_new_file_for_its_owner():
    found = resolve(read(["train.py"]), {})
    save(found, "new.toml")
    assert stat.S_IMODE(Path("new.toml").stat().st_mode) == 0o600
    with pytest.raises(UsageError, match=r"--save new.toml: .*exists"):
        save(found, "new.toml")
    with pytest.raises(UsageError, match=r"--save no/x.toml cannot be written: No such file"):
        save(found, "no/x.toml")
    with pytest.raises(UsageError, match="UTF-8"):
        save(resolve(read(["train.py", "\udcff"]), {}), "bytes.toml")
    assert not Path("bytes.toml").exists()


def test_a_link_is_not_followed():
    Path("link.toml").symlink_to("target.toml")
    with pytest.raises(UsageError, match="already exists"):
        save(resolve(read(["train.py"]), {}), "link.toml")
    assert not Path("target.toml").exists()


@pytest.mark.parametrize(
    "text", ["", "a b", '"', "\\", "\n\t\r\x07\x1b\x7f", "ü 中 \U0001f600", "'''", "#=[]{}"]
)
def test_texts_come_back(text):
    assert loaded(f"args = [{toml.value(text)}]").args == (text,)


# ---- the one to begin with

NEED_A_PACKAGE = {"export"}  # tests/e2e/test_plugins.py has one


def test_the_file_to_begin_with_is_a_job_file():
    settings = resolved(write_job_file.template("my train.py")).settings
    assert settings == dataclasses.replace(resolve(read(["my train.py"]), {}).settings, config="job.toml")


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - write_job_file.COMMAND_LINE_ONLY - NEED_A_PACKAGE))
def test_each_line_of_it_is_right_when_it_is_taken_in(name):
    row = next(
        row for row in write_job_file.template("x.py").splitlines() if row.startswith(f"# {name} = ")
    ).removeprefix("# ")
    (option,) = loaded(f"script = 'x.py'\n{row}").options
    assert option.option.name == name
    for text in option.texts:
        option.option.parse(text)


def test_its_tables_are_right_when_they_are_taken_in():
    text = write_job_file.template("train.py")
    tables = text[text.index("# ---- Values of") :].replace("# [", "[").splitlines()
    rows = [re.sub(r"^# (\w+ = )", r"\1", row) for row in tables]
    file = loaded("script = 'x.py'\n" + "\n".join(rows))
    assert [str(wish.role) for wish in file.roles] == ["trainer", "ps", "evaluator"]
    assert dict(file.environment) == {"NCCL_DEBUG": "WARN"}


AROUND = (
    [], ["--server_num=1", "--trainer_num=1"], ["--nnodes=2"], ["--metrics_port=0"], ["--scheduler=slurm"],
    ["--scheduler=kubernetes"], ["--run_mode=rpc"], ["--heter_worker_num=1;2", "--server_num=1"],
    ["--notify=command:true"],
    ["--servers=10.0.0.1:6170,10.0.0.2:6170"], ["--trainers=10.0.0.1:6180,10.0.0.2:6180"],
)  # fmt: skip
"""One of these makes sense of almost every option."""
ODD = (
    "a b",
    "${X}",
    "$${X}",
    "é☃ 🐍",
    "'\"\\",
    "a\nb",
    "--x",
    "#",
    "007",
    "1",
    "0.5",
    "true",
    "\x1b[31m",
    "a,b;c:d",
)


@pytest.mark.parametrize(
    "name",
    sorted(OPTIONS.keys() - write_job_file.COMMAND_LINE_ONLY - NEED_A_PACKAGE),
)
def test_whatever_an_option_is_given_comes_back(name):
    """Also what means something to TOML, or in job files. Of one machine's own options nothing does."""
    example = tomllib.loads(f"x = {write_job_file.example(OPTIONS[name])}")["x"]
    texts = sorted({*ODD, *OPTIONS[name].choices, *_as_typed(example)})
    accepted = [found for text in texts if (found := _accepted(f"--{name}={text}")) is not None]
    assert accepted or name in ("module", "no_python", "image"), "these take no text, or need a cluster"
    own = {"config": None, "notify": ()} | (
        {name: OPTIONS[name].default} if name in ("rank", "host", "nic") else {}
    )
    for found in accepted:
        text = document(found)
        again = resolved(text, environ={"X": "not this"})
        assert dataclasses.replace(again.settings, **own) == dataclasses.replace(found.settings, **own), text


def _as_typed(example):
    if isinstance(example, dict):
        return [f"{key}={value}" for key, value in example.items()]
    if isinstance(example, list):
        joined = [",".join(map(str, part)) if isinstance(part, list) else str(part) for part in example]
        return [*joined, *(joint.join(joined) for joint in ",:;")]
    return [str(example)]


def _accepted(word):
    """The first launch with this option that makes sense."""
    for around in AROUND:
        with contextlib.suppress(UsageError):
            return resolve(read([*around, word, "train.py"]), {})
    return None


@pytest.mark.parametrize(
    ("name", "shown"),
    [("job.toml", "job.toml"), ("my job.toml", "'my job.toml'"), ("-x", "./-x"), ("-", "./-")],
)
def test_how_it_is_started_can_be_typed(name, shown):
    assert typed(name) == shown

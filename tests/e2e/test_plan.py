"""The plan without the start, help and version, and what may be started: scripts, modules, programs."""

import json
import os
import sys
import zipapp

import pytest

from tests.support.command import Fleetrun

TWO = ("--nproc_per_node", "2")
HOSTILE = [
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned",
    "a b",
    "it's",
    'say "hi"',
    "two\nlines",
    "",
    "*",
    "--nproc_per_node",
    "--",
    "-m",
    "%s{0}",
    "中文",
    "\t",
    "\\",
]


@pytest.mark.quick
def test_a_dry_run_prints_the_plan_and_starts_nothing(fleetrun: Fleetrun):
    words = ("--server_num", "1", "--trainer_num", "2", "--dry_run")
    launch = fleetrun.run(*words, fleetrun.script("tell('started')"), "--lr", "0.1 x")
    assert launch.code == 0
    assert "job default, mode ps: 3 processes" in launch.out
    for text in (
        "ps.0  127.0.0.1:",
        "trainer.0  127.0.0.1:",
        "trainer.1  127.0.0.1:",
        "TRAINING_ROLE=PSERVER",
    ):
        assert text in launch.out
    assert f"command  {sys.executable} -u train.py --lr '0.1 x'" in launch.out
    assert launch.err == ""
    assert not launch.news
    assert not (fleetrun.folder / "log").exists()


def test_a_dry_run_as_json(fleetrun: Fleetrun):
    launch = fleetrun.run(*TWO, "--dry_run", "--json", "--job_id", "x", fleetrun.script(""), "a")
    plan = json.loads(launch.out)
    assert (plan["job"], plan["mode"], plan["replicas"]) == ("x", "collective", 2)
    first, second = plan["containers"]
    assert (first["name"], first["role"], first["rank"]) == ("trainer.0", "trainer", 0)
    assert second["command"] == [sys.executable, "-u", "train.py", "a"]
    assert second["environment"]["RANK"] == "1"
    assert second["environment"]["PADDLE_TRAINER_ENDPOINTS"] == f"{first['endpoint']},{second['endpoint']}"
    assert second["log"] == str(fleetrun.folder / "log" / f"x.{plan['pod']}.trainer.1.log")


def test_what_the_plan_says_is_what_a_script_gets(fleetrun: Fleetrun):
    script = fleetrun.script("import json\ntell(json.dumps(dict(os.environ)))")
    plan = json.loads(fleetrun.run("--dry_run", "--json", script).out)["containers"][0]["environment"]
    found = json.loads(fleetrun.run(script).news[0].partition(" ")[2])
    assert plan.keys() - found.keys() == {"FLEETRUN_PROBE_SOCKET"}  # the probe takes it away
    same = {name for name in plan if plan[name] == found.get(name)}
    assert plan.keys() - same <= {
        "POD_NAME", "FLEETRUN_CONTAINER", "FLEETRUN_MASTER", "FLEETRUN_ERROR_FILE", "TORCHELASTIC_ERROR_FILE",
        "FLEETRUN_NOTICE", "FLEETRUN_PROGRESS", "FLEETRUN_MEMORY", "FLEETRUN_PROBE_SOCKET", "PYTHONPATH",
        "MASTER_PORT", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT",
    }  # fmt: skip


@pytest.mark.quick
def test_help_and_version(fleetrun: Fleetrun):
    launch = fleetrun.run("--help", env={"COLUMNS": "80"})
    assert launch.code == 0
    assert max(map(len, launch.out.splitlines())) <= 80
    for word in ("--nproc_per_node", "--server_num", "--max_restart", "exit-codes"):
        assert word in launch.out
    launch = fleetrun.run("--version")
    assert launch.code == 0
    assert launch.out.startswith("fleetrun 0.")
    assert launch.err == ""


def test_a_module(fleetrun: Fleetrun):
    package = fleetrun.folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    launch = fleetrun.run("-m", "package.train", "-m", "x")
    assert launch.code == 0, launch
    assert launch.out == "__main__ package ['-m', 'x']\n"


def test_a_program(fleetrun: Fleetrun):
    launch = fleetrun.run(*TWO, "--follow", "all", "echo", "hi", "$HOME")
    assert launch.code == 0
    assert sorted(launch.out.splitlines()) == ["trainer.0 | hi $HOME", "trainer.1 | hi $HOME"]


def test_a_folder_and_an_archive_with_a_main(fleetrun: Fleetrun):
    """As `python FOLDER` and torchrun run them."""
    (fleetrun.folder / "app").mkdir()
    (fleetrun.folder / "app" / "__main__.py").write_text("print('its main')")
    zipapp.create_archive(fleetrun.folder / "app", fleetrun.folder / "app.pyz")
    for program in ("app", "app.pyz"):
        launch = fleetrun.run(program)
        assert (launch.code, launch.out) == (0, "its main\n"), launch


def test_a_program_beside_the_command(fleetrun: Fleetrun):
    program = fleetrun.folder / "work"
    program.write_text('#!/bin/sh\necho "$0 $1 $RANK"\n')
    program.chmod(0o755)
    assert fleetrun.run("./work", "a").out == "./work a 0\n"
    assert fleetrun.run("work", "b").out == "./work b 0\n"
    assert fleetrun.run(str(program), "c").out == f"{program} c 0\n"


def test_no_python_runs_a_file_in_py_as_a_program(fleetrun: Fleetrun):
    program = fleetrun.folder / "tool.py"
    program.write_text("#!/bin/sh\necho shell\n")
    program.chmod(0o755)
    assert fleetrun.run("--no_python", "./tool.py").out == "shell\n"


@pytest.mark.parametrize("way", ["script", "module", "program"])
def test_arguments_reach_the_script_untouched(fleetrun: Fleetrun, way: str):
    script = fleetrun.script("import json\ntell(json.dumps(sys.argv[1:]))")
    words = {
        "script": (script,),
        "module": ("-m", "train"),
        "program": (sys.executable, script),
    }[way]
    launch = fleetrun.run("--log_level", "debug", *words, *HOSTILE)
    assert launch.code == 0, launch
    assert json.loads(launch.news[0].partition(" ")[2]) == HOSTILE
    assert not (fleetrun.folder / "pwned").exists()


def test_options_after_the_script_are_the_scripts(fleetrun: Fleetrun):
    launch = fleetrun.run(
        fleetrun.script("tell(*sys.argv[1:])"), "--help", "--nproc_per_node", "0", "--no-such"
    )
    assert launch.code == 0
    assert launch.news == ["trainer.0 --help --nproc_per_node 0 --no-such"]


def test_options_in_every_spelling(fleetrun: Fleetrun):
    for words in (
        ("--nproc-per-node=2",),
        ("--nproc_per_node", "2"),
        ("--server-num", "1", "--worker-num=1"),
    ):
        launch = fleetrun.run(*words, "--dry-run", "--json", fleetrun.script(""))
        assert json.loads(launch.out)["replicas"] == 2


def test_an_empty_script_and_a_name_with_spaces(fleetrun: Fleetrun):
    (fleetrun.folder / "my first script.py").write_text("")
    assert fleetrun.run(*TWO, "my first script.py").code == 0


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_word_that_is_not_utf8(fleetrun: Fleetrun, errors: str):
    """The plan has it as the script gets it; in JSON it is escaped, so that it can be read and used."""
    script, env = fleetrun.script(""), {"PYTHONIOENCODING": f"utf-8:{errors}"}
    launch = fleetrun.run("--dry_run", "--json", script, os.fsdecode(b"\xff"), env=env)
    assert launch.code == 0, launch.err
    assert json.loads(launch.out)["containers"][0]["command"][-1] == os.fsdecode(b"\xff")
    assert fleetrun.run("--dry_run", script, os.fsdecode(b"\xff"), env=env).code == 0

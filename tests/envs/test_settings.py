"""The table of options holds together, and the banner has the rows of the user's documents."""

import dataclasses

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.options import (
    ACTIONS,
    OPTIONS,
    RETIRED,
    SHORTHANDS,
    LaunchSettings,
    Takes,
    by_spelling,
    normal,
)
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import banner, changed

SEED = """\
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
run_mode: ps (--server_num)
server_num: 1 (--server_num)
servers: 
trainer_num: 2 (--trainer_num)
trainers: 
training_script: train.py
training_script_args: []
with_gloo: 1
"""  # noqa: W291  (Paddle's line of an empty list ends in a space)


def rows(argv: list[str], environ: dict[str, str] | None = None) -> dict[str, tuple[str, str | None]]:
    return {name: (text, origin) for name, text, origin in banner(resolve(read(argv), environ or {}))}


def test_the_banner_of_the_documents_command():
    resolved = resolve(read(["--server_num=1", "--trainer_num=2", "train.py"]), {})
    lines = [
        f"{name}: {text}" + (f" ({origin})" if origin else "") for name, text, origin in banner(resolved)
    ]
    assert "\n".join(lines) + "\n" == SEED


def test_the_banner_says_where_a_value_came_from_and_shows_what_else_was_given():
    got = rows(
        ["--gpus=0,1", "--follow", "ps", "x.py", "--lr", "1"], {"PADDLE_NNODES": "1:1", "PORT_RANGE": "5:9"}
    )
    assert got["devices"] == ("0,1", "--gpus")
    assert got["nnodes"] == ("1", "PADDLE_NNODES")
    assert got["port_range"] == ("5:9", "PORT_RANGE")
    assert got["follow"] == ("ps", "--follow")
    assert got["training_script_args"] == ("['--lr', '1']", None)
    assert "stop_timeout" not in got


def test_only_what_differs_from_the_defaults():
    line = ["--max_restart", "3", "--gpus=0", "--log_dir", "log", "--nnodes=2", "--job_id", "x", "t.py", "-v"]
    line[:0] = ["--elastic_level", "0", "--save", "j.toml"]
    found = changed(resolve(read(line), {"FLEETRUN_TIMEOUT": "9"}))
    assert found == [
        ("devices", "0", "--gpus"),
        ("nnodes", "2", "--nnodes"),
        ("on_node_loss", "wait", "--elastic_level"),
        ("timeout", "9", "FLEETRUN_TIMEOUT"),
    ]


@pytest.mark.parametrize(
    ("words", "level", "display"),
    [
        (["-v"], "DEBUG", "auto"),
        (["-q"], "ERROR", "plain"),
        (["--quiet", "--verbose"], "DEBUG", "plain"),
        (["--quiet=0"], "INFO", "auto"),
        (["--display", "json", "--log_level", "warning", "-q"], "WARNING", "json"),
    ],
)
def test_short_words_for_how_much_is_shown(words, level, display):
    resolved = resolve(read([*words, "x.py"]), {"PADDLE_LOG_LEVEL": "", "FLEETRUN_DISPLAY": ""})
    assert (resolved.settings.log_level, resolved.settings.display) == (level, display)


def test_another_launch_gets_what_they_stand_for():
    resolved = resolve(read(["-q", "x.py"]), {"FLEETRUN_DISPLAY": "live"})
    assert set(resolved.words.values()) == {"--log_level=ERROR", "--display=plain"}
    assert resolved.origins["display"] == "-q"


def test_lists_in_the_banner_are_written_as_they_are_typed():
    got = rows(["--servers", "a:1,b:1", "--trainers", "a:2", "--heter_workers", "a:3;b:3,b:4", "x.py"])
    assert got["servers"][0] == "a:1,b:1"
    assert got["heter_workers"][0] == "a:3;b:3,b:4"


def test_every_field_but_the_script_and_what_follows_from_others_is_an_option():
    fields = {field.name for field in dataclasses.fields(LaunchSettings)}
    assert fields - set(OPTIONS) == {
        "script",
        "script_args",
        "device_kind",
        "environment",
        "roles",
        "script_in_job_file",
    }


def test_a_spelling_means_one_option():
    options = [*OPTIONS.values(), *SHORTHANDS.values(), *ACTIONS.values()]
    spellings = [word for option in options for word in (*option.spellings, option.short) if word]
    assert len(spellings) == len(set(spellings)) == len(by_spelling(options))
    assert not set(spellings) & set(RETIRED)
    assert all(normal(word) == word for word in spellings if not word.startswith("-"))


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS.keys())
def test_an_option_says_what_a_person_needs(option):
    assert option.help.endswith(".")
    assert bool(option.metavar) is (option.takes is Takes.VALUE)
    assert (
        option.choices == ()
        or option.parse(option.choices[0]) == option.choices[0]
        or option.name == "with_gloo"
    )

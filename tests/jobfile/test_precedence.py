"""Who wins: what was typed, then variables, then job files, then defaults; and what is said about it."""

import pytest

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.settings.command_line import EngineValue, read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import agreed, banner, words
from tests.jobfile.folder import loaded, refusal, resolved

SCRIPT = 'script = "train.py"\nargs = ["--lr", "1"]\n'


@pytest.mark.parametrize(
    ("words", "environ", "expected", "origin"),
    [
        ("", {}, 2, "job.toml:3"),
        ("", {"PADDLE_MAX_RESTART": "5"}, 5, "PADDLE_MAX_RESTART"),
        ("--max_restarts 7", {"PADDLE_MAX_RESTART": "5"}, 7, "--max_restarts"),
    ],
)
def test_flags_then_variables_then_the_file(words, environ, expected, origin):
    found = resolved(SCRIPT + "max_restart = 2", words, environ)
    assert (found.settings.max_restart, found.origins["max_restart"]) == (expected, origin)


def test_a_value_that_is_overruled_is_still_checked():
    assert "job.toml:3: max_restart" in refusal(SCRIPT + "max_restart = -1", "--max_restart 1").message


def test_the_file_counts_more_than_an_engine():
    file = loaded("script = 'x.py'\nmax_restart = 2")
    said = {"max_restart": EngineValue("9", "ENGINE_A"), "sort_ip": EngineValue("1", "ENGINE_B")}
    found = resolve(read(["--config", "job.toml"]), {}, lambda environ, but: said, file)
    assert (found.settings.max_restart, found.settings.sort_ip) == (2, True)
    assert found.engine == {"sort_ip"}


MODES = [
    ("server_num = 1", "", {}, Mode.PS, []),
    ("run_mode = 'rpc'", "", {}, Mode.RPC, []),
    ("run_mode = 'rpc'", "--server_num 2", {}, Mode.PS, ["run_mode = rpc (job.toml:3) is ignored"]),
    (
        "run_mode = 'rpc'",
        "",
        {"PADDLE_SERVER_NUM": "2"},
        Mode.PS,
        ["run_mode = rpc (job.toml:3) is ignored"],
    ),
    (
        "server_num = 1",
        "--nproc_per_node 2",
        {},
        Mode.COLLECTIVE,
        ["server_num = 1 (job.toml:3) is ignored"],
    ),
    ("nproc_per_node = 2", "--server_num 1", {}, Mode.PS, ["nproc_per_node = 2 (job.toml:3) is ignored"]),
    ("run_mode = 'ps-heter'\nheter_worker_num = 1", "--server_num 2", {}, Mode.PS_HETER, []),
    ("run_mode = 'rpc'", "--run_mode ps", {}, Mode.PS, []),
    ("run_mode = 'rpc'", "", {"PADDLE_RUN_MODE": "ps"}, Mode.PS, []),
]


@pytest.mark.parametrize(("text", "words", "environ", "mode", "notices"), MODES)
def test_the_mode(text, words, environ, mode, notices):
    found = resolved(SCRIPT + text, words, environ)
    assert found.settings.run_mode is mode
    assert len(found.notices) == len(notices)
    assert all(told.startswith(notice) for told, notice in zip(found.notices, notices, strict=True))


def test_of_two_that_exclude_each_other_the_file_gives_way():
    found = resolved(SCRIPT + "start_port = 7000", "--port_range 5000:6000")
    assert (found.settings.start_port, found.settings.port_range) == (None, (5000, 6000))
    assert found.notices == ("start_port = 7000 (job.toml:3) is ignored: --port_range 5000:6000 was given",)
    assert "exclude each other" in refusal(SCRIPT + "start_port = 7000\nport_range = '5000:6000'").message


def test_a_typed_script_takes_the_place_of_the_files_with_all_that_belongs_to_it():
    text = SCRIPT + "module = true\n[roles.trainer]\nscript = 't.py'\n[roles.evaluator]\nscript = 'e.py'"
    filed, typed = resolved(text), resolved(text, "other.py a b")
    assert filed.settings.module
    assert filed.settings.role_settings(Role.TRAINER).script == "t.py"
    assert (typed.settings.script, typed.settings.script_args) == ("other.py", ("a", "b"))
    assert not typed.settings.module
    assert typed.settings.role_settings(Role.TRAINER).script is None
    assert typed.settings.role_settings(Role.EVALUATOR).script == "e.py"


SCRIPTS = [
    ("[roles.trainer]\nscript = 't.py'\nargs = ['a']", "t.py", ("a",)),
    ("[roles.trainer]\nscript = 't.py'\n[roles.server]\ncount = 1\nscript = 's.py'", "t.py", ()),
]


@pytest.mark.parametrize(("text", "script", "args"), SCRIPTS)
def test_roles_with_scripts_of_their_own_need_no_other(text, script, args):
    settings = resolved(text).settings
    assert (settings.script, settings.script_args) == (script, args)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job_id = 'x'", "the script is missing"),
        ("server_num = 1\n[roles.server]\nscript = 's.py'", "the script is missing"),
        ("server_num = 1\n[roles.trainer]\nscript = 't.py'", "[roles.server] has none"),
        ("[roles.trainer]\nscript = 't.py'\n[roles.evaluator]", "[roles.evaluator] has none"),
    ],
)
def test_a_role_without_a_script(text, message):
    assert message in refusal(text).message


def test_roles_that_the_mode_does_not_have_are_left_out_when_it_was_typed():
    found = resolved(SCRIPT + "[roles.server]\nscript = 's.py'\ncount = 1", "--run_mode collective")
    assert found.settings.roles == ()
    assert found.notices[-1] == "job.toml:3: [roles.server] is ignored: the mode is collective"
    by_kind = resolved(SCRIPT + "[roles.server]\nscript = 's.py'", "--nproc_per_node 2")
    assert by_kind.settings.roles == ()


def test_the_banner_says_where_things_come_from():
    text = SCRIPT + "max_restart = 1\n[environment]\nA = 's3cret'\n[roles.evaluator.resources]\nthreads = 2"
    rows = {name: (shown, origin) for name, shown, origin in banner(resolved(text))}
    assert rows["max_restart"] == ("1", "job.toml:3")
    assert rows["training_script"] == ("train.py", "job.toml:1")
    assert rows["training_script_args"] == ("['--lr', '1']", "job.toml:2")
    assert rows["environment"] == ("A", "job.toml:5")
    assert rows["roles.evaluator"] == ("threads 2; count 1", "job.toml:6")
    assert rows["config"] == ("job.toml", "--config")
    typed = {name: origin for name, _, origin in banner(resolved(text, "other.py"))}
    assert typed["training_script"] is typed["training_script_args"] is None


def test_the_same_launch_in_words():
    plain = resolved(SCRIPT + "worker_num = 2\nsort_ip = true")
    assert words(plain) == ("--worker_num=2", "--sort_ip", "train.py", "--lr", "1")
    carried = resolved(SCRIPT + "worker_num = 2\n[environment]\nA = '1'")
    assert words(carried) == ("--config=job.toml", "--worker_num=2")
    typed = resolved(SCRIPT + "[environment]\nA = '1'", "other.py")
    assert words(typed) == ("--config=job.toml", "other.py")


def test_what_all_machines_must_agree_on():
    one = agreed(resolved(SCRIPT + "[roles.evaluator]\ncount = 2\non = 'each'\nscript = 'd/e.py'"))
    assert one["roles.evaluator"] == "2 on each node"
    assert one["the script of roles.evaluator"] == "e.py"
    other = agreed(resolved(SCRIPT + "[environment]\nA = 'of this machine'"))
    assert other["roles.evaluator"] == "none"
    typed = agreed(resolve(read(["d/train.py"]), {}))
    assert other == typed


@pytest.mark.parametrize("name", ["restart_window", "elastic_timeout"])
def test_the_times_that_the_leader_applies_for_all_must_be_the_same_everywhere(name):
    """However they are written."""
    long, same, short = (agreed(resolved(f"{SCRIPT}{name} = '{time}'")) for time in ("1h", "60m", "1m"))
    assert long == same
    assert {flag for flag in long if long[flag] != short[flag]} == {f"--{name}"}

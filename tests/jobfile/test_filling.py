"""${NAME}: where it comes from, and what is no variable."""

from pathlib import Path

import pytest

from fleetrun.envs.settings.job_file import escaped
from tests.jobfile.folder import loaded, refusal

VARIABLES = '[variables]\nLR = 0.1\nA = "a-${B}"\nB = "b"\nN = 2\nT = true\n'


@pytest.mark.parametrize(
    ("word", "environ", "expected"),
    [
        ("plain", {}, "plain"),
        ("${LR}", {}, "0.1"),
        ("${LR}", {"LR": "0.2"}, "0.2"),
        ("${LR}", {"LR": ""}, ""),
        ("${A}", {}, "a-b"),
        ("${A}", {"B": "x"}, "a-x"),
        ("${A}/${B}${N}", {}, "a-b/b2"),
        ("${T}", {}, "true"),
        ("${HOME}", {"HOME": "/me"}, "/me"),
        ("${B}", {"B": "${A}"}, "${A}"),
        ("$B $ {B} {B} $", {}, "$B $ {B} {B} $"),
        ("$${B}", {}, "${B}"),
        ("$$${B}", {}, "$${B}"),
        ("%{B}", {}, "%{B}"),
    ],
)
def test_filling_in(word, environ, expected):
    assert loaded(f"script = 's'\nargs = ['{word}']\n{VARIABLES}", environ).args == (expected,)


@pytest.mark.parametrize("text", ["${a}", "$${a}", "$$${a}", "$", "${", "$$", "a${b}$${c}"])
def test_a_text_that_was_escaped_means_itself(text):
    assert loaded(f"args = ['{escaped(text)}']").args == (text,)


def test_here_is_the_folder_of_the_file_where_it_is_written():
    Path("conf").mkdir()
    Path("conf/common.toml").write_text("[environment]\nDATA = '${here}/data'\n")
    file = loaded("include = 'conf/common.toml'\nscript = '${here}/train.py'")
    here = Path.cwd()
    assert file.script == f"{here}/train.py"
    assert dict(file.environment)["DATA"] == f"{here}/conf/data"


def test_variables_fill_in_every_kind_of_value():
    file = loaded(
        "script = '${B}.py'\nnproc_per_node = '${N}'\ndevices = ['${N}']\n"
        "[environment]\nX = '${B}'\n[roles.evaluator]\nargs = ['${B}']\n" + VARIABLES
    )
    assert file.script == "b.py"
    assert [option.texts for option in file.options] == [("2",), ("2",)]
    assert (file.environment, file.roles[0].args) == ((("X", "b"),), ("b",))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("args = ['${NOPE}']", "job.toml:1: args uses ${NOPE}, which is not set", "[variables]"),
        ("args = ['${LRR}']\n[variables]\nLR = 1", "args uses ${LRR}", "Did you mean LR?"),
        ("args = ['${a b}']", "job.toml:1: args has '${a b}'; write a variable as ${NAME}", "$${"),
        ("args = ['${}']", "has '${}'", ""),
        ("args = ['${x']", "has '${'", ""),
        ("args = ['${A}']\n[variables]\nA = '${B}'\nB = '${A}'", "job.toml:3: variables.A is defined", ""),
        ("[variables]\nhere = 'x'", "job.toml:2: variables.here is not a valid variable name", ""),
        ("[variables]\n'a b' = 'x'", "job.toml:2: variables.a b is not a valid", ""),
    ],
)
def test_what_cannot_be_filled_in(text, message, hint):
    error = refusal(text)
    assert message in error.message
    assert hint in (error.hint or "")


@pytest.mark.slow
def test_texts_that_grow_without_end_are_cut():
    lines = ["[variables]", "A0 = 'xxxxxxxxxx'"]
    lines += [f"A{n} = '{f'${{A{n - 1}}}' * 10}'" for n in range(1, 30)]
    assert "is longer than 100000 characters" in refusal("args = ['${A29}']\n" + "\n".join(lines)).message

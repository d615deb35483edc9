"""--env: which variables it sets, which it takes from this environment, and which it leaves there."""

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.show import words
from fleetrun.envs.variables import chosen, looks_secret
from fleetrun.errors import UsageError

ENVIRON = {
    "NCCL_DEBUG": "INFO", "NCCL_IB_HCA": "mlx5", "NCCL_TOKEN": "x", "HF_TOKEN": "y", "HF_HOME": "/hf",
    "PADDLE_NNODES": "2", "RANK": "1", "FLEETRUN_X": "z",
}  # fmt: skip
OPTIONS = {"PADDLE_NNODES": "nnodes"}


@pytest.mark.parametrize(
    ("given", "taken", "left_out", "unused"),
    [
        (["NCCL_*"], {"NCCL_DEBUG", "NCCL_IB_HCA"}, ("NCCL_TOKEN",), ()),
        (["NCCL_*", "NCCL_TOKEN"], {"NCCL_DEBUG", "NCCL_IB_HCA", "NCCL_TOKEN"}, (), ()),
        (["HF_????"], {"HF_HOME"}, (), ()),
        (["[PR]*", "X*"], set(), (), ("[PR]*", "X*")),
        (["nccl_*"], set(), (), ("nccl_*",)),
        (["*_*"], {"NCCL_DEBUG", "NCCL_IB_HCA", "HF_HOME"}, ("HF_TOKEN", "NCCL_TOKEN"), ()),
    ],
)
def test_a_pattern_takes_what_is_no_secret(given, taken, left_out, unused):
    found = chosen(given, ENVIRON, OPTIONS)
    assert dict(found.values) == {name: ENVIRON[name] for name in taken}
    assert (found.left_out, found.unused) == (left_out, unused)
    assert len(found.remarks) == bool(left_out) + len(unused)


@pytest.mark.parametrize(
    ("name", "message"),
    [("NO_SUCH", "NO_SUCH: this variable is not set"), ("RANK", "RANK: fleetrun sets"),
     ("PADDLE_NNODES", "PADDLE_NNODES: this variable sets an option of fleetrun; use --nnodes")],
)  # fmt: skip
def test_a_name_must_be_one_that_can_be_passed_on(name, message):
    with pytest.raises(UsageError, match=message):
        chosen([name], ENVIRON, OPTIONS)


def test_a_value_is_all_after_the_equals_sign_and_the_rest_are_lists():
    found = resolve(read(["--env", "A=1,2=3", "--env", "B,C_*", "--env", "D", "--env", "A=4", "t.py"]), {})
    assert found.settings.environment == (("A", "4"),)
    assert found.settings.env == ("B", "C_*", "D")
    assert words(found) == ("--env=B,C_*,D", "t.py"), "a record has values where those of job files are"
    assert "env" not in resolve(read(["--env=A=", "t.py"]), {}).words


@pytest.mark.parametrize("text", ["", "*", "2A=1", "a b", "A,,B", "A,B=1", "=1"])
def test_what_is_no_variable_is_refused(text):
    with pytest.raises(UsageError, match=r"--env is .* it must be NAME=VALUE"):
        read([f"--env={text}", "t.py"])


@pytest.mark.parametrize("name", ["HF_TOKEN", "RANK", "PADDLE_NNODES"])
def test_a_secret_is_not_typed_and_what_is_fleetruns_is_not_set(name):
    with pytest.raises(UsageError, match=f"--env {name}") as caught:
        resolve(read([f"--env={name}=hunter2", "t.py"]), {})
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "secret"), [("TOKENIZERS_PARALLELISM", False), ("AWS_SECRET_ACCESS_KEY", True)]
)
def test_names_of_secrets(name, secret):
    assert looks_secret(name) is secret

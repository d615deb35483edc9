"""The page of job files: its examples are job files, and say what it says of them."""

import re
from pathlib import Path

import pytest

from fleetrun.envs.contract import Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import _EVALUATOR_KEYS, load_job_file
from fleetrun.envs.settings.resolve import resolve
from fleetrun.errors import UsageError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "job-files.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def settings_of(example, folder):
    path = folder / "job.toml"
    path.write_text(example)
    return resolve(read([]), {}, file=load_job_file(str(path), {}, "--config")).settings


def test_the_first_example_is_a_job_file(tmp_path):
    settings = settings_of(EXAMPLES[0], tmp_path)
    assert (settings.script, settings.script_args) == ("train.py", ("--lr", "0.1"))
    assert (settings.nproc_per_node, settings.max_restart) == (2, 5)


@pytest.mark.parametrize("example", EXAMPLES[1:])
def test_examples_with_all_parts_are_job_files(example, tmp_path):
    settings = settings_of(example, tmp_path)
    assert settings.script_args == ("--lr", "0.1", "--data", "/data/day-1")
    assert (settings.server_num, settings.trainer_num, settings.max_restart) == (2, 4, 5)
    assert settings.role_settings(Role.EVALUATOR).count == 1


def test_every_key_of_a_role_is_told():
    assert len(EXAMPLES) == 2
    keys = {*_EVALUATOR_KEYS, "resources.threads", "resources.devices"} - {"resources", "count"}
    assert [key for key in keys if f"`{key}`" not in PAGE] == []


def test_the_mistake_that_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text("\n\nnproc_per_nod = 2")
    with pytest.raises(UsageError) as caught:
        load_job_file("job.toml", {}, "--config")
    assert f"fleetrun: error: {caught.value.message}" in PAGE
    assert f"\n      {caught.value.hint}\n" in PAGE

"""Job files on their way to an engine's machines: there they say what they said here, and nothing twice."""

import dataclasses
from pathlib import Path

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import load_job_file
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.settings.write_job_file import words_to_carry
from fleetrun.errors import UsageError
from tests.jobfile.folder import resolved

OPTIONS = "script = 'a.py'\nargs = ['${LR}']\nscheduler = 'slurm'\nmax_restart = 2\n"
ROLES = "[environment]\nA = '${LR}'\n[roles.evaluator]\nscript = 'e.py'\n"


def test_what_options_can_say_goes_as_words():
    job = resolved(OPTIONS, environ={"LR": "1"})
    assert words_to_carry(job) == {"scheduler": "--scheduler=slurm", "max_restart": "--max_restart=2"}
    assert not Path("log").exists()


@pytest.mark.parametrize("words", ["", "typed.py x"])
def test_the_rest_goes_as_a_file(words):
    job = resolved(OPTIONS + ROLES, words, environ={"LR": "1"})
    Path("log").mkdir()
    carried = words_to_carry(job)
    path = Path(carried["config"].removeprefix("--config="))
    assert path.parent == Path.cwd() / "log"
    script = () if job.settings.script_in_job_file else (job.settings.script, *job.settings.script_args)
    there = resolve(
        read([word for name, word in carried.items() if name != "scheduler"] + list(script)),
        {"LR": "2"},
        file=load_job_file(str(path), {"LR": "2"}),
    )

    def plain(settings):
        roles = tuple(dataclasses.replace(wish, where="") for wish in settings.roles)
        return dataclasses.replace(settings, roles=roles, config=None, scheduler="local")

    assert plain(there.settings) == plain(job.settings)
    assert words_to_carry(job)["config"] != carried["config"], "each launch has its own"


def test_a_dry_run_writes_nothing():
    assert "config" in words_to_carry(resolved(OPTIONS + ROLES, "--dry_run", environ={"LR": "1"}))
    assert not Path("log").exists()


def test_pods_do_not_see_it():
    with pytest.raises(UsageError, match=r"--config job.toml: \[environment\] and \[roles\]"):
        words_to_carry(resolved(OPTIONS + ROLES, "--scheduler kubernetes --image i", environ={"LR": "1"}))

"""Job files on their way to an engine's machines: there they say what they said here, and nothing twice."""

import dataclasses

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import job_file_of_variable
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import UsageError
from fleetrun.schedulers.base import Submission
from tests.jobfile.folder import resolved
from tests.support.submissions import submission_of

OPTIONS = "script = 'a.py'\nargs = ['${LR}']\nscheduler = 'slurm'\nmax_restart = 2\n"
ROLES = "[environment]\nA = '${LR}'\n[roles.evaluator]\nscript = 'e.py'\n"


def job(text: str, words: str = "", **environ: str) -> Submission:
    environ = {"LR": "1", **environ}
    return submission_of(resolved(text, words, environ=environ), environ)


def test_what_options_can_say_goes_as_words():
    made = job(OPTIONS)
    assert made.command() == ("--max_restart=2", "--", "a.py", "1")
    assert made.carried == {}


@pytest.mark.parametrize("words", ["", "typed.py x", "--env A=2 --env B=${X}"])
def test_the_rest_goes_as_a_variable(words):
    made = job(OPTIONS + ROLES, words)
    environ = {"LR": "2", **made.carried}
    there = resolve(read(made.command()), environ, file=job_file_of_variable(environ))

    def plain(settings):
        roles = tuple(dataclasses.replace(wish, where="") for wish in settings.roles)
        return dataclasses.replace(settings, roles=roles, config=None, scheduler="local", env=())

    assert plain(there.settings) == plain(made.settings)


def test_variables_of_this_environment_go_with_it():
    made = job(OPTIONS, "--env NCCL_*,LR --env HF_TOKEN", NCCL_A="1", NCCL_TOKEN="x", HF_TOKEN="y")
    assert made.carried == {"NCCL_A": "1", "LR": "1", "HF_TOKEN": "y"}


def test_one_that_no_variable_can_hold_is_refused():
    with pytest.raises(UsageError, match=r"the tables of the job file have \d+ bytes; the limit"):
        _ = job(OPTIONS + f"[environment]\nA = '{'x' * 60_000}'\nB = '{'x' * 60_000}'\n").carried


def test_a_job_file_that_is_no_toml_is_named():
    with pytest.raises(UsageError, match=f"^{JOB_FILE}:1: invalid TOML"):
        job_file_of_variable({JOB_FILE: "x"})

"""From a job file to the commands and environments of processes, and what is looked at before any starts."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from fleetrun.errors import LaunchError, UsageError
from fleetrun.launcher.prepare import check_followed, check_program, evaluator_devices
from fleetrun.plan.topology import Host, offer, pod_spec
from fleetrun.pod.spec import ContainerSpec, PodSpec
from tests.jobfile.folder import resolved

JOB = """
script = "train.py"
args = ["--lr", "1"]
server_num = 1
[environment]
A = "all"
B = "all"
[roles.server]
script = "pkg.server"
module = true
[roles.server.environment]
B = "server"
[roles.trainer]
args = []
[roles.trainer.resources]
threads = 3
[roles.evaluator]
script = "eval.py"
"""


def containers(text: str, environ: dict[str, str] | None = None) -> dict[str, ContainerSpec]:
    settings = resolved(text).settings
    host = Host(address="127.0.0.1", cores=8)
    ports = iter(range(7000, 8000))
    offers = [offer(settings, host, lambda port: port or next(ports))]
    spec = pod_spec(settings, host, offers, pod="evjsyn", environ=environ or {})
    return {each.name: each for each in spec.containers}


def test_commands():
    found = containers(JOB)
    assert {name: each.argv[1:] for name, each in found.items()} == {
        "ps.0": ("-u", "-m", "pkg.server"),
        "trainer.0": ("-u", "train.py"),
        "evaluator.0": ("-u", "eval.py"),
    }
    assert found["evaluator.0"].title == "evaluator 0"
    assert found["evaluator.0"].restart_variables == ("PADDLE_RESTART_COUNT",)


def test_environments():
    found = containers(JOB, {"A": "of the shell", "C": "c", "PADDLE_TRAINER_ID": "9"})
    seen = {name: [each.env.get(key) for key in "ABC"] for name, each in found.items()}
    assert seen == {
        "ps.0": ["all", "server", "c"],
        "trainer.0": ["all", "all", "c"],
        "evaluator.0": ["all", "all", "c"],
    }


@pytest.mark.parametrize(
    ("table", "more", "environ", "expected"),
    [
        (None, "", {}, {"ps.0": None, "trainer.0": "3", "evaluator.0": "8"}),
        (None, "", {"OMP_NUM_THREADS": "5"}, {"ps.0": "5", "trainer.0": "3", "evaluator.0": "5"}),
        ("[environment]", "OMP_NUM_THREADS = 6", {"OMP_NUM_THREADS": "5"}, {"ps.0": "6", "evaluator.0": "6"}),
        (
            None,
            "[roles.evaluator.environment]\nOMP_NUM_THREADS = 7",
            {},
            {"trainer.0": "3", "evaluator.0": "7"},
        ),
        (None, "[roles.server.resources]\nthreads = 2", {}, {"ps.0": "2"}),
    ],
)
def test_threads(table, more, environ, expected):
    found = containers(JOB + more if table is None else JOB.replace(table, f"{table}\n{more}"), environ)
    assert {name: found[name].env.get("OMP_NUM_THREADS") for name in expected} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("train.py", "none.py"), "the script none.py does not exist"),
        (("eval.py", "none.py"), "the script none.py does not exist"),
        (("pkg.server", "no_such_package.server"), "the module no_such_package does not exist"),
    ],
)
def test_the_script_of_every_role_is_looked_for(change, message):
    text = JOB.replace("pkg.server", "json.tool")
    for name in ("train.py", "eval.py"):
        Path(name).touch()
    check_program(resolved(text).settings)
    with pytest.raises(LaunchError, match=message):
        check_program(
            resolved(JOB.replace(*change) if "pkg" in change[0] else text.replace(*change)).settings
        )


def test_a_program_is_looked_for_on_the_path_that_it_will_have():
    Path("bin").mkdir()
    Path("bin/run-it").touch(mode=0o755)
    check_program(resolved("script = 'run-it'\n[environment]\nPATH = '${here}/bin'").settings)
    with pytest.raises(LaunchError, match="the program run-it is neither on PATH"):
        check_program(resolved("script = 'run-it'").settings)


TWO = "script = 'x.py'\n[roles.evaluator.resources]\ndevices = [1]"


@pytest.mark.parametrize(
    ("text", "ids", "expected", "warned"),
    [
        (TWO, ("0", "1"), ("1",), 0),
        (TWO, (), (), 1),
        ("script = 'x.py'\n[roles.evaluator]", ("0", "1"), (), 0),
        ("script = 'x.py'", ("0",), (), 0),
    ],
)
def test_devices_of_evaluators(text, ids, expected, warned):
    told: list[str] = []
    assert evaluator_devices(resolved(text).settings, ids, told.append, {}) == expected
    assert len(told) == warned


def test_devices_that_are_not_there():
    with pytest.raises(
        UsageError, match=r"job.toml:2: roles.evaluator.resources.devices 1: gpu 1 does not exist"
    ):
        evaluator_devices(resolved(TWO).settings, ("0",), print, {})


@pytest.mark.parametrize(
    ("follow", "there"), [("evaluator", True), ("evaluator:0,1", True), ("evaluator:2", False)]
)
def test_evaluators_may_be_followed_from_any_machine(follow, there):
    job = resolved(f"script = 'x.py'\nfollow = '{follow}'\n[roles.evaluator]\ncount = 2")
    nobody = PodSpec(
        name="abcdef", job_id="x", mode=job.settings.run_mode, containers=(), log_dir=Path("log")
    )
    with nullcontext() if there else pytest.raises(UsageError, match="has evaluator:0 to evaluator:1"):
        check_followed(job, nobody)


def test_nobody_can_be_followed_who_is_not_there():
    job = resolved("script = 'x.py'\nfollow = 'evaluator'")
    nobody = PodSpec(
        name="abcdef", job_id="x", mode=job.settings.run_mode, containers=(), log_dir=Path("log")
    )
    with pytest.raises(
        UsageError,
        match=r"^job.toml:2: follow evaluator:0: this process does not exist; this job has no evaluator",
    ):
        check_followed(job, nobody)

"""From the words of a launch to what it needs here; what keeps it from starting is a finding."""

import socket
from pathlib import Path

import pytest

from fleetrun.doctor import requirements as plans
from fleetrun.doctor.facts import Verdict
from fleetrun.doctor.requirements import Plan
from fleetrun.envs.contract import Role
from fleetrun.envs.settings import command_line
from fleetrun.envs.settings.options import JobFile, Resolved, RoleSettings
from fleetrun.envs.settings.resolve import resolve
from fleetrun.host.network import Ports

SECRET = "a secret of 24 letters.."


def resolved(*words: str) -> Resolved:
    return resolve(command_line.read((*words, "train.py")), {})


def made(*words: str, script: bool = False, environ: dict[str, str] | None = None) -> Plan:
    ports = Ports()
    try:
        return plans.make_plan(
            resolved(*words), ports, {} if environ is None else environ, names_script=script
        )
    finally:
        ports.close()


def bad(plan: Plan) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in plan.findings if each.verdict is not Verdict.PASS}


@pytest.mark.parametrize(
    ("words", "processes", "trainers", "servers"),
    [
        ((), 1, 1, False),
        (("--nproc_per_node", "3"), 3, 3, False),
        (("--server_num", "2", "--trainer_num", "3"), 5, 3, True),
    ],
)
def test_how_many(words: tuple[str, ...], processes: int, trainers: int, servers: bool) -> None:
    plan = made(*words)
    assert bad(plan) == {}
    assert (plan.wanted.processes, plan.wanted.trainers, plan.wanted.servers) == (
        processes,
        trainers,
        servers,
    )
    assert not plan.wanted.several
    assert plan.wanted.fixed_ports == ()
    assert plan.wanted.ports >= processes


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert bad(made(script=True)) == {"script": Verdict.FAIL}
    (tmp_path / "train.py").touch()
    plan = made(script=True)
    assert [each.check for each in plan.findings] == ["script"]
    assert bad(plan) == {}


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as taken:
        plan = made("--start_port", str(taken.getsockname()[1]))
    assert bad(plan) == {"ports": Verdict.FAIL}
    assert plan.site is not None
    assert plan.wanted.processes == 1, "the rest is known"


def test_ports_by_number_are_told() -> None:
    free = Ports()
    first = free.any()
    free.close()
    plan = made("--start_port", str(first))
    assert bad(plan) or plan.wanted.fixed_ports[0] == first, "unless somebody was faster"


def test_an_address_of_somebody_else() -> None:
    plan = made("--ips", "no-such-host.invalid,neither.invalid")
    assert bad(plan) == {"address": Verdict.FAIL}
    assert plan.host is None


def test_several_machines_without_a_secret() -> None:
    words = ("--nnodes", "2", "--master", "192.0.2.1:6768")
    assert bad(made(*words)) == {"secret": Verdict.WARN}
    assert bad(made(*words, environ={"FLEETRUN_TOKEN": SECRET})) == {}
    assert bad(made("--nnodes", "2", "--master", "127.0.0.1:6768")) == {}
    assert bad(made(*words, environ={"FLEETRUN_TOKEN": "short"})) == {"secret": Verdict.FAIL}


def test_a_secret_that_cannot_be_read(tmp_path: Path) -> None:
    assert bad(made("--token_file", str(tmp_path / "none"))) == {"secret": Verdict.FAIL}


@pytest.mark.parametrize(
    ("words", "module"),
    [
        (("--tensorboard", "runs"), "tensorboard"),
        (("--metrics_port", "9000"), "prometheus_client"),
        (("--nnodes", "2", "--master", "etcd://h:2379"), "etcd3gw"),
    ],
)
def test_packages_that_options_need(words: tuple[str, ...], module: str) -> None:
    settings = resolved(*words).settings
    (finding,) = plans.extras(settings, lambda name: False)
    assert finding.verdict is Verdict.FAIL
    assert module in finding.found
    assert "pip install" in finding.mend
    assert list(plans.extras(settings, lambda name: True)) == []


def test_what_variables_say() -> None:
    plan = made(environ={"OMP_NUM_THREADS": "3", "NCCL_SOCKET_IFNAME": "eth", "GLOO_SOCKET_IFNAME": ""})
    assert plan.wanted.threads == "3"
    assert plan.wanted.socket_names == (("NCCL_SOCKET_IFNAME", "eth"),)


@pytest.mark.parametrize(
    ("wish", "threads"),
    [
        (RoleSettings(role=Role.TRAINER), "3"),
        (RoleSettings(role=Role.TRAINER, threads=2), "2"),
        (RoleSettings(role=Role.TRAINER, environment=(("OMP_NUM_THREADS", "5"),)), "5"),
        (RoleSettings(role=Role.SERVER, threads=2), "3"),
    ],
)
def test_what_a_job_file_says_of_trainers(wish: RoleSettings, threads: str) -> None:
    words = command_line.read(["--server_num", "1", "--trainer_num", "1", "train.py"])
    of_file = resolve(words, {}, file=JobFile(roles=(wish,)))
    ports = Ports()
    try:
        plan = plans.make_plan(of_file, ports, {"OMP_NUM_THREADS": "3"}, names_script=False)
    finally:
        ports.close()
    assert plan.wanted.threads == threads


def test_nothing_stays_reserved() -> None:
    fds = Path("/proc/self/fd")
    before = {each.name for each in fds.iterdir()}
    made("--nproc_per_node", "4")
    assert {each.name for each in fds.iterdir()} <= before

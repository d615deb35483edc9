"""Manifests against the real schemas of the API, and where a pod finds itself."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.job_file import job_file_of_variable
from fleetrun.envs.settings.resolve import resolve
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import LaunchError, UsageError
from fleetrun.pod.guard import Guard, Signals
from fleetrun.schedulers.base import Submission, scheduler
from fleetrun.schedulers.kubernetes import build_manifests, manifests_text, place
from fleetrun.schedulers.placing import place as place_of_any
from tests.support.command import Fleetrun
from tests.support.ports import free_port
from tests.support.submissions import printed, submission

BASE = ("--scheduler=kubernetes", "--image=registry/train:1", "--nnodes=4")
FULL = (
    *BASE, "--gpus=0,1,2,3", "--timeout=2h", "--stop_timeout=30", "--max_restart=2", "--job_id=Big_Job.1",
    "--scheduler_option", "namespace=team", "--scheduler_option", "token_secret=job-token",
    "--scheduler_option", "cpu=8", "--scheduler_option", "memory=32Gi", "--scheduler_option", "shm=8Gi",
)  # fmt: skip
PS = (*BASE, "--server_num=1", "--trainer_num=2", "--stop_timeout=30")
KINDS = ("job", "jobset", "trainjob")


def job(*words: str, kind: str = "job", script: tuple[str, ...] = ("train.py", "--lr", "1")) -> Submission:
    return submission(*words, "--scheduler_option", f"kind={kind}", *script)


def documents(*words: str, kind: str = "job", **more: Any) -> list[dict[str, Any]]:
    made = job(*words, kind=kind, **more)
    return build_manifests(made)


def pod_of(document: dict[str, Any]) -> dict[str, Any]:
    spec = document["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    found: dict[str, Any] = spec["template"]["spec"]
    return found


def environment_of(container: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}


# ---- against the schemas


@pytest.mark.slow
@pytest.mark.kubernetes
@pytest.mark.parametrize(
    "words", [BASE, FULL, PS, (*BASE, "--nnodes=2:4"), (*BASE, "--spares=2", "--env=A=1")]
)
def test_job_and_service_are_what_the_api_takes(words: tuple[str, ...]):
    validate = pytest.importorskip("kubernetes_validate", reason="the dev-k8s extra is not installed")
    for document in documents(*words):
        for version in ("1.31", validate.latest_version()):
            validate.validate(document, version, strict=True)


@pytest.mark.slow
@pytest.mark.kubernetes
@pytest.mark.parametrize("words", [BASE, FULL, PS])
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_jobset_and_trainjob_are_what_their_models_take(words: tuple[str, ...], kind: str):
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="the dev-k8s extra is not installed", exc_type=ImportError
    )
    model = {"jobset": models.JobsetV1alpha2JobSet, "trainjob": models.TrainerV1alpha1TrainJob}[kind]
    (document,) = documents(*words, kind=kind)
    assert lacking(document, model.from_dict(document).to_dict()) == []


def lacking(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What a model dropped, because it does not know it."""
    if isinstance(ours, dict):
        return [
            each
            for name, value in ours.items()
            for each in (
                lacking(value, theirs[name], f"{path}.{name}") if name in theirs else [f"{path}.{name}"]
            )
        ]
    if isinstance(ours, list):
        return [
            each
            for number, value in enumerate(ours)
            for each in lacking(value, theirs[number], f"{path}[{number}]")
        ]
    return [] if str(ours) == str(theirs) else [path]


@pytest.mark.kubernetes
def test_the_pods_of_a_jobset_are_what_the_api_takes():
    validate = pytest.importorskip("kubernetes_validate", reason="the dev-k8s extra is not installed")
    (document,) = documents(*FULL, kind="jobset")
    spec = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
    validate.validate(whole, validate.latest_version(), strict=True)


# ---- what they say


def test_the_first_pod_is_where_they_meet():
    service, main = documents(*BASE)
    name = main["metadata"]["name"]
    assert name == service["metadata"]["name"] == "train"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    pod = pod_of(main)
    assert pod["subdomain"] == name
    environ = environment_of(pod["containers"][0])
    assert environ["FLEETRUN_PLACE_MASTER"] == "train-0.train:6768"
    assert environ["FLEETRUN_PLACE_NNODES"] == "4"
    (jobset,) = documents(*BASE, kind="jobset")
    environ = environment_of(pod_of(jobset)["containers"][0])
    assert environ["FLEETRUN_PLACE_MASTER"] == "train-node-0-0.train:6768"


def test_the_first_pods_serve_the_store_together():
    environ = environment_of(pod_of(documents(*BASE, "--master=embedded:3")[1])["containers"][0])
    assert environ["FLEETRUN_PLACE_MASTER"] == "train-0.train:6768,train-1.train:6768,train-2.train:6768"


def test_what_a_pod_finds_are_its_options():
    environ = environment_of(pod_of(documents(*BASE)[1])["containers"][0])
    texts = {name: value for name, value in environ.items() if isinstance(value, str)}
    found = {name: placed.text for name, placed in place({**texts, "JOB_COMPLETION_INDEX": "3"}).items()}
    assert found == {"nnodes": "4", "rank": "3", "master": "train-0.train:6768", "job_id": "train"}


def test_variables_of_the_job_are_those_of_its_containers():
    environ = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "hunter2"}
    words = (*BASE, "--env=A=$(B)", "--env=C=$$ $D", "--env=NCCL_*,HF_TOKEN")
    made = submission(*words, "train.py", environ=environ)
    secret, _, main = build_manifests(made)
    (container,) = pod_of(main)["containers"]
    found = environment_of(container)
    assert (found["A"], found["C"], found["NCCL_DEBUG"]) == ("$$(B)", "$$$$ $$D", "INFO")
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "train-env", "key": "HF_TOKEN"}}
    assert (secret["metadata"]["name"], secret["stringData"]) == ("train-env", {"HF_TOKEN": "hunter2"})
    assert secret["metadata"]["labels"] == main["metadata"]["labels"], "by which all of a job is deleted"
    assert "--env" not in " ".join(container["command"])
    dry = submission(*words, "--dry_run", "train.py", environ=environ)
    assert "hunter2" not in manifests_text(build_manifests(dry))


def test_what_only_a_job_file_says_of_roles_is_a_variable():
    file = {
        "environment": {"A": "1", "B_KEY": "hunter2"},
        "roles": {"evaluator": {"script": "e.py", "count": 1}},
    }
    made = submission(*BASE, "train.py", job_file=file)
    secret, _, main = build_manifests(made)
    found = environment_of(pod_of(main)["containers"][0])
    assert found["A"] == "1"
    assert found["B_KEY"]["secretKeyRef"]["name"] == secret["metadata"]["name"]
    assert [each.script for each in job_file_of_variable(found).roles] == ["e.py"]
    assert job_file_of_variable(found).environment == ()


def test_a_job_file_with_secrets_of_roles_is_one():
    role = {"script": "e.py", "count": 1, "environment": {"B_TOKEN": "hunter2"}}
    for dry in ((), ("--dry_run",)):
        made = submission(*BASE, *dry, "train.py", job_file={"roles": {"evaluator": role}})
        secret, *others = build_manifests(made)
        assert "hunter2" not in manifests_text(others)
        assert ("hunter2" in secret["stringData"][JOB_FILE]) == (not dry)
    assert environment_of(pod_of(others[-1])["containers"][0])[JOB_FILE] == {
        "secretKeyRef": {"name": "train-env", "key": JOB_FILE}
    }


@pytest.mark.parametrize("name", ["A", "A_TOKEN"])
def test_a_value_that_no_manifest_can_hold_is_refused(name: str):
    made = submission(*BASE, f"--env={name}", "train.py", environ={name: "hunter2\udcff"})
    with pytest.raises(UsageError, match=f"^{name} is not valid UTF-8"):
        build_manifests(made)


def test_a_store_in_etcd_is_where_they_meet_if_given():
    environ = environment_of(pod_of(documents(*BASE, "--master=etcd://e1:2379")[1])["containers"][0])
    assert environ["FLEETRUN_PLACE_MASTER"] == "etcd://e1:2379"


def test_machines_of_a_range_have_no_rank_of_their_own():
    found = place(
        {"FLEETRUN_PLACE_NNODES": "2:4", "FLEETRUN_PLACE_MASTER": "a:1", "JOB_COMPLETION_INDEX": "3"}
    )
    assert sorted(found) == ["master", "nnodes"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_has_the_jobs_words_and_no_dollar_of_kubernetes(kind: str):
    document = documents(*FULL, kind=kind, script=("train.py", "$(HOME)", "a b", "$$", "$HOME"))[-1]
    if kind == "trainjob":
        command = document["spec"]["trainer"]["command"]
    else:
        command = pod_of(document)["containers"][0]["command"]
    assert command[0] == "fleetrun"
    assert command[-5:] == ["train.py", "$$(HOME)", "a b", "$$$$", "$HOME"]
    assert not any(word.startswith(("--nnodes", "--gpus", "--image", "--scheduler")) for word in command)


def test_devices_are_asked_for_by_number():
    container = pod_of(documents(*FULL)[1])["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi", "nvidia.com/gpu": "4"},
        "limits": {"memory": "32Gi", "nvidia.com/gpu": "4"},
    }
    assert "resources" not in pod_of(documents(*BASE)[1])["containers"][0]


def test_pods_have_longer_to_stop_than_fleetrun_takes():
    assert pod_of(documents(*FULL)[1])["terminationGracePeriodSeconds"] > 30
    assert pod_of(documents(*PS)[1])["terminationGracePeriodSeconds"] > 60


@pytest.mark.parametrize("code", [1, 2, 3, 124, 126, 127, 139])
def test_what_was_tried_enough_fails_the_job(code: int):
    assert code not in worth_another_try(*FULL)


@pytest.mark.parametrize("code", [123, 125, 137, 143])
def test_a_lost_machine_is_replaced(code: int):
    assert code in worth_another_try(*FULL)


def test_pods_that_had_no_room_in_time_try_again_unless_it_may_be_the_jobs_limit():
    assert 124 in worth_another_try(*BASE)
    assert 124 not in worth_another_try(*BASE, "--timeout=1h")


def worth_another_try(*words: str) -> list[int]:
    """The codes that do not fail the job at once."""
    spec = documents(*words)[1]["spec"]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (job(*words).settings.max_restart, 0)
    rule = spec["podFailurePolicy"]["rules"][1]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "NotIn")
    codes: list[int] = rule["onExitCodes"]["values"]
    return codes


@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_with_spares_the_job_survives_pods_that_fail_for_good(kind: str):
    """One that is left out for its faults, for example."""
    spec = documents(*BASE, "--spares=2", "--max_restart=1", kind=kind)[-1]["spec"]
    if kind == "jobset":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    assert (spec["completions"], spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (6, 1, 2)
    environment = environment_of(spec["template"]["spec"]["containers"][0])
    assert environment["FLEETRUN_PLACE_NNODES"] == "6", "with the spares"
    assert spec["successPolicy"] == {"rules": [{"succeededCount": 4}]}
    assert "backoffLimit" not in spec


def test_the_secret_is_named_and_never_written():
    made = submission(*FULL, "train.py", token="very-secret-very-secret")
    text = manifests_text(build_manifests(made))
    assert "very-secret" not in text
    container = pod_of(build_manifests(made)[1])["containers"][0]
    assert environment_of(container)["FLEETRUN_TOKEN"] == {
        "secretKeyRef": {"name": "job-token", "key": "token"}
    }


def test_whom_to_notify_comes_out_of_a_secret():
    words = (*BASE, "--notify=https://h/kept-secret", "--notify_on=failure")
    with pytest.raises(UsageError, match="--notify does not reach"):
        documents(*words)
    text = json.dumps(documents(*words, "--scheduler_option", "notify_secret=hooks"))
    assert (
        '{"name": "FLEETRUN_NOTIFY", "valueFrom": {"secretKeyRef": {"name": "hooks", "key": "notify"}}}'
        in text
    )
    assert "--notify_on=failure" in text
    assert "kept-secret" not in text


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "train"),
        (("--job_id=Big_Job.1",), "big-job-1"),
        (("--job_id=7",), "job-7"),
        (("--job_id", "a" * 80), "a" * 48),
    ],
)
def test_names_are_labels_of_dns(words: tuple[str, ...], name: str):
    assert documents(*BASE, *words)[1]["metadata"]["name"] == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scheduler=kubernetes",), "needs --image"),
        ((*BASE, "--scheduler_option", "kind=pod"), "kind=pod: it must be job, jobset or trainjob"),
        (("--scheduler=kubernetes", "--image=i", "--ips=a,b"), "Kubernetes chooses the nodes"),
        ((*BASE, "--nproc_per_node=gpu"), "gives no number of GPUs"),
        ((*BASE, "--npus=0,1"), "Kubernetes resource for a npu"),
    ],
)
def test_what_cannot_be_is_an_error(words: tuple[str, ...], message: str):
    made = submission(*words, "train.py")
    with pytest.raises(UsageError, match=message):
        build_manifests(made)


# ---- the working tree


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("import os\nprint('in', os.getcwd(), os.environ['A'])\n")
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.kubernetes
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_its_archive_is_in_config_maps(project: Path, kind: str):
    validate = pytest.importorskip("kubernetes_validate", reason="the dev-k8s extra is not installed")
    (project / "data").write_bytes(os.urandom(300_000))
    made = documents(*BASE, "--sync=.", kind=kind)
    maps = [each for each in made if each["kind"] == "ConfigMap"]
    assert len(maps) == 2
    for each in maps:
        validate.validate(each, validate.latest_version(), strict=True)
        assert len(json.dumps(each)) < 256 << 10, "kubectl apply keeps a copy in an annotation"
    pod = pod_of(made[-1])
    (volume,) = (each for each in pod["volumes"] if each["name"] == "code")
    names = [each["configMap"]["name"] for each in volume["projected"]["sources"]]
    assert names == [each["metadata"]["name"] for each in maps]


@pytest.mark.slow
def test_a_pod_runs_in_the_tree_that_it_unpacks(project: Path, tmp_path: Path):
    """The command of a container here, with its files at another place."""
    (project / "data").write_bytes(os.urandom(300_000))
    *maps, _, main = documents("--scheduler=kubernetes", "--image=i", "--nnodes=1", "--sync=.", "--env=A=1")
    parts, start = tmp_path / "parts", tmp_path / "start"
    for folder in (parts, start):
        folder.mkdir()
    for each in maps:
        for name, text in each["binaryData"].items():
            (parts / name).write_bytes(base64.b64decode(text))
    container = pod_of(main)["containers"][0]
    where = {"python3": sys.executable, "/etc/fleetrun/code": str(parts)}
    command = [where.get(word, word) for word in container["command"]]
    command[command.index("fleetrun")] = str(Path(sys.executable).with_name("fleetrun"))
    values = {name: value for name, value in environment_of(container).items() if isinstance(value, str)}
    env = {"PATH": os.environ["PATH"], "HOME": "/proc/none", "TMPDIR": str(tmp_path), **values}
    done = subprocess.run(command, env=env, cwd=start, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:1] == ["in"]
    assert f"{tmp_path}/fleetrun-code-{os.getuid()}/" in done.stdout
    assert list((start / "log").glob("*.trainer.0.log"))


def test_one_that_is_too_large_needs_an_image(project: Path):
    (project / "data").write_bytes(os.urandom(1_200_000))
    with pytest.raises(UsageError, match="ConfigMaps can hold 1 MiB") as caught:
        documents(*BASE, "--sync=.")
    assert "image" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="--sync is for kind=job and jobset"):
        documents(*BASE, "--sync=.", kind="trainjob")


# ---- handing over


def test_it_is_printed_as_documents_that_kubectl_takes():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    made = job(*BASE)
    assert scheduler("kubernetes").submit(made) == 0
    assert [each["kind"] for each in yaml.safe_load_all(printed(made))] == ["Service", "Job"]


def test_a_misspelt_option_is_refused():
    with pytest.raises(UsageError, match="knd: kubernetes has no such option; it has apply"):
        scheduler("kubernetes").submit(submission(*BASE, "--scheduler_option", "knd=job", "train.py"))


class Handing:
    """A kubectl of our own that keeps what it is given."""

    def __init__(self, folder: Path, code: int) -> None:
        self.got = folder / "got"
        program = folder / "kubectl"
        program.write_text(
            f'#!/bin/sh\necho "$@" >{self.got}; cat >>{self.got}\necho made; echo no >&2; exit {code}\n'
        )
        program.chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def submit(self, *words: str) -> tuple[int, str]:
        signals = Signals(set())
        try:
            made = submission(
                *words,
                "train.py",
                environ={"PATH": self.path},
                signals=signals,
                guard=Guard.of_this_process(os.getppid()),
            )
            return scheduler("kubernetes").submit(made), printed(made)
        finally:
            signals.close()


def test_with_apply_kubectl_gets_it(tmp_path: Path):
    kubectl = Handing(tmp_path, 0)
    assert kubectl.submit(*BASE, "--scheduler_option", "apply=1") == (0, "made\n")
    assert kubectl.got.read_text().startswith("apply -f -\n")
    assert "completionMode" in kubectl.got.read_text()


def test_what_kubectl_refuses_is_an_error(tmp_path: Path):
    with pytest.raises(LaunchError, match="kubectl did not accept the job: no"):
        Handing(tmp_path, 1).submit(*BASE, "--scheduler_option", "apply=1")


# ---- inside


@pytest.mark.slow
def test_two_pods_find_each_other_with_no_option(fleetrun: Fleetrun):
    """Two launches on this machine with what pods of our Job have in their environment."""
    script = fleetrun.script("tell('is', RANK, os.environ['WORLD_SIZE'], os.environ['PADDLE_JOB_ID'])")
    place = {
        "FLEETRUN_PLACE_NNODES": "2",
        "FLEETRUN_PLACE_MASTER": f"127.0.0.1:{free_port()}",
        "FLEETRUN_PLACE_JOB": "train",
        "POD_IP": "127.0.0.1",
    }
    pods = [fleetrun.start(script, env={**place, "JOB_COMPLETION_INDEX": str(n)}) for n in (1, 0)]
    assert [pod.wait() for pod in pods] == [0, 0], pods
    assert [pod.told("is") for pod in pods] == [["trainer.1 is 1 2 train"], ["trainer.0 is 0 2 train"]]


# ---- Kubeflow's variables


def test_torchruns_variables_of_a_trainjob_are_read():
    environ = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "t-node-0-0.t",
        "PET_MASTER_PORT": "29400",
    }
    assert place_of_any(environ) == {}
    got = resolve(read(["x.py"]), environ, place_of_any)
    assert (got.settings.nnodes, got.settings.rank, got.settings.nproc_per_node) == ((2, 2), 1, 4)
    assert (got.settings.master, got.notices) == ("t-node-0-0.t:29400", ())
    alone = resolve(read(["x.py"]), environ | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, place_of_any)
    assert (alone.settings.master, alone.settings.master_addr, alone.notices) == (None, None, ())

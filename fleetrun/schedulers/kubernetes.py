"""Find this pod's place in a Kubernetes job, and implement `--scheduler kubernetes`.

The manifests of a job are printed or given to kubectl.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from fleetrun.aliases import Document, Environ, Fields, Strings
from fleetrun.envs.contract import TOKEN
from fleetrun.envs.settings.command_line import EngineValue
from fleetrun.envs.settings.options import NOTIFY
from fleetrun.envs.settings.parsing import EMBEDDED, STORE_PORT, byte_size, plural
from fleetrun.envs.variables import JOB_FILE, looks_secret
from fleetrun.errors import LaunchError, UsageError
from fleetrun.frozen import frozen, frozen_by_name
from fleetrun.schedulers import base
from fleetrun.schedulers.base import Submission, excluded_nodes, gpus, has_secrets
from fleetrun.schedulers.tree import Tree, tree_of_job

# ---- The pod of a job


@frozen_by_name
class Pod:
    """A pod of the job."""

    image: str
    command: Strings
    environment: Environ
    resources: Fields
    grace: int
    """In seconds."""
    hidden: tuple[tuple[str, str, str], ...] = ()
    """Secret variables, each as (variable, Secret or empty, key in the Secret)."""
    code: Strings = ()
    """The ConfigMaps with the archive of --sync."""
    python: str | None = None
    """The Python that runs the probes. None: no probes."""
    shm: str = ""
    """Limit of /dev/shm. Empty: no limit."""
    but: Strings = ()
    """Excluded nodes."""

    def spec(self, *, subdomain: str | None) -> Document:
        """Return the pod's spec, with /dev/shm in memory. The default, 64 MB, is too small for data
        loaders.
        """
        memory = {"medium": "Memory"} | ({"sizeLimit": self.shm} if self.shm else {})
        container = self.container()
        container["volumeMounts"] = [{"name": "shm", "mountPath": "/dev/shm"}]
        volumes: list[Document] = [{"name": "shm", "emptyDir": memory}]
        if self.code:
            container["volumeMounts"].append({"name": "code", "mountPath": _CODE, "readOnly": True})
            sources = [{"configMap": {"name": name}} for name in self.code]
            volumes.append({"name": "code", "projected": {"sources": sources}})
        return {
            **({} if subdomain is None else {"subdomain": subdomain}),
            **({"affinity": self._affinity()} if self.but else {}),
            "restartPolicy": "Never",  # a policy on exit codes requires it
            "terminationGracePeriodSeconds": self.grace,
            "containers": [container],
            "volumes": volumes,
        }

    def _affinity(self) -> Document:
        """Return the node affinity. A field takes one value for each expression."""
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in self.but]
        terms = {"nodeSelectorTerms": [{"matchFields": fields}]}
        return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}

    def container(self) -> Document:
        found: Document = {
            "name": "fleetrun",
            "image": self.image,
            "command": [_literal(word) for word in self.command],
            "env": self._env(),
        }
        if self.resources:
            found["resources"] = dict(self.resources)
        return found | self._probes()

    def _env(self) -> list[Document]:
        env: list[Document] = [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "FLEETRUN_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ]
        env += [{"name": name, "value": _literal(value)} for name, value in self.environment.items()]
        for name, secret, key in self.hidden:
            if secret:
                env.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
        return env

    def _probes(self) -> Document:
        """Return the probes.

        The launcher has a minute to start. Later probes check that it lives, and that it runs processes.
        """
        if self.python is None:
            return {}

        def probe(question: str, period: int, failures: int) -> Document:
            command = [self.python, "-m", "fleetrun.schedulers.probe", question]
            return {
                "exec": {"command": command},
                "periodSeconds": period,
                "timeoutSeconds": 10,
                "failureThreshold": failures,
            }

        return {
            "startupProbe": probe("live", 2, 30),
            "livenessProbe": probe("live", 30, 3),
            "readinessProbe": probe("ready", 10, 1),
        }


def _literal(text: str) -> str:
    """Escape $(NAME) and $$ in commands and values. Kubernetes replaces $(NAME) by a value, and $$ by $."""
    return text.replace("$", "$$") if "$$" in text or "$(" in text else text


# ---- Manifests of a job for Kubernetes, as values with the structure of the API. They are written by a
# library, without access to a cluster.
#
# `kind=job` is an indexed Job and a headless Service, `kind=jobset` a JobSet, `kind=trainjob` a TrainJob of
# Kubeflow. Each pod runs one launcher. Nodes join in the first pod, whose DNS name is known in advance.


_SETTLED = ("nnodes", "ips", "master", "rank", "devices", "token_file", "nic", "host")
_WORTH_ANOTHER_TRY = (123, 125, 129, 137, 143)
"""Exit codes of fleetrun that do not blame the script: an excluded node that the pod may not get again, a
lost node, SIGHUP, SIGKILL and SIGTERM.

With any other code, fleetrun has already used its restarts (--max_restart), or a retry is pointless (2, 126
and 127). The job then fails immediately, on all nodes.
"""

_DID_NOT_MEET = 124
"""Exit code of a launcher that waited in vain for other nodes, for example for pods without room in the
cluster. --timeout uses the code too.
"""


def build_manifests(job: Submission) -> list[Document]:
    """Build the documents of a job, in the order of their creation. Raises UsageError."""
    settings, options = job.settings, job.options
    if settings.ips:
        raise UsageError(
            "--ips and --scheduler kubernetes exclude each other, because Kubernetes chooses the nodes"
        )
    if not settings.image:
        raise UsageError("--scheduler kubernetes needs --image, the image of the pods")
    kind = options.take("kind", "job").lower()
    if kind not in _KINDS:
        raise UsageError(f"--scheduler_option kind={kind}: it must be job, jobset or trainjob")
    name = _name(options.take("name") or job.own_name)
    namespace = options.take("namespace")
    if job.settings.sync is not None and kind == "trainjob":
        raise UsageError("--sync is for kind=job and jobset; a TrainJob needs the code in its image")
    job, tree = tree_of_job(job)
    code = None if tree is None else Code(tree, _code(job, tree, name))
    carried = [*_secret(job, name), *(code.documents if code is not None else ())]
    documents = [*carried, *_KINDS[kind](job, name, code)]
    if namespace:
        for document in documents:
            document["metadata"]["namespace"] = namespace
    return documents


_CODE = "/etc/fleetrun/code"
_LARGEST_CODE = 1 << 20
_PART = 160 << 10
"""In bytes. `kubectl apply` copies each ConfigMap into an annotation, which holds at most 256 KiB in base64.
"""


@frozen
class Code:
    """The working tree and its ConfigMaps."""

    tree: Tree
    documents: list[Document]

    @property
    def names(self) -> Strings:
        return tuple(each["metadata"]["name"] for each in self.documents)

    def command(self, job: Submission, argv: Strings) -> Strings:
        python = job.options.given.get("python", "python3")
        return self.tree.command(python, job.settings.log_dir, argv, "start", _CODE)


def _code(job: Submission, tree: Tree, name: str) -> list[Document]:
    """Split the archive into ConfigMaps. Raises UsageError."""
    import base64  # imported late, because only --sync needs it

    with tree.archive() as archive:
        data = archive.read()
    if len(data) > _LARGEST_CODE:
        raise UsageError(
            f"--sync {job.settings.sync} is {tree.text}, packed {byte_size(len(data))}; "
            f"ConfigMaps can hold {byte_size(_LARGEST_CODE)}",
            hint="Build an image with the code: FROM the present one, COPY . /workspace, WORKDIR /workspace.",
        )
    parts = [data[start : start + _PART] for start in range(0, len(data), _PART)]
    job.console.info(f"Code: {tree.text}, in {plural(len(parts), 'ConfigMap')}")
    return [
        _document(
            "v1",
            "ConfigMap",
            name,
            f"-code-{tree.digest[:8]}-{number}",
            binaryData={f"part-{number:02}": base64.b64encode(part).decode()},
            immutable=True,
        )
        for number, part in enumerate(parts)
    ]


def _variables(job: Submission) -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that a manifest may show, and the variables that look secret. Raises UsageError.

    They come from --env and from the job file. The settings of roles in the job file become one variable.
    """
    kept = {name: value for name, value in job.job_file.items() if name != "environment"}
    rest = replace(job, passed_on={}, job_file=kept).carried
    found = {**job.passed_on, **job.job_file.get("environment", {}), **rest}
    for name, value in found.items():
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise UsageError(f"{name} is not valid UTF-8, which a manifest must be")
    secret = {JOB_FILE} if has_secrets({"roles": job.job_file.get("roles", {})}) else ()
    hidden = {name: value for name, value in found.items() if looks_secret(name) or name in secret}
    return {name: value for name, value in found.items() if name not in hidden}, hidden


def _secret(job: Submission, name: str) -> list[Document]:
    """Build the Secret with the variables that look secret. --dry_run shows no value."""
    _, values = _variables(job)
    if not values:
        return []
    if job.settings.dry_run:
        values = dict.fromkeys(values, "******")
    return [_document("v1", "Secret", name, "-env", type="Opaque", stringData=values)]


def manifests_text(documents: list[Document]) -> str:
    """Format the documents as YAML."""
    import yaml  # imported late, because a launch inside a pod writes no manifest

    return str(yaml.safe_dump_all(documents, sort_keys=False, width=100, explicit_start=True))


def _name(text: str) -> str:
    """Return a DNS label that leaves room for the index of a pod."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not label:
        raise UsageError(f"{text!r} has no letter for the name of a job", hint="Set --job_id.")
    return (label if label[0].isalpha() else f"job-{label}")[:48].rstrip("-")


def _document(version: str, kind: str, name: str, suffix: str = "", **content: object) -> Document:
    """Build a document of this job. Its name is `name` with the suffix."""
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "fleetrun"}
    about = {"name": f"{name}{suffix}", "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": about, **content}


def _nodes(job: Submission) -> int:
    return job.settings.nnodes[1] + job.settings.spares


def _store(master: str, host: Callable[[int], str]) -> str:
    """Return the addresses of the store. `embedded:3` stands for the first three pods."""
    if not master.startswith(EMBEDDED):
        return master
    return ",".join(f"{host(number)}:{STORE_PORT}" for number in range(int(master.removeprefix(EMBEDDED))))


def _pod(job: Submission, name: str, host: Callable[[int], str], code: Code | None = None) -> Pod:
    """Build the pod. `host` returns the host name of a pod by its number. Raises UsageError."""
    settings, options = job.settings, job.options
    if settings.notify and not options.given.get("notify-secret"):
        raise UsageError(
            "--notify does not reach the pods of Kubernetes, because a manifest would show its secrets",
            hint="Put it into the key notify of a Secret, and add --scheduler_option notify_secret=NAME.",
        )
    nnodes = ":".join(str(number + settings.spares) for number in dict.fromkeys(settings.nnodes))
    place = {}
    if _nodes(job) > 1:
        place["FLEETRUN_PLACE_NNODES"] = nnodes
        place["FLEETRUN_PLACE_MASTER"] = _store(settings.master or f"{host(0)}:{STORE_PORT}", host)
    place["FLEETRUN_PLACE_JOB"] = name
    # Process groups stop one after the other, trainers before their servers.
    shown, hidden = _variables(job)
    groups = 2 if settings.run_mode.has_servers else 1
    command = (*options.program(("fleetrun",)), *job.command(*_SETTLED))
    return Pod(
        image=settings.image or "",
        command=command if code is None else code.command(job, command),
        code=() if code is None else code.names,
        environment=shown | place,
        hidden=(
            *((each, f"{name}-env", each) for each in hidden),
            (TOKEN, options.take("token-secret"), "token"),
            (NOTIFY, options.take("notify-secret"), "notify"),
        ),
        resources=_resources(job),
        grace=math.ceil(groups * settings.stop_timeout) + 20,
        python=options.given.get("python", "python3") if options.take("probes") != "0" else None,
        shm=options.take("shm"),
        but=excluded_nodes(job),
    )


def _resources(job: Submission) -> Document:
    """Build the resource requests. Devices are requested by number, CPU and memory as given."""
    options = job.options
    count = gpus(job)
    name = options.take("resource") or ("nvidia.com/gpu" if job.settings.device_kind == "gpu" else "")
    if count and not name:
        raise UsageError(
            f"the name of the Kubernetes resource for a {job.settings.device_kind} differs between clusters",
            hint="Add --scheduler_option resource=vendor.com/name.",
        )
    requests = {each: amount for each in ("cpu", "memory") if (amount := options.take(each))}
    limits = {"memory": requests["memory"]} if "memory" in requests else {}
    if count:
        requests[name] = limits[name] = str(count)
    return {key: amounts for key, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _job_spec(job: Submission, pod: Pod, *, subdomain: str | None) -> Document:
    """Build the spec of an indexed Job.

    A pod that was evicted is replaced without counting. A pod that failed for a reason worth a retry is
    replaced up to --max_restart times.
    """
    nodes = _nodes(job)
    another_try = [*(() if job.settings.timeout else (_DID_NOT_MEET,)), *_WORTH_ANOTHER_TRY]
    return {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": "fleetrun",
                        "operator": "NotIn",
                        "values": another_try,
                    },
                },
            ]
        },
        "template": {"spec": pod.spec(subdomain=subdomain)},
    }


def _retries(job: Submission) -> Document:
    """Build the retry policy.

    With spares, the job continues although as many pods as spares are missing. It succeeds once as many pods
    as the job needs have succeeded.
    """
    found: Document = {
        "backoffLimitPerIndex": job.settings.max_restart,
        "maxFailedIndexes": job.settings.spares,
    }
    if job.settings.spares:
        found["successPolicy"] = {"rules": [{"succeededCount": job.settings.nnodes[0]}]}
    return found


def _deadline(job: Submission) -> Document:
    """Return a deadline at which Kubernetes ends a job that fleetrun did not end at its --timeout."""
    timeout = job.settings.timeout
    return (
        {}
        if timeout is None
        else {"activeDeadlineSeconds": math.ceil(timeout + job.settings.stop_timeout) + 600}
    )


def _job(job: Submission, name: str, code: Code | None) -> list[Document]:
    pod = _pod(job, name, lambda number: f"{name}-{number}.{name}", code)
    spec = _deadline(job) | _retries(job) | _job_spec(job, pod, subdomain=name)
    service = {
        "clusterIP": "None",
        "selector": {"batch.kubernetes.io/job-name": name},
        "publishNotReadyAddresses": True,  # they join before they are ready
        "ports": [{"name": "rendezvous", "port": STORE_PORT}],
    }
    return [_document("v1", "Service", name, spec=service), _document("batch/v1", "Job", name, spec=spec)]


def _jobset(job: Submission, name: str, code: Code | None) -> list[Document]:
    """Build a JobSet.

    It creates all pods again, up to --max_restart times, once more pods than spares have failed for good.
    """
    pod = _pod(job, name, lambda number: f"{name}-node-0-{number}.{name}", code)
    # JobSet sets the subdomain itself.
    retries = _retries(job) if job.settings.spares else {"backoffLimit": 0}
    node = retries | _deadline(job) | _job_spec(job, pod, subdomain=None)
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
        "failurePolicy": {
            "maxRestarts": job.settings.max_restart,
            "rules": [
                {
                    "name": "over",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy", "DeadlineExceeded"],
                }
            ],
        },
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": node}}],
    }
    return [_document("jobset.x-k8s.io/v1alpha2", "JobSet", name, spec=spec)]


def _trainjob(job: Submission, name: str, code: Code | None) -> list[Document]:
    """Build a TrainJob.

    Its runtime sets rank, number of nodes and rendezvous address in torchrun's variables (PET_*).
    """
    if job.settings.spares:
        raise UsageError(f"--spares {job.settings.spares}: a TrainJob takes part with all of its nodes")
    pod = _pod(job, name, lambda number: "")
    container = pod.container()
    trainer = {
        "image": pod.image,
        "command": container["command"],
        "numNodes": _nodes(job),
        "env": [each for each in container["env"] if not each["name"].startswith("FLEETRUN_PLACE_")],
    }
    if pod.resources:
        trainer["resourcesPerNode"] = pod.resources
    grace = {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": pod.grace}}}}
    patch = {"template": {"spec": {"replicatedJobs": [{"name": "node", "template": grace}]}}}
    spec: Document = {
        "runtimeRef": {"name": job.options.take("runtime", "torch-distributed")},
        "trainer": trainer,
        "runtimePatches": [{"manager": "fleetrun.dev/cli", "trainingRuntimeSpec": patch}],
    }
    return [_document("trainer.kubeflow.org/v1alpha1", "TrainJob", name, spec=spec | _deadline(job))]


_KINDS: Mapping[str, Callable[[Submission, str, Code | None], list[Document]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
}


# ---- The scheduler: placement from the environment, and submission


def place(environ: Environ, but: Collection[str] = ()) -> Mapping[str, EngineValue]:
    """Read the placement that our manifests set (FLEETRUN_PLACE_*).

    Kubeflow's trainer sets torchrun's variables, which options read.
    """
    names = {
        "nnodes": "FLEETRUN_PLACE_NNODES",
        "rank": "JOB_COMPLETION_INDEX",
        "master": "FLEETRUN_PLACE_MASTER",
        "job_id": "FLEETRUN_PLACE_JOB",
    }
    if ":" in environ["FLEETRUN_PLACE_NNODES"]:
        del names["rank"]  # an elastic job may have any number of nodes
    return {option: EngineValue(environ[name], name) for option, name in names.items() if environ.get(name)}


class Kubernetes:
    """Implements `--scheduler kubernetes`.

    Prints manifests on stdout, or applies them to the cluster with `apply=1`.
    """

    name = "kubernetes"

    def submit(self, job: Submission) -> int:
        apply = job.options.truth("apply")
        documents = build_manifests(job)
        job.options.refuse_rest("kubernetes")
        text = manifests_text(documents)
        if job.settings.dry_run or not apply:
            job.print(text)
            return 0
        answer = base.run_program(("kubectl", "apply", "-f", "-"), text, job.environ, job.signals, job.guard)
        if answer.code != 0:
            raise LaunchError(f"kubectl did not accept the job: {answer.err.strip() or answer.code}")
        job.print(answer.out)
        return 0


ENGINE = Kubernetes()

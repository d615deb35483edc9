"""Kubernetes: which pod of an indexed job this is, and a job's manifests, printed or given to kubectl."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fleetrun.envs.settings.command_line import Placed
from fleetrun.envs.settings.parsing import join_endpoint
from fleetrun.errors import LaunchError
from fleetrun.schedulers import clients
from fleetrun.schedulers.base import Submission
from fleetrun.schedulers.manifests import build, written

_TORCHRUN_PORT = 29500


def place(environ: Mapping[str, str], but: Collection[str] = ()) -> Mapping[str, Placed]:
    """What our own manifests say (FLEETRUN_PLACE_*), or those of Kubeflow's trainer (PET_*)."""
    if environ.get("FLEETRUN_PLACE_NNODES"):
        return _ours(environ)
    return _kubeflow(environ)


def _ours(environ: Mapping[str, str]) -> Mapping[str, Placed]:
    names = {
        "nnodes": "FLEETRUN_PLACE_NNODES",
        "rank": "JOB_COMPLETION_INDEX",
        "master": "FLEETRUN_PLACE_MASTER",
        "job_id": "FLEETRUN_PLACE_JOB",
    }
    if ":" in environ["FLEETRUN_PLACE_NNODES"]:
        del names["rank"]  # of an elastic job any number of them may be there
    return {option: Placed(environ[name], name) for option, name in names.items() if environ.get(name)}


def _kubeflow(environ: Mapping[str, str]) -> Mapping[str, Placed]:
    """The variables that torchrun reads, as a TrainJob or PyTorchJob sets them."""
    if environ["PET_NNODES"] == "1":
        return {}
    found = {"nnodes": Placed(environ["PET_NNODES"], "PET_NNODES")}
    if environ.get("PET_NODE_RANK"):
        found["rank"] = Placed(environ["PET_NODE_RANK"], "PET_NODE_RANK")
    if environ.get("PET_MASTER_ADDR"):
        port = environ.get("PET_MASTER_PORT", "")
        master = join_endpoint(environ["PET_MASTER_ADDR"], int(port) if port.isdecimal() else _TORCHRUN_PORT)
        found["master"] = Placed(master, "PET_MASTER_ADDR")
    elif environ.get("PET_RDZV_ENDPOINT"):
        found["master"] = Placed(environ["PET_RDZV_ENDPOINT"], "PET_RDZV_ENDPOINT")
    return found


class Kubernetes:
    """`--scheduler kubernetes`: manifests on stdout, or with `apply=1` into the cluster."""

    name = "kubernetes"

    def submit(self, job: Submission) -> int:
        options = job.options
        apply = options.truth("apply")
        documents = build(job, options)
        options.refuse_rest("kubernetes")
        text = written(documents)
        if job.settings.dry_run or not apply:
            job.print(text)
            return 0
        answer = clients.hand_over(("kubectl", "apply", "-f", "-"), text, job.environ, job.signals, job.guard)
        if answer.code != 0:
            raise LaunchError(f"kubectl did not take the job: {answer.err.strip() or answer.code}")
        job.print(answer.out)
        return 0


ENGINE = Kubernetes()

"""The environment contract, read: variables to a member. `contract.py` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from fleetrun.envs.members import Cluster, Gloo, Member, Mode, Role
from fleetrun.envs.names import LONG, MARK, VISIBLE_VARIABLE
from fleetrun.envs.variables import ContractError, Variables

_ROLES = {role.training_role: role for role in Role}


def read(environ: Mapping[str, str]) -> Member:
    """The member that `write` described.

    Raises ContractError when a variable is missing or malformed. Device visibility and the OMP thread count
    are read back as they stand.
    """
    environ = _with_long_values(environ)
    reader = _Reader(environ)
    role = reader.role()
    cluster = reader.cluster()
    node_rank, _ = reader.fraction("FLEETRUN_NODE")
    local_rank, local_size = reader.fraction("FLEETRUN_LOCAL")
    kind, devices = reader.devices()
    return Member(
        cluster=cluster,
        role=role,
        rank=reader.rank(),
        endpoint=reader.text("PADDLE_CURRENT_ENDPOINT"),
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        stage=reader.integer("STAGE_ID", 0),
        device_kind=kind,
        devices=devices,
        visible=environ.get(VISIBLE_VARIABLE[kind]) if devices else None,
        backend=environ.get("PADDLE_DISTRI_BACKEND"),
        pod=reader.text("POD_NAME"),
        log_dir=reader.text("PADDLE_LOG_DIR"),
        error_file=environ.get("FLEETRUN_ERROR_FILE", ""),
        restart_count=reader.integer("PADDLE_RESTART_COUNT"),
        omp_threads=reader.integer("OMP_NUM_THREADS") if "OMP_NUM_THREADS" in environ else None,
    )


def _with_long_values(environ: Mapping[str, str]) -> Mapping[str, str]:
    path = environ.get(LONG)
    if not path:
        return environ
    try:
        values = json.loads(Path(path).read_text())
        return {**{str(name): str(value) for name, value in values.items()}, **environ}
    except (OSError, ValueError, AttributeError) as error:
        raise ContractError(f"{LONG} is {path!r}, which cannot be read: {error}") from None


class _Reader(Variables):
    """The contract's own look-ups."""

    def mode(self) -> Mode:
        word = self.environ.get("FLEETRUN_MODE")  # an evaluator's: nothing else tells it
        if word is not None:
            if word not in tuple(Mode):
                raise ContractError(f"FLEETRUN_MODE is {word!r}; it must be one of {', '.join(Mode)}")
            return Mode(word)
        if "STAGE_NUM" in self.environ:
            return Mode.PS_HETER
        if "TRAINING_ROLE" in self.environ:
            return Mode.PS
        return Mode.RPC if "PADDLE_WORKER_ENDPOINT" in self.environ else Mode.COLLECTIVE

    def role(self) -> Role:
        word = self.environ.get("TRAINING_ROLE", "TRAINER")
        if word not in _ROLES:
            raise ContractError(f"TRAINING_ROLE is {word!r}; it must be one of {', '.join(_ROLES)}")
        return _ROLES[word]

    def rank(self) -> int:
        mark = self.text(MARK)
        rank = mark.rpartition(".")[2]
        if not rank.isdecimal():
            raise ContractError(f"{MARK} is {mark!r}; it must look like pod.trainer.0")
        return int(rank)

    def cluster(self) -> Cluster:
        return Cluster(
            mode=self.mode(),
            trainers=self.endpoints("PADDLE_TRAINER_ENDPOINTS"),
            master=self.text("FLEETRUN_MASTER"),
            servers=self.endpoints("PADDLE_PSERVERS_IP_PORT_LIST"),
            heter=self._heter(),
            coordinators=self.endpoints("PADDLE_COORDINATOR_ENDPOINTS"),
            stage_devices=tuple(filter(None, self.environ.get("FLEETRUN_STAGE_DEVICES", "").split(";"))),
            nnodes=self.fraction("FLEETRUN_NODE")[1],
            gloo=self._gloo(),
            job_id=self.text("PADDLE_JOB_ID"),
            max_restart=self.integer("FLEETRUN_MAX_RESTART"),
        )

    def _heter(self) -> tuple[tuple[str, ...], ...]:
        flat = self.endpoints("PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST")
        sizes = [int(size) for size in re.findall(r"\d+", self.environ.get("PADDLE_STAGE_TRAINERS_NUM", ""))]
        starts = [sum(sizes[1:stage]) for stage in range(1, len(sizes))]
        return tuple(flat[start : start + size] for start, size in zip(starts, sizes[1:], strict=True))

    def _gloo(self) -> Gloo | None:
        if "PADDLE_GLOO_HTTP_ENDPOINT" not in self.environ:
            return None
        return Gloo(
            endpoint=self.text("PADDLE_GLOO_HTTP_ENDPOINT"),
            fs_path=self.text("PADDLE_GLOO_FS_PATH"),
            with_gloo=self.integer("PADDLE_WITH_GLOO"),
            rendezvous=self.integer("PADDLE_GLOO_RENDEZVOUS"),
        )

    def devices(self) -> tuple[str, tuple[int, ...]]:
        for kind in VISIBLE_VARIABLE:
            own = self.numbers(f"FLAGS_selected_{kind}s")
            if own:
                return kind, own
        return "gpu", ()

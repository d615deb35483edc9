"""The evaluators of a machine: processes beside the training, which nobody connects to. Pure."""

from __future__ import annotations

from fleetrun.envs.contract import Cluster, Member, Role
from fleetrun.envs.offers import Host
from fleetrun.envs.settings import LaunchSettings
from fleetrun.envs.shares import share


def evaluators(settings: LaunchSettings, host: Host, cluster: Cluster, node_rank: int) -> list[Member]:
    """Those of machine `node_rank`: on the first machine only, unless the job file wants them on each. They
    have no endpoint, and divide the devices that were named for them; of more evaluators than devices several
    have the same one.
    """
    wish = settings.wish(Role.EVALUATOR)
    if node_rank > 0 and not wish.each:
        return []
    members = []
    parts = min(wish.count, len(host.evaluator_devices)) or 1
    for index in range(wish.count):
        part = share(host.evaluator_devices, index % parts, parts, whole_node=False)
        members.append(
            Member(
                cluster=cluster,
                role=Role.EVALUATOR,
                rank=node_rank * wish.count + index,
                local_rank=index,
                local_size=wish.count,
                node_rank=node_rank,
                endpoint="",
                log_dir=settings.log_dir,
                device_kind=host.device_kind if part.own else "gpu",
                devices=part.own,
                visible=",".join(part.visible) if part.own else None,
            )
        )
    return members

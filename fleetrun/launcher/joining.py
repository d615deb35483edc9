"""Describe this node to the other nodes of the job, and set the rules by which it joins."""

from __future__ import annotations

import os
import shlex
import socket

from fleetrun import __version__
from fleetrun.elastic.meeting import Meeting, MeetingOptions
from fleetrun.elastic.rendezvous.actions import Policy
from fleetrun.elastic.rendezvous.records import Node
from fleetrun.envs.contract import TOKEN, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings
from fleetrun.envs.settings.show import agreed, words
from fleetrun.host.network import LOOPBACK
from fleetrun.host.software import installed, packed, search_path
from fleetrun.launcher.parts import Launch
from fleetrun.launcher.prepare import is_first, patience, runs_python
from fleetrun.plan.topology import Host, Offer
from fleetrun.pod.policy import Budget
from fleetrun.record.faults import MachineFaults, faults_path, read_kept


def _read_faults(launch: Launch) -> MachineFaults:
    """Return the faults that earlier launches recorded."""
    try:
        return read_kept(faults_path(launch.log_dir)).faults
    except (OSError, ValueError) as error:
        launch.warn(f"cannot read the faults of earlier runs: {error}. All nodes start without faults")
        return ()


_MACHINE_NAMES = ("FLEETRUN_NODE_NAME", "SLURMD_NODENAME")
"""Environment variables with the scheduler's name for this node. Our own manifests for Kubernetes set the
first one.
"""


def _software(settings: LaunchSettings) -> str:
    """Return the packages of this Python. Return "" if no process of the job runs Python."""
    if not runs_python(settings):
        return ""
    return packed(installed(search_path(dict(settings.environment), os.environ)))


def described(launch: Launch, host: Host, offer: Offer) -> Node:
    return Node(
        id=os.urandom(8).hex(),
        host=host.address,
        name=socket.gethostname(),
        rank=host.rank,
        offer=offer,
        version=__version__,
        machine=next(filter(None, map(os.environ.get, _MACHINE_NAMES)), "") or "",
        options=agreed(launch.resolved),
        faults=_read_faults(launch),
        software=_software(launch.settings),
    )


def meeting_options(launch: Launch, host: Host, node: Node) -> MeetingOptions:
    settings = launch.settings
    return MeetingOptions(
        master=host.master,
        address=host.address,
        job_id=settings.job_id,
        node_id=node.id,
        lease=settings.heartbeat_timeout,
        token=os.environ.get(TOKEN, ""),
        first=is_first(host),
        patience=patience(settings, os.environ),
        urgent=launch.interrupts.urgent,
        companions=launch.companions,
        show=launch.console.warning,
    )


def policy(settings: LaunchSettings, host: Host, meeting: Meeting) -> Policy:
    fewest, most = host.nnodes
    return Policy(
        fewest=fewest,
        most=most,
        spares=settings.spares,
        on_loss=settings.on_node_loss,
        elastic_timeout=settings.elastic_timeout,
        rdzv_timeout=settings.rdzv_timeout,
        lease=settings.heartbeat_timeout,
        sort_ip=settings.sort_ip,
        budget=Budget(settings.max_restart, settings.restart_window),
        exclude_after=settings.exclude_after,
        check=settings.check,
        watch=settings.watch,
        fixed_ranks=host.machines,
        endpoint=meeting.endpoint,
    )


_ETCD_PASSWORD = "FLEETRUN_ETCD_PASSWORD"


def store_address(options: MeetingOptions, meeting: Meeting) -> dict[str, str]:
    """Return the address of the store, for commands of this user on this node."""
    password = os.environ.get(_ETCD_PASSWORD, "")
    master = options.master or meeting.endpoint
    return {"master": master, "job": options.job_id, "token": options.token, "password": password}


def report_meeting(launch: Launch, host: Host, meeting: Meeting) -> None:
    console = launch.console
    if meeting.hosted and host.master is None:
        console.info(f"Nodes join at {meeting.endpoint}. Run this command on the other nodes:")
        line = words(launch.resolved, but={"rank", "host", "nic", "master", "master_addr", "master_port"})
        console.block([f"  fleetrun --master={meeting.endpoint} {shlex.join(line)}"])
    if _is_loopback(meeting.endpoint.partition(",")[0]) and (meeting.hosted or meeting.member):
        console.info(f"Only nodes on this machine can reach {meeting.endpoint}")
    elif meeting.open_to_all:
        console.warning(
            f"no token is set (--token_file or {TOKEN}): anyone who can reach {meeting.endpoint} can "
            f"join or end this job"
        )


def _is_loopback(endpoint: str) -> bool:
    return "://" not in endpoint and split_endpoint(endpoint)[0] in (LOOPBACK, "::1", "localhost")

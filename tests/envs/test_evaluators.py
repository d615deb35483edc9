"""Where evaluators are, their ranks, and their share of the devices, by table."""

import dataclasses

import pytest

from fleetrun.envs.contract import Role
from fleetrun.envs.settings.command_line import read
from fleetrun.envs.settings.options import RoleSettings
from fleetrun.envs.settings.parsing import written_ranks
from fleetrun.envs.settings.resolve import resolve
from fleetrun.plan.topology import Host, build, offer, placed

SETTINGS = resolve(read(["--nnodes", "2", "--master", "h:1", "train.py"]), {}).settings


def members(node, count=2, each=False, devices=()):
    wish = RoleSettings(role=Role.EVALUATOR, count=count, each=each)
    settings = dataclasses.replace(SETTINGS, roles=(wish,))
    hosts = [Host(address=f"10.0.0.{n}", evaluator_devices=devices) for n in (1, 2)]
    offers = [offer(settings, host, lambda port: port or 5000) for host in hosts]
    found = build(settings, hosts[node], offers, node)
    ranks = written_ranks(each.rank for each in found if each.role is Role.EVALUATOR)
    assert placed(settings, offers)[node].get("evaluator", "") == ranks
    assert [each.role for each in found[:1]] == [Role.TRAINER], "trainers start first"
    return [each for each in found if each.role is Role.EVALUATOR]


@pytest.mark.parametrize(
    ("node", "each", "ranks"), [(0, False, [0, 1]), (1, False, []), (0, True, [0, 1]), (1, True, [2, 3])]
)
def test_where_they_are(node, each, ranks):
    found = members(node, each=each)
    assert [member.rank for member in found] == ranks
    assert [member.local_rank for member in found] == [0, 1][: len(ranks)]
    assert all((member.local_size, member.endpoint, member.node_rank) == (2, "", node) for member in found)


@pytest.mark.parametrize(
    ("count", "devices", "visible"),
    [(2, (), [None, None]), (2, ("4", "5"), ["4", "5"]), (1, ("4", "5"), ["4,5"]), (2, ("4",), ["4", "4"]),
     (3, ("4", "5"), ["4", "5", "4"])],
)  # fmt: skip
def test_what_they_see(count, devices, visible):
    assert [member.visible for member in members(0, count, devices=devices)] == visible


def test_nobody_asked_for_one():
    assert members(0, count=0) == []

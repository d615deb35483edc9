"""Training on an NVIDIA GPU: results as in plain torch, failures with their causes. See `make gpu`."""

from __future__ import annotations

import pytest
import torch

from tests.support.command import Fleetrun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

EQUAL = """
import torch
from torch import nn
from trainers import fleet

device = torch.device("cuda")
def model_of():
    torch.manual_seed(3)
    hidden = nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)
    return nn.Sequential(nn.Embedding(50, 8, sparse=SPARSE), nn.Flatten(), *hidden)
def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
def steps(model, optimizer):
    random = torch.Generator().manual_seed(5)
    for _ in range(20):
        ids = torch.randint(0, 50, (64, 4), generator=random)
        loss = (model(ids.to(device)) - ids.float().mean(1, keepdim=True).to(device) / 50).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
"""
COLLECTIVE = """
import sys
SPARSE = False
{equal}
fleet.init(is_collective=True)
ours = model_of().to(device)
found = list(steps(fleet.distributed_model(ours), fleet.distributed_optimizer(optimizer_of(ours))))
plain = model_of().to(device)
expected = torch.tensor(list(steps(plain, optimizer_of(plain))))
tell("equal", torch.allclose(torch.tensor(found), expected, atol=1e-5))
"""
SERVERS = """
import sys
SPARSE = True
{equal}
fleet.init()
ours = model_of()
wrapped = fleet.distributed_model(ours if fleet.is_server() else ours.to(device))
optimizer = fleet.distributed_optimizer(optimizer_of(ours))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
found = list(steps(wrapped, optimizer))
fleet.stop_worker()
plain = model_of().to(device)
expected = torch.tensor(list(steps(plain, optimizer_of(plain))))
tell("equal", torch.allclose(torch.tensor(found), expected, atol=1e-5))
"""


@pytest.mark.parametrize(
    ("text", "words"),
    [(COLLECTIVE, ["--nproc_per_node=1"]), (SERVERS, ["--server_num=1", "--trainer_num=1"])],
    ids=["collective", "servers"],
)
def test_losses_are_those_of_plain_torch(fleetrun: Fleetrun, text: str, words: list[str]) -> None:
    launch = fleetrun.run(*words, fleetrun.script(text.format(equal=EQUAL)))
    assert launch.code == 0, launch
    assert launch.told("trainer.0 equal") == ["trainer.0 equal True"]


def test_a_failed_assertion_on_the_device_is_named(fleetrun: Fleetrun) -> None:
    script = fleetrun.script("""
import torch
torch.nn.Embedding(10, 4).cuda()(torch.tensor([3, 11]).cuda())
torch.cuda.synchronize()
""")
    launch = fleetrun.run("--nproc_per_node=1", "--max_restart=0", script)
    assert launch.code == 1, launch
    assert "An index was out of range on the GPU" in launch.said


@TWO
def test_a_rank_that_is_missing_in_a_collective_of_nccl_is_named(fleetrun: Fleetrun) -> None:
    script = fleetrun.script("""
import time, torch
import torch.distributed as dist
torch.cuda.set_device(RANK)
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
if RANK == 1:
    time.sleep(600)
dist.all_reduce(torch.ones(1, device="cuda"))
torch.cuda.synchronize()
""")
    launch = fleetrun.run("--nproc_per_node=2", "--max_restart=0", "--hang_timeout=20", script)
    assert launch.code != 0, launch
    assert "trainer 1" in launch.said
    assert "all_reduce" in launch.said

"""A batch whose rows have more bytes than a frame."""

from __future__ import annotations

from tests.support.command import Fleetrun

LARGE = """
import torch
from torch import nn
from trainers import fleet

ROWS, DIM = 140_000, 512  # 287 MB
fleet.init()
model = nn.Embedding(ROWS, DIM, sparse=True)
expected = model.weight.detach().clone()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = fleet.distributed_model(model), fleet.distributed_optimizer(optimizer)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()
fleet.init_worker()
ids = torch.randperm(ROWS).view(-1, 1000)
for step in range(2):
    (model(ids) * (ids.unsqueeze(-1) + 1.0)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    expected -= 0.5 * (torch.arange(ROWS).view(-1, 1) + 1.0)
with torch.no_grad():
    tell("equal", torch.equal(model(ids).view(-1, DIM), expected[ids.view(-1)]))
fleet.stop_worker()
"""


def test_rows_of_more_bytes_than_a_frame_train_as_in_torch(fleetrun: Fleetrun) -> None:
    launch = fleetrun.run("--server_num=1", "--trainer_num=1", fleetrun.script("import sys\n" + LARGE))
    assert launch.code == 0, launch
    assert launch.told("trainer.0 equal") == ["trainer.0 equal True"]

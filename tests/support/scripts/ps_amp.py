"""Half precision in a job with parameter servers: `ps_amp SCENARIO`. Both trainers see the same batches, so
that a step is that of one process under autocast; in some steps the loss of one of them is not finite.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Sequence

import torch

from tests.support.scripts.ps_torch_features import Model, batches, recipe, refused, same, serve
from trainers import fleet
from trainers.optimizer import DistributedOptimizer

FLOAT16 = {"dtype": "float16", "init_loss_scaling": 1024.0, "decr_every_n_nan_or_inf": 1}
BAD = 2
"""The step in which trainer 1 finds that its gradients are not finite."""


class Half(Model):
    """A model that says in which type its layer computed."""

    computed: torch.dtype | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        assert self.emb(ids).dtype is torch.float32
        found = self.out(self.emb(ids))
        self.computed = found.dtype
        return (found * ids[:, None] / 20).float().mean()


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def alone(dtype: torch.dtype, skipped: Sequence[int] = ()) -> Half:
    """One process under autocast, with a scaler if the type needs one."""
    model = Half()
    optimizers = recipe(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=dtype is torch.float16)
    for step, ids in enumerate(batches()):
        with torch.autocast("cpu", dtype):
            loss = model(ids)
        scaler.scale(loss * factor(step, skipped)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    return model


def factor(step: int, skipped: Sequence[int]) -> float:
    return math.inf if step in skipped else 1.0


def mine() -> Sequence[int]:
    """The steps that this trainer cannot use."""
    return (BAD,) if fleet.worker_index() == 1 else ()


def minimized(model: torch.nn.Module, optimizers: Sequence[DistributedOptimizer]) -> None:
    for step, ids in enumerate(batches()):
        loss = model(ids) * factor(step, mine())
        for optimizer in optimizers:
            optimizer.minimize(loss)


# ---- Scenarios


def bfloat16() -> None:
    model = Half()
    optimizers = serve(model, *recipe(model), amp=True)
    for ids in batches():
        model(ids).backward()
        assert model.computed is torch.bfloat16
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same(model, alone(torch.bfloat16))
    model(batches()[0])
    assert model.computed is torch.float32, "it is an ordinary model again"


def float16() -> None:
    """A step that one trainer cannot use is no step, on any server, of any optimizer."""
    model = Half()
    minimized(model, serve(model, *recipe(model), amp=True, amp_configs=FLOAT16))
    assert model.computed is torch.float16
    same(model, alone(torch.float16, (BAD,)))


def own_loop() -> None:
    """A script that scales by itself; clipping sees gradients of the true size."""
    model = Half()
    optimizers = serve(model, *recipe(model), amp=True, amp_configs=FLOAT16)
    model(batches()[0]).backward()
    refused("without scaling", optimizers[0].step)
    refused("without scaling", lambda: optimizers[0].minimize(model(batches()[0])))
    model.zero_grad()
    scaler = fleet.distributed_scaler(torch.amp.GradScaler("cpu", init_scale=1024.0))
    for step, ids in enumerate(batches()):
        scaler.scale(model(ids) * factor(step, mine())).backward()
        scaler.unscale_(optimizers[1])
        assert step == BAD or torch.nn.utils.clip_grad_norm_(model.out.parameters(), 5.0) < 5.0
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    assert scaler.get_scale() == (512.0 if mine() else 1024.0)
    same(model, alone(torch.float16, (BAD,)))


def all_reduced() -> None:
    """The trainers agree before they average: no value of any of them becomes NaN."""
    model = Half()
    options = {"dense": "allreduce", "amp": True, "amp_configs": FLOAT16}
    minimized(model, serve(model, *recipe(model), **options))
    same(model, alone(torch.float16, (BAD,)))


def overflow_in(**options: object) -> None:
    """Steps that no trainer can use leave the servers as they are, and are counted."""
    model = Half()
    (optimizer,) = serve(model, optimizer_of(model), amp=True, amp_configs=FLOAT16, **options)
    for ids in batches():
        optimizer.minimize(model(ids))
    before = state_of_all(model)
    assert not torch.equal(before["emb.weight"], Model().emb.weight)
    for bad in (math.inf, math.nan):
        optimizer.minimize(model(batches()[0]) * bad)
    for name, found in state_of_all(model).items():
        assert torch.equal(found, before[name]), name
    optimizer.minimize(model(batches()[0]))
    assert not torch.equal(state_of_all(model)["emb.weight"], before["emb.weight"])
    fleet.stop_worker()


def state_of_all(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Between two steps, of all trainers."""
    fleet.barrier_worker()
    state = copy.deepcopy(model.state_dict())
    fleet.barrier_worker()
    return state


def overflow_in_sync() -> None:
    overflow_in()


def overflow_in_async() -> None:
    overflow_in(a_sync=True)


def overflow_in_merged_pushes() -> None:
    overflow_in(a_sync=True, a_sync_configs={"max_merge_var_num": 3})


def overflow_in_geo() -> None:
    overflow_in(a_sync=True, a_sync_configs={"k_steps": 2})


def overflow_of_rows() -> None:
    """Dense gradients are finite, those of rows are not: torch's own check does not see it."""
    model = Half()
    (optimizer,) = serve(model, optimizer_of(model), amp=True, amp_configs=FLOAT16)
    before = copy.deepcopy(model.state_dict())
    rows = model.emb(batches()[0])
    rows.register_hook(lambda grad: grad * math.inf)
    optimizer.minimize(rows.sum() + model.out.weight.sum())
    for name, found in model.state_dict().items():
        assert torch.equal(found, before[name]), name
    fleet.stop_worker()


def compiled() -> None:
    model = Half()
    whole = torch.compile(model, backend="aot_eager")
    minimized(whole, serve(whole, *recipe(model), amp=True, amp_configs=FLOAT16))
    assert model.computed is torch.float16
    same(model, alone(torch.float16, (BAD,)))


SCENARIOS: tuple[Callable[[], None], ...] = (
    bfloat16,
    float16,
    own_loop,
    all_reduced,
    overflow_in_sync,
    overflow_in_async,
    overflow_in_merged_pushes,
    overflow_in_geo,
    overflow_of_rows,
    compiled,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    fleet.init()
    {each.__name__: each for each in SCENARIOS}[sys.argv[1]]()

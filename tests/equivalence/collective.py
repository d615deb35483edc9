"""Collective programs: how they are drawn, run by ranks of fleet, and run by one torch process."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import trainers
from fleetrun.envs.contract import Cluster, Mode, Role
from tests.equivalence import collective_model
from tests.equivalence.children import Child, Job, Result, Way, a_folder, start_member
from tests.equivalence.collective_loop import Run, restart, world_after
from tests.equivalence.program import Drawing, Program, kinds_of
from tests.equivalence.rules import SCHEDULERS
from tests.support.cluster import reserved_endpoints
from trainers import fleet

# ---- Drawing

_OWN_STEPS = ("minimized_after_diagnosis", "minimized_adversarially", "pair", "two_optimizers", "two_losses")
_ACCUMULATED = ("accumulated", "accumulated_apart")
_CONFLICTS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("minimized", "minimized_after_backward", "minimized_with_another"), _ACCUMULATED),
    (("program", "two_programs", "merged_gradients", *_OWN_STEPS), _ACCUMULATED),
    (("accumulated",), ("accumulated_apart",)),
    (("batch_norm", "remembering"), ("accumulated_apart", "evaluated_while_training")),
    (("two_programs", *_OWN_STEPS), ("merged_gradients",)),
    (("merged_gradients",), ("rolled_back_to",)),
    (("dropout", "remembering"), ("sync_norm",)),
    (("batch_norm", "dropout", "remembering"), ("recomputed",)),
    (("moved",), tuple(SCHEDULERS)),
    (("sharded",), ("moved",)),
    (("pair",), ("recomputed_layers",)),
    (("sgd_decay", "momentum", "adam", "adamw", "rmsprop"), ("sparse_rows",)),
)
"""Where a program has one of the first, those of the second are left out: torch has no meaning for both, or
fleet documents that they do not go together.
"""


def draw(seed: int) -> Program:
    rng = random.Random(f"collective {seed}")
    drawing = Drawing(rng, kinds_of("collective"))
    drawing.add("world", rng.choice((0, 0, 1)))
    drawing.add("layer", rng.choice((0, 1, 1, 2)))
    drawing.add("part", rng.choice((0, 0, 1)))
    drawing.add("strategy", rng.choice((0, 0, 1, 1, 2)))
    drawing.add("optimizer")
    drawing.add("rate", rng.choice((0, 0, 1)))
    drawing.add("data", rng.choice((0, 1, 1)))
    drawing.add("style")
    drawing.add("gradient", rng.choice((0, 0, 1, 1, 2)))
    drawing.add("event", rng.randint(1, 4))
    drawing.add("checkpoint", rng.choice((0, 0, 1, 1)))
    program = drawing.program(seed, "collective")
    for ones, others in _CONFLICTS:
        if any(map(program.has, ones)):
            program = program.without(others)
    return program


def ways(program: Program) -> list[Way]:
    count = 1 if program.has("one_rank") else 3 if program.has("three_ranks") else 2
    return [Way(f"{count} ranks", count)]


# ---- In the process that trains


def run_plain(program: Program, way: Way) -> Result:
    """In one torch process, with the examples of all ranks."""
    return _trained(Run(program, None, way.trainers))


def _trained(run: Run) -> Result:
    result = Result(run.seen, stage=run.stage)
    try:
        run.build()
        if run.stage:
            run.resume()
        run.train()
        if run.plain or run.stage or restart(run.program) is None:  # else others go on
            result.final = {
                f"{number}.{name}": each.detach().clone()
                for number, net in enumerate(run.nets)
                for name, each in net.state_dict().items()
            }
        if not run.plain:
            _end(run, result)
    except Exception as error:  # noqa: BLE001  # whatever the script raises is the result
        result.failed(error)
    return result


def _end(run: Run, result: Result) -> None:
    """The buffers that count are those of rank 0, as in a checkpoint."""
    if run.world > 1:
        buffers = {
            f"{number}.{name}" for number, net in enumerate(run.nets) for name, _ in net.named_buffers()
        }
        for name in sorted(buffers & result.final.keys()):
            dist.broadcast(result.final[name], 0)
    fleet.wait_checkpoint()
    fleet.barrier_worker()


def run_rank(program: Program, world: int, stage: int, folder: Path) -> Result:
    """As this rank of a job."""
    result = Result(stage=stage)
    try:
        fleet.init(is_collective=True, strategy=collective_model.strategy(program))
    except Exception as error:  # noqa: BLE001  # whatever the script raises is the result
        result.failed(error)
        return result
    return _trained(Run(program, fleet.worker_index(), world, stage, folder))


# ---- In the process that starts the ranks


@contextlib.contextmanager
def job(program: Program, way: Way) -> Iterator[Job]:
    """A job that runs the program; what still runs at the end is killed."""
    worlds = [way.trainers] if restart(program) is None else [way.trainers, world_after(program)]
    running = Job()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(a_folder())
        starts = []
        for stage, world in enumerate(worlds):
            endpoints = stack.enter_context(reserved_endpoints(world + 1))
            cluster = Cluster(mode=Mode.COLLECTIVE, trainers=endpoints[:-1], master=endpoints[-1])
            starts.append(partial(_start, program, cluster, stage, folder))
        try:
            running.trainers += starts[0]()
            running.later += starts[1:]
            yield running
        finally:
            running.kill()


def _start(program: Program, cluster: Cluster, stage: int, folder: Path) -> list[Child]:
    world = len(cluster.trainers)
    call = partial(run_rank, program, world, stage, folder)
    return [
        start_member(folder, cluster, Role.TRAINER, rank, call, f"stage-{stage}-rank-{rank}")
        for rank in range(world)
    ]


def warm_up() -> None:
    """Import what a rank needs, before the first fork."""
    for package in ("collective", "checkpoints", "storage", "serving", "static"):
        path = f"{trainers.__path__[0]}/{package}"
        for found in pkgutil.iter_modules([path], f"trainers.{package}."):
            importlib.import_module(found.name)
    for name in ("torch.distributed.optim", "torch.distributed.checkpoint", "fsspec"):
        importlib.import_module(name)
    for seed in range(30):  # half of torch is imported by its first use
        run_plain(draw(seed), Way("", 1))
    assert torch.get_num_threads() == 1

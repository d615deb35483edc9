"""Save a model for serving, as its program and its weights. `program` exports the forward pass."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import torch
from torch.nn import Module

from fleetrun.aliases import Document
from trainers.checkpoints.state import bare
from trainers.errors import NotSupportedError, UsageError
from trainers.inference import KIND
from trainers.ps.trainer.modules import EmbeddingModule, row_limit
from trainers.ps.trainer.torchrec import MODULES
from trainers.serving.bundle import write_bundle
from trainers.serving.lookup import RowsElsewhere
from trainers.serving.program import Inputs, program_of
from trainers.serving.weights import is_divided, safetensors
from trainers.storage.folder import Where


def save_program(
    where: Where,
    model: Module,
    example: Inputs,
    dynamic_shapes: object,
    stand_ins: Mapping[Module, Module],
) -> None:
    """Save the model. Raises SaveError, and the former files then stay valid.

    Also raises errors of `program_of`, NotSupportedError for a sharded model, and UsageError if rows are on
    the servers.
    """
    plain = bare(model)
    if is_divided(plain):
        raise NotSupportedError(
            "A model that ranks have sharded (strategy.sharding) cannot be exported. Call fleet.save() on "
            "it, call fleet.load() on an ordinary model, and pass the ordinary model to "
            "fleet.save_inference_model()."
        )
    missing = [
        name
        for name, module in plain.named_modules()
        if isinstance(module, EmbeddingModule) and row_limit(module) is None and module not in stand_ins
    ]
    if missing:
        raise UsageError(
            f"The rows of {missing[0]!r} are on the servers. Call fleet.save_inference_model() between "
            "fleet.init_worker() and fleet.stop_worker()."
        )
    if MODULES in sys.modules:
        from trainers.ps.trainer.stand_ins import collection_programs

        stand_ins = {**stand_ins, **collection_programs(plain, stand_ins)}
    program = program_of(plain, example, dynamic_shapes, stand_ins)
    about = {
        "weights": list(program.weights),
        "inputs": program.inputs,
        "torch": str(torch.__version__),
        "tables": _outside(plain, stand_ins),
    }
    files = {"program": (".pt2", [program.file]), "weights": safetensors(program.weights)}
    write_bundle(where, KIND, json.loads(json.dumps(about)), files)


def _outside(model: Module, stand_ins: Mapping[Module, Module]) -> dict[str, Document]:
    """Return the tables outside the program, by the names of the weights that stand for them."""
    return {
        ".".join(filter(None, (path, inner, "table"))): {"name": rows.name, "dim": rows.dim}
        for path, module in model.named_modules()
        if module in stand_ins
        for inner, rows in stand_ins[module].named_modules()
        if isinstance(rows, RowsElsewhere)
    }

"""What a checkpoint is made of: a model, its optimizer and small things, as named tensors and JSON, and
back. Knows state dicts; no file and no other rank.

Names are the parameters' own, without DDP's or torch.compile's prefixes: the same for any number of
processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from trainers.checkpoints.manifest import CheckpointError, Manifest
from trainers.checkpoints.optimizer import OptimizerState
from trainers.checkpoints.shares import share
from trainers.checkpoints.tensors import Tensors, is_sharded
from trainers.checkpoints.values import from_json, to_json
from trainers.errors import NotSupportedError, UsageError


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The module inside its wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile's
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, torch.nn.Module):
            return model
        model = inner


class Contents:
    """The things that one call of save or load is about, and their tensors by name."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"the model of a checkpoint must be a torch.nn.Module, not {model!r}")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise UsageError(f"the optimizer of a checkpoint must be one of torch's, not {optimizer!r}")
        for name, value in state.items():
            if not _is_stateful(value) and not isinstance(value, dict):
                raise UsageError(
                    f"{name}={value!r} cannot be kept in a checkpoint: give a dict, or an object with "
                    "state_dict() and load_state_dict()"
                )
        self._model = bare(model)
        _reshard(self._model)
        self._optimizer = None if optimizer is None else OptimizerState(optimizer, self._model)
        self._state = state

    # ---- to a checkpoint

    def tensors(self, rank: int, world: int) -> Tensors:
        """What this rank has to save. Of what all have alike each saves a share, and copies no more than that
        for a save beside the training. What only DDP's rank 0 decides, buffers, it alone saves.
        """
        own = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        found, alike = _random_state(rank), {}
        for name, value in self._model_tensors().items():
            if is_sharded(value):
                found[f"model.{name}"] = value
            elif name in own:
                alike[f"model.{name}"] = value
            elif rank == 0:
                found[f"model.{name}"] = value
        if self._optimizer is not None:
            for key, value in self._optimizer.tensors().items():
                (found if self._optimizer.divided or is_sharded(value) else alike)[key] = value
        mine = share({key: value.nbytes for key, value in alike.items()}, rank, world)
        return found | {key: alike[key] for key in mine}

    def keys(self) -> set[str]:
        """The tensors that a checkpoint must have, as this rank sees it."""
        optimizer = set() if self._optimizer is None else self._optimizer.tensors().keys()
        return {f"model.{name}" for name in self._model_tensors()} | optimizer

    def parts(self, rank: int) -> dict[str, Any]:
        """What is no tensor: rank 0's, and of others what only they have. Raises UsageError for what JSON
        cannot hold.
        """
        if rank > 0:
            if self._optimizer is None or not self._optimizer.divided:
                return {}
            return {"optimizer": self._optimizer.values()}
        state = {
            name: to_json(name, value.state_dict() if _is_stateful(value) else value)
            for name, value in self._state.items()
        }
        optimizer = None if self._optimizer is None else self._optimizer.values()
        return {"optimizer": optimizer, "state": state}

    @staticmethod
    def joined(first: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The `parts` of a checkpoint from those of its ranks."""
        parts = dict(first)
        for other in others:
            if "optimizer" in other:
                state = parts["optimizer"]["state"] | other["optimizer"]["state"]
                parts["optimizer"] = parts["optimizer"] | {"state": state}
        return parts

    # ---- from one

    def check(self, manifest: Manifest) -> None:
        """Raises CheckpointError when the checkpoint is of something else than this."""
        saved = {
            key.removeprefix("model."): tuple(entry["shape"])
            for key, entry in manifest.index.items()
            if key.startswith("model.")
        }
        here = {name: tuple(value.shape) for name, value in self._model_tensors().items()}
        wrong = [f"{name} is missing in it" for name in here.keys() - saved.keys()]
        wrong += [f"{name} is not in the model" for name in saved.keys() - here.keys()]
        wrong += [
            f"{name} is {saved[name]} in it and {here[name]} here"
            for name in here.keys() & saved.keys()
            if here[name] != saved[name]
        ]
        if wrong:
            more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise CheckpointError(f"the checkpoint is of another model: {', '.join(sorted(wrong)[:3])}{more}")
        if self._optimizer is not None:
            self._optimizer.check(manifest.parts["optimizer"])
        if missing := self._state.keys() - manifest.parts["state"].keys():
            raise CheckpointError(f"the checkpoint has no {', '.join(sorted(missing))}; it was saved without")

    def wanted(self, manifest: Manifest, rank: int, world: int) -> Tensors:
        """The tensors to be filled: the model's own, new ones for the rest."""
        found = {f"model.{name}": value for name, value in self._model_tensors().items()}
        if self._optimizer is not None:
            found |= self._optimizer.wanted(manifest.parts["optimizer"], manifest.index)
        if world == manifest.world:
            found |= {key: value for key, value in _random_state(rank).items() if key in manifest.index}
        return found

    def take(self, manifest: Manifest, tensors: Tensors) -> None:
        """Put what was read where it belongs."""
        model = {name: tensors[f"model.{name}"] for name in self._model_tensors()}
        self._model.load_state_dict(model)
        if self._optimizer is not None:
            self._optimizer.take(manifest.parts["optimizer"], tensors)
        for name, value in self._state.items():
            saved = from_json(manifest.parts["state"][name])
            if _is_stateful(value):
                value.load_state_dict(saved)
            else:
                value.clear()
                value.update(saved)
        _set_random_state(tensors)

    def _model_tensors(self) -> Tensors:
        found = self._model.state_dict()
        for name, value in found.items():
            if not isinstance(value, torch.Tensor):
                raise NotSupportedError(
                    f"{name} in the model's state is no tensor but {type(value).__name__}; keep it in "
                    "`state=` of save_checkpoint"
                )
        return found


def _reshard(model: torch.nn.Module) -> None:
    """After a forward pass without a backward one FSDP2 leaves whole parameters in the place of shards."""
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if callable(reshard) and hasattr(module, "unshard"):
            reshard()


def _is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _random_state(rank: int) -> Tensors:
    """Dropout and the like go on as they would have: the generators of this rank."""
    found = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        found[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return found


def _set_random_state(tensors: Tensors) -> None:
    for key, value in tensors.items():
        if key.startswith("random.") and key.endswith(".cpu"):
            torch.set_rng_state(value)
        elif key.startswith("random."):
            torch.cuda.set_rng_state(value)

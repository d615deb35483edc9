"""Convert a model, its optimizer and small values to named tensors and JSON, and back.

The module handles only state dicts, without files and other ranks. Names are the parameters' own, without the
prefixes of DDP and torch.compile, so they are equal for any number of processes.

An optimizer whose state is divided among ranks has a method `owned_params()`, which returns the parameters
whose state this rank holds. Its `state_dict()` has only these, and its `load_state_dict()` needs only these.
An optimizer with further state has `extra_state()`, which returns a dict of numbers, and
`load_extra_state()`. Rank 0's extra state is kept.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fleetrun.aliases import Document, Fields
from trainers.checkpoints.manifest import (
    CheckpointError,
    Manifest,
    from_json,
    is_stateful,
    put_values,
    to_json,
    values_of,
)
from trainers.checkpoints.tensors import Tensors, is_sharded
from trainers.errors import NotSupportedError, UsageError

# ---- An optimizer's state in a checkpoint, from torch's state dicts and the extensions described above


class OptimizerState:
    """An optimizer's state by the names of its parameters.

    As JSON it is `{"groups": [{"params": [names], options}], "state": {name: {key: value, or {"tensor":
    key}}}, "extra": its own or null}`. `divided` is True if other ranks have a part of `state`.
    """

    def __init__(self, optimizer: Optimizer, model: Module) -> None:
        self._optimizer = optimizer
        names = {id(value): name for name, value in model.named_parameters()}
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        unknown = [tuple(param.shape) for param in self._params if id(param) not in names]
        if unknown:
            raise UsageError(
                f"The optimizer has parameters of shapes {unknown[:3]} that the model lacks. Save the "
                "optimizer with the model that has these parameters."
            )
        self._names = [names[id(param)] for param in self._params]
        owned = _owned(optimizer)
        self.divided = owned is not None
        self._mine = set(self._names) if owned is None else {names[id(param)] for param in owned}

    def tensors(self) -> Tensors:
        saved = self._optimizer.state_dict()
        found = {
            f"optimizer.state.{self._names[index]}.{key}": value
            for index, entry in saved["state"].items()
            for key, value in entry.items()
        }
        for place, group in enumerate(saved["param_groups"]):
            found |= {f"optimizer.group.{place}.{key}": value for key, value in group.items()}
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def values(self) -> Document:
        saved = self._optimizer.state_dict()
        groups = [
            {key: self._json(f"optimizer.group.{place}.{key}", value) for key, value in group.items()}
            | {"params": [self._names[index] for index in group["params"]]}
            for place, group in enumerate(saved["param_groups"])
        ]
        state = {
            self._names[index]: {
                key: self._json(f"optimizer.state.{self._names[index]}.{key}", value)
                for key, value in entry.items()
            }
            for index, entry in saved["state"].items()
        }
        ask = getattr(self._optimizer, "extra_state", None)
        extra = None if ask is None else to_json("optimizer.extra", ask())
        return {"groups": groups, "state": state, "extra": extra}

    def check(self, saved: Fields | None) -> None:
        if saved is None:
            raise CheckpointError("The checkpoint was saved without an optimizer. Load it without one.")
        theirs = [group["params"] for group in saved["groups"]]
        names = iter(self._names)
        ours = [[next(names) for _ in group["params"]] for group in self._optimizer.param_groups]
        if ours != theirs:
            raise CheckpointError(
                f"The checkpoint's optimizer has {sum(map(len, theirs))} parameters in {len(theirs)} "
                f"groups, but this optimizer has {sum(map(len, ours))} in {len(ours)}, or another order. "
                "Create the optimizer as in the run that saved the checkpoint."
            )

    def wanted(self, saved: Fields, index: Fields) -> Tensors:
        by_name = dict(zip(self._names, self._params, strict=True))
        places = [(by_name[name], entry) for name, entry in self._my_state(saved)]
        return {
            key: _empty(index[key], like)
            for like, entry in [*places, *((None, group) for group in saved["groups"])]
            for key in map(_tensor_key, entry.values())
            if key is not None
        }

    def take(self, saved: Fields, tensors: Tensors) -> None:
        def value_of(value: object) -> object:
            key = _tensor_key(value)
            return from_json(value) if key is None else tensors[key]

        places = {name: place for place, name in enumerate(self._names)}
        state = {
            places[name]: {key: value_of(value) for key, value in entry.items()}
            for name, entry in self._my_state(saved)
        }
        groups = []
        for group, now in zip(saved["groups"], self._optimizer.param_groups, strict=True):
            options = {key: value_of(value) for key, value in group.items() if key != "params"}
            for key, value in options.items():
                if isinstance(value, list) and isinstance(now.get(key), tuple):
                    options[key] = tuple(value)  # for example betas, because JSON has no tuples
            groups.append(options | {"params": [places[name] for name in group["params"]]})
        before = self._optimizer.state_dict()
        try:
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        except KeyError as error:
            self._optimizer.load_state_dict(before)
            raise CheckpointError(
                f"The checkpoint has another kind of optimizer: its state has no {error}. Create the "
                "optimizer as in the run that saved the checkpoint, or load without it."
            ) from error
        go_on, extra = getattr(self._optimizer, "load_extra_state", None), saved.get("extra")
        if go_on is not None and extra is not None:
            go_on(from_json(extra))

    def _my_state(self, saved: Fields) -> list[tuple[str, Fields]]:
        return [(name, entry) for name, entry in saved["state"].items() if name in self._mine]

    def _json(self, key: str, value: object) -> object:
        return {"tensor": key} if isinstance(value, Tensor) else to_json(key, value)


def _owned(optimizer: object) -> Collection[Tensor] | None:
    """Return the parameters whose state this rank has, or None for all. The optimizer may be wrapped."""
    while optimizer is not None:
        ask = getattr(optimizer, "owned_params", None)
        if ask is not None:
            owned: Collection[Tensor] = ask()
            return owned
        optimizer = getattr(optimizer, "inner", None)
    return None


def _tensor_key(value: object) -> str | None:
    """Return the name of the tensor that a value of the manifest stands for, or None."""
    return value["tensor"] if isinstance(value, dict) and value.keys() == {"tensor"} else None


def _empty(entry: Fields, like: Tensor | None) -> Tensor:
    shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
    if like is not None and is_sharded(like) and like.shape == shape:
        return torch.zeros_like(like, dtype=dtype)
    return torch.empty(shape, dtype=dtype)


# ---- Sharing out tensors that are equal on all ranks


def share(sizes: Mapping[str, int], rank: int, world: int) -> set[str]:
    """Return the keys that `rank` saves. `sizes` are in bytes.

    Each key, largest first, goes to the rank with the fewest bytes so far. All ranks get the same result
    without communication.
    """
    load = [(0, other) for other in range(world)]
    mine = set()
    for key in sorted(sizes, key=lambda each: (-sizes[each], each)):
        taken, least = load[0]
        heapq.heapreplace(load, (taken + sizes[key], least))
        if least == rank:
            mine.add(key)
    return mine


# ---- The state of model, optimizer and small values


def bare(model: Module) -> Module:
    """Return the module inside its wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, Module):
            return model
        model = inner


def differences(saved: Mapping[str, Sequence[int]], here: Mapping[str, Sequence[int]]) -> str:
    """Describe how the names and shapes of a saved model differ from the model here."""
    wrong = [f"{name} is missing in the saved model" for name in here.keys() - saved.keys()]
    wrong += [f"{name} is missing in this model" for name in saved.keys() - here.keys()]
    wrong += [
        f"{name} is {list(saved[name])} in the saved model and {list(here[name])} in this model"
        for name in here.keys() & saved.keys()
        if list(here[name]) != list(saved[name])
    ]
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    return "; ".join(sorted(wrong)[:3]) + more


class Contents:
    """The model, optimizer and state of one save or load, with their tensors by name."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer | None,
        state: Fields,
    ) -> None:
        if not isinstance(model, Module):
            raise UsageError(f"The model of a checkpoint must be a torch.nn.Module, not {model!r}")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise UsageError(f"The optimizer of a checkpoint must be one of torch's, not {optimizer!r}")
        for name, value in state.items():
            if not is_stateful(value) and not isinstance(value, dict):
                raise UsageError(
                    f"{name}={value!r} cannot be kept in a checkpoint. Pass a dict, or an object with "
                    "state_dict() and load_state_dict()."
                )
        self._model = bare(model)
        # After a forward pass without a backward pass, FSDP2 leaves whole parameters.
        for module in self._model.modules():
            reshard = getattr(module, "reshard", None)
            if callable(reshard) and hasattr(module, "unshard"):
                reshard()
        self._optimizer = None if optimizer is None else OptimizerState(optimizer, self._model)
        self._state = state

    # ---- to a checkpoint

    def tensors(self, rank: int, world: int) -> Tensors:
        """Return the tensors that this rank saves.

        Each rank saves a share of the tensors that are equal on all ranks, and copies only this share for a
        background save. Rank 0 alone saves buffers, because DDP uses only rank 0's.
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

    def everything(self, rank: int) -> Tensors:
        """Return all tensors of this rank, for sharded tensors its part."""
        found = {f"model.{name}": value for name, value in self._model_tensors().items()}
        optimizer = {} if self._optimizer is None else self._optimizer.tensors()
        return found | optimizer | _random_state(rank)

    def keys(self) -> set[str]:
        """Return the names of the tensors that a checkpoint must have, from this rank's view."""
        optimizer = set() if self._optimizer is None else self._optimizer.tensors().keys()
        return {f"model.{name}" for name in self._model_tensors()} | optimizer

    def parts(self, rank: int) -> Document:
        """Return the `own_parts` of rank 0, or of a rank with a part of the optimizer's state, else `{}`."""
        divided = self._optimizer is not None and self._optimizer.divided
        return self.own_parts(rank) if rank == 0 or divided else {}

    def own_parts(self, rank: int) -> Document:
        """Return values other than tensors as this rank has them. The state is rank 0's.

        Raises UsageError for values that JSON cannot hold.
        """
        objects = {} if rank else self._state
        state = {name: to_json(name, values_of(value)) for name, value in objects.items()}
        optimizer = None if self._optimizer is None else self._optimizer.values()
        return {"optimizer": optimizer, "state": state}

    @staticmethod
    def joined(first: Fields, others: Sequence[Fields]) -> Document:
        """Join the `parts` of all ranks for a checkpoint."""
        parts = dict(first)
        for other in others:
            if "optimizer" in other:
                state = parts["optimizer"]["state"] | other["optimizer"]["state"]
                parts["optimizer"] = parts["optimizer"] | {"state": state}
        return parts

    # ---- from a checkpoint

    def check(self, manifest: Manifest) -> None:
        """Raise CheckpointError if the checkpoint does not match model, optimizer and state."""
        saved = {
            key.removeprefix("model."): entry["shape"]
            for key, entry in manifest.index.items()
            if key.startswith("model.")
        }
        if wrong := differences(saved, {name: value.shape for name, value in self._model_tensors().items()}):
            raise CheckpointError(f"The checkpoint has another model: {wrong}")
        if self._optimizer is not None:
            self._optimizer.check(manifest.parts["optimizer"])
        if missing := self._state.keys() - manifest.parts["state"].keys():
            raise CheckpointError(
                f"The checkpoint was saved without {', '.join(sorted(missing))}. Load it without these names."
            )

    def wanted(self, manifest: Manifest, rank: int, world: int) -> Tensors:
        """Return the tensors to fill: the model's own, and new ones for the rest. Raises errors of
        `check`.
        """
        self.check(manifest)
        found = {f"model.{name}": value for name, value in self._model_tensors().items()}
        if self._optimizer is not None:
            found |= self._optimizer.wanted(manifest.parts["optimizer"], manifest.index)
        if world == manifest.world:
            found |= {key: value for key, value in _random_state(rank).items() if key in manifest.index}
        return found

    def take(self, manifest: Manifest, tensors: Tensors) -> None:
        """Put the loaded values into model, optimizer and state."""
        model = {name: tensors[f"model.{name}"] for name in self._model_tensors()}
        self._model.load_state_dict(model)
        if self._optimizer is not None:
            self._optimizer.take(manifest.parts["optimizer"], tensors)
        put_values(self._state, from_json(manifest.parts["state"]))
        for key, value in tensors.items():
            if key.startswith("random.") and key.endswith(".cpu"):
                torch.set_rng_state(value)
            elif key.startswith("random."):
                torch.cuda.set_rng_state(value)

    def _model_tensors(self) -> Tensors:
        found = self._model.state_dict()
        for name, value in found.items():
            if not isinstance(value, Tensor):
                raise NotSupportedError(
                    f"{name} in the model's state is a {type(value).__name__}; it must be a tensor. Pass it "
                    "in `state=` of save_checkpoint."
                )
        return found


def _random_state(rank: int) -> Tensors:
    """Return the random generators of this rank, so that dropout continues without a change."""
    found = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
        found[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return found

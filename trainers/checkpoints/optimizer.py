"""An optimizer's state in a checkpoint. Knows torch's state dicts, and what optimizers of this package add to
them; no file and no other rank.

An optimizer whose state is divided among the ranks says with `owned_params()` for which parameters this rank
has it: its `state_dict()` has that only, its `load_state_dict()` wants no more. One with `extra_state()`, a
dict of numbers, and `load_extra_state()` has more that must go on: rank 0's is kept.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from trainers.checkpoints.manifest import CheckpointError
from trainers.checkpoints.tensors import Tensors, is_sharded
from trainers.checkpoints.values import from_json, to_json
from trainers.errors import UsageError


class OptimizerState:
    """An optimizer's state by the names of its parameters. JSON: `{"groups": [{"params": [names], options}],
    "state": {name: {key: value, or {"tensor": key}}}, "extra": its own or null}`. `divided`: other ranks have
    a part of `state`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        self._optimizer = optimizer
        names = {id(value): name for name, value in model.named_parameters()}
        self._params = [param for group in optimizer.param_groups for param in group["params"]]
        unknown = [tuple(param.shape) for param in self._params if id(param) not in names]
        if unknown:
            raise UsageError(
                f"the optimizer has parameters of shapes {unknown[:3]} that are not the model's; save them "
                "with the model that they belong to"
            )
        self._names = [names[id(param)] for param in self._params]
        owned = _owned(optimizer)
        self.divided = owned is not None
        self._mine = set(self._names) if owned is None else {names[id(param)] for param in owned}

    def tensors(self) -> Tensors:
        return {key: value for key, value in self._flat().items() if isinstance(value, torch.Tensor)}

    def values(self) -> dict[str, Any]:
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

    def check(self, saved: Mapping[str, Any] | None) -> None:
        if saved is None:
            raise CheckpointError("the checkpoint has no optimizer; it was saved without")
        theirs = [group["params"] for group in saved["groups"]]
        names = iter(self._names)
        ours = [[next(names) for _ in group["params"]] for group in self._optimizer.param_groups]
        if ours != theirs:
            raise CheckpointError(
                f"the checkpoint's optimizer has {sum(map(len, theirs))} parameters in {len(theirs)} groups "
                f"and this one {sum(map(len, ours))} in {len(ours)}, or in another order; make it as before"
            )

    def wanted(self, saved: Mapping[str, Any], index: Mapping[str, Any]) -> Tensors:
        by_name = dict(zip(self._names, self._params, strict=True))
        found = {}
        for name, entry in self._my_state(saved):
            for key in map(_tensor_key, entry.values()):
                if key is not None:
                    found[key] = _empty(index[key], by_name[name])
        for group in saved["groups"]:
            for key in map(_tensor_key, group.values()):
                if key is not None:
                    found[key] = _empty(index[key], None)
        return found

    def take(self, saved: Mapping[str, Any], tensors: Tensors) -> None:
        def value_of(value: Any) -> Any:
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
                    options[key] = tuple(value)  # betas: JSON has no tuples
            groups.append(options | {"params": [places[name] for name in group["params"]]})
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        go_on, extra = getattr(self._optimizer, "load_extra_state", None), saved.get("extra")
        if go_on is not None and extra is not None:
            go_on(from_json(extra))

    def _my_state(self, saved: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
        return [(name, entry) for name, entry in saved["state"].items() if name in self._mine]

    def _flat(self) -> dict[str, Any]:
        saved = self._optimizer.state_dict()
        found = {
            f"optimizer.state.{self._names[index]}.{key}": value
            for index, entry in saved["state"].items()
            for key, value in entry.items()
        }
        for place, group in enumerate(saved["param_groups"]):
            found |= {f"optimizer.group.{place}.{key}": value for key, value in group.items()}
        return found

    def _json(self, key: str, value: Any) -> Any:
        return {"tensor": key} if isinstance(value, torch.Tensor) else to_json(key, value)


def _owned(optimizer: Any) -> Collection[torch.Tensor] | None:
    """The parameters of which this rank has the state, None for all. The optimizer may be wrapped."""
    while optimizer is not None:
        ask = getattr(optimizer, "owned_params", None)
        if ask is not None:
            owned: Collection[torch.Tensor] = ask()
            return owned
        optimizer = getattr(optimizer, "inner", None)
    return None


def _tensor_key(value: Any) -> str | None:
    """The name of the tensor that a value of the manifest stands for."""
    return value["tensor"] if isinstance(value, dict) and value.keys() == {"tensor"} else None


def _empty(entry: Mapping[str, Any], like: torch.Tensor | None) -> torch.Tensor:
    shape, dtype = torch.Size(entry["shape"]), getattr(torch, entry["dtype"])
    if like is not None and is_sharded(like) and like.shape == shape:
        return torch.zeros_like(like, dtype=dtype)
    return torch.empty(shape, dtype=dtype)

"""Save a model's whole state in one file, and its optimizer's in another. `bundle` writes the files.

state-weights-5c3e9a01.safetensors      by the names of model.state_dict()
state-optimizer-5c3e9a01.safetensors    its tensors; the rest is in state.json
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from fleetrun.aliases import Document, Fields
from trainers.checkpoints.state import OptimizerState, bare, differences
from trainers.checkpoints.tensors import Sharded, is_sharded, whole_state_dict
from trainers.errors import NotSupportedError
from trainers.serving.bundle import Bundle, read_bundle, write_bundle
from trainers.storage.errors import LoadError
from trainers.storage.folder import Buffer, Where
from trainers.storage.safetensors import TYPES, SafetensorsError, Tensors, pack, unpack

KIND = "state"
_SUFFIX = ".safetensors"


def safetensors(tensors: Mapping[str, Tensor]) -> tuple[str, Sequence[Buffer]]:
    """Return suffix and content of a file. Raises NotSupportedError for a type that the format lacks."""
    for name, tensor in tensors.items():
        if tensor.dtype not in TYPES:
            raise NotSupportedError(f"{name} is {tensor.dtype}, which safetensors files do not support")
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return _SUFFIX, pack(whole, {"format": "pt"})


def is_divided(model: Module) -> bool:
    """Return True if ranks hold parts of the model.

    Between forward and backward, FSDP2 has whole parameters in place, so the class is checked too.
    """
    return isinstance(model, Sharded) or any(is_sharded(parameter) for parameter in model.parameters())


def save_state(
    where: Where,
    model: Module,
    optimizer: Optimizer | None,
    *,
    first: bool,
) -> None:
    """Save the state from the first rank. A sharded model is collected there, so all ranks must call this.

    Raises SaveError, and the former state then stays valid.
    """
    plain = bare(model)
    sharded = is_divided(plain)
    if optimizer is not None:
        _expect_whole(optimizer, sharded)
    state = whole_state_dict(model) if sharded else plain.state_dict()
    if not first:
        return
    about: Document = {"optimizer": None}
    files = {"weights": safetensors(_tensors_of(state))}
    if optimizer is not None:
        kept = OptimizerState(optimizer, plain)
        files["optimizer"] = safetensors(kept.tensors())
        about["optimizer"] = kept.values()
    write_bundle(where, KIND, about, files)


def load_state(where: Where, model: Module, optimizer: Optimizer | None) -> None:
    """Load the state. Raises LoadError for damaged files, or another model. Model and optimizer then do not
    change.
    """
    plain = bare(model)
    bundle = read_bundle(where, KIND, ("weights",) if optimizer is None else ("weights", "optimizer"))
    weights = _unpacked(bundle, "weights")
    here = _tensors_of(plain.state_dict())
    saved, now = ({name: value.shape for name, value in each.items()} for each in (weights, here))
    if wrong := differences(saved, now):
        raise LoadError(f"{bundle.where} has another model: {wrong}")
    if optimizer is not None:
        _expect_whole(optimizer, is_divided(plain))
        kept = OptimizerState(optimizer, plain)
        kept.check(bundle.about["optimizer"])
        kept.take(bundle.about["optimizer"], _unpacked(bundle, "optimizer"))
    plain.load_state_dict({name: _like(here[name], value) for name, value in weights.items()})


def _unpacked(bundle: Bundle, part: str) -> Tensors:
    try:
        return unpack(bundle.contents[part])
    except SafetensorsError as error:
        raise LoadError(f"{bundle.where}: its {part} cannot be used: {error}") from error


def _like(here: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part, if ranks hold parts."""
    if not is_sharded(here):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(here, DTensor)
    return distribute_tensor(whole.to(here.device), here.device_mesh, here.placements)


def _tensors_of(state: Fields) -> Tensors:
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise NotSupportedError(
                f"{name} in the model's state is a {type(value).__name__}; it must be a tensor"
            )
    return dict(state)


def _expect_whole(optimizer: Optimizer, sharded: bool) -> None:
    if (
        sharded
        or hasattr(optimizer, "owned_params")
        or hasattr(getattr(optimizer, "inner", None), "owned_params")
    ):
        raise NotSupportedError(
            "The ranks share the state of this optimizer (strategy.sharding). Use fleet.save_checkpoint and "
            "fleet.load_checkpoint to keep it."
        )

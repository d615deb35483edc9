"""Load and call models that were saved for serving.

A saved model is a program with its weights, so neither fleet nor the model's code is needed.
`fleet.save_inference_model` writes it.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetrun.aliases import Fields
from trainers.errors import UsageError
from trainers.serving.bundle import Bundle, read_bundle
from trainers.serving.program import dangers
from trainers.shapes import fits, shape_text
from trainers.storage.errors import LoadError
from trainers.storage.folder import Where
from trainers.storage.safetensors import SafetensorsError, unpack

KIND = "inference"


class InferenceModel:
    """A loaded model. Call it like the original, as `model(x)` or `model(x=x)`, for the same outputs.

    `inputs` holds the names of its inputs. `weights` maps names to weights, for inspection.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        weights: Mapping[str, Tensor],
        inputs: Sequence[Fields],
    ) -> None:
        self.weights = weights
        self.inputs = tuple(each["name"] for each in inputs)
        self._module = module
        self._wanted = inputs

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Compute the outputs without gradients. Raises UsageError for a wrong number, name, type or shape of
        inputs.
        """
        with torch.no_grad():
            return self._module(tuple(self.weights.values()), self._ordered(args, kwargs))

    def __repr__(self) -> str:
        return f"InferenceModel({', '.join(map(_words, self._wanted))})"

    def _ordered(self, args: Sequence[Tensor], kwargs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        given = dict(zip(self.inputs, args, strict=False)) | dict(kwargs)
        if len(args) + len(kwargs) != len(self.inputs) or given.keys() != set(self.inputs):
            raise UsageError(
                f"The program takes {', '.join(map(_words, self._wanted))}, but was given {len(args)} "
                f"inputs by position and {', '.join(kwargs) or 'none'} by name."
            )
        for wanted in self._wanted:
            _check(wanted, given[wanted["name"]])
        return tuple(given[name] for name in self.inputs)


def load_inference_model(dirname: Where, device: torch.device | str = "cpu") -> InferenceModel:
    """Load a model from `fleet.save_inference_model(dirname, model, inputs)`.

    `dirname` is a directory, or a URL for fsspec. Raises LoadError if the model is missing or damaged. A
    program with parts that could run code on loading is refused. For malicious files, torch.export itself
    gives no guarantee, so load only models from people whom you trust.
    """
    bundle = read_bundle(dirname, KIND, ("program", "weights"))
    if bundle.about.get("tables"):
        raise LoadError(
            f"{bundle.where} was saved without rows of its tables (rows=False). Serve it with `fleetrun "
            "serve --follow`, which reads the rows from a published directory."
        )
    file = checked_program(bundle)
    try:
        weights = unpack(bundle.contents["weights"])
        order, inputs = list(bundle.about["weights"]), list(bundle.about["inputs"])
        ordered = {name: weights[name].to(device) for name in order}
    except (SafetensorsError, KeyError, TypeError, ValueError) as error:
        raise LoadError(f"{bundle.where} cannot be used: {error!r}") from error
    exported = torch.export.load(io.BytesIO(file))
    if torch.device(device).type != "cpu":
        from torch.export.passes import move_to_device_pass

        exported = move_to_device_pass(exported, str(device))
    return InferenceModel(exported.module(), ordered, inputs)


def checked_program(bundle: Bundle) -> bytes:
    """Return the program's file. Raises LoadError if the program could run code on loading."""
    file = bundle.contents["program"].numpy().tobytes()
    try:
        suspects = dangers(file)
    except ValueError as error:
        raise LoadError(f"{bundle.where} cannot be used: {error}") from error
    if suspects:
        some = ", ".join(suspects[:3])
        raise LoadError(f"The program in {bundle.where} has parts that could run code: {some}")
    return file


def _check(wanted: Fields, given: Tensor) -> None:
    same = isinstance(given, Tensor) and str(given.dtype) == f"torch.{wanted['type']}"
    if not (same and fits(given.shape, wanted["shape"])):
        found = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
        raise UsageError(f"The program takes {_words(wanted)}, but was given {found}.")


def _words(wanted: Fields) -> str:
    return f"{wanted['name']}: {wanted['type']} {shape_text(wanted['shape'])}"

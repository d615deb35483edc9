"""The fleet API's calls that write what has been trained, and read it again."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from trainers import progress
from trainers.calls.begun import Begun
from trainers.collective.runtime import CollectiveRuntime
from trainers.errors import UsageError
from trainers.runtime import Runtime, Where

if TYPE_CHECKING:
    from trainers.serving.program import Inputs


class Saving(Begun):
    """Models and tables as files, for serving and for another job. Every call that saves leaves what was in
    the folder as it was until the new one is complete; an interrupted one counts for nothing. A folder is a
    path, or a URL that fsspec knows.
    """

    def save_persistables(self, dirname: Where, model: torch.nn.Module | None = None, mode: int = 0) -> None:
        """Save what has been trained.

        With parameter servers: all tables, to a folder that every server can write. For one trainer to call;
        the others may go on training. mode: 0 everything; 1 the rows changed since the last save, beside it;
        2 values only, for serving; 3 as 0, when a day has passed in the tables' statistics.

        Collective: the model's whole state, as `save` does without an optimizer.

        Raises SaveError or ServerError; the former save stays current then.
        """
        _check_folder("save_persistables", dirname)
        runtime = self._ready("save_persistables")
        if isinstance(mode, bool) or mode not in (0, 1, 2, 3):
            raise UsageError(f"save_persistables mode is {mode!r}; it must be 0, 1, 2 or 3")
        if isinstance(runtime, CollectiveRuntime):
            self._save_state("save_persistables", dirname, model, None, mode)
        else:
            _save_tables(runtime, dirname, mode)

    def save(
        self,
        dirname: Where,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        mode: int = 0,
    ) -> None:
        """Save the whole state of a model, and of its optimizer: safetensors files that any number of
        processes loads, and any tool reads. `fleet.save_checkpoint` saves more, and in parallel.

        Collective: the first trainer writes; the others may call it too, and must where the model is
        sharded. It is there for all after a `barrier_worker()`. With parameter servers:
        `save_persistables(dirname, mode)`; the servers have the optimizer's state. Raises SaveError or
        ServerError.
        """
        _check_folder("save", dirname)
        if isinstance(self._ready("save"), CollectiveRuntime):
            self._save_state("save", dirname, model, optimizer, mode)
        else:
            self.save_persistables(dirname, mode=mode)

    def load(
        self,
        dirname: Where,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """Bring a model, and its optimizer, to the state that `save` or `save_persistables` of a collective
        job has written. All trainers call it; with parameter servers before init_worker, to begin from these
        values.

        Raises LoadError when it is damaged or of another model; nothing has changed then.
        """
        _check_folder("load", dirname)
        runtime = self._ready("load")
        if not isinstance(runtime, CollectiveRuntime) and (model is None or optimizer is not None):
            raise UsageError(
                "fleet.load() in a job with parameter servers brings values into a model before "
                "fleet.init_worker(); tables and optimizer state are the servers': fleet.init_server(dirname)"
            )
        from trainers.serving.weights import load_state

        with progress.activity("loading the model"):
            load_state(dirname, _checked("load", model), _made(runtime, optimizer))

    def save_inference_model(
        self,
        dirname: Where,
        model: torch.nn.Module | None = None,
        example_inputs: Inputs | None = None,
        *more: object,
        dynamic_shapes: object = None,
    ) -> None:
        """Save a model to be called without fleet, and without its code: `trainers.inference.
        load_inference_model(dirname)`. A program of torch.export, and its weights beside it in a safetensors
        file.

        example_inputs: what the model is called with: a tensor, a tuple of tensors, or a dict by the names
        that `forward` has for them. The program takes batches of any size; `dynamic_shapes`, a tuple with
        what torch.export takes for each input, says more, and () fixes all.

        For one trainer to call, or all; the first writes. With parameter servers it takes the rows that are
        there at the moment, which must fit into this process; an id without a row reads as in evaluation.
        Without a model it saves the values of all tables, which `trainers.ps.read_values(dirname)` reads.

        Raises SaveError, NotSupportedError for a model that fixes the size of a batch, and what torch.export
        raises for one that it cannot export.
        """
        _check_folder("save_inference_model", None if more else dirname)
        runtime = self._ready("save_inference_model")
        if model is None and not isinstance(runtime, CollectiveRuntime):
            _save_tables(runtime, dirname, 2)
            return
        model = _checked("save_inference_model", model)
        if example_inputs is None:
            raise UsageError(
                "fleet.save_inference_model() wants example_inputs with the model: a batch for its forward()"
            )
        if self._who("save_inference_model").index == 0 or not isinstance(runtime, CollectiveRuntime):
            from trainers.serving.inference import save_program

            with progress.activity("saving the model for serving"):
                stand_ins = runtime.stand_ins(model, dirname)
                save_program(dirname, model, example_inputs, dynamic_shapes, stand_ins)

    def _save_state(
        self,
        call: str,
        dirname: Where,
        model: torch.nn.Module | None,
        optimizer: torch.optim.Optimizer | None,
        mode: int,
    ) -> None:
        from trainers.serving.weights import save_state

        if mode:
            raise UsageError(
                f"fleet.{call}() was given mode={mode}; modes are of tables, and this job has no servers"
            )
        first = self._who(call).index == 0
        with progress.activity("saving the model"):
            save_state(dirname, _checked(call, model), _made(self._runtime, optimizer), first=first)


def _save_tables(runtime: Runtime, dirname: Where, mode: int) -> None:
    with progress.activity("saving tables"):
        runtime.save(dirname, mode)


def _check_folder(call: str, dirname: Any) -> None:
    """Paddle's calls have an executor somewhere, and more arguments."""
    if not isinstance(dirname, str | os.PathLike):
        example = ", example_inputs" if call == "save_inference_model" else ""
        raise UsageError(
            f"fleet.{call}() wants a folder and a torch module. Of Paddle's executor, feeds, targets and "
            f"program it needs none: write fleet.{call}(dirname, model{example})"
        )


def _checked(call: str, model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        what = "no model" if model is None else f"{model!r} as the model"
        raise UsageError(
            f"fleet.{call}() was given {what}; give the torch.nn.Module, as fleet.distributed_model() "
            "returned it or before"
        )
    return model


def _made(runtime: Any, optimizer: Any) -> torch.optim.Optimizer | None:
    """Fleet's optimizer, where it is the script's own that was given."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"the optimizer must be one of torch's or fleet's, not {optimizer!r}")
    return runtime.made_of(optimizer) if isinstance(runtime, CollectiveRuntime) else optimizer

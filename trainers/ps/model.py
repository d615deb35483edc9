"""Change torch's own calls on a model while the servers hold its values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from fleetrun.aliases import Callback, Fields
from trainers.collective.configs import AmpConfigs
from trainers.collective.data_parallel import compute_in, device_of
from trainers.collective.stepping import scaler_of
from trainers.errors import UsageError
from trainers.ps.optimizer import JoinedSteps, ServedScaler
from trainers.ps.trainer.embedding import outside_graphs
from trainers.ps.trainer.torchrec import collection_tables, is_collection
from trainers.ps.trainer.weight import hidden_gradients
from trainers.ps.trainer.worker import Worker


class OwnHook:
    """A hook of a module that copies of the module lack, because copies have their own values."""

    def __init__(self, hook: Callable[..., object]) -> None:
        self._hook = hook

    def __call__(self, *args: object) -> object:
        return self._hook(*args)

    def __reduce__(self) -> tuple[object, ...]:
        return OwnHook, (_nothing,)


def _nothing(*args: object) -> None:
    return


def _zero_grad(model: Module, before: OwnHook, set_to_none: bool = True) -> None:
    """Do the same as `model.zero_grad`, and also drop the gradients of rows."""
    before(set_to_none)
    with hidden_gradients():
        type(model).zero_grad(model, set_to_none)


def clear_gradients(model: Module) -> None:
    """Do the same as `model.clear_gradients` in Paddle's scripts."""
    model.zero_grad()


class StateLoading:
    """`load_state_dict()` of the model or of a module in it. All trainers call it after the same steps.

    Each trainer loads its state as torch does. Then the servers take the values that trainer 0 has loaded.
    Torch calls the hooks of all modules. The hooks of the outermost module start and end the load.
    """

    def __init__(self, model: Module, worker: Worker, joined: JoinedSteps | None) -> None:
        self._model = model
        self._worker = worker
        self._joined = joined
        self._outermost: Module | None = None

    def watch(self) -> list[RemovableHandle]:
        """Watch loads until the returned handles are removed."""
        modules, before, after = list(self._model.modules()), OwnHook(self._before), OwnHook(self._after)
        handles = [each.register_load_state_dict_pre_hook(before) for each in modules]  # type: ignore[no-untyped-call]  # torch's
        return handles + [each.register_load_state_dict_post_hook(after) for each in modules]  # type: ignore[no-untyped-call]

    def _before(
        self,
        module: Module,
        state: dict[str, torch.Tensor],
        prefix: str,
        metadata: Fields,
        *rest: object,
    ) -> None:
        if prefix and module is not self._model and self._outermost is not None:
            return
        if metadata.get("assign_to_params_buffers"):
            raise UsageError(
                "load_state_dict(assign=True) would replace parameters that the servers train. Call "
                "load_state_dict() without assign."
            )
        if self._joined is not None:
            self._joined.check("load_state_dict() was called")
        self._worker.begin_load(module, state, prefix)
        self._outermost = module

    def _after(self, module: Module, keys: object) -> None:
        if module is self._outermost:
            self._outermost = None
            self._worker.end_load()


def watch_model(model: Module, worker: Worker, joined: JoinedSteps | None, *, refresh: bool) -> Callback:
    """Keep `state_dict()`, `load_state_dict()`, evaluation and `zero_grad()` correct until the returned
    function is called.

    With `refresh`, pull dense values before they are read, because they change between this trainer's steps
    (async).
    """
    handles = StateLoading(model, worker, joined).watch()
    end_look_ahead = worker.look_ahead.watch()
    if joined is not None:
        inside = collection_tables(model)
        owners = [
            each
            for each in model.modules()
            if each not in inside
            and (is_collection(each) or next(each.parameters(recurse=False), None) is not None)
        ]
        before = OwnHook(partial(joined.check, "the model was called"))
        read = OwnHook(partial(joined.check, "state_dict() was called"))
        handles += [each.register_forward_pre_hook(before) for each in owners]
        handles += [each.register_state_dict_pre_hook(read) for each in owners]  # type: ignore[no-untyped-call]
    if refresh:
        handles += _refreshing(model, worker)

    def before_zero_grad(set_to_none: bool) -> None:
        if joined is not None:
            joined.check("model.zero_grad() was called")
        for group in worker.groups_of():
            group.drop_gradients(set_to_none=set_to_none)

    # A partial, because a copy of the model must get the copy's own zero_grad.
    model.__dict__["zero_grad"] = partial(_zero_grad, model, OwnHook(before_zero_grad))

    def end() -> None:
        end_look_ahead()
        for handle in handles:
            handle.remove()
        for name in ("zero_grad", "clear_gradients"):
            model.__dict__.pop(name, None)

    return end


def _refreshing(model: Module, worker: Worker) -> list[RemovableHandle]:
    """Pull dense values before evaluation and before `state_dict()`."""

    def before_forward(module: Module, args: tuple[object, ...]) -> None:
        # torch.export traces a copy of the model, whose values must not be refreshed.
        if not (module.training or torch.compiler.is_exporting()):
            worker.refresh()

    return [
        model.register_forward_pre_hook(OwnHook(before_forward)),
        model.register_state_dict_pre_hook(OwnHook(lambda module, prefix, keep_vars: worker.refresh())),  # type: ignore[no-untyped-call]  # torch's
    ]


def compute_in_half(model: Module, amp: AmpConfigs, ends: ExitStack) -> ServedScaler | None:
    """Compute in 16 bits until `ends` closes. Copies of the model compute in the types of their weights.
    Return the scaler that float16 needs.
    """
    for handle in compute_in(
        model, getattr(torch, amp.dtype), hook=lambda call: OwnHook(outside_graphs(call))
    ):
        ends.callback(handle.remove)
    if amp.dtype != "float16":
        return None
    return ServedScaler(scaler_of(amp, device_of(model.parameters())), amp)

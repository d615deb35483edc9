"""Optimizers of a model that servers train. `step` pushes gradients, and several optimizers push together.

If the loss is scaled, all gradients are unscaled before the push, also the gradients of rows. If some
gradients are not finite, the push is sent without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from fleetrun.aliases import Document
from fleetrun.frozen import frozen
from trainers import progress
from trainers.collective.stepping import DistributedScaler, not_scaled
from trainers.errors import NotSupportedError, UsageError
from trainers.optimizer import DistributedOptimizer, loss_of, parameters_of
from trainers.ps.trainer.exchange import same_bits
from trainers.ps.trainer.group import TableGroup
from trainers.ps.trainer.layout import options_snapshot
from trainers.ps.trainer.weight import ServedWeight, hidden_gradients, without_overrides
from trainers.ps.trainer.worker import Worker


class Stepper(Protocol):
    """The functions that an optimizer needs from its runtime."""

    worker: Worker | None

    @property
    def serving(self) -> bool: ...

    @property
    def scaler(self) -> ServedScaler | None:
        """The scaler of amp in float16, or None before training starts."""

    @property
    def kept(self) -> bool:
        """True while gradients of some optimizers are kept until the others have stepped."""

    def step(self, optimizer: ServedOptimizer, *, overflow: bool = False) -> None: ...

    def drop_rows(self, optimizer: ServedOptimizer, *, set_to_none: bool) -> None: ...

    def agree(self, overflow: bool) -> bool: ...


class ServedScaler(DistributedScaler):
    """A GradScaler that also unscales the gradients of rows.

    If some gradients are not finite, the push is sent without gradients and the scaler lowers its scale. Each
    trainer has its own scale.
    """

    def unscale_(self, optimizer: Optimizer) -> None:
        if not self.is_enabled() or not isinstance(optimizer, ServedOptimizer):
            super().unscale_(optimizer)
            return
        with hidden_gradients():
            torch.amp.GradScaler.unscale_(self, optimizer)
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        overflow = any(bool(each.item()) for each in found.values())
        overflow |= not optimizer.unscale_rows(self.get_scale())
        found.clear()  # torch finds nothing for an optimizer without dense parameters
        found[torch.device("cpu")] = torch.tensor(float(optimizer.agree(overflow)))


class ServedOptimizer(DistributedOptimizer):
    """An optimizer whose `step` pushes the gradients. The servers do the arithmetic and keep the state
    (momentum, moments).

    You may change learning rates from step to step, because each push carries them. All other options keep
    their values of init_worker.
    """

    def __init__(self, inner: Optimizer, stepper: Stepper) -> None:
        super().__init__(inner)
        self._stepper = stepper
        self._local = False
        self._unscaled = False
        self._stepped = False
        self._frozen: list[Document] | None = None
        self.weights: set[int] | None = None
        """The ids of its parameters if there are several optimizers."""

    def freeze_options(self) -> None:
        """Allow only changes of the learning rate from now on, and only steps through this optimizer."""
        self._frozen = options_snapshot(self.inner)
        self.inner.register_step_pre_hook(self._refuse_direct_step)

    def _refuse_direct_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if not self._local and self._stepper.serving:
            raise UsageError(
                f"{type(optimizer).__name__}.step() was called on the optimizer given to "
                "fleet.distributed_optimizer(), which does not train served parameters. Call step() or "
                "minimize() of the returned optimizer."
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if torch.amp.GradScaler leaves unscaling to `step`.

        `step` refuses such a scaler. fleetrun's own scaler has unscaled already.
        """
        return not self._unscaled

    @property
    def groups(self) -> list[TableGroup]:
        """The groups of the optimizer's embeddings."""
        worker = self._stepper.worker
        return [] if worker is None else worker.groups_of(self.weights)

    def has_gradients(self) -> bool:
        with hidden_gradients():
            return self._has_rows() or super().has_gradients()

    def is_cleared(self) -> bool:
        with hidden_gradients():
            return not self._has_rows() and super().is_cleared()

    def _has_rows(self) -> bool:
        """Return True if there are gradients of rows that no step has pushed."""
        return any(group.collected.events and group.collected.tables for group in self.groups)

    def minimize(self, loss: Tensor) -> None:
        scaler = self._stepper.scaler
        if scaler is None:
            super().minimize(loss)
            return
        found = self.has_gradients_of(loss)
        # The first optimizer has then scaled the loss for all.
        if self.has_gradients() and not self._stepper.kept:
            raise not_scaled("loss.backward()")
        if not found:
            self._backward(scaler.scale(loss))
        progress.meter.has_loss(loss)
        scaler.step(self)
        if not self._stepper.kept:
            scaler.update()
        self.zero_grad()

    @contextmanager
    def unscaled(self) -> Iterator[None]:
        """Mark the gradients as unscaled during the step of a scaler.

        If the scaler skips the step, the gradients were not finite.
        """
        self._unscaled, self._stepped = True, False
        try:
            yield
            if not self._stepped:
                self._stepper.step(self, overflow=True)
        finally:
            self._unscaled = False

    def unscale_rows(self, scale: float) -> bool:
        """Divide the gradients of this optimizer's rows by `scale`. Return True if all are finite."""
        found = [group.collected.unscale(scale) for group in self.groups]
        return all(found)

    def agree(self, overflow: bool) -> bool:
        """Return True if the step is to be skipped. `overflow` describes the gradients of this trainer."""
        return self._stepper.agree(overflow)

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        if self.__dict__.pop("found_inf", None) is not None:  # an enabled scaler sets this
            raise NotSupportedError(
                "torch.amp.GradScaler does not unscale the gradients of rows on parameter servers. Use "
                "fleet.distributed_scaler(scaler), strategy.amp, or bfloat16, which needs no scaler."
            )
        if self._stepper.scaler is not None and not self._unscaled:
            raise not_scaled("step()")
        loss = loss_of(closure)
        if self._frozen is not None and options_snapshot(self.inner) != self._frozen:
            raise NotSupportedError(
                f"The parameters of the groups of {type(self.inner).__name__}, or an option other than lr, "
                "changed after fleet.init_worker(), but the servers keep the original ones. Change only lr "
                "(a scheduler with cycle_momentum changes other options)."
            )
        self._stepped = True
        self._stepper.step(self)
        return loss

    def local_step(self) -> None:
        """Step in this process, for parameters that no server trains."""
        self._local = True
        try:
            with hidden_gradients():
                self.inner.step()
        finally:
            self._local = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        with hidden_gradients(), without_overrides():
            super().zero_grad(set_to_none)
        self._stepper.drop_rows(self, set_to_none=set_to_none)

    def _share(self, loaded: Optimizer) -> None:
        """Keep the groups of init_worker() and fill them with the loaded values, because the tables read
        their learning rates from these groups.
        """
        for kept, new in zip(self.param_groups, self.inner.param_groups, strict=True):
            values = dict(new)
            kept.clear()
            kept.update(values)
        self.inner.param_groups, self.state = self.param_groups, self.inner.state

    def load_state_dict(self, state_dict: Document) -> None:
        if state_dict.get("state"):
            raise NotSupportedError(
                "Optimizer state cannot be loaded into this optimizer, because the servers hold it. Save it "
                "with fleet.save_persistables(dirname), and load it with fleet.init_server(dirname)."
            )
        super().load_state_dict(state_dict)


class CombinedOptimizer(Optimizer):
    """Several optimizers that step together, as TorchRec's CombinedOptimizer."""

    def __init__(self, optimizers: Sequence[ServedOptimizer]) -> None:
        self.optimizers = optimizers
        super().__init__([group for each in optimizers for group in each.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = loss_of(closure)
        for each in self.optimizers:
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)

    def minimize(self, loss: Tensor) -> None:
        """Make one whole training step, see `DistributedOptimizer.minimize`."""
        for each in self.optimizers:
            each.minimize(loss)


class JoinedSteps:
    """The steps of all optimizers of one model, joined into one push.

    Servers apply the gradients of a training step together, so the push leaves when the last optimizer has
    stepped. Until then, the gradients and learning rates of the other optimizers are kept. Operations that
    torch would compute differently are refused in the meantime. These are a forward pass, a look at the state
    dict, gradients of rows after the step, a second step of one optimizer, and a write to a `dense`
    parameter.

    `push` receives True if gradients of any optimizer were not finite.
    """

    def __init__(
        self,
        optimizers: Sequence[ServedOptimizer],
        push: Callable[[bool], None],
        dense: Sequence[torch.nn.Parameter],
    ) -> None:
        self._dense = {id(each) for each in dense}
        self._optimizers = optimizers
        for one in optimizers:
            one.weights = {id(each) for each in parameters_of(one)}
        self._push = push
        self._kept: dict[int, _Kept] = {}
        self._overflow = False

    @property
    def waits(self) -> bool:
        """True while some optimizers have stepped and others have not."""
        return bool(self._kept)

    def stepped(self, optimizer: ServedOptimizer) -> bool:
        """Return True if the gradients of this optimizer are kept for the push."""
        return id(optimizer) in self._kept

    def step(self, optimizer: ServedOptimizer, *, overflow: bool = False) -> None:
        if self.stepped(optimizer):
            raise UsageError(f"{type(optimizer.inner).__name__} stepped twice, but {self._missing()}")
        for former in self._kept.values():
            if not all(same_bits(parameter, value) for parameter, value in former.values):
                self._kept.clear()
                raise UsageError(
                    "The script changed a parameter after the step() of its optimizer and before the step() "
                    "of another. Servers apply the gradients of all optimizers together. Change values after "
                    "all optimizers have stepped."
                )
        last = len(self._kept) == len(self._optimizers) - 1
        self._overflow |= overflow
        # Copy, because zero_grad(set_to_none=False) or a scheduler's step may come before the push.
        self._kept[id(optimizer)] = _Kept.of(optimizer, _rows_of(optimizer), self._dense, copy=not last)
        if not last:
            return
        for each in self._optimizers:
            if _rows_of(each) != self._kept[id(each)].rows:
                name = type(each.inner).__name__
                self._kept.clear()
                raise UsageError(
                    f"Rows of {name} received gradients after its step(), or the script changed their "
                    "gradients. Servers apply the gradients of all optimizers together. Call backward() for "
                    "all losses of a training step before the first step(), and clear gradients with "
                    "zero_grad()."
                )
        current = [_Kept.of(each, None, ()) for each in self._optimizers]
        try:
            for kept in self._kept.values():
                kept.put_back()
            self._push(self._overflow)
        finally:
            self._overflow = False
            for kept in current:
                kept.put_back()
            self._kept.clear()

    def check(self, what: str = "training ended", *hooked: object) -> None:
        """Raise UsageError if an optimizer has stepped and another has not.

        `hooked` holds the arguments that torch passes to a hook.
        """
        if self._kept:
            raise UsageError(f"{what} while {self._missing()}")

    def _missing(self) -> str:
        missing = [type(each.inner).__name__ for each in self._optimizers if not self.stepped(each)]
        return (
            f"{', '.join(missing)} had not stepped. Servers apply the gradients of all optimizers together. "
            "Call step() of each optimizer once per training step, after its backward pass, or use one "
            "optimizer with several parameter groups."
        )


def _rows_of(optimizer: ServedOptimizer) -> object:
    """Return a value that changes whenever the gradients of the optimizer's embeddings change."""
    return [group.collected.state for group in optimizer.groups]


@frozen
class _Kept:
    """The gradients, rates and values of an optimizer at the time of its step."""

    gradients: list[tuple[Tensor, Tensor | None]]
    rates: list[tuple[Document, object]]
    rows: object
    values: list[tuple[Tensor, Tensor]]

    @classmethod
    def of(
        cls, optimizer: ServedOptimizer, rows: object, dense: Container[int], *, copy: bool = False
    ) -> _Kept:
        values: list[tuple[Tensor, Tensor]] = []
        every = parameters_of(optimizer)
        own: list[tuple[Tensor, Tensor | None]] = [
            (each, each.grad) for each in every if not isinstance(each, ServedWeight)
        ]
        if copy:
            trained = [each for each, grad in own if grad is not None and id(each) in dense]
            values = [(each, each.detach().clone()) for each in trained]
            own = [(each, None if grad is None else grad.clone()) for each, grad in own]
        rates = [(group, group.get("lr")) for group in optimizer.param_groups]
        if copy:  # torch changes a rate that is a tensor in place
            rates = [(group, lr.clone() if isinstance(lr, Tensor) else lr) for group, lr in rates]
        return cls(own, rates, rows, values)

    def put_back(self) -> None:
        for parameter, grad in self.gradients:
            parameter.grad = grad
        for group, rate in self.rates:
            group["lr"] = rate

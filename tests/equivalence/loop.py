"""The loop of a program: it runs the blocks at their moments, on a served model or on its plain twin."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.equivalence.children import Seen
from tests.equivalence.data import Batch, CountingSampler, Examples, as_dict, batches_of, random_number
from tests.equivalence.model import Net
from tests.equivalence.program import BATCH, DIM, ROWS, STEPS, Block, Program, define, some_steps
from tests.equivalence.rules import SCHEDULERS, Steppers


class Stop(Exception):
    """The loop ends early."""


@dataclass(eq=False)
class Run:
    """One run of a program in this process."""

    program: Program
    net: Net
    steppers: Steppers
    examples: Examples
    seen: list[Seen] = field(default_factory=list)
    step: int = 0
    steps_made: int = 0
    last_loss: float = 0.0
    skip: bool = False
    no_step: bool = False
    terms: list[torch.Tensor] = field(default_factory=list)
    batch: Batch = field(default_factory=dict)
    sampler: CountingSampler | None = None
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.own_random = torch.Generator().manual_seed(self.program.seed)

    @property
    def divisor(self) -> float:
        """Of sums over a batch: constant, so that the mean over trainers is the joined one."""
        return float(BATCH * len(self.examples.ranks))

    def see(self, label: str, value: torch.Tensor, *, shared: bool = False) -> None:
        if not self.program.merged:  # steps that are merged are seen late
            self.seen.append(Seen(f"{label} at step {self.step}", value.detach().clone(), shared))

    def random(self, which: str) -> float:
        return random_number(which, self.own_random)

    def fire(self, moment: str) -> None:
        for block in self.program.blocks:
            found = MOMENTS.get(block.name, {})
            at = block.get("at")
            if moment in found and (at is None or moment in ("start", "end") or self.step in at):
                found[moment](self, block)

    # ---- The loop

    def train(self) -> None:
        torch.manual_seed(self.program.seed)
        random.seed(self.program.seed)
        np.random.seed(self.program.seed)  # the global one is the point
        self.fire("start")
        with contextlib.suppress(Stop):
            while self.step < STEPS:
                self._pass()
        self.fire("end")

    def _pass(self) -> None:
        """One pass over the batches, as far as it is needed."""
        again = self.program.first("new_pass")
        for batch in batches_of(self, self.examples):
            if self.step >= STEPS:
                return
            self.batch = as_dict(batch)
            self.skip = self.no_step = False
            self.fire("batch")
            if not self.skip:
                self._turn()
            self.fire("after")
            self.step += 1
            if again is not None and self.step == again["step"]:
                return

    def _turn(self) -> None:
        self.terms = []
        if self.program.has("zeroed_before"):
            self._zero()
        if self.program.has("closure"):
            self.steppers.step_with(self._with_gradients)
            self._stepped()
            return
        if self.program.has("minimize"):
            self.steppers.minimize(self._forward())
            self._stepped(zero=False)
            return
        self._with_gradients()
        every = self.program.first("accumulate")
        if self.no_step or (every is not None and (self.step + 1) % every["every"]):
            return
        self.steppers.step()
        self._stepped()

    def _with_gradients(self) -> torch.Tensor:
        loss = self._forward()
        if loss.requires_grad:
            self._backward(loss)
        self.fire("gradients")
        return loss

    def _forward(self) -> torch.Tensor:
        out = self.net(self.batch, self.step)
        self.terms.append(self.net.losses(self.batch, out, self.step).sum() / self.divisor)
        self.memory["out"] = out
        self.fire("loss")
        loss = torch.stack(self.terms).sum()
        self.see("loss", loss, shared=True)
        self.last_loss = loss.item()
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        if self.program.has("several_losses"):
            wanted = [each for each in self.terms if each.requires_grad]
            for number, term in enumerate(wanted):
                term.backward(retain_graph=number + 1 < len(wanted))
        elif self.program.has("twice_backward"):
            loss.backward(retain_graph=True)
            (0.5 * loss).backward()
        else:
            loss.backward()

    def _stepped(self, *, zero: bool = True) -> None:
        self.steps_made += 1
        self.fire("step")
        if zero and not self.program.has("zeroed_before"):
            self._zero()

    def _zero(self) -> None:
        if self.program.has("zeroed_by_model"):
            self.net.zero_grad()
        elif self.program.has("zeroed_by_hand"):
            for each in self.net.parameters():
                each.grad = None
        else:
            self.steppers.zero_grad(not self.program.has("zeroed_in_place"))

    # ---- What blocks need

    def evaluate(self, label: str) -> None:
        """See the outputs for a batch that is the same in all trainers."""
        batch = as_dict(Examples(self.program.only(()), (0,)).batch(999))
        self.see(label, self.net(batch))

    def table(self, block: Block) -> Any:
        return self.net.table_of(block)

    def ids(self, block: Block) -> torch.Tensor:
        """(n, 2): other ids than the model's. They are a part of the batch, or computed from it."""
        if block.get("computed"):
            return (self.batch["ids"][:, :2] + 3) % ROWS
        return self.batch["ids"][:, -2:]

    def lookup(self, block: Block, ids: torch.Tensor) -> torch.Tensor:
        return self.net.lookup(self.net.place(block), ids)

    def layer(self) -> torch.nn.Linear:
        return self.net.x


Handler = Callable[[Run, Block], None]
MOMENTS: dict[str, dict[str, Handler]] = {}
"""By name of a block and moment: start, batch, loss, gradients, step (before gradients are cleared), after,
end.
"""


def at(
    moment: str, name: str, about: str = "", draw: Any = None, **rest: Any
) -> Callable[[Handler], Handler]:
    """Define a block of the loop, or another moment of one."""
    if about:
        define("loop", name, about, draw, **rest)

    def keep(function: Handler) -> Handler:
        MOMENTS.setdefault(name, {})[moment] = function
        return function

    return keep


def _at(rng: random.Random) -> dict[str, Any]:
    return {"at": some_steps(rng)}


def _often(rng: random.Random) -> dict[str, Any]:
    return {"at": tuple(sorted(rng.sample(range(STEPS), rng.randint(2, 5))))}


def _once(rng: random.Random) -> dict[str, Any]:
    return {"at": (rng.randrange(1, STEPS - 1),)}


def _table_at(rng: random.Random) -> dict[str, Any]:
    return {"table": rng.randrange(3), **_at(rng)}


def _lookups(rng: random.Random) -> dict[str, Any]:
    """At some steps or regularly, so that they can be foreseen."""
    at = rng.choice(
        (some_steps(rng), some_steps(rng), *(tuple(range(0, STEPS, every)) for every in (1, 2, 3)))
    )
    return {"table": rng.randrange(3), "at": at, "computed": rng.random() < 0.3}


def _table_once(rng: random.Random) -> dict[str, Any]:
    return {"table": rng.randrange(3), **_once(rng)}


def _table(rng: random.Random) -> dict[str, Any]:
    return {"table": rng.randrange(3)}


# ---- The job


define(
    "job",
    "merged_steps",
    "async: a push has several steps; gradients do not depend on values",
    lambda rng: {"steps": rng.randint(2, 3), "overlap": rng.random() < 0.5},
    weight=0.0,
    merged=True,
)
define("job", "two_servers", "on two servers", merged=True, weight=2.0)
define("job", "all_on_both", "tables are shared by two servers", merged=True)

# ---- The structure of a step

define("loop", "accumulate", "several backward passes for a step", lambda rng: {"every": rng.choice((2, 3))})
define("loop", "several_losses", "a backward pass for each loss")
define("loop", "twice_backward", "two backward passes through the same graph", merged=True)
define("loop", "closure", "step(closure)", weight=0.5)
define("loop", "minimize", "minimize(loss) instead of backward, step and zero_grad", weight=0.5)
define("loop", "zeroed_before", "gradients are cleared before the forward pass")
define("loop", "zeroed_by_model", "model.zero_grad()")
define("loop", "zeroed_by_hand", "p.grad = None for each parameter")
define("loop", "zeroed_in_place", "zero_grad(set_to_none=False)", weight=0.7)
define(
    "loop", "new_pass", "the loop breaks, and begins another pass", lambda rng: {"step": rng.randint(2, 5)}
)


@at("batch", "skipped_batch", "batches that the loop skips", _at, weight=1.5, merged=True)
def _skipped_batch(run: Run, block: Block) -> None:
    run.skip = True


@at("gradients", "dropped_gradients", "gradients are cleared without a step", _at)
def _dropped_gradients(run: Run, block: Block) -> None:
    if not (run.program.has("closure") or run.program.has("minimize")):
        run._zero()
        run.no_step = True


@at("batch", "forward_only", "a forward pass with gradients, but no backward pass", _at, weight=1.5)
def _forward_only(run: Run, block: Block) -> None:
    run.see("output", run.net(run.batch, run.step).sum() / run.divisor, shared=True)
    run.skip = True


@at("batch", "early_stop", "the loop ends", lambda rng: {"at": (rng.randint(3, 5),)}, merged=True)
def _early_stop(run: Run, block: Block) -> None:
    raise Stop


# ---- Lookups beside the model's own


@at("loss", "detached_lookup", "another lookup, detached, is part of the loss", _lookups, weight=2.5)
def _detached_lookup(run: Run, block: Block) -> None:
    scale = run.lookup(block, run.ids(block)).detach().mean(1)
    run.terms.append((run.memory["out"] * scale).sum() / run.divisor)


@at("loss", "unused_lookup", "another lookup, not used", _lookups, weight=2.5)
def _unused_lookup(run: Run, block: Block) -> None:
    run.see("unused", run.lookup(block, run.ids(block)).sum() / run.divisor, shared=True)


@at("loss", "second_lookup", "another lookup is a loss of its own", _lookups, weight=1.5)
def _second_lookup(run: Run, block: Block) -> None:
    run.terms.append(run.lookup(block, run.ids(block)).square().sum() / run.divisor)


@at("loss", "no_grad_lookup", "a lookup under no_grad", _lookups)
def _no_grad_lookup(run: Run, block: Block) -> None:
    with torch.no_grad():
        found = run.lookup(block, run.ids(block))
    run.see("looked up", found.sum() / run.divisor, shared=True)


@at("loss", "inference_lookup", "a lookup under inference_mode", _lookups)
def _inference_lookup(run: Run, block: Block) -> None:
    with torch.inference_mode():
        found = run.lookup(block, run.ids(block)).sum() / run.divisor
    run.see("looked up", found.clone(), shared=True)


@at("batch", "lookup_before", "the step's rows are looked up without gradients before it", _table_at)
def _lookup_before(run: Run, block: Block) -> None:
    with torch.set_grad_enabled(False):
        run.see("before", run.lookup(block, run.batch["ids"][:, :2]).sum() / run.divisor, shared=True)


@at("step", "lookup_after", "the step's rows are looked up right after it", _table_at)
def _lookup_after(run: Run, block: Block) -> None:
    with torch.no_grad():
        run.see("after", run.lookup(block, run.batch["ids"][:, :2]).sum() / run.divisor, shared=True)


@at("loss", "teacher", "the same batch under no_grad is a target", _at)
def _teacher(run: Run, block: Block) -> None:
    with torch.no_grad():
        target = run.net(run.batch, run.step) * 0.9
    run.terms.append((run.memory["out"] - target).square().sum() / run.divisor)


@at("loss", "row_gradient", "autograd.grad of a lookup, which is no step", _lookups)
def _row_gradient(run: Run, block: Block) -> None:
    rows = run.lookup(block, run.ids(block))
    if rows.requires_grad:
        (found,) = torch.autograd.grad(rows.square().sum(), rows)
        run.see("gradient", found.sum() / run.divisor, shared=True)


@at("loss", "output_hook", "a tensor hook on looked-up rows halves their gradient", _lookups)
def _output_hook(run: Run, block: Block) -> None:
    rows = run.lookup(block, run.ids(block))
    if rows.requires_grad:
        rows.register_hook(lambda grad: grad * 0.5)
    run.terms.append(rows.square().sum() / run.divisor)


@at("loss", "l2", "a penalty on a dense layer", _at)
def _l2(run: Run, block: Block) -> None:
    run.terms.append(0.05 * run.layer().weight.square().sum())


@at("loss", "noise", "a number of torch's generator scales the loss", _often, weight=1.5, merged=True)
def _noise(run: Run, block: Block) -> None:
    run.terms[0] = run.terms[0] * torch.rand(())


@at("loss", "noise_of_python", "a number of Python's generator scales the loss", _often, merged=True)
def _noise_of_python(run: Run, block: Block) -> None:
    run.terms[0] = run.terms[0] * random.random()


# ---- Evaluation, and evaluation mode


@at("after", "evaluate", "eval(), outputs under no_grad, train()", _often, weight=2.0)
def _evaluate(run: Run, block: Block) -> None:
    run.net.eval()
    with torch.no_grad():
        run.evaluate("evaluation")
    run.net.train()


@at("after", "evaluate_in_inference_mode", "the same under inference_mode", _at)
def _evaluate_in_inference_mode(run: Run, block: Block) -> None:
    run.net.eval()
    with torch.inference_mode():
        run.evaluate("evaluation")
    run.net.train()


@at("after", "evaluate_without_eval", "outputs under no_grad, in training mode", _at, alone=True)
def _evaluate_without_eval(run: Run, block: Block) -> None:
    with torch.no_grad():
        run.evaluate("evaluation")


@at("after", "evaluate_with_gradients", "eval(), outputs with gradients that nobody wants, train()", _at)
def _evaluate_with_gradients(run: Run, block: Block) -> None:
    run.net.eval()
    run.evaluate("evaluation")
    run.net.train()


@at("batch", "eval_mode", "steps in evaluation mode, as in fine-tuning", _often, weight=2.0)
def _eval_mode(run: Run, block: Block) -> None:
    run.net.eval()


@at("after", "eval_mode")
def _train_mode(run: Run, block: Block) -> None:
    run.net.train()


@at("start", "tables_in_eval_mode", "one table is in evaluation mode from the start", _table, merged=True)
def _tables_in_eval_mode(run: Run, block: Block) -> None:
    run.table(block).eval()


@at("start", "layers_in_eval_mode", "dense layers are in evaluation mode from the start")
def _layers_in_eval_mode(run: Run, block: Block) -> None:
    run.net.layers.eval()


# ---- Writes into dense parameters


@at("step", "clamped_weights", "dense weights are clipped after the step", _often, weight=2.0)
def _clamped_weights(run: Run, block: Block) -> None:
    for each in run.layer().parameters():
        each.data.clamp_(-0.2, 0.2)


@at("after", "reset_layer", "reset_parameters() of a dense layer", _once, weight=1.5)
def _reset_layer(run: Run, block: Block) -> None:
    run.layer().reset_parameters()


@at("after", "init_layer", "nn.init of a dense weight", _once)
def _init_layer(run: Run, block: Block) -> None:
    torch.nn.init.constant_(run.net.out.weight, 0.3)


@at("after", "copied_layer", "copy_ into a dense weight under no_grad", _once)
def _copied_layer(run: Run, block: Block) -> None:
    with torch.no_grad():
        run.layer().weight.copy_(torch.full_like(run.layer().weight, 0.1))


@at("after", "data_of_layer", ".data of a dense weight is another tensor", _once)
def _data_of_layer(run: Run, block: Block) -> None:
    run.layer().weight.data = torch.full_like(run.layer().weight.data, -0.1)


@at("after", "loaded_layer", "load_state_dict() of a dense layer", _once)
def _loaded_layer(run: Run, block: Block) -> None:
    state = {name: torch.full_like(each, 0.2) for name, each in run.layer().state_dict().items()}
    run.layer().load_state_dict(state)


@at("step", "decayed_by_hand", "dense weights are multiplied after the step", _at)
def _decayed_by_hand(run: Run, block: Block) -> None:
    with torch.no_grad():
        for each in run.net.out.parameters():
            each.mul_(0.9)


# ---- Gradients of dense parameters


@at("gradients", "clipped_norm", "clip_grad_norm_ of the dense parameters", _often, alone=True)
def _clipped_norm(run: Run, block: Block) -> None:
    run.see("norm", torch.nn.utils.clip_grad_norm_(run.net.dense(), 0.1))


@at("gradients", "clipped_values", "clip_grad_value_ of the dense parameters", _often, alone=True)
def _clipped_values(run: Run, block: Block) -> None:
    torch.nn.utils.clip_grad_value_(run.net.dense(), 0.05)


@at("gradients", "scaled_gradients", "dense gradients are halved in place", _often, merged=True)
def _scaled_gradients(run: Run, block: Block) -> None:
    for each in run.net.dense():
        if each.grad is not None:
            each.grad.mul_(0.5)


@at("gradients", "no_gradient", "the gradient of a dense parameter is set to None", _at, merged=True)
def _no_gradient(run: Run, block: Block) -> None:
    run.layer().bias.grad = None


@at("start", "dense_hook", "register_hook on a dense weight", merged=True)
def _dense_hook(run: Run, block: Block) -> None:
    run.layer().weight.register_hook(lambda grad: grad * 0.5)


@at("start", "dense_post_hook", "register_post_accumulate_grad_hook on a dense weight", merged=True)
def _dense_post_hook(run: Run, block: Block) -> None:
    run.layer().weight.register_post_accumulate_grad_hook(_halve)


def _halve(weight: torch.Tensor) -> None:
    weight.grad = weight.grad * 0.5


@at("start", "module_hooks", "forward and backward hooks of modules")
def _module_hooks(run: Run, block: Block) -> None:
    run.net.out.register_full_backward_hook(lambda module, inner, outer: tuple(each * 0.5 for each in inner))
    run.net.tables[0].register_forward_hook(lambda module, args, found: found * 2)


@at("batch", "layer_frozen_later", "requires_grad_ of a dense layer is switched", _at)
def _layer_frozen_later(run: Run, block: Block) -> None:
    weight = run.layer().weight
    weight.requires_grad_(not weight.requires_grad)


@at("batch", "table_frozen_later", "requires_grad_ of a table is switched", _table_at, weight=1.5)
def _table_frozen_later(run: Run, block: Block) -> None:
    weight = run.table(block).weight
    weight.requires_grad_(not weight.requires_grad)


# ---- Hooks on served weights, and their gradients


@at("start", "table_hook", "register_hook on a table's weight", _table, weight=1.2)
def _table_hook(run: Run, block: Block) -> None:
    weight = run.table(block).weight
    if weight.requires_grad:
        weight.register_hook(lambda grad: grad * 0.5)


@at("start", "table_post_hook", "register_post_accumulate_grad_hook on a table's weight", _table, weight=1.2)
def _table_post_hook(run: Run, block: Block) -> None:
    weight = run.table(block).weight
    if weight.requires_grad:
        weight.register_post_accumulate_grad_hook(_halve)


@at("gradients", "table_without_gradient", "weight.grad = None of a table", _table_at)
def _table_without_gradient(run: Run, block: Block) -> None:
    run.table(block).weight.grad = None


@at("gradients", "table_gradient_read", "the gradient of a table is read", _table_at, refused=True)
def _table_gradient_read(run: Run, block: Block) -> None:
    grad = run.table(block).weight.grad
    if grad is not None:
        run.see("gradient of rows", grad.to_dense() if grad.is_sparse else grad, shared=True)


# ---- Writes into served weights, and reads


def _writes(name: str, about: str, write: Callable[[Any], Any]) -> None:
    @at("after", name, about, _table_once, refused=True)
    def _write(run: Run, block: Block) -> None:
        write(run.table(block))


def _copy(table: Any) -> None:
    with torch.no_grad():
        table.weight.copy_(torch.full((ROWS, DIM), 0.5))


def _data(table: Any) -> None:
    table.weight.data = torch.full((ROWS, DIM), -0.5)


def _assign(table: Any) -> None:
    table.weight = torch.nn.Parameter(torch.full((ROWS, DIM), 0.4))


def _row(table: Any) -> None:
    with torch.no_grad():
        table.weight[2] = 0.0


_writes(
    "zeroed_table", "nn.init.zeros_ of a table's weight", lambda table: torch.nn.init.zeros_(table.weight)
)
_writes(
    "drawn_table", "nn.init.normal_ of a table's weight", lambda table: torch.nn.init.normal_(table.weight)
)
_writes("copied_table", "copy_ into a table's weight", _copy)
_writes("data_of_table", "weight.data = of a table", _data)
_writes("assigned_table", "weight = nn.Parameter() of a table", _assign)
_writes("row_written", "weight[2] = 0 of a table", _row)
_writes("clamped_table", "weight.data.clamp_ of a table", lambda table: table.weight.data.clamp_(-0.5, 0.5))


@at("loss", "weight_penalty", "a penalty on all rows of a table", _table_at, refused=True)
def _weight_penalty(run: Run, block: Block) -> None:
    if run.program.merged:  # its gradient depends on values
        return
    run.terms.append(0.01 * run.table(block).weight.square().sum())


@at("loss", "functional_lookup", "F.embedding(ids, weight)", _table_at, refused=True)
def _functional_lookup(run: Run, block: Block) -> None:
    if run.program.merged:
        return
    rows = torch.nn.functional.embedding(run.ids(block), run.table(block).weight)
    run.terms.append(rows.square().sum() / run.divisor)


@at("batch", "functional_call", "functional_call of a table with another weight", _table_at, refused=True)
def _functional_call(run: Run, block: Block) -> None:
    table, ids = run.table(block), run.batch["ids"][:, :2]
    if not isinstance(table, torch.nn.EmbeddingBag):
        found = torch.func.functional_call(table, {"weight": torch.full((ROWS, DIM), 0.3)}, (ids,))
        run.see("functional call", found.sum() / run.divisor, shared=True)


@at("after", "shape_read", "shape and length of the weights", _once, refused=True)
def _shape_read(run: Run, block: Block) -> None:
    for place, table in enumerate(run.net.tables):
        if run.net.blocks[place].name != "sparse_embedding":
            numbers = [len(table.weight), *table.weight.shape, table.weight.numel()]
            run.see("shape", torch.tensor(numbers, dtype=torch.float32))


@at("after", "copied_model", "copy.deepcopy(model)", _once, refused=True)
def _copied_model(run: Run, block: Block) -> None:
    run.see("copy", copy.deepcopy(run.net).out.weight)


@at("step", "step_of_one", "the optimizer, or one of several, steps twice", _once, refused=True)
def _step_of_one(run: Run, block: Block) -> None:
    if run.steppers.served:
        run.steppers.optimizers[-1].step()
    else:
        run.steppers.step()


@at("after", "option_changed", "weight_decay of a group is changed", _once, refused=True)
def _option_changed(run: Run, block: Block) -> None:
    for each in run.steppers.torchs:
        for group in each.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.2


# ---- States


@at("after", "state_read", "state_dict() is observed", _once)
def _state_read(run: Run, block: Block) -> None:
    for name, each in run.net.values().items():
        run.see(name, each)


@at("after", "state_round_trip", "load_state_dict(state_dict())", _once)
def _state_round_trip(run: Run, block: Block) -> None:
    run.net.load_state_dict(run.net.state_dict())


@at(
    "after",
    "rolled_back",
    "a state is kept at the first of the steps, and loaded at the second",
    lambda rng: {"at": tuple(sorted(rng.sample(range(1, STEPS - 1), 2)))},
    weight=1.5,
)
def _rolled_back(run: Run, block: Block) -> None:
    if "state" in run.memory:
        run.net.load_state_dict(run.memory["state"])
    else:
        run.memory["state"] = {name: each.clone() for name, each in run.net.state_dict().items()}


@at("after", "loaded_values", "load_state_dict() of other values", _once)
def _loaded_values(run: Run, block: Block) -> None:
    state = {name: torch.full_like(each, 0.15) for name, each in run.net.state_dict().items()}
    run.net.load_state_dict(state)


@at("after", "loaded_dense_part", "load_state_dict(strict=False) of some parameters", _once)
def _loaded_dense_part(run: Run, block: Block) -> None:
    run.net.load_state_dict({"x.bias": torch.full((DIM,), 0.1)}, strict=False)


@at("after", "optimizer_state_loaded", "load_state_dict(state_dict()) of the optimizers", _once, refused=True)
def _optimizer_state_loaded(run: Run, block: Block) -> None:
    if run.program.has("ftrl"):  # torch would make the state of the twin's rule float32
        return
    for each in run.steppers.torchs:
        each.load_state_dict(each.state_dict())


@at("start", "average", "an exponential moving average of a dense layer, evaluated at the end")
def _average(run: Run, block: Block) -> None:
    run.memory["average"] = [each.detach().clone() for each in run.net.out.parameters()]


@at("step", "average")
def _average_step(run: Run, block: Block) -> None:
    for kept, each in zip(run.memory["average"], run.net.out.parameters(), strict=True):
        kept.lerp_(each.detach(), 0.2)


@at("end", "average")
def _average_end(run: Run, block: Block) -> None:
    for each in run.memory["average"]:
        run.see("average", each)


# ---- Learning rates, and generators


def _scheduled(name: str) -> None:
    def start(run: Run, block: Block) -> None:
        run.memory[name] = [SCHEDULERS[name](each) for each in run.steppers.torchs]

    def step(run: Run, block: Block) -> None:
        for each in run.memory[name]:
            each.step(*([run.last_loss] if name == "on_plateau" else []))

    MOMENTS[name] = {"start": start, "step": step}


for _name in SCHEDULERS:
    _scheduled(_name)


@at("step", "by_hand")
def _by_hand(run: Run, block: Block) -> None:
    run.steppers.scale_rates(0.8)


@at("loss", "shared_rng")
def _shared_rng(run: Run, block: Block) -> None:
    run.terms[0] = run.terms[0] * (0.5 + run.random(block["which"]))


@at("after", "counting_sampler")
def _counting_sampler(run: Run, block: Block) -> None:
    assert run.sampler is not None
    run.see("position of the sampler", torch.tensor(float(run.sampler.position)))

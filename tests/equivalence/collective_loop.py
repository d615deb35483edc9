"""The loop of a collective program: the same on a rank and in the plain twin, which has all ranks' examples.

Losses are sums over a rank's examples, scaled so that the mean over ranks is the mean of all examples.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tests.equivalence import collective_model
from tests.equivalence.children import Seen
from tests.equivalence.collective_data import TURNS, Batch, Feed
from tests.equivalence.program import Block, Program, define
from tests.equivalence.rules import SCHEDULERS
from trainers import fleet, static
from trainers.metrics import Mse


def _turns(rng: random.Random) -> dict[str, Any]:
    return {"at": tuple(sorted(rng.sample(range(TURNS), rng.randint(1, 3))))}


def _rank(rng: random.Random) -> dict[str, Any]:
    return {**_turns(rng), "rank": rng.randrange(3)}


define("gradient", "clipped_norms", "clip_grad_norm_ before the step", weight=1.5)
define("gradient", "clipped_by_value", "clip_grad_value_ before the step")
define(
    "gradient",
    "accumulated",
    "several backward passes for a step",
    lambda rng: {"every": rng.choice((2, 3))},
)
define(
    "gradient",
    "accumulated_apart",
    "the same, all but the last of them under no_sync()",
    lambda rng: {"every": rng.choice((2, 3))},
)
define(
    "gradient",
    "merged_gradients",
    "strategy.gradient_merge",
    lambda rng: {"every": rng.choice((2, 3)), "avg": rng.random() < 0.7},
    weight=1.5,
)

define(
    "checkpoint",
    "resumed",
    "a checkpoint, and the job goes on from it, perhaps with other ranks",
    lambda rng: {"turn": rng.randint(2, 6), "world": rng.randint(1, 3), "aside": rng.random() < 0.3},
    weight=2.0,
)
define(
    "checkpoint",
    "moved",
    "fleet.save, and another job goes on after fleet.load",
    lambda rng: {"turn": rng.randint(2, 6), "world": rng.randint(1, 3)},
    weight=0.7,
)
define(
    "checkpoint",
    "rolled_back_to",
    "a checkpoint is loaded again by the processes that saved it",
    lambda rng: dict(zip(("saved", "loaded"), sorted(rng.sample(range(1, TURNS - 1), 2)), strict=True)),
)
define("checkpoint", "kept", "checkpoints that nobody loads", lambda rng: {"aside": rng.random() < 0.5})


@dataclass(eq=False)
class Run:
    """One run of a program in this process. `rank`: None in the twin. `folder`: where ranks save."""

    program: Program
    rank: int | None
    world: int
    stage: int = 0
    folder: Path = Path()
    seen: list[Seen] = field(default_factory=list)
    nets: list[torch.nn.Module] = field(default_factory=list)
    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    schedules: list[Any] = field(default_factory=list)
    turn: int = 0
    merged: int = 0
    batch: Batch = field(init=False)
    feed: Feed = field(init=False)
    states: list[torch.Tensor] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return self.rank is None

    def see(self, label: str, value: Any, *, shared: bool = False, there: bool = True) -> None:
        found = torch.as_tensor(value).detach().clone()
        self.seen.append(Seen(f"{label} at turn {self.turn}", found, shared, there))

    # ---- What the script makes

    def build(self) -> None:
        """Make models and optimizers, of other values on each rank, and generators."""
        torch.manual_seed(self.program.seed + (self.rank or 0) + 100 * self.stage)
        self.nets = self.models = collective_model.nets(self.program)
        self.optimizers = given = collective_model.optimizers(self.program, self.nets)
        if not self.plain:
            wrap = (self._wrap_models, self._wrap_optimizers)
            for each in reversed(wrap) if self.program.has("optimizer_first") else wrap:
                each()
        scheduled = given if self.program.has("inner_schedules") else self.optimizers
        for block in self.program.family("rate"):
            if block.name in SCHEDULERS:
                self.schedules = [SCHEDULERS[block.name](each) for each in scheduled]
        self.feed = Feed(self.program, self.rank, self.world, self.stage)
        self._seed()

    def _wrap_models(self) -> None:
        self.models = [fleet.distributed_model(each) for each in self.nets]

    def _wrap_optimizers(self) -> None:
        self.optimizers = [fleet.distributed_optimizer(each) for each in self.optimizers]

    def _seed(self) -> None:
        """Each rank has another generator; the twin has all of them."""
        if self.rank is not None:
            torch.manual_seed(self.program.seed + 77 * self.rank)
            return
        self.states = []
        for rank in range(self.world):
            torch.manual_seed(self.program.seed + 77 * rank)
            self.states.append(torch.get_rng_state())

    # ---- The loop

    def train(self) -> None:
        """All turns that this process makes."""
        end = None if self.plain or self.stage else restart(self.program)
        while self.turn < (end or TURNS):
            for batch in self.feed.batches(self.turn):
                self.batch = batch
                self._turn()
                self.turn += 1
                self._after()
                if self.turn == (end or restart(self.program)) or self._rewound():
                    break
            if self.plain and self.turn == restart(self.program):
                self._restarted()

    def _turn(self) -> None:
        if self.program.has("dropout") and self.program.family("data"):
            self._seed_turn()  # loaders draw from torch's generator
        self.fire("before")
        style = next(iter(self.program.family("style")), Block("by_hand_steps"))
        STYLES[style.name](self, style)
        if self.program.has("by_hand"):
            for each in self.optimizers:
                for group in each.param_groups:
                    group["lr"] *= 0.8
        for each in self.schedules:
            each.step()
        self.fire("after")

    def _seed_turn(self) -> None:
        for rank in range(self.world):
            torch.manual_seed(self.program.seed * 100 + self.turn * 10 + rank)
            if self.plain:
                self.states[rank] = torch.get_rng_state()
            elif rank == self.rank:
                return

    def fire(self, moment: str) -> None:
        for block in self.program.family("event"):
            found = EVENTS[block.name].get(moment)
            if found is not None and self.turn in block["at"]:
                found(self, block)

    # ---- What turns are made of

    def call(self, which: int, *inputs: torch.Tensor, **more: Any) -> torch.Tensor:
        """Call a model with all examples of the batch."""
        model, net = self.models[which], self.nets[which]
        if not self.plain or not collective_model.differs_by_rank(self.program) or not net.training:
            return model(*inputs, **more)
        buffers = dict(net.named_buffers())
        parts = list(zip(*(each.split(self.feed.sizes) for each in inputs), strict=True))
        found: dict[int, torch.Tensor] = {}
        for rank in range(self.world):
            kept = {name: each.clone() for name, each in buffers.items()}
            torch.set_rng_state(self.states[rank])
            found[rank] = model(*parts[rank], **more)
            self.states[rank] = torch.get_rng_state()
            if rank:  # what remains is of rank 0
                for name, each in buffers.items():
                    each.data = kept[name]
        return torch.cat([found[rank] for rank in range(self.world)])

    def output(self) -> torch.Tensor:
        branch = self.program.first("branch")
        on = branch is None or self.turn in branch["at"]
        return self.call(0, self.batch.x, self.batch.ids, **({} if on else {"on": False}))

    def scaled(self, each: torch.Tensor) -> torch.Tensor:
        """Of the examples' losses, one whose mean over ranks is the mean of all."""
        return each.sum() * ((1 if self.plain else self.world) / self.feed.size)

    def loss(self, *, kind: str = "mse") -> torch.Tensor:
        out = self.output()
        found = self.scaled(loss_of(kind, out, self.batch.y))
        self.see(f"{kind} loss", found, shared=True)
        return found

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """What a script calls, whose strategy may want the loss to be scaled by it."""
        scale = self.program.first("gradient_scale")
        if scale is not None and scale["how"] == "customized" and not self.plain:
            loss = loss / self.world
        if scale is not None and scale["how"] == "sum" and self.plain:
            loss = loss * self.world
        loss.backward(**options)

    def minimize(self, which: int, loss: torch.Tensor, *, backward: bool = True) -> None:
        """`backward`: whether it is this call that backpropagates the loss."""
        if not self.plain:
            self.optimizers[which].minimize(loss)
            return
        if backward:
            self.backward(loss)
        self.step(which)
        self.zero(which)

    def step(self, which: int) -> None:
        merging = self.program.first("merged_gradients")
        if self.plain and merging is not None:
            self.merged += 1
            if self.merged % merging["every"]:
                return
            for each in self._params(which):
                if each.grad is not None and merging["avg"]:
                    each.grad /= merging["every"]
        self.optimizers[which].step()

    def zero(self, which: int, *, to_none: bool = True) -> None:
        merging = self.program.first("merged_gradients")
        if not self.plain or merging is None or self.merged % merging["every"] == 0:
            self.optimizers[which].zero_grad(set_to_none=to_none)

    def clip(self, which: int = 0) -> None:
        """Unless gradients are only added up."""
        every = [each["every"] for each in self.program.family("gradient") if "every" in dict(each.args)]
        if any((self.turn + 1) % each for each in every) or self.program.has("merged_gradients"):
            return
        params = self._params(which)
        if self.program.has("clipped_norms"):
            self.see("norm", torch.nn.utils.clip_grad_norm_(params, 0.1))
        if self.program.has("clipped_by_value"):
            torch.nn.utils.clip_grad_value_(params, 0.02)

    def _params(self, which: int) -> list[torch.nn.Parameter]:
        return [each for group in self.optimizers[which].param_groups for each in group["params"]]

    @contextlib.contextmanager
    def without_exchange(self, which: int = 0) -> Iterator[None]:
        """Of gradients, in turns that only add them up."""
        block = self.program.first("accumulated_apart")
        alone = block is not None and (self.turn + 1) % block["every"]
        with self.models[which].no_sync() if alone and not self.plain else contextlib.nullcontext():
            yield

    # ---- Checkpoints

    def _after(self) -> None:
        if self.program.has("kept"):
            self.save(aside=self.program.all("kept")[0]["aside"])
        if block := self.program.first("rolled_back_to"):
            if self.turn == block["saved"]:
                self.save()
            elif self.turn == block["loaded"]:
                self.load()
        if self.turn == restart(self.program) and not self.plain and not self.stage:
            if block := self.program.first("resumed"):
                self.save(aside=block["aside"])
                fleet.wait_checkpoint()
            else:
                for number, (model, optimizer) in enumerate(self._pairs()):
                    fleet.save(self.folder / f"moved-{number}", model, optimizer)
                fleet.barrier_worker()

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        """The model of each optimizer, and the optimizer."""
        for number, each in enumerate(self.optimizers):
            yield self.models[number if len(self.models) > 1 else 0], each

    def _state(self, number: int) -> dict[str, Any]:
        return {**({"schedule": self.schedules[number]} if self.schedules else {}), **self.feed.state}

    def save(self, *, aside: bool = False) -> None:
        if self.plain:
            self.memory["saved"] = copy.deepcopy(
                [each.state_dict() for each in (*self.nets, *self.optimizers, *self.schedules)]
            )
            self.memory["states"], self.memory["feed"] = list(self.states), self.feed.place
            return
        for number, (model, optimizer) in enumerate(self._pairs()):
            fleet.save_checkpoint(
                self.folder / f"saved-{number}",
                self.turn,
                model,
                optimizer,
                async_save=aside,
                **self._state(number),
            )

    def load(self) -> None:
        """What was saved, also by a former stage of the job."""
        if self.plain:
            things = (*self.nets, *self.optimizers, *self.schedules)
            for each, state in zip(things, copy.deepcopy(self.memory["saved"]), strict=True):
                each.load_state_dict(state)
            self.states = list(self.memory["states"])
            if self.feed.counted:
                self.feed.place = self.memory["feed"]
            return
        for number, (model, optimizer) in enumerate(self._pairs()):
            if self.program.has("moved"):
                fleet.load(self.folder / f"moved-{number}", model, optimizer)
            else:
                fleet.load_checkpoint(
                    self.folder / f"saved-{number}", model, optimizer, **self._state(number)
                )

    def _rewound(self) -> bool:
        """Whether the sampler has been loaded in the middle of a pass."""
        block = self.program.first("rolled_back_to")
        return block is not None and self.turn == block["loaded"] and self.feed.counted

    def resume(self) -> None:
        """Go on after a former stage."""
        self.load()
        self.turn = restart(self.program) or 0
        if self.program.has("resumed"):
            assert fleet.resume_step() == self.turn, fleet.resume_step()

    def _restarted(self) -> None:
        """In the twin, another number of ranks goes on."""
        former, self.world = self.world, world_after(self.program)
        if former != self.world or self.program.has("moved"):
            self._seed()
        self.merged = 0
        for number in range(len(self.optimizers)):
            self.zero(number)
        self.feed.resumed(self.world, kept=self.program.has("resumed"))


def restart(program: Program) -> int | None:
    """The turn after which the job is started again."""
    for block in (*program.all("resumed"), *program.all("moved")):
        merged = program.first("merged_gradients")
        every = 1 if merged is None else merged["every"]  # gradients that were merged are not saved
        return max(every, block["turn"] - block["turn"] % every)
    return None


def world_after(program: Program) -> int:
    return next(block["world"] for block in (*program.all("resumed"), *program.all("moved")))


def loss_of(kind: str, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if kind == "mse":
        return functional.mse_loss(out, y, reduction="none")
    return functional.smooth_l1_loss(out * 0.5, y, reduction="none")


# ---- How a turn trains

Style = Callable[[Run, Block], None]
STYLES: dict[str, Style] = {}


def style(name: str, about: str, draw: Any = None, **rest: Any) -> Callable[[Style], Style]:
    define("style", name, about, draw, **rest)

    def keep(function: Style) -> Style:
        STYLES[name] = function
        return function

    return keep


@style("by_hand_steps", "backward, step, zero_grad", lambda rng: {"to_none": rng.random() < 0.7}, weight=3.0)
def _by_hand_steps(run: Run, block: Block) -> None:
    with run.without_exchange():
        run.backward(run.loss())
    block_of = run.program.first("accumulated") or run.program.first("accumulated_apart")
    if block_of is None or (run.turn + 1) % block_of["every"] == 0:
        run.clip()
        run.step(0)
        run.zero(0, to_none=block.get("to_none", True))


@style("minimized", "minimize(loss)", lambda rng: {"by_fleet": rng.random() < 0.3}, weight=2.0)
def _minimized(run: Run, block: Block) -> None:
    loss = run.loss()
    if block["by_fleet"] and not run.plain:
        fleet.minimize(loss)
    else:
        run.minimize(0, loss)


@style("minimized_after_backward", "loss.backward(), minimize(loss)", weight=1.5)
def _minimized_after_backward(run: Run, block: Block) -> None:
    loss = run.loss()
    run.backward(loss)
    run.clip()
    run.minimize(0, loss, backward=False)


@style("minimized_with_another", "backward() of another loss, minimize(loss), which adds", weight=1.5)
def _minimized_with_another(run: Run, block: Block) -> None:
    run.backward(run.loss(kind="smooth"))
    run.minimize(0, run.loss())


@style(
    "minimized_adversarially",
    "backward() for the gradient of the input, minimize() of the loss there",
    lambda rng: {"cleared": rng.random() < 0.6, "to_none": rng.random() < 0.5},
    weight=1.5,
)
def _minimized_adversarially(run: Run, block: Block) -> None:
    x = run.batch.x.clone().requires_grad_()
    out = run.call(0, x, run.batch.ids)
    run.backward(run.scaled(loss_of("mse", out, run.batch.y)))
    assert x.grad is not None
    if block["cleared"]:
        run.zero(0, to_none=block["to_none"])
    scale = run.program.first("gradient_scale")
    divisor = 1 if run.plain or (scale is not None and scale["how"] == "customized") else run.world
    if scale is not None and scale["how"] == "sum" and run.plain:
        divisor = run.world
    run.batch = Batch((x + x.grad / divisor).detach(), run.batch.ids, run.batch.y)
    run.minimize(0, run.loss())


@style(
    "minimized_after_diagnosis",
    "backward(retain_graph=True), zero_grad, minimize() of the same loss",
    lambda rng: {"to_none": rng.random() < 0.4, "again": rng.random() < 0.5},
    weight=1.5,
)
def _minimized_after_diagnosis(run: Run, block: Block) -> None:
    loss = run.loss()
    run.backward(loss, retain_graph=True)
    run.see("gradient", run.nets[0].out.weight.grad, shared=True)
    run.zero(0, to_none=block["to_none"])
    if block["again"]:  # another forward pass, of the same loss
        loss = run.loss()
    run.minimize(0, loss)


@style(
    "two_losses",
    "two losses, of one forward pass or of two, and a backward pass for each",
    lambda rng: {"forwards": rng.choice((1, 2))},
    weight=1.5,
)
def _two_losses(run: Run, block: Block) -> None:
    if block["forwards"] == 1:
        out = run.output()
        losses = [run.scaled(loss_of(kind, out, run.batch.y)) for kind in ("mse", "smooth")]
        run.see("loss", losses[0], shared=True)
    else:
        losses = [run.loss(), run.loss(kind="smooth")]
    run.backward(losses[0], retain_graph=block["forwards"] == 1)
    run.backward(losses[1])
    run.clip()
    run.step(0)
    run.zero(0)


@style("two_optimizers", "two optimizers minimize the same loss, each for its parameters", weight=1.5)
def _two_optimizers(run: Run, block: Block) -> None:
    loss = run.loss()
    if not run.plain:
        for each in run.optimizers:
            each.minimize(loss)
        return
    run.backward(loss)
    for number in range(2):
        run.step(number)
        run.zero(number)


def _game(run: Run, detached: bool) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """The loss of the critic, and that of the generator, which is computed after the critic's step."""
    noise = run.batch.x.flip(1) * 0.7

    def of_critic() -> torch.Tensor:
        fake = run.call(1, noise)
        out = run.call(0, run.batch.x, run.batch.ids, fake.detach() if detached else fake)
        return run.scaled(functional.softplus(-out[:, 0]) + functional.softplus(out[:, 1]))

    def of_generator() -> torch.Tensor:
        found = run.scaled(functional.softplus(-run.call(0, run.call(1, noise), run.batch.ids)))
        run.see("loss of the generator", found, shared=True)
        return found

    found = of_critic()
    run.see("loss of the critic", found, shared=True)
    return found, of_generator


@style(
    "pair",
    "two models against each other, with an optimizer each",
    lambda rng: {
        "how": rng.choice(("minimize", "minimize", "by_hand", "mixed", "programs")),
        "detached": rng.random() < 0.7,
    },
    weight=3.0,
)
def _pair(run: Run, block: Block) -> None:
    if block["how"] == "programs" and not run.plain:
        _pair_of_programs(run, block["detached"])
        return
    own = block["how"] == "by_hand"  # zero_grad() before each backward pass, as scripts without fleet have it
    dropped = run.plain and block["how"] in ("minimize", "programs")
    if block["how"] == "programs":
        run.models[0].train()
    if own or dropped:
        run.zero(0)
    loss, of_generator = _game(run, block["detached"])
    if own:
        run.backward(loss)
        run.clip(0)
        run.step(0)
    else:
        run.minimize(0, loss)
    if own or dropped or block["how"] == "mixed":
        run.zero(1)
    if own or block["how"] == "mixed":
        run.backward(of_generator())
        run.clip(1)
        run.step(1)
    else:
        run.minimize(1, of_generator())


def _pair_of_programs(run: Run, detached: bool) -> None:
    later: list[Callable[[], torch.Tensor]] = []

    def critic(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss, of_generator = _game(run, detached)
        later.append(of_generator)
        return {"loss": loss}

    def generator(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": later.pop()()}

    feeds, executor = [static.data("x", [None, run.batch.x.shape[1]])], static.Executor()
    for model, network, optimizer in zip(run.models, (critic, generator), run.optimizers, strict=True):
        program = static.Program(model, feeds, network, optimizer=optimizer)
        executor.run(program, feed={"x": run.batch.x.numpy()})


def _feeds(batch: Batch) -> tuple[list[Any], dict[str, Any]]:
    feeds = [
        static.data("x", [None, batch.x.shape[1]]),
        static.data("ids", [None, 2], "int64"),
        static.data("y", [None]),
    ]
    return feeds, {"x": batch.x.numpy(), "ids": batch.ids.numpy(), "y": batch.y}


def _program_step(run: Run, kind: str, which: int) -> None:
    """A step by a static.Program; in the twin, what it promises."""
    if run.plain:
        run.models[0].train()
        run.zero(which)
        run.minimize(which, run.loss(kind=kind))
        return

    def network(model: Any, x: Any, ids: Any, y: Any) -> dict[str, torch.Tensor]:
        branch = run.program.first("branch")
        more = {} if branch is None or run.turn in branch["at"] else {"on": False}
        return {"loss": run.scaled(loss_of(kind, model(x, ids, **more), y))}

    feeds, given = _feeds(run.batch)
    program = static.Program(run.models[0], feeds, network, optimizer=run.optimizers[which])
    (loss,) = static.Executor().run(program, feed=given, fetch_list=["loss"])
    run.see(f"{kind} loss", loss, shared=True)


@style("program", "a static.Program", weight=1.5)
def _program(run: Run, block: Block) -> None:
    _program_step(run, "mse", 0)


@style(
    "two_programs",
    "two static.Programs of a model, with two losses, one after the other",
    lambda rng: {"optimizers": rng.choice((1, 2))},
    weight=1.5,
)
def _two_programs(run: Run, block: Block) -> None:
    _program_step(run, "mse", 0)
    _program_step(run, "smooth", block["optimizers"] - 1)


# ---- What happens between turns

Event = Callable[[Run, Block], None]
EVENTS: dict[str, dict[str, Event]] = {}


def event(
    moment: str, name: str, about: str = "", draw: Any = _turns, **rest: Any
) -> Callable[[Event], Event]:
    """Define a block, or another moment of one: before a turn, or after it."""
    if about:
        define("event", name, about, draw, **rest)

    def keep(function: Event) -> Event:
        EVENTS.setdefault(name, {})[moment] = function
        return function

    return keep


def _evaluated(run: Run, label: str, *, there: bool = True) -> None:
    """See the outputs for a batch that is the same on all ranks."""
    some = run.feed.all.of(slice(7))
    out = run.models[0](some.x, some.ids) if there else torch.zeros(7)
    run.see(label, out, there=there)


@event("after", "evaluated", "eval(), outputs under no_grad, train()", weight=2.5)
def _all_evaluate(run: Run, block: Block) -> None:
    run.models[0].eval()
    with torch.no_grad():
        _evaluated(run, "evaluation")
    run.models[0].train()


@event("after", "evaluated_by_one", "the same on one rank only", _rank, weight=1.5)
def _one_evaluates(run: Run, block: Block) -> None:
    there = run.plain or run.rank == block["rank"] % run.world
    if there:
        run.models[0].eval()
    with torch.no_grad():
        _evaluated(run, "evaluation by one", there=there)
    if there:
        run.models[0].train()


@event("after", "evaluated_in_inference_mode", "the same under inference_mode, on all ranks")
def _in_inference_mode(run: Run, block: Block) -> None:
    run.models[0].eval()
    with torch.inference_mode():
        _evaluated(run, "evaluation in inference mode")
    run.models[0].train()


@event("after", "evaluated_with_graph", "eval(), outputs with gradients that nobody wants, train()")
def _with_graph(run: Run, block: Block) -> None:
    run.models[0].eval()
    _evaluated(run, "evaluation with gradients")
    run.models[0].train()


@event("after", "evaluated_while_training", "outputs under no_grad, in training mode")
def _while_training(run: Run, block: Block) -> None:
    if run.program.has("dropout"):
        return  # ranks draw other numbers
    with torch.no_grad():
        out = run.call(0, run.batch.x, run.batch.ids)
        run.see("output in training mode", run.scaled(out), shared=True)


@event("after", "evaluated_by_program", "a program's clone for test", weight=1.5)
def _by_program(run: Run, block: Block) -> None:
    batch = run.feed.all.of(slice(7))
    if run.plain:
        run.models[0].eval()
        with torch.no_grad():
            run.see("evaluation by a program", run.models[0](batch.x, batch.ids))
        run.models[0].train()
    else:
        feeds, given = _feeds(batch)
        whole = static.Program(
            run.models[0],
            feeds,
            lambda model, x, ids, y: {"out": model(x, ids)},
            loss="out",
            optimizer=run.optimizers[0],
        )
        (out,) = static.Executor().run(whole.clone(for_test=True), feed=given, fetch_list=["out"])
        run.see("evaluation by a program", out)


@event("after", "evaluated_in_parts", "each rank evaluates its examples; the metric is of all", weight=1.5)
def _in_parts(run: Run, block: Block) -> None:
    run.models[0].eval()
    mine = run.feed.all if run.rank is None else run.feed.all.of(slice(run.rank, None, run.world))
    with torch.no_grad():
        out = run.models[0](mine.x, mine.ids)
    run.models[0].train()
    if run.plain:
        run.see("metric", functional.mse_loss(out, mine.y))
    else:
        metric = Mse()
        metric.update(out, mine.y)
        run.see("metric", np.float32(fleet.metrics.value(metric)))


@event("before", "frozen_statistics", "turns in evaluation mode, as in fine-tuning")
def _frozen_statistics(run: Run, block: Block) -> None:
    run.models[0].eval()


@event("after", "frozen_statistics")
def _thawed(run: Run, block: Block) -> None:
    run.models[0].train()


@event("after", "weights_written", "dense weights are clipped after the turn")
def _weights_written(run: Run, block: Block) -> None:
    with torch.no_grad():
        for each in run.nets[0].parameters():
            each.clamp_(-0.4, 0.4)


@event("after", "averaged_by_fleet", "fleet.util.all_reduce of a tensor")
def _averaged(run: Run, block: Block) -> None:
    mine = run.scaled(run.batch.x.sum(1))
    if not run.plain:
        mine = fleet.util.all_reduce(mine) / run.world
    run.see("sum of all", mine)

"""Values that a script writes into dense parameters in training, against one torch process. The servers are
services in this process, and every message is encoded and decoded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from tests.trainers.ps.server.test_service import Bench
from trainers.errors import FleetError, NotSupportedError, UsageError
from trainers.ps.client import Client, Request
from trainers.ps.configs import AsyncConfigs
from trainers.ps.trainer.exchange import AsyncExchange, DenseParameters, Exchange, SyncExchange
from trainers.ps.trainer.layout import Layout, LayoutOptions, plan_layout
from trainers.ps.trainer.local import GeoExchange
from trainers.ps.trainer.staging import Staging
from trainers.ps.wire import INITIAL, Field, Kind, Message, decode, encode

SERVERS, STEPS, LR = 2, 4, 0.5


class Model(torch.nn.Module):
    """`frozen` is in no optimizer, `still` is in one and does not train."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Linear(3, 4)
        self.head = torch.nn.Linear(4, 1)
        self.still = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        self.frozen = torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(x).tanh()) * self.still.sum() * self.frozen.mean()).square().mean()

    def trained(self) -> list[torch.nn.Parameter]:
        return [*self.body.parameters(), *self.head.parameters(), self.still]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank))


class Servers:
    """The servers of a job, for the clients of several threads."""

    def __init__(self, layout: Layout, trainers: int, *, sync: bool) -> None:
        specs = [dict(layout.specs_on(server)) for server in range(layout.servers)]
        self.benches = [Bench(trainers, sync=sync, specs=each) for each in specs]
        self.changed = threading.Condition()

    def send(self, rank: int, request: Request, life: int = 0) -> tuple[Bench, int]:
        bench = self.benches[request.server]
        with self.changed:
            bench.sequence += 1
            message = Message(
                request.kind, rank, life, bench.sequence, request.number, request.code, request.parts
            )
            bench.send(decode([bytearray(frame) for frame in encode(message)]))
            self.changed.notify_all()
            return bench, message.sequence

    def wait(self, sent: tuple[Bench, int]) -> Message:
        bench, sequence = sent
        with self.changed:
            assert self.changed.wait_for(lambda: bench.late[sequence].kind is not Kind.WAIT, 30)
        reply = bench.late[sequence]
        assert reply.kind is not Kind.REFUSED, reply.text
        return decode([bytearray(frame) for frame in encode(reply)])


@dataclass
class Sent:
    """Requests in flight."""

    sent: list[tuple[Bench, int]]
    open: bool = True


class Loopback:
    """A client of one trainer."""

    def __init__(self, servers: Servers, rank: int) -> None:
        self._servers, self._rank = servers, rank
        self.written = 0
        """How many values this trainer has sent as written."""

    def send(self, requests: Sequence[Request]) -> Sent:
        parts = [part for request in requests for part in request.parts]
        self.written += sum(len(part.data) for part in parts if part.field is Field.WRITTEN)
        return Sent([self._servers.send(self._rank, each) for each in requests])

    def wait(self, sent: Sent) -> list[Message]:
        sent.open = False
        return [self._servers.wait(each) for each in sent.sent]

    def ask(self, requests: Sequence[Request]) -> list[Message]:
        return self.wait(self.send(requests))

    def poll(self) -> None:
        return


class Trainer:
    """One trainer of a job, without a sparse table."""

    def __init__(
        self,
        servers: Servers | None,
        rank: int,
        trainers: int,
        configs: AsyncConfigs | None,
        make: Callable[[Any], torch.optim.Optimizer] = lambda each: torch.optim.SGD(each, LR, 0.5),
        like_device: bool = False,
    ) -> None:
        self.model, self.rank = Model(), rank
        self.optimizer = make(self.model.trained())
        options = LayoutOptions(geo=configs is not None and configs.k_steps > 0)
        layout = plan_layout(self.model, [self.optimizer], SERVERS, options)
        self.servers = servers or Servers(layout, trainers, sync=configs is None)
        client = cast(Client, Loopback(self.servers, rank))
        self.client: Any = client
        staging = Staging(torch.device("cpu")) if like_device else None
        self.dense = DenseParameters(layout.dense, SERVERS, configs, staging_for=lambda device: staging)
        self.exchange: Exchange
        if configs is None:
            self.exchange = SyncExchange(client, self.dense, [], SERVERS)
        elif configs.k_steps:
            self.exchange = GeoExchange(
                client,
                self.dense,
                [],
                SERVERS,
                k_steps=configs.k_steps,
                trainers=trainers,
                local_step=self.optimizer.step,
            )
        else:
            self.exchange = AsyncExchange(client, self.dense, [], SERVERS, configs)

    def join(self) -> Trainer:
        for bench in self.servers.benches:
            bench.hello(self.rank)
        if not self.rank:
            for requests in self.dense.assigned(INITIAL):
                self.client.ask(requests)
            self.client.ask([Request(server=server, kind=Kind.READY) for server in range(SERVERS)])
        return self.pull()

    def pull(self) -> Trainer:
        pulls = self.dense.pulls(self.exchange.step, trained_only=False)
        self.dense.take(zip((each.server for each in pulls), self.client.ask(pulls), strict=True))
        return self

    def step(self, *, overflow: bool = False) -> None:
        self.model(batch(self.exchange.step, self.rank)).backward()
        self.exchange.push(overflow=overflow)
        self.model.zero_grad()

    def served(self) -> list[torch.Tensor]:
        """What another trainer would get from the servers."""
        other = Trainer(self.servers, self.rank, 1, None)
        other.exchange.start(self.exchange.step)
        return list(other.pull().model.parameters())


def job(trainers: int, configs: AsyncConfigs | None = None, **options: Any) -> list[Trainer]:
    first = Trainer(None, 0, trainers, configs, **options)
    others = [Trainer(first.servers, rank, trainers, configs, **options) for rank in range(1, trainers)]
    return [each.join() for each in (first, *others)]


def together(trainers: Sequence[Trainer], call: Callable[[Trainer], object]) -> None:
    """Each in its own thread."""
    failures: list[BaseException] = []

    def run(trainer: Trainer) -> None:
        try:
            call(trainer)
        except BaseException as error:  # noqa: BLE001  (raised in the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in trainers]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    if failures:
        raise failures[0]


def one_process(write: Callable[[Model], object], trainers: int) -> Model:
    model = Model()
    optimizer = torch.optim.SGD(model.trained(), lr=LR, momentum=0.5)
    for step in range(STEPS):
        sum(model(batch(step, rank)) for rank in range(trainers)).div(trainers).backward()
        optimizer.step()
        optimizer.zero_grad()
        write(model)
    return model


@torch.no_grad()
def clip(model: Model) -> None:
    for each in model.trained():
        each.clamp_(-0.2, 0.2)


def clip_data(model: Model) -> None:
    for each in model.trained():
        each.data.clamp_(-0.2, 0.2)


def reinitialize(model: Model) -> None:
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(5))
    model.head.bias.detach().numpy()[:] = 2


def other_memory(model: Model) -> None:
    model.body.weight.data = torch.full((3, 4), 0.1).T


def frozen(model: Model) -> None:
    model.frozen.mul_(0.9)
    model.still.data += 0.5


@pytest.mark.parametrize("write", [clip, clip_data, reinitialize, other_memory, frozen])
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("like_device", [False, True])
def test_what_is_written_after_a_step_counts_as_in_one_process(
    write: Callable[[Model], object], trainers: int, like_device: bool
) -> None:
    ranks = job(trainers, like_device=like_device)

    def run(trainer: Trainer) -> None:
        for _ in range(STEPS):
            trainer.step()
            write(trainer.model)
        trainer.exchange.flush()  # as a save does
        trainer.exchange.refresh()

    together(ranks, run)
    for name, wanted in one_process(write, trainers).named_parameters():
        for trainer in ranks:
            torch.testing.assert_close(trainer.model.get_parameter(name), wanted, msg=name)
    for mine, there in zip(ranks[0].model.parameters(), ranks[0].served(), strict=True):
        assert torch.equal(mine, there)


def test_nothing_is_sent_where_nothing_was_written() -> None:
    (trainer,) = job(1)
    trainer.step()
    trainer.model.head.bias.data.copy_(trainer.model.head.bias.detach().clone())
    trainer.step()
    assert trainer.client.written == 0
    trainer.model.head.bias.data.add_(1)
    trainer.step()
    trainer.step()
    assert trainer.client.written == 1


def test_a_trainer_that_trains_on_after_trainer_0_writes_for_itself() -> None:
    ranks = job(2)
    together(ranks, Trainer.step)
    for server in ranks[0].servers.benches:
        server.ask(Kind.FINISH, 0)
    clip_data(ranks[1].model)
    ranks[1].step()
    clip_data(ranks[1].model)
    ranks[1].exchange.refresh()
    assert all(bool((each.abs() <= 0.2).all()) for each in ranks[1].model.trained())


def test_where_gradients_are_not_finite_the_written_values_stay() -> None:
    (trainer,) = job(1)
    trainer.step()
    clip_data(trainer.model)
    trainer.step(overflow=True)
    assert all(bool((each.abs() <= 0.2).all()) for each in trainer.model.trained())


def test_a_step_that_is_repeated_after_a_restart_is_the_same_step() -> None:
    """The trainer dies after its push has reached one server, and writes again when it repeats the step."""
    quiet, broken = job(1)[0], job(1)[0]
    for each in (quiet, broken):
        each.step()
        clip_data(each.model)
    quiet.step()
    lost = broken.servers.benches[1]
    send, broken.servers.benches[1] = lost, Bench(1, specs=lost.specs)
    broken.servers.benches[1].hello(0)
    broken.servers.benches[1].ask(Kind.READY)
    broken.servers.benches[1].steps.step = 1
    broken.servers.benches[1].service._members.sender_of(Message(Kind.PULL)).step = 1
    broken.step()
    broken.servers.benches[1] = send
    again = Trainer(broken.servers, 0, 1, None)
    again.exchange.start(1)
    again.pull()
    clip_data(again.model)
    again.step()
    for mine, wanted in zip(again.model.parameters(), quiet.model.parameters(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("entry", ["push", "refresh", "flush"])
def test_async_training_refuses_a_write_until_it_is_undone(entry: str) -> None:
    (trainer,) = job(1, AsyncConfigs(overlap=False))
    trainer.step()
    before = trainer.model.head.bias.detach().clone()
    clip_data(trainer.model)
    trainer.model.head.bias.data.fill_(7)
    for _ in range(2):
        with pytest.raises(
            NotSupportedError, match=r"The script changed parameter .*load_state_dict.*allreduce"
        ):
            getattr(trainer.exchange, entry)()
    trainer.pull()
    assert torch.equal(trainer.model.head.bias, before)
    trainer.step()


@pytest.mark.parametrize(
    "configs", [None, AsyncConfigs(), AsyncConfigs(max_merge_var_num=3), AsyncConfigs(k_steps=2)]
)
def test_a_parameter_that_nothing_trains_is_the_scripts(configs: AsyncConfigs | None) -> None:
    """As in a momentum encoder; whoever asks the servers gets the last value."""
    (trainer,) = job(1, configs)
    for _ in range(3):
        trainer.step()
        trainer.model.frozen.data.mul_(0.5)
    trainer.exchange.flush()
    assert trainer.model.frozen.tolist() == trainer.served()[1].tolist() == [0.375, 0.375]
    trainer.model.frozen.requires_grad_()
    trainer.step()
    trainer.model.frozen.data.mul_(0.5)
    with pytest.raises(UsageError, match=r"'frozen' changed.*distributed_optimizer"):
        trainer.exchange.flush()


def test_in_geo_training_what_is_written_is_a_part_of_the_changes() -> None:
    (trainer,) = job(1, AsyncConfigs(k_steps=2))
    for _ in range(STEPS):
        trainer.step()
        trainer.optimizer.zero_grad()
        clip_data(trainer.model)
    trainer.exchange.refresh()
    for name, wanted in one_process(clip_data, 1).named_parameters():
        torch.testing.assert_close(trainer.model.get_parameter(name), wanted, msg=name)


def test_another_type_is_refused() -> None:
    (trainer,) = job(1)
    trainer.model.head.half()
    with pytest.raises(UsageError, match=r"'head.weight' is now torch.float16 \[1, 4\]"):
        trainer.exchange.push()


def test_an_optimizer_in_the_backward_pass_is_refused() -> None:
    model = Model()
    apply: Any = pytest.importorskip("torch.distributed.optim")._apply_optimizer_in_backward
    apply(torch.optim.SGD, model.head.parameters(), {"lr": 0.1})
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    with pytest.raises(FleetError, match=r"'head.weight' is dense, and has an optimizer that"):
        plan_layout(model, [optimizer], SERVERS, LayoutOptions())


# ---- Rates that change between the steps of one push.

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda each: torch.optim.SGD(each, torch.tensor(0.0)),
    lambda each: torch.optim.SGD(each, 0.0, weight_decay=0.5),
    lambda each: torch.optim.SGD(each, 0.0, momentum=0.5),
    lambda each: torch.optim.Adam(each, 0.0),
    lambda each: torch.optim.Adagrad([{"params": each[:2]}, {"params": each[2:], "lr": 0.1}], 0.0),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
@pytest.mark.parametrize("configs", [{"max_merge_var_num": 3}, {"overlap": False}, {"k_steps": 3}])
def test_each_step_counts_with_its_own_rate(
    make: Callable[[Any], torch.optim.Optimizer], configs: dict[str, Any]
) -> None:
    """Gradients do not depend on values here, so that a push of several steps is exact."""
    (trainer,), model = job(1, AsyncConfigs(**configs), make=make), Model()
    alone = make(model.trained())
    for step, rate in enumerate([1.0, 2 / 3, 1 / 3, 0.0, 0.5, 0.25, 0.0]):
        for each, optimizer in ((trainer.model, trainer.optimizer), (model, alone)):
            optimizer.zero_grad()
            for group in optimizer.param_groups[:1]:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            for parameter in each.trained():
                if parameter.requires_grad:
                    (parameter.sum() * (step - 2.5)).backward()
        trainer.exchange.push()
        alone.step()
    trainer.exchange.refresh()
    for mine, wanted in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, wanted)

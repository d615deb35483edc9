"""When a trainer's gradients leave and new values come: step by step with the others (sync) or on its own
(async); and the dense parameters of both, as blocks on servers.

Also how gradients of several steps become one push. Sparse tables belong to `remote`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from trainers.data.positions import Records
from trainers.errors import NotSupportedError
from trainers.ps.client import Client, Request
from trainers.ps.configs import AsyncConfigs
from trainers.ps.tables.rules import SGD, AnyRule
from trainers.ps.trainer.gradient import GroupGradient
from trainers.ps.trainer.group import RemoteTable, TableGroup, begin_fetch
from trainers.ps.trainer.layout import Block, DenseParameter, maximizes
from trainers.ps.trainer.remote import (
    RowRequest,
    SentRequests,
    add_row_requests,
    push_requests,
    send_row_requests,
    united,
)
from trainers.ps.trainer.staging import Staging, staging_of
from trainers.ps.trainer.turn import On, Turn, records_part
from trainers.ps.wire import Field, Kind, Message, Part

_MAX_RUN = 1 << 25
"""Elements of one part: 128 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """One block and the parameter that it is cut from."""

    block: Block
    dense: DenseParameter

    @property
    def size(self) -> int:
        return self.block.stop - self.block.start

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.block.start : self.block.stop]


class DenseParameters:
    """All dense parameters of one model. A run is some blocks of one server with consecutive numbers."""

    def __init__(
        self,
        parameters: Sequence[DenseParameter],
        servers: int,
        *,
        staging_for: Callable[[torch.device], Staging | None] = staging_of,
    ) -> None:
        self._parameters = parameters
        self._staging_for = staging_for
        self._rules = {dense.name: dense.rule for dense in parameters}
        self._pieces: list[list[_Piece]] = [[] for _ in range(servers)]
        for dense in parameters:
            for block in dense.blocks:
                self._pieces[block.server].append(_Piece(block, dense))
        self._by_table = [{piece.block.table: piece for piece in pieces} for pieces in self._pieces]
        self._all = [_wants(pieces) for pieces in self._pieces]
        self.trained_wants = [
            _wants([piece for piece in pieces if piece.dense.group is not None]) for pieces in self._pieces
        ]
        """For each server the parts that request every trained value."""

    def rule(self, name: str) -> AnyRule:
        """The update rule of this parameter."""
        return self._rules[name]

    def assigned(self, number: int, *, but: Container[str] = ()) -> Iterator[list[Request]]:
        """The values here for the servers, a parameter at a time, without those named by `but`; `number`:
        INITIAL or LOADED.
        """
        for dense in (each for each in self._parameters if each.name not in but):
            flat = _flat(dense.parameter)
            yield [
                Request(
                    server=block.server,
                    kind=Kind.ASSIGN,
                    number=number,
                    parts=(Part(block.table, Field.VALUES, flat[block.start : block.stop]),),
                )
                for block in dense.blocks
            ]

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, flat and float32; a parameter without a gradient is skipped, as by torch.optim."""
        trained = [each for each in self._parameters if each.group is not None and _has_gradient(each)]
        here = self._here([each.parameter.grad for each in trained if each.parameter.grad is not None])
        return {
            dense.name: flat.neg() if maximizes(dense.group) else flat
            for dense, flat in zip(trained, here, strict=True)
        }

    def _here(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Flat, in this process's memory; what is on a device comes in one copy."""
        found = list(tensors)
        for staging, places in self._by_device(tensors):
            if staging is None:
                arrived = [tensors[place] for place in places]
            else:
                arrived = staging.to_host([tensors[place] for place in places]).wait()
            for place, tensor in zip(places, arrived, strict=True):
                found[place] = _flat(tensor)
        return found

    def _by_device(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Staging | None, list[int]]]:
        """How each device is copied from and to, and the places of its tensors."""
        found: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            found.setdefault(tensor.device, []).append(place)
        return [(self._staging_for(device), places) for device, places in found.items()]

    def values(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name, flat copies."""
        return {
            dense.name: _flat(dense.parameter).clone()
            for dense in self._parameters
            if dense.group is not None
        }

    def add_push(
        self, push: Sequence[list[Part]], flats: Mapping[str, torch.Tensor], lr: float | None = None
    ) -> None:
        """Append gradients to each server's push; `lr`: instead of the parameters' own."""
        for parts, pieces in zip(push, self._pieces, strict=True):
            with_gradient = [piece for piece in pieces if piece.dense.name in flats]
            for rate, run in _runs(with_gradient, lr):
                # A copy, of one piece too: the message may be sent again when the gradient has changed.
                joined = torch.cat([piece.of(flats[piece.dense.name]) for piece in run])
                parts.append(Part(run[0].block.table, Field.VALUES, joined, rate))

    def pulls(self, step: int, *, trained_only: bool) -> list[Request]:
        """Requests for the values as of `step`."""
        wants = self.trained_wants if trained_only else self._all
        return [
            Request(server=server, kind=Kind.PULL, number=step, parts=parts)
            for server, parts in enumerate(wants)
            if parts
        ]

    def take(self, answers: Iterable[tuple[int, Message]]) -> None:
        """Put values into the parameters: (server, its answer)."""
        found = self.read(answers)
        taken = [dense for dense in self._parameters if dense.name in found]
        for staging, places in self._by_device([dense.parameter for dense in taken]):
            values = [found[taken[place].name] for place in places]
            values = values if staging is None else staging.to_device(values)
            for place, value in zip(places, values, strict=True):
                parameter = taken[place].parameter
                parameter.data.copy_(value.view_as(parameter))

    def read(self, answers: Iterable[tuple[int, Message]]) -> dict[str, torch.Tensor]:
        """The values in answers, flat, of the parameters that are complete in them."""
        blocks: dict[str, list[tuple[int, torch.Tensor]]] = {}
        for server, reply in answers:
            by_table = self._by_table[server]
            for part in reply.parts:
                if part.field is not Field.VALUES:
                    continue
                at, table = 0, part.table
                while at < len(part.data):
                    piece = by_table[table]
                    value = part.data[at : at + piece.size]
                    blocks.setdefault(piece.dense.name, []).append((piece.block.start, value))
                    at, table = at + piece.size, table + 1
        return {name: _joined(pieces) for name, pieces in blocks.items()}


def _joined(pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    return torch.cat([value for _, value in sorted(pieces, key=lambda piece: piece[0])])


def _has_gradient(dense: DenseParameter) -> bool:
    grad = dense.parameter.grad
    if grad is not None and grad.is_sparse:
        raise NotSupportedError(
            f"parameter {dense.name!r} has a sparse gradient and is not an nn.Embedding(sparse=True); "
            "only embedding modules are served by rows"
        )
    return grad is not None


def _runs(pieces: Sequence[_Piece], lr: float | None) -> Iterator[tuple[float, list[_Piece]]]:
    """Consecutive pieces with the same learning rate, up to the largest run."""
    run: list[_Piece] = []
    rate, total = 0.0, 0
    for piece in pieces:
        own = lr if lr is not None else float(piece.dense.group["lr"]) if piece.dense.group else 0.0
        follows = run and piece.block.table == run[-1].block.table + 1 and own == rate
        if run and not (follows and total + piece.size <= _MAX_RUN):
            yield rate, run
            run, total = [], 0
        run.append(piece)
        rate, total = own, total + piece.size
    if run:
        yield rate, run


def _wants(pieces: Sequence[_Piece]) -> tuple[Part, ...]:
    return tuple(
        Part(run[0].block.table, Field.WANT, torch.tensor([len(run)])) for _, run in _runs(pieces, 0.0)
    )


def _flat(tensor: torch.Tensor | None) -> torch.Tensor:
    if tensor is None:
        raise AssertionError("no gradient")
    return tensor.detach().cpu().reshape(-1).contiguous()


class GradientMerger:
    """Merges the gradients of several steps into one push. Plain SGD gets their sum, which equals the single
    steps but for weight decay, which counts once; every other rule gets their mean, as in Paddle's
    AsyncCommunicator. Of several steps it keeps copies: `zero_grad(set_to_none=False)` and the next
    `backward` write into the gradients of a step.
    """

    def __init__(self, groups: Sequence[TableGroup], most: int = 1) -> None:
        self._groups = groups
        self._most = most
        self._dense: list[dict[str, torch.Tensor]] = []
        self._sparse: dict[int, list[GroupGradient]] = {}
        self.steps = 0
        """Those whose gradients were not finite are counted too."""

    def add(self, dense: dict[str, torch.Tensor]) -> None:
        """Add the gradients of one step: these dense ones, and those that the groups have collected."""
        kept = {name: gradient.clone() for name, gradient in dense.items()} if self._most > 1 else dense
        self._dense.append(kept)
        begin_fetch(self._groups)
        for number, group in enumerate(self._groups):
            gradient = group.take_gradients()
            if gradient is not None:
                self._sparse.setdefault(number, []).append(gradient)
        self.steps += 1

    def add_push(self, parameters: DenseParameters, push: Sequence[list[Part]]) -> None:
        """Append the merged gradients to each server's push, and reset."""
        dense, sparse, steps = self._dense, self._sparse, len(self._dense)
        self._dense, self._sparse, self.steps = [], {}, 0
        parameters.add_push(push, dense[0] if steps == 1 else _merged_dense(dense, parameters))
        for number, pieces in sparse.items():
            group = self._groups[number]
            share = 1 if _sums(group.tables[0].sparse.rule) else steps
            group.add_push(push, pieces[0] if steps == 1 else group.merged(pieces, share))


def _merged_dense(
    steps: list[dict[str, torch.Tensor]], parameters: DenseParameters
) -> dict[str, torch.Tensor]:
    total: dict[str, torch.Tensor] = {}
    for step in steps:
        for name, gradient in step.items():
            if name in total:
                total[name].add_(gradient)
            else:
                total[name] = gradient.clone()
    for name, gradient in total.items():
        if not _sums(parameters.rule(name)):
            gradient.div_(len(steps))
    return total


def _sums(rule: AnyRule) -> bool:
    return isinstance(rule, SGD) and not rule.momentum


Batches = Mapping[RemoteTable, Sequence[torch.Tensor]]


class Exchange(Protocol):
    """When gradients are sent and values fetched. `step` counts this trainer's steps. `ahead`: how many
    batches in advance a batch should be prefetched.
    """

    @property
    def step(self) -> int: ...

    @property
    def ahead(self) -> int: ...

    def start(self, step: int) -> None:
        """Begin at this step."""

    def push(self, *, overflow: bool = False) -> None:
        """Send the gradients of one step, and fetch the values of the next. `overflow`: they are not finite,
        and none are sent.
        """

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Prepare the rows of an upcoming batch. `now`: they are used next, and requested at once."""

    def refresh(self) -> None:
        """Load the current dense values into the model, with all of this trainer's pushes in them."""

    def flush(self) -> None:
        """Wait until every push has been applied, or, in sync training, has arrived."""

    def renew(self) -> None:
        """Forget values of rows that were fetched before: the servers have others now."""


class SyncExchange:
    """One message to each server for a step, with the gradients; its answer has the values of the next step,
    and the rows of the next batch if that was prefetched.
    """

    def __init__(
        self,
        client: Client,
        dense: DenseParameters,
        groups: Sequence[TableGroup],
        servers: int,
        turn: Turn | None = None,
    ) -> None:
        self._client = client
        self._dense = dense
        self._groups = groups
        self._servers = servers
        self._turn = turn or Turn()
        self.step = 0
        self.ahead = 1

    def start(self, step: int) -> None:
        self.step = step
        for group in self._groups:
            group.as_of = step

    def push(self, *, overflow: bool = False) -> None:
        records = records_part(self._turn.take()[0])
        push: list[list[Part]] = [[*records] for _ in range(self._servers)]
        if overflow:
            drop_gradients(self._groups)
        else:
            self._add_gradients(push)
        for parts, wants in zip(push, self._dense.trained_wants, strict=True):
            parts += wants
        row_requests = unsent_training(self._groups)
        add_row_requests(push, row_requests)
        requests = push_requests(push, self.step, overflow=overflow)
        self.start(self.step + 1)
        self._dense.take(SentRequests(self._client, requests, row_requests, self.step).wait())

    def _add_gradients(self, push: Sequence[list[Part]]) -> None:
        begin_fetch(self._groups)
        self._dense.add_push(push, self._dense.gradients())
        for group in self._groups:
            gradient = group.take_gradients()
            if gradient is not None:
                group.add_push(push, gradient)

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """In training the next push requests the rows; in evaluation they are requested here."""
        some = [each for each in prepare(batches) if now or not each.insert]
        send_row_requests(self._client, self._servers, some, self.step)

    def refresh(self) -> None:
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(SentRequests(self._client, pulls, [], self.step).wait())

    def flush(self) -> None:
        return

    def renew(self) -> None:
        for group in self._groups:
            group.drop_prepared()


class AsyncExchange:
    """Pushes are sent and awaited later; dense values are loaded when they arrive. See AsyncConfigs.

    The push of step i carries the row requests of batch i + 2, which is prefetched before step i, when those
    of batch i + 1 are already in flight. So rows are as recent as if they were requested right after the
    push. A push of several steps carries those of as many batches: a message for all of them. With
    `max_staleness` rows are requested by themselves: a push must not wait for other trainers.
    """

    def __init__(
        self,
        client: Client,
        dense: DenseParameters,
        groups: Sequence[TableGroup],
        servers: int,
        configs: AsyncConfigs,
        turn: Turn | None = None,
    ) -> None:
        self._client = client
        self._dense = dense
        self._groups = groups
        self._servers = servers
        self._configs = configs
        self._turn = turn or Turn()
        self._records: list[Records] = []
        """Of the steps that are merged."""
        self._on: On = None
        """Which servers have these: a server takes a push whole or not at all."""
        self._merging = GradientMerger(groups, configs.max_merge_var_num)
        self._pushes: deque[SentRequests] = deque()
        self._receiving: SentRequests | None = None
        self._sent = 0
        self._waited = 0
        """How many batches have been prepared since the oldest whose rows have not been requested."""
        self.step = 0
        self.ahead = configs.ahead

    def start(self, step: int) -> None:
        self.step = step
        for group in self._groups:
            group.as_of = step

    def push(self, *, overflow: bool = False) -> None:
        records, on = self._turn.take()
        if on != self._on and self._merging.steps:
            self._send([])
        self._on = on
        self._records += records
        if overflow:
            drop_gradients(self._groups)
            self._merging.steps += 1
        else:
            self._merging.add(self._dense.gradients())
        self.start(self.step + 1)
        if self._merging.steps >= self._configs.max_merge_var_num:
            self._send(united(unsent_training(self._groups)) if self._configs.carries else [])
        if not self._configs.overlap:
            self.flush()
            return
        self._client.poll()
        while self._pushes and (
            not self._pushes[0].open or len(self._pushes) > self._configs.send_queue_size
        ):
            self._await_oldest()
        if self._configs.independent_recv_thread:
            self._receive()

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Row requests that no push has carried are sent by themselves once the first of them is for the
        batch after the next.
        """
        some = unsent(self._groups)
        self._waited = self._waited + 1 if some else 0
        if now or self._waited >= self._configs.max_merge_var_num:
            self._waited = 0
        else:
            some = []
        prepared = prepare(batches)
        if now:
            some += prepared
        elif not self._configs.carries:
            some = prepared
        if now or self._configs.overlap:
            send_row_requests(self._client, self._servers, united(some), self.step)

    def refresh(self) -> None:
        self.flush()
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._dense.take(SentRequests(self._client, pulls, [], self.step).wait())

    def flush(self) -> None:
        if self._merging.steps:
            self._send([])
        while self._pushes:
            self._await_oldest()

    def renew(self) -> None:
        self._receiving = None
        for group in self._groups:
            group.drop_prepared()

    def _send(self, row_requests: Sequence[RowRequest]) -> None:
        records, self._records = records_part(self._records), []
        push: list[list[Part]] = [[*records] for _ in range(self._servers)]
        self._merging.add_push(self._dense, push)
        self._sent += 1
        with_values = (
            not self._configs.independent_recv_thread
            and self._sent % self._configs.min_send_grad_num_before_recv == 0
        )
        if with_values:
            for parts, wants in zip(push, self._dense.trained_wants, strict=True):
                parts += wants
        add_row_requests(push, row_requests)
        requests = push_requests(push, self.step - 1)
        self._pushes.append(SentRequests(self._client, requests, row_requests, self.step))

    def _await_oldest(self) -> None:
        self._dense.take(self._pushes.popleft().wait())

    def _receive(self) -> None:
        if self._receiving is not None:
            if self._receiving.open:
                return
            self._dense.take(self._receiving.wait())
        pulls = self._dense.pulls(self.step, trained_only=True)
        self._receiving = SentRequests(self._client, pulls, [], self.step)


def prepare(batches: Batches) -> list[RowRequest]:
    """Prepare an upcoming batch, each group once."""
    return [request for group, calls in by_group(batches).items() for request in group.prepare(calls)]


def by_group(batches: Batches) -> dict[TableGroup, dict[int, Sequence[torch.Tensor]]]:
    """As `TableGroup.prepare` takes them."""
    found: dict[TableGroup, dict[int, Sequence[torch.Tensor]]] = {}
    for table, ids in batches.items():
        found.setdefault(table.group, {})[table.place] = ids
    return found


def unsent(groups: Sequence[TableGroup]) -> list[RowRequest]:
    """Row requests of prepared batches that have not been sent."""
    return [request for group in groups for request in group.unsent()]


def drop_gradients(groups: Sequence[TableGroup]) -> None:
    """Of all of them."""
    for group in groups:
        group.drop_gradients()


def unsent_training(groups: Sequence[TableGroup]) -> list[RowRequest]:
    """Those that a push may carry: it inserts rows."""
    return [request for request in unsent(groups) if request.insert]

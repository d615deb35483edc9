"""Decide when a trainer's gradients leave and when new values arrive, step by step with the others (sync) or
independently (async). Handle the dense parameters of both modes as blocks on servers, including values that
the script writes.

This module also merges gradients of several steps into one push. `remote` handles sparse tables.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fleetrun.aliases import Numbers
from fleetrun.frozen import frozen
from trainers.data.positions import Records
from trainers.errors import NotSupportedError, UsageError
from trainers.ps.client import Client, Request
from trainers.ps.configs import AsyncConfigs
from trainers.ps.tables.rules import SGD, AnyRule
from trainers.ps.trainer.gradient import GroupGradient
from trainers.ps.trainer.group import RemoteTable, TableGroup, begin_fetch
from trainers.ps.trainer.jagged import Features, JaggedBatch
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
from trainers.ps.wire import LOADED, Field, Kind, Message, Part

_MAX_RUN = 1 << 25
"""The elements of one part, 128 MB."""

Dense = dict[str, Tensor]
"""Values, changes or gradients of dense parameters, by the name of the parameter."""


@frozen(eq=False)
class _Piece:
    """One block and the parameter that it is cut from."""

    block: Block
    dense: DenseParameter

    @property
    def size(self) -> int:
        return self.block.stop - self.block.start

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.block.start : self.block.stop]


class DenseParameters:
    """All dense parameters of one model. A run is some blocks of one server with consecutive numbers.

    Values that the script writes are found by comparison with the values of the last exchange. Writes through
    `.data` or numpy do not change the version of a tensor. In sync training, the servers get these values. In
    async training, a write to a trained parameter is refused. In geo training, the write is a part of this
    trainer's changes.
    """

    def __init__(
        self,
        parameters: Sequence[DenseParameter],
        servers: int,
        asynchronous: AsyncConfigs | None = None,
        *,
        staging_for: Callable[[torch.device], Staging | None] = staging_of,
    ) -> None:
        self._parameters = parameters
        self._staging_for = staging_for
        geo = asynchronous is not None and asynchronous.k_steps > 0
        self._refuses = asynchronous is not None
        self._watched = [each for each in parameters if not geo or each.group is None]
        self._last: Dense = {}
        """The values of each parameter after the last exchange, on its device."""
        self._unsent: Dense = {}
        """Flat values that the script has written."""
        self._rules = {dense.name: dense.rule for dense in parameters}
        self._pieces: list[list[_Piece]] = [[] for _ in range(servers)]
        for dense in parameters:
            for block in dense.blocks:
                self._pieces[block.server].append(_Piece(block, dense))
        self._by_table = [{piece.block.table: piece for piece in pieces} for pieces in self._pieces]
        self._all = [_wants(pieces) for pieces in self._pieces]
        self._trained = [
            _wants([piece for piece in pieces if piece.dense.group is not None]) for pieces in self._pieces
        ]
        """For each server, the parts that request every trained value."""

    def rule(self, name: str) -> AnyRule:
        """Return the update rule of this parameter."""
        return self._rules[name]

    def assigned(self, number: int, *, but: Container[str] = ()) -> Iterator[list[Request]]:
        """Yield the requests that send the values here to the servers, a parameter at a time, without those
        in `but`.

        `number` is INITIAL or LOADED.
        """
        for dense in (each for each in self._parameters if each.name not in but):
            yield _assign(dense, _flat(dense.parameter), number)

    def notice(self) -> None:
        """Find the values that the script has written since the last exchange, for the next push or for
        `send_written`.

        Raises FleetError for values that the servers cannot accept.
        """
        written = self._written()
        for each in written:
            name = each.name
            if each.group is None and each.parameter.requires_grad:
                raise UsageError(
                    f"Parameter {name!r} changed, but no optimizer of fleet has it, so each trainer would "
                    "train a separate copy. Give its optimizer to fleet.distributed_optimizer() before "
                    "fleet.init_worker(). If your script sets the values itself, call requires_grad_(False)."
                )
            if each.group is not None and self._refuses:
                raise NotSupportedError(
                    f"The script changed parameter {name!r}. In async training, the servers hold its "
                    "values, and the next exchange would overwrite the change. To set values once, call "
                    "load_state_dict() of the module in all trainers. To change them in each step, use sync "
                    'training or strategy.dense = "allreduce".'
                )
        copies = [each.parameter.detach().clone() for each in written]
        for each, copy, flat in zip(written, copies, self._here(copies), strict=True):
            self._last[each.name], self._unsent[each.name] = copy, flat

    def send_written(self, client: Client) -> None:
        """Send the values that `notice` has found, without a push."""
        found, self._unsent = self._unsent, {}
        for dense in self._parameters if found else ():
            if dense.name in found:
                client.ask(_assign(dense, found[dense.name], LOADED))

    def add_written(self, push: Sequence[list[Part]]) -> None:
        """Append the values that `notice` has found to each server's push."""
        found, self._unsent = self._unsent, {}
        self.add_push(push, found, 0.0, field=Field.WRITTEN)

    def _written(self) -> list[DenseParameter]:
        some = [each for each in self._watched if each.name in self._last]
        for each in some:
            now, then = each.parameter, self._last[each.name]
            if (now.dtype, now.shape) != (then.dtype, then.shape):
                raise UsageError(
                    f"Parameter {each.name!r} is now {now.dtype} {list(now.shape)}, but on the servers it "
                    f"is {then.dtype} {list(then.shape)}. Make such changes before fleet.init_worker()."
                )
        written = []
        for staging, places in self._by_device([each.parameter for each in some]):
            here = [some[place].parameter for place in places]
            last = [self._last[some[place].name].to(here[0].device) for place in places]
            # On a device, one comparison of all tensors is faster than one for each.
            if staging is None or not same_bits(_joined_flat(here), _joined_flat(last)):
                pairs = zip(places, here, last, strict=True)
                written += [some[place] for place, now, then in pairs if not same_bits(now, then)]
        return written

    def gradients(self) -> Dense:
        """Return flat float32 gradients by name. A parameter without a gradient is skipped, as by
        torch.optim.
        """
        trained = [each for each in self._parameters if each.group is not None and _has_gradient(each)]
        here = self._here([each.parameter.grad for each in trained if each.parameter.grad is not None])
        return {
            dense.name: flat.neg() if maximizes(dense.group) else flat
            for dense, flat in zip(trained, here, strict=True)
        }

    def _here(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors flat in this process's memory. Tensors on a device arrive in one copy."""
        found = list(tensors)
        for staging, places in self._by_device(tensors):
            if staging is None:
                arrived = [tensors[place] for place in places]
            else:
                arrived = staging.to_host([tensors[place] for place in places]).wait()
            for place, tensor in zip(places, arrived, strict=True):
                found[place] = _flat(tensor)
        return found

    def _by_device(self, tensors: Sequence[Tensor]) -> list[tuple[Staging | None, list[int]]]:
        """Return for each device its staging and the places of its tensors."""
        found: dict[torch.device, list[int]] = {}
        for place, tensor in enumerate(tensors):
            found.setdefault(tensor.device, []).append(place)
        return [(self._staging_for(device), places) for device, places in found.items()]

    def changes(self) -> Dense:
        """Return the difference of each trained parameter from the values of the last exchange, flat, by
        name.
        """
        return {
            dense.name: _flat(dense.parameter) - _flat(self._last[dense.name])
            for dense in self._parameters
            if dense.group is not None
        }

    def rates(self) -> dict[str | int, float]:
        """Return the current learning rate of each trained parameter, by name."""
        return {each.name: float(each.group["lr"]) for each in self._parameters if each.group is not None}

    def add_push(
        self,
        push: Sequence[list[Part]],
        flats: Mapping[str, Tensor],
        lr: float | Numbers | None = None,
        *,
        field: Field = Field.VALUES,
    ) -> None:
        """Append gradients to each server's push. `lr` is one rate, or a rate by name, to replace their own
        rates.
        """
        for parts, pieces in zip(push, self._pieces, strict=True):
            with_gradient = [piece for piece in pieces if piece.dense.name in flats]
            for rate, run in _runs(with_gradient, lr):
                # Copy even a single piece, because the message may be sent again after the gradient has
                # changed.
                joined = torch.cat([piece.of(flats[piece.dense.name]) for piece in run])
                parts.append(Part(run[0].block.table, field, joined, rate))

    def add_wants(self, push: Sequence[list[Part]]) -> None:
        """Append requests for every trained value to each server's push."""
        for parts, wants in zip(push, self._trained, strict=True):
            parts += wants

    def pulls(self, step: int, *, trained_only: bool) -> list[Request]:
        """Return the requests for the values as of `step`."""
        wants = self._trained if trained_only else self._all
        return [
            Request(server=server, kind=Kind.PULL, number=step, parts=parts)
            for server, parts in enumerate(wants)
            if parts
        ]

    def take(self, answers: Iterable[tuple[int, Message]]) -> None:
        """Put the values of the servers' answers into the parameters."""
        found = self.read(answers)
        taken = [dense for dense in self._parameters if dense.name in found]
        for staging, places in self._by_device([dense.parameter for dense in taken]):
            values = [found[taken[place].name] for place in places]
            values = values if staging is None else staging.to_device(values)
            for place, value in zip(places, values, strict=True):
                parameter = taken[place].parameter
                self._last[taken[place].name] = value = value.view_as(parameter)
                parameter.data.copy_(value)

    def read(self, answers: Iterable[tuple[int, Message]]) -> Dense:
        """Return the flat values of the parameters that are complete in these answers."""
        blocks: dict[str, list[tuple[int, Tensor]]] = {}
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


def _joined(pieces: list[tuple[int, Tensor]]) -> Tensor:
    if len(pieces) == 1:
        return pieces[0][1]
    return torch.cat([value for _, value in sorted(pieces, key=lambda piece: piece[0])])


def _has_gradient(dense: DenseParameter) -> bool:
    grad = dense.parameter.grad
    if grad is not None and grad.is_sparse:
        raise NotSupportedError(
            f"Parameter {dense.name!r} has a sparse gradient, but is not an nn.Embedding(sparse=True). "
            "Servers hold rows only for embedding modules."
        )
    return grad is not None


def _joined_flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _assign(dense: DenseParameter, flat: Tensor, number: int) -> list[Request]:
    return [
        Request(
            server=block.server,
            kind=Kind.ASSIGN,
            number=number,
            parts=(Part(block.table, Field.VALUES, flat[block.start : block.stop]),),
        )
        for block in dense.blocks
    ]


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Return True if two float32 tensors of one shape are equal bit by bit. Ten times as fast as
    torch.equal.
    """
    if left.is_cpu and left.is_contiguous() and right.is_contiguous():
        return not _memcmp(left.data_ptr(), right.data_ptr(), left.nbytes)
    bits = [each.detach().reshape(-1).view(torch.int32) for each in (left, right)]
    return torch.equal(*bits)


def _runs(pieces: Sequence[_Piece], lr: float | Numbers | None) -> Iterator[tuple[float, list[_Piece]]]:
    """Yield runs of consecutive pieces with the same learning rate, up to the largest run."""
    run: list[_Piece] = []
    rate, total = 0.0, 0
    for piece in pieces:
        if lr is None:
            own = float(piece.dense.group["lr"]) if piece.dense.group else 0.0
        else:
            own = lr[piece.dense.name] if isinstance(lr, Mapping) else lr
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


def _flat(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise AssertionError("no gradient")
    return tensor.detach().cpu().reshape(-1).contiguous()


class GradientMerger:
    """Merge the gradients of several steps into one push.

    Plain SGD gets their sum, which equals the single steps, except that weight decay counts once. Every other
    rule gets their mean, as in Paddle's AsyncCommunicator. The merger copies gradients if it merges several
    steps, because `zero_grad(set_to_none=False)` and the next `backward` write into the gradients of a step.

    Each step counts with its own learning rates. For plain SGD without weight decay, its gradients are
    scaled. With every other rule, steps of different rates do not merge.
    """

    def __init__(self, parameters: DenseParameters, groups: Sequence[TableGroup], most: int = 1) -> None:
        self._parameters = parameters
        self._groups = groups
        self._most = most
        self._dense: list[Dense] = []
        self._sparse: dict[int, list[tuple[int, GroupGradient]]] = {}
        """For each group, the gradients with the number of their step."""
        self._rates: list[Mapping[str | int, float]] = []
        """For each step, the rates by the name of a parameter and by the number of a group."""
        self.steps = 0
        """The number of steps, including those whose gradients were not finite."""

    def add(self, dense: Dense) -> None:
        """Add the gradients of one step, which are these dense gradients and the gradients collected by the
        groups.
        """
        kept = {name: gradient.clone() for name, gradient in dense.items()} if self._most > 1 else dense
        self._rates.append(self._current())
        begin_fetch(self._groups)
        for number, group in enumerate(self._groups):
            gradient = group.take_gradients()
            if gradient is not None:
                self._sparse.setdefault(number, []).append((len(self._dense), gradient))
        self._dense.append(kept)
        self.steps += 1

    def fits(self) -> bool:
        """Return True if a step with the current learning rates can merge with the steps before it."""
        before = self._rates[0] if self._rates else {}
        for key, rate in self._current().items():
            if before.get(key, rate) != rate:
                rule = self._rule(key)
                if not isinstance(rule, SGD) or rule.momentum or rule.weight_decay:
                    return False
        return True

    def add_push(self, push: Sequence[list[Part]]) -> None:
        """Append the merged gradients to each server's push, and reset."""
        dense, sparse, rates, steps = self._dense, self._sparse, self._rates, len(self._dense)
        self._dense, self._sparse, self._rates, self.steps = [], {}, [], 0
        # Use the largest rate, so a scaled gradient stays in the range of the type that is sent.
        largest = {key: max((step[key] for step in rates), key=abs) for key in (rates[0] if rates else ())}
        total: Dense = {}
        for step, of in zip(dense, rates, strict=True):
            for name, gradient in step.items():
                scaled = _scaled(gradient, of[name], largest[name])
                total[name] = total[name] + scaled if name in total else scaled
        for name in total if steps > 1 else ():
            if not _sums(self._rule(name)):
                total[name] = total[name] / steps
        self._parameters.add_push(push, total, {name: largest[name] for name in total})
        for number, pieces in sparse.items():
            group = self._groups[number]
            for place, each in pieces:
                each.rows = _scaled(each.rows, rates[place][number], largest[number])
            share = 1 if _sums(self._rule(number)) else steps
            some = [each for _, each in pieces]
            group.add_push(push, some[0] if steps == 1 else group.merged(some, share), largest[number])

    def _current(self) -> dict[str | int, float]:
        found = self._parameters.rates()
        found.update((number, group.tables[0].sparse.lr) for number, group in enumerate(self._groups))
        return found

    def _rule(self, key: str | int) -> AnyRule:
        return self._parameters.rule(key) if isinstance(key, str) else self._groups[key].tables[0].sparse.rule


def _scaled(gradient: Tensor, rate: float, largest: float) -> Tensor:
    return gradient if rate == largest else gradient * (rate / largest)


def _sums(rule: AnyRule) -> bool:
    return isinstance(rule, SGD) and not rule.momentum


Batches = Mapping[RemoteTable | Features, Sequence[Any]]
"""The ids with which the modules of tables will be called, and a Jagged for each call of a collection."""


class Exchange(ABC):
    """The times at which gradients are sent and values fetched. `step` counts this trainer's steps. `ahead`
    is the number of batches by which to prefetch.
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
        """Start at this step."""
        self.step = step
        for group in self._groups:
            group.as_of = step

    @abstractmethod
    def push(self, *, overflow: bool = False) -> None:
        """Send the gradients of one step, and fetch the values of the next. With `overflow`, the gradients
        are not finite and are not sent.
        """

    @abstractmethod
    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Prepare the rows of an upcoming batch. With `now`, the rows are used next and requested
        immediately.
        """

    def refresh(self) -> None:
        """Load the current dense values into the model, including all pushes of this trainer."""
        self.flush()
        self._dense.take(self._pull().wait())

    def _pull(self) -> SentRequests:
        """Request the current dense values."""
        pulls = self._dense.pulls(self.step, trained_only=True)
        return SentRequests(self._client, pulls, [], self.step)

    def flush(self) -> None:
        """Wait until every push has been applied, or in sync training has arrived. Also send the values that
        the script has written into dense parameters.
        """
        self._dense.notice()
        self._dense.send_written(self._client)

    def renew(self) -> None:
        """Forget values of rows that were fetched earlier, because the servers have other values now."""
        for group in self._groups:
            group.drop_prepared()


class SyncExchange(Exchange):
    """Send one message to each server per step, with the gradients.

    The answer has the values of the next step, and the rows of the next batch if that batch was prefetched.
    """

    def push(self, *, overflow: bool = False) -> None:
        records = records_part(self._turn.take()[0])
        push = [[*records] for _ in range(self._servers)]
        if overflow:
            self.flush()  # a server ignores everything in such a push
        else:
            self._dense.notice()
            self._dense.add_written(push)
            begin_fetch(self._groups)
            self._dense.add_push(push, self._dense.gradients())
            for group in self._groups:
                gradient = group.take_gradients()
                if gradient is not None:
                    group.add_push(push, gradient)
        self._dense.add_wants(push)
        row_requests = unsent_training(self._groups)
        add_row_requests(push, row_requests)
        requests = push_requests(push, self.step, overflow=overflow)
        self.start(self.step + 1)
        self._dense.take(SentRequests(self._client, requests, row_requests, self.step).wait())

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Prepare rows. In training, the next push requests them. In evaluation, they are requested here."""
        some = [each for each in prepare(batches) if now or not each.insert]
        send_row_requests(self._client, self._servers, some, self.step)


class AsyncExchange(Exchange):
    """Send pushes and wait for them later. Dense values are loaded when they arrive. See AsyncConfigs.

    The push of step i carries the row requests of batch i + 2. This batch is prefetched before step i, when
    the requests of batch i + 1 are already in flight. Rows are therefore as recent as with a request right
    after the push. A push of several steps carries the requests of as many batches in one message. With
    `max_staleness`, rows are requested without a push, because a push must not wait for other trainers.
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
        super().__init__(client, dense, groups, servers, turn)
        self._configs = configs
        self._records: list[Records] = []
        """The stream records of the steps that are merged."""
        self._on: On = None
        """The servers that have these records. A server applies a push as a whole or not at all."""
        self._merging = GradientMerger(dense, groups, configs.max_merge_var_num)
        self._pushes: deque[SentRequests] = deque()
        self._receiving: SentRequests | None = None
        self._sent = 0
        self._waited = 0
        """The number of batches prepared since the oldest batch whose rows have not been requested."""
        self.ahead = configs.ahead

    def push(self, *, overflow: bool = False) -> None:
        self._dense.notice()
        records, on = self._turn.take()
        if self._merging.steps and (on != self._on or not self._merging.fits()):
            self._send([])
        self._on = on
        self._records += records
        if overflow:
            self._merging.steps += 1
        else:
            self._merging.add(self._dense.gradients())
        self.start(self.step + 1)
        if self._merging.steps >= self._configs.max_merge_var_num:
            self._send(united(unsent_training(self._groups)) if self._configs.carries else [])
        if not self._configs.overlap:
            self._settle()
            return
        self._client.poll()
        while self._pushes and (
            not self._pushes[0].open or len(self._pushes) > self._configs.send_queue_size
        ):
            self._await_oldest()
        if self._configs.independent_recv_thread:
            self._receive()

    def prefetch(self, batches: Batches, *, now: bool = False) -> None:
        """Prepare rows. Requests that no push has carried are sent without a push once the first of them is
        for the batch after the next.
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

    def flush(self) -> None:
        self._dense.notice()
        self._settle()
        self._dense.send_written(self._client)

    def _settle(self) -> None:
        if self._merging.steps:
            self._send([])
        while self._pushes:
            self._await_oldest()

    def renew(self) -> None:
        self._receiving = None
        super().renew()

    def _send(self, row_requests: Sequence[RowRequest]) -> None:
        records, self._records = records_part(self._records), []
        push = [[*records] for _ in range(self._servers)]
        self._dense.add_written(push)
        self._merging.add_push(push)
        self._sent += 1
        if (
            not self._configs.independent_recv_thread
            and self._sent % self._configs.min_send_grad_num_before_recv == 0
        ):
            self._dense.add_wants(push)
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
        self._receiving = self._pull()


def prepare(batches: Batches) -> list[RowRequest]:
    """Prepare an upcoming batch, each group once."""
    return [request for group, calls in by_group(batches).items() for request in group.prepare(*calls)]


def by_group(
    batches: Batches,
) -> dict[TableGroup, tuple[dict[int, Sequence[Tensor]], list[JaggedBatch]]]:
    """Return the batches in the form for `TableGroup.prepare`."""
    found: dict[TableGroup, tuple[dict[int, Sequence[Tensor]], list[JaggedBatch]]] = {}
    for table, ids in batches.items():
        calls, jagged = found.setdefault(table.group, ({}, []))
        if isinstance(table, Features):
            jagged += map(table.batch, ids)
        else:
            calls[table.place] = ids
    return found


def unsent(groups: Sequence[TableGroup]) -> list[RowRequest]:
    """Return the row requests of prepared batches that have not been sent."""
    return [request for group in groups for request in group.unsent()]


def unsent_training(groups: Sequence[TableGroup]) -> list[RowRequest]:
    """Return the unsent requests that a push may carry. These requests insert rows."""
    return [request for request in unsent(groups) if request.insert]

"""A trainer's connection to its model on the parameter servers: join, train, save, finish.

`exchange` handles steps, `remote` sparse tables, `client` sockets, and `saving` the order of a save. The
servers handle arithmetic and files.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from fleetrun.envs.channels import offer_to_probe
from trainers import progress
from trainers.data.positions import Records
from trainers.data.stream import Reading
from trainers.errors import FleetError, NotSupportedError, ServerError, TablesLostError, UsageError
from trainers.notice import notice_file, read_notice
from trainers.process.log import glog
from trainers.ps.client import Client, Request, to_all
from trainers.ps.configs import AsyncConfigs, PsConfigs
from trainers.ps.saves.manifest import SaveMode
from trainers.ps.tables.spec import EntryKind, ShrinkPolicy, describe_job, start_of
from trainers.ps.trainer.collections import ServedCollection
from trainers.ps.trainer.embedding import ServedEmbedding
from trainers.ps.trainer.exchange import AsyncExchange, DenseParameters, Exchange, SyncExchange
from trainers.ps.trainer.group import RemoteTable, TableGroup, grouped
from trainers.ps.trainer.jagged import Features, Jagged
from trainers.ps.trainer.layout import Layout
from trainers.ps.trainer.local import AllReduced, CachedGroup, GeoExchange, LocalTraining
from trainers.ps.trainer.look_ahead import Calls, LookAhead
from trainers.ps.trainer.modules import row_limit
from trainers.ps.trainer.saving import AGEING, SaveCoordinator
from trainers.ps.trainer.turn import On, Turn
from trainers.ps.transport import CurveKeys
from trainers.ps.wire import (
    INITIAL,
    LOADED,
    MAX_FRAME_BYTES,
    ROW_DTYPES,
    Code,
    Field,
    Kind,
    Message,
    Part,
    bytes_part,
    text_part,
)
from trainers.roles.identity import Identity
from trainers.storage.folder import Where, absolute_path

_LEAVE_TIMEOUT_S = 5.0


class Worker:
    """One trainer. `asynchronous` is None for sync training."""

    def __init__(
        self,
        identity: Identity,
        layout: Layout,
        configs: PsConfigs,
        asynchronous: AsyncConfigs | None,
        *,
        settings: str = "",
        keys: CurveKeys | None = None,
        local: LocalTraining | None = None,
    ) -> None:
        self._identity = identity
        self.layout = layout
        self._configs = configs
        self._sync = asynchronous is None
        self._settings = settings
        self._reported_uneven = False
        self._barriers = 0
        self._gathering = 0
        self._client = Client(identity.servers, identity.index, configs, keys=keys)
        self._turn = Turn()
        self.forget = self._turn.forget
        self.streams: dict[str, Reading] = {}
        self._first: Sequence[int] = ()
        """The step with which each server takes new records."""
        offer_to_probe("ps", self._client.waits)
        self._dense = DenseParameters(layout.dense, layout.servers, asynchronous)
        self._groups = [
            TableGroup(
                some,
                layout.servers,
                self._client,
                row_dtype=ROW_DTYPES[configs.wire_dtype],
                late=0 if asynchronous is None else asynchronous.late,
            )
            for some in grouped(layout.sparse)
        ]
        self._tables = [table for group in self._groups for table in group.tables]
        self._exchange = self._exchange_for(asynchronous, local)
        self._all_reduced = AllReduced(identity, local) if local is not None and local.dense else None
        self._called = [table for group in self._groups for table in group.tables]
        """The tables as forward passes see them."""
        self._by_module: dict[int, RemoteTable | ServedCollection] = {
            id(table.sparse.module): table for table in self._called
        }
        waits = asynchronous is not None and not asynchronous.overlap
        self.look_ahead = LookAhead(
            self._prepare,
            0 if waits else self._exchange.ahead,
            every=configs.read_ahead,
            report=None if identity.index else glog,
        )
        self._saver = SaveCoordinator(self._client, layout.servers)
        self._servings: list[ServedEmbedding] = []
        self._loaded: list[tuple[RemoteTable, Tensor]] = []
        """Rows of a state that is being loaded."""

    @property
    def step_number(self) -> int:
        """The number of steps of this rank that this process and earlier ones have pushed."""
        return self._exchange.step

    @property
    def place(self) -> tuple[int, int]:
        """This trainer's rank, and the number of trainers."""
        return self._identity.index, self._identity.worker_num

    @property
    def interrupted(self) -> bool:
        """True if the launcher is stopping this process, which may be restarted."""
        return read_notice(notice_file(os.environ)) is not None

    def positions(self, stream: str) -> list[dict[str, list[int]]]:
        """Return each server's records of a stream, with every push of this trainer. See `Positions.of`."""
        self._exchange.flush()
        replies = self._client.ask(to_all(self.layout.servers, Kind.POSITIONS, 0, text_part(stream)))
        self._first = [reply.number for reply in replies]
        return [json.loads(reply.text) for reply in replies]

    def give(self, records: Records, on: On) -> None:
        """Note that the next step trains a batch with these records. In sync training, a server may have
        steps of this trainer, or steps of the other trainers without it, that another server lacks. The
        server takes no new records in these steps, so they are skipped.
        """
        self._turn.give(records, on)
        self._skip_to(max(step for server, step in enumerate(self._first) if on is None or not on[server]))

    def _skip_to(self, step: int) -> None:
        """Skip to this step if it is later. In sync training, do so after the push of the step before."""
        if self._sync and step > self._exchange.step:
            self._exchange.flush()
            self._client.ask(to_all(self.layout.servers, Kind.SKIP, step))
            self._exchange.start(step)
            self._exchange.refresh()
            progress.meter.resumed(step)

    def begin_prefetch(self) -> int:
        """Stop predicting rows, because the script announces the rows that it will need. Return how many
        batches ahead to prefetch.
        """
        self.look_ahead.active = False
        return self._exchange.ahead

    def start(self) -> None:
        """Join all servers. Trainer 0 sends the initial values unless the tables have values."""
        with progress.activity("waiting for the servers"):
            hellos = self._client.ask(
                [self._hello(server) for server in range(self.layout.servers)],
                silence=self._configs.join_timeout_s,
            )
        # Servers with steps of this trainer cannot train together with servers that started empty.
        empty = [server for server, reply in enumerate(hellos) if reply.code is Code.NOT_READY]
        if empty and any(reply.number for reply in hellos):
            names = ", ".join(map(str, empty))
            raise TablesLostError(
                f"Server {names} restarted without its tables, but other servers have theirs. Start the job "
                'again. Set ps_configs "durability" to keep tables over a restart.'
            )
        # An earlier process may have died after pushing to some servers only. That step is then repeated.
        self._exchange.start(min(reply.number for reply in hellos))
        if self._all_reduced and self._exchange.step:
            glog(
                f"Resumed at step {self._exchange.step}. The trainers held the dense parameters, so they "
                "continue from the values that this script gave them."
            )
        if self._identity.index == 0 and self.layout.servers > 1 and self.layout.sparse:
            glog(self.layout.describe())
        new = [reply for reply in hellos if reply.code is Code.NOT_READY]
        loaded = self._begin_with(new)
        if self._identity.index == 0 and new:
            tables = [
                table
                for table in self._tables
                if loaded.get(table.sparse.name, -1) < (row_limit(table.sparse.module) or 0)
            ]
            for requests in itertools.chain(
                self._dense.assigned(INITIAL, but=loaded), *(table.initial() for table in tables)
            ):
                self._client.ask(requests)
            self._client.ask(to_all(self.layout.servers, Kind.READY))
        with progress.activity("waiting for the other trainers"):
            self._client.ask(to_all(self.layout.servers, Kind.OPEN))
        progress.meter.resumed(self._exchange.step)
        self._take_dense()
        if self._sync:
            self.barrier()  # values that a faster trainer's script writes must not be among these
        self._servings = [
            ServedEmbedding(
                table.sparse.name,
                table.sparse.module,
                table,
                statistics=table.sparse.spec.rows.statistics,
                zeros=table.sparse.zeros,
                called=None if _counts_pulls(table) else self.look_ahead.called,
            )
            for table in self._called
        ]
        served = {
            id(table.sparse.module): (serving, table)
            for serving, table in zip(self._servings, self._called, strict=True)
        }
        counts = any(map(_counts_pulls, self._called))
        for module in self.layout.collections:
            called = None if counts else self.look_ahead.called
            self._by_module[id(module)] = ServedCollection(module, served, called)

    def _begin_with(self, new: Sequence[Message]) -> Mapping[str, int]:
        """Return the names of tables and parameters that new servers have loaded, with their numbers of rows.
        Trainer 0 logs the names if some are missing. Raises UsageError if servers differ, or lack a name that
        the script requested.
        """
        texts = {reply.text for reply in new}
        if len(texts) > 1:
            raise UsageError(
                "The servers started with different saved tables. Call fleet.init_server() with the same "
                "dirname and var_names on all servers."
            )
        if not any(texts):
            return {}
        found = json.loads(texts.pop())
        rows: dict[str, int] = found["rows"]
        model = [*(each.name for each in self.layout.sparse), *(each.name for each in self.layout.dense)]
        unknown = sorted(rows.keys() - set(model))
        if unknown and found["named"]:
            raise UsageError(
                f"fleet.init_server() was given var_names that no server has: {unknown}. Use some of {model}."
            )
        initial, left = [name for name in model if name not in rows], [*found["others"], *unknown]
        if self._identity.index == 0 and (initial or left):
            loaded = ", ".join(name for name in model if name in rows)
            glog(
                f"loaded from {found['where']}: {loaded}; initial values: {', '.join(initial) or 'none'}; "
                f"not loaded: {', '.join(left) or 'none'}"
            )
        return rows

    def _take_dense(self) -> None:
        pulls = self._dense.pulls(self._exchange.step, trained_only=False)
        replies = self._client.ask(pulls)
        self._dense.take(zip((pull.server for pull in pulls), replies, strict=True))

    def begin_load(self, module: Module, state: dict[str, Tensor], prefix: str) -> None:
        """Prepare before torch loads `state` into a module of the model. Wait until all trainers have called
        it and have no push in flight. The dense values here then equal the servers' values. The rows in
        `state` are kept for `end_load`, and torch gets the weight that it finds in the module. Raises
        UsageError.
        """
        for each in self._servings:
            each.check_place()
        modules = dict(module.named_modules(remove_duplicate=False))  # a state has a key for each name
        self._loaded = []
        for serving, table in zip(self._servings, self._tables, strict=True):
            for name in [name for name, each in modules.items() if each is table.sparse.module]:
                key = f"{prefix}{name}.weight" if name else f"{prefix}weight"
                if key in state and (weight := serving.rows_of(state[key])) is not None:
                    self._loaded.append((table, weight))
                    serving.forget_given()
                    state[key] = serving.weight
        self.gather(b"")  # a value that was written here must not reach a trainer at an earlier step
        self._exchange.flush()
        self.gather(b"")
        self.refresh()

    def end_load(self) -> None:
        """Send the state that trainer 0 has loaded to the servers. All trainers continue from this state."""
        if self._identity.index == 0:
            loaded = (table.assigned(weight, LOADED) for table, weight in self._loaded)
            for requests in itertools.chain(self._dense.assigned(LOADED), *loaded):
                self._client.ask(requests)
        self._loaded = []
        self.gather(b"")
        self._take_dense()
        self.gather(b"")  # a faster trainer's next values must not be among these
        if self._all_reduced:
            self._all_reduced.take_first()
        self._exchange.renew()

    def step(self, *, overflow: bool = False) -> None:
        """Push all gradients, and fetch the values of the next step. `overflow`: see `Exchange.push`."""
        self._check_weights()
        with self._all_reduced.step() if self._all_reduced and not overflow else nullcontext():
            self._exchange.push(overflow=overflow)
        self.look_ahead.stepped()

    def _check_weights(self) -> None:
        for each in self._servings:
            each.check()

    def agree(self, overflow: bool) -> bool:
        """Return True if gradients are not finite. If trainers average gradients among them, any trainer's
        gradients count. Otherwise only this trainer's gradients count.
        """
        return self._all_reduced.agree(overflow) if self._all_reduced else overflow

    def flush(self) -> None:
        """Wait until every push has been applied, on servers that are then at the same step."""
        self._exchange.flush()
        self._skip_to(max(self._first, default=0))

    def refresh(self) -> None:
        """Pull the current dense values, because other trainers may have changed them."""
        self._exchange.refresh()

    def prefetch(self, ids: Mapping[Module, Sequence[Any]]) -> None:
        """Prepare the rows of an upcoming batch. `ids` holds the tensors with which each served module will
        be called, or a KeyedJaggedTensor for a collection.
        """
        self._prepare([(module, each) for module, batches in ids.items() for each in batches])

    def _prepare(self, calls: Calls, now: bool = False) -> None:
        batches: dict[RemoteTable | Features, list[Any]] = {}
        parsed: dict[int, Jagged] = {}
        for module, ids in calls:
            served = self._by_module[id(module)]
            if isinstance(served, RemoteTable):
                batches.setdefault(served, []).append(ids)
                continue
            if id(ids) not in parsed:
                parsed[id(ids)] = served.jagged(ids)
            for features in served.features:
                batches.setdefault(features, []).append(parsed[id(ids)])
        self._exchange.prefetch(batches, now=now)

    def groups_of(self, weights: Container[int] | None = None) -> list[TableGroup]:
        """Return the groups of the embeddings whose weights have these ids. None means the weights of all
        optimizers.
        """
        return [group for group in self._groups if group.concerns(weights)]

    def barrier(self) -> None:
        """Wait for all trainers, after all pushes of this trainer have been applied."""
        self._exchange.flush()
        self._barriers += 1
        self._client.ask(to_all(1, Kind.BARRIER, self._barriers))

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the contribution of every trainer, in rank order. Raises NotSupportedError if a contribution
        exceeds one message.
        """
        if len(mine) > MAX_FRAME_BYTES:
            raise NotSupportedError(
                f"{len(mine):,} bytes cannot be gathered through a parameter server, because a message "
                f"holds at most {MAX_FRAME_BYTES:,} bytes. Gather them in parts."
            )
        (reply,) = self._client.ask(to_all(1, Kind.GATHER, self._gathering, text_part(mine)))
        self._gathering = reply.number
        return [part.data.numpy().tobytes() for part in reply.parts]

    def save(self, where: Where, mode: SaveMode) -> None:
        """Save all tables of all servers, with every push of this trainer. Trainers that save the same at the
        same moment make one save.
        """
        self._check_weights()
        with self.turn_to_save(where, mode, "tables") as mine:
            if mine and mode is SaveMode.AGED:
                self.shrink(AGEING)
            if mine:
                self._saver.save(absolute_path(where), mode, self._exchange.step)
        progress.meter.saved(self._exchange.step)
        self._report_if_uneven()

    @contextmanager
    def turn_to_save(self, where: Where, mode: SaveMode, kind: str) -> Iterator[bool]:
        """Wait for the turn to save, see `SaveCoordinator.turn`. Every push of this trainer has then been
        applied.
        """
        self._exchange.flush()
        with self._saver.turn(absolute_path(where), mode, self._exchange.step, kind) as mine:
            yield mine

    def publish(self, buffers: Mapping[str, Tensor]) -> int:
        """Publish a version with every push of this trainer and these buffers. Return its number."""
        self.flush()
        parts = [
            part
            for name, values in buffers.items()
            for part in (
                text_part(name),
                Part(0, Field.VALUES, values.detach().reshape(-1).to("cpu", torch.float32, copy=True)),
            )
        ]
        (reply,) = self._client.ask(to_all(1, Kind.REFRESH, self._exchange.step, *parts))
        return reply.number

    def shrink(self, policy: ShrinkPolicy) -> int:
        """Age all tables that age by one day. Return the number of removed rows."""
        self._exchange.flush()
        ageing = [table.sparse.table for table in self._tables if table.sparse.spec.ages]
        return self._saver.shrink(ageing, policy, self._exchange.step)

    def finish(self, not_served: Mapping[str, Tensor]) -> None:
        """Stop pushing, wait for the other trainers, then load all trained values into the model.
        `not_served`: parameters that no server holds, for the last published version.
        """
        for each in self._servings:
            each.check_given()
        self.flush()
        with progress.activity("done, waiting for the other trainers"):
            self._client.ask(to_all(self.layout.servers, Kind.FINISH))
            self._publish_last(not_served)
        self._report_if_uneven()
        self._take_values()
        self.leave()

    def _publish_last(self, not_served: Mapping[str, Tensor]) -> None:
        """Publish the final state of the job, on trainer 0. A failure does not make training fail."""
        if self._configs.publish and not self._identity.index:
            try:
                self.publish(not_served)
            except FleetError as error:
                glog(f"The last version was not published: {error}")

    def _report_if_uneven(self) -> None:
        """Log once, on trainer 0, which tables should be on more servers."""
        if self._identity.index or self._reported_uneven:
            return
        rows = [group.remote.requested for group in self._groups]
        if rows and (text := self.layout.uneven(np.concatenate(rows, axis=1))):
            self._reported_uneven = True
            glog(text)

    def interrupt(self) -> None:
        """Finish a trainer that will be restarted. Do not wait for the others, and do not send LEAVE. Once
        all trainers have left, the job has ended, and the servers remove its durable state.
        """
        self._exchange.flush()
        self._take_values()
        self._client.close()

    def _take_values(self) -> None:
        self.refresh()
        whose = self._configs.rows_at_end
        mine = whose == "all" or (whose == "first" and self._identity.index == 0)
        for served in self._by_module.values():
            if isinstance(served, ServedCollection):
                served.end()
        for serving, table in zip(self._servings, self._tables, strict=True):
            if mine or row_limit(table.sparse.module) is None:
                serving.end(table.pull_all())
            else:
                serving.end_without_rows()

    def leave(self) -> None:
        """Leave all servers. A server that has already exited does not matter."""
        try:
            self._client.ask(to_all(self.layout.servers, Kind.LEAVE), silence=_LEAVE_TIMEOUT_S)
        except ServerError:
            return
        finally:
            self._client.close()

    def _exchange_for(self, asynchronous: AsyncConfigs | None, local: LocalTraining | None) -> Exchange:
        servers = self.layout.servers
        if asynchronous is None:
            return SyncExchange(self._client, self._dense, self._groups, servers, self._turn)
        if not asynchronous.k_steps:
            return AsyncExchange(self._client, self._dense, self._groups, servers, asynchronous, self._turn)
        if local is None:
            raise AssertionError("geo training without a local step")
        cached = [CachedGroup(group) for group in self._groups]
        self._groups = [*cached]
        return GeoExchange(
            self._client,
            self._dense,
            cached,
            servers,
            k_steps=asynchronous.k_steps,
            trainers=self._identity.worker_num,
            local_step=local.step,
        )

    def _hello(self, server: int) -> Request:
        identity, place = self._identity, (self.layout.servers, server, self._settings)
        job = describe_job(self._sync, identity.worker_num, *place, start=start_of(identity.trainers))
        specs = [bytes_part(Field.SPEC, spec.encode(), table) for table, spec in self.layout.specs_on(server)]
        return Request(
            server=server,
            kind=Kind.HELLO,
            number=self._identity.restart_count,
            parts=(text_part(job), *specs),
        )


def _counts_pulls(table: RemoteTable) -> bool:
    """Return True if the servers count pulls of a table. Pulls of rows that the script may not need are then
    avoided.
    """
    return table.sparse.spec.rows.entry.kind is EntryKind.COUNT

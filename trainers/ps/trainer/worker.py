"""Worker: a trainer's side of the parameter servers. Knows the order of things - join, pull, push, finish;
leaves slices and keys to `dense` and `remote`, sockets to `client`, arithmetic to the servers.
"""

from __future__ import annotations

import itertools

from trainers.errors import ServerError
from trainers.ps.net.client import Client, Request
from trainers.ps.net.wire import Code, Field, Kind, Part, bytes_part
from trainers.ps.tables.spec import job_words
from trainers.ps.trainer.dense import DenseParameters
from trainers.ps.trainer.embedding import Serving
from trainers.ps.trainer.layout import Layout
from trainers.ps.trainer.remote import RemoteTable
from trainers.role import Identity
from trainers.strategy import PsConfigs

_GOODBYE_S = 5.0


class Worker:
    """One trainer's connection to its model on the servers."""

    def __init__(self, identity: Identity, layout: Layout, configs: PsConfigs, *, sync: bool) -> None:
        self._identity = identity
        self._layout = layout
        self._configs = configs
        self._sync = sync
        self._step = 0
        self._barriers = 0
        self._client = Client(identity.servers, identity.index, configs)
        self._dense = DenseParameters(layout.dense, layout.servers)
        self._tables = [
            RemoteTable(sparse, layout.servers, self._client, self._as_of) for sparse in layout.sparse
        ]
        self._servings: list[Serving] = []

    def start(self) -> None:
        """Join all servers; trainer 0 sends the initial values, unless the tables have values already."""
        hellos = self._client.ask(
            [self._hello(server) for server in range(self._layout.servers)],
            silence=self._configs.join_timeout_s,
        )
        self._step = max(reply.number for reply in hellos)
        if self._identity.index == 0 and any(reply.code is Code.NOT_READY for reply in hellos):
            for requests in itertools.chain(
                self._dense.initial(), *(table.initial() for table in self._tables)
            ):
                self._client.ask(requests)
            self._client.ask(self._to_all(Kind.READY))
        self._client.ask(self._to_all(Kind.OPEN))
        self._dense.take(self._client.ask(self._dense.pulls(self._as_of(), trained_only=False)))
        self._servings = [
            Serving(sparse.name, sparse.module, table)
            for sparse, table in zip(self._layout.sparse, self._tables, strict=True)
        ]

    def step(self) -> None:
        """Push all gradients, one message for each server, and pull the dense values that come of them."""
        push: list[list[Part]] = [[] for _ in range(self._layout.servers)]
        self._dense.add_push(push)
        for table in self._tables:
            table.add_push(push)
        pushes = [
            Request(server=server, kind=Kind.PUSH, number=self._step, parts=tuple(parts))
            for server, parts in enumerate(push)
        ]
        self._step += 1
        replies = self._client.ask([*pushes, *self._dense.pulls(self._as_of(), trained_only=True)])
        self._dense.take(replies[len(pushes) :])
        self.drop_rows()

    def refresh(self) -> None:
        """Pull the current dense values: other trainers may have changed them since."""
        self._dense.take(self._client.ask(self._dense.pulls(self._as_of(), trained_only=True)))

    def has_rows(self) -> bool:
        """Whether a backward pass has left gradients of rows that no step has pushed."""
        return any(table.has_gradients for table in self._tables)

    def drop_rows(self) -> None:
        """Forget gradients of rows: what `zero_grad` is for parameters."""
        for table in self._tables:
            table.drop_gradients()

    def barrier(self) -> None:
        self._barriers += 1
        self._client.ask([Request(server=0, kind=Kind.BARRIER, number=self._barriers)])

    def finish(self) -> None:
        """No more pushes from here: wait for the other trainers, then bring all trained values into the
        model.
        """
        self._client.ask(self._to_all(Kind.FINISH))
        self.refresh()
        for serving, table in zip(self._servings, self._tables, strict=True):
            serving.end(table.pull_all())
        self.leave()

    def leave(self) -> None:
        """Good-bye to all servers; one that is gone already does not matter any more."""
        try:
            self._client.ask(self._to_all(Kind.LEAVE), silence=_GOODBYE_S)
        except ServerError:
            return
        finally:
            self._client.close()

    def _as_of(self) -> int:
        return self._step if self._sync else 0

    def _hello(self, server: int) -> Request:
        words = job_words(self._sync, self._identity.worker_num, self._layout.servers, server)
        specs = [
            bytes_part(Field.SPEC, spec.encode(), table) for table, spec in self._layout.specs_on(server)
        ]
        return Request(
            server=server,
            kind=Kind.HELLO,
            number=self._identity.restart_count,
            parts=(bytes_part(Field.TEXT, words.encode()), *specs),
        )

    def _to_all(self, kind: Kind) -> list[Request]:
        return [Request(server=server, kind=kind) for server in range(self._layout.servers)]

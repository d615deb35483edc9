"""The steps at the store: which key, which bytes, under which condition. Knows no rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fleetrun.elastic.rounds import keys, records
from fleetrun.elastic.rounds.acts import (
    Act,
    Check,
    Claim,
    Count,
    Drop,
    Form,
    Learn,
    Move,
    Refuse,
    Register,
    Tell,
    Unregister,
)  # fmt: skip
from fleetrun.elastic.rounds.errands import Errands
from fleetrun.elastic.rounds.part import Part
from fleetrun.elastic.rounds.records import BadRecordError, State
from fleetrun.elastic.rounds.view import View
from fleetrun.elastic.stores.store import ABSENT, Entry, Store
from fleetrun.pod.loop import Loop


class Desk:
    """`look` is called when something was answered."""

    def __init__(self, store: Store, loop: Loop, view: View, part: Part, look: Callable[[], None]) -> None:
        self.errands = Errands()
        self._store = store
        self._loop = loop
        self._view = view
        self._part = part
        self._look = look
        self._steps: dict[type[Act], Callable[[Any], None]] = {
            Register: self._register, Unregister: self._unregister, Claim: self._claim, Learn: self._learn,
            Tell: self._tell, Move: self._move, Form: self._form, Refuse: self._refuse, Drop: self._drop,
            Check: self._check, Count: self._count,
        }  # fmt: skip

    def take(self, act: Act) -> None:
        """Unless the same is under way."""
        self._steps[type(act)](act)

    def _register(self, act: Register) -> None:
        me = self._part.node
        self._put(keys.node(me.id), records.pack(me), leased=True, then=self._renewed("node"))

    def _unregister(self, act: Unregister) -> None:
        key = keys.node(self._part.node.id)
        if self._begin(key):
            self._store.delete(key, then=lambda done: self._answered(key, done))

    def _claim(self, act: Claim) -> None:
        me = self._part.node.id.encode()
        self._put(keys.LEADER, me, expect=act.expect, leased=True, then=self._renewed("leader"))

    def _renewed(self, name: str) -> Callable[[bool], None]:
        return lambda done: self._part.renew.discard(name) if done else None

    def _learn(self, act: Learn) -> None:
        key = keys.topology(act.name)

        def read(entry: Entry | None) -> None:
            self.errands.answered(key, True, self._loop.clock())
            try:
                members = records.topology(entry.value) if entry is not None else ()
            except BadRecordError:
                members = ()
            self._view.learned(act.name, members)
            self._look()

        if self._begin(key):
            self._store.read(key, read)

    def _tell(self, act: Tell) -> None:
        """Who writes a report does not watch it: what was told is remembered until the store was away."""
        report = act.report
        self._part.told = act.generation, report.done, len(report.causes)
        self._store.put(keys.report(act.generation, self._part.node.id), records.pack(report))

    def _move(self, act: Move) -> None:
        """Of an earlier generation than the last nobody wants to know anything any more."""

        def moved(done: bool) -> None:
            if done and act.round.state is State.OPEN:
                self._store.delete_prefix(keys.reports(act.round.generation - 2))
                self._store.delete_prefix(keys.topology(f"{act.round.generation - 2}/"))

        self._put(keys.ROUND, records.pack(act.round), expect=act.expect, then=moved)

    def _form(self, act: Form) -> None:
        if not self._begin(keys.ROUND):
            return
        name, members = act.round.topology, act.members

        def written(done: bool) -> None:
            if not done:
                self._answered(keys.ROUND, False)
                return
            self._view.learned(name, members)
            self._store.put(
                keys.ROUND,
                records.pack(act.round),
                expect=act.expect,
                then=lambda done: self._answered(keys.ROUND, done),
            )

        self._store.put(keys.topology(name), records.pack_topology(members), then=written)

    def _refuse(self, act: Refuse) -> None:
        self._put(keys.verdict(act.id), records.pack(act.verdict))

    def _drop(self, act: Drop) -> None:
        key = keys.node(act.id)
        if self._begin(key):
            self._store.delete(key, expect=act.revision, then=lambda done: self._answered(key, done))

    def _check(self, act: Check) -> None:
        key = keys.node(act.id)

        def read(entry: Entry | None) -> None:
            if entry is None:
                self._view.left(act.id, self._loop.clock())
            self._answered(key, True)

        if self._begin(key):
            self._store.read(key, read)

    def _count(self, act: Count) -> None:
        self._put(keys.CENSUS, records.pack(act.census))

    # ---- asking

    def _begin(self, key: str) -> bool:
        entry = self._store.mirror.get(key)
        return self.errands.begin(key, entry.revision if entry else ABSENT)

    def _answered(self, key: str, done: bool) -> None:
        self.errands.answered(key, done, self._loop.clock())
        self._look()

    def _put(
        self,
        key: str,
        value: bytes,
        *,
        expect: int | None = None,
        leased: bool = False,
        then: Callable[[bool], None] = lambda done: None,
    ) -> None:
        def answered(done: bool) -> None:
            then(done)
            self._answered(key, done)

        if self._begin(key):
            self._store.put(key, value, expect=expect, leased=leased, then=answered)

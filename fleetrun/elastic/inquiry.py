"""Send questions from one node to the other nodes of its job, through the rendezvous store.

    state/asks/QUESTION     a node's question        all nodes watch `state/` anyway
    answers/QUESTION/ID     another node's answer    only the asking node watches this directory

QUESTION is the id of the asking node and a number. The store holds these keys only during a question. The
asking node deletes them when all nodes have answered or the time has passed. All keys are leased, so the keys
of a lost node disappear too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import NamedTuple

from fleetrun.elastic.membership import Membership
from fleetrun.elastic.rendezvous import records
from fleetrun.elastic.rendezvous.records import WRONG
from fleetrun.elastic.store import Entries, Entry, Store
from fleetrun.frozen import frozen
from fleetrun.pod.events import Detail
from fleetrun.pod.loop import Loop, Timer

WITHIN = 2.0
"""Seconds that the asking node waits for answers."""

RANKS_WITHIN = 4.0
"""Seconds that the asking node waits for the positions of ranks. A node may need 3 seconds to find them."""

LARGEST, SMALLEST = 32 << 10, 2 << 10
"""Limits of the size of one answer, in bytes."""

ALL_OF_THEM = 16 << 20
"""Limit of all answers to one question, in bytes. The more nodes, the shorter each answer."""

_LONGEST_NAME = 64
"""Most characters in the name of a valid question."""

Found = Mapping[int, bytes | None]
"""Answers by rank of the asked nodes, with None for a missing answer."""


class Answer(NamedTuple):
    """An answer of one node. Times are in seconds since the epoch, by the clock of the asking node."""

    data: bytes
    asked: float  # when the question was sent
    heard: float  # when the answer arrived


Answers = Mapping[int, Answer | None]
"""Answers by rank with their times, with None for a missing answer."""


@frozen
class StatusQuery:
    """A question about the status of nodes, or about the positions of their ranks."""

    only: str = ""  # the id of the only node that is asked; empty: all nodes
    brief: bool = False  # request a short answer
    ranks: Detail | None = None  # request the positions of ranks, in this detail
    most: int = LARGEST  # most bytes of an answer


@dataclass(slots=True)
class _PendingQuestion:
    name: str
    query: StatusQuery
    asked: frozenset[str]
    limit: Timer
    then: list[Callable[[Answers], None]]
    since: float
    found: dict[str, Answer] = field(default_factory=dict)


class Inquiry:
    """The questions and answers of one node.

    `tell(brief, most)` returns this node's answer, of at most `most` bytes. `tell_ranks(most, detail, then)`
    passes the answer about this node's ranks to `then` a moment later.

    Set `membership` first, and let it call `look`: `membership.when_looked = inquiry.look`.
    """

    def __init__(
        self,
        loop: Loop,
        me: str,
        tell: Callable[[bool, int], bytes],
        tell_ranks: Callable[[int, Detail, Callable[[bytes], None]], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.within = WITHIN
        self._loop = loop
        self._me = me
        self._tell = tell
        self._tell_ranks = tell_ranks
        self._wall = wall
        self.membership: Membership | None = None
        """The membership of this node, or None before the node has one."""
        self._questions: dict[str, _PendingQuestion] = {}
        self._number = 0
        self._answered_questions: dict[str, tuple[int, float]] = {}
        """Questions of other nodes in the store, with their revision and the time of this node's answer."""

    @property
    def _store(self) -> Store:
        assert self.membership is not None, "questions need a membership"
        return self.membership.store

    @property
    def _members(self) -> list[str]:
        """Ids of the members in rank order. Empty while this node is outside the job."""
        membership = self.membership
        return [] if membership is None or membership.closed else [each.id for each in membership.members]

    # ---- asking

    def ask(self, rank: int | None, brief: bool, then: Callable[[Found], None]) -> None:
        """Ask all other nodes, or the one with this rank. `then` gets the answers within WITHIN seconds.

        While the store is unreachable, `then` gets empty answers immediately, because requests to a store
        wait until it is back.
        """

        def found(answers: Answers) -> None:
            then({rank: answer and answer.data for rank, answer in answers.items()})

        self._ask(rank, brief, found)

    def ask_ranks(self, detail: Detail, then: Callable[[Answers], None]) -> None:
        """Ask all other nodes for the positions of their ranks. `then` gets the answers within RANKS_WITHIN
        seconds.
        """
        self._ask(None, False, then, detail)

    def _ask(
        self,
        rank: int | None,
        brief: bool,
        then: Callable[[Answers], None],
        ranks: Detail | None = None,
    ) -> None:
        members = self._members
        chosen = members if rank is None else members[rank : rank + 1]
        asked = frozenset(chosen) - {self._me}
        if not asked or self.membership is None or not self.membership.connected:
            then({each: None for each, id_ in enumerate(members) if id_ in asked})
            return
        only = "" if rank is None else chosen[0]
        most = min(LARGEST, max(SMALLEST, ALL_OF_THEM // len(asked)))
        query = StatusQuery(only, brief, ranks, most)
        for pending in self._questions.values():
            if (pending.query, pending.asked) == (query, asked):
                pending.then.append(then)
                return
        self._begin(query, asked, then)

    def _begin(
        self,
        query: StatusQuery,
        asked: frozenset[str],
        then: Callable[[Answers], None],
    ) -> None:
        self._number += 1
        name = f"{self._me}.{self._number}"
        limit = self._loop.after(RANKS_WITHIN if query.ranks else WITHIN, partial(self._over, name))
        self._questions[name] = _PendingQuestion(name, query, asked, limit, [then], self._wall())
        self._store.watch(records.answers_prefix(name))
        packed = json.dumps(asdict(query), separators=(",", ":")).encode()
        self._store.put(records.ask_key(name), packed, leased=True)

    def _over(self, name: str) -> None:
        question = self._questions.pop(name)
        question.limit.cancel()
        if self.membership is not None and not self.membership.closed:
            self._store.delete(records.ask_key(name))
            # before the deletions, so that the store does not send them here
            self._store.unwatch(records.answers_prefix(name))
            self._store.delete_prefix(records.answers_prefix(name))
        ranks = {id_: rank for rank, id_ in enumerate(self._members)}
        found = {ranks[id_]: question.found.get(id_) for id_ in question.asked if id_ in ranks}
        for then in question.then:
            then(found)

    # ---- entries of the store

    def look(self, others: Entries) -> None:
        """Handle the entries that `membership` sees: answer new questions, and collect answers."""
        if not others and not self._answered_questions:
            return
        for name in [name for name in self._answered_questions if records.ask_key(name) not in others]:
            self._forget(name)
        for key, entry in others.items():
            if key.startswith(records.ASKS_PREFIX):
                self._answer(key.removeprefix(records.ASKS_PREFIX), entry)
            elif self._questions and key.startswith(records.ANSWERS_PREFIX):
                self._note(key.removeprefix(records.ANSWERS_PREFIX), entry)
        for question in list(self._questions.values()):
            if question.found.keys() >= question.asked:
                self._over(question.name)

    def _note(self, answer: str, entry: Entry) -> None:
        name, _, id_ = answer.partition("/")
        question = self._questions.get(name)
        if question is not None and id_ in question.asked and len(entry.value) <= question.query.most:
            question.found[id_] = Answer(entry.value, question.since, self._wall())

    def _answer(self, name: str, entry: Entry) -> None:
        before = self._answered_questions.get(name)
        if name in self._questions or (before is not None and before[0] == entry.revision):
            return
        if len(name) > _LONGEST_NAME:
            return  # the key of an answer would be too long
        self._answered_questions[name] = entry.revision, self._loop.clock()
        query = _unpack(entry.value)
        if query is None or query.only not in ("", self._me) or name.startswith(f"{self._me}."):
            return
        if query.ranks:
            self._tell_ranks(query.most, query.ranks, partial(self._put_answer, name))
        else:
            self._put_answer(name, self._tell(query.brief, query.most))

    def _put_answer(self, name: str, answer: bytes) -> None:
        """Write the answer, unless the question has ended."""
        if name in self._answered_questions and self.membership is not None and not self.membership.closed:
            self._store.put(records.answers_prefix(name) + self._me, answer, leased=True)

    def _forget(self, name: str) -> None:
        """Forget a question that left the store.

        Usually the asking node deletes the answers. If the question stayed longer than a node waits, the
        asking node is lost, and this node deletes its own answer.
        """
        _, since = self._answered_questions.pop(name)
        if self._loop.clock() - since > 2 * RANKS_WITHIN:
            self._store.delete(records.answers_prefix(name) + self._me)


def _unpack(data: bytes) -> StatusQuery | None:
    """Read a question. Return None if this version cannot read it."""
    try:
        fields = json.loads(data)
        most = max(0, min(LARGEST, int(fields["most"])))
        ranks = fields.get("ranks")
        return StatusQuery(
            str(fields["only"]), fields.get("brief") is True, Detail(ranks) if ranks else None, most
        )
    except WRONG:
        return None

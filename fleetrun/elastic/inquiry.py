"""Questions of one node to the others of its job, through the rendezvous store. Between questions it has no
keys of them.

    state/asks/QUESTION     what one node asks       all nodes watch `state/` anyway
    answers/QUESTION/ID     another node's answer    only the asking node watches this folder

QUESTION is the id of the asking node and a number. All keys are leased, so a node that disappears leaves
none; the asking node deletes them when all have answered or the time is over.
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
"""The same for where ranks are: to find that out may take a node 3 seconds."""

LARGEST, SMALLEST = 32 << 10, 2 << 10
"""Limits of the size of one answer, in bytes."""

ALL_OF_THEM = 16 << 20
"""Limit of all answers to one question, in bytes: the more nodes, the shorter each answer."""

_LONGEST_NAME = 64
"""Characters of a valid question's name."""

Found = Mapping[int, bytes | None]
"""Answers by rank of the nodes that were asked; None where there was none."""


class Answer(NamedTuple):
    """Of one node, which was asked at `asked`; it arrived at `heard`: seconds since the epoch by the clock of
    this node.
    """

    data: bytes
    asked: float
    heard: float


Answers = Mapping[int, Answer | None]
"""The same with the times."""


@frozen
class StatusQuery:
    """A request for status, or with `ranks` for where the ranks of a node are, in this detail. `only`: the id
    of the one node that is asked, empty for all. `brief`: a short answer. `most`: bytes that an answer may
    have.
    """

    only: str = ""
    brief: bool = False
    ranks: Detail | None = None
    most: int = LARGEST


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
    """One node's questions and answers. `tell(brief, most)` makes its answer of at most `most` bytes;
    `tell_ranks(most, detail, then)` the answer about its ranks, a moment later.

    Needs `membership`, and to be called with what that sees: `membership.when_looked.append(inquiry.look)`.
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
        """Of this node; None until there is one."""
        self._questions: dict[str, _PendingQuestion] = {}
        self._number = 0
        self._answered_questions: dict[str, tuple[int, float]] = {}
        """Questions of other nodes that are in the store: their revision, and when they were answered."""

    @property
    def _store(self) -> Store:
        assert self.membership is not None, "questions need a membership"
        return self.membership.store

    @property
    def _members(self) -> list[str]:
        """Ids of the members in rank order; empty when this node does not take part."""
        membership = self.membership
        return [] if membership is None or membership.closed else [each.id for each in membership.members]

    # ---- asking

    def ask(self, rank: int | None, brief: bool, then: Callable[[Found], None]) -> None:
        """`then` gets the answers of the other nodes (or of the one with this rank) within WITHIN seconds.
        While the store is unreachable it gets none, at once: requests to a store wait until it is back.
        """

        def found(answers: Answers) -> None:
            then({rank: answer and answer.data for rank, answer in answers.items()})

        self._ask(rank, brief, found)

    def ask_ranks(self, detail: Detail, then: Callable[[Answers], None]) -> None:
        """The same for where the ranks of all other nodes are, within RANKS_WITHIN seconds."""
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
            self._store.unwatch(records.answers_prefix(name))  # first: the deletions need not be sent here
            self._store.delete_prefix(records.answers_prefix(name))
        ranks = {id_: rank for rank, id_ in enumerate(self._members)}
        found = {ranks[id_]: question.found.get(id_) for id_ in question.asked if id_ in ranks}
        for then in question.then:
            then(found)

    # ---- entries of the store

    def look(self, others: Entries) -> None:
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
        """Unless the question is over."""
        if name in self._answered_questions and self.membership is not None and not self.membership.closed:
            self._store.put(records.answers_prefix(name) + self._me, answer, leased=True)

    def _forget(self, name: str) -> None:
        """The asking node deletes the answers, unless it is gone: the question was there for longer than a
        node waits.
        """
        _, since = self._answered_questions.pop(name)
        if self._loop.clock() - since > 2 * RANKS_WITHIN:
            self._store.delete(records.answers_prefix(name) + self._me)


def _unpack(data: bytes) -> StatusQuery | None:
    """None for a question that this version cannot read."""
    try:
        fields = json.loads(data)
        most = max(0, min(LARGEST, int(fields["most"])))
        ranks = fields.get("ranks")
        return StatusQuery(
            str(fields["only"]), fields.get("brief") is True, Detail(ranks) if ranks else None, most
        )
    except WRONG:
        return None

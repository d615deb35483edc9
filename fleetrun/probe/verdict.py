"""Find the rank that the others wait for, and the reason, from the states of all ranks. All functions are
pure.

A rank in a collective waits for the members of its group that have not entered it. The culprits are ranks
that others wait for and that do not wait themselves. Unknown facts are never guessed. Without evidence, there
is no diagnosis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from fleetrun.aliases import Integers
from fleetrun.envs.settings.parsing import ranks_in_words
from fleetrun.pod.events import Verdict
from fleetrun.probe.states import Call, RankState

LATE = 1.0
"""Seconds after the others from which a rank that enters a collective is late."""

STUCK = 5.0
"""Seconds after which a collective that all ranks have entered should have ended, even on a slow GPU."""

SLOW = 1.0
"""Seconds from which a wait is worth reporting. Ranks that make progress wait for each other all the time."""

_MOST_SENTENCES = 3

_MISREAD = re.compile(r"(\d+) vs (\d+)\. Received data size")


def decide(states: Sequence[RankState]) -> Verdict | None:
    """Return the diagnosis for a job that makes no progress.

    Return None if no rank waits long, or if the awaited rank is unknown.
    """
    job = _Job(states)
    if job.progresses():
        return None
    mismatch = job.mismatch() or job.misread()
    named = mismatch or job.waited_for() or job.crossed() or job.server() or job.stuck() or job.late()
    return named or job.left_over()


def waiting(states: Sequence[RankState]) -> frozenset[int]:
    """Return the ranks that wait for other ranks, for a server, or for an unknown event."""
    job = _Job(states)
    return frozenset({*job.waits, *job.blocked_by, *(each for each in job.states if not job.free(each))})


class _Job:
    def __init__(self, states: Sequence[RankState]) -> None:
        trainers = [each for each in states if each.role == "trainer"]
        self.one_world = all(each.world_rank in (None, each.rank) for each in trainers)
        if not self.one_world:
            # The ranks do not form one torch job, or are numbered differently. Their calls cannot be matched.
            trainers = [replace(each, groups={}, calls=(), peer=None) for each in trainers]
        self.states = {each.rank: _by_our_clock(each) for each in trainers}
        self.servers = {each.rank: each for each in states if each.role == "ps"}
        again = {name for each in trainers for name, group in each.groups.items() if group.again}
        self.members = {
            name: group.ranks for each in trainers for name, group in each.groups.items() if name not in again
        }
        if not self.members:  # all ranks have ended, so the members are the ranks that waited in the group
            named = {call.group for each in trainers for call in each.calls} - again
            self.members = {
                name: tuple(each.rank for each in trainers if each.entered(name)) for name in named
            }
        self.waits = {
            rank: call
            for rank, each in self.states.items()
            if (call := each.waits_in) is not None and call.group in self.members
        }
        self.blocked_by = {
            each.rank: blockers for each in self.states.values() if (blockers := self._blockers(each))
        }
        aside = [rank for rank, call in self.waits.items() if call.aside]
        for rank in [rank for rank in aside if self._waits_for_itself(rank)]:
            del self.waits[rank], self.blocked_by[rank]  # the others wait for its main thread

    def _blockers(self, state: RankState) -> Integers:
        """Return the ranks for which this rank waits."""
        call = self.waits.get(state.rank)
        if call is not None:
            return tuple(rank for rank in self._others(call, state.rank) if self._behind(rank, call))
        if state.peer is not None and (state.alive or state.symptom):
            return () if state.peer.rank is None or self._meets(state) else (state.peer.rank,)
        if state.served is not None and state.alive:
            return state.served.ranks
        if state.joining and self.one_world:
            return tuple(each.rank for each in self.states.values() if not each.groups and not each.joining)
        return ()

    def _others(self, call: Call, rank: int) -> Integers:
        return tuple(each for each in self.members.get(call.group, ()) if each != rank)

    def _behind(self, rank: int, call: Call) -> bool:
        """Return True if the rank has not entered this collective, or cannot continue in it.

        A rank that has not reported any calls counts as not entered.
        """
        state = self.states.get(rank)
        return state is not None and (
            state.entered(call.group) < call.number or bool(state.note) or state.held_up(call)
        )

    def _meets(self, state: RankState) -> bool:
        """Return True if the other end has reached its call, too."""
        other = self.states.get(state.peer.rank) if state.peer and state.peer.rank is not None else None
        found = other.peer if other is not None and other.alive else None
        return found is not None and state.peer is not None and (
            found.rank == state.rank and found.operation != state.peer.operation
        )  # fmt: skip

    def _waits_for_itself(self, rank: int) -> bool:
        reached: set[int] = set()
        ahead = [*self.blocked_by.get(rank, ())]
        while ahead:
            each = ahead.pop()
            if each not in reached:
                reached.add(each)
                ahead += self.blocked_by.get(each, ())
        return rank in reached

    def progresses(self) -> bool:
        """Return True if the job may be making progress.

        All ranks must live or have succeeded. A process that is stopped, joining or waiting for a server
        rules out progress, and so does a long wait for other ranks.
        """
        for each in [*self.states.values(), *self.servers.values()]:
            if not each.alive:
                if not each.ok:
                    return False
            elif each.note or each.joining:
                return False
            if each.served is not None and each.served.seconds >= SLOW:
                return False
        waiting = {rank for rank, each in self.states.items() if each.peer is not None or each.waits_unknown}
        return not any(self._long(rank) for rank in {*self.waits, *waiting})

    def _long(self, rank: int) -> bool:
        """Return True if the rank has waited long enough to accuse a living rank, or has given up.

        The start of a wait in send or recv is unknown. It is not before the last collective of the rank.
        """
        state, call = self.states[rank], self.waits.get(rank)
        if call is None and state.calls and state.served is None:
            call = max(state.calls, key=lambda each: each.entered)
        return not state.alive or call is None or state.now - call.entered >= SLOW

    def _waits_unknown(self, state: RankState) -> bool:
        """Return True if the rank waits for an unknown rank, or has given up such a wait.

        This includes a rank that torch ended in another wait than its last collective, if no rank is to
        blame.
        """
        ended = not state.alive and state.symptom and state.rank not in self.blocked_by
        return state.waits_unknown or ended

    # ---- different calls where all ranks must make the same call

    def mismatch(self) -> Verdict | None:
        """Return a diagnosis for the first collective of a group in which ranks made different calls."""
        made: dict[tuple[str, int], dict[int, Call]] = {}
        for state in self.states.values():
            for call in state.calls:
                if call.group in self.members:
                    made.setdefault((call.group, call.number), {})[state.rank] = call
        for calls in (made[key] for key in sorted(made, key=lambda key: (key[1], key[0]))):
            for watched in (False, True):  # calls reported by a watchdog cannot be compared with other calls
                like = {rank: call for rank, call in calls.items() if call.watched is watched}
                if not all(each.agrees(other) for each, other in pairwise(like.values())):
                    return self._differ(like, len(calls) - len(like))
        return None

    def _differ(self, calls: Mapping[int, Call], unknown: int) -> Verdict:
        """Describe different calls. `unknown`: the number of ranks whose call may match any of them."""
        alike: list[list[int]] = []
        for rank, call in sorted(calls.items()):
            found = next((each for each in alike if call.agrees(calls[each[0]])), None)
            if found is not None:
                found.append(rank)
            else:
                alike.append([rank])
        alike.sort(key=lambda ranks: (len(ranks), ranks))
        ranks, others = alike[0], alike[-1]
        odd, common = calls[ranks[0]].signature, calls[others[0]].signature
        call = calls[ranks[0]]
        sentence = (
            f"{self._placed(ranks)} called {odd} as collective #{call.number}{self._group(call)}, "
            f"where {_trainers(others)} called {common}"
        )
        culprits = ranks if len(ranks) + unknown < len(others) else sorted([*ranks, *others])
        return self._verdict("mismatch", sentence, culprits, beside=(ranks[0], others[0]))

    def misread(self) -> Verdict | None:
        """Return a diagnosis for a rank that Gloo ended because it received more data than its call expects.

        Its probe no longer knows that call. The rank is the culprit if all other ranks, at least two, made
        the same call.
        """
        for state in self.states.values():
            found = None if state.alive else _MISREAD.search(state.last_words)
            if found is None:
                continue
            waiting = [rank for rank in self.waits if state.rank in self._others(self.waits[rank], rank)]
            calls = {self.waits[rank].signature for rank in waiting}
            others = f"; {_trainers(waiting)} called {min(calls)}" if len(calls) == 1 else ""
            sentence = (
                f"{state.title} received {found[1]} bytes in a collective where it expected {found[2]}: "
                f"not all ranks called it with the same size and type{others}"
            )
            known = len(calls) == 1 and len(waiting) == len(self.states) - 1
            pair = sorted([state.rank, *waiting]) if len(waiting) == 1 else [state.rank]
            beside = (state.rank, *waiting[:1])
            return self._verdict("mismatch", sentence, pair if known else [], beside=beside)
        return None

    # ---- a rank is missing

    def waited_for(self) -> Verdict | None:
        """Return a diagnosis for ranks that others wait for, and that do not wait themselves.

        Ranks that have ended or are stopped come first. Ranks that live may be on their way and come second.
        Ranks that do not answer come last.
        """
        absent = {
            rank
            for waiting, blockers in self.blocked_by.items()
            for rank in blockers
            if rank not in self.blocked_by and self.free(rank) and not self._held_up(rank, waiting)
            if self._long(waiting) or self._kind(self.states[rank]) != "not entered"
        }
        if not absent:
            return None
        evidence = min(self._evidence(rank) for rank in absent)
        culprits = sorted(rank for rank in absent if self._evidence(rank) == evidence)
        kind = self._kind(self.states[culprits[0]])
        sentences: list[str] = []
        what = ""
        left = list(culprits)
        while left:
            call = self._missed(left[0])
            waiting = self._waiting_in(call, left[0])
            alike = [rank for rank in left if any(rank in self.blocked_by[each] for each in waiting)]
            name = f"{call.title} of group {call.group}" if call is not None else self._other_wait(waiting)
            what = what or name
            sentence = self._not_there(kind, alike, waiting, call)
            sentences.append(sentence[0].upper() + sentence[1:] if sentences else sentence)
            left = [rank for rank in left if rank not in alike]
        return self._verdict(kind, ". ".join(sentences[:_MOST_SENTENCES]), culprits, what)

    def _held_up(self, rank: int, waiting: int) -> bool:
        """Return True if the rank is only blocked by an endless call that all ranks have entered."""
        state, call = self.states[rank], self.waits.get(waiting)
        return call is not None and not state.note and state.held_up(call)

    def _missed(self, rank: int) -> Call | None:
        """Return the call in which others wait for this rank. Return None if it is not a collective."""
        waiting = (each for each in sorted(self.blocked_by) if rank in self.blocked_by[each])
        return next((self.waits[each] for each in waiting if each in self.waits), None)

    def _waiting_in(self, call: Call | None, rank: int) -> list[int]:
        """Return the ranks that wait in this call.

        Without a call, return the ranks that wait for this rank elsewhere.
        """
        if call is None:
            return [each for each in sorted(self.blocked_by) if rank in self.blocked_by[each]]
        same = (call.group, call.number)
        found = ((each, self.waits.get(each)) for each in sorted(self.blocked_by))
        return [each for each, other in found if other and (other.group, other.number) == same]

    def free(self, rank: int) -> bool:
        """Return True if the rank does not wait. Also False for an unknown rank."""
        state = self.states.get(rank)
        return state is not None and not _waits_for_server(state) and not self._waits_unknown(state)

    @staticmethod
    def _kind(state: RankState) -> str:
        if not state.alive:
            return "left early" if state.ok else "dead"
        return "stopped" if state.note else "not entered"

    def _evidence(self, rank: int) -> int:
        """Rank a suspect: the lower, the stronger the evidence that others wait for it."""
        state = self.states[rank]
        if not state.alive:
            return 2 if state.ok else 0
        if state.note.startswith("stopped"):
            return 1
        return 3 if state.answered else 4

    def _not_there(self, kind: str, ranks: Sequence[int], waiting: Sequence[int], call: Call | None) -> str:
        first = self.states[ranks[0]]
        named, others = self._placed(ranks), _trainers(waiting)
        several = len(ranks) > 1
        what = self._name(call) if call is not None else self._other_wait(waiting)
        if kind in ("left early", "dead"):
            sentence = f"{named} {first.how} before {what}, in which {others} waited"
            if kind == "left early":
                sentence += ": it made fewer calls than the others (uneven data?)"
            return sentence
        have = "have" if several else "has"
        came = call is not None and first.entered(call.group) >= call.number
        done = "completed" if came else "come to"
        sentence = f"{named} {have} not {done} {what}, in which {others} {_waits(waiting)}"
        if first.note:
            sentence += f". It is {first.note}"
        if first.place:
            sentence += f". {'The first' if several else 'It'} is at {first.place}"
        last = first.calls[-1] if first.calls and not came else None
        known = []
        if last is not None and first.now > last.entered:
            known.append(f"its last collective was {last.title}, {first.now - last.entered:.1f} s ago")
        if first.step is not None:
            known.append(f"its last step, {first.step.number}, ended {first.step.ago:.1f} s ago")
        details = "; ".join(known)
        return f"{sentence}. {details[0].upper()}{details[1:]}" if details else sentence

    def _other_wait(self, waiting: Sequence[int]) -> str:
        for state in (self.states[rank] for rank in waiting):
            if state.peer is not None:
                number = f" #{state.peer.number}" if state.peer.number else ""
                return f"the other end of {state.peer.operation}{number}"
            if state.served is not None:
                return state.served.what
        return "init_process_group"

    # ---- all wait, in a circle

    def crossed(self) -> Verdict | None:
        """Return a diagnosis for ranks that wait for each other in different collectives."""
        rank = min(self.blocked_by, default=None)
        path: list[int] = []
        while rank is not None and rank not in path:
            path.append(rank)
            rank = next((each for each in self.blocked_by[rank] if each in self.blocked_by), None)
        if rank is None:
            return None
        circle = path[path.index(rank) :]
        waits = "; ".join(f"{self.states[each].title} waits in {self._wait(each)}" for each in circle[:4])
        return self._verdict("deadlock", f"{_trainers(sorted(circle))} wait for each other: {waits}", circle)

    def _wait(self, rank: int) -> str:
        call, state = self.waits.get(rank), self.states[rank]
        if call is not None:
            return self._name(call)
        if state.peer is not None:
            return f"{state.peer.operation} with rank {state.peer.rank}"
        return state.served.what if state.served is not None else "init_process_group"

    # ---- trainers wait for a parameter server

    def server(self) -> Verdict | None:
        """Return a diagnosis for the server that most trainers wait for, unless other ranks block it."""
        waits: dict[int, list[RankState]] = {}
        for state in self.states.values():
            if state.served is not None and _waits_for_server(state):
                waits.setdefault(state.served.server, []).append(state)
        if not waits:
            return None
        number, waiting = max(waits.items(), key=lambda item: (len(item[1]), -item[0]))
        longest = max((each.served for each in waiting if each.served), key=lambda each: each.seconds)
        others = [each.rank for each in waiting]
        sentence = (
            f"server {number} has not answered {longest.what} for {longest.seconds:.1f} s, in which "
            f"{_trainers(others)} {_waits(others)}"
        )
        server = self.servers.get(number)
        if longest.why:
            sentence += f": {longest.why}"
        if server is not None:
            sentence += self._about(server)
        call = "" if longest.why else f"{longest.what} at server {number}"  # saving may take long
        return self._verdict("server", sentence, [], call, server)

    @staticmethod
    def _about(server: RankState) -> str:
        if not server.alive:
            return f". It {server.how}"
        if server.note:
            return f". It is {server.note}"
        inner = next(iter(server.stack), None)
        return f". It is in {inner.function} ({inner.file.rpartition('/')[2]}:{inner.line})" if inner else ""

    # ---- all ranks have arrived, perhaps late

    def stuck(self) -> Verdict | None:
        """Return a diagnosis if all members of a group wait in the same collective."""
        for call in self.waits.values():
            ranks = [
                rank
                for rank, each in self.waits.items()
                if (each.group, each.number) == (call.group, call.number)
            ]
            alive = [rank for rank in ranks if self.states[rank].alive]
            last = max(self.waits[rank].entered for rank in ranks)
            if self.states[ranks[0]].now - last < STUCK:
                continue
            if len(alive) > 1 and set(alive) == set(self.members.get(call.group, ())):
                sentence = f"{_trainers(alive)} have all entered {self._name(call)}, which does not end"
                return self._verdict("transport", f"{sentence}: the connection between them is stuck", [])
        return None

    def late(self) -> Verdict | None:
        """Return a diagnosis for a rank that entered a collective after others had given up."""
        unsure = 2 * max((each.unsure for each in self.states.values()), default=0.0)
        for rank, call in self.waits.items():
            ended = self.states[rank]
            if ended.alive:
                continue
            found = ((each, self.states[each].call(call.group, call.number))
                     for each in self._others(call, rank) if each in self.states)  # fmt: skip
            came = sorted((other.entered, each) for each, other in found if other is not None)
            if not came or came[-1][0] < ended.now + unsure:
                continue
            moment, last = came[-1]
            seconds = moment - max(call.entered, *(each for each, _ in came[:-1]), 0.0)
            if seconds > LATE + unsure:
                sentence = (
                    f"{self._placed([last])} came to {self._name(call)} {seconds:.1f} s after the others, "
                    f"when {ended.title} had given up"
                )
                return self._verdict("late", sentence, [last])
        return None

    def left_over(self) -> Verdict | None:
        """Return a diagnosis for the only rank that does not wait, if all others wait for unknown ranks.

        The others may also have given up their waits.
        """
        unknown = [
            rank for rank, each in self.states.items() if self._waits_unknown(each) and self._long(rank)
        ]
        waiting = {*unknown, *self.blocked_by, *self.waits}
        left = [rank for rank in self.states if rank not in waiting]
        if not unknown or len(left) != 1 or not self.free(left[0]) or self.states[left[0]].joining:
            return None
        if not all(each.answered and (each.alive or each.gave_up) for each in self.states.values()):
            return None
        only, first = self.states[left[0]], self.states[min(unknown)]
        where = f", {only.title} at {only.place}" if only.place else ""
        sentence = (
            f"{self._placed(left)} waits for no other trainer, and {_trainers(waiting)} "
            f"{_waits([*waiting]) if first.alive else 'waited'}: {first.title} at {first.place}{where}"
        )
        return self._verdict("not entered", sentence, left)

    # ---- words

    def _name(self, call: Call) -> str:
        return f"{call.title}{self._group(call)}"

    def _group(self, call: Call) -> str:
        """Name the group of a call. Empty for the group of all ranks."""
        ranks = self.members.get(call.group, ())
        return "" if len(ranks) >= len(self.states) else f" of the group of ranks {ranks_in_words(ranks)}"

    def _placed(self, ranks: Sequence[int]) -> str:
        """Name the ranks, with their nodes if these differ from the asking node."""
        nodes = {self.states[rank].node for rank in ranks} - {""}
        return f"{_trainers(ranks)} ({'; '.join(sorted(nodes))})" if nodes else _trainers(ranks)

    def _verdict(
        self,
        kind: str,
        sentence: str,
        culprits: Sequence[int],
        call: str = "",
        server: RankState | None = None,
        beside: Sequence[int] = (),
    ) -> Verdict:
        """Build the diagnosis. `beside`: ranks of which any may be wrong."""
        first = self.states[culprits[0]] if culprits else server
        stack = first.stack_lines if first is not None else ()
        if beside:
            shown = (self.states[rank] for rank in beside)
            stack = tuple(row for each in shown for row in (f"{each.title}:", *each.stack_lines))
        return Verdict(kind=kind, sentence=sentence, ranks=tuple(culprits), stack=stack, call=call)


def _by_our_clock(state: RankState) -> RankState:
    """Convert the times of a state to the asking node's clock."""
    calls = tuple(replace(each, entered=each.entered - state.ahead) for each in state.calls)
    return replace(state, now=state.now - state.ahead, calls=calls) if state.ahead else state


def _waits_for_server(state: RankState) -> bool:
    served = state.served
    return state.alive and served is not None and not served.ranks and served.seconds >= SLOW


def _trainers(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"trainer{'s' if len(numbers) > 1 else ''} {ranks_in_words(numbers)}"


def _waits(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"

"""Defects planted in the product, each of which the simulation must find.

A mutant is a function that returns what to patch: (object, name, wrong value).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from tests.simulated_ps import job
from tests.simulated_ps.model import Violation
from tests.simulated_ps.world import patched
from trainers.ps import client
from trainers.ps.durable import durable, journal
from trainers.ps.kernels.eviction import (
    FLOORS,
    LEVEL,
    LEVELS,
    LEVELS_A_UNIT,
    LEVELS_BELOW,
    PARTS,
    TOTAL,
    pass_until,
)
from trainers.ps.kernels.rows import UNSAVED
from trainers.ps.server import members, publisher, saving, server, service, state, steps, versions
from trainers.ps.tables import budget, dense, disk, shared, sparse, storage
from trainers.ps.tables.spec import FullError
from trainers.ps.trainer import exchange, local, remote
from trainers.ps.wire import Code, Kind, encode

Patch = tuple[Any, str, Any]
MUTANTS: dict[str, Callable[[], list[Patch]]] = {}


def mutant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    MUTANTS[make.__name__] = make
    return make


def first_find(name: str, seeds: int) -> int | None:
    """Return the first seed that finds a mutant."""
    job.prepare()
    with patched(*MUTANTS[name]()):
        for seed in range(seeds):
            try:
                job.simulate(seed)
            except Violation:
                return seed
    return None


class Nothing:
    """Contains nothing, and forgets what is added."""

    def __init__(self, numbers: object = None, floor: int = 0) -> None:
        self.numbers: set[int] = set()
        self.floor = 0

    def __contains__(self, number: int) -> bool:
        return False

    def add(self, number: int) -> None:
        pass


@mutant
def a_repeated_push_is_applied_again() -> list[Patch]:
    def join(self: members.Members, route: bytes, message: Any, real: Any = members.Members.join) -> Any:
        member = real(self, route, message)
        member.applied = Nothing()
        return member

    return [(members.Members, "join", join)]


@mutant
def the_applied_pushes_are_not_in_the_snapshot() -> list[Patch]:
    return [(state, "_dump_numbers", lambda applied: [0, []])]


@mutant
def only_the_last_sequences_are_remembered() -> list[Patch]:
    return [(members.SequenceSet, "_WINDOW", 1)]


@mutant
def pushes_are_not_recorded() -> list[Patch]:
    def record(self: Any, request: Any, real: Any = state.StateSaver.record) -> None:
        if request.kind is not Kind.PUSH:
            real(self, request)

    return [(state.StateSaver, "record", record)]


@mutant
def a_restart_of_a_trainer_is_not_recorded() -> list[Patch]:
    def record(self: Any, request: Any, real: Any = state.StateSaver.record) -> None:
        if request.kind is not Kind.HELLO or not request.number:
            real(self, request)

    return [(state.StateSaver, "record", record)]


@mutant
def a_push_is_recorded_after_its_answer() -> list[Patch]:
    late: dict[int, Any] = {}

    def record(self: Any, request: Any, real: Any = state.StateSaver.record) -> None:
        if (former := late.pop(id(self), None)) is not None:
            real(self, former)
        if request.kind is Kind.PUSH:
            late[id(self)] = request
        else:
            real(self, request)

    return [(state.StateSaver, "record", record)]


@mutant
def a_full_disk_is_ignored() -> list[Patch]:
    def record(self: Any, request: Any, real: Any = state.StateSaver.record) -> None:
        with suppress(members.Refusal):
            real(self, request)

    return [(state.StateSaver, "record", record)]


@mutant
def always_does_not_sync() -> list[Patch]:
    def sync(self: Any, real: Any = journal.JournalSync.sync) -> None:
        self.check()

    return [(journal.JournalSync, "sync", sync)]


@mutant
def always_syncs_the_former_record() -> list[Patch]:
    def append(self: Any, frames: Any, real: Any = journal.Journal.append) -> int:
        policy = self._sync.policy
        if policy == "always" and self._descriptor >= 0:
            self._sync.sync()
        self._sync.policy = "everysec"
        try:
            return int(real(self, frames))
        finally:
            self._sync.policy = policy

    return [(journal.Journal, "append", append)]


@mutant
def a_failed_sync_is_forgotten() -> list[Patch]:
    return [(journal.JournalSync, "check", lambda self: None)]


@mutant
def half_a_record_stays_after_an_error() -> list[Patch]:
    def cut_off(self: Any, error: OSError) -> None:
        self._end = os.fstat(self._descriptor).st_size

    return [(journal.Journal, "_cut_off", cut_off)]


@mutant
def recovered_records_are_not_synced() -> list[Patch]:
    """The sixth defect that this simulation found."""

    def resume(self: Any, path: Any, salt: int, end: int, number: int) -> None:
        self._switch_to(path, salt, end, number)
        if os.fstat(self._descriptor).st_size != end:
            os.ftruncate(self._descriptor, end)
            os.fdatasync(self._descriptor)

    return [(journal.Journal, "resume", resume)]


@mutant
def a_torn_tail_ends_the_server() -> list[Patch]:
    def stop(self: Any, file: Any, error: Exception) -> None:
        raise journal.DamagedError(str(error))

    return [(journal._FileReader, "_stop", stop)]


@mutant
def the_log_starts_after_the_snapshot() -> list[Patch]:
    def recover(folder: Any, start: int, log: Any, real: Any = journal.recover_records) -> Any:
        for number, frames in enumerate(real(folder, start, log)):
            if not start or number:
                yield frames

    return [(journal, "recover_records", recover)]


@mutant
def the_oldest_snapshot_is_loaded() -> list[Patch]:
    def paths(folder: Any, real: Any = durable._snapshot_paths) -> Any:
        return real(folder)[::-1]

    return [(durable, "_snapshot_paths", paths)]


@mutant
def the_log_is_removed_before_the_snapshot_counts() -> list[Patch]:
    def start(
        folder: Any, number: int, *args: Any, then: Any, real: Any = durable.start_snapshot, **options: Any
    ) -> Any:
        then()
        return real(folder, number, *args, then=then, **options)

    return [(durable, "start_snapshot", start)]


@mutant
def pending_pushes_are_not_in_the_snapshot() -> list[Patch]:
    def dump(found: steps.SyncSteps, real: Any = state._dump_sync) -> Any:
        return real(found)[:1]

    return [(state, "_dump_sync", dump)]


@mutant
def the_former_values_are_not_in_the_snapshot() -> list[Patch]:
    def dump(found: steps.SyncSteps, real: Any = state._dump_sync) -> Any:
        before, *pending = real(found)
        return [before._replace(parts=()), *pending]

    return [(state, "_dump_sync", dump)]


@mutant
def a_repeated_step_reads_the_new_values() -> list[Patch]:
    def pull(self: Any, member: Any, number: int, parts: Any) -> Any:
        return self._store.pull(parts)

    return [(steps.SyncSteps, "pull", pull)]


@mutant
def a_restarted_trainer_pushes_again() -> list[Patch]:
    return [(steps.AsyncSteps, "counts", lambda self, member, number, new=None: True)]


@mutant
def a_restarted_trainer_starts_at_the_first_step() -> list[Patch]:
    def join(self: Any, route: bytes, message: Any, real: Any = members.Members.join) -> Any:
        member = real(self, route, message)
        if message.number:
            member.resumed = 0
        return member

    return [(members.Members, "join", join)]


@mutant
def a_step_does_not_wait_for_all_trainers() -> list[Patch]:
    def close(self: Any, active: Any, real: Any = steps.SyncSteps.close) -> None:
        real(self, [member for member in active if member.step > self.step])

    return [(steps.SyncSteps, "close", close)]


@mutant
def values_do_not_wait_for_their_step() -> list[Patch]:
    return [(steps.SyncSteps, "may_pull", lambda self, member, number, active: True)]


@mutant
def the_end_does_not_wait_for_the_others() -> list[Patch]:
    def finish(self: Any, member: Any, request: Any, real: Any = service.Service._finish) -> Any:
        return real(self, member, request) or request.reply(Kind.DONE)

    return [(service.Service, "_finish", finish)]


@mutant
def a_trainer_is_lost_when_a_server_has_restarted() -> list[Patch]:
    """The first defect that this simulation found."""
    return [(state, "route_of", lambda name, incarnation: b""), (service, "route_of", lambda name, i: b"")]


@mutant
def a_request_is_sent_only_once() -> list[Patch]:
    def again(self: Any, each: Any, now: float) -> None:
        each.retry_at = now + each.retry_after

    return [(client.Client, "_send_again", again)]


@mutant
def the_answer_of_any_server_counts() -> list[Patch]:
    def encoded(self: Any, request: Any, real: Any = client.Client._encoded) -> Any:
        self._sequence = request.number
        return real(self, request)

    return [(client.Client, "_encoded", encoded)]


@mutant
def two_trainers_may_save_at_once() -> list[Patch]:
    def take(self: Any, request: Any, sender: Any, state: Any) -> str:
        return ""

    return [(saving.SaveTurns, "take", take), (service.Service, "_refuse_if_not_its_turn", lambda *_: None)]


@mutant
def a_late_request_takes_the_turn_again() -> list[Patch]:
    """The second defect that this simulation found."""

    def end(self: Any, id: str, *, saved: bool, real: Any = saving.SaveTurns.end) -> None:
        real(self, id, saved=saved)
        self._answers.clear()

    return [(saving.SaveTurns, "end", end)]


@mutant
def a_save_does_not_wait_for_its_step() -> list[Patch]:
    def save(self: Any, member: Any, request: Any, real: Any = service.Service._save) -> Any:
        self._has_reached = lambda member, number: True
        try:
            return real(self, member, request)
        finally:
            del self._has_reached

    return [(service.Service, "_save", save)]


@mutant
def a_refusal_is_no_error() -> list[Patch]:
    def refused(self: Any, each: Any, reply: Any, real: Any = client.Client._refused) -> Any:
        error = real(self, each, reply)
        if reply.code is Code.FAILED:
            each.reply = reply
            return _Ignored()
        return error

    def receive(self: Any, socket: Any, real: Any = client.Client._receive) -> None:
        with suppress(_Ignored):
            real(self, socket)

    return [(client.Client, "_refused", refused), (client.Client, "_receive", receive)]


class _Ignored(Exception):
    pass


# ---- Defects that this simulation found


@mutant
def a_trainer_waits_for_pushes_that_a_snapshot_lacks() -> list[Patch]:
    """The third defect that this simulation found."""
    return [(steps.AsyncSteps, "lose_pushes", lambda self, ranks: None)]


@mutant
def a_late_request_that_was_answered_starts_a_turn() -> list[Patch]:
    """The fourth defect that this simulation found."""

    def remember(self: Any, id: str, answer: str, real: Any = saving.SaveTurns._remember) -> None:
        if not answer:
            real(self, id, answer)

    return [(saving.SaveTurns, "_remember", remember)]


@mutant
def a_version_that_failed_elsewhere_stays_open() -> list[Patch]:
    """The fifth defect that this simulation found."""
    return [(saving.SaveRunner, "end_left", lambda self, committed: None)]


# ---- Defects that were found by reading


@mutant
def the_first_eviction_removes_the_oldest_level_in_part() -> list[Patch]:
    def raise_floors(self: Any, levels: Any) -> None:
        clock, cells = self.uses
        oldest = int(clock[LEVEL]) - LEVELS_BELOW
        costs = self._by_level()
        evicted = np.arange(LEVELS)[:, None] + oldest < levels
        clock[TOTAL] -= costs[evicted].sum()
        costs[evicted] = 0
        cells.reshape(LEVELS, PARTS)[self._places()] = costs
        np.maximum(clock[FLOORS:], levels / LEVELS_A_UNIT, out=clock[FLOORS:])
        pass_until(self.uses, clock[FLOORS:].max())

    return [(budget.Budget, "_raise_floors", raise_floors)]


@mutant
def merged_steps_have_the_rate_of_the_push() -> list[Patch]:
    return [(exchange, "_scaled", lambda gradient, rate, largest: gradient)]


@mutant
def the_client_draws_the_numbers_of_the_script() -> list[Patch]:
    def init(self: Any, *args: Any, real: Any = client.Client.__init__, **options: Any) -> None:
        real(self, *args, **options)
        self._random = random

    return [(client.Client, "__init__", init)]


@mutant
def the_clock_of_a_budget_never_restarts() -> list[Patch]:
    return [(budget, "_turns", lambda now: 0.0), (job, "AGE", 2.0**21 - 0.5)]


@mutant
def a_snapshot_has_the_limits_of_messages() -> list[Patch]:
    return [(state, "encode", lambda message, stored: encode(message))]


@mutant
def a_rate_of_0_divides() -> list[Patch]:
    """The kernel leaves rows alone at a rate of 0. It divides by the least number instead."""
    return [(dense, "ftrl_lr", lambda lr: lr or 1e-45)]


@mutant
def a_cut_without_memory_loses_removed_keys() -> list[Patch]:
    def cut(self: Any, *, of: int = UNSAVED, real: Any = sparse.SparseTable.cut, **options: Any) -> Any:
        try:
            return real(self, of=of, **options)
        except FullError:
            self._removed[of].begin_cut()
            raise

    return [(sparse.SparseTable, "cut", cut)]


@mutant
def an_idle_server_removes_no_old_rows() -> list[Patch]:
    return [(service.Service, "idle", property(lambda self: not (self._pending or self._saving.requester)))]


@mutant
def a_time_to_live_follows_the_clock_of_the_node() -> list[Patch]:
    return [(server.TableClock, "read", lambda self, monotonic, wall: (wall, 0.0))]


@mutant
def a_version_counts_as_foreign_after_an_ambiguous_write() -> list[Patch]:
    def commit(self: Any, published: Any, save: Any, real: Any = publisher.Publisher._commit) -> Any:
        before = set(self._own)
        try:
            return real(self, published, save)
        except Exception:
            self._own = before
            raise

    return [(publisher.Publisher, "_commit", commit)]


# ---- Tables


def _without(kind: Kind) -> list[Patch]:
    def record(self: Any, request: Any, real: Any = state.StateSaver.record) -> None:
        if request.kind is not kind:
            real(self, request)

    return [(state.StateSaver, "record", record)]


@mutant
def expired_rows_are_not_in_the_log() -> list[Patch]:
    return _without(Kind.TIME)


@mutant
def a_shrink_is_not_in_the_log() -> list[Patch]:
    return _without(Kind.SHRINK)


@mutant
def counted_pulls_are_not_in_the_log() -> list[Patch]:
    return _without(Kind.PULL)


@mutant
def a_repeated_pull_counts_twice() -> list[Patch]:
    def join(self: members.Members, route: bytes, message: Any, real: Any = members.Members.join) -> Any:
        member = real(self, route, message)
        member.counted = Nothing()
        return member

    return [(members.Members, "join", join)]


@mutant
def the_clocks_of_budgets_are_not_in_the_snapshot() -> list[Patch]:
    return [(sparse.SparseTable, "restore_clocks", lambda self, rows, candidates: None)]


@mutant
def candidates_are_not_in_the_snapshot() -> list[Patch]:
    return [(sparse.SparseTable, "load_candidates", lambda self, found: None)]


@mutant
def removed_rows_are_not_in_incremental_saves() -> list[Patch]:
    return [(sparse.RemovedKeys, "add", lambda self, keys: None)]


@mutant
def a_failed_snapshot_counts_as_saved() -> list[Patch]:
    def close(self: Any, *, saved: bool = True, real: Any = storage.Cut.close) -> None:
        real(self, saved=True)

    return [(storage.Cut, "close", close)]


@mutant
def rows_stay_on_the_disk_when_they_are_used() -> list[Patch]:
    return [(disk.RowsOnDisk, "before_use", lambda self, keys: None)]


# ---- Restarts with another number of trainers


@mutant
def pending_pushes_of_former_trainers_count() -> list[Patch]:
    def restart_at(self: Any, step: int) -> None:
        self.step = step

    return [(steps.SyncSteps, "restart_at", restart_at)]


@mutant
def new_trainers_skip_a_part_of_a_step() -> list[Patch]:
    def apply(record: Any, found: Any, its: Any, real: Any = state.apply_new_trainers) -> None:
        real(record, found, its)
        if record.number != len(found) or its.step:
            its.restart_at(its.step + 1)
            found.replace([member.step + 1 for member in found], record.text)

    return [(state, "apply_new_trainers", apply)]


# ---- Versions


@mutant
def servers_cut_a_version_on_arrival() -> list[Patch]:
    def cut(self: Any, request: Any, real: Any = versions.Versions._cut) -> Any:
        self._sync, before = False, self._sync
        try:
            reply = real(self, request)
        finally:
            self._sync = before
        return reply and reply._replace(number=request.number)

    return [(versions.Versions, "_cut", cut)]


@mutant
def a_version_follows_a_list_that_was_lost() -> list[Patch]:
    return [(saving.SaveRunner, "_may_follow", lambda self, request, tables: True)]


@mutant
def a_follower_keeps_removed_rows() -> list[Patch]:
    return [(shared.SharedTable, "remove", lambda self, number, keys: None)]


@mutant
def a_version_is_committed_before_it_is_written() -> list[Patch]:
    def refresh(self: Any, request: Any) -> Any:
        return request.reply(Kind.DONE, number=self._publisher._published.number)

    def safe(self: Any, request: Any, real: Any = versions.Versions.refresh) -> Any:
        found = self._publisher and self._publisher._published
        return refresh(self, request) if found and found.number else real(self, request)

    return [(versions.Versions, "refresh", safe)]


# ---- Merged steps and geo


@mutant
def changes_are_sent_again_with_the_next_exchange() -> list[Patch]:
    def changes(self: Any) -> Any:
        spans, keys, before = self._touched.everything()
        return spans, keys, self._trained.pull(spans, keys, insert=False) - before

    return [(local.Cache, "changes", changes)]


@mutant
def an_exchange_has_the_number_of_its_first_step() -> list[Patch]:
    def requests(messages: Any, step: int, real: Any = remote.push_requests, **options: Any) -> Any:
        return real(messages, step - step % 2, **options)

    return [(local, "push_requests", requests), (exchange, "push_requests", requests)]

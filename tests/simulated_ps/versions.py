"""A process that follows the published versions of a simulated job, and what each version must contain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.simulated_ps.contents import values_of
from tests.simulated_ps.model import Model, Violation
from tests.simulated_ps.world import World
from trainers.inference_server.files import Cache, map_file
from trainers.inference_server.follow import Followed, Follower
from trainers.ps.tables.shared import SharedRows
from trainers.ps.tables.sparse import SparseTable
from trainers.storage.errors import LoadError

Values = dict[str, dict[int, bytes]]
"""The values of rows, by table and key."""


def values(tables: Iterable[object]) -> Values:
    """Return the values of all rows of sparse tables."""
    return {each.spec.name: values_of(each) for each in tables if isinstance(each, SparseTable)}


@dataclass
class Versions:
    """What servers had in their tables when they cut a version, and what the follower found in it."""

    model: Model
    world: World
    folder: Path
    cuts: dict[str, dict[int, tuple[int, Values]]] = field(default_factory=dict)
    """By the id of a version and by server, the step and the values."""
    ids: dict[int, str] = field(default_factory=dict)
    """The last id with the number of a version."""
    followed: int = 0
    """The last version that the follower has accepted."""
    count: int = 0
    """The number of versions that it has accepted."""

    def follow(self) -> None:
        """Accept versions for ever. The main function of the follower's process."""
        follower = Follower(str(self.folder / "published"), Cache(str(self.folder / "cache")))
        before: set[tuple[int, int]] = set()
        failed = ""
        while True:
            self.world.wait(None, 0.1 + 0.4 * self.world.random.random())
            try:
                found = follower.look(self.count)
            except LoadError as error:
                if str(error) != failed:
                    failed = str(error)
                    self.world.note(f"the follower: {error}")
                continue
            if found is not None:
                before = self._check(follower, found, before)

    def _check(
        self, follower: Follower, found: Followed, before: set[tuple[int, int]]
    ) -> set[tuple[int, int]]:
        """Check a version. Return the keys of own rows in it, by server."""
        applied = follower._applied
        assert applied is not None
        if applied.number <= self.followed:
            raise Violation(f"version {applied.number} follows version {self.followed}")
        self.followed, self.count = applied.number, found.number
        self.world.note(f"the follower has version {applied.number}, {applied.id}")
        cuts = self.cuts[applied.id.removesuffix("-base")]
        model, servers = self.model, self.model.plan.servers
        if len(cuts) < servers:
            raise Violation(f"version {applied.number} has cuts of {sorted(cuts)} only")
        if model.plan.sync and len({step for step, _ in cuts.values()}) > 1:
            steps = {server: step for server, (step, _) in cuts.items()}
            raise Violation(f"version {applied.number} has cuts of several steps: {steps}")
        pushes = model.all_pushes()
        owned = [(server, model.own_key(server, each)) for server in range(servers) for each in pushes]
        keys = [key for _, key in owned] + [key for server in range(servers) for key in model.shared(server)]
        for name, version in found.tables.items():
            rows = SharedRows(version, map_file)
            table = SparseTable(rows.spec)
            there, initial = rows.rows(torch.tensor(keys)), table.pull(torch.tensor(keys), insert=False)
            wanted = {key: each for _, tables in cuts.values() for key, each in tables.get(name, {}).items()}
            for key, row, first in zip(keys, there, initial, strict=True):
                if key in wanted:
                    right = row.view(torch.uint8).numpy().tobytes() == wanted[key]
                else:
                    right = torch.equal(row.float(), first)
                if not right:
                    raise Violation(f"version {applied.number} has {row} of key {key} in {name!r}")
        mine = {each for each in owned if each[1] in cuts[each[0]][1].get("e", {})}
        if model.plan.durability != "snapshot" and (gone := before - mine):
            raise Violation(f"version {applied.number} lacks rows of the version before: {sorted(gone)}")
        return mine

    def check_last(self, number: int) -> None:
        """Check that a version that was published at the end has all acknowledged pushes."""
        model = self.model
        cuts = self.cuts[self.ids[number]]
        wanted = model.acknowledged - model.lost
        if model.plan.sync:
            servers, steps = range(model.plan.servers), model.plan.steps
            wanted = {(server, push) for server in servers for push in model.complete(server, steps)}
        missing = [
            (server, push)
            for server, push in wanted
            if model.own_key(server, push) not in cuts[server][1].get("e", {})
        ]
        if missing:
            raise Violation(f"the last version, {number}, lacks {sorted(missing)}")

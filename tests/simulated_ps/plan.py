"""The job that a seed draws: its size, its features and its faults."""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field, replace
from typing import Any

from tests.simulated_ps.network import NetworkFaults
from trainers.ps.tables.rules import FTRL, SGD, Adagrad, Adam, AnyRule, RMSprop, RowWiseAdagrad, RowWiseAdam
from trainers.ps.tables.spec import (
    Bound,
    Entry,
    EntryKind,
    EvictionPolicy,
    Initializer,
    InitKind,
    RowOptions,
    RowType,
    ShrinkPolicy,
    TableKind,
    TableSpec,
)

FAULTS = ("drop", "double", "breaks", "slow", "servers", "trainers", "power", "disk", "late", "clock")
_RARE = {
    "sends": 0.5,  # trainers are also killed between two messages
    "pair": 0.1,  # servers are killed soon after a trainer
    "cuts": 0.15,  # servers are also killed while they remove what a snapshot makes unnecessary
    "away": 0.3,  # after a call that works and fails, the next calls fail too
    "memory": 0.05,  # there is no memory for a cut of a table
    "hasty": 0.5,  # the clocks of budgets pass fast
    "paced": 0.3,  # a step takes as long as the intervals of servers
}
"""Faults and features that need others, and how often they are on."""
_FEATURES = {
    "sync": 0.5,
    "log": 0.75,
    "snapshot": 0.4,  # of async jobs
    "staleness": 0.7,  # of async jobs
    "in_flight": 0.5,  # of async jobs
    "saves": 0.45,
    "resize": 0.12,
    "publish": 0.15,
    "geo": 0.15,  # of async jobs
    "merge": 0.15,  # of async jobs
    # Features of the second table:
    "rule": 0.25,
    "warm": 0.3,  # a learning rate of 0 at first
    "half": 0.12,
    "bound": 0.2,
    "spill": 0.4,  # of bounded tables
    "aged": 0.3,  # of bounded tables
    "ttl": 0.15,
    "entry": 0.15,
    "statistics": 0.12,
    "shrink": 0.6,  # of tables with statistics or counts
    "rest": 0.1,
}
_EXTRA = (
    "resize", "publish", "geo", "merge", "rule", "warm", "half", "bound", "ttl", "entry", "statistics",
)  # fmt: skip
"""Features that half of the jobs do not have: they take time, and hide what faults do to the others."""
_SECOND = ("rule", "half", "bound", "ttl", "entry", "statistics")
_RULES: tuple[AnyRule, ...] = (
    SGD(momentum=0.5), Adagrad(), Adam(), RMSprop(), RowWiseAdagrad(), RowWiseAdam(), FTRL(), FTRL(l1=0.5),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Family:
    """Small jobs with few faults, in which one kind of defect would show. `values` replaces draws."""

    on: frozenset[str]
    perhaps: frozenset[str] = frozenset()
    """Faults and features that half of the jobs have."""
    rules: tuple[AnyRule, ...] = _RULES
    values: dict[str, Any] = field(default_factory=dict)


def _family(on: str, perhaps: str = "", **values: Any) -> Family:
    return Family(on=frozenset(on.split()), perhaps=frozenset(perhaps.split()), values=values)


FAMILIES = {
    "a budget of old rows": _family("log bound hasty", "sync entry rule servers", steps=6),
    "a clock that is set": _family("log ttl clock paced", "sync rule slow", servers=1, clock_steps=3),
    "an idle server": _family("ttl rest", "sync clock breaks", servers=1, trainers=1, rests=0.5),
    "half a step": _family(
        "sync log servers trainers sends pair paced",
        "slow",
        servers=2,
        trainers=1,
        steps=6,
        snapshot_s=0.1,
        server_kills=1,
        trainer_kills=3,
        trouble_s=6.0,
    ),
    "a long rest": _family(
        "log rest servers",
        "staleness in_flight drop",
        trainers=2,
        steps=3,
        rests=0.4,
        straggler=True,
        server_kills=4,
        trouble_s=10.0,
    ),
    "many saves": _family(
        "saves double", "sync log slow in_flight", trainers=3, steps=6, saves=1.0, modes=1, in_flight=0
    ),
    "versions of killed servers": _family(
        "log publish servers paced",
        "sync bound hasty",
        steps=6,
        snapshot_s=0.1,
        publish_s=1.0,
        server_kills=4,
        trouble_s=6.0,
    ),
    "an ambiguous version": _family(
        "log publish late away paced",
        "sync",
        steps=6,
        late_errors=0.2,
        publish_s=0.2,
        late_at="published/.",
        trouble_s=6.0,
    ),
    "a failed sync": _family(
        "log power servers syncs paced",
        "sync",
        servers=1,
        steps=6,
        snapshot_s=300.0,
        server_kills=2,
        trouble_s=6.0,
    ),
    "killed snapshots": _family(
        "log servers cuts paced",
        "snapshot sync disk",
        servers=1,
        steps=6,
        snapshot_s=0.1,
        server_kills=3,
        cut_kills=3,
        trouble_s=6.0,
    ),
    "a full memory": _family(
        "log publish memory bound hasty paced",
        "sync",
        steps=6,
        publish_s=0.2,
        snapshot_s=300.0,
        memory_errors=0.3,
    ),
    "a warm start": Family(
        on=frozenset({"log", "rule", "warm"}), perhaps=frozenset({"sync"}), rules=(FTRL(), FTRL(l1=0.5))
    ),
    "wide steps": _family(
        "sync log wide", "servers slow", trainers=4, servers=1, steps=4, snapshot_s=0.1, server_kills=1
    ),
    "an old clock": _family("log bound aged", "sync rule servers", trainers=4, steps=6),
}
_ALWAYS = ("straggler", "late_at")
_EVERY = 5
_TURNS = (
    *FAMILIES, "a clock that is set", "half a step", "versions of killed servers", "a full memory",
)  # fmt: skip
"""Each fifth job is of a family, and families take turns. Some need more turns until their defect shows."""


@dataclass(kw_only=True)
class Plan:
    """What a seed draws. `on` has the names of faults and features."""

    seed: int
    family: str
    on: frozenset[str]
    servers: int
    trainers: int
    later_trainers: int
    """The number of trainers after a restart with another number."""
    steps: int
    sync: bool
    staleness: int | None
    durability: str
    fsync: str
    snapshot_s: float
    network: NetworkFaults
    server_kills: int
    trainer_kills: int
    power: bool
    """Most killed servers lose what was not synced."""
    bad_syncs: frozenset[int] = frozenset()
    """The numbers of the calls of fdatasync that fail. Soon, the server is killed."""
    cut_kills: int = 0
    """How often a server is killed while it removes what a snapshot makes unnecessary."""
    memory_errors: float = 0.0
    """How often there is no memory for a cut."""
    disk_errors: dict[int, float]
    late_errors: float
    late_at: str
    """The beginning of the paths of files whose calls work and fail. Names with a dot are new manifests."""
    clock_steps: int
    saves: float
    """How often a trainer saves the tables after a step."""
    modes: int = 3
    """The number of kinds of saves."""
    pace_s: float
    """The longest time of a step without faults and rests."""
    rests: float
    """How often a trainer computes for longer than a server waits for a trainer that is lost."""
    straggler: bool
    """True if only the last trainer rests."""
    in_flight: int
    """How many pushes a trainer may have in flight when it makes the next step."""
    merged: int
    """How many steps a trainer merges into a push, or makes by itself between two exchanges in geo."""
    queue: int
    """How many merged pushes may be in flight. With 1, each step waits for its own push."""
    publish_s: float
    second: TableSpec | None
    """The second table, which has features that the first table does not have."""
    policy: ShrinkPolicy
    trouble_s: float
    """No fault happens later."""

    @property
    def kept(self) -> bool:
        """True if servers keep their tables when they are killed."""
        return self.durability != "none"

    @classmethod
    def of(cls, seed: int, without: frozenset[str] = frozenset()) -> Plan:
        """Return the plan of a seed, without some of its faults and features."""
        rng = random.Random(seed)
        drawn = {each for each in FAULTS if rng.random() < 0.4}
        drawn |= {each for each, often in _FEATURES.items() if rng.random() < often}
        if rng.random() < 0.5:
            drawn -= set(_EXTRA)
        more = random.Random(f"more of {seed}")
        drawn |= {each for each, often in _RARE.items() if more.random() < often}
        name, family = "", Family(on=frozenset())
        if seed % _EVERY == 0 and "family" not in without:
            name = _TURNS[seed // _EVERY % len(_TURNS)]
            family = FAMILIES[name]
            drawn = {*family.on, *(each for each in sorted(family.perhaps) if more.random() < 0.5)}
        on = _possible(drawn - without)
        kept = "log" in on or "snapshot" in on
        sync = "sync" in on
        errors = {rng.choice([errno.ENOSPC, errno.EIO, errno.EMFILE]): rng.choice([0.005, 0.05])}
        merged, fsync = rng.choice([2, 3]), rng.choice(["no", "everysec", "always"])
        trainers, in_flight, clock_steps = rng.choice([1, 2, 2, 3, 4]), rng.choice([1, 4]), rng.randint(1, 3)
        staleness, saves, publish_s = rng.choice([0, 0, 1, 3]), rng.choice([0.2, 0.6]), rng.choice([0.2, 1.0])
        second = _second(rng, on, family.rules) if on & set(_SECOND) else None
        if second is None or not second.ages:
            on -= {"shrink"}
        if second is not None and second.seen:  # rows on a disk do not age
            on -= {"spill"}
        server_kills, trainer_kills = rng.randint(1, 4), rng.randint(1, 3)
        plan = cls(
            seed=seed,
            family=name,
            on=frozenset(on),
            servers=rng.choice([1, 2, 2, 3]),
            trainers=trainers,
            later_trainers=rng.choice([each for each in range(1, 5) if each != trainers]),
            steps=rng.randint(2, 6),
            sync=sync,
            staleness=staleness if "staleness" in on else None,
            durability="snapshot" if "snapshot" in on else "log" if "log" in on else "none",
            fsync="always" if "power" in on else fsync,
            snapshot_s=rng.choice([0.1, 0.3, 2.0, 300.0]),
            network=NetworkFaults(
                drop=rng.choice([0.01, 0.1]) * ("drop" in on),
                double=rng.choice([0.01, 0.2]) * ("double" in on),
                breaks=rng.choice([0.003, 0.02]) * ("breaks" in on),
                delay=rng.choice([0.0005, 0.01]),
                long_delay=0.05 if "slow" in on else 0.0,
            ),
            server_kills=server_kills if "servers" in on and kept else 0,
            trainer_kills=trainer_kills if "trainers" in on and (kept or not sync) else 0,
            power="power" in on,
            disk_errors=errors if "disk" in on and kept else {},
            late_errors=0.005 if "late" in on and kept else 0.0,
            late_at=more.choice(["", "", "published", "published/.", "saves", "saves/.", "server-"]),
            clock_steps=clock_steps if "clock" in on else 0,
            saves=saves if "saves" in on else 0.0,
            pace_s=1.0 if "paced" in on else 0.1,
            straggler=more.random() < 0.5,
            rests=0.2 if "rest" in on else 0.0,
            in_flight=in_flight if "in_flight" in on else 0,
            merged=merged if on & {"geo", "merge"} else 1,
            queue=in_flight,
            publish_s=publish_s,
            policy=ShrinkPolicy(
                show_click_decay_rate=0.5, delete_threshold=0.0, delete_after_unseen_days=rng.choice([0, 1])
            ),
            trouble_s=rng.choice([3.0, 10.0]),
            second=second,
            bad_syncs=frozenset({more.randrange(4, 24)}) if "syncs" in on else frozenset(),
            cut_kills=more.randint(1, 3) if "cuts" in on else 0,
            memory_errors=more.choice([0.05, 0.3]) if "memory" in on else 0.0,
        )
        return plan.of_family(family)

    def of_family(self, family: Family) -> Plan:
        """Return the plan with the values of a family, except for faults that are off."""
        drawn = (name for name in family.values if name in _ALWAYS or getattr(self, name))
        values = {name: family.values[name] for name in drawn}
        found = replace(self, **values)
        if found.later_trainers == found.trainers:
            found.later_trainers = found.trainers % 4 + 1
        return found


_HIDES = {
    "sync": {"snapshot", "staleness", "in_flight", "geo", "merge"},
    "snapshot": {"log"},
    "geo": {"merge", "staleness", "in_flight", *_SECOND},
    "merge": {"staleness", "in_flight", *_SECOND},
}
"""Features that a job with a feature cannot have."""
_NEEDS = (
    ({"resize", "power", "cuts", "pair"}, {"log", "snapshot"}),
    ({"cuts", "pair", "syncs"}, {"servers"}),
    ({"pair", "sends"}, {"trainers"}),
    ({"syncs"}, {"log"}),
    ({"away"}, {"late"}),
    ({"spill", "aged", "hasty"}, {"bound"}),
    ({"shrink"}, {"entry", "statistics"}),
)
"""Features, each of which needs one of the others."""
_OF_BOUNDS = {"spill": {"ttl"}, "aged": {"hasty"}}
"""Features that a job with a feature of bounded tables cannot have. Uses of old clocks are close together."""


def _possible(on: set[str]) -> set[str]:
    """Return the features that a job can have together."""
    for each, others in _HIDES.items():
        if each in on:
            on -= others
    for some, needed in _NEEDS:
        if not on & needed:
            on -= some
    for each, others in _OF_BOUNDS.items():
        if each in on:
            on -= others
    return on


def _second(rng: random.Random, on: set[str], rules: tuple[AnyRule, ...]) -> TableSpec:
    rule, dtype = rng.choice(rules), rng.choice([RowType.BFLOAT16, RowType.FLOAT16])
    kind, needed = (
        rng.choice([EntryKind.PROBABILITY, EntryKind.COUNT, EntryKind.SHOW_CLICK]),
        rng.choice([1.0, 2.0, 3.0]),
    )
    entry = Entry(kind, {EntryKind.PROBABILITY: 0.5, EntryKind.COUNT: needed}.get(kind, 0.0))
    policy, ttl_s = rng.choice(list(EvictionPolicy)), rng.choice([1.0, 5.0])
    rows, size = rng.choice([(12, 0), (20, 0), (32, 0), (0, 1200)])
    init = Initializer(InitKind.UNIFORM, *rng.choice([(0.0, 0.0), (-1.0, 1.0)]), seed=rng.randrange(1000))
    ttl = ttl_s if "ttl" in on else 0.0
    bound = None
    if on & {"bound", "ttl"}:
        policy = EvictionPolicy.LRU if ttl else policy
        limits = (rows, size) if "bound" in on else (0, 0)
        bound = Bound(rows=limits[0], bytes=limits[1], policy=policy, ttl_s=ttl)
    options = RowOptions(
        init=init,
        entry=entry if "entry" in on else Entry(),
        statistics="statistics" in on,
        dtype=dtype if "half" in on else RowType.FLOAT32,
        bound=bound,
    )
    rule = rule if "rule" in on else SGD()
    return TableSpec(kind=TableKind.SPARSE, name="f", size=2, rule=rule, rows=options)

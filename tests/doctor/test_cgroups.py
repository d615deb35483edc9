"""What control groups leave, read from folders as the kernel shows them."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from fleetrun.doctor import measure
from fleetrun.doctor.measure import Groups

MIB, GIB = 1 << 20, 1 << 30
UNLIMITED = 9223372036854771712
"""What version 1 says of a group without a limit."""


def groups(folder: Path, membership: str, files: Mapping[str, object]) -> Groups:
    for name, text in files.items():
        path = folder / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    (folder / "membership").write_text(membership)
    return Groups(folder / "cgroup", folder / "membership")


TWO = "0::/user/job\n"
ONE = "9:name=systemd:/\n4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n2:pids:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (TWO, {"user/job/cpu.max": "150000 100000", "user/cpu.max": "max 100000"}, 1.5),
        (TWO, {"user/job/cpu.max": "max 100000", "user/cpu.max": "50000 100000"}, 0.5),
        (TWO, {"user/job/cpu.max": "max 100000"}, None),
        (TWO, {"cpu.max": "200000 100000"}, 2.0),
        (ONE, {"cpu/docker/abc/cpu.cfs_quota_us": 400000, "cpu/docker/abc/cpu.cfs_period_us": 100000}, 4.0),
        (ONE, {"cpu/cpu.cfs_quota_us": 400000, "cpu/cpu.cfs_period_us": 100000}, 4.0),
        (ONE, {"cpu/cpu.cfs_quota_us": -1, "cpu/cpu.cfs_period_us": 100000}, None),
        (ONE, {"unified/cpu.max": "100000 100000"}, 1.0),
        (TWO, {"user/job/cpu.max": "100000 0"}, None),
        ("", {}, None),
        ("nonsense\n1:2\n", {}, None),
    ],
)
def test_processors(
    tmp_path: Path, membership: str, files: Mapping[str, object], expected: float | None
) -> None:
    assert groups(tmp_path, membership, files).processors() == expected


def test_what_the_cache_holds_of_files_is_free(tmp_path: Path) -> None:
    """A container that has read a data set is full of it, and nothing is wrong."""
    stat = f"anon {GIB}\nfile {6 * GIB}\nshmem 0\ninactive_file {4 * GIB}\nactive_file {2 * GIB}"
    found = groups(
        tmp_path,
        TWO,
        {
            "user/job/memory.max": 8 * GIB,
            "user/job/memory.current": 7 * GIB + 512 * MIB,
            "user/job/memory.stat": stat,
            "user/memory.max": "max",
            "user/memory.current": 20 * GIB,
        },
    )
    assert list(found.memory()) == [(8 * GIB, 6 * GIB + 512 * MIB)]


def test_memory_of_version_1(tmp_path: Path) -> None:
    found = groups(
        tmp_path,
        ONE,
        {
            "memory/docker/abc/memory.limit_in_bytes": 2 * GIB,
            "memory/docker/abc/memory.usage_in_bytes": 2 * GIB,
            "memory/docker/abc/memory.stat": f"inactive_file 5\ntotal_inactive_file {MIB}",
            "memory/memory.limit_in_bytes": UNLIMITED,
            "memory/memory.usage_in_bytes": 9 * GIB,
        },
    )
    assert list(found.memory()) == [(2 * GIB, MIB), (UNLIMITED, UNLIMITED - 9 * GIB)]
    facts = measure.memory(found)
    assert (facts.total, facts.available) == (2 * GIB, MIB)


def test_a_group_that_holds_more_than_it_may(tmp_path: Path) -> None:
    """The limit was lowered just now."""
    files = {"user/job/memory.max": MIB, "user/job/memory.current": GIB}
    assert list(groups(tmp_path, TWO, files).memory()) == [(MIB, 0)]


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (TWO, {"user/job/pids.max": 100, "user/job/pids.current": 60}, (100, 60)),
        (TWO, {"user/job/pids.max": "max", "user/job/pids.current": 60}, None),
        (TWO, {"user/job/pids.max": 100, "user/job/pids.current": 1, "user/pids.max": 50,
               "user/pids.current": 45}, (50, 45)),
        (ONE, {"pids/pids.max": 30, "pids/pids.current": 4}, (30, 4)),
    ],
)  # fmt: skip
def test_tasks_are_those_that_the_limit_counts(
    tmp_path: Path, membership: str, files: Mapping[str, object], expected: tuple[int, int] | None
) -> None:
    """Not those of the user, who may have others elsewhere, and none of those here."""
    facts = measure.limits(groups(tmp_path, membership, {**files}))
    if expected is not None:
        assert (facts.tasks_allowed, facts.tasks) == expected
    else:
        assert facts.tasks >= 1

"""Cores, memory, limits and folders: tables of facts."""

from dataclasses import replace

import pytest

from fleetrun.doctor import judge_machine
from fleetrun.doctor.facts import Cores, Finding, Folder, Limits, Memory, Space, Verdict, Wanted

MIB, GIB = 1 << 20, 1 << 30
PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


def verdicts(findings: object) -> dict[str, Verdict]:
    return {each.check: each.verdict for each in findings}  # type: ignore[attr-defined]


def wanted(processes: int = 1, **more: object) -> Wanted:
    return Wanted(processes=processes, trainers=processes, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "processes", "threads", "expected"),
    [
        (Cores(visible=8, total=8), 8, None, {"cores": PASS, "OMP threads": PASS}),
        (Cores(visible=8, total=8), 9, None, {"cores": WARN, "OMP threads": PASS}),
        (Cores(visible=8, total=8, quota=2.0), 4, None, {"cores": WARN, "OMP threads": PASS}),
        (Cores(visible=8, total=8, quota=64.0), 8, None, {"cores": PASS, "OMP threads": PASS}),
        (Cores(visible=8, total=8), 4, "2", {"cores": PASS, "OMP threads": PASS}),
        (Cores(visible=8, total=8), 4, "3", {"cores": PASS, "OMP threads": WARN}),
        (Cores(visible=1, total=1), 4, "1", {"cores": WARN, "OMP threads": PASS}),
        (Cores(visible=8, total=8), 1, "many", {"cores": PASS, "OMP threads": WARN}),
        (Cores(visible=8, total=8), 4, "2,4", {"cores": PASS, "OMP threads": PASS}),
        (Cores(visible=8, total=8), 4, "3,1", {"cores": PASS, "OMP threads": WARN}),
        (Cores(visible=8, total=8), 1, "0", {"cores": PASS, "OMP threads": WARN}),
        (Cores(visible=8, total=8), 1, "-1", {"cores": PASS, "OMP threads": WARN}),
        (Cores(visible=8, total=8, load=9.0), 1, None, {"cores": PASS, "OMP threads": PASS, "load": WARN}),
        (Cores(visible=2, total=64, load=9.0), 1, None, {"cores": PASS, "OMP threads": PASS}),
    ],
)
def test_cores(facts: Cores, processes: int, threads: str | None, expected: dict[str, Verdict]) -> None:
    assert verdicts(judge_machine.cores(facts, wanted(processes, threads=threads))) == expected


def test_the_mend_of_threads_can_be_typed() -> None:
    _, finding = judge_machine.cores(Cores(visible=8, total=16, quota=4.0), wanted(2, threads="4"))
    assert finding.mend == "export OMP_NUM_THREADS=2"
    assert "the cgroup gives 4" in finding.found


@pytest.mark.parametrize(
    ("available", "processes", "verdict"),
    [(8 * GIB, 8, PASS), (8 * GIB, 9, WARN), (GIB, 4, WARN), (GIB, 5, FAIL), (0, 1, FAIL)],
)
def test_memory(available: int, processes: int, verdict: Verdict) -> None:
    (finding,) = judge_machine.memory(Memory(total=64 * GIB, available=available), wanted(processes))
    assert finding.verdict is verdict


def test_servers_need_a_kernel_that_promises_more_than_there_is() -> None:
    strict = Memory(total=64 * GIB, available=60 * GIB, strict=True)
    assert "overcommit" not in verdicts(judge_machine.memory(strict, wanted()))
    assert verdicts(judge_machine.memory(strict, wanted(servers=True)))["overcommit"] is WARN


@pytest.mark.parametrize(
    ("facts", "verdict", "mend"),
    [
        (None, FAIL, "--shm-size"),
        (Space(kind="tmpfs", total=64 * MIB, free=64 * MIB), WARN, "--shm-size"),
        (Space(kind="tmpfs", total=64 * MIB, free=MIB), FAIL, "--shm-size"),
        (Space(kind="tmpfs", total=8 * GIB, free=8 * GIB), PASS, ""),
        (Space(kind="tmpfs", total=0, free=0), PASS, ""),
        (Space(kind="tmpfs", total=8 * GIB, free=MIB), FAIL, "ls -l"),
    ],
)
def test_shm(facts: Space | None, verdict: Verdict, mend: str) -> None:
    finding = judge_machine.shm(facts)
    assert (finding.verdict, mend in finding.mend) == (verdict, True)


@pytest.mark.parametrize(
    ("facts", "processes", "expected"),
    [
        (Limits(), 1, {"open files": PASS}),
        (Limits(open_files=65536), 8, {"open files": PASS}),
        (Limits(open_files=1024), 8, {"open files": WARN}),
        (Limits(open_files=1024), 248, {"open files": WARN}),
        (Limits(open_files=1024), 249, {"open files": FAIL}),
        (Limits(open_files=64), 4, {"open files": WARN}),
        (Limits(open_files=32), 4, {"open files": FAIL}),
        (Limits(tasks_allowed=1000, tasks=10), 8, {"open files": PASS, "processes": PASS}),
        (Limits(tasks_allowed=200, tasks=10), 8, {"open files": PASS, "processes": WARN}),
        (Limits(tasks_allowed=20, tasks=10), 8, {"open files": PASS, "processes": FAIL}),
        (Limits(tasks_allowed=20, tasks=30), 1, {"open files": PASS, "processes": FAIL}),
        (Limits(address_space=GIB), 1, {"open files": PASS, "address space": WARN}),
        (Limits(locked=64 * 1024), 1, {"open files": PASS}),
        (Limits(locked=64 * 1024, infiniband=True), 1, {"open files": PASS, "locked memory": WARN}),
        (Limits(infiniband=True), 1, {"open files": PASS}),
    ],
)
def test_limits(facts: Limits, processes: int, expected: dict[str, Verdict]) -> None:
    assert verdicts(judge_machine.limits(facts, wanted(processes))) == expected


ROOM = Space(kind="ext4", total=100 * GIB, free=50 * GIB, inodes=10**6)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Folder(path="log", error="Permission denied"), {"log dir": FAIL}),
        (Folder(path="log", space=ROOM, speed=1e9, sync=0.01), {"log dir": PASS, "disk speed": PASS}),
        (Folder(path="log", space=ROOM, speed=5e6, sync=0.01), {"log dir": PASS, "disk speed": WARN}),
        (Folder(path="log", space=ROOM, speed=1e9, sync=3.0), {"log dir": PASS, "disk speed": WARN}),
        (Folder(path="log", space=replace(ROOM, free=GIB // 2)), {"log dir": WARN}),
        (Folder(path="log", space=replace(ROOM, free=0)), {"log dir": FAIL}),
        (Folder(path="log", space=replace(ROOM, free=0, total=0)), {"log dir": PASS}),
        (Folder(path="log", space=replace(ROOM, inodes=100)), {"log dir": WARN}),
        (Folder(path="log", space=replace(ROOM, inodes=0)), {"log dir": FAIL}),
        (Folder(path="log", space=replace(ROOM, inodes=None)), {"log dir": PASS}),
    ],
)
def test_logs(facts: Folder, expected: dict[str, Verdict]) -> None:
    assert verdicts(judge_machine.logs(facts)) == expected


def test_a_runtime_folder_that_cannot_be_is_no_obstacle_to_a_job() -> None:
    assert judge_machine.runtime("").verdict is PASS
    assert judge_machine.runtime("/run/1 is open to other users").verdict is WARN


def test_event_files_that_cannot_be_written_keep_a_job_from_starting() -> None:
    assert judge_machine.boards("").verdict is PASS
    assert judge_machine.boards("Permission denied").verdict is FAIL


def test_whatever_does_not_pass_has_a_mend() -> None:
    few = wanted(100, servers=True)
    found: list[Finding] = [
        *judge_machine.cores(Cores(visible=1, total=1, load=5.0), few),
        *judge_machine.memory(Memory(total=GIB, available=1, strict=True), few),
        judge_machine.shm(None),
        judge_machine.boards("Permission denied"),
        *judge_machine.limits(
            Limits(open_files=1, tasks_allowed=1, address_space=1, locked=1, infiniband=True), few
        ),
        *judge_machine.logs(Folder(path="log", space=replace(ROOM, free=0), speed=1.0, sync=1.0)),
        judge_machine.runtime("why"),
    ]
    assert [each.check for each in found if each.verdict is not PASS and not each.mend] == []

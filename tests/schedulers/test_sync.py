"""--sync through a real sshd: two hosts with a home of their own, and no file in common but the logs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from fleetrun.schedulers.tree import read_tree
from tests.schedulers.test_ssh import HOSTS, OverSsh, over_ssh
from tests.support.command import Launch
from tests.support.waiting import eventually

__all__ = ["over_ssh"]

pytestmark = [pytest.mark.ssh, pytest.mark.slow]

WHERE = "from telling import *\nimport helper\ntell('in', os.getcwd(), os.listdir(), helper.WORD)\n"


@pytest.fixture
def project(over_ssh: OverSsh, tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".gitignore").write_text("*.bin\n.gate*\n")
    (folder / "weights.bin").write_bytes(b"large")
    (folder / "helper.py").write_text("WORD = 'one'\n")
    (folder / "train.py").write_text(WHERE)
    over_ssh.fleetrun.folder = folder
    return folder


def sync(over_ssh: OverSsh, *words: str) -> Launch:
    return over_ssh.run("--sync=.", *words, "train.py")


def test_every_host_runs_the_files_of_this_one(over_ssh: OverSsh, project: Path):
    first = sync(over_ssh)
    assert first.code == 0, first
    files = ["'.gitignore'", "'helper.py'", "'train.py'"]
    for told, host in zip(sorted(first.told("in")), HOSTS, strict=True):
        assert f" in {over_ssh.server.trees(host)}/" in told
        assert told.endswith("one")
        assert all(name in told for name in files)
        assert "weights" not in told
    assert re.search(r"Code: 3 files, \d+ bytes, sent to 2 of 2 hosts\n", first.err)
    assert list((project / "log").glob("*.trainer.0.log")), "logs are where the job was started"
    again = sync(over_ssh)
    assert again.code == 0, again
    assert "bytes, 2 hosts had it" in again.err
    (project / "helper.py").write_text("WORD = 'two'\n")
    changed = sync(over_ssh)
    assert [told.split()[-1] for told in changed.told("in")] == ["two", "two"], changed


def test_only_hosts_without_it_get_it_and_a_half_unpacked_one_is_no_tree(over_ssh: OverSsh, project: Path):
    (project / "helper.py").write_text("WORD = 'half'\n")
    assert sync(over_ssh).code == 0
    trees = over_ssh.server.trees(HOSTS[1])
    digest = max(trees.glob("*.json"), key=lambda path: path.stat().st_mtime).stem
    (trees / digest).rename(trees / f"{digest}.{os.uname().nodename}-1.new")
    launch = sync(over_ssh)
    assert launch.code == 0, launch
    assert "sent to 1 of 2 hosts; 1 had it" in launch.err
    assert not list(trees.glob("*.new"))


def test_it_runs_in_the_same_folder_of_a_larger_tree(over_ssh: OverSsh, project: Path):
    inner = project / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "train.py").write_text("from telling import *\ntell('in', os.getcwd())\n")
    over_ssh.fleetrun.folder = inner
    launch = over_ssh.run("--sync=../..", str(inner / "train.py"))
    assert launch.code == 0, launch
    assert all(told.endswith("/a/b") for told in launch.told("in"))


def test_a_script_that_git_ignores_is_told_before_anything_is_sent(over_ssh: OverSsh, project: Path):
    (project / ".gitignore").write_text(".gate*\ntrain.py\n")
    launch = sync(over_ssh)
    assert launch.code == 2, launch
    assert "--sync . does not have train.py" in launch.said


def test_a_host_with_a_full_disk_is_named(over_ssh: OverSsh, project: Path):
    trees = over_ssh.server.trees(HOSTS[1])
    trees.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "none", trees], check=True)
    try:
        (project / "data").write_bytes(os.urandom(200_000))
        launch = sync(over_ssh)
        assert launch.code == 125, launch
        assert f"{HOSTS[1]}: the code did not reach this host: No space left on device" in launch.said
        assert not list(trees.glob("*.new"))
    finally:
        subprocess.run(["umount", trees], check=True)


def test_ctrl_c_while_it_is_sent_ends_it(over_ssh: OverSsh, project: Path, monkeypatch: pytest.MonkeyPatch):
    (project / "helper.py").write_text("WORD = 'never'\n")
    monkeypatch.chdir(project)
    digest = read_tree(".", project / "log").digest
    trees = over_ssh.server.trees(HOSTS[1])
    trees.mkdir(parents=True, exist_ok=True)
    with (trees / f"{digest}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as another launch that unpacks it
        launch = over_ssh.start("--sync=.", "train.py")
        eventually(lambda: any("unpack" in words for words in of_clients(launch)))
        launch.send(signal.SIGINT)
        assert launch.wait() == 130, launch
        eventually(lambda: not over_ssh.server.sessions())  # otherwise the remote one could go on now
    launch.no_process()
    assert not (trees / digest).exists()


def of_clients(launch: Launch) -> list[list[str]]:
    """The command lines of the launcher's children."""
    found: list[list[str]] = []
    with contextlib.suppress(OSError, IndexError):
        children = Path(f"/proc/{launch.launcher}/task/{launch.launcher}/children").read_text().split()
        found += [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").split() for pid in children]
    return found


def test_two_launches_at_once_share_one_copy(over_ssh: OverSsh, project: Path):
    (project / "helper.py").write_text("WORD = 'both'\n")
    launches = [
        over_ssh.start("--sync=.", f"--job_id=both{number}", "train.py", hosts=HOSTS[1:])
        for number in range(2)
    ]
    for launch in launches:
        assert launch.wait() == 0, launch
    (first,), (second,) = (launch.told("in") for launch in launches)
    assert first.split()[2] == second.split()[2]


# ---- With --watch

# The zygote of --warm imports numpy.
WATCHED = """import sys
AHEAD = "numpy" in sys.modules
import numpy
from telling import *
import helper
tell("in", os.getcwd(), AHEAD, helper.WORD)
stay()
"""


@pytest.fixture
def watched(project: Path) -> Path:
    (project / "train.py").write_text(WATCHED)
    (project / "helper.py").write_text("WORD = 'one'")
    return project


def write(project: Path, name: str, text: str) -> None:
    """As editors do."""
    (project / ".gate-aside").write_text(text)
    (project / ".gate-aside").rename(project / name)


def places(launch: Launch, word: str, ranks: int = 2) -> list[list[str]]:
    """Where the ranks have this word of the helper, and whether they are forks."""

    def found() -> list[list[str]]:
        return sorted(told.split()[2:4] for told in launch.told(" in ") if told.endswith(f" {word}"))

    launch.until(lambda: len(found()) == ranks, word)
    return found()


def test_an_edit_reaches_all_hosts_before_the_ranks_start_again(over_ssh: OverSsh, watched: Path):
    launch = over_ssh.start("--sync=.", "--watch", "train.py")
    places(launch, "one")
    write(watched, "unused.py", "")
    launch.until(lambda: launch.err.count("sent to 2 of 2 hosts") == 2)
    write(watched, "helper.py", "WORD = 'two'")
    found = [Path(place) for place, _ in places(launch, "two")]
    assert [each.parent for each in found] == [over_ssh.server.trees(host) for host in HOSTS]
    assert found[0].name == found[1].name
    write(watched, "helper.py", "WORD = ")
    launch.until_err("helper.py does not compile")
    write(watched, "helper.py", "WORD = 'three'")
    places(launch, "three")
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert len(launch.told(" in ")) == 6
    assert launch.err.count("restart by a change of helper.py; all nodes restart") == 4


def test_a_host_that_an_edit_does_not_reach_is_named_and_the_job_keeps_its_code(
    over_ssh: OverSsh, watched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    launch = over_ssh.start("--sync=.", "--watch", "train.py")
    places(launch, "one")
    later = tmp_path / "later"
    later.mkdir()
    for name in (".gitignore", "train.py"):
        (later / name).write_text((watched / name).read_text())
    (later / "helper.py").write_text("WORD = 'two'")
    monkeypatch.chdir(later)
    blocked = over_ssh.server.trees(HOSTS[1]) / f"{read_tree('.', later / 'log').digest}.lock"
    blocked.mkdir()
    write(watched, "helper.py", "WORD = 'two'")
    launch.until_err(f"{HOSTS[1]}: the code did not reach this host: Is a directory")
    launch.until_err("; the job keeps the code that it has")
    blocked.rmdir()
    write(watched, "helper.py", "WORD = 'three'")
    places(launch, "three")
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert not [told for told in launch.told(" in ") if told.endswith(" two")]


def test_forks_of_a_zygote_run_in_the_next_copy(over_ssh: OverSsh, watched: Path):
    launch = over_ssh.start("--sync=.", "--watch", "--warm", "train.py")
    assert [ahead for _, ahead in places(launch, "one")] == ["True", "True"]
    write(watched, "helper.py", "WORD = 'two'")
    found = places(launch, "two")
    assert [ahead for _, ahead in found] == ["True", "True"]
    assert len({Path(place).name for place, _ in found}) == 1
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert launch.err.count("ready for warm starts") == 2


def test_a_job_on_one_host_waits_and_starts_again_in_the_next_copy(over_ssh: OverSsh, watched: Path):
    (watched / "helper.py").write_text("")
    launch = over_ssh.start("--sync=.", "--watch", "train.py", hosts=HOSTS[:1])
    launch.until_err("waiting for a change of the script")
    write(watched, "helper.py", "WORD = 'one'")
    ((first, _),) = places(launch, "one", 1)
    write(watched, "helper.py", "WORD = 'two'")
    ((second, _),) = places(launch, "two", 1)
    assert first != second
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch


def test_files_that_change_all_the_time_are_no_edits(over_ssh: OverSsh, watched: Path):
    launch = over_ssh.start("--sync=.", "--watch", "train.py")
    places(launch, "one")
    shown = ""

    def shows(text: str) -> bool:
        """As `| tee out.log`."""
        nonlocal shown
        if launch.err != shown:
            shown = launch.err
            (watched / "out.log").write_text(shown)
        return text in shown

    eventually(lambda: shows("out.log' changes all the time"))
    assert shown.count("sent to 2 of 2 hosts") < 8

    def grows() -> None:
        with (watched / "more.csv").open("a") as file:
            file.write("1\n")

    eventually(lambda: grows() or shows("more.csv' changes all the time"))
    write(watched, "helper.py", "WORD = 'two'")
    eventually(lambda: grows() or len([told for told in launch.told(" in ") if told.endswith(" two")]) == 2)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert launch.err.count("changes all the time") == 2


def test_the_directory_of_the_job_may_go_for_a_while(over_ssh: OverSsh, watched: Path):
    inner = watched / "exp"
    inner.mkdir()
    for name in ("train.py", "helper.py"):
        (watched / name).rename(inner / name)
    over_ssh.fleetrun.folder = inner
    launch = over_ssh.start("--sync=..", "--watch", "train.py")
    places(launch, "one")
    for name in ("train.py", "helper.py"):
        (inner / name).rename(watched / f".gate-{name}")
    launch.until_err(f"has no file of {inner}; the job keeps the code that it has")
    (watched / ".gate-train.py").rename(inner / "train.py")
    write(watched, "exp/helper.py", "WORD = 'two'")
    places(launch, "two")
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch

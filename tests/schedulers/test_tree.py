"""The working tree of --sync: what belongs to it, and how it comes to a machine whole or not at all."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fleetrun.errors import UsageError
from fleetrun.schedulers import tree as trees_module
from fleetrun.schedulers.tree import Tree, read_tree, times_of, tree_of_job
from fleetrun.schedulers.tree_remote import TreeError, folder_of_trees, is_there, unpack
from tests.support.submissions import Came, KeptConsole, submission
from tests.support.waiting import eventually


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    folder = tmp_path / "trees"
    folder.mkdir()
    return folder


def git(*words: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True
    )


def make(*names: str) -> None:
    for name in names:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(name)


def tree(folder: str = ".") -> Tree:
    return read_tree(folder, Path("log").absolute())


def names(folder: str = ".") -> list[str]:
    return [each.name for each in tree(folder).entries]


# ---- what belongs to it


@pytest.mark.parametrize("repository", [True, False])
def test_what_gitignore_names_and_logs_stay_here(project: Path, repository: bool):
    if repository:
        git("init")
    make("train.py", "a/x.bin", "a/keep.bin", "a/b/f", "data/d", "log/x.log", "__pycache__/c", "build")
    Path(".gitignore").write_text("*.bin\n/data/\n")
    Path("a/.gitignore").write_text("!keep.bin\nb/\n")
    assert names() == [".gitignore", "a/.gitignore", "a/keep.bin", "build", "train.py"]


def test_logs_of_earlier_launches_stay_here_too(project: Path):
    make("log/default.x.events.jsonl", "log/default.x.trainer.0.log", "a/log/code.py", "train.py")
    assert [each.name for each in read_tree(".", project / "other").entries] == ["a/log/code.py", "train.py"]
    Path("log/default.x.events.jsonl").unlink()
    assert len(read_tree(".", project / "other").entries) == 3, "a folder of that name may be code"


def test_code_in_the_log_directory_is_told(project: Path):
    make("train.py", "log/__init__.py", "log/default.abcdef.trainer.0.log")
    job, found = tree_of_job(submission("--scheduler=ssh", "--ips=h", "--sync=.", "train.py"))
    assert found is not None
    assert [each.name for each in found.entries] == ["train.py"]
    assert isinstance(job.console, KeptConsole)
    assert job.console.said == [
        "INFO Not sent, because it is in the log directory: log/__init__.py; --log_dir names another"
    ]


def test_of_a_repository_tracked_files_count_and_deleted_ones_do_not(project: Path):
    git("init")
    make("tracked.bin", "deleted", "new")
    Path(".gitignore").write_text("*.bin\n")
    git("add", "-f", "tracked.bin", "deleted")
    Path("deleted").unlink()
    assert names() == [".gitignore", "new", "tracked.bin"]


def test_repositories_inside_have_their_own_rules(project: Path):
    git("init")
    for inner in ("untracked", "submodule"):
        git("init", inner)
        make(f"{inner}/f", f"{inner}/i")
        Path(f"{inner}/.gitignore").write_text("i\n")
        git("-C", inner, "add", ".")
        git("-C", inner, "commit", "-m", "x")
    git("add", "submodule")
    assert names() == ["submodule/.gitignore", "submodule/f", "untracked/.gitignore", "untracked/f"]


def test_a_folder_of_a_repository_is_a_tree_of_its_own(project: Path, monkeypatch: pytest.MonkeyPatch):
    git("init")
    make("outer", "a/b/train.py")
    monkeypatch.chdir("a/b")
    assert names() == ["train.py"]
    assert (tree("../..").inside, names("../..")) == ("a/b", ["a/b/train.py", "outer"])


def test_links_stay_links_and_those_that_lead_out_are_told(project: Path):
    make("a/f")
    for name, target in {
        "in": "a",
        "a/up": "../in",
        "out": "/data",
        "a/far": "../../x",
        "gone": "no",
    }.items():
        Path(name).symlink_to(target)
    found = tree()
    assert {each.name: each.target for each in found.entries if each.kind == "l"}["in"] == "a"
    assert found.outside == ("a/far", "out")


@pytest.mark.parametrize("repository", [True, False])
def test_a_link_that_cannot_be_followed_is_a_link(project: Path, repository: bool):
    if repository:
        git("init")
    Path("link").symlink_to("x" * 300)  # as one to where this user may not look
    make("train.py")
    assert names() == ["link", "train.py"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_this_process_writes_to_is_not_of_the_tree(project: Path, stream: str):
    make("train.py")
    code = """if True:
    import sys
    from pathlib import Path
    from fleetrun.schedulers.tree import read_tree
    found = read_tree(".", Path("log").absolute())
    print("a line of the launch", file=sys.STREAM, flush=True)
    found.archive().close()
    Path("names").write_text(" ".join(each.name for each in found.entries))
    """
    argv = [sys.executable, "-c", code.replace("STREAM", stream)]
    with Path("out.log").open("w") as out:
        subprocess.run(argv, check=True, **{stream: out})
    assert Path("names").read_text() == "train.py"


@pytest.mark.slow
def test_a_folder_that_git_cannot_read_is_told(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """As root it can read them all, so this git is one that says so."""
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    said = "warning: could not open directory 'data/': Permission denied"
    program.write_text(f'#!/bin/sh\necho "{said}" >&2\nprintf "train.py\\0"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    make("train.py")
    with pytest.raises(UsageError, match="could not open directory 'data/': Permission denied"):
        tree()


def test_the_digest_is_of_names_modes_and_contents(project: Path):
    make("f")
    digests = {tree().digest}
    os.utime("f", (1, 1))
    digests.add(tree().digest)
    assert len(digests) == 1, "a time is not content"
    Path("f").chmod(0o755)
    digests.add(tree().digest)
    Path("f").rename("g")
    digests.add(tree().digest)
    Path("g").write_text("other")
    digests.add(tree().digest)
    Path("h").symlink_to("g")
    digests.add(tree().digest)
    assert len(digests) == 5


def test_a_tree_that_is_too_large_says_what_is(project: Path):
    make("train.py")
    Path("data").mkdir()
    with open("data/large", "wb") as file:  # noqa: PTH123
        file.truncate(trees_module.LARGEST)
    with pytest.raises(
        UsageError, match=r"--sync \. is 512 MiB, and the limit is 512 MiB: data 512 MiB, train.py 8"
    ):
        tree()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--scheduler=ssh", "--ips=h", "--sync=none", "train.py"),
            "--sync none: this directory does not exist",
        ),
        (("--scheduler=ssh", "--ips=h", "--sync=a", "train.py"), "which is not in this directory"),
        (("--scheduler=ssh", "--ips=h", "--sync=.", "ignored.py"), "--sync . does not have ignored.py"),
        (("--sync=.", "train.py"), "--sync . needs --scheduler ssh, slurm, srun or kubernetes"),
        (("--scheduler=local", "--sync=.", "train.py"), "--sync . needs --scheduler"),
    ],
)
def test_what_cannot_be_is_an_error(project: Path, words: tuple[str, ...], message: str):
    make("a/f", "train.py", "ignored.py")
    Path(".gitignore").write_text("ignored.py\n")
    with pytest.raises(UsageError, match=message):
        tree_of_job(submission(*words))


def test_scripts_are_named_from_where_the_job_runs(project: Path):
    make("train.py", "a/eval.py")
    roles = {"roles": {"evaluator": {"script": str(project / "a/eval.py"), "args": [str(project)]}}}
    words = ("--scheduler=ssh", "--ips=h", "--sync=.", "--log_dir=here", str(project / "train.py"))
    job, found = tree_of_job(submission(*words, job_file=roles))
    assert job.settings.script == "train.py"
    assert job.job_file["roles"]["evaluator"] == {"script": "a/eval.py", "args": [str(project)]}
    assert "--log_dir=here" not in job.command()
    assert found is not None


# ---- how it comes to a machine


def test_a_cache_that_others_can_change_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    cache = folder_of_trees()
    assert cache == tmp_path / "fleetrun" / "code"
    cache.chmod(0o777)
    other = folder_of_trees()
    assert other.parent == tmp_path / "temporary"
    other.chmod(0o777)
    with pytest.raises(TreeError, match="others can write into it"):
        folder_of_trees()


def odd_files() -> None:
    make("a/f", "with space", "new\nline", "umläut", "-x", "x" * 200 + "/" + "y" * 200)
    Path(os.fsdecode(b"\xff")).write_bytes(os.urandom(100_000))
    Path("run.sh").write_text("#!/bin/sh")
    Path("run.sh").chmod(0o755)
    Path("empty/inner").mkdir(parents=True)
    Path("link").symlink_to("a/f")
    Path("out").symlink_to("/no/such")


def sent(found: Tree, trees: Path) -> Path:
    with found.archive() as archive:
        unpack(trees, found.digest, archive)
    return trees / found.digest


def test_it_arrives_as_it_was(project: Path, trees: Path, monkeypatch: pytest.MonkeyPatch):
    odd_files()
    found = tree()
    there = sent(found, trees)
    monkeypatch.chdir(there)
    assert read_tree(".", trees).digest == found.digest
    assert (there / "run.sh").stat().st_mode & 0o100
    assert not (there / "a/f").stat().st_mode & 0o100
    assert (there / "empty/inner").is_dir()
    assert (there / "out").readlink() == Path("/no/such")


@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "HOME"])
def test_a_cache_that_is_not_absolute_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv(name, "relative")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert folder_of_trees() == tmp_path / f"fleetrun-code-{os.getuid()}"


def test_what_a_job_has_changed_is_sent_again_and_what_it_wrote_stays(project: Path, trees: Path):
    make("config", "train.py")
    found = tree()
    there = sent(found, trees)
    (there / "result").write_text("kept")
    assert is_there(trees, found.digest)
    (there / "config").write_text("changed")
    (there / "train.py").unlink()
    assert not is_there(trees, found.digest)
    sent(found, trees)
    assert [(there / name).read_text() for name in ("config", "train.py", "result")] == [
        "config",
        "train.py",
        "kept",
    ]


@pytest.mark.parametrize("becomes", ["a file", "a link"])
def test_a_folder_that_a_job_has_replaced_is_sent_again(
    project: Path, trees: Path, tmp_path: Path, becomes: str
):
    (project / "data").mkdir()
    make("data/x", "train.py")
    found = tree()
    there = sent(found, trees)
    shutil.rmtree(there / "data")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x").write_text("of others")
    if becomes == "a file":
        (there / "data").write_text("")
    else:
        (there / "data").symlink_to(outside)
    sent(found, trees)
    assert ((there / "data" / "x").read_text(), (there / "data").is_symlink()) == ("data/x", False)
    assert (outside / "x").read_text() == "of others"


def test_a_signal_ends_reading_and_packing(project: Path):
    make("train.py")
    words = ("--scheduler=ssh", "--ips=h", "--sync=.", "train.py")
    assert tree_of_job(submission(*words, signals=Came(signal.SIGUSR1, signal.SIGCHLD)))[1] is not None
    with pytest.raises(KeyboardInterrupt):
        tree_of_job(submission(*words, signals=Came(signal.SIGINT)))
    _, found = tree_of_job(submission(*words))
    assert found is not None
    interrupted = replace(found, heed=submission(*words, signals=Came(signal.SIGTERM)).heed)
    with pytest.raises(KeyboardInterrupt):
        interrupted.archive()


def test_files_that_change_while_they_are_packed_are_an_error(project: Path):
    make("f")
    for text in ("g", "longer"):
        found = tree()
        Path("f").write_text(text)
        with pytest.raises(UsageError, match=": files changed during the read"):
            found.archive()


def test_a_log_that_grows_is_sent_as_it_was_first(project: Path, trees: Path):
    make("out.log", "train.py")
    found = tree()
    with Path("out.log").open("a") as out:
        out.write("more")
    assert (sent(found, trees) / "out.log").read_text() == "out.log"
    Path("train.py").write_text("train.py and more")
    with pytest.raises(UsageError, match=": files changed during the read"):
        found.archive()


@pytest.mark.parametrize("repository", [True, False])
def test_a_new_file_in_a_new_directory_is_a_change(project: Path, repository: bool):
    if repository:
        git("init", "-q")
    make("train.py", "other/file")
    for name in ("pkg/inner", "other/none"):
        Path(name).mkdir(parents=True, exist_ok=True)
        before = times_of(tree().paths)
        (Path(name) / "module.py").write_text("")
        assert times_of(before) != before, name


@pytest.mark.parametrize("line", ["!", "foo\\"])
def test_a_rule_that_cannot_be_read_is_an_error(project: Path, line: str):
    Path(".gitignore").write_text(line)
    with pytest.raises(UsageError, match=r"\.gitignore cannot be read"):
        tree()


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_an_archive_that_is_cut_or_another_leaves_nothing(project: Path, trees: Path, where: str):
    odd_files()
    found = tree()
    with found.archive() as archive:
        data = archive.read()
    cut = {"begin": 5, "middle": len(data) // 2, "end": len(data) - 20_000}[where]
    with pytest.raises(TreeError, match="cannot be unpacked"):
        unpack(trees, found.digest, io.BytesIO(data[:cut]))
    with pytest.raises(TreeError, match="does not match its digest"):
        unpack(trees, "0" * 32, io.BytesIO(data))
    assert not is_there(trees, found.digest)
    assert [path for path in trees.iterdir() if path.suffix != ".lock"] == []


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_an_archive_cannot_write_elsewhere(trees: Path, name: str):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        tar.addfile(tarfile.TarInfo(name))
    data.seek(0)
    with pytest.raises(TreeError, match="the archive has the name"):
        unpack(trees, "0" * 32, data)


def test_nothing_is_written_through_a_link(trees: Path, tmp_path: Path):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as tar:
        link = tarfile.TarInfo("a")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)
        tar.addfile(tarfile.TarInfo("a/x"))
    data.seek(0)
    with pytest.raises(TreeError, match="outside"):
        unpack(trees, "0" * 32, data)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_unpacks_leaves_no_tree(project: Path, trees: Path):
    odd_files()
    found = tree()
    with found.archive() as archive:
        data = archive.read()
    argv = [sys.executable, "-m", "fleetrun.schedulers.tree_remote", "unpack", found.digest]
    env = {**os.environ, "XDG_CACHE_HOME": str(trees)}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, env=env)
    assert process.stdin is not None
    process.stdin.write(data[: len(data) // 2])
    process.stdin.flush()
    folder = trees / "fleetrun" / "code"
    eventually(lambda: list(folder.glob(f"{found.digest}.*.new/a")))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    assert not is_there(folder, found.digest)
    assert subprocess.run(argv, input=data, env=env, check=False).returncode == 0
    assert is_there(folder, found.digest)
    assert not list(folder.glob("*.new"))


def test_what_another_machine_unpacks_stays_until_it_is_old(project: Path, trees: Path):
    make("train.py")
    found = tree()
    here = os.uname().nodename
    left = [
        trees / f"{digest}.{host}-1.new" for digest in (found.digest, "0" * 32) for host in ("other", here)
    ]
    for path in left:
        path.mkdir()
    old = trees / f"{found.digest}.gone-1.new"
    old.mkdir()
    os.utime(old, (time.time() - 90_000,) * 2)
    sent(found, trees)
    assert [path.exists() for path in (*left, old)] == [True, False, True, False, False]


def test_old_trees_go_but_not_what_is_used_or_has_results(project: Path, trees: Path):
    there = []
    for number in range(12):
        Path("f").write_text(str(number))
        there.append(sent(tree(), trees))
    assert all(path.is_dir() for path in there), "none is old"
    (there[0] / "result").write_text("of a job")
    (there[1] / "__pycache__").mkdir()
    (there[1] / "__pycache__" / "f.pyc").write_text("compiled")
    for number, path in enumerate(there):
        os.utime(f"{path}.json", (time.time() - 90_000 + number,) * 2)
    with open(f"{there[2]}.json") as used:  # noqa: PTH123
        fcntl.flock(used, fcntl.LOCK_SH)  # as a job does
        Path("f").write_text("new")
        sent(tree(), trees)
    assert [path.is_dir() for path in there] == [True, False, True, False, False, *[True] * 7]


@pytest.mark.slow
def test_a_job_holds_its_tree(project: Path, trees: Path, tmp_path: Path):
    make("train.py")
    found = tree()
    env = {**os.environ, "XDG_CACHE_HOME": str(trees)}
    folder = trees / "fleetrun" / "code"
    folder.mkdir(parents=True)
    sent(found, folder)
    code = "import os, sys; print(os.getcwd(), os.environ['PADDLE_LOG_DIR'], flush=True); sys.stdin.read()"
    argv = [sys.executable, "-m", "fleetrun.schedulers.tree_remote", "enter", found.digest, ".", "log"]
    with subprocess.Popen(
        [*argv, sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        cwd=tmp_path,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        said = process.stdout.readline().decode().split()
        assert said == [str(folder / found.digest), str(tmp_path / "log")]
        with open(f"{folder / found.digest}.json") as used, pytest.raises(BlockingIOError):  # noqa: PTH123
            fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.stdin.close()
    assert subprocess.run([*argv[:4], "0" * 32, ".", "log", "true"], env=env, check=False).returncode == 1

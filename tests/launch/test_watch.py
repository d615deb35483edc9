"""Which changes of files restart a job with --watch."""

import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.elastic.agent import Assignment
from fleetrun.envs.channels import FILES_SUFFIX, PROBE_VARIABLE, TREE_VARIABLE
from fleetrun.errors import LaunchError
from fleetrun.launcher.parts import Reach
from fleetrun.launcher.watch import Watch
from fleetrun.pod.events import Restarting
from fleetrun.pod.loop import Loop, Timer
from fleetrun.pod.policy import NOTHING_SPENT


class Job:
    """A job whose loop is turned by hand. `refusal` is the answer to the next requests of a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clock = 0
        self.script = self.write("train.py", "first = 1\n")
        self.restarts: list[str] = []
        self.shown: list[str] = []
        self.refusal = ""
        self.edits: list[str] = []
        self._handler = None
        specs = [
            SimpleNamespace(
                argv=(sys.executable, "-u", str(self.script)),
                env={PROBE_VARIABLE: str(folder / f"probe{rank}")},
            )
            for rank in range(2)
        ]
        launch = SimpleNamespace(
            loop=SimpleNamespace(
                after=self._after, add=lambda fd, handler: setattr(self, "offered", handler)
            ),
            interrupts=SimpleNamespace(restart=self._restart),
            console=SimpleNamespace(
                error=self.shown.append, block=lambda lines, level: self.shown.extend(lines)
            ),
        )
        self._watch = Watch(launch, Reach())
        containers = [SimpleNamespace(spec=spec) for spec in specs]
        self._watch.set_pod(SimpleNamespace(containers=containers), 0)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        self._clock += 1
        os.utime(path, ns=(0, self._clock))
        return path

    def imports(self, path: Path, state: int | None = None, rank: int = 0) -> None:
        """A process imports a module."""
        with (self.folder / f"probe{rank}{FILES_SUFFIX}").open("a") as file:
            file.write(f"{path.stat().st_mtime_ns if state is None else state} {path}\n")

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            assert self._handler is not None
            self._handler()

    def restarted(self) -> None:
        self._watch.handle(Restarting([]))

    def _after(self, seconds: float, handler: object) -> Timer:
        self._handler = handler
        return Timer()

    def starts(self, edit: str) -> None:
        """A round of several nodes starts."""
        self._watch.handle(
            Assignment(
                generation=2, members=(), rank=0, first=False, attempts=1, restarts=0, spent=NOTHING_SPENT,
                edit=edit,
            )
        )  # fmt: skip

    def _restart(self, name: str, command: str, edit: str) -> str:
        assert (name, bool(edit)) == ("", True)
        self.edits.append(edit)
        if not self.refusal:
            self.restarts.append(command)
        return self.refusal


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    return Job(tmp_path)


CHANGED = "a change of train.py"


def test_a_file_that_stays_the_same_for_a_look_restarts_the_job_once(job: Job):
    job.look(3)
    job.write("train.py", "first = ")
    job.look()
    job.write("train.py", "first = 2")
    job.look()
    assert job.restarts == []
    job.look(3)
    assert job.restarts == [CHANGED]
    job.restarted()
    job.look(3)
    assert job.restarts == [CHANGED]
    job.write("train.py", "first = 3")
    job.look(2)
    assert job.restarts == [CHANGED, CHANGED]


@pytest.mark.parametrize("name", ["train.py", "built.so"])
def test_a_file_that_is_missing_for_a_while_is_no_change(job: Job, name: str):
    job.imports(job.write("built.so", "1"))
    job.look()
    (job.folder / name).rename(job.folder / "aside")
    job.look(3)
    (job.folder / "aside").rename(job.folder / name)
    job.look(3)
    assert job.restarts == []
    job.write(name, "2")
    job.look(2)
    assert job.restarts == [f"a change of {name}"]


@pytest.mark.parametrize("replace", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_a_missing_file(job: Job, replace: Callable[[Path], None]):
    job.script.unlink()
    replace(job.script)
    job.look(3)
    assert (job.restarts, job.shown) == ([], [])


def test_a_deleted_directory_leaves_the_whole_path(job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    (tmp_path / "below").rmdir()
    job.write("train.py", "first = 2")
    job.look(2)
    assert job.restarts == [f"a change of {job.script}"]


def test_a_process_that_imports_an_edited_module_late_does_not_hide_the_edit(job: Job):
    own = job.write("own.py", "")
    job.imports(own, rank=1)
    job.look()
    job.imports(job.write("own.py", "1"), rank=0)
    job.look(2)
    assert job.restarts == ["a change of own.py"]


def test_a_module_counts_from_its_import_on(job: Job):
    before, own = job.write("before.py", ""), job.write("own.py", "")
    job.write("before.py", "edited")
    job.imports(own)
    job.look(3)
    assert job.restarts == []
    job.imports(before, 2)  # it was edited between its import and this look
    job.look(2)
    assert job.restarts == ["a change of before.py"]


def test_a_module_that_the_script_lacked_counts(job: Job):
    path = job.folder / "own.py"
    job.imports(path, 0)
    job.look(3)
    assert job.restarts == []
    job.write("own.py", "")
    job.look(2)
    assert job.restarts == ["a change of own.py"]


def test_a_module_of_the_attempt_before_still_counts(job: Job):
    job.imports(job.write("own.py", ""))
    job.look()
    (job.folder / f"probe0{FILES_SUFFIX}").unlink()
    job.restarted()
    job.write("own.py", "1")
    job.write("train.py", "first = 2")
    job.look(2)
    assert job.restarts == ["a change of own.py and 1 more"] or job.restarts == [f"{CHANGED} and 1 more"]


@pytest.mark.parametrize("text", ["def f(:\n", "a = '\0'\n", "  x = 1\n", "f'{'\n"])
def test_a_file_that_does_not_compile_is_shown_once_and_leaves_the_job_alone(job: Job, text: str):
    job.write("train.py", text)
    job.look(5)
    assert job.restarts == []
    assert sum("train.py does not compile" in line for line in job.shown) == 1
    assert "Error: " in job.shown[-1]
    job.write("train.py", "first = 2")
    job.look(2)
    assert job.restarts == [CHANGED]


def test_another_file_does_not_hide_an_error(job: Job):
    job.imports(job.write("own.py", ""))
    job.look()
    job.write("own.py", "def f(:")
    job.look(3)
    job.write("train.py", "first = 2")
    job.look(3)
    assert job.restarts == []
    job.write("own.py", "")
    job.look(2)
    assert len(job.restarts) == 1


def test_a_request_that_comes_at_the_wrong_moment_is_repeated(job: Job):
    job.refusal = "the process is restarting or stopping already"
    job.write("train.py", "first = 2")
    job.look(5)
    job.refusal = ""
    job.look(5)
    assert job.restarts == [CHANGED]


def test_a_restart_for_another_reason_reads_the_files_too(job: Job):
    job.write("train.py", "first = 2")
    job.look()
    job.restarted()
    job.look(3)
    assert job.restarts == []


def test_an_edit_within_a_second_is_not_hidden_by_a_compiled_file(job: Job):
    cached = Path(cache_from_source(str(job.script)))
    cached.parent.mkdir()
    cached.write_bytes(b"")
    job.write("train.py", "first = 2")
    job.look(2)
    assert job.restarts == [CHANGED]
    job.restarted()
    assert not cached.exists()


# ---- In a copy of the code (--sync)

FIRST, SECOND, THIRD = (letter * 32 for letter in "abc")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for digest in (FIRST, SECOND):
        (tmp_path / digest).mkdir()
        (tmp_path / digest / "train.py").write_text("first = 1\n")
        (tmp_path / f"{digest}.json").write_text("{}")
    monkeypatch.chdir(tmp_path / FIRST)
    monkeypatch.setenv(TREE_VARIABLE, FIRST)
    read, write = os.pipe()
    stdin = os.dup(0)
    os.dup2(read, 0)
    job = Job(tmp_path / FIRST)
    job.nears = write
    yield job
    if used := vars(job._watch).get("_used"):
        used.close()
    os.dup2(stdin, 0)
    for fd in (read, write, stdin):
        os.close(fd)


def offer(job: Job, digest: str, time: int = 1) -> str:
    edit = f"{time:019} {digest}"
    os.write(job.nears, f"{edit}\n".encode())
    job.offered()
    return edit


def test_a_copy_restarts_the_job_if_a_file_of_the_processes_differs(copied: Job, tmp_path: Path):
    copied.imports(copied.write("own.py", "a = 1"))
    copied.look()
    (tmp_path / SECOND / "own.py").write_text("a = 1")
    (tmp_path / SECOND / "other.py").write_text("")
    offer(copied, SECOND)
    copied.look(3)
    assert copied.restarts == []
    (tmp_path / THIRD).mkdir()
    (tmp_path / THIRD / "own.py").write_text("a = 2")
    edit = offer(copied, THIRD, 2)
    copied.look(3)
    assert (copied.restarts, copied.edits) == (["a change of own.py"], [edit])


def test_a_round_runs_its_copy_and_an_older_offer_does_not_come_back(copied: Job, tmp_path: Path):
    (tmp_path / SECOND / "train.py").write_text("first = 2\n")
    copied.starts(f"{2:019} {SECOND}")
    assert Path.cwd() == tmp_path / SECOND
    assert os.environ[TREE_VARIABLE] == SECOND
    copied.look(3)
    assert copied.restarts == []


def test_a_node_without_the_copy_of_a_round_says_so_and_stays_where_it_is(copied: Job, tmp_path: Path):
    with pytest.raises(LaunchError, match=f"the working tree {tmp_path / THIRD}: No such file or directory"):
        copied.starts(f"{2:019} {THIRD}")
    assert Path.cwd() == tmp_path / FIRST
    copied.starts(f"{3:019} {SECOND}")
    assert Path.cwd() == tmp_path / SECOND


def test_an_edit_of_the_copy_itself_is_no_edit(copied: Job):
    copied.write("train.py", "first = 3")
    copied.look(3)
    assert copied.restarts == []


@pytest.mark.parametrize("edit", [f"{'0' * 20}../../../tmp/x", f"{2:019} {'a' * 31}/", f"{2:019} x\n{THIRD}"])
def test_an_edit_that_names_no_copy_is_refused(copied: Job, tmp_path: Path, edit: str):
    with pytest.raises(LaunchError, match="this node cannot have"):
        copied.starts(edit)
    copied.starts("")
    assert Path.cwd() == tmp_path / FIRST
    os.write(copied.nears, f"{edit}/\n".encode())
    copied.offered()
    copied.write("train.py", "first = 3")
    copied.look(3)
    assert copied.restarts == []


def test_a_node_without_a_copy_cannot_take_part_in_a_job_that_has_one(job: Job):
    with pytest.raises(LaunchError, match="this node cannot have"):
        job.starts(f"{2:019} {FIRST}")
    job.starts("0" * 20)


def test_an_offer_that_is_older_than_the_round_changes_nothing(copied: Job, tmp_path: Path):
    copied.starts(f"{3:019} {SECOND}")
    for digest, text in ((FIRST, "a = 2"), (SECOND, "a = 1")):
        (tmp_path / digest / "own.py").write_text(text)
    copied.imports(tmp_path / SECOND / "own.py")
    offer(copied, FIRST, 2)
    copied.look(3)
    assert copied.restarts == []
    offer(copied, FIRST, 4)
    copied.look(3)
    assert copied.restarts == ["a change of own.py"]


def test_a_rank_of_a_job_with_a_copy_may_start_another_job(copied: Job):
    with Path(os.devnull).open() as stdin:  # as ranks have it
        os.dup2(stdin.fileno(), 0)
    loop = Loop()
    Watch(SimpleNamespace(loop=loop), Reach())
    loop.close()

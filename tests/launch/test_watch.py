"""Which changes of files restart a job with --watch."""

import os
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.envs.channels import FILES_SUFFIX, PROBE_VARIABLE
from fleetrun.envs.contract import Role
from fleetrun.launcher.parts import Reach
from fleetrun.launcher.watch import Watch
from fleetrun.pod.events import Restarting
from fleetrun.pod.loop import Timer


class Job:
    """A job whose loop is turned by hand. `refusal` is the answer to the next requests of a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._clock = 0
        self.script = self.write("train.py", "first = 1\n")
        self.restarts: list[str] = []
        self.shown: list[str] = []
        self.refusal = ""
        self._handler = None
        specs = [
            SimpleNamespace(
                argv=(sys.executable, "-u", str(self.script)),
                env={PROBE_VARIABLE: str(folder / f"probe{rank}")},
                role=Role.TRAINER,
                name=f"trainer.{rank}",
            )
            for rank in range(2)
        ]
        launch = SimpleNamespace(
            loop=SimpleNamespace(after=self._after),
            interrupts=SimpleNamespace(restart=self._restart),
            console=SimpleNamespace(
                error=self.shown.append, block=lambda lines, level: self.shown.extend(lines)
            ),
        )
        self._watch = Watch(launch, Reach())
        containers = [SimpleNamespace(spec=spec, alive=spec is specs[1]) for spec in specs]
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

    def _restart(self, name: str, command: str) -> str:
        assert name == "trainer.1", "the other one has ended"
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
    assert not cached.exists()

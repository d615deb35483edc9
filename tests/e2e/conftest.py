"""The command for a test, in a folder of its own; at the end nothing may be left of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.nodes import Nodes, nodes

_HERE = Path(__file__).parent
_ROOT = Path(__file__).resolve().parents[2]
_AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
_NEW_ENOUGH = "import sys; sys.exit(sys.version_info < (3, 11))"


_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here launches real jobs, so it is slow, except the few that are marked `quick`."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.when == "call":
        item.stash[_FAILED] = report.failed
    return report


def failed(request: pytest.FixtureRequest) -> bool:
    return request.node.stash.get(_FAILED, False)


@pytest.fixture
def fleetrun(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Fleetrun]:
    with Fleetrun(tmp_path) as command:
        yield command
        command.failed = failed(request)


@pytest.fixture
def three(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Three hosts. For modules that say `needs_hosts`."""
    with nodes(3, tmp_path) as found:
        yield found
        for command in found.commands:
            command.failed = failed(request)


@pytest.fixture
def five(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Five hosts. For modules that say `needs_hosts`."""
    with nodes(5, tmp_path) as found:
        yield found
        for command in found.commands:
            command.failed = failed(request)


@pytest.fixture
def as_nobody(request: pytest.FixtureRequest) -> Iterator[Fleetrun]:
    """The command run by a user who may write into its folder and nowhere else."""
    shut = [folder for folder in (_ROOT, *_ROOT.parents) if not folder.stat().st_mode & 0o001]
    if shut:
        pytest.skip(f"nobody else may enter {shut[0]}, where the sources are")
    folder = Path(tempfile.mkdtemp(prefix="fleettest-", dir="/tmp"))
    folder.chmod(0o777)
    try:
        with Fleetrun(folder, (_python_of_nobody(), "-m", "fleetrun"), _AS_NOBODY, [_ROOT]) as command:
            yield command
            command.failed = failed(request)
    finally:
        shutil.rmtree(folder)


def _python_of_nobody() -> str:
    """A Python that this user may run: that of the tests may lie in a home directory."""
    if os.getuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("only root can become another user")
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        command = [*_AS_NOBODY, "sh", "-c", 'exec "$@"', "sh", python, "-c", _NEW_ENOUGH]
        if subprocess.run(command, cwd="/", capture_output=True).returncode == 0:
            return python
    pytest.skip("the user nobody has no Python to run")

"""Cases that must not run in the process of the tests: they reap, kill or move whatever is below them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_RUN = """
from fleetrun.pod.linux import become_subreaper
become_subreaper()
from fleetrun.pod.process import end_descendants
from {module} import {name}
try:
    {name}({arguments})
finally:
    end_descendants(0.0)
"""


def isolated(case: Callable[..., None], *arguments: str | int) -> str:
    """Run a function of a test module in a process of its own, a sub-reaper; return what it printed.

    Raises AssertionError with its traceback when it fails.
    """
    code = _RUN.format(module=case.__module__, name=case.__name__, arguments=", ".join(map(repr, arguments)))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def in_fork(case: Callable[..., None], *arguments: object) -> str:
    """Run a function in a forked process, where it may lower limits and change users; return what it printed.

    The process has torch already. Raises AssertionError with its traceback when it fails.
    """
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                sys.stdout = output
                case(*arguments)
                code = 0
            except BaseException:  # noqa: BLE001  # the test shows it
                traceback.print_exc(file=output)
            finally:
                output.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read()
    assert status == 0, text
    return text

"""One training job of either side: started by its own launcher, ended for certain, its figures read.

A job is one server and two trainers on this machine. Everything of it carries a mark in its environment, by
which whatever is left in the end is found and killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from _processes import kill_carriers
from _ps_cases import Case
from _ps_files import Files

from trainers.metrics import Auc

OURS, PADDLE = "fleetrun", "Paddle"
HERE = Path(__file__).resolve().parent

Result = dict[str, float]


class JobError(Exception):
    """The job gave no figures; the text says why."""


@dataclass(frozen=True, slots=True)
class Side:
    """Who trains: a launcher, the interpreter beside it, a script and the reader of its pipe command."""

    name: str
    launcher: Path
    script: Path
    reader: str
    version: str
    timeout: float = 300.0

    def command(self, case: Case, files: Files, result: str) -> list[str]:
        kind = case.our_files if self.name == OURS else case.paddle_files
        by_lines = self.name == OURS and case.piped == "--lines"
        reader = f"{sys.executable} {HERE / '_criteo_lines.py'}" if by_lines else self.reader
        piped = ["--pipe", reader] if case.piped else []
        launcher = [str(self.launcher), "--server_num=1", "--trainer_num=2", "--log_dir=log"]
        data = ["--data", *files.train(kind), "--test", *files.test(kind)]
        return [*launcher, str(self.script), *case.options, *case.model, *piped, *data, "--result", result]


def ours(reader: str) -> Side:
    launcher = Path(sys.executable).with_name("fleetrun")
    script = HERE / "_wide_deep_ours.py"
    return Side(OURS, launcher, script, f"{sys.executable} {reader}", _version(sys.executable, "fleetrun"))


def paddle() -> Side | None:
    """By PADDLE_BIN, the folder of its `fleetrun` and `python`; None where that is not given."""
    folder = os.environ.get("PADDLE_BIN")
    if not folder or not (Path(folder) / "paddle").exists():
        return None
    python = str(Path(folder) / "python")
    version = _version(python, "paddlepaddle")
    scripts = HERE / "paddle"
    return Side(
        PADDLE,
        Path(folder) / "fleetrun",
        scripts / "wide_deep.py",
        f"{python} {scripts / 'reader.py'}",
        version,
    )


def run(side: Side, case: Case, files: Files, work: Path) -> Result:
    """Examples/s and the rest of one job; see `figures`. Raises JobError when it fails or hangs."""
    hangs = side.name == PADDLE and case.paddle_rows is not None
    attempts, timeout = (5, 40.0) if hangs else (1, side.timeout)
    for attempt in range(attempts):
        folder = Path(tempfile.mkdtemp(prefix="job.", dir=work))
        command = side.command(case, files, str(folder / "result"))
        try:
            start(command, folder, timeout, path=[side.launcher.parent])
            return figures(trainer_rows(folder / "result", 2), with_test=not hangs)
        except JobError:
            if attempt == attempts - 1:
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise AssertionError("there is at least one attempt")


def start(
    command: Sequence[str],
    folder: Path,
    timeout: float,
    *,
    path: Sequence[Path] = (),
    env: Mapping[str, str] | None = None,
) -> None:
    """Run `command` in `folder` to its end. Raises JobError for any exit code but 0, and after `timeout`
    seconds; nothing of it is left then.
    """
    mark = f"BENCH_JOB={folder}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    search = os.pathsep.join([*map(str, path), os.environ["PATH"]])
    environment = {
        **inherited,
        "PATH": search,
        "OMP_NUM_THREADS": "1",
        "BENCH_JOB": str(folder),
        **(env or {}),
    }
    try:
        with (folder / "out").open("wb") as out:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                timeout=timeout, check=False,
            )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise JobError(f"still running after {timeout:.0f} s") from None
    finally:
        kill_carriers(mark.encode())
    if done.returncode != 0:
        last = " / ".join((folder / "out").read_text(errors="replace").splitlines()[-4:])
        raise JobError(f"exit code {done.returncode}: {last[-400:]}")


def trainer_rows(result: Path, trainers: int) -> list[dict[str, float]]:
    """What each trainer wrote. Raises JobError when one wrote nothing."""
    paths = [result.with_name(f"{result.name}.trainer{rank}") for rank in range(trainers)]
    if missing := [path.name for path in paths if not path.exists()]:
        raise JobError(f"missing: {', '.join(missing)}")
    return [json.loads(path.read_text().splitlines()[-1]) for path in paths]


def figures(rows: Sequence[Mapping[str, object]], *, with_test: bool = True) -> Result:
    """`speed` examples/s by the slowest trainer's time; `trainer_cpu`, `server_cpu` in seconds per million
    examples; `server_mb`; `auc` and `log_loss` of all trainers' test predictions together.
    """

    def every(name: str) -> list[float]:
        return [float(row[name]) for row in rows]  # type: ignore[arg-type]

    examples = sum(every("rows"))
    result = {
        "speed": examples / max(every("seconds")),
        "trainer_cpu": sum(every("cpu")) / examples * 1e6,
        "server_cpu": max(every("server_cpu")) / examples * 1e6,
        "server_mb": max(every("server_peak_mb")),
    }
    if with_test:
        area = Auc(len(rows[0]["clicks"]))  # type: ignore[arg-type]
        for row in rows:
            area.state += torch.tensor([row["others"], row["clicks"]], dtype=torch.float64).reshape(-1)
        result["auc"] = area.value()
        result["log_loss"] = sum(every("test_loss")) / sum(every("test_rows"))
    return result


def alone(case: Case) -> float:
    """Examples/s of the model by itself on one thread. Raises JobError."""
    script = HERE / "_wide_deep_alone.py"
    try:
        done = subprocess.run(
            [sys.executable, str(script), *case.model], env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except subprocess.SubprocessError as problem:
        raise JobError(f"the model by itself: {problem}") from None
    return float(done.stdout)


def _version(python: str, name: str) -> str:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or "?"

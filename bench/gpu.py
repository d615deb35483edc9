"""Check fleetrun on one NVIDIA GPU. It takes six minutes at most, and no network.

    python bench/gpu.py [--rounds 3] [--write docs/benchmarks.md]
    python bench/gpu.py --device cpu --rounds 1        # try the check itself without a GPU

It prints which packages it lacks, and then a table: the tests that are marked gpu, a data parallel step
through fleet beside DistributedDataParallel, a trainer with its tables on a server beside nn.Embedding in the
memory of the GPU, a failed assertion on the device, and `fleetrun status` beside nvidia-smi. Our runs and the
others alternate, and a ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _marks import check_marks, measured, publish

NAME = "gpu.py"
ROOT = Path(__file__).resolve().parents[1]
STEP = Path(__file__).with_name("_gpu_step.py")
LIMIT_S = 330.0
PACKAGES = {
    "numba": "tables on servers",
    "pynvml": "GPUs in fleetrun top and status (pip install nvidia-ml-py)",
    "pytest": "the tests",
}
PROGRAMS = {"nvidia-smi": "the comparison of GPU memory", "py-spy": "stacks of native code"}
FLEETRUN = [sys.executable, "-m", "fleetrun"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
Row = tuple[str, str, str, str]
"""What was checked, what was found, the goal, and whether it was reached."""


class Check:
    """The check of one device, with a directory for files."""

    def __init__(self, device: str, rounds: int, folder: Path) -> None:
        self._device, self._rounds, self._folder = device, rounds, folder
        self._until = time.monotonic() + LIMIT_S

    def run(self, command: list[str], name: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command to its end. After the time limit of the whole check, it is stopped."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "4"}
        left = max(5.0, self._until - time.monotonic())
        try:
            return subprocess.run(
                command, cwd=self._folder, env=env, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(command, 124, "", f"{name} did not end in time")

    def seconds(self, what: str, way: str, launcher: list[str]) -> float | str:
        """Return the median of seconds per step, or the end of the output of a run that failed."""
        out = self._folder / "figures.json"
        out.unlink(missing_ok=True)
        steps = ["5"] if self._device == "cpu" else []
        ended = self.run([*launcher, str(STEP), what, way, self._device, str(out), *steps], what)
        if ended.returncode or not out.exists():
            return (ended.stdout + ended.stderr)[-1500:]
        return statistics.median(json.loads(out.read_text()))

    def compared(self, title: str, what: str, ours: list[str], theirs: list[str], most: float) -> Row:
        """Return the row of a comparison in turns."""
        ratios, times = [], []
        for number in range(self._rounds):
            pair = {}
            for way in ("ours", "torch") if number % 2 else ("torch", "ours"):
                pair[way] = self.seconds(what, way, ours if way == "ours" else theirs)
                if isinstance(pair[way], str):
                    print(f"--- {title}, {way}:\n{pair[way]}", file=sys.stderr)
                    return title, f"{way} failed", f"<= {most} x torch", "no"
            ratios.append(pair["ours"] / pair["torch"])
            times.append((pair["ours"], pair["torch"]))
        ratio = statistics.median(ratios)
        here, there = (1e3 * statistics.median(each) for each in zip(*times, strict=True))
        found = f"{ratio:.2f} ({here:.2f} and {there:.2f} ms a step)"
        return title, found, f"<= {most} x torch", "yes" if ratio <= most else "no"

    def data_parallel(self) -> Row:
        ours = [*FLEETRUN, "--nproc_per_node=1"]
        return self.compared("a data parallel step through fleet", "ddp", ours, TORCHRUN, 1.1)

    def tables(self) -> Row:
        ours = [*FLEETRUN, "--server_num=1", "--trainer_num=1"]
        title = "26 tables on a server, beside nn.Embedding on the device"
        return self.compared(title, "tables", ours, [sys.executable], 1.3)

    def assertion(self) -> Row:
        """An index out of range on the device must be named as such, not as the line where it was noticed."""
        command = [
            *FLEETRUN,
            "--nproc_per_node=1",
            "--max_restart=0",
            str(STEP),
            "assert",
            "ours",
            self._device,
            "-",
        ]
        ended = self.run(command, "assert")
        word = "An index was out of range on the GPU" if self._device == "cuda" else "index out of range"
        named = ended.returncode == 1 and word in " ".join((ended.stdout + ended.stderr).split())
        if not named:
            print(f"--- assertion:\n{(ended.stdout + ended.stderr)[-1500:]}", file=sys.stderr)
        return (
            "a failed assertion on the device",
            "named" if named else "not named",
            "named",
            "yes" if named else "no",
        )

    def memory(self) -> Row:
        """GPU memory of a process in `fleetrun status --json` and nvidia-smi."""
        title, goal = "GPU memory of a process in fleetrun status", "as in nvidia-smi"
        command = [
            *FLEETRUN,
            "--nproc_per_node=1",
            "--job_id",
            "gpucheck",
            str(STEP),
            "work",
            "ours",
            self._device,
            "-",
        ]
        log = self._folder / "work.out"
        with log.open("w") as out:
            job = subprocess.Popen(
                command, cwd=self._folder, stdout=out, stderr=out, env=os.environ | {"PYTHONPATH": str(ROOT)}
            )
        try:
            began = time.monotonic()
            while (
                log.read_text().count("step\n") < 3 and job.poll() is None and time.monotonic() < began + 60
            ):
                time.sleep(0.2)
            status = self.run([*FLEETRUN, "status", "--json", "gpucheck"], "status")
            if self._device == "cpu":
                return title, f"status exited with {status.returncode}", goal, "-"
            listed = self.run(
                ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
            ).stdout
            by_pid = dict(map(int, line.split(",")) for line in listed.splitlines() if "N/A" not in line)
            found = [
                (process["gpu_memory"] / 2**20, by_pid.get(process["pid"]))
                for process in processes_of(json.loads(status.stdout))
                if process.get("gpu_memory")
            ]
            if not found or found[0][1] is None:
                return title, f"status {found}, nvidia-smi {by_pid}", goal, "no"
            here, there = found[0]
            agree = abs(here - there) < 0.05 * there + 16
            return title, f"{here:.0f} and {there} MiB", goal, "yes" if agree else "no"
        finally:
            job.terminate()
            job.wait(30)

    def tests(self) -> Row:
        ended = self.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-p",
                "no:cacheprovider",
                "-m",
                "gpu",
                str(ROOT / "tests"),
            ],
            "tests",
        )
        last = (ended.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
        if ended.returncode:
            print(f"--- tests:\n{ended.stdout[-3000:]}", file=sys.stderr)
        return "tests marked gpu", last, "pass", "yes" if ended.returncode == 0 else "no"


def processes_of(document: object) -> list[dict]:
    """Return all objects with a process id in a document."""
    if isinstance(document, list):
        return [found for each in document for found in processes_of(each)]
    if not isinstance(document, dict):
        return []
    inside = [found for each in document.values() for found in processes_of(each)]
    return [document, *inside] if "pid" in document else inside


def lacking() -> list[str]:
    packages = [f"{name}: {use}" for name, use in PACKAGES.items() if importlib.util.find_spec(name) is None]
    return packages + [f"{name}: {use}" for name, use in PROGRAMS.items() if shutil.which(name) is None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the table between the marks in this file"
    )
    options = parser.parse_args()
    check_marks(options.write, NAME)
    for each in lacking():
        print(f"not installed: {each}", file=sys.stderr)
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no GPU. Install torch for CUDA, or try --device cpu.")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU (a trial without meaning)"
    load, began = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        check = Check(options.device, options.rounds, Path(folder))
        parts = (check.tests, check.assertion, check.memory, check.data_parallel, check.tables)
        rows = [part() for part in parts if part != check.tests or options.device == "cuda"]
    lines = [
        "| check | found | goal | reached |",
        "|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    about = f"{measured(f'{name}, torch {torch.__version__}', load)} {time.monotonic() - began:.0f} s in all."
    publish(about + "\n\n" + "\n".join(lines), options.write, NAME)
    sys.exit("no" in [reached for *_, reached in rows])


if __name__ == "__main__":
    main()

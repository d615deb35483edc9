"""Compares wide & deep with one table and with many on our parameter servers and on TorchRec, in one run.

    python -m venv RIVAL && RIVAL/bin/pip install torch==2.13.0
    RIVAL/bin/pip install --no-deps fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0
    RIVAL/bin/pip install numpy tensordict iopath torchmetrics==1.0.3 tqdm pyre-extensions typing-inspect
    python bench/ps_torchrec.py --rival RIVAL/bin/python --write docs/benchmarks-ps.md
    python bench/ps_torchrec.py --rival RIVAL/bin/python --quick            # does everything run?
    python bench/ps_torchrec.py --loops --write docs/benchmarks-ps.md          # ours alone, see below

Runs of a line alternate, and the CPU seconds are of all processes of a job inside its timed part: only these
are compared, since other work on the machine changes the speed. What the sides do is in `bench/torchrec`.

Equal: examples, their order, ids, batch, the dense model and its Adam, Adagrad for each element of the
tables, initial values, missing ids as zeros, one thread a process, warm-up, the clock. In the rival's
favour: ids are numbered ahead, in tables of exactly the right size (ours finds 63-bit ids in tables that
grow); it has no servers, so no recovery. In ours: async needs no step in common, and DMP is synchronous.

Lines with "a collection": the rival's own EmbeddingBagCollection and batches on our servers. They need
torchrec in this environment too, see CONTRIBUTING.md, and are left out without it.

--loops: ours with 26 tables over `fleet.prefetch`, over torch's DataLoader (without and with `read_ahead`)
and in a loop without either, in all modes, and with one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from _marks import check_marks, publish

HERE = Path(__file__).resolve().parent / "torchrec"
NAME = Path(__file__).name
COUNTS = (1, 26, 104, 416)
SIDES = {
    "**1 server + 2 trainers, async**": ("ours.py", ""),
    "**1 + 2, sync**": ("ours.py", "--mode sync"),
    "**a collection, 1 + 2, async**": ("ours.py", "--kind collection"),
    "**a collection, 1 + 2, sync**": ("ours.py", "--kind collection --mode sync"),
    "TorchRec DMP, 2 processes": ("rival.py", ""),
    "**1 + 1, async**": ("ours.py", "--trainers 1"),
    "**a collection, 1 + 1, async**": ("ours.py", "--kind collection --trainers 1"),
    "FBGEMM TBE, 1 process, no servers": ("rival.py", "--side tbe --trainers 1"),
}
AGAINST = {
    side: "FBGEMM TBE, 1 process, no servers" if "1 + 1" in side else "TorchRec DMP, 2 processes"
    for side in SIDES
    if side.startswith("**")
}
LOOPS = {
    "1 table, fleet.prefetch": "--tables 1",
    "26 tables, fleet.prefetch": "--tables 26",
    "26, DataLoader": "--tables 26 --loop loader",
    "26, DataLoader, read_ahead": "--tables 26 --loop allowed",
    "26, neither": "--tables 26 --loop plain",
}
Figures = dict[str, float]


def run(side: str, words: Sequence[str], rival: str) -> Figures:
    script, options = SIDES[side]
    python = sys.executable if script == "ours.py" else rival
    command = [python, str(HERE / script), *options.split(), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    return figures


def table(found: dict[str, dict[int, list[Figures]]], hidden: str) -> list[str]:
    counts = list(next(iter(found.values())))
    names = [f"{count} table{'s' * (count > 1)}" for count in counts]
    lines = [f"| MLP {hidden.replace(',', ' x ')} | {' | '.join(names)} | test AUC |"]
    lines.append(f"|---|{'--:|' * (len(counts) + 1)}")
    for side, by_count in found.items():
        cells = []
        for count, runs in by_count.items():
            mine = statistics.median(each["cpu_s_per_M"] for each in runs)
            cells.append(f"{mine:.1f}")
            if side in AGAINST:
                ratios = [
                    one["cpu_s_per_M"] / other["cpu_s_per_M"]
                    for one, other in zip(runs, found[AGAINST[side]][count], strict=True)
                ]
                cells[-1] += f" · {statistics.median(ratios):.2f}"
        aucs = [f"{statistics.median(each['auc'] for each in runs):.4f}" for runs in by_count.values()]
        lines.append(f"| {side} | {' | '.join(cells)} | {', '.join(aucs)} |")
    return lines


def loops(data: Sequence[str], repeats: int) -> list[str]:
    """A table of --loops: after the dot, the ratio to the second column."""
    lines = [f"| 1 server + 2 trainers | {' | '.join(LOOPS)} |", f"|---|{'--:|' * len(LOOPS)}"]
    for mode in ("sync", "async", "geo"):
        rounds = [
            [
                run("**1 + 2, sync**", [*data, "--mode", mode, *words.split()], "")["cpu_s_per_M"]
                for words in LOOPS.values()
            ]
            for _ in range(repeats)
        ]
        cells = []
        for number in range(len(LOOPS)):
            ratio = statistics.median(each[number] / each[1] for each in rounds)
            cells.append(f"{statistics.median(each[number] for each in rounds):.1f} · {ratio:.2f}")
        lines.append(f"| {mode} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rival", help="python of an environment with torchrec")
    parser.add_argument("--loops", action="store_true", help="ours alone, by how a loop gets its rows")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each cell [%(default)s]")
    parser.add_argument("--tables", type=int, nargs="+", default=COUNTS, help="columns [%(default)s]")
    parser.add_argument("--rows", type=int, default=204_800, help="examples of an epoch [%(default)s]")
    parser.add_argument("--hidden", default="128,64", help="layers of the MLP [%(default)s]")
    parser.add_argument("--write", type=Path, help="put the table between the marks in this file")
    parser.add_argument("--quick", action="store_true", help="a small epoch, once")
    args = parser.parse_args()
    if not (args.rival or args.loops):
        parser.error("--rival is missing; only --loops works without it")
    name = f"{NAME} --loops" if args.loops else NAME
    check_marks(args.write, name)
    rows, repeats = (40_960, 1) if args.quick else (args.rows, args.repeats)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        data = f"{folder}/data.pt"
        subprocess.run([sys.executable, str(HERE / "workload.py"), data, "--rows", str(rows)], check=True)
        if args.loops:
            publish("\n".join(loops(["--data", data, "--hidden", args.hidden], repeats)), args.write, name)
            return
        known = find_spec("torchrec") is not None
        sides = [side for side in SIDES if known or "collection" not in side]
        found: dict[str, dict[int, list[Figures]]] = {side: {} for side in sides}
        for count in args.tables:
            words = ["--data", data, "--tables", str(count), "--hidden", args.hidden]
            for number in range(repeats):
                for side in sides:
                    figures = run(side, words, args.rival)
                    found[side].setdefault(count, []).append(figures)
                    said = f"{figures['cpu_s_per_M']:.1f} s per million, {figures['speed']:,.0f} examples/s"
                    print(f"{count} tables, run {number + 1}: {side.strip('*')}: {said}", flush=True)
    publish("\n".join(table(found, args.hidden)), args.write, name)


if __name__ == "__main__":
    main()

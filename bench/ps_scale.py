"""How parameter-server training grows: 1 to 8 servers x 1 to 16 trainers as processes of this machine, and on
paper 100 servers x 1,000 trainers with what was measured here.

    python bench/ps_scale.py --write docs/benchmarks-ps.md
    python bench/ps_scale.py --servers 1,2 --trainers 1,2      # a look

Wide & deep, async, batch 512, the same examples in sum whatever the number of trainers; with a push for every
step and with one for 16 (`max_merge_var_num`), in turn. Where a push is for several steps there are more
examples, so that servers get enough messages to measure what one costs. The cores are shared by all
processes, so it is the cost of a step that scales here, not the speed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import _ps_jobs
from _marks import check_marks, publish
from _ps_jobs import HERE, JobError
from _ps_paper import Costs, fit, load

from trainers.data.click_files import write_slots
from trainers.data.clicks import ClickModel

NAME = "ps_scale.py"
BATCH = 512
FILES = 16
MOST_TIMES = 8
"""As many examples where a push is for several steps."""
LINKS = {"10 Gbit/s": 1.25e9, "25 Gbit/s": 3.125e9, "100 Gbit/s": 12.5e9}
PAPER = ((10, 1000), (50, 1000), (100, 100), (100, 1000), (200, 1000))

Step = dict[str, float]


def one_job(servers: int, trainers: int, files: Sequence[Path], work: Path, options: Sequence[str]) -> Step:
    """The costs of a step of one trainer, and `speed` in examples/s of all. Raises JobError."""
    folder = Path(tempfile.mkdtemp(prefix="job.", dir=work))
    launcher = Path(sys.executable).with_name("fleetrun")
    command = [
        str(launcher), f"--server_num={servers}", f"--trainer_num={trainers}", "--log_dir=log",
        str(HERE / "_wide_deep_ours.py"), "--in_memory", "--count", "--warm_up", "10",
        "--batch_size", str(BATCH), *options,
        "--data", *map(str, files), "--result", str(folder / "result"),
    ]  # fmt: skip
    try:
        _ps_jobs.start(command, folder, 300.0, path=[launcher.parent])
        rows = _ps_jobs.trainer_rows(folder / "result", trainers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    steps = sum(row["steps"] for row in rows)
    return {
        "servers": servers,
        "trainers": trainers,
        "speed": sum(row["rows"] for row in rows) / max(row["seconds"] for row in rows),
        "trainer_cpu": sum(row["cpu"] for row in rows) / steps,
        "server_cpu": max(row["server_cpu"] for row in rows) / steps,
        "messages": sum(row["sent_messages"] + row["received_messages"] for row in rows) / steps,
        "bytes_in": sum(row["sent_bytes"] for row in rows) / steps,
        "bytes_out": sum(row["received_bytes"] for row in rows) / steps,
    }


def measured_table(steps: Sequence[Step]) -> str:
    head = ("servers", "trainers", "examples/s", "messages a step", "KB a step to servers", "KB from servers",
            "trainer CPU, ms a step", "server CPU, ms a step")  # fmt: skip
    lines = [_line(head), _line(["---:"] * len(head))]
    for step in steps:
        counts = [f"{step['servers']:.0f}", f"{step['trainers']:.0f}", f"{step['speed']:,.0f}"]
        wire = [f"{step['messages']:.1f}", f"{step['bytes_in'] / 1e3:.1f}", f"{step['bytes_out'] / 1e3:.1f}"]
        cpu = [f"{step['trainer_cpu'] * 1e3:.2f}", f"{step['server_cpu'] * 1e3:.2f}"]
        lines.append(_line([*counts, *wire, *cpu]))
    return "\n".join(lines)


def paper_table(costs: Costs) -> str:
    """The model's lines, and what they mean for many hosts."""

    def said(name: str, scale: float, figures: int) -> str:
        line = costs[name]
        return f"{line.base * scale:.{figures}f} + {line.each * scale:.{figures + 1}f} S"

    text = (
        "A step of one trainer with S servers, by least squares: "
        f"trainer CPU {said('trainer_cpu', 1e3, 2)} ms; "
        f"server CPU in all {said('server_cpu', 1e3, 2)} ms; {said('messages', 1, 1)} messages; "
        f"{said('bytes_in', 1e-3, 1)} KB to and {said('bytes_out', 1e-3, 1)} KB from the servers."
    )
    head = ("servers", "trainers", "messages in a step of all", "MB in a step of all",
            *(f"steps/s by {name}" for name in ("trainers' CPU", "servers' CPU", *LINKS)),
            "saturates first", "examples/s then", "messages/s a server", "MB/s a server")  # fmt: skip
    lines = [_line(head), _line(["---:"] * len(head))]
    for servers, trainers in PAPER:
        at = load(costs, servers, trainers, links=LINKS)
        sizes = [str(servers), f"{trainers:,}", f"{at.messages:,.0f}", f"{at.bytes / 1e6:,.0f}"]
        limits = [f"{steps:,.0f}" for steps in at.limits.values()]
        then = [f"{at.steps * BATCH:,.0f}", f"{at.server_messages:,.0f}", f"{at.server_bytes / 1e6:,.0f}"]
        lines.append(_line([*sizes, *limits, at.limit, *then]))
    return "\n".join([text, "", *lines])


def _on_paper(steps: Sequence[Step]) -> str:
    try:
        costs = fit(steps)
    except ValueError as error:
        return f"No figures on paper: {error}."
    return (
        "On paper, with a core for every trainer and every server and a full-duplex link for every server. "
        f"{paper_table(costs)}"
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", metavar="NUMBERS", type=_numbers, default=[1, 2, 4, 8])
    parser.add_argument("--trainers", metavar="NUMBERS", type=_numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--rows", metavar="N", type=int, default=FILES * 20 * BATCH, help="examples in all")
    parser.add_argument("--merge", metavar="NUMBERS", type=_numbers, default=[1, 16], help="steps of a push")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the tables between the marks in this file"
    )
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_args()


def main() -> int:
    options = _arguments()
    check_marks(options.write, NAME)
    load_before = os.getloadavg()[0]
    steps: dict[int, list[Step]] = {merge: [] for merge in options.merge}
    with tempfile.TemporaryDirectory(prefix="bench-scale.", dir=options.work) as work:
        files = {merge: [Path(work) / f"{merge}-{number:02}" for number in range(FILES)] for merge in steps}
        for merge, names in files.items():
            write_slots(ClickModel().draw(options.rows * min(merge, MOST_TIMES), seed=0), names)
        for servers in options.servers:
            for trainers in options.trainers:
                for merge, found in steps.items():
                    job = f"{servers} servers, {trainers} trainers, {merge} steps a push"
                    words = ["--mode", "async", "--merge", str(merge)]
                    try:
                        found.append(one_job(servers, trainers, files[merge], Path(work), words))
                    except JobError as error:
                        sys.stderr.write(f"{job}: {error}\n")
                        continue
                    sys.stderr.write(f"{job}: {found[-1]['speed']:,.0f} examples/s\n")
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}"
    text = (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {machine}, async, {options.rows:,} examples or more, "
        f"batch {BATCH}, load {load_before:.1f} before."
    )
    for merge, found in steps.items():
        title = "A push for every step" if merge == 1 else f"A push for {merge} steps"
        text += f"\n\n**{title}.**\n\n{measured_table(found)}\n\n{_on_paper(found)}"
    publish(text, options.write, NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main())

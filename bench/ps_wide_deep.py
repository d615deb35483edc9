"""Compares wide & deep on our parameter servers and on Paddle's: one run, one table.

    python bench/ps_wide_deep.py --write docs/benchmarks-ps.md
    python bench/ps_wide_deep.py --write docs/benchmarks-ps.md --only geo,geo400  # measures these rows again
    python bench/ps_wide_deep.py --quick                                       # does everything run?

1 server and 2 trainers on this machine, 800,000 generated examples, one epoch. Runs of the two sides
alternate. Paddle 2.6.2 is looked for in PADDLE_BIN, the folder of its `fleetrun` and `python`. Speed is that
of the slowest trainer's epoch, without starting up; ours ends when the last gradient has been applied. A run
that fails or hangs is counted in its cell. Ctrl-C ends the measuring; what there is by then is written, and
says so. The whole table takes some 35 minutes with two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import _ps_jobs
from _marks import between_marks, put_between_marks
from _ps_cases import CASES, Case
from _ps_files import TEST_ROWS, TRAIN_ROWS, Files, make
from _ps_jobs import JobError, Result, Side, alone
from _ps_merge import merged
from _ps_tables import ALONE, FAILED, tables

NAME = "ps_wide_deep.py"
QUICK_ROWS = 20_000
READER = "-m trainers.examples.criteo_reader"
Samples = dict[str, dict[str, list[Result]]]


def measure(
    case: Case,
    sides: Sequence[Side],
    files: Files,
    work: Path,
    repeats: int,
    results: dict[str, list[Result]],
) -> None:
    """All repeats of one case, the sides in turn, into `results`."""
    jobs: dict[str, Callable[[], Result]] = {ALONE: lambda: {"speed": alone(case)}}
    for side in sides:
        if case.paddle or side.name != _ps_jobs.PADDLE:
            jobs[side.name] = partial(_ps_jobs.run, side, case, files, work)
    for repeat in range(repeats):
        for name, job in jobs.items():
            try:
                result = job()
                said = ", ".join(f"{metric} {value:,.4g}" for metric, value in result.items())
            except JobError as error:
                result, said = {FAILED: 1.0}, str(error)
            results.setdefault(name, []).append(result)
            sys.stderr.write(f"{case.name}, {name}, {repeat + 1}: {said}\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", metavar="NAMES", type=lambda text: text.split(","), default=names,
                        help=f"of {','.join(names)}")  # fmt: skip
    parser.add_argument("--side", choices=[_ps_jobs.OURS, _ps_jobs.PADDLE], help="measure only one side")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="runs of each side [%(default)s]")
    parser.add_argument("--rows", metavar="N", type=int, default=TRAIN_ROWS, help="examples [%(default)s]")
    parser.add_argument("--quick", action="store_true", help=f"--repeats 1 --rows {QUICK_ROWS}")
    parser.add_argument("--reader", metavar="WORDS", default=READER,
                        help="arguments of our interpreter as pipe_command [%(default)s]")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every figure to this file")
    parser.add_argument(
        "--write", metavar="FILE", type=Path, help="put the tables between the marks in this file"
    )
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()),
                        help="directory for 2 GB of data during the run [%(default)s]")  # fmt: skip
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(names)}")
    if options.quick:
        options.repeats, options.rows = 1, QUICK_ROWS
    if options.write and (options.side or options.rows != TRAIN_ROWS):
        parser.error("--write needs both sides and all examples. Remove --side, --rows and --quick.")
    return options


def _conditions(
    sides: Sequence[Side], files: Files, options: argparse.Namespace, load: float, ended: str
) -> str:
    versions = ", ".join(f"{side.name} {side.version}" for side in sides)
    missing = "" if any(side.name == _ps_jobs.PADDLE for side in sides) else " Paddle was not measured."
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}"
    quick = "" if files.rows == TRAIN_ROWS else " **A quick look: so few examples say little about speed.**"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {machine}, {options.repeats} runs, {files.rows:,} examples, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after. {versions}.{missing}{quick}{ended}\n\n"
        "Cells: median [least-most]; in the second table: ours / Paddle's. s/M: seconds per "
        "million examples.\n"
    )


def _sides(options: argparse.Namespace) -> list[Side]:
    found = [_ps_jobs.ours(options.reader), _ps_jobs.paddle()]
    return [side for side in found if side and options.side in (None, side.name)]


def _measure_all(options: argparse.Namespace, sides: Sequence[Side], files: Files, samples: Samples) -> str:
    """All cases asked for, into `samples`; in words where it was interrupted, or nothing."""
    for case in CASES:
        if case.name not in options.only:
            continue
        results: dict[str, list[Result]] = {}
        try:
            measure(case, sides, files, files.folder.parent, options.repeats, results)
        except KeyboardInterrupt:
            return f' **Broken off at "{case.title}".**'
        finally:
            if results:
                samples[case.name] = results
            if options.json:
                options.json.write_text(json.dumps(samples, indent=1) + "\n")
    return ""


def _into(document: str, text: str, samples: Samples, ended: str) -> str:
    """The document with the new tables; of cases that were not measured the rows that it has stay. Raises
    ValueError where they cannot; but what was broken off takes the place of tables of another form.
    """
    if len(samples) < len(CASES):
        try:
            text = merged(between_marks(document, NAME), text, [case.title for case in CASES])
        except ValueError:
            if not ended:
                raise
    return put_between_marks(document, NAME, text)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options = _arguments()
    if options.write:  # fails now and not in an hour
        nothing: Samples = {name: {} for name in options.only}
        _into(options.write.read_text(), tables(nothing, 0, 0), nothing, "")
    sides, load = _sides(options), os.getloadavg()[0]
    samples: Samples = {}
    with tempfile.TemporaryDirectory(prefix="bench-ps.", dir=options.work) as work:
        files = make(Path(work) / "data", options.rows, min(options.rows, TEST_ROWS))
        ended = _measure_all(options, sides, files, samples)
    found = tables(samples, files.best.auc, files.best.log_loss)
    text = _conditions(sides, files, options, load, ended) + "\n" + found
    print(text)
    if options.write and samples:
        options.write.write_text(_into(options.write.read_text(), text, samples, ended))
    return 1 if ended else 0


if __name__ == "__main__":
    sys.exit(main())

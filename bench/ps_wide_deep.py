"""Wide & deep on parameter servers: ours beside Paddle's, one run, one table.

    python bench/ps_wide_deep.py --write docs/benchmarks.md
    python bench/ps_wide_deep.py --only async,geo --repeats 1 --rows 100000     # a look

1 server and 2 trainers on this machine, 800,000 generated examples, one epoch. Runs of the two sides
alternate. Paddle 2.6.2 is looked for in PADDLE_BIN, the folder of its `fleetrun` and `python`. Speed is that
of the slowest trainer's epoch, without starting up; ours ends when the last gradient has been applied.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import _ps_jobs
from _marks import put_between_marks
from _ps_cases import CASES, Case
from _ps_files import TEST_ROWS, TRAIN_ROWS, Files, make
from _ps_jobs import JobError, Result, Side, alone
from _ps_tables import ALONE, tables

NAME = "ps_wide_deep.py"
READER = "-m trainers.examples.criteo_reader"
Samples = dict[str, dict[str, list[Result]]]


def measure(
    case: Case, sides: Sequence[Side], files: Files, work: Path, repeats: int
) -> dict[str, list[Result]]:
    """All repeats of one case, the sides in turn."""
    results: dict[str, list[Result]] = {ALONE: []}
    for repeat in range(repeats):
        results[ALONE].append({"speed": alone(case)})
        for side in sides:
            if side.name == _ps_jobs.PADDLE and not case.paddle:
                continue
            try:
                result = _ps_jobs.run(side, case, files, work)
            except JobError as error:
                sys.stderr.write(f"{case.name}, {side.name}, {repeat + 1}: {error}\n")
                continue
            results.setdefault(side.name, []).append(result)
            said = ", ".join(f"{name} {value:,.4g}" for name, value in result.items())
            sys.stderr.write(f"{case.name}, {side.name}, {repeat + 1}: {said}\n")
    return results


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--only", metavar="NAMES", type=lambda text: text.split(","), default=names,
                        help=f"of {','.join(names)}")  # fmt: skip
    parser.add_argument("--side", choices=[_ps_jobs.OURS, _ps_jobs.PADDLE], help="measure one side only")
    parser.add_argument("--repeats", metavar="N", type=int, default=3, help="of each side [%(default)s]")
    parser.add_argument("--rows", metavar="N", type=int, default=TRAIN_ROWS, help="examples [%(default)s]")
    parser.add_argument("--reader", metavar="WORDS", default=READER,
                        help="what our interpreter runs as pipe_command [%(default)s]")  # fmt: skip
    parser.add_argument("--json", metavar="FILE", type=Path, help="write every single figure there")
    parser.add_argument("--write", metavar="FILE", type=Path, help="put the tables between the marks in it")
    parser.add_argument("--work", metavar="DIR", type=Path, default=Path(tempfile.gettempdir()),
                        help="where the data is kept meanwhile: 2 GB [%(default)s]")  # fmt: skip
    options = parser.parse_args()
    if unknown := set(options.only) - set(names):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if options.write and (options.only != names or options.side or options.rows != TRAIN_ROWS):
        parser.error("--write is for the whole table: leave --only, --side and --rows away")
    return options


def _conditions(sides: Sequence[Side], files: Files, repeats: int, load: float) -> str:
    versions = ", ".join(f"{side.name} {side.version}" for side in sides)
    missing = "" if any(side.name == _ps_jobs.PADDLE for side in sides) else " Paddle was not measured."
    machine = f"{os.cpu_count()} CPUs, Linux {platform.release()}"
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {machine}, {repeats} runs, {files.rows:,} examples, "
        f"load {load:.1f} before and {os.getloadavg()[0]:.1f} after. {versions}.{missing}\n\n"
        "Cells: median [least-most]; in the second table: ours / Paddle's. s/M: seconds per "
        "million examples.\n"
    )


def _sides(options: argparse.Namespace) -> list[Side]:
    found = [_ps_jobs.ours(options.reader), _ps_jobs.paddle()]
    return [side for side in found if side and options.side in (None, side.name)]


def main() -> int:
    options = _arguments()
    document = options.write.read_text() if options.write else ""
    if options.write:
        put_between_marks(document, NAME, "")  # fails now and not in an hour
    sides, load = _sides(options), os.getloadavg()[0]
    samples: Samples = {}
    with tempfile.TemporaryDirectory(prefix="bench-ps.", dir=options.work) as work:
        files = make(Path(work) / "data", options.rows, min(options.rows, TEST_ROWS))
        for case in CASES:
            if case.name in options.only:
                samples[case.name] = measure(case, sides, files, Path(work), options.repeats)
            if options.json:  # after each: a long run that breaks off has not been for nothing
                options.json.write_text(json.dumps(samples, indent=1) + "\n")
    found = tables(samples, files.best.auc, files.best.log_loss)
    text = _conditions(sides, files, options.repeats, load) + "\n" + found
    print(text)
    if options.write:
        options.write.write_text(put_between_marks(document, NAME, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())

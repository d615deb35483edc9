"""`python -m fleetrun.stacks`: the process that a launcher starts when its job hangs. One line of JSON in
(whose stacks, why, how long it may take), the stacks into the logs, one line of JSON out (where all are).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from fleetrun.stacks.collect import Collection, collect, find_pyspy
from fleetrun.stacks.frames import Target, groups
from fleetrun.stacks.text import clean, write_into_logs

MOST_GROUPS = 12


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.stdin.readline())
    targets = [Target.of_json(each) for each in asked["targets"]]
    found = collect(targets, float(asked["within"]), find_pyspy())
    written = write_into_logs(found.processes, str(asked["why"]), time.time())
    sys.stdout.write(json.dumps({"stacks": summary(found), "written": written}) + "\n")
    sys.stdout.flush()


def summary(found: Collection) -> list[str]:
    """A line for each place where processes are, the outlier first."""
    there = groups(found.processes)
    lines = [clean(f"{group.who}: {group.where}") for group in there[:MOST_GROUPS]]
    if len(there) > MOST_GROUPS:
        lines.append(f"and {len(there) - MOST_GROUPS} places more")
    return [*lines, *([found.hint] if found.hint else [])]


if __name__ == "__main__":
    main()

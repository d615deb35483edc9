"""Measure what the tests cost, by file and by group: CPU seconds and imports of torch.

    make test-costs    # what `make test` runs; prints both tables and compares them with tests/costs.json

The CPU seconds of a test are those of its process and of the processes that it started. An import of torch in
any of them counts; it costs a second. The number of imports is the same on every machine, so `make test`
compares it. CPU seconds depend on the machine, so only `make test-costs` compares them. `--costs write`
accepts a change.
"""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

THOROUGH = Path(__file__).resolve().parents[1] / "thorough.txt"
BUDGET = Path(__file__).resolve().parents[1] / "costs.json"
GROWTH = 1.2
SPARE = {"cpu": 8.0, "torch": 8}
"""What a group may have beyond that. A small one must not fail for one test, and the forkers of the workers
import torch in the group that comes first.
"""
DEAREST = 20
Cost = dict[str, float]


class Costs:
    """In a worker it measures; in the process that controls the run it adds up and compares."""

    def __init__(self, config: pytest.Config) -> None:
        self._mode: str = config.getoption("--costs")
        self._root = Path(__file__).resolve().parents[1]
        self._files: dict[str, Cost] = {}
        self._works = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
        self.over: list[str] = []
        if self._works:
            handle, name = tempfile.mkstemp(prefix="fleettest-imports-")
            os.close(handle)
            self._imports = Path(name)
            os.environ["FLEETTEST_IMPORTS"] = (
                name  # tests/support/child/sitecustomize.py adds a byte for each
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = self._now()
        result = yield
        after = self._now()
        file = str(item.path.relative_to(self._root))
        _add(self._files, file, {"tests": 1, **{name: after[name] - before[name] for name in after}})
        return result

    def _now(self) -> Cost:
        return {"cpu": _cpu(), "torch": self._imports.stat().st_size}

    def pytest_testnodedown(self, node: Any) -> None:
        for file, cost in getattr(node, "workeroutput", {}).get("costs", {}).items():
            _add(self._files, file, cost)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = self._files
        if self._works:
            self._imports.unlink(missing_ok=True)
        if hasattr(session.config, "workeroutput"):
            return
        if self._mode == "write":
            if session.exitstatus:
                return
            rows = json.loads(BUDGET.read_text()) | {name: _rounded(cost) for name, cost in self.groups()}
            lines = [f"  {json.dumps(name)}: {json.dumps(cost)}" for name, cost in rows.items()]
            BUDGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        else:
            measures = ["torch"] if self._mode == "imports" else ["cpu", "torch"]
            self.over = beyond(dict(self.groups()), json.loads(BUDGET.read_text()), measures)
        if self.over and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def groups(self) -> list[tuple[str, Cost]]:
        found: dict[str, Cost] = {}
        for file, cost in self._files.items():
            _add(found, group(file), cost)
        return sorted(found.items(), key=lambda row: -row[1]["cpu"])

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._mode != "imports":
            dear = sorted(self._files.items(), key=lambda row: -row[1]["cpu"])[:DEAREST]
            for title, rows in (("costs by group", self.groups()), (f"the {DEAREST} dearest files", dear)):
                terminalreporter.section(title)
                terminalreporter.write_line(" CPU s  torch  tests")
                for name, cost in rows:
                    terminalreporter.write_line(
                        f"{cost['cpu']:6.1f} {cost['torch']:6.0f} {cost['tests']:6.0f}  {name}"
                    )
            every = [sum(cost[name] for cost in self._files.values()) for name in ("cpu", "torch", "tests")]
            terminalreporter.write_line("{:6.1f} {:6.0f} {:6.0f}  in all".format(*every))
        for line in self.over:
            terminalreporter.write_line(f"{line}: see tests/support/costs.py", red=True)


def listed_as_thorough() -> tuple[str, ...]:
    """Return how the names of the tests begin that `make test` leaves out."""
    lines = map(str.strip, THOROUGH.read_text().splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))


def beyond(found: dict[str, Cost], budget: dict[str, Cost], measures: list[str]) -> list[str]:
    """One line for each group that costs a fifth more than its budget. A group without a budget has none."""
    lines = []
    for name, cost in sorted(found.items()):
        for measure in measures:
            allowed = budget.get(name, {}).get(measure, 0.0)
            if cost[measure] > allowed * GROWTH + SPARE[measure]:
                what = "CPU seconds" if measure == "cpu" else "imports of torch"
                lines.append(f"tests of {name}: {cost[measure]:.0f} {what}, the budget is {allowed:.0f}")
    return lines


def group(file: str) -> str:
    """`e2e/test_top.py` -> `e2e`; `trainers/ps/test_saving.py` -> `trainers/ps`."""
    parts = file.split("/")
    return "/".join(parts[: min(len(parts) - 1, 2 if parts[0] == "trainers" else 1)]) or "top"


def _rounded(cost: Cost) -> Cost:
    return {"cpu": round(cost["cpu"], 1), "torch": int(cost["torch"])}


def _add(table: dict[str, Cost], name: str, cost: Cost) -> None:
    row = table.setdefault(name, dict.fromkeys(("cpu", "torch", "tests"), 0.0))
    for measure, value in cost.items():
        row[measure] += value


def _cpu() -> float:
    """CPU seconds of this process, of the children that have ended, and of those that run, with their own."""
    total = sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        try:
            times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        except (
            FileNotFoundError,
            ProcessLookupError,
        ):  # it has ended; its time is missing until it is waited for
            continue
        total += sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
    return total

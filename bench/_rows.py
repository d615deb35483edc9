"""The rows of the table: what is shown, in which unit, and what is wanted of the launcher. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

Result = dict[str, float | str]
Samples = dict[str, dict[str, list[Result]]]  # scenario -> launcher -> a result per run
Limit = float | Callable[[Samples], float | None]


@dataclass(frozen=True, slots=True)
class Row:
    """`unit` says how the values of the runs become a cell: ms, s, MB and % by median and range, "left" by
    range, "of" by how many runs were right, "code" by naming them.
    """

    scenario: str
    metric: str
    title: str
    unit: str
    wanted: str = ""
    limit: Limit | None = None


def median(samples: Samples, scenario: str, metric: str, launcher: str) -> float | None:
    values = [result.get(metric) for result in samples.get(scenario, {}).get(launcher, [])]
    numbers = [value for value in values if isinstance(value, float)]
    return statistics.median(numbers) if numbers else None


def _as_honcho(samples: Samples, n: int) -> float | None:
    whole = median(samples, f"empty{n}", "whole", "honcho")
    delay = median(samples, f"start{n}", "end", "honcho")
    return None if whole is None or delay is None else 1.3 * (whole - delay)


def _as_the_shell(samples: Samples) -> float | None:
    wall = median(samples, "output", "wall", "bash")
    return None if wall is None else 1.03 * wall


_HONCHO = "<= 1.3 x (honcho less its exit delay)"
_ALL = "every run"

ROWS = (
    Row("interpreter", "start", "no launcher, only the interpreter of the workers: to its first line", "ms"),
    Row("start1", "first", "start to first line of first child, 1 process", "ms", "<= 90", 90),
    Row("start8", "first", "the same, 8 processes", "ms", "<= 90", 90),
    Row("start32", "first", "the same, 32 processes", "ms", "<= 90", 90),
    Row("empty8", "whole", "empty script, whole run, 8 processes", "ms", _HONCHO, partial(_as_honcho, n=8)),
    Row("empty32", "whole", "the same, 32 processes", "ms", _HONCHO, partial(_as_honcho, n=32)),
    Row("start8", "end", "last child's exit to launcher's exit, 8 processes", "ms", "<= 15", 15),
    Row("start32", "end", "the same, 32 processes", "ms", "<= 15", 15),
    Row("command", "help", "`--help`", "ms", "<= 120", 120),
    Row("command", "usage", "usage error", "ms", "<= 120", 120),
    Row("command", "usage code", "its exit code", "code", "2", 2),
    Row("start8", "rss", "memory of the launcher and its helpers, 8 processes", "MB", "<= 40", 40),
    Row("start8", "processes", "how many processes these are", ""),
    Row("fail4", "told", "one of 4 exits with 3: the others have SIGTERM", "ms", "<= 10", 10),
    Row("fail4", "exit", "the same: launcher has exited", "ms", "<= 60", 60),
    Row("fail4", "code", "its exit code", "code", "3", 3),
    Row("fail64", "exit", "one of 64 exits with 3: launcher has exited", "ms", "<= 150", 150),
    Row("die-kill", "left", "SIGKILL to the launcher: processes after 1 s", "left", "0", 0),
    Row("die-hup", "left", "SIGHUP: processes after 1 s", "left", "0", 0),
    Row("die-quit", "left", "SIGQUIT: processes after 1 s", "left", "0", 0),
    Row("die-raise", "left", "an exception inside the launcher: processes after 1 s", "left", "0", 0),
    Row("die-below", "left", "SIGKILL to the process below the guardian: after 1 s", "left", "0", 0),
    Row("daemon", "left", "2 workers each leave a `setsid` daemon: 1 s after the end", "left", "0", 0),
    Row("stubborn", "exit", "one of 8 fails, 7 ignore SIGTERM (ours: --stop_timeout 2)", "s", "<= 2.2", 2.2),
    Row("stubborn", "grandchildren", "the same: children of those 7 that are left", "left", "0", 0),
    Row("stop-term", "out", "SIGTERM to the launcher: all out", "ms", "<= 40", 40),
    Row("stop-term", "code", "its exit code", "code", "143", 143),
    Row("stop-int", "out", "SIGINT: all out", "ms", "<= 40", 40),
    Row("stop-int", "code", "its exit code", "code", "130", 130),
    Row("stop-hup", "out", "SIGHUP: all out", "ms", "<= 40", 40),
    Row("stop-hup", "code", "its exit code", "code", "129", 129),
    Row("blame5", "named", "others fail 5 ms later: the report names the first", "of", _ALL, 1),
    Row("blame5", "traceback", "the same: it shows the first one's traceback", "of", _ALL, 1),
    Row("blame50", "named", "others fail 50 ms later: the report names the first", "of", _ALL, 1),
    Row("blame50", "traceback", "the same: it shows the first one's traceback", "of", _ALL, 1),
    Row("restart", "fresh", "crash to first line of the restarted processes", "ms", "<= 60", 60),
    Row("output", "wall", "4 print 200 MB each to files", "s", "<= 1.03 x the shell", _as_the_shell),
    Row("output", "cpu", "the same: launcher's CPU", "%", "<= 1", 1),
    Row("idle", "cpu", "CPU of an idle launcher, 64 processes, 1 minute", "s", "<= 0.05", 0.05),
)

"""The tables of a running job, as `fleetrun tables` lists them.

They are sums over the reports of its servers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.text import Text

from fleetrun.aliases import Fields, Texts
from fleetrun.commands.output import columns, table
from fleetrun.commands.status import NodeFilter, Status, newest_answer
from fleetrun.console.text import printable
from fleetrun.control.client import Running
from fleetrun.control.node_status import unfolded
from fleetrun.doctor.facts import figure
from fleetrun.envs.settings.parsing import byte_size, plural
from fleetrun.record.journal import objects_in

COLUMNS = {
    "table": "TABLE",
    "rows": "ROWS:>",
    "memory": "MEMORY:>8",
    "on_disk": "ON DISK:>5",
    "new": "NEW:>7",
    "candidates": "CANDIDATES:>3",
    "refused": "REFUSED:>5",
    "evicted": "EVICTED:>6",
    "removed": "REMOVED:>4",
    "pulls_s": "PULLS/S:>8",
    "pushes_s": "PUSHES/S:>8",
    "keys_per_pull": "KEYS/PULL:>6",
    "missed": "NO ROW:>6",
    "skew": "SKEW:>5",
    "ids_hour": "IDS/HOUR:>4",
    "hottest": "HOTTEST KEY:3",
    "gradient_norm": "GRADIENT:>4",
    "value_norm": "VALUE:>4",
    "zeros": "ZEROS:>3",
    "not_finite": "NOT FINITE:>4",
}

_HOT = 20
_FIGURES = ("pulls_s", "pushes_s", "keys_per_pull", "gradient_norm", "value_norm")


def live_tables(job: Running) -> Status:
    """Return `tables_in` the newest answer of the launcher."""
    status = unfolded(newest_answer(job, NodeFilter(whole=True)))
    return tables_in({**status, "job": job.job, "pod": job.pod})


def tables_in(status: Fields) -> Status:
    """Return the report of each server, and for each table the sums over all servers with their ratios.

    `silent` lists the servers that have sent no report.
    """
    nodes = objects_in(status, "nodes") or [dict(status)]
    there = (each for node in nodes for each in objects_in(node, "containers"))
    servers = [each for each in there if each.get("role") == "ps"]
    reporting = [each for each in servers if isinstance(each.get("tables"), dict)]
    reporting.sort(key=lambda each: int(each["rank"]))
    names = dict.fromkeys(name for each in reporting for name in each["tables"])
    return {
        "job": status.get("job"),
        "pod": status.get("pod"),
        "servers": [{"server": each["rank"], **(each.get("server") or {})} for each in reporting],
        "silent": sorted(int(each["rank"]) for each in servers if each not in reporting),
        "tables": [_table(name, reporting) for name in sorted(names)],
    }


def _table(name: str, servers: Sequence[Fields]) -> Status:
    here = [{"server": each["rank"], **each["tables"][name]} for each in servers if name in each["tables"]]
    names = dict.fromkeys(what for each in here for what in each if what != "server")
    numbers = {
        what: _mean(what, here)
        if what.endswith(("_norm", "_zeros", "_not_finite"))  # means over rows cannot be added up
        else sum(each.get(what, 0) for each in here)
        for what in names
    }
    hot = [
        {"key": int(key), "share": share, "server": each["rank"]}
        for each in servers
        for key, share in ((each.get("hot") or {}).get(name) or {}).items()
    ]
    hot.sort(key=lambda each: -each["share"])
    return {"table": name, **numbers, **_ratios(numbers, here), "hot_keys": hot[:_HOT], "by_server": here}


def _mean(what: str, here: Sequence[Status]) -> float | None:
    """Return the mean over servers, weighted by rows."""
    some = [(each[what], each.get("rows", 0)) for each in here if what in each]
    rows = sum(weight for _, weight in some)
    return sum(number * weight for number, weight in some) / rows if rows else None


def _ratios(sums: Status, here: Sequence[Status]) -> Status:
    """Compute ratios of the sums.

    `skew`: the largest load of a server as a multiple of an equal share. The load is the keys pulled per
    second, or the rows if nothing is pulled.
    """
    pulled = sums.get("pulled_keys_s", 0)
    loads = [each.get("pulled_keys_s" if pulled else "rows", 0) for each in here]
    return {
        "keys_per_pull": _ratio(pulled, sums.get("pulls_s", 0)),
        "keys_per_push": _ratio(sums.get("pushed_keys_s", 0), sums.get("pushes_s", 0)),
        "miss_ratio": _ratio(sums.get("missed_keys_s", 0), pulled),
        "skew": _ratio(max(loads) * len(here), sum(loads)) if len(here) > 1 else None,
    }


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def heading(found: Status) -> str:
    """Summarize the servers, such as `ads (pod abcdef): 2 servers, step 300, log 3.1 MiB, oldest snapshot 12
    s ago`.
    """
    servers = found["servers"]
    parts = [plural(len(servers), "server")]
    if steps := [each["step"] for each in servers if "step" in each]:
        parts.append(f"step {_span(steps)}")
    if logs := [each["log_bytes"] for each in servers if "log_bytes" in each]:
        parts.append(f"log {byte_size(sum(logs))}")
    if times := [each["snapshot_time"] for each in servers if "snapshot_time" in each]:
        age = max(0.0, time.time() - min(times))
        parts.append(f"{'oldest ' if len(times) > 1 else ''}snapshot {age:.0f} s ago")
    if stale := [each for each in servers if "stale_steps_p50" in each]:
        parts.append(f"pushes {_staleness(stale)}")
    if found["silent"]:
        parts.append(f"no report from server {', '.join(map(str, found['silent']))}")
    return printable(f"{found['job']} (pod {found['pod']}): {', '.join(parts)}")


def _staleness(servers: Sequence[Status]) -> str:
    """Describe the server with the stalest pushes, such as `2 steps and 31 ms stale (p99: 5 and 80 ms)`."""
    most = {name: max(each[name] for each in servers) for name in servers[0] if name.startswith("stale_")}
    steps = "step" if most["stale_steps_p50"] == 1 else "steps"
    return (
        f"{figure(most['stale_steps_p50'])} {steps} and {figure(most['stale_ms_p50'])} ms stale "
        f"(p99: {figure(most['stale_steps_p99'])} and {figure(most['stale_ms_p99'])} ms)"
    )


def _span(steps: Sequence[float]) -> str:
    first, last = f"{min(steps):,.0f}", f"{max(steps):,.0f}"
    return first if first == last else f"{first} to {last}"


def lines(found: Status, width: int | None) -> list[Text]:
    """Return a line of titles, and a line for each table."""
    return lines_of(COLUMNS, list(map(shown, found["tables"])), width)


def lines_of(titles: Texts, tables: Sequence[Fields], width: int | None) -> list[Text]:
    """Return a line of titles, and a line for each table with the fields that have a title. `titles`: see
    `output.columns`.
    """
    rows = [[written(each.get(name)) for name in titles] for each in tables]
    return table(columns(*titles.values()), rows, width)


def written(value: str | float | None) -> str:
    """Format a value for a cell."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def shown(one: Status) -> Status:
    """Turn a table into the fields of COLUMNS."""
    hot = one["hot_keys"]
    counts = ("on_disk", "candidates", "refused", "evicted", "removed")
    return {
        **one,
        **{name: int(one[name]) if one.get(name) else None for name in counts},
        "rows": int(one.get("rows", 0)),
        "new": int(one.get("new", 0)),
        "memory": byte_size(one.get("bytes", 0)),
        **{name: None if one.get(name) is None else figure(one[name]) for name in _FIGURES},
        "missed": _percent(one["miss_ratio"]),
        "zeros": _percent(one.get("value_zeros")),
        "not_finite": _percent(one.get("value_not_finite") or None),
        "hottest": f"{hot[0]['key']} ({_percent(hot[0]['share'])})" if hot else None,
        "skew": None if one["skew"] is None else f"{one['skew']:.2f}",
    }


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{100 * share:.3g}%"

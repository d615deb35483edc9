"""The tables of a job out of what its servers have reported."""

import time
from pathlib import Path
from typing import Any

from fleetrun.commands.live_tables import heading, live_tables, shown
from fleetrun.control.client import Running


def server(rank: int, **fields: Any) -> dict[str, Any]:
    return {"name": f"ps.{rank}", "role": "ps", "rank": rank, **fields}


def found(*containers: dict[str, Any]) -> dict[str, Any]:
    status = {"containers": [{"name": "trainer.0", "role": "trainer", "rank": 0}, *containers]}
    job = Running(job="ads", pod="abcdef", log_dir=Path(), socket=Path(), pid=1, status=status)
    return live_tables(job)


BUSY = {"rows": 300, "bytes": 1 << 20, "pulls_s": 10.0, "pulled_keys_s": 900.0, "missed_keys_s": 9.0}
CALM = {"rows": 100, "bytes": 1 << 20, "pulls_s": 10.0, "pulled_keys_s": 100.0, "missed_keys_s": 1.0}


def test_numbers_are_summed_over_servers_and_means_weighed_by_rows():
    document = found(
        server(1, tables={"user": {**CALM, "value_norm": 4.0}}, hot={"user": {"7": 0.5}}),
        server(0, tables={"user": {**BUSY, "value_norm": 2.0}}, hot={"user": {"9": 0.25, "8": 0.75}}),
    )
    (user,) = document["tables"]
    assert (user["rows"], user["bytes"], user["pulls_s"]) == (400, 2 << 20, 20)
    assert (user["keys_per_pull"], user["miss_ratio"]) == (50, 0.01)
    assert user["value_norm"] == (300 * 2 + 100 * 4) / 400
    assert user["skew"] == 1.8, "900 of 1000 keys are nine tenths, and not a half"
    assert [(each["key"], each["server"]) for each in user["hot_keys"]] == [(8, 0), (7, 1), (9, 0)]
    assert [each["server"] for each in user["by_server"]] == [0, 1]
    line = shown(user)
    assert (line["memory"], line["missed"], line["skew"]) == ("2 MiB", "1%", "1.80")
    assert line["hottest"] == "8 (75%)"


def test_a_table_without_requests():
    document = found(server(0, tables={"user": {"rows": 3, "pulled_keys_s": 0.0}}), server(1, tables=None))
    (user,) = document["tables"]
    assert (user["keys_per_pull"], user["miss_ratio"], user["skew"]) == (None, None, None)
    assert document["silent"] == [1]
    assert shown(user)["hottest"] is None


def test_the_first_line_has_the_servers(monkeypatch):
    stale = {"stale_steps_p50": 1.0, "stale_steps_p99": 4.0, "stale_ms_p50": 12.0, "stale_ms_p99": 80.0}
    staler = {**stale, "stale_steps_p99": 7.0}
    one = {"step": 10, "log_bytes": 1024, "snapshot_time": 70.0, **stale}
    other = {"step": 1200, "log_bytes": 1024, "snapshot_time": 95.0, **staler}
    document = found(server(0, tables={}, server=one), server(1, tables={}, server=other), server(2))
    monkeypatch.setattr(time, "time", lambda: 100.0)
    assert heading(document) == (
        "ads (pod abcdef): 2 servers, step 10 to 1,200, log 2 KiB, oldest snapshot 30 s ago, pushes 1 step "
        "and 12 ms stale (p99: 7 and 80 ms), no report from server 2"
    )

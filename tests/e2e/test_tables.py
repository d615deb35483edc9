"""The tables of a job that runs, as `fleetrun tables` and Prometheus show them."""

import json
import re
import urllib.request
from typing import Any

import pytest

from tests.support.command import Fleetrun
from tests.support.top_view import ESCAPE, View
from tests.support.traces import wait_until

SCRIPT = """
import torch
from trainers import fleet
from trainers.ps import CountFilterEntry, SparseEmbedding, Uniform

fleet.init()
torch.set_num_threads(1)
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
strategy.ps_configs = {"durability": "log", "log_fsync": "no", "snapshot_interval_s": 0.1}
plain = SparseEmbedding(4, init=Uniform(0.5, 0.5))
filtered = SparseEmbedding(4, init=Uniform(0.5, 0.5), entry=CountFilterEntry(3))
strategy.sparse_table_configs = {"1.weight": {"statistics": True}}
model = fleet.distributed_model(torch.nn.ModuleList([plain, filtered]))
optimizer = fleet.distributed_optimizer(torch.optim.Adagrad(model.parameters(), lr=1.0), strategy)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    for step in range(4):
        keys = torch.arange(40) + 10 * step
        (plain(keys).sum() + filtered(keys[:20]).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        plain.eval()(torch.arange(1000, 1100))  # makes no rows, and does not count
    fleet.barrier_worker()
    tell("trained")
    wait_for_go()
    fleet.stop_worker()
"""


def tables(fleetrun: Fleetrun, *words: str) -> Any:
    asked = fleetrun.run("tables", *words, "--json")
    return json.loads(asked.out) if asked.code == 0 else asked


def row_of(fleetrun: Fleetrun, table: str, *keys: int) -> Any:
    asked = fleetrun.run("tables", "show", table, *map(str, keys), "--json")
    assert asked.code == 0, asked
    return json.loads(asked.out)["rows"]


@pytest.mark.slow
def test_the_tables_of_a_job_are_listed_and_exported(fleetrun: Fleetrun):
    script = fleetrun.script(SCRIPT)
    words = ("--server_num=2", "--trainer_num=1", "--metrics_port=0", "--job_id=ads")
    launch = fleetrun.start(*words, script, env={"FLEETRUN_TOKEN": "the secret of this job"})
    launch.until_told("trained", 1)
    found: Any = None

    def told() -> bool:
        nonlocal found
        found = tables(fleetrun, "ads")
        return isinstance(found, dict) and [each["pushes"] for each in found["tables"]] == [8, 8]

    wait_until(told, lambda: str(found))
    assert [each["server"] for each in found["servers"]] == [0, 1]
    assert found["silent"] == []
    plain, filtered = found["tables"]
    assert (plain["table"], plain["rows"], plain["new"]) == ("0.weight", 70, 70)
    assert plain["pulls"] >= 8, "a trainer repeats one if a server takes long"
    assert plain["pulled_keys"] >= 160
    assert (plain["missed_keys"], plain["pushed_keys"]) == (70, 160)
    assert plain["bytes"] > 70 * 8 * 4
    assert [each["server"] for each in plain["by_server"]] == [0, 1]
    assert sum(each["rows"] for each in plain["by_server"]) == 70
    # Keys 0-19, 10-29, 20-39 and 30-49: none is pulled three times.
    assert (filtered["rows"], filtered["new"], filtered["candidates"]) == (0, 0, 50)
    assert filtered["admitted"] == 0
    assert filtered["refused"] >= 80
    assert all(each["log_bytes"] > 0 for each in found["servers"])
    assert all(each["stale_steps_p50"] == 0 for each in found["servers"]), "there is one trainer"
    assert all(each["stale_ms_p99"] > 0 for each in found["servers"])

    view = View(fleetrun)
    view.until_text("trainer 0 running", "server 1 running")
    view.type_in("t")
    view.until_text("ads (", "TABLE", "0.weight 70", "1.weight 0")
    view.type_in(ESCAPE)
    view.until_text("server 1 running")
    view.quit()

    shown = fleetrun.run("tables")
    heading, titles, first, _ = shown.out.splitlines()
    assert heading.startswith("ads (")
    assert "2 servers, step 4, log" in heading
    assert titles.split()[:4] == ["TABLE", "ROWS", "MEMORY", "NEW"]
    assert first.split()[:2] == ["0.weight", "70"]
    status = json.loads(fleetrun.run("status", "--json").out)
    by_name = {each["name"]: each["tables"] for each in status["containers"]}
    assert by_name["trainer.0"] is None
    assert sum(by_name[name]["0.weight"]["rows"] for name in ("ps.0", "ps.1")) == 70

    assert {each["state"] for each in row_of(fleetrun, "1.weight", 25, 999)} == {"candidate", "no row"}
    (row,) = row_of(fleetrun, "0.weight", 25)
    assert row["state"] == "row"
    after_three_pushes_of_ones = 0.5 - 1 - 2**-0.5 - 3**-0.5
    assert row["values"] == pytest.approx([after_three_pushes_of_ones] * 4)
    assert row["optimizer"] == [[3.0] * 4]
    again = tables(fleetrun, "ads")["tables"][1]
    assert (again["candidates"], again["refused"]) == (filtered["candidates"], filtered["refused"])
    text = fleetrun.run("tables", "show", "ads", "0.weight", "25").out
    assert text.startswith(f"25: row (server {row['server']})\n  values: -1.78446 ")
    unknown = fleetrun.run("tables", "show", "0.weigth", "1")
    assert unknown.code == 2
    assert "no sparse table '0.weigth'; did you mean '0.weight'" in " ".join(unknown.err.split())

    launch.until_err("/metrics")
    url = re.findall(r"Metrics: (\S+)", launch.err)[0]
    with urllib.request.urlopen(url, timeout=60) as answer:
        metrics = answer.read().decode()
    pushed = re.findall(
        r'fleetrun_table_pushed_keys_total\{rank="\d",role="ps",table="0.weight"\} (\S+)', metrics
    )
    assert sum(map(float, pushed)) == 160
    assert len(re.findall(r"fleetrun_server_log_bytes\{", metrics)) == 2
    launch.go()
    assert launch.wait() == 0, launch


def test_what_is_neither_a_job_nor_a_save(fleetrun: Fleetrun):
    asked = fleetrun.run("tables", "nothing")
    assert asked.code == 1
    assert "nothing is neither a directory or URL with saved tables, nor a job" in asked.err
    assert fleetrun.run("tables").code == 1


@pytest.mark.slow
def test_a_job_without_tables_says_so(fleetrun: Fleetrun):
    launch = fleetrun.start(fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\n"))
    launch.until_ready(1)
    asked = fleetrun.run("tables")
    assert asked.code == 1
    assert "has reported no tables" in asked.err
    launch.go()
    assert launch.wait() == 0

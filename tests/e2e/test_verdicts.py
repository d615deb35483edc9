"""A job that makes no progress: which rank the others wait for, at its end and while it runs."""

import json
import os
import signal
import sys
import time

import pytest

from tests.e2e.test_asking import answered
from tests.support.command import Fleetrun, Launch
from tests.support.traces import wait_until

pytestmark = pytest.mark.slow

TWO = ("--nproc_per_node", "2", "--max_restart", "0", "--stop_timeout", "1")
JOIN = """
import datetime, threading, torch, torch.distributed as dist
meet(2)  # the timeout is not for the import of torch
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={}))
values = torch.ones(4)
dist.all_reduce(values)
"""
SLOW = """
def load_batch():
    wait_for_go()  # the slow disk
if RANK == 1:
    load_batch()
dist.all_reduce(values)
"""


BEATS = """
import threading
gone = threading.Event()
def beat():  # a start is not a hang, however busy the machine is
    while not gone.wait(0.5):
        print("starting", flush=True)
threading.Thread(target=beat).start()
"""
STOPS = """
tell("ready", os.getpid())
wait_for_go()
gone.set()
if RANK == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
dist.all_reduce(values)
"""


def verdict_of(fleetrun: Fleetrun) -> dict[str, object]:
    (journal,) = fleetrun.logs("*.events.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()]
    (verdict,) = [each for each in events if each["event"] == "verdict"]
    return verdict


def cause_in(launch: Launch) -> str:
    """The first paragraph of the report."""
    return " ".join(launch.err.partition("\nCause: ")[2].partition("\nFirst failure")[0].split())


def test_the_report_names_the_rank_that_did_not_come_and_no_victim(fleetrun: Fleetrun):
    launch = fleetrun.start(*TWO, fleetrun.script(JOIN.format(3) + SLOW))
    assert launch.wait() == 1, launch
    cause = cause_in(launch)
    assert cause.startswith("trainer 1 has not come to all_reduce #2, in which trainer 0 waits"), launch
    assert "load_batch" in cause
    assert "the slow disk" in cause
    verdict = verdict_of(fleetrun)
    assert (verdict["kind"], verdict["ranks"]) == ("not entered", [1])
    assert "Cause: trainer 1 has not come" in fleetrun.run("report").out


WATCHDOG = """
if RANK == 0:  # as torch 2.11 has written it, and ended the process in which no Python runs any more
    said = "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=2, OpType=ALLREDUCE, "
    said += "NumelIn=4, NumelOut=4, Timeout(ms)=4000) ran for 4050 milliseconds before timing out."
    stamp = "[rank0]:[E1126 18:26:55.257028174 ProcessGroupNCCL.cpp:"
    sys.stderr.write(f"{stamp}689] {said}\\n{stamp}2303] [PG ID 0 PG GUID 0(default_pg) Rank 0]  failure\\n")
    sys.stderr.write("frame #0: c10::Error::Error() + 0x9d (0x7f in libc10.so)\\n" * 40)
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)
load_batch()
"""


def test_the_report_names_the_rank_for_which_nccls_watchdog_has_ended_the_others(fleetrun: Fleetrun):
    begin = "import os, signal, sys\ndef load_batch():\n    wait_for_go()\n"
    launch = fleetrun.start(*TWO, fleetrun.script(begin + JOIN.format(60) + WATCHDOG))
    assert launch.wait() == 134, launch
    cause = cause_in(launch)
    assert cause.startswith("trainer 1 has not come to all_reduce #2, in which trainer 0 waits"), launch
    assert "load_batch" in cause


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "fleetrun stop", "--timeout"])
def test_a_stop_names_the_rank_for_which_the_others_wait(fleetrun: Fleetrun, end: str):
    """However it is stopped: that is lost with the processes."""
    limit = ("--timeout", "45") if end == "--timeout" else ()
    launch = fleetrun.start(
        *TWO,
        *limit,
        fleetrun.script(f"{JOIN.format(600)}print('joined', flush=True)\ntell('ready', os.getpid())\n{SLOW}"),
    )
    launch.until_ready(2)
    logs = fleetrun.logs("*.trainer.*.log")
    wait_until(lambda: all(time.time() - each.stat().st_mtime > 4 for each in logs), lambda: "silence")
    if end == "fleetrun stop":
        assert fleetrun.run("stop").code == 0
    elif end != "--timeout":
        launch.send(getattr(signal, end))
    launch.wait()
    assert "trainer 1 has not come to all_reduce #2, in which trainer 0 waits" in cause_in(launch), launch
    said = {"SIGINT": "interrupted", "fleetrun stop": "asked to end by `fleetrun stop`"}.get(end, end)
    assert said in launch.err.rstrip().splitlines()[-1]
    assert verdict_of(fleetrun)["ranks"] == [1]
    assert "load_batch" in fleetrun.run("report").out


def test_without_the_probe_the_report_is_of_the_failure_alone(fleetrun: Fleetrun):
    launch = fleetrun.start(*TWO, "--probe", "off", fleetrun.script(JOIN.format(2) + SLOW))
    assert launch.wait() == 1, launch
    assert "First failure: trainer 0 exited with code 1" in launch.err
    assert "Cause:" not in launch.err


def test_the_report_shows_two_collectives_that_do_not_belong_together(fleetrun: Fleetrun):
    other = "dist.broadcast(torch.ones(9), 0) if RANK == 1 else dist.all_reduce(values)\ndist.barrier()"
    launch = fleetrun.start(*TWO, fleetrun.script(JOIN.format(3) + other))
    assert launch.wait() == 1, launch
    cause = cause_in(launch)
    assert "broadcast" in cause, launch
    assert "where trainer 0 called all_reduce" in cause or "where trainer 1 called broadcast" in cause
    assert verdict_of(fleetrun)["kind"] == "mismatch"


def test_a_hang_names_the_rank_that_was_stopped(fleetrun: Fleetrun):
    script = fleetrun.script(BEATS + JOIN.format(1000) + STOPS)
    launch = fleetrun.start(*TWO, "--hang_timeout", "4", script)
    launch.until_ready(2)
    launch.go()
    assert launch.wait() == 124, launch
    verdict = verdict_of(fleetrun)
    assert (verdict["kind"], verdict["ranks"]) == ("stopped", [1])
    assert "Cause: trainer 1 has not come to all_reduce #2" in launch.err, launch
    assert "stopped by a signal" in launch.err


def test_the_report_names_the_rank_that_left_its_loop_early(fleetrun: Fleetrun):
    """With success: it had fewer batches."""
    loop = "for step in range(2 if RANK == 1 else 3):\n    dist.all_reduce(values)"
    launch = fleetrun.start(*TWO, fleetrun.script(JOIN.format(3) + loop))
    assert launch.wait() == 1, launch
    verdict = verdict_of(fleetrun)
    assert (verdict["kind"], verdict["ranks"]) == ("left early", [1]), launch
    assert "all_reduce #4, in which trainer 0 waited" in cause_in(launch), launch
    told = json.loads(fleetrun.run("report", "--json").out)
    assert told["verdict"]["ranks"] == [1], told


AGAIN = """
for step in range(6):
    dist.broadcast(values, 0)
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet", rank=RANK, world_size=2)
for step in range(5):  # Gloo counts these too, the others do not make them
    (dist.recv if RANK else dist.send)(values, 1 - RANK)
values = values if RANK else values.view(2, 2)
for step in range(4):
    if RANK == 1 and step == 2:
        tell("ready", os.getpid())
        wait_for_go()  # the slow disk
    dist.all_reduce(values)
"""


def test_groups_of_the_same_name_are_told_apart(fleetrun: Fleetrun):
    """A script may destroy its groups and join again: numbers begin anew. Of other calls and shapes, too."""
    launch = fleetrun.start(*TWO, fleetrun.script(JOIN.format(1000) + AGAIN))
    launch.until_ready(1)
    said = "trainer 1 has not come to all_reduce #3, in which trainer 0 waits"
    told: list[Launch] = []
    wait_until(lambda: told.append(answered(fleetrun, "why")) or said in told[-1].out, lambda: told[-1])
    launch.go()
    assert launch.wait() == 0, launch


LOCKED = """
def take(lock):
    lock.acquire()
lock = threading.Lock()
gone.set()
if RANK == 1:
    take(lock)
    take(lock)
dist.all_reduce(values)
"""


def test_a_hang_names_the_rank_that_waits_for_a_lock(fleetrun: Fleetrun):
    script = fleetrun.script(BEATS + JOIN.format(1000) + LOCKED)
    launch = fleetrun.start(*TWO, "--hang_timeout", "5", script)
    assert launch.wait() == 124, launch
    verdict = verdict_of(fleetrun)
    assert (verdict["kind"], verdict["ranks"]) == ("not entered", [1]), launch
    assert "take: lock.acquire()" in cause_in(launch), launch


SERVED = """
import torch
from trainers import fleet
from trainers.ps import SparseEmbedding

fleet.init()
model = fleet.distributed_model(torch.nn.Sequential(SparseEmbedding(4), torch.nn.Linear(4, 1)))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    for step in range(3):
        if RANK == 1 and step == 1:
            tell("ready", os.getpid())
            wait_for_go()  # the slow disk
        optimizer.minimize(model(torch.arange(8)).mean())
    fleet.stop_worker()
"""


def test_of_parameter_servers_the_trainer_or_the_server_that_is_waited_for(fleetrun: Fleetrun):
    words = ("--server_num", "1", "--trainer_num", "2", "--max_restart", "0")
    launch = fleetrun.start(*words, fleetrun.script(SERVED))
    launch.until_ready(1)
    told: list[Launch] = []

    def says(*nouns: str) -> None:
        wait_until(
            lambda: told.append(answered(fleetrun, "why")) or all(each in told[-1].out for each in nouns),
            lambda: told[-1],
        )

    says("trainer 1 has not come to the push of step 2, in which trainer 0 waits", "the slow disk")
    status = json.loads(answered(fleetrun, "status", "--json").out)
    server = next(each["pid"] for each in status["containers"] if each["name"] == "ps.0")
    os.kill(server, signal.SIGSTOP)
    launch.go()
    says("server 0 has not answered the pull of step 2", "in which trainer 1 waits", "stopped by a signal")
    os.kill(server, signal.SIGCONT)
    assert launch.wait() == 0, launch


STEPS = """
import time
tell("ready", os.getpid())
while True:  # in lockstep, until it is told to end
    time.sleep(0.3 if RANK == 1 else 0.01)
    values[0] = os.path.exists("over")
    dist.all_reduce(values)
    if values[0]:
        break
"""
OFTEN = (
    sys.executable,
    "-c",
    "import sys; import fleetrun.pod.hangs as hangs; hangs.LATENESS_PERIOD = 2.0; "
    "from fleetrun.__main__ import main; sys.exit(main())",
)
"""The command, which looks every two seconds instead of every minute."""


def test_a_straggler_is_named_while_the_job_runs(fleetrun: Fleetrun):
    launch = fleetrun.start(*TWO, fleetrun.script(JOIN.format(1000) + STEPS), command=OFTEN)
    launch.until_ready(2)
    wait_until(lambda: "trainer 1 keeps the others waiting for " in launch.said, launch)
    for words in (("why",), ("status",)):
        told = answered(fleetrun, *words)
        assert "trainer 1 keeps the others waiting" in told.out or "LATE" in told.out, told
    status = json.loads(answered(fleetrun, "status", "--json").out)
    first = status["late"][0]
    assert (first["rank"], first["node"]) == (1, ""), status
    assert 0.3 < first["share"] <= 1.0
    assert first["behind"] > 0.8 * first["of"]
    (fleetrun.folder / "over").touch()
    assert launch.wait() == 0, launch
    assert verdict_of(fleetrun)["kind"] == "straggler"
    plot = fleetrun.run("plot", "-o", "late.svg")
    assert plot.code == 0, plot
    assert "waited for, %" in (fleetrun.folder / "late.svg").read_text()

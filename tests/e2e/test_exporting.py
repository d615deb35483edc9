"""What trainers report, read back as TensorBoard and Prometheus read it, and drawn; and jobs whose exporter
fares badly.
"""

import logging
import os
import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from tests.support.command import Fleetrun, Launch
from tests.support.traces import left_behind, wait_until

REPORT = """
import json, socket
def report(step, **said):
    said = {"mark": os.environ["FLEETRUN_CONTAINER"], "step": step, "loss": 1 / (step + 1), **said}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.sendto(json.dumps(said).encode(), os.environ["FLEETRUN_PROGRESS"])
"""


def address(launch: Launch) -> str:
    launch.until_err("/metrics")
    return re.findall(r"Metrics: (\S+)", launch.err)[0]


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return answer.read().decode()


def exporter(launch: Launch) -> int:
    """Its pid."""
    (pid,) = [pid for pid, command in left_behind(launch.token).items() if "fleetrun.exporters" in command]
    return pid


def losses(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    found = EventAccumulator(str(folder))
    found.Reload()
    return [(each.step, round(each.value, 3)) for each in found.Scalars("loss")]


@pytest.mark.slow
def test_reports_are_served_and_written_across_a_restart_and_drawn(fleetrun: Fleetrun):
    script = fleetrun.script(f"""{REPORT}
for step in range(3 * ATTEMPT, 3 * ATTEMPT + 5):
    report(step, samples=10 * step, values={{"lr": 0.5}})
meet(2)
if ATTEMPT == 0 and RANK == 1:
    sys.exit(3)
if ATTEMPT == 0:
    stay()
tell("reported")
wait_for_go()
""")
    words = ("--nproc_per_node=2", "--max_restart=1", "--tensorboard=runs/one", "--metrics_port=0")
    launch = fleetrun.start(*words, script, env={"FLEETRUN_TOKEN": "secret-of-the-job"})
    launch.until_told("reported", 2)
    url = address(launch)
    wait_until(lambda: scraped(url).count('fleetrun_step{rank="') == 2)
    text = scraped(url)
    for line in (
        'fleetrun_step{rank="1",role="trainer"} 7.0',
        'fleetrun_scalar{name="lr",rank="0",role="trainer"} 0.5',
        'fleetrun_process_up{rank="0",role="trainer"} 1.0',
        'fleetrun_process_starts_total{rank="0",role="trainer"} 2.0',
        'fleetrun_process_exits_total{outcome="failed",rank="1",role="trainer"} 1.0',
        "fleetrun_restarts_total 1.0",
    ):
        wait_until(lambda line=line: line in scraped(url), lambda line=line: f"{line}\n{scraped(url)}")
    environment = Path(f"/proc/{exporter(launch)}/environ").read_bytes()
    assert b"secret-of-the-job" not in environment
    assert b"FLEETRUN_CONTAINER" not in environment
    assert "fleetrun_job_info" in text
    launch.go()
    assert launch.wait() == 0
    runs = fleetrun.folder / "runs" / "one"
    for rank in (0, 1):
        expected = [(step, round(1 / (step + 1), 3)) for step in range(8)]
        assert losses(runs / f"trainer.{rank}") == expected, "steps 3 and 4 are done again"
    assert "container" not in launch.err, "the exporter is not reported as a stray process"
    drawn = fleetrun.run("plot", "-o", "job.svg")
    assert drawn.code == 0, drawn
    assert {"loss", "restart", "trainer 1"} <= set(
        re.findall(r">([^<>\n]+)<", (fleetrun.folder / "job.svg").read_text())
    )


def test_without_it_the_job_goes_on_and_says_so_once(fleetrun: Fleetrun):
    script = fleetrun.script(f"""{REPORT}
tell("ready", os.getpid())
wait_for_go()
for step in range(100):
    report(step)
""")
    launch = fleetrun.start("--metrics_port=0", script)
    launch.until_ready(1)
    os.kill(exporter(launch), signal.SIGKILL)
    launch.until_err("SIGKILL")
    launch.go()
    assert launch.wait() == 0
    assert launch.err.count("SIGKILL") == 1
    assert "killed by SIGKILL" in launch.said


def test_a_port_that_is_taken_is_told_before_anything_starts(fleetrun: Fleetrun):
    script = fleetrun.script('tell("started")\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch = fleetrun.run(f"--metrics_port={port}", script)
    assert launch.code == 125
    assert f"--metrics_port: port {port}" in launch.said
    assert launch.news == []


def test_a_folder_that_cannot_be_is_told_before_anything_starts(fleetrun: Fleetrun):
    (fleetrun.folder / "runs").write_text("")
    launch = fleetrun.run("--tensorboard=runs", fleetrun.script('tell("started")\n'))
    assert launch.code == 2
    assert "--tensorboard runs" in launch.said
    assert launch.news == []


def test_a_stopped_exporter_holds_up_no_job_and_ctrl_c_ends_the_waiting(fleetrun: Fleetrun):
    script = fleetrun.script(f"""{REPORT}
tell("ready", os.getpid())
wait_for_go()
for step in range(3000):
    report(step, values={{f"name{{number}}": 1.0 for number in range(100)}})
""")
    launch = fleetrun.start("--tensorboard=runs", script)
    launch.until_ready(1)
    os.kill(exporter(launch), signal.SIGSTOP)
    launch.go()
    launch.until_err("Ctrl-C")
    launch.send(signal.SIGINT)
    assert launch.wait() == 0
    assert "interrupted" in launch.said

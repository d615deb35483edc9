"""On three hosts: whatever fails on one ends the job on all, and all say which host and process it was."""

import json
import os
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetrun.proc import read_stat
from tests.support.command import Launch
from tests.support.hosts import needs_hosts
from tests.support.nodes import Nodes, codes, go, ready
from tests.support.traces import wait_until

pytestmark = [*needs_hosts, pytest.mark.slow]

LOST = 125


def test_a_job_that_runs_well(three: Nodes):
    three.script("""
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "PADDLE_NNODES", "LOCAL_RANK", "PADDLE_TRAINER_ENDPOINTS")
tell("is", *(os.environ[name] for name in names))
""")
    launches = three.start_all("--nproc_per_node", "2")
    assert codes(launches) == [0, 0, 0], launches
    told = [line.split()[2:] for launch in launches for line in sorted(launch.told(" is "))]
    assert [row[:5] for row in told] == [[str(r), "6", str(r // 2), "3", str(r % 2)] for r in range(6)]
    (endpoints,) = {row[5] for row in told}
    hosts = [endpoint.partition(":")[0] for endpoint in endpoints.split(",")]
    assert hosts == [host.address for host in three.hosts for _ in range(2)]


def test_they_wait_for_the_last_to_finish(three: Nodes):
    three.script("if RANK == 2: tell('ready', os.getpid()); wait_for_go()")
    launches = three.start_all()
    ready(launches[2:])
    assert [launch.popen.poll() for launch in launches] == [None] * 3
    go(launches)
    assert codes(launches) == [0, 0, 0]


FAILING = """
tell("ready", os.getpid())
leave_on_term()
wait_for_go()
print("the last thing it said", flush=True)
sys.exit(7)
"""


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_trainer_fails_on_one_host(three: Nodes, failing: int):
    three.script(FAILING)
    launches = three.start_all("--heartbeat_timeout", "1000")
    ready(launches)
    launches[failing].go()
    assert codes(launches) == [7, 7, 7]
    for launch in launches:
        assert f"node {failing}, {three.title(failing)}" in launch.said, launch
        assert f"trainer {failing} exited with code 7" in launch.said
        assert "the last thing it said" in launch.err


CONNECTED = """
import socket, threading
host, _, port = os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[2].rpartition(":")
if RANK == 2:
    server = socket.create_server((host, int(port)))
    tell("listening")
    peers = [server.accept()[0] for _ in range(2)]
    tell("ready", os.getpid())
    wait_for_go()
    CAUSE
wait_for_go()
peer = socket.create_connection((host, int(port)))
peer.recv(1)
while not any("NOTED" in path.read_text() for path in Path("../h3/log").glob("PLACE")):
    time.sleep(0.01)
time.sleep(0.3)  # a broken connection is noticed later than a message of its end takes
sys.exit(40 + RANK)
"""
ENDS = "os._exit(42)"
FAILS_AND_STAYS = """
    from trainers.process import hooks
    hooks.install_exit_hooks()
    threading.Thread(target=time.sleep, args=(60,)).start()
    [peer.close() for peer in peers]
    raise ValueError("the cause")
"""


@pytest.mark.parametrize(
    ("cause", "place", "noted", "code", "said"),
    [
        pytest.param(
            ENDS, "*.events.jsonl", "exited with code 42", 42, "trainer 2 exited with code 42", id="ends"
        ),
        pytest.param(
            FAILS_AND_STAYS, "*.error.json", "the cause", 1, "ValueError: the cause", id="ends-after-them"
        ),
    ],
)
def test_the_first_of_several_failures_is_the_one(
    three: Nodes, cause: str, place: str, noted: str, code: int, said: str
):
    """A trainer that breaks because its peer has gone is not the cause, also if it ends before that one."""
    script = CONNECTED.replace("CAUSE", cause.strip())
    three.script(script.replace("PLACE", place).replace("NOTED", noted))
    launches = three.start_all()
    launches[2].until_told("listening")
    go(launches[:2])
    ready(launches[2:])
    launches[2].go()
    assert codes(launches) == [code] * 3, launches
    assert all("trainer 2" in launch.said and said in launch.said for launch in launches), launches


def test_a_trainer_is_killed(three: Nodes):
    three.script("stay()")
    launches = three.start_all()
    pids = ready(launches)
    os.kill(pids[1], signal.SIGKILL)
    assert codes(launches) == [137, 137, 137]
    for launch in launches:
        assert f"{three.title(1)}: trainer 1 was killed by SIGKILL" in launch.said, launch


def names_lost(launch: Launch, title: str) -> bool:
    return f"{title}" in launch.said


@pytest.mark.parametrize("half", ["guard", "launcher"])
def test_a_launcher_is_killed(three: Nodes, half: str):
    """The others need not wait for a heartbeat that is missing: its connection ends."""
    three.script("stay()")
    launches = three.start_all("--heartbeat_timeout", "1000")
    ready(launches)
    victim = launches[2]
    os.kill(victim.popen.pid if half == "guard" else victim.launcher, signal.SIGKILL)
    assert victim.wait() != 0
    assert codes(launches[:2]) == [LOST, LOST]
    for launch in launches[:2]:
        assert f"node 2, {three.title(2)}" in launch.said, launch
        assert ("its launcher has ended" in launch.said) == (half == "launcher"), launch
        assert "sent no heartbeat" not in launch.said, launch


@pytest.mark.parametrize("half", ["guard", "launcher"])
def test_the_launcher_that_serves_the_store_is_killed(three: Nodes, half: str):
    three.script("stay()")
    launches = three.start_all("--heartbeat_timeout", "1000")
    ready(launches)
    victim = launches[0]
    os.kill(victim.popen.pid if half == "guard" else victim.launcher, signal.SIGKILL)
    assert victim.wait() != 0
    assert codes(launches[1:]) == [LOST, LOST]
    for launch in launches[1:]:
        assert three.master in launch.said or three.title(0) in launch.said, launch


def test_ctrl_c_on_one_host(three: Nodes):
    three.script("leave_on_term()\nstay()")
    launches = three.start_all()
    ready(launches)
    launches[1].send(signal.SIGINT)
    assert codes(launches) == [130, 130, 130]
    for launch in (launches[0], launches[2]):
        assert f"node 1, {three.title(1)}: interrupted" in launch.said, launch


def test_all_start_again_after_a_failure(three: Nodes):
    three.script("""
leave_on_term()
tell("attempt", ATTEMPT, os.environ["TORCHELASTIC_RESTART_COUNT"])
os.chdir("..")
meet(3)
if ATTEMPT == 0:
    if RANK == 1: sys.exit(9)
    stay()
""")
    launches = three.start_all("--max_restart", "1")
    assert codes(launches) == [0, 0, 0], launches
    for rank, launch in enumerate(launches):
        assert launch.told("attempt") == [f"trainer.{rank} attempt {n} {n}" for n in (0, 1)]


def test_restarts_are_counted_over_all_hosts(three: Nodes):
    three.script("""
leave_on_term()
tell("attempt", ATTEMPT)
os.chdir("..")
meet(3)
if RANK == ATTEMPT: sys.exit(9)
stay()
""")
    launches = three.start_all("--max_restart", "1")
    assert codes(launches) == [9, 9, 9], launches
    for rank, launch in enumerate(launches):
        assert launch.told("attempt") == [f"trainer.{rank} attempt {n}" for n in (0, 1)]
        assert "trainer 1 exited with code 9" in launch.said


def test_a_parameter_server_ends_when_all_trainers_have(three: Nodes):
    three.script("""
if "trainer" in WHO:
    tell("done")
else:
    leave_on_term()
    stay()
""")
    launches = three.start_all("--run_mode", "ps", "--server_num", "1", "--trainer_num", "1")
    assert codes(launches) == [0, 0, 0], launches
    assert sum(len(launch.told("done")) for launch in launches) == 3


def test_a_killed_server_leads_the_report_of_a_trainer_on_another_host(three: Nodes):
    pid = three.hosts[0].folder / "pid"
    three.script(f"""
pid = Path({str(pid)!r})
if "trainer" not in WHO:
    if os.environ["POD_IP"] == {three.hosts[1].address!r}:
        pid.write_text(str(os.getpid()))
    stay()
if os.environ["POD_IP"] != {three.hosts[2].address!r}:
    stay()
if ATTEMPT == 0:
    while not (pid.exists() and (first := pid.read_text())):
        time.sleep(0.05)
    os.kill(int(first), signal.SIGKILL)
    while pid.read_text() in ("", first):
        time.sleep(0.05)
raise RuntimeError("server 1 was restarted and has lost its tables")
""")
    launches = three.start_all(
        "--run_mode", "ps", "--server_num", "1", "--trainer_num", "1", "--max_restart", "1"
    )
    assert codes(launches) == [1, 1, 1], launches
    for launch in launches:
        report = launch.said.partition("=====")[2]
        assert f"Began with: server 1 was killed by SIGKILL on node 1, {three.title(1)}, " in report, launch
        assert report.index("Began with") < report.index("First failure: trainer 2")


WAITS = """
import datetime, torch, torch.distributed as dist
Path("imported").touch()
while not all(Path(f"../h{n}/imported").exists() for n in (1, 2, 3)):  # the timeout is not for the import
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
dist.all_reduce(torch.ones(3))
if RANK == 2:
    wait_for_go()  # here it stands
dist.all_reduce(torch.ones(3))
"""


def test_the_rank_is_named_that_the_others_wait_for(three: Nodes):
    """Two time out in a collective: it is the third's fault, on whichever host they fail first."""
    three.script(WAITS)
    launches = three.start_all("--stop_timeout", "1")
    assert codes(launches) == [1, 1, 1]
    for launch in launches:
        assert "trainer 2 (node 2" in launch.said, launch
        assert "here it stands" in launch.said, launch
        assert "all_reduce #2" in launch.said


def test_why_and_stacks_show_the_ranks_of_all_nodes(three: Nodes):
    three.script("print('the log of', WHO, flush=True)" + WAITS.replace("=4)", "=400)"))
    launches = three.start_all("--stop_timeout", "1")
    asked = three.commands[1]
    wait_until(lambda: "all_reduce #2, in which trainers 0, 1 wait" in asked.run("why").out)
    told = asked.run("stacks").out
    own, _, everywhere = told.partition("On all nodes:")
    assert all(f"trainer {rank}: 1 process, node {rank}: pid " in own for rank in range(3)), told
    first, second = everywhere.strip().splitlines()
    assert first.startswith("trainer 2 on node 2, ")
    assert "> wait_for_go (telling.py:" in first
    assert second.strip().startswith("trainers 0, 1: <module> (train.py:")
    assert second.endswith("> in all_reduce #2")
    packed = asked.run("bundle")
    with tarfile.open(asked.folder / packed.out.strip()) as archive:
        found = {each.name: archive.extractfile(each).read() for each in archive.getmembers()}
    logs = {path: text for path, text in found.items() if "/logs/" in path}
    machines = {path.split("/")[-1]: text for path, text in found.items() if "/doctor." in path}
    assert [name.split("_")[:2] for name in sorted(machines)] == [
        ["doctor.json"], ["doctor.node", "0"], ["doctor.node", "2"],
    ]  # fmt: skip
    for name, text in machines.items():
        machine = json.loads(text)
        assert (machine if "_" in name else machine["facts"])["memory"]["total"] > 1 << 20
    for rank, name in ((0, "/logs/node_0_"), (1, "/logs/default."), (2, "/logs/node_2_")):
        (text,) = [text for path, text in logs.items() if name in path]
        assert b"the log of trainer.%d" % rank in text, logs
    go(launches)
    assert codes(launches) == [0, 0, 0]


TRAINS = """
import threading
from trainers import progress
tell("ready", os.getpid())
gate = threading.Thread(target=wait_for_go)
gate.start()
step = 0
while gate.is_alive():
    step += 1
    progress.report(step)
    time.sleep(0.05)
"""
SLOWER_THAN_A_LEASE = 15.0  # seconds


@pytest.fixture
def slow_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, for `fsfreeze`."""
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    commands = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    if any(subprocess.run(command, capture_output=True).returncode for command in commands):
        pytest.skip("no loop device here")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], capture_output=True)
    subprocess.run(["umount", "-l", str(folder)], check=True)


def warnings(launches: list[Launch]) -> list[str]:
    return [line for launch in launches for line in launch.err.splitlines() if "WARNING" in line]


@pytest.mark.parametrize("slow", [0, 2], ids=["with the store", "another"])
def test_a_log_directory_that_stalls_on_one_host_is_no_loss(three: Nodes, slow_disk: Path, slow: int):
    """Its launcher waits for the disk for longer than a lease, and is heard of meanwhile."""
    three.script(TRAINS)
    folders = {number: ("--log_dir", str(slow_disk)) if number == slow else () for number in range(3)}
    launches = [three.start(number, "--rank", str(number), *folders[number]) for number in range(3)]
    pids = ready(launches)
    before = warnings(launches)
    subprocess.run(["fsfreeze", "-f", str(slow_disk)], check=True)
    wait_until(lambda: read_stat(launches[slow].launcher).state == "D")
    time.sleep(SLOWER_THAN_A_LEASE)
    assert [launch.popen.poll() for launch in launches] == [None] * 3, launches
    assert read_stat(launches[slow].launcher).state == "D"
    subprocess.run(["fsfreeze", "-u", str(slow_disk)], check=True)
    wait_until(lambda: read_stat(launches[slow].launcher).state == "S")
    go(launches)
    assert codes(launches) == [0] * 3, launches
    assert ready(launches) == pids
    assert warnings(launches) == before

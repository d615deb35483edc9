"""Random signals at random moments to whatever runs: exit code 0 only when all work is done, never a process
left behind.
"""

from __future__ import annotations

import signal

from tests.attack.arena import PATIENCE, Arena, check_spotless, containers, send, sleep_or_end, victim_pid
from tests.support.command import Launch
from tests.support.ports import free_port

NUMBERS = (
    "KILL",
    "TERM",
    "INT",
    "HUP",
    "QUIT",
    "ABRT",
    "SEGV",
    "BUS",
    "USR1",
    "USR2",
    "ALRM",
    "PIPE",
    "STOP",
)

WORK = """
import random
chance = random.Random(%d + RANK)
if %s:
    ignore(signal.SIGTERM)
time.sleep(chance.uniform(0, 0.6))
if ATTEMPT == 0 and chance.random() < 0.2:
    sys.exit(3)
Path(f"done.{RANK}.{SIZE}").write_text("x")
time.sleep(chance.uniform(0, 0.2))
"""


def strike(arena: Arena, launch: Launch, longest: float) -> None:
    """Some signals, each at its moment, to the guard, the launcher or a trainer."""
    for _ in range(arena.random.choice([1, 1, 1, 2, 3])):
        if not sleep_or_end(launch, arena.random.uniform(0, longest)):
            return
        victims = ["guard", "launcher", "trainer.0", "trainer.1"]
        victim = arena.random.choice(victims)
        number = getattr(signal, f"SIG{arena.random.choice(NUMBERS)}")
        arena.note(f"{number.name} to {victim} among {sorted(containers(launch))}")
        pid = victim_pid(launch, victim)
        send(pid, number)
        if number is signal.SIGSTOP:
            sleep_or_end(launch, arena.random.uniform(0, 0.3))
            send(pid, signal.SIGCONT)


def check_end(arena: Arena, launch: Launch, size: int) -> None:
    code = launch.wait(PATIENCE)
    arena.note(f"exit code {code}")
    check_spotless(launch)
    if code == 0:
        done = sorted(path.name for path in arena.folder.glob("done.*"))
        assert done == [f"done.{rank}.{size}" for rank in range(size)], f"{done}\n{launch}"


def one_node(arena: Arena) -> None:
    random = arena.random
    for _ in range(5):
        for path in arena.folder.glob("done.*"):
            path.unlink()
        script = arena.fleetrun.script(WORK % (random.randrange(1 << 30), random.random() < 0.3))
        options = ("--stop_timeout", "0.2", "--max_restart", random.choice("0123"))
        launch = arena.fleetrun.start("--nproc_per_node", "2", *options, script)
        strike(arena, launch, 1.0)
        check_end(arena, launch, 2)


def two_nodes(arena: Arena) -> None:
    """A node that says 0 says it of the whole job."""
    random = arena.random
    script = arena.fleetrun.script(WORK % (random.randrange(1 << 30), random.random() < 0.3))
    options = ("--nnodes", "2", "--master", f"127.0.0.1:{free_port()}", "--stop_timeout", "0.2")
    options += ("--heartbeat_timeout", "2", "--rdzv_timeout", "20", "--max_restart", random.choice("012"))
    launches = [
        arena.fleetrun.start(*options, "--log_dir", f"log{number}", "--nproc_per_node", "1", script)
        for number in range(2)
    ]
    strike(arena, random.choice(launches), 2.0)
    for launch in launches:
        check_end(arena, launch, 2)


def with_servers(arena: Arena) -> None:
    """Servers and trainers without torch: a server that ends before its trainers is a failure."""
    random = arena.random
    body = WORK % (random.randrange(1 << 30), random.random() < 0.3)
    text = "".join(f"    {line}\n" for line in body.splitlines())
    serve = "    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))\n    time.sleep(600)\n"
    script = arena.fleetrun.script(f"if WHO.startswith('ps.'):\n{serve}else:\n{text}")
    options = ("--stop_timeout", "0.2", "--max_restart", random.choice("0123"))
    launch = arena.fleetrun.start("--server_num", "1", "--trainer_num", "2", *options, script)
    strike(arena, launch, 2.0)
    check_end(arena, launch, 2)


ATTACKS = (one_node, two_nodes, with_servers)

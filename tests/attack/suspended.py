"""Processes that are suspended for a while and resumed: the job waits for them, or ends with a cause, and
counts every push once.
"""

from __future__ import annotations

import signal
import time

from tests.attack.arena import (
    PATIENCE,
    Arena,
    Counting,
    check_spotless,
    containers,
    launcher,
    send,
    sleep_or_end,
    until_training,
    victim_pid,
)
from tests.support.command import Launch
from tests.support.ports import free_port
from tests.support.traces import wait_until

VICTIMS = ("ps.0", "ps.1", "trainer.0", "trainer.1", "launcher", "guard")


def suspend(arena: Arena, launch: Launch, victims: tuple[str, ...], longest: float) -> None:
    pids = [victim_pid(launch, victim) for victim in victims]
    seconds = arena.random.uniform(0, longest)
    arena.note(f"{', '.join(victims)} suspended for {seconds:.2f} s")
    for pid in pids:
        send(pid, signal.SIGSTOP)
    sleep_or_end(launch, seconds)
    arena.random.shuffle(pids)
    for pid in pids:
        send(pid, signal.SIGCONT)
        arena.pause(0.02)


def pushes(arena: Arena) -> None:
    random = arena.random
    timeout = random.choice([2.0, 60.0])
    job = Counting(arena, 60, options={"pause_ms": 10}, ps={"trainer_timeout_s": timeout})
    launch = job.start()
    for _ in range(random.randrange(2, 5)):
        if random.random() < 0.7:
            until_training(arena, launch)
        if not sleep_or_end(launch, random.uniform(0, 2)):
            break
        victims = tuple(random.sample(VICTIMS, random.choice([1, 1, 2])))
        suspend(arena, launch, victims, random.choice([0.5, 3.0, 6.0]))
    launch.wait(PATIENCE)
    check_spotless(launch)
    job.check(launch)


STEPPING = """
for step in range(300):
    with Path(f"steps.{RANK}").open("a") as file:
        file.write(f"{ATTEMPT} {step}\\n")
    time.sleep(0.01)
Path(f"done.{RANK}").touch()
"""


def nodes(arena: Arena) -> None:
    """Of two nodes one is suspended, in part or whole, for less or more than the time after which it counts
    as lost.
    """
    random = arena.random
    script = arena.fleetrun.script(STEPPING)
    options = ["--nnodes", random.choice(["2", "1:2"]), "--master", f"127.0.0.1:{free_port()}"]
    options += ["--heartbeat_timeout", "2", "--rdzv_timeout", "30", "--elastic_timeout", "1"]
    launches = [
        arena.fleetrun.start(*options, "--stop_timeout", "1", "--log_dir", f"log{number}", script)
        for number in range(2)
    ]
    target = random.choice(launches)
    if random.random() < 0.7:
        wait_until(
            lambda: any(arena.folder.glob("steps.*")) or target.popen.poll() is not None, "a step", PATIENCE
        )
    time.sleep(random.uniform(0, 3))
    names = ["guard", "launcher", *containers(target)]
    victims = tuple(random.sample(names, random.randrange(1, len(names) + 1)))
    suspend(arena, target, victims, random.choice([1.0, 4.0, 8.0]))
    send(launcher(target), signal.SIGCONT)
    codes = [launch.wait(PATIENCE) for launch in launches]
    arena.note(f"exit codes {codes}")
    for launch in launches:
        check_spotless(launch)
    if 0 in codes:  # an elastic job may have gone on with one of them
        done = {path.name for path in arena.folder.glob("done.*")}
        assert done >= ({"done.0"} if "1:2" in options else {"done.0", "done.1"}), launches


ATTACKS = (pushes, nodes)

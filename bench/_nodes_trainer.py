"""What the launchers of `nodes.py` are made to start: calls the bench, tells where it stands, obeys.

Told: `hello NODE RANK WORLD STARTED PID`, `dies NS` before an exit that was ordered. Orders: `exit CODE`.
With BENCH_PLAN=CODE it exits by itself soon after it started.
"""

import time

FIRST_STATEMENT = time.monotonic_ns()

import os  # noqa: E402 - the stamp comes before everything
import socket  # noqa: E402

SOON = 0.3


def first_of(*names: str) -> str:
    """Ours and torch's name, or Paddle's."""
    return next(os.environ[name] for name in names if name in os.environ)


def leave(code: str) -> None:
    bench.send(f"dies {time.monotonic_ns()}".encode())
    os._exit(int(code))


bench = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
bench.connect(os.environ["BENCH_SOCKET"])
rank = first_of("RANK", "PADDLE_TRAINER_ID")
world = first_of("WORLD_SIZE", "PADDLE_TRAINERS_NUM")
bench.send(f"hello {os.environ['BENCH_NODE']} {rank} {world} {FIRST_STATEMENT} {os.getpid()}".encode())
if plan := os.environ.get("BENCH_PLAN"):
    time.sleep(SOON)
    leave(plan)
while order := bench.recv(100).decode().split():
    leave(order[1])

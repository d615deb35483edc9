"""A process that forks servers to be killed: one for every line on its standard input.

A server recovers, says its process id, how many pushes it has and what its tables are, and then takes one
push after the other, saying the number of each when it may be acknowledged. A fork takes milliseconds, where
a new interpreter with torch takes seconds.
"""

from __future__ import annotations

import os
import sys

import torch

from tests.trainers.ps.durable.frames import State, recovered, request
from trainers.ps.durable.durable import DurableFolder


def say(*words: object) -> None:
    """One write, so that a kill leaves a whole line or none."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def serve(where: str) -> None:
    say("pid", os.getpid())
    durable = DurableFolder(where, job="crashes", server=0, fsync="no")
    state = recovered(durable)
    say("recovered", state.count, state.digest())
    while True:
        frames = request(state.count)
        durable.append(frames)
        state.apply(frames)
        say("acknowledged", state.count)
        ended = durable.end_snapshot()
        if ended is not None:
            ended.result()
        if state.count % 7 == 0 and not durable.snapshotting:
            durable.begin_snapshot(state.count, state.tables, state.blob, shard_bytes=5000)


def warm_up() -> None:
    """Load every kernel before the first fork, not after each."""
    state = State().up_to(3)
    rows = state.sparse.cut()
    twin = State()
    twin.sparse.load(rows.read(0, rows.rows))
    twin.digest()


def main(where: str) -> None:
    torch.set_num_threads(1)
    warm_up()
    say("ready")
    for _ in sys.stdin:
        child = os.fork()
        if not child:
            try:
                serve(where)
            except BaseException as error:
                say("failed", repr(error))
                raise
            finally:
                os._exit(1)
        os.waitpid(child, 0)
        say("gone")


if __name__ == "__main__":
    main(sys.argv[1])

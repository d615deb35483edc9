"""The simulated disk, and what a write-ahead log on it survives."""

from pathlib import Path

from tests.simulated_ps.disk import Disk
from tests.simulated_ps.world import Process, World
from trainers.ps.durable.journal import Journal, recover_records


def test_a_record_that_was_recovered_survives_a_power_failure(tmp_path: Path) -> None:
    """A process is killed after it has written a record and before it syncs. The next process answers from
    this record, as if it were acknowledged.
    """
    world = World(1)
    disk = Disk(world, tmp_path)
    found: list[list[bytes]] = []
    ends: list[BaseException | None] = []

    def run(steps: int | None) -> None:
        def main() -> None:
            journal = Journal(tmp_path, "always")
            found.append([bytes(frames[0]) for frames in recover_records(tmp_path, 0, journal)])
            if steps is not None:
                journal.append([b"first"])
                process.steps_left = steps
                journal.append([b"second"])

        before = len(ends)
        process = Process(world, "server", main, ends.append)
        world.run(lambda: len(ends) > before, within=10.0)

    with disk.used():
        run(1)  # the call that writes, but not the one that syncs
        run(None)
        disk.lose_power(tmp_path)
        run(None)
    assert found[1:] == [[b"first", b"second"]] * 2

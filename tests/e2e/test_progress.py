"""What trainers report reaches the record of the job, from scripts that use nothing else of the runtime."""

from __future__ import annotations

import json
from typing import Any

from tests.support.command import Fleetrun, Launch


def events(fleetrun: Fleetrun) -> list[dict[str, Any]]:
    (path,) = fleetrun.logs("*.events.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(fleetrun: Fleetrun) -> list[tuple[str, int]]:
    return [(each["container"], each["step"]) for each in events(fleetrun) if each["event"] == "progress"]


def sockets(fleetrun: Fleetrun) -> list[str]:
    return [path.name for path in (fleetrun.folder / "run").rglob("*") if path.is_socket()]


def well(launch: Launch) -> None:
    assert launch.code == 0, launch


def test_first_and_last_reports_are_in_the_record(fleetrun: Fleetrun):
    script = fleetrun.script("""
from trainers import progress
for number in range(10):
    progress.step(samples=32, loss=1 / (number + 1), lr=float("nan"))
with progress.activity("resting", of=1) as resting:
    resting.advance()
assert "torch" not in sys.modules
""")
    launch = fleetrun.run("--nproc_per_node", "2", script)
    well(launch)
    found = [each for each in events(fleetrun) if each["event"] == "progress"]
    for rank in (0, 1):
        first, *_, last = [each for each in found if each["container"] == f"trainer.{rank}"]
        assert (first["step"], first["samples"], first["loss"]) == (1, 32, 1.0)
        assert (last["step"], last["samples"], last["rank"]) == (10, 320, rank)
        assert last["values"] == {"lr": "nan"}
    assert sockets(fleetrun) == []


def test_a_script_of_torch_alone_tells_its_steps_and_goes_on_from_its_checkpoint(fleetrun: Fleetrun):
    script = fleetrun.script("""
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.Adam(model.parameters())
if ATTEMPT:
    optimizer.load_state_dict(torch.load("checkpoint"))
for _ in range(10):
    model(torch.ones(2)).sum().backward()
    optimizer.step()
torch.save(optimizer.state_dict(), "checkpoint")
if not ATTEMPT:
    raise ValueError("once")
""")
    well(fleetrun.run("--max_restart", "1", script))
    assert [step for _, step in steps(fleetrun)] == [1, 10, 11, 20]


def test_a_restarted_process_counts_anew_and_last_words_stand_before_the_end(fleetrun: Fleetrun):
    script = fleetrun.script("""
from trainers import progress
for number in range(5 if ATTEMPT == 0 else 3):
    progress.step(samples=1)
if ATTEMPT == 0:
    raise ValueError("once")
""")
    launch = fleetrun.run("--max_restart", "1", script)
    well(launch)
    story = [
        each.get("step") or each["event"]
        for each in events(fleetrun)
        if each["event"] in ("progress", "exited")
    ]
    once = story.index("exited")
    assert story[-1] == "exited"
    for steps, last in ((story[:once], 5), (story[once + 1 : -1], 3)):
        assert (steps[0], steps[-1]) == (1, last)
        assert steps == sorted(steps)


def test_children_of_a_trainer_do_not_speak_for_it(fleetrun: Fleetrun):
    script = fleetrun.script("""
import multiprocessing
from trainers import progress

def child():
    for _ in range(100):
        progress.step()
    with progress.activity("child"):  # which would be told at once
        pass

if __name__ == "__main__":
    progress.step()
    pid = os.fork()
    if not pid:
        child()
        sys.exit()
    os.waitpid(pid, 0)
    for way in ("fork", "spawn"):
        process = multiprocessing.get_context(way).Process(target=child)
        process.start()
        process.join()
        assert process.exitcode == 0
""")
    launch = fleetrun.run(script)
    well(launch)
    assert steps(fleetrun) == [("trainer.0", 1)]


def test_whatever_comes_to_the_socket_the_job_goes_on(fleetrun: Fleetrun):
    script = fleetrun.script("""
import select, socket
from trainers import progress
path = Path(os.environ["FLEETRUN_PROGRESS"])
assert len(str(path)) > 108
os.chdir(path.parent)
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
    for _ in range(30):
        for garbage in (b"", b"\\0" * 9000, b"[" * 8000, b'{"mark": "p.trainer.0", "step": 7}', b"x" * 60000):
            sock.sendto(garbage, path.name)
    sock.connect(path.name)
    while not select.select([], [sock], [], 0.05)[1]:  # last words would not wait long for room
        pass
progress.step()
path.unlink()
""")
    runtime = fleetrun.folder / ("long-" * 24)
    runtime.mkdir()
    launch = fleetrun.run(script, env={"XDG_RUNTIME_DIR": str(runtime)})
    well(launch)
    assert steps(fleetrun) == [("trainer.0", 1)]


def test_without_a_folder_for_sockets_nobody_reports_and_all_runs(fleetrun: Fleetrun):
    (fleetrun.folder / "run").write_text("in the way")
    script = fleetrun.script("""
from trainers import progress
for _ in range(10):
    progress.step(loss=1.0)
tell("done")
""")
    launch = fleetrun.run(script)
    well(launch)
    assert launch.told("done")
    assert steps(fleetrun) == []
    assert "can be reported" not in launch.err
    with_a_limit = fleetrun.run("--hang_timeout", "1h", script)
    well(with_a_limit)
    assert "counts only output as activity" in " ".join(with_a_limit.err.split())

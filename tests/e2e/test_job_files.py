"""Job files with the real command: up, init, again, --save; roles with scripts of their own; evaluators."""

from __future__ import annotations

import pytest

from tests.support.command import Fleetrun
from tests.support.ports import free_port

TELL = 'tell("in", *sys.argv[1:], os.environ.get("A"), os.environ.get("B"))\n'

JOB = """
script = "train.py"
args = ["${{LR}}"]
server_num = 1
log_dir = "log"
follow = "none"
stop_timeout = 100
[variables]
LR = "0.1"
[environment]
A = "all"
[roles.server]
script = "serve.py"
[roles.evaluator]
script = "eval.py"
args = {args}
environment.B = "eval"
"""


def write(fleetrun: Fleetrun, **files: str) -> None:
    for name, text in files.items():
        (fleetrun.folder / f"{name}.toml").write_text(text)


def told(lines: list[str]) -> list[str]:
    return sorted(line.replace(" in ", " ") for line in lines if " in " in line)


@pytest.mark.slow
def test_roles_with_scripts_of_their_own_and_the_same_job_again(fleetrun: Fleetrun):
    """The evaluator fails once and is started again; the trainers wait for it."""
    fleetrun.script(TELL + "wait_for_go()", "train.py")
    fleetrun.script(TELL + "stay()", "serve.py")
    fleetrun.script(TELL + "if ATTEMPT == 0: sys.exit(3)\ntell('up')\nleave_on_term()\nstay()", "eval.py")
    write(fleetrun, job=JOB.format(args='["--every", "1"]'))
    first = fleetrun.start("up", "job.toml", "--trainer_num", "2", env={"LR": "0.2"})
    first.until_told("evaluator.0 up")
    first.until(lambda: len(told(first.news)) == 5, "all have begun")
    first.go()
    assert first.wait() == 0, first
    expected = ["evaluator.0 --every 1 all eval"] * 2
    expected += ["ps.0 all None", "trainer.0 0.2 all None", "trainer.1 0.2 all None"]
    assert told(first.news) == expected
    assert "restart 1 of 3 of evaluator 0" in first.said
    assert "server_num: 1  (from job.toml:4)\n" in first.err
    assert "trainer_num: 2  (from --trainer_num)\n" in first.err

    write(fleetrun, job="nothing = 'of what it was'")
    second = fleetrun.start("again", env={"LR": "0.3"})
    second.until_told("evaluator.0 up")
    second.until(lambda: len(told(second.news)) == 5, "all have begun")
    second.go()
    assert second.wait() == 0, second
    assert told(second.news) == expected


@pytest.mark.slow
def test_from_nothing_to_a_job_file_and_from_a_command_line_to_one(fleetrun: Fleetrun):
    fleetrun.script(TELL)
    assert fleetrun.run("up").code == 2
    init = fleetrun.run("init")
    assert (init.code, init.out) == (0, "wrote job.toml; start it with: fleetrun up job.toml\n")
    assert told(fleetrun.run("up").news) == ["trainer.0 None None"]
    again = fleetrun.run("init")
    assert again.code == 2
    assert "already" in again.err

    saved = fleetrun.run("--nproc_per_node", "2", "--dry_run", "--save", "two.toml", "train.py", "${x}")
    assert saved.code == 0, saved
    assert saved.err.endswith("fleetrun: wrote two.toml; start it with: fleetrun up two.toml\n")
    assert told(fleetrun.run("up", "two.toml").news) == [f"trainer.{n} ${{x}} None None" for n in (0, 1)]


def test_what_is_wrong_with_a_job_file_is_told_before_anything_starts(fleetrun: Fleetrun):
    write(fleetrun, job='include = "more.toml"\nscript = "train.py"', more="\nnproc_per_node = 'many'")
    for words in (("up",), ("--config", "job.toml"), ("up", "job.toml", "--nproc_per_node", "1")):
        launch = fleetrun.run(*words)
        assert launch.code == 2
        assert launch.err.startswith("fleetrun: error: more.toml:2: nproc_per_node")
    assert not (fleetrun.folder / "log").exists()
    helped = fleetrun.run("up", "--help")
    assert (helped.code, helped.err) == (0, "")
    assert "fleetrun up night.toml" in helped.out
    assert fleetrun.run("again").code == 1


@pytest.mark.slow
def test_each_machine_reads_its_own_file_and_evaluators_are_on_the_first(fleetrun: Fleetrun):
    fleetrun.script(TELL + "wait_for_go()")
    fleetrun.script(TELL + "leave_on_term()\nstay()", "eval.py")
    with_evaluator = (
        "script = 'train.py'\nnnodes = 2\nfollow = 'evaluator'\n"
        "[environment]\nA = '{}'\n[roles.evaluator]\nscript = 'eval.py'"
    )
    write(fleetrun, one=with_evaluator.format("one"), two=with_evaluator.format("two"))
    write(fleetrun, other="script = 'train.py'\nnnodes = 2\n")

    def start(name: str, rank: int, master: str):  # type: ignore[no-untyped-def]
        words = ("--rank", str(rank), "--master", master, "--log_dir", f"log{rank}", "--stop_timeout", "100")
        return fleetrun.start("up", f"{name}.toml", *words)

    master = f"127.0.0.1:{free_port()}"
    nodes = [start("one", 0, master), start("two", 1, master)]
    nodes[0].until_told("evaluator.0 ready")
    for node in nodes:
        node.go()
    assert [node.wait() for node in nodes] == [0, 0]
    assert [told(node.news) for node in nodes] == [
        ["evaluator.0 one None", "trainer.0 one None"],
        ["trainer.1 two None"],
    ]

    master = f"127.0.0.1:{free_port()}"
    nodes = [start("one", 0, master), start("other", 1, master)]
    assert [node.wait() for node in nodes] == [2, 2]
    assert all("roles.evaluator" in node.said for node in nodes)
    assert not [line for node in nodes for line in node.news]


def test_a_job_that_still_runs_is_not_started_again(fleetrun: Fleetrun):
    first = fleetrun.start("--job_id", "night", fleetrun.script("stay()"))
    first.until_ready(1)
    second = fleetrun.run("again", "night")
    assert second.code == 2
    assert "night" in second.err
    first.popen.terminate()
    assert first.wait() == 143

"""The logs and what the console shows of them."""

import re
import stat
from pathlib import Path

import pytest

from tests.support.command import Fleetrun
from tests.support.traces import wait_until

TWO = ("--nproc_per_node", "2")
SAY = "print('from', WHO)"


@pytest.mark.quick
def test_files_are_named_after_job_pod_role_and_number_and_are_private(fleetrun: Fleetrun):
    script = fleetrun.script(f"{SAY}\nmeet(3)")
    launch = fleetrun.run("--job_id", "night", "--server_num", "1", "--trainer_num", "2", script)
    (pod,) = re.findall(r"Run Pod: ([a-z]{6}), replicas 3, status ready", launch.err)
    assert {path.name for path in fleetrun.logs()} == {
        f"night.{pod}.ps.0.log",
        f"night.{pod}.trainer.0.log",
        f"night.{pod}.trainer.1.log",
    }
    for path in fleetrun.logs():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert fleetrun.log("ps.0") == "from ps.0\n"


def test_latest_leads_to_the_newest_pod(fleetrun: Fleetrun):
    script = fleetrun.script("print('run', sys.argv[1], WHO)")
    for number in "123":
        fleetrun.run(*TWO, script, number)
        latest = fleetrun.folder / "log" / "latest"
        assert (latest / "trainer.0.log").read_text() == f"run {number} trainer.0\n"
        assert (latest / "trainer.1.log").read_text() == f"run {number} trainer.1\n"
    assert len(fleetrun.logs("*.trainer.0.log")) == 3


@pytest.mark.parametrize(
    ("follow", "shown"),
    [
        ((), "from trainer.0\n"),
        (("--follow", "none"), ""),
        (("--follow", "trainer:1"), "from trainer.1\n"),
        (("--follow", "ps"), "from ps.0\n"),
        (("--follow", "trainer:7"), ""),
    ],
)
def test_the_console_follows_whom_it_is_told(fleetrun: Fleetrun, follow: tuple[str, ...], shown: str):
    script = fleetrun.script(f"{SAY}\nmeet(3)")
    launch = fleetrun.run("--server_num", "1", "--trainer_num", "2", *follow, script)
    assert launch.out == shown


def test_several_are_told_apart_by_labels(fleetrun: Fleetrun):
    script = fleetrun.script(f"{SAY}\nmeet(3)")
    launch = fleetrun.run("--server_num", "1", "--trainer_num", "2", "--follow", "all", script)
    assert sorted(launch.out.splitlines()) == [
        "ps.0      | from ps.0",
        "trainer.0 | from trainer.0",
        "trainer.1 | from trainer.1",
    ]


def test_lines_of_two_writers_stay_whole(fleetrun: Fleetrun):
    script = fleetrun.script("""
for number in range(2000):
    os.write(1, b"<%d:%d" % (RANK, number))
    os.write(1, b":%s>\\n" % (b"x" * (number % 50)))
""")
    launch = fleetrun.run(*TWO, "--follow", "all", script)
    lines = launch.out.splitlines()
    assert len(lines) == 4000
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"trainer.{rank} | ")]
        assert own == [f"trainer.{rank} | <{rank}:{number}:{'x' * (number % 50)}>" for number in range(2000)]


def test_a_hundred_thousand_lines_all_reach_the_console(fleetrun: Fleetrun):
    script = fleetrun.script("sys.stdout.writelines(f'line {number}\\n' for number in range(100_000))")
    launch = fleetrun.run(script)
    assert launch.out == "".join(f"line {number}\n" for number in range(100_000))


@pytest.mark.quick
def test_output_appears_while_the_script_runs(fleetrun: Fleetrun):
    script = fleetrun.script("print('epoch 1')\ntell('ready', os.getpid())\nwait_for_go()\nprint('epoch 2')")
    launch = fleetrun.start(script)
    launch.until_out("epoch 1\n")
    assert "epoch 2" not in launch.out
    launch.go()
    assert launch.wait() == 0
    assert launch.out == "epoch 1\nepoch 2\n"


def test_any_bytes_pass_as_they_are(fleetrun: Fleetrun):
    script = fleetrun.script("os.write(1, bytes(range(256)) + '汉字'.encode('gb18030') + b'\\nend')")
    launch = fleetrun.run(script)
    assert launch.raw == bytes(range(256)) + "汉字".encode("gb18030") + b"\nend\n"


def test_a_very_long_line_passes(fleetrun: Fleetrun):
    launch = fleetrun.run(fleetrun.script("os.write(1, b'x' * 1_000_000 + b'\\n')"))
    assert launch.out.replace("\n", "") == "x" * 1_000_000


def test_rotation_bounds_the_file_and_keeps_the_newest_lines(fleetrun: Fleetrun):
    keep = 256 * 1024
    script = fleetrun.script("""
sys.stdout.writelines(f"line {number:07}\\n" for number in range(400_000))
tell("ready", os.getpid())
wait_for_go()
print("the last words")
""")
    launch = fleetrun.start("--log_rotate", "256K", "--follow", "none", script)
    launch.until_ready(1)
    (path,) = fleetrun.logs()
    wait_until(lambda: path.stat().st_blocks * 512 <= 2 * keep + 8192, lambda: path.stat())
    launch.go()
    assert launch.wait() == 0, launch
    if "could not shorten" in launch.err:
        pytest.skip("the file system cannot remove blocks from a file")
    lines = path.read_bytes().lstrip(b"\0").decode().splitlines()
    assert lines[-1] == "the last words"
    numbers = [int(line.split()[1]) for line in lines[1:-1]]
    assert numbers == list(range(400_000 - len(numbers), 400_000))
    assert len(numbers) * 13 >= keep - 8192


def test_rotation_loses_nothing_of_what_the_console_follows(fleetrun: Fleetrun):
    script = fleetrun.script("""
for number in range(100):
    sys.stdout.writelines(f"{number:03} {line:03}\\n" for line in range(1000))
    sys.stdout.flush()
    time.sleep(0.002)
""")
    launch = fleetrun.run("--log_rotate", "64K", script)
    assert launch.code == 0
    assert launch.out == "".join(f"{number:03} {line:03}\n" for number in range(100) for line in range(1000))


def test_overwrite_removes_the_logs_of_earlier_runs_but_not_of_running_ones(fleetrun: Fleetrun):
    quick = fleetrun.script(SAY, "quick.py")
    running = fleetrun.start(fleetrun.script("print('alive', flush=True)\nstay()"))
    running.until_ready(1)
    fleetrun.run(quick)
    fleetrun.run("--job_id", "other", quick)
    before = {path.name for path in fleetrun.logs()}
    fleetrun.run("--log_overwrite", *TWO, quick)
    after = {path.name for path in fleetrun.logs()}
    assert (len(before), len(after & before), len(after)) == (3, 2, 4)
    assert sorted(Path(name).name.split(".")[0] for name in after & before) == ["default", "other"]
    assert any("alive" in path.read_text() for path in fleetrun.logs())
    running.send(15)
    running.wait()


def test_logs_go_where_they_are_told(fleetrun: Fleetrun):
    launch = fleetrun.run("--log_dir", "a/b/c", fleetrun.script(SAY))
    assert launch.code == 0
    assert (fleetrun.folder / "a/b/c/latest/trainer.0.log").read_text() == "from trainer.0\n"
    assert not (fleetrun.folder / "log").exists()


def test_a_log_that_somebody_deletes_does_not_matter(fleetrun: Fleetrun):
    script = fleetrun.script("tell('ready', os.getpid())\nwait_for_go()\nprint('end')")
    launch = fleetrun.start("--log_rotate", "64K", script)
    launch.until_ready(1)
    for path in fleetrun.logs():
        path.unlink()
    launch.go()
    assert launch.wait() == 0, launch


def test_a_log_that_somebody_empties_goes_on(fleetrun: Fleetrun):
    script = fleetrun.script("print('before')\ntell('ready', os.getpid())\nwait_for_go()\nprint('after')")
    launch = fleetrun.start(script)
    launch.until_out("before\n")
    (path,) = fleetrun.logs()
    path.write_bytes(b"")  # as logrotate's copytruncate does
    launch.go()
    assert launch.wait() == 0
    assert path.read_text() == "after\n"
    assert launch.out == "before\nafter\n"

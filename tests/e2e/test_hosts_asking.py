"""On three hosts: a job of two nodes is asked from its nodes, and from a host that runs no part of it."""

import getpass
import json
import os
import re
import signal
import tarfile
from collections.abc import Callable

import pytest

from tests.support.command import Launch
from tests.support.hosts import needs_hosts
from tests.support.nodes import Etcd, Nodes, codes, needs_etcd, ready
from tests.support.top_view import ESCAPE, View
from tests.support.traces import state_of, wait_until

pytestmark = [*needs_hosts, pytest.mark.slow]

SECRET = {"FLEETRUN_TOKEN": "correct horse battery staple"}
TALK = """
leave_on_term()
print("hello from", RANK)
print("a\\xff\\x1b[31mb", "é", "nan" if RANK == 3 else "", flush=True)
Path("more").touch()
with open("more") as more:
    tell("ready", os.getpid())
    while True:
        for line in more.readlines():
            print(line, end="", flush=True)
            if "last words" in line and RANK == 3:
                os._exit(7)
        time.sleep(0.02)
"""


def start_two(three: Nodes, *words: str, env: dict[str, str] | None = SECRET, **options: str) -> list[Launch]:
    """Nodes 0 and 1 with two trainers each, which print what is appended to `more`."""
    three.script(TALK)
    common = ("--job_id", "night", "--nproc_per_node", "2", *words)
    launches = [
        three.start(number, "--rank", str(number), *common, nnodes="2", env=env, **options)
        for number in range(2)
    ]
    ready(launches, 2)
    return launches


def say(three: Nodes, number: int, text: str) -> None:
    with (three.hosts[number].folder / "more").open("a") as more:
        more.write(f"{text}\n")


def end(launches: list[Launch]) -> None:
    launches[0].send(signal.SIGTERM)
    assert codes(launches) == [143, 143]


def by_rank(launch: Launch) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for line in launch.out.splitlines():
        said = json.loads(line)
        assert (said["node"], said["role"]) == (said["rank"] // 2, "trainer")
        found.setdefault(said["rank"], []).append(said["line"])
    return found


def test_logs_of_all_nodes_from_anywhere(three: Nodes):
    launches = start_two(three)
    master = f"{three.master}/night"
    whole = {
        rank: [f"hello from {rank}", f"a\xff\x1b[31mb é {'nan' if rank == 3 else ''}"] for rank in range(4)
    }
    asked: list[Callable[..., Launch]] = [
        three.commands[0].run,
        three.commands[1].run,
        lambda *words: three.commands[2].run(*words, "--job", master, env=SECRET),
    ]
    for run in asked:
        found = run("logs", "--json")
        assert (found.code, by_rank(found), found.err) == (0, whole, "")
        text = run("logs", "--rank", "3,0")
        assert sorted(text.out.splitlines()) == [
            "0 trainer 0 | a\xff\x1b[31mb é ",
            "0 trainer 0 | hello from 0",
            "1 trainer 3 | a\xff\x1b[31mb é nan",
            "1 trainer 3 | hello from 3",
        ]
        assert by_rank(run("logs", "--json", "--node", "1", "-n", "1")).keys() <= {2, 3}
        assert by_rank(run("logs", "--json", "--grep", "nan")) == {3: [whole[3][1]]}
        assert run("logs", "--rank", "7").code == 2
        assert "no node 2" in run("logs", "--node", "2").err
    stranger = three.commands[2].run("logs", "--job", master)
    assert (stranger.code, "token" in stranger.err, stranger.out) == (1, True, "")
    assert "node:" not in stranger.err
    wrong = three.commands[2].run("logs", "--job", f"{three.master}/day", env=SECRET)
    assert (wrong.code, "the job there is 'night'" in wrong.err) == (1, True)
    role = three.commands[2].run("logs", "--role", "foo", "--job", master, env=SECRET)
    assert (role.code, role.out) == (2, "")
    assert "node 1, h2 (10.77.0.2): --role foo: this job has no such role; This job has: trainer" in role.err
    end(launches)


def test_logs_are_followed_until_a_node_is_killed(three: Nodes):
    launches = start_two(three)
    followers = [
        three.commands[0].start("logs", "-f", "--grep", "wanted"),
        three.commands[2].start(
            "logs", "-f", "--grep", "wanted", "--job", f"{three.master}/night", env=SECRET
        ),
    ]
    for number in (0, 1):
        say(three, number, f"wanted: {number}")
        say(three, number, "nobody asks for this")
    for follower in followers:
        for number in (0, 1):
            for rank in (2 * number, 2 * number + 1):
                follower.until_out(f"{number} trainer {rank} | wanted: {number}\n")
        assert "nobody" not in follower.out
    os.kill(launches[1].launcher, signal.SIGKILL)
    assert launches[0].wait() == 125
    for follower in followers:
        follower.wait()
    launches[1].wait()


@pytest.mark.parametrize("secret", [SECRET, None])
def test_the_live_view_from_a_host_without_a_part_of_the_job(three: Nodes, secret: dict[str, str] | None):
    launches = start_two(three, env=secret)
    elsewhere = ("--job", f"{three.master}/night")
    status = three.commands[2].run("status", *elsewhere, env=secret)
    assert (status.code, status.err) == (0, ""), status
    assert "night (" in status.out
    assert "4 of 4 processes up" in status.out
    assert all(f"trainer.{index}" in status.out for index in (0, 1))
    assert status.out.count("aÿb é") == 4, "the last lines of all nodes"

    def together() -> bool:
        """Whether all ranks are at one place at this moment: one may read what is appended to `more`."""
        why = three.commands[2].run("why", "--json", *elsewhere, env=secret)
        assert why.code == 0, why
        return any("trainers 0-3" in line for line in json.loads(why.out)["ranks"])

    wait_until(together)
    view = View(three.commands[2], *elsewhere, columns=120, env=secret)
    rows = view.until_text("night (", "2 nodes", "4 of 4 processes up", "1 trainer 3 running")
    assert sum(" trainer " in row and re.search(r"\d[MG] ", row) is not None for row in rows) == 4, rows
    view.type_in(b"\x1b[F\r")
    view.until_text("trainer 3 (", "hello from 3", "<module>")
    view.type_in(ESCAPE)
    view.until_text("0 trainer 0 running")
    view.type_in("r")
    view.until_text("on all nodes?")
    view.type_in("y")
    for launch in launches:
        launch.until_told(" ready", 4)
        launch.until_err("restart by")
    view.until_text("4 of 4 processes up")
    view.type_in("x")
    view.until_text("Stop ", "on 2 nodes get SIGTERM")
    view.type_in("y")
    assert codes(launches) == [143, 143]
    # The store goes with its host, perhaps before the view has read the last answers.
    ends = "night has ended", "lost the connection to 10.77.0.1:6768/night"
    view.until(lambda rows: any(end in row for row in rows for end in ends), str(ends))
    view.quit()


def test_the_last_lines_arrive_though_the_job_ends(three: Nodes):
    launches = start_two(three)
    follower = three.commands[2].start("logs", "-f", "--job", f"{three.master}/night", env=SECRET)
    follower.until_out("hello from 3")
    say(three, 1, "the last words")
    assert codes(launches) == [7, 7]
    follower.wait()
    assert "1 trainer 3 | the last words\n" in follower.out


def test_stacks_of_all_nodes(three: Nodes):
    launches = start_two(three)
    pids = [launch.until_ready(2) for launch in launches]
    elsewhere = ("--job", f"{three.master}/night")
    for run, words in ((three.commands[1].run, ()), (three.commands[2].run, elsewhere)):
        found = json.loads(run("stacks", "--json", *words, env=SECRET).out)
        assert [(each["node"], each["rank"], each["pid"]) for each in found["processes"]] == [
            (rank // 2, rank, pids[rank // 2][rank % 2]) for rank in ((2, 3, 0, 1) if not words else range(4))
        ]
        assert "train.py" in json.dumps(found["processes"][0]["threads"])
        text = run("stacks", "--rank", "1-2", *words, env=SECRET)
        for rank in (1, 2):  # their scripts are two files
            assert (
                f"trainer {rank}: 1 process, node {rank // 2}: pid {pids[rank // 2][rank % 2]}\n" in text.out
            )
    one = three.commands[0].run("stacks", "--node", "1", "--rank", "0")
    assert (one.code, "no node" in one.err) == (2, True)
    end(launches)


def test_records_of_all_nodes(three: Nodes):
    launches = start_two(three)
    elsewhere = ("--job", f"{three.master}/night")
    for command, words in ((three.commands[1], ()), (three.commands[2], elsewhere)):
        found = json.loads(command.run("report", "--json", *words, env=SECRET).out)
        own = [found] if not words else []
        assert [each["host"] for each in [*own, *found["nodes"]]] == (["h2", "h1"] if own else ["h1", "h2"])
        text = command.run("report", *words, env=SECRET)
        assert (text.code, text.err) == (0, "")
        assert "\nOn node 0, h1 (10.77.0.1):\nJob night" in f"\n{text.out}"
        drawn = command.run("plot", "-o", "all.svg", *words, env=SECRET)
        assert drawn.code == 0, drawn
        picture = (command.folder / "all.svg").read_text()
        assert all(f">trainer {rank}<" in picture for rank in range(4))
        packed = command.run("bundle", "-o", "all.tgz", *words, env=SECRET)
        assert packed.code == 0, packed
        with tarfile.open(command.folder / "all.tgz") as archive:
            names = {each.name.partition("/")[2]: each for each in archive.getmembers()}
            inner = archive.extractfile(names["node.0.tar.gz"])
            with tarfile.open(fileobj=inner) as other:
                logs = [each.name for each in other.getmembers() if each.name.endswith("trainer.1.log")]
            assert len(logs) == 1, packed
        assert ("node.1.tar.gz" in names) == bool(words)
    assert "token" in three.commands[2].run("plot", *elsewhere).err
    end(launches)


def test_without_a_secret_nodes_tell_what_anybody_can_have(three: Nodes):
    launches = start_two(three, env=None)
    say(three, 0, "\n".join(f"{number:0100}" for number in range(4000)))
    launches[0].until_out("0003999\n")
    elsewhere = ("--job", f"{three.master}/night")
    found = three.commands[2].run("logs", "--json", "--node", "0", *elsewhere)
    assert found.code == 0
    assert "earlier lines are missing" in found.err
    assert "hello from 0" not in found.out
    searched = three.commands[2].run("logs", "--grep", "hello|0003999$", "--node", "0", *elsewhere)
    assert set(searched.out.splitlines()) == {f"{3999:0100}"}
    assert "FLEETRUN_TOKEN" in three.commands[2].run("bundle", *elsewhere).err
    assert three.commands[1].run("report").code == 0
    with_one = three.commands[2].run("logs", *elsewhere, env=SECRET)
    assert (with_one.code, "token" in with_one.err) == (1, True)
    end(launches)


@pytest.mark.parametrize("words", [(), ("--now",)], ids=["stop", "now"])
def test_stop_ends_the_job_on_all_nodes(three: Nodes, words: tuple[str, ...]):
    launches = start_two(three, "--elastic_level", "1", "--stop_timeout", "1h")
    stop = three.commands[1].run("stop", *words)
    assert stop.code == 0, stop
    assert codes(launches) == [143, 143]
    asker = f"`fleetrun {' '.join(('stop', *words))}` of {getpass.getuser()} on h2"
    assert f"asked to end by {asker}" in launches[0].said


def test_a_stop_of_one_node_is_an_error_on_none(three: Nodes):
    launches = start_two(three)
    elsewhere = ("--job", f"{three.master}/night")
    assert three.commands[2].run("stop", "--node", "1", *elsewhere, env=SECRET).code == 0
    assert codes(launches) == [143, 143]
    for launch in launches:
        levels = [
            each.partition(" ")[0]
            for each in launch.said.split("LAUNCH ")
            if "asked to end by `fleetrun stop` of " in each
        ]
        assert levels == ["INFO", "INFO"], launch.said


def test_a_node_is_stopped_from_elsewhere(three: Nodes):
    three.script(TALK)
    launches = [
        three.start(number, "--rank", str(number), "--elastic_timeout", "60", nnodes="1:2", env=SECRET)
        for number in range(2)
    ]
    ready(launches)
    elsewhere = ("--job", f"{three.master}/default")
    leaving = three.commands[2].run("stop", "--node", "1", *elsewhere, env=SECRET)
    assert leaving.code == 0, leaving
    assert launches[1].wait() == 143
    launches[0].until_ready(2)
    assert three.commands[2].run("stop", *elsewhere).code == 1, "no secret"
    assert three.commands[2].run("stop", *elsewhere, env=SECRET).code == 0
    assert launches[0].wait() == 143


@pytest.mark.parametrize("which", [0, 2], ids=["on a node", "elsewhere"])
def test_a_suspended_reader_holds_nothing_up(three: Nodes, which: int):
    launches = start_two(three)
    words = () if which == 0 else ("--job", f"{three.master}/night")
    follower = three.commands[which].start("logs", "-f", *words, env=SECRET)
    follower.until_out("hello from 3")
    follower.send(signal.SIGSTOP)
    wait_until(lambda: state_of(follower.popen.pid) == "T")
    for _ in range(3):
        say(three, 1, "x" * 1_000_000)
    end(launches)
    follower.send(signal.SIGCONT)
    follower.wait()


@needs_etcd
@pytest.mark.timeout(300)
def test_where_several_machines_serve_the_store(three: Nodes):
    three.master = ",".join(host.address for host in three.hosts)
    three.script(TALK)
    launches = [three.start(number, "--job_id", "night", env=SECRET) for number in range(3)]
    ready(launches)
    found = three.commands[1].run("logs", "--grep", "hello")
    assert sorted(line.partition("| ")[2] for line in found.out.splitlines()) == [
        f"hello from {rank}" for rank in range(3)
    ]
    for launch in launches:
        launch.send(signal.SIGTERM)
    codes(launches)


@needs_etcd
def test_in_an_etcd_a_request_without_the_secret_is_not_answered(three: Nodes):
    three.master = Etcd(three.hosts[2]).url
    launches = start_two(three)
    elsewhere = ("--grep", "hello", "--job", f"{three.master}/night")
    found = three.commands[2].run("logs", *elsewhere, env=SECRET)
    assert sorted(line.partition("| ")[2] for line in found.out.splitlines()) == [
        f"hello from {rank}" for rank in range(4)
    ]
    stranger = three.commands[2].run("logs", *elsewhere)
    assert (stranger.code, stranger.out) == (1, "")
    assert "node 0, h1 (10.77.0.1): no answer" in stranger.err
    three.hosts[1].link_down()
    lost = three.commands[0].run("logs", *elsewhere[:2])
    assert (lost.code, lost.out.count("hello")) == (1, 2)
    assert "node 1, h2 (10.77.0.2): " in lost.err
    three.hosts[1].link_up()
    three.hosts[2].link_down()
    for words in (("logs", "--grep", "hello"), ("stacks", "--each")):
        alone = three.commands[0].run(*words)
        assert (alone.code, "cannot ask the other nodes" in alone.err) == (1, True), alone
        assert "trainer 0" in alone.out
        assert "trainer 1" in alone.out
    three.hosts[2].link_up()
    for launch in launches:
        launch.send(signal.SIGTERM)
    assert codes(launches) == [143, 143]

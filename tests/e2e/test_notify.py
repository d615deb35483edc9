"""--notify: who is told of what, by real servers and commands, and that no job waits for them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.e2e.test_hangs import STUCK
from tests.e2e.test_together import Nodes
from tests.support.command import Fleetrun, Launch
from tests.support.etcd import Certificates, needs_openssl
from tests.support.traces import left_behind, wait_until
from tests.support.webhook import PATH, Webhook

FAILS_ONCE = 'if ATTEMPT == 0:\n    raise ValueError("a < b")\n'


def no_secret(fleetrun: Fleetrun, *launches: Launch) -> None:
    """In what is printed and in all files."""
    assert not any(PATH in each.out + each.err for each in launches)
    found = [
        path for path in fleetrun.folder.rglob("*") if path.is_file() and PATH.encode() in path.read_bytes()
    ]
    assert not found


def test_a_restart_and_the_end(fleetrun: Fleetrun):
    with Webhook() as server:
        script = fleetrun.script(
            f"{FAILS_ONCE}print(sorted(name for name in os.environ if 'NOTIFY' in name))"
        )
        launch = fleetrun.run("--job_id=night", script, env={"FLEETRUN_NOTIFY": server.url})
    assert launch.code == 0
    restart, end = server.posted
    assert restart["event"] == "restart"
    assert restart["sentence"].startswith(f"Job night ({restart['script']}) on ")
    assert restart["script"] == "train.py"
    assert restart["sentence"].endswith("restarts (1 of 3): trainer 0: ValueError: a < b at train.py:3")
    assert restart["text"].endswith("ValueError: a &lt; b at train.py:3")
    assert (restart["job"], restart["container"], restart["rank"], restart["code"]) == (
        "night",
        "trainer.0",
        0,
        1,
    )
    assert Path(restart["log"]).exists()
    assert end["event"] == "end"
    assert "completed" in end["sentence"]
    assert (end["code"], end["restarts"]) == (0, 1)
    assert restart.keys() == end.keys()
    assert launch.printed[-1] == "[]", "the processes do not get it"
    assert f"notify: {server.host}" in launch.err
    no_secret(fleetrun, launch)


@needs_openssl
def test_https_needs_a_certificate_that_the_machine_trusts(fleetrun: Fleetrun):
    made = Certificates.made(fleetrun.folder / "certificates")
    script = fleetrun.script("pass")
    with Webhook(certificate=made["server.pem"], key=made["server.key"]) as server:
        words = ("--notify", server.url, script)
        trusted = fleetrun.run(*words, env={"SSL_CERT_FILE": made["ca.pem"]})
        assert server.events == ["end"]
        assert "cannot notify" not in trusted.err
        strange = fleetrun.run(*words)
        assert server.events == ["end"]
    assert [trusted.code, strange.code] == [0, 0]
    assert f"cannot notify {server.host} of the end: its certificate is not trusted (" in strange.err
    no_secret(fleetrun, trusted, strange)


def test_a_failure_is_told_once_and_the_url_is_nowhere(fleetrun: Fleetrun):
    with Webhook() as server:
        script = fleetrun.script('raise ValueError("bad input")')
        words = ("--max_restart=0", "--notify", server.url, "-v", script)
        launch = fleetrun.run(*words)
        assert launch.code == 1
        (failure,) = server.posted
        assert failure["event"] == "failure"
        assert "failed with exit code 1" in failure["sentence"]
        assert failure["reason"] == "trainer 0: ValueError: bad input at train.py:2"
        asked = [fleetrun.run(*each) for each in (["report"], ["report", "--json"], ["history"], ["bundle"])]
        again = fleetrun.run("again")
        assert "--notify" in again.err, "that it is not in the record"
        assert len(server.posted) == 1
        with_it = fleetrun.run("again", env={"FLEETRUN_NOTIFY": server.url})
        assert server.events == ["failure", "failure"]
    saved = fleetrun.run("--dry_run", "--save=job.toml", *words)
    assert "because it may be a secret" in (fleetrun.folder / "job.toml").read_text()
    no_secret(fleetrun, launch, again, with_it, saved, *asked)


def test_a_secret_in_the_error_of_a_script_is_not_told(fleetrun: Fleetrun):
    script = fleetrun.script('raise ValueError("no access with " + os.environ["HF_TOKEN"])')
    with Webhook() as server:
        launch = fleetrun.run(
            "--max_restart=0", "--notify", server.url, script, env={"HF_TOKEN": "kept-secret"}
        )
    assert launch.code == 1
    (failure,) = server.posted
    assert failure["reason"] == "trainer 0: ValueError: no access with ****** at train.py:2"
    assert "kept-secret" not in json.dumps(failure)


def test_what_is_not_asked_for_is_not_told_and_a_user_who_stops_a_job_is_no_failure(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\nstay()")
    with Webhook() as server:
        for moments, events in (("end", ["end"]), ("failure,restart,hang", [])):
            launch = fleetrun.start("--notify", server.url, "--notify_on", moments, script)
            launch.until_ready(1)
            launch.send(signal.SIGINT)
            assert launch.wait() == 130
            assert server.events == events
            server.posted.clear()


def test_a_command_and_a_job_file(fleetrun: Fleetrun):
    fleetrun.script('raise ValueError("bad input")')
    Path(fleetrun.folder, "job.toml").write_text(
        'script = "train.py"\nmax_restart = 0\n'
        """notify = ['command:echo "$FLEETRUN_TEXT" > text; cat > body', "command:exit 9"]\n"""
    )
    launch = fleetrun.run("up", "job.toml")
    assert launch.code == 1
    body = json.loads(Path(fleetrun.folder, "body").read_text())
    assert Path(fleetrun.folder, "text").read_text() == f"{body['sentence']}\n"
    assert "cannot notify command of the failure: exit code 9" in launch.said


def test_a_hang_is_told_and_that_it_ended_the_job_too(fleetrun: Fleetrun):
    script = fleetrun.script(f"{STUCK}leave_on_term()\nbegin(1)\nstuck_here()")
    with Webhook() as server:
        words = ("--hang_timeout=3", "--max_restart=1", "--notify", server.url)
        assert fleetrun.run(*words, script).code == 124
    assert server.events == ["hang", "hang"]
    assert "restarts (1 of 1)" in server.posted[0]["sentence"]
    assert server.posted[1]["code"] == 124


@pytest.mark.parametrize("answer", ["hang", "close", "garbage", 500, 404, (429, 3600)])
def test_a_bad_server_delays_no_restart(fleetrun: Fleetrun, answer):
    """The second attempt runs while the first message has had its bad answer, or none."""
    script = fleetrun.script(f'{FAILS_ONCE}tell("again")\nwait_for_go()')
    with Webhook(answer) as server:
        launch = fleetrun.start("--notify", server.url, "--notify_on=restart", script)
        launch.until_told("again")
        wait_until(lambda: server.posted != [])
        launch.go()
        if answer in ("hang", (429, 3600)):
            launch.until_err(
                "Ctrl-C stops waiting" if answer == "hang" else "the server answered 429 (1 attempt)"
            )
        if answer == "hang":
            launch.send(signal.SIGINT)
        assert launch.wait() == 0
        if answer in ("close", "garbage", 500):
            assert len(server.posted) >= 2, "and the next attempt is answered well"
        no_secret(fleetrun, launch)
    assert ("the server answered 404" in launch.said) == (answer == 404)


def notifier_of(launch: Launch) -> int:
    (pid,) = [pid for pid, words in left_behind(launch.token).items() if "fleetrun.notifiers" in words]
    return pid


def test_a_stopped_notifier_process_holds_up_no_end(fleetrun: Fleetrun):
    script = fleetrun.script('tell("ready", os.getpid())\nwait_for_go()')
    with Webhook() as server:
        launch = fleetrun.start("--notify", server.url, script)
        launch.until_ready(1)
        os.kill(notifier_of(launch), signal.SIGSTOP)
        launch.go()
        assert launch.wait() == 0
    assert f"{server.host}: the last notification may be lost" in launch.said


def test_of_one_that_is_killed_after_the_end_the_user_is_told(fleetrun: Fleetrun):
    launch = fleetrun.run("--notify=command:kill -9 $PPID", "true")
    assert launch.code == 0
    assert "command: the last notification may be lost" in launch.said


def test_of_a_notifier_process_that_is_killed_the_user_is_told(fleetrun: Fleetrun):
    script = fleetrun.script('tell("ready", os.getpid())\nwait_for_go()')
    with Webhook() as server:
        launch = fleetrun.start("--notify", server.url, script)
        launch.until_ready(1)
        os.kill(notifier_of(launch), signal.SIGKILL)
        launch.until_err("notifier process")
        launch.go()
        assert launch.wait() == 0
    assert server.posted == []


def test_of_several_nodes_one_tells(fleetrun: Fleetrun):
    with Webhook() as server:
        nodes = Nodes(fleetrun, "--nnodes=2", "--max_restart=1", "--notify", server.url)
        script = fleetrun.script('if RANK == 1:\n    raise ValueError("bad input")\nleave_on_term()\nstay()')
        launches = [nodes.start("--rank=0", script), nodes.start("--rank=1", script)]
        assert [each.wait() for each in launches] == [1, 1]
    assert server.events == ["restart", "failure"]
    for each in server.posted:
        assert each["reason"].startswith("node 1, ")
        assert each["reason"].endswith("trainer 1: ValueError: bad input at train.py:3")
        assert (each["node"], each["restarts"]) == (1, 1)


def test_of_a_hang_on_several_nodes_one_tells_once(fleetrun: Fleetrun):
    with Webhook() as server:
        # A Python starts within eight seconds.
        nodes = Nodes(fleetrun, "--nnodes=2", "--hang_timeout=8", "--notify", server.url)
        script = fleetrun.script(f"{STUCK}leave_on_term()\nif ATTEMPT == 0:\n    stuck_here()")
        launches = [nodes.start("--rank=0", script), nodes.start("--rank=1", script)]
        assert [each.wait() for each in launches] == [0, 0]
    assert server.events == ["hang", "end"]


def test_of_the_loss_of_the_first_node_the_second_tells(fleetrun: Fleetrun):
    script = fleetrun.script("leave_on_term()\nstay()")
    with Webhook() as server:
        nodes = Nodes(fleetrun, "--nnodes=2", "--heartbeat_timeout=2", "--notify", server.url)
        first, second = nodes.start("--rank=0", script), nodes.start("--rank=1", script)
        first.until_ready(1)
        second.until_ready(1)
        first.send(signal.SIGKILL)
        assert first.wait() == -signal.SIGKILL
        assert second.wait() != 0
        wait_until(lambda: server.posted != [])
    assert server.events == ["failure"]


@pytest.mark.parametrize(
    "notify",
    [
        "http:///secret",
        "ftp://secret/x",
        "https://h/secret b",
        "webhook:secret",
        "mail:secret",
        "https://[/secret",
    ],
)
@pytest.mark.quick
def test_what_is_no_notifier_is_an_error_that_does_not_repeat_it(fleetrun: Fleetrun, notify):
    launch = fleetrun.run("--notify", notify, "train.py")
    assert launch.code == 2
    assert "--notify is not valid" in launch.err
    assert "secret" not in launch.err


@pytest.mark.quick
def test_what_would_be_told(fleetrun: Fleetrun):
    words = (
        "--notify",
        f"https://h{PATH}",
        "--notify=command:mail me",
        "--notify_on=hang,failure",
        "--dry_run",
    )
    launch = fleetrun.run(*words, "true")
    assert "notifies h, command (failure, hang)" in launch.out
    assert PATH not in launch.out + launch.err
    assert json.loads(fleetrun.run(*words, "--json", "true").out)["notify"] == "h, command (failure, hang)"

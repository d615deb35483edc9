"""`--scheduler ssh` through a real sshd: one job on two addresses of this machine."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetrun.errors import UsageError
from fleetrun.launcher.prepare import take_notify
from fleetrun.schedulers.base import scheduler
from fleetrun.schedulers.ssh import SshExit, _environment, judge_end
from tests.support.command import Fleetrun, Launch
from tests.support.ports import free_port
from tests.support.sshd import Sshd
from tests.support.submissions import printed, submission
from tests.support.waiting import eventually

VARIABLES = "--env=FLEETTEST_*,FLEETTEST_TOKEN,PYTHONPATH"
HOSTS = ("127.0.0.1", "127.0.0.2")


class OverSsh:
    """The command of a person at the near end, with the server's keys."""

    def __init__(self, fleetrun: Fleetrun, server: Sshd) -> None:
        self.fleetrun = fleetrun
        self.server = server
        self.master = f"127.0.0.1:{free_port()}"

    def start(self, *words: str, hosts: tuple[str, ...] = HOSTS, **options: str) -> Launch:
        given = {"config": str(self.server.config), **options}
        settings = [f"{name}={value}" for name, value in given.items()]
        return self.fleetrun.start(
            "--scheduler=ssh",
            VARIABLES,
            f"--ips={','.join(hosts)}",
            *([f"--master={self.master}"] if len(hosts) > 1 else []),
            "--max_restart=0",
            *(word for setting in settings for word in ("--scheduler_option", setting)),
            *words,
            env={"FLEETRUN_TOKEN": "a-secret-of-the-job-0123456789"},
        )

    def run(self, *words: str, hosts: tuple[str, ...] = HOSTS, **options: str) -> Launch:
        launch = self.start(*words, hosts=hosts, **options)
        launch.wait()
        return launch

    def script(self, text: str) -> str:
        return self.fleetrun.script(text)


@pytest.fixture
def over_ssh(fleetrun: Fleetrun, sshd: Sshd) -> Iterator[OverSsh]:
    yield OverSsh(fleetrun, sshd)
    sshd.kill_sessions()
    sshd.trust(sshd.folder / "host_key.pub")


def clients(launch: Launch) -> dict[str, int]:
    """The ssh clients of a launch, by host."""
    found = {}
    for pid in map(int, Path(f"/proc/{launch.launcher}/task/{launch.launcher}/children").read_text().split()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if words[0] == "ssh":
            found[words[words.index("--") + 1]] = pid
    return found


def lines_of(text: str, host: str) -> list[str]:
    head = f"{host} | "
    return [line.removeprefix(head) for line in text.splitlines() if line.startswith(head)]


def until_ready(launch: Launch) -> None:
    """Both scripts are, and the near end has heard from both hosts: to one that has not begun, as far as it
    knows, it passes nothing on.
    """
    launch.until_ready(2)
    launch.until(lambda: all(lines_of(launch.err, host) for host in HOSTS), "a line of each host")


# ---- what would run


def test_a_dry_run_prints_the_clients_without_the_secret():
    job = submission(
        "--scheduler=ssh", "--ips=h1,[fd00::2]", "--scheduler_option", "user=me", "--scheduler_option",
        "python=/opt/py", "--scheduler_option", "dir=/job dir", "--heartbeat_timeout=2", "--dry_run",
        "train.py", "a b", token="secret-of-the-job",
    )  # fmt: skip
    assert scheduler("ssh").submit(job) == 0
    first, second = map(shlex.split, printed(job).splitlines())
    assert second[-2] == "fd00::2"
    assert {"-l", "me", "BatchMode=yes", "ServerAliveInterval=1"} <= set(first)
    shell = shlex.split(first[-1])
    assert shell[:2] == ["sh", "-c"]
    assert shlex.split(shell[2]) == [
        "cd", "/job dir", "&&", "exec", "/opt/py", "-m", "fleetrun.schedulers.ssh_remote", "--", "/opt/py",
        "-m", "fleetrun", "--host=h1", "--ips=h1,[fd00::2]", "--heartbeat_timeout=2", "--", "train.py", "a b",
    ]  # fmt: skip
    assert "secret-of" not in printed(job)


def test_whom_to_notify_goes_with_the_secret_of_the_job():
    words = ("--scheduler=ssh", "--ips=h1", "--notify=https://h/kept-secret", "--dry_run", "train.py")
    environ = {}
    take_notify(submission(*words).settings, environ)
    job = submission(*words, environ=environ, token="secret-of-the-job")
    assert scheduler("ssh").submit(job) == 0
    assert "notify" not in printed(job)
    assert _environment(job) == {
        "FLEETRUN_TOKEN": "secret-of-the-job", "FLEETRUN_NOTIFY": "https://h/kept-secret"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "needs --ips"),
        (("--ips=h1", "--scheduler_option", "prot=22"), "prot: ssh has no such option"),
        (("--ips=h1", "--scheduler_option", "env=A"), "env=A: that is an option now"),
        (("--ips=h1", "--env", "NO_SUCH"), "NO_SUCH: this variable is not set"),
        (("--ips=h1", "--env", f"A={'x' * 70_000}"), "come to .* bytes; ssh carries 60000"),
    ],
)
def test_what_cannot_be_is_an_error(words: tuple[str, ...], message: str):
    with pytest.raises(UsageError, match=message):
        scheduler("ssh").submit(submission("--scheduler=ssh", *words, "train.py"))


# ---- on real connections


@pytest.mark.ssh
@pytest.mark.slow
def test_the_same_command_runs_on_every_host(over_ssh: OverSsh):
    script = over_ssh.script("tell('is', RANK, os.environ['WORLD_SIZE'], sys.argv[1:])\nprint('hello', RANK)")
    launch = over_ssh.run("--follow=all", script, "a b", "it's", "$HOME", "--ips=x", "line\nline")
    assert launch.code == 0, launch
    words = ["a b", "it's", "$HOME", "--ips=x", "line\nline"]
    assert sorted(launch.told("is")) == [f"trainer.{n} is {n} 2 {words!r}" for n in range(2)]
    assert [lines_of(launch.out, host) for host in HOSTS] == [["hello 0"], ["hello 1"]]
    assert any("Pod completed" in line for line in lines_of(launch.err, HOSTS[1]))


@pytest.mark.ssh
@pytest.mark.slow
def test_the_first_failure_ends_it_everywhere_with_its_code(over_ssh: OverSsh):
    script = over_ssh.script(
        "tell('ready', os.getpid())\nif RANK == 1:\n    sys.exit(7)\nleave_on_term()\nstay()"
    )
    launch = over_ssh.run(script)
    assert launch.code == 7, launch
    assert any("trainer 1 exited with code 7" in line for line in lines_of(launch.err, HOSTS[0]))


@pytest.mark.ssh
@pytest.mark.slow
def test_ctrl_c_stops_every_host_and_waits(over_ssh: OverSsh):
    launch = over_ssh.start(
        over_ssh.script("leave_on_term()\non(signal.SIGINT, lambda: os._exit(0))\nstay()")
    )
    until_ready(launch)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    assert len(launch.told("got SIG")) == 2
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
def test_twice_kills(over_ssh: OverSsh):
    launch = over_ssh.start(
        over_ssh.script("on(signal.SIGTERM, lambda: None)\non(signal.SIGINT, lambda: None)\nstay()")
    )
    until_ready(launch)
    launch.send(signal.SIGINT)
    launch.until_told("got SIG", 2)
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
@pytest.mark.parametrize("host", HOSTS)
def test_a_lost_connection_ends_the_job_on_both_sides_of_it(over_ssh: OverSsh, host: str):
    launch = over_ssh.start(over_ssh.script("leave_on_term()\nstay()"))
    until_ready(launch)
    os.kill(clients(launch)[host], signal.SIGKILL)
    assert launch.wait() != 0, launch
    assert f"{host}: the connection was lost" in launch.said
    launch.until_told("got SIGTERM", 2)
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
def test_a_connection_that_swallows_everything_is_noticed_on_both_sides(over_ssh: OverSsh):
    launch = over_ssh.start("--heartbeat_timeout=6", over_ssh.script("leave_on_term()\nstay()"))
    until_ready(launch)
    over_ssh.server.freeze()
    launch.until_told("got SIGTERM", 2)
    assert launch.wait() == 125, launch
    assert "the connection was lost" in launch.said
    over_ssh.server.kill_sessions()
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
def test_killing_the_near_end_leaves_nothing_on_any_host(over_ssh: OverSsh):
    launch = over_ssh.start(over_ssh.script("leave_on_term()\nstay()"))
    launch.until_ready(2)
    os.kill(launch.launcher, signal.SIGKILL)
    launch.wait()
    launch.until_told("got SIGTERM", 2)
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
def test_user_signals_reach_the_scripts_of_all_hosts(over_ssh: OverSsh):
    launch = over_ssh.start(
        over_ssh.script("on(signal.SIGUSR1, lambda: None)\ntell('ready', os.getpid())\nwait_for_go()")
    )
    until_ready(launch)
    launch.send(signal.SIGUSR1)
    launch.until_told("got SIGUSR1", 2)
    launch.go()
    assert launch.wait() == 0, launch


@pytest.mark.ssh
@pytest.mark.slow
def test_the_secret_is_there_and_in_no_command_line(over_ssh: OverSsh):
    launch = over_ssh.start(over_ssh.script("tell('has', os.environ['FLEETRUN_TOKEN'])\nstay()"))
    launch.until_ready(2)
    secret = "a-secret-of-the-job"
    assert len(launch.told(f"has {secret}")) == 2
    shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert secret not in shown
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch


@pytest.mark.ssh
@pytest.mark.slow
def test_what_only_a_job_file_says_reaches_hosts_without_the_file(over_ssh: OverSsh):
    script = over_ssh.script("tell('has', os.environ.get('A'), os.environ.get('B'))")
    file = over_ssh.fleetrun.folder / "job.toml"
    text = f'script = "{script}"\n[environment]\nA = "x y"\nB = "file"\n[roles.evaluator]\ncount = 1\n'
    file.write_text(text)
    launch = over_ssh.run(f"--config={file}", "--env=B=typed", "--env=FLEETRUN_NO=1")
    assert (launch.code, "FLEETRUN_NO" in launch.said) == (2, True), launch
    launch = over_ssh.run(f"--config={file}", "--env=B=typed")
    assert launch.code == 0, launch
    assert sorted(launch.told("has")) == [
        f"{name} has x y typed" for name in ("evaluator.0", "trainer.0", "trainer.1")
    ]
    assert not list(over_ssh.fleetrun.folder.glob("log/*.job.toml"))


@pytest.mark.ssh
@pytest.mark.slow
def test_output_that_nobody_reads_delays_nothing_and_loses_nothing(over_ssh: OverSsh):
    script = over_ssh.script("for n in range(200_000):\n    print('line', n)\ntell('printed')")
    read, write = os.pipe()
    launch = over_ssh.fleetrun.start(
        "--scheduler=ssh", "--ips=127.0.0.1", "--scheduler_option", f"config={over_ssh.server.config}",
        VARIABLES, script, stdout=write,
    )  # fmt: skip
    os.close(write)
    launch.until_told("printed")
    with os.fdopen(read) as out:
        lines = out.read().splitlines()
    assert launch.wait() == 0, launch
    assert lines == [f"line {n}" for n in range(200_000)]


@pytest.mark.ssh
@pytest.mark.slow
def test_an_edit_starts_the_ranks_of_all_hosts_again(over_ssh: OverSsh):
    folder = over_ssh.fleetrun.folder
    (folder / "own.py").write_text("VALUE = 'a'")
    script = over_ssh.script(
        "import own\ntell('has', own.VALUE)\nprint('has', own.VALUE, flush=True)\nstay()"
    )
    launch = over_ssh.start("--watch", "--follow=all", script)
    for value in "bc":
        until_ready(launch)
        (folder / ".aside").write_text(f"VALUE = '{value}'")
        (folder / ".aside").rename(folder / "own.py")
        launch.until_told(f"has {value}", 2)
        launch.until(lambda value=value: launch.out.count(f"| has {value}") == 2, value)  # type: ignore[misc]
    launch.send(signal.SIGINT)
    assert launch.wait() == 130, launch
    for host in HOSTS:
        has = [line for line in lines_of(launch.out, host) if line.startswith("has")]
        assert has == ["has a", "has b", "has c"]
    launch.no_process()


# ---- hosts where it cannot begin


@pytest.mark.ssh
@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "options", "code", "said"),
    [
        (("127.0.0.1", "127.0.0.3"), {}, 125, "127.0.0.3: no connection, no sshd listens there"),
        (("127.0.0.1", "x.invalid"), {}, 125, "x.invalid: no connection, no host has this name"),
        (HOSTS, {"user": "nobody"}, 125, ": no connection, the host did not accept your key"),
        (HOSTS, {"python": "/no/such/python"}, 127, ": fleetrun did not start there (sh: 1: exec: /no/such"),
        (HOSTS, {"dir": "/no/such/folder"}, 2, ": fleetrun did not start there (sh: 1: cd: can't cd to /no"),
    ],
)
def test_a_host_that_cannot_begin_is_named_and_ends_the_others(
    over_ssh: OverSsh, hosts: tuple[str, ...], options: dict[str, str], code: int, said: str
):
    launch = over_ssh.run(over_ssh.script("stay()"), hosts=hosts, **options)
    assert launch.code == code, launch
    assert said in launch.said
    launch.no_process()


@pytest.mark.ssh
@pytest.mark.slow
def test_a_host_with_another_key_is_not_trusted(over_ssh: OverSsh):
    over_ssh.server.trust(over_ssh.server.folder / "user_key.pub")
    launch = over_ssh.run(over_ssh.script("stay()"), hosts=HOSTS[:1])
    assert launch.code == 125, launch
    assert "127.0.0.1: no connection, its host key is unknown" in launch.said


@pytest.mark.ssh
@pytest.mark.slow
def test_nothing_of_a_session_stays_on_the_server(over_ssh: OverSsh):
    launch = over_ssh.run(over_ssh.script("pass"))
    assert launch.code == 0, launch
    eventually(lambda: not over_ssh.server.sessions())


# ---- What the end of an ssh connection means.


@pytest.mark.parametrize(
    ("ssh_exit", "code", "message"),
    [
        (SshExit(True, 0, 0), 0, ""),
        (SshExit(True, 3, 3), 3, "h1: fleetrun ended with exit code 3"),
        (SshExit(True, 255, 255), 255, "h1: fleetrun ended with exit code 255"),
        (SshExit(True, None, 255), 125, "h1: the connection was lost; the processes on this host end"),
        (SshExit(True, None, -9, cut=True), 125, ""),
        (SshExit(False, None, -9, cut=True), 125, ""),
        (
            SshExit(False, None, 255, ("ssh: connect to host h1 port 22: Connection refused",)),
            125,
            "h1: no connection, no sshd listens there (ssh: connect to host h1 port 22: Connection refused)",
        ),
        (
            SshExit(False, None, 255, ("@@@", "Host key verification failed.", "@@@")),
            125,
            "h1: no connection, its host key is unknown or has changed: connect once by hand "
            "(Host key verification failed.)",
        ),
        (SshExit(False, None, 255), 125, "h1: no connection, ssh failed"),
    ],
)
def test_is_one_code_and_one_sentence(ssh_exit: SshExit, code: int, message: str):
    verdict = judge_end("h1", ssh_exit)
    assert (verdict.code, verdict.message) == (code, message)


@pytest.mark.parametrize(
    ("client", "said", "code"),
    [
        (127, "sh: 1: exec: /no/such/python: not found", 127),
        (1, "/usr/bin/python3: No module named fleetrun", 127),
        (2, "sh: 1: cd: can't cd to /no/such", 2),
    ],
)
def test_a_host_without_fleetrun_is_told_apart(client: int, said: str, code: int):
    verdict = judge_end("h1", SshExit(False, None, client, (said,)))
    assert verdict.code == code
    assert verdict.message.startswith(f"h1: fleetrun did not start there ({said})")
    assert not verdict.started

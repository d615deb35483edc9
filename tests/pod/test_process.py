"""Real processes: how they start, what reaches them, what is left of them."""

import os
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from fleetrun.errors import ScriptNotExecutableError, ScriptNotFoundError, SpawnError
from fleetrun.pod import process as processes
from fleetrun.pod.linux import set_comm
from fleetrun.pod.process import Exit, Process, children, reap_adopted
from tests.support.isolated import isolated
from tests.support.waiting import ended, eventually, state_of

ENVIRONMENT = {"PATH": os.environ["PATH"]}


class Child:
    """A process that runs an sh script, and the pipe that it prints to."""

    def __init__(self, script, **environment):
        self._read, write = os.pipe()
        self.process = Process.spawn(("/bin/sh", "-c", script), {**ENVIRONMENT, **environment}, write)
        os.close(write)

    def line(self):
        """Its next line, which it prints within a bound."""
        text = b""
        while not text.endswith(b"\n"):
            assert select.select([self._read], [], [], 60.0)[0], "no line"
            text += os.read(self._read, 1) or b" <end>\n"
        return text.decode().strip()

    def wait(self):
        assert select.select([self.process], [], [], 60.0)[0], "it does not end"

    def close(self):
        self.process.signal_group(signal.SIGKILL)
        self.process.reap()
        os.close(self._read)


@pytest.fixture
def child():
    made = []

    def make(script, **environment):
        made.append(Child(script, **environment))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def nowhere():
    fd = os.open(os.devnull, os.O_WRONLY)
    yield fd
    os.close(fd)


# ---- starting


def test_a_child_leads_its_own_session_and_group(child):
    made = child("ps -o sid=,pgid= -p $$; exec sleep 100")
    assert made.line().split() == [str(made.process.pid)] * 2


def test_a_child_gets_this_environment_and_no_other(child):
    made = child('echo "$NAME ${HOME-none}"', NAME="x")
    assert made.line() == "x none"


def test_a_child_prints_both_streams_to_its_output(child):
    made = child("echo out; echo error >&2")
    assert (made.line(), made.line()) == ("out", "error")


def a_child_reads_nothing():
    """What the person at the terminal types is not for one of many."""
    read, write = os.pipe()
    os.dup2(read, 0)
    os.write(write, b"for the launcher\n")
    made = Child('read line; echo "[$line]"')
    assert made.line() == "[]"
    made.close()


@pytest.mark.slow
def test_a_child_reads_nothing():
    isolated(a_child_reads_nothing)


def test_a_child_inherits_no_other_descriptor(child, tmp_path):
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        made = child("ls -l /proc/self/fd | grep -c secret; exit 0")
        assert made.line() == "0"


TRACER = """
import ctypes, sys, time
PTRACE_SEIZE = 0x4206
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
print(libc.ptrace(PTRACE_SEIZE, int(sys.argv[1]), 0, 0), flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize(("script", "code"), [("kill -9 $$", -9), ("exit 3", 3), ("exit 0", 0)])
def test_a_debugger_that_holds_what_has_ended_is_not_waited_for(child, tmp_path, script, code):
    """The kernel hides the end of a traced process from its parent until the tracer has seen it."""
    held = child(f"while [ ! -e {tmp_path}/go ]; do :; done; {script}")
    command = [sys.executable, "-c", TRACER, str(held.process.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracer:
        try:
            assert tracer.stdout is not None
            if tracer.stdout.readline() != b"0\n":
                pytest.skip("no process may be traced here")
            (tmp_path / "go").touch()
            held.wait()
            assert held.process.reap(with_group=True) == Exit(code)
        finally:
            tracer.kill()
            tracer.wait()
    eventually(lambda: reap_adopted() or held.process.pid not in children())  # nobody holds it any more


def test_a_child_does_not_inherit_that_sigttou_is_ignored(child):
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    try:
        ignored = child("grep SigIgn /proc/self/status").line().split()[1]
        assert signal.getsignal(signal.SIGTTOU) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTTOU, before)
    assert not int(ignored, 16) >> (signal.SIGTTOU - 1) & 1


@pytest.mark.parametrize("name", ["no-such-program-anywhere", "/no/such/program", "/etc/passwd/program"])
def test_a_program_that_is_not_there(nowhere, name):
    with pytest.raises(ScriptNotFoundError, match="the program does not exist") as caught:
        Process.spawn((name,), ENVIRONMENT, nowhere)
    assert caught.value.exit_code == 127
    assert name in caught.value.message


def test_a_script_whose_interpreter_is_not_there(tmp_path, nowhere):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(ScriptNotExecutableError, match="interpreter does not exist") as caught:
        Process.spawn((str(script),), ENVIRONMENT, nowhere)
    assert caught.value.exit_code == 126


def test_a_file_that_may_not_be_executed(tmp_path, nowhere):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ScriptNotExecutableError, match="Permission denied") as caught:
        Process.spawn((str(script),), ENVIRONMENT, nowhere)
    assert caught.value.exit_code == 126


def test_a_directory(tmp_path, nowhere):
    with pytest.raises(ScriptNotExecutableError):
        Process.spawn((str(tmp_path),), ENVIRONMENT, nowhere)


def test_a_file_that_is_no_program(tmp_path, nowhere):
    script = tmp_path / "script"
    script.write_text("echo no shebang\n")
    script.chmod(0o755)
    with pytest.raises(ScriptNotExecutableError, match="Exec format error") as caught:
        Process.spawn((str(script),), ENVIRONMENT, nowhere)
    assert "#!" in caught.value.hint


def test_arguments_that_are_too_long(nowhere):
    with pytest.raises(SpawnError, match="too long") as caught:
        Process.spawn(("/bin/true", "x" * 10_000_000), ENVIRONMENT, nowhere)
    assert "larger than the kernel allows" in caught.value.hint


def too_few_descriptors():
    fd = os.open(os.devnull, os.O_WRONLY)
    hints = []
    while True:
        limit = fd + 1 + len(hints)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 1000))
        try:
            started = Process.spawn(("/bin/sleep", "100"), ENVIRONMENT, fd)
        except SpawnError as error:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
            assert processes.children() == [], limit
            hints.append(error.hint or "")
        else:
            started.signal_group(signal.SIGKILL)
            started.reap()
            break
    assert hints
    assert all("ulimit -n" in hint for hint in hints)


@pytest.mark.slow
def test_with_too_few_descriptors_nothing_is_left_running():
    isolated(too_few_descriptors)


# ---- signals and the end


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", -9), ("kill -TERM $$", -15)]
)
def test_an_end_is_readable_and_told(child, script, code):
    made = child(script)
    made.wait()
    assert made.process.reap() == Exit(code)
    assert made.process.reap() == Exit(code), "a second time tells the same"


def test_the_peak_of_its_memory(child):
    fill = f"{sys.executable} -c 'import os; data = bytearray(b\"x\") * (200 << 20); os.kill(os.getpid(), 9)'"
    made = child(f"exec {fill}")
    assert made.process.peak_memory is None
    made.wait()
    assert made.process.reap() == Exit(-9)
    assert (
        made.process.peak_memory > 200 << 20
    )  # not less than what this process has: the child began as its copy


def test_a_group_is_reached_whole(child):
    made = child("sleep 100 & echo $!; wait")
    helper = int(made.line())
    made.process.signal_group(signal.SIGTERM)
    made.wait()
    eventually(lambda: ended(helper))


def test_the_leader_alone_is_reached(child):
    made = child(
        "(trap 'echo no' USR1; echo ready; while :; do sleep 0.01; done) & "
        "trap 'echo yes; exit' USR1; while :; do sleep 0.01; done"
    )
    assert made.line() == "ready"
    eventually(lambda: made.process.handles(signal.SIGUSR1))
    made.process.signal_leader(signal.SIGUSR1)
    assert made.line() == "yes"


def test_signals_to_what_has_ended_are_nothing(child):
    made = child("exit 0")
    made.wait()
    made.process.signal_group(signal.SIGTERM)
    made.process.signal_leader(signal.SIGTERM)
    assert made.process.reap() == Exit(0)
    made.process.signal_group(signal.SIGKILL)
    made.process.signal_leader(signal.SIGKILL)


def test_sigkill_ends_what_ignores_sigterm(child):
    made = child("trap '' TERM; echo ready; while :; do sleep 100; done")
    assert made.line() == "ready"
    made.process.signal_group(signal.SIGTERM)
    made.process.signal_group(signal.SIGKILL)
    made.wait()
    assert made.process.reap() == Exit(-9)


@pytest.mark.parametrize(("script", "left"), [("exit 3", False), ("kill -KILL $$", False), ("exit 0", True)])
def test_a_failed_leader_is_reaped_with_its_group(child, script, left):
    made = child(f"sleep 100 >/dev/null & echo $!; {script}")
    helper = int(made.line())
    made.wait()
    made.process.reap(with_group=True)
    if left:
        assert not ended(helper)
        os.kill(helper, signal.SIGKILL)
    eventually(lambda: ended(helper))


def test_a_failed_leader_may_be_reaped_alone(child):
    made = child("sleep 100 >/dev/null & echo $!; exit 3")
    helper = int(made.line())
    made.wait()
    made.process.reap()
    assert not ended(helper)
    os.kill(helper, signal.SIGKILL)


@pytest.mark.parametrize("with_group", [False, True])
def test_a_process_that_another_caller_reaped_is_no_success(child, with_group):
    made = child("exit 0")
    made.wait()
    os.waitpid(made.process.pid, 0)
    assert made.process.reap(with_group=with_group) == Exit(1)


@pytest.mark.parametrize(
    ("script", "handled"),
    [("", False), ("trap 'true' USR1;", True), ("trap '' USR1;", True), ("trap 'true' USR2;", False)],
)
def test_who_would_survive_a_signal(child, script, handled):
    made = child(f"{script} echo ready; while :; do sleep 0.01; done")
    assert made.line() == "ready"
    assert made.process.handles(signal.SIGUSR1) is handled


def test_a_name_that_is_cut_within_a_letter_is_no_hindrance(child):
    made = child(r"printf 'a\350\256' > /proc/$$/comm; echo ready; while :; do sleep 0.01; done")
    assert made.line() == "ready"
    assert b"a\xe8\xae" in Path(f"/proc/{made.process.pid}/status").read_bytes()
    assert made.process.handles(signal.SIGUSR1) is False


def test_what_has_ended_handles_nothing(child):
    made = child("exit 0")
    made.wait()
    made.process.reap()
    assert made.process.handles(signal.SIGUSR1) is False


# ---- trees: each case in a sub-reaper of its own

HIDE = "import os, sys; os.setsid(); os.fork() and os._exit(0); {}; print(os.getpid(), flush=True); {}"
"""A daemon: a session of its own and an orphan. It prints its pid."""
SLEEP = "import time; time.sleep(100)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def daemon(*, deaf=False, **environment):
    code = HIDE.format(DEAF if deaf else "pass", SLEEP)
    command = ["/bin/sh", "-c", '"$@" & wait', "sh", sys.executable, "-c", code]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, env={**ENVIRONMENT, **environment})
    pid = int(popen.stdout.readline())
    popen.wait()
    return pid


def daemons_are_descendants():
    pids = {daemon(), daemon()}
    assert set(processes.descendants()) == pids
    assert set(processes.children()) == pids, "adopted"
    processes.signal_all([*pids], signal.SIGKILL)


def everything_below_is_ended():
    pids = [daemon(), daemon(deaf=True), subprocess.Popen(["sleep", "100"]).pid]
    assert processes.end_descendants(grace=0.05) == 3
    assert not processes.has_children()
    assert [state_of(pid) for pid in pids] == ["", "", ""]


def what_obeys_is_not_waited_for():
    before = time.monotonic()
    daemon()
    assert processes.end_descendants(grace=1000.0) == 1
    assert time.monotonic() - before < 100


def stopped_processes_end_too():
    pid = daemon()
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: state_of(pid) == "T")
    assert processes.end_descendants(grace=1000.0) == 1


def a_tree_that_grows_while_it_is_cut():
    """Each process replaces itself by two that outlive it, a few generations deep."""
    code = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    os.setsid() if os.getsid(0) != os.getpid() and os.fork() == 0 else os.fork()\n"
        "print('x', flush=True)\n"
        "time.sleep(100)\n"
    )
    popen = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    popen.stdout.readline()
    assert processes.end_descendants(grace=0.0) > 0
    assert processes.descendants() == []


def who_stood_still_meanwhile_kills_all_the_same():
    """Of two looks at the clock, ten minutes lie between the first and the second."""
    pid = daemon(deaf=True)
    missed = iter([0.0])
    processes.time = SimpleNamespace(monotonic=lambda: time.monotonic() + next(missed, 600.0))
    assert processes.end_descendants(grace=0.0) == 1
    assert state_of(pid) == ""


def nothing_to_end():
    assert processes.end_descendants(grace=1000.0) == 0
    assert not processes.has_children()


def orphans_are_reaped_and_own_children_left():
    own = subprocess.Popen(["true"])
    orphan = daemon()
    os.kill(orphan, signal.SIGKILL)
    eventually(lambda: state_of(orphan) == "Z" and state_of(own.pid) == "Z")
    processes.reap_adopted({own.pid})
    assert (state_of(orphan), state_of(own.pid)) == ("", "Z")
    assert own.wait() == 0


def only_those_with_the_mark_are_killed():
    marked, other = daemon(MARK="pod.ps.1", deaf=True), daemon(MARK="pod.ps.10")
    processes.kill_marked("MARK=pod.ps.1")
    eventually(lambda: ended(marked))
    assert not ended(other)
    processes.end_descendants(0.0)


def the_name_is_short():
    set_comm("fleetrun-and-more-than-fits")
    assert Path("/proc/self/comm").read_text() == "fleetrun-and-mo\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        daemons_are_descendants,
        everything_below_is_ended,
        what_obeys_is_not_waited_for,
        stopped_processes_end_too,
        a_tree_that_grows_while_it_is_cut,
        who_stood_still_meanwhile_kills_all_the_same,
        nothing_to_end,
        orphans_are_reaped_and_own_children_left,
        only_those_with_the_mark_are_killed,
        the_name_is_short,
    ],
)
def test_trees(case):
    isolated(case)

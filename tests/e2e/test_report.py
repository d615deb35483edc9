"""The failure report: it names the process that failed first, says how, and shows its last words."""

import re

import pytest

from tests.support.command import Fleetrun

ONCE = ("--max_restart", "0")

FALLING_OVER = """
publish_pid()
tell("ready", os.getpid())
wait_for_go()
if RANK == 2:
    raise ValueError("the one that matters")
wait_for_end_of(pid_of("trainer.2"))
time.sleep({delay})
raise ConnectionError(f"rank {{RANK}} lost its peer")
"""


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.05])
def test_names_the_first_though_the_rest_fail_a_moment_later(fleetrun: Fleetrun, delay: float):
    script = fleetrun.script(FALLING_OVER.format(delay=delay))
    for _ in range(3):
        launch = fleetrun.start(*ONCE, "--nproc_per_node", "4", script)
        launch.until_ready(4)
        launch.go()
        assert launch.wait() == 1
        assert launch.err.count("First failure: ") == 1
        assert "First failure: trainer 2 exited with code 1, after" in launch.err, launch
        report = launch.err[launch.err.index("First failure: ") :]
        assert "Traceback (most recent call last):" in report
        assert 'raise ValueError("the one that matters")' in report
        assert "  ValueError: the one that matters\n" in report
        assert "ConnectionError" not in report
        assert launch.err.splitlines()[-1] == "trainer 2: ValueError: the one that matters at train.py:7"
        assert re.search(r"^Whole traceback: log/default\.[a-z]{6}\.trainer\.2\.log$", report, re.MULTILINE)


def test_is_in_the_language_of_the_script(fleetrun: Fleetrun):
    script = fleetrun.script("print('开始训练', flush=True)\nraise ValueError('输入为空')\n", "训练.py")
    launch = fleetrun.run(*ONCE, script, env={"LANG": "C"})
    assert "ValueError: 输入为空\n" in launch.err
    assert "训练.py" in launch.err
    assert "开始训练\n" in launch.out


def test_shows_bytes_that_are_no_text_harmlessly(fleetrun: Fleetrun):
    script = fleetrun.script("""
sys.stdout.buffer.write("错误".encode("gb18030") + b" \\x1b[2J\\x07\\n")
sys.stdout.buffer.flush()
os._exit(3)
""")
    launch = fleetrun.run(*ONCE, "--follow", "none", script)
    assert r"\xb4\xed\xce\xf3" in launch.err
    assert not {"\x1b", "\x07"} & set(launch.err)


def test_shows_last_words_without_a_newline(fleetrun: Fleetrun):
    script = fleetrun.script("sys.stderr.write('first\\nlast words'); sys.stderr.flush(); os._exit(4)")
    launch = fleetrun.run(*ONCE, script)
    assert "Its last lines:\n  first\n  last words\n" in launch.err
    assert launch.out == "first\nlast words\n"


def test_says_that_nothing_was_printed(fleetrun: Fleetrun):
    assert "printed nothing" in fleetrun.run(*ONCE, fleetrun.script("os._exit(4)")).err


@pytest.mark.quick
def test_finds_the_traceback_with_its_causes_among_other_output(fleetrun: Fleetrun):
    script = fleetrun.script("""
for number in range(1000):
    print("noise", number)
try:
    {}["missing"]
except KeyError as error:
    import atexit
    atexit.register(print, "bye bye")
    raise RuntimeError("while looking it up") from error
""")
    launch = fleetrun.run(*ONCE, "--follow", "none", script)
    report = launch.err[launch.err.index("First failure: ") :]
    assert "KeyError: 'missing'" in report
    assert "The above exception was the direct cause" in report
    assert "RuntimeError: while looking it up\n  bye bye\n" in report, "it may belong to the message"
    assert "noise 1" not in report
    assert len(report.splitlines()) <= 40


def test_is_one_screen_for_a_deep_traceback_and_for_many_failures(fleetrun: Fleetrun):
    script = fleetrun.script("""
publish_pid()
tell("ready", os.getpid())
wait_for_go()
if RANK:
    wait_for_end_of(pid_of("trainer.0"))
def a(): b()
def b(): a()
a()
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "8", script)
    launch.until_ready(8)
    launch.go()
    launch.wait()
    report = launch.err[launch.err.index("First failure: ") :]
    assert "RecursionError: maximum recursion depth exceeded" in report
    assert len(report.splitlines()) <= 30, report


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT"])
def test_names_the_signal(fleetrun: Fleetrun, name: str):
    script = fleetrun.script(f"""
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
print("about to die", flush=True)
os.kill(os.getpid(), signal.{name})
""")
    launch = fleetrun.run(*ONCE, script)
    assert f"First failure: trainer 0 was killed by {name}, after" in launch.err
    assert "Its last lines:\n  about to die\n" in launch.err


def test_of_a_server_says_so(fleetrun: Fleetrun):
    script = fleetrun.script("if WHO == 'ps.0': raise OSError('no room')\nleave_on_term()\nstay()")
    launch = fleetrun.run(*ONCE, "--server_num", "2", "--trainer_num", "1", script)
    assert launch.code == 1
    assert "First failure: server 0 exited with code 1" in launch.err
    assert "OSError: no room" in launch.err


def test_goes_to_stderr_and_the_output_of_the_script_to_stdout(fleetrun: Fleetrun):
    launch = fleetrun.run(*ONCE, fleetrun.script("print('a line'); sys.exit(1)"))
    assert launch.out == "a line\n"

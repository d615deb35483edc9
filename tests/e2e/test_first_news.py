"""The truth within a moment: a failure is told when it happens, though the job may take long to stop."""

import json
import signal
import sys

from tests.support.command import FLEETRUN, Fleetrun

ONCE = ("--max_restart", "0")


def test_a_failure_is_told_before_the_others_have_stopped(fleetrun: Fleetrun):
    script = fleetrun.script("""
if RANK == 1:
    wait_for_go()
    raise ValueError("bad batch")
signal.signal(signal.SIGTERM, signal.SIG_IGN)
stay()
""")
    launch = fleetrun.start(*ONCE, "--nproc_per_node", "2", "--stop_timeout", "1000", script)
    launch.until_ready(1)
    launch.go()
    launch.until_err("trainer 1 exited with code 1")
    launch.until_err("ValueError: bad batch")
    assert "First failure" not in launch.err, "the report comes at the end"
    launch.send(signal.SIGINT)
    assert launch.wait() == 1, launch
    assert "interrupted" in launch.err


def test_a_rank_that_failed_before_and_is_slow_to_leave_is_named_at_once(fleetrun: Fleetrun):
    script = fleetrun.script("""
import atexit, json, time
from pathlib import Path
if ATTEMPT == 0 and RANK == 0:
    extra = {"py_callstack": "Traceback ...", "time_ns": time.time_ns()}
    note = {"message": {"message": "ValueError: the cause", "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
    tell("written")
    stay()
if ATTEMPT == 0:
    wait_for_go()
    raise ConnectionError("peer gone")
""")
    launch = fleetrun.start("--max_restart", "1", "--nproc_per_node", "2", script)
    launch.until_told("written")
    launch.go()
    assert launch.wait() == 0, launch
    (line,) = [each for each in launch.err.splitlines() if "restart 1 of 1" in each]
    assert "ConnectionError: peer gone" in line
    assert "trainer 0" in line
    assert "ValueError: the cause" in line


def test_a_restart_that_cannot_be_made_keeps_the_cause(fleetrun: Fleetrun):
    """The script took its log directory away; the report is still about why the script failed."""
    script = fleetrun.script("import shutil; shutil.rmtree('log'); sys.exit(3)")
    launch = fleetrun.run("--max_restart", "2", "--nproc_per_node", "1", script)
    assert launch.code == 125, launch
    assert "the restart failed" in launch.err
    assert "log file" in launch.err
    assert "First failure: trainer 0 exited with code 3" in launch.err
    assert "Traceback" not in launch.err


def test_a_launcher_above_finds_the_failure_in_its_error_file(fleetrun: Fleetrun):
    path = fleetrun.folder / "error.json"
    script = fleetrun.script("raise ValueError('the cause')")
    launch = fleetrun.run("--max_restart", "0", script, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    assert launch.code == 1, launch
    message = json.loads(path.read_text())["message"]
    assert message["message"].startswith("First failure: trainer 0 exited with code 1")
    assert "ValueError: the cause" in message["extraInfo"]["py_callstack"]
    path.unlink()
    assert fleetrun.run(fleetrun.script(""), env={"TORCHELASTIC_ERROR_FILE": str(path)}).code == 0
    assert not path.exists()


def test_what_a_known_cause_means_and_what_to_do(fleetrun: Fleetrun):
    script = fleetrun.script("os.write(2, b'epoch 1\\n'); open('/dev/full', 'wb', 0).write(b'x')")
    launch = fleetrun.run("--max_restart", "0", script)
    assert launch.code == 1, launch
    assert "df -h" in launch.err.partition("\nHint: ")[2], launch


def test_a_process_that_raises_when_it_is_asked_to_stop_has_not_failed(fleetrun: Fleetrun):
    script = fleetrun.script("""
import json, time
from pathlib import Path
def leave(*_):
    extra = {"py_callstack": "Traceback ...", "time_ns": time.time_ns()}
    note = {"message": {"message": "SystemError: got SIGTERM", "extraInfo": extra}}
    Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(note))
    os._exit(1)
signal.signal(signal.SIGTERM, leave)
stay()
""")
    launch = fleetrun.start("--nproc_per_node", "2", script)
    launch.until_ready(2)
    launch.send(signal.SIGTERM)
    assert launch.wait() == 143, launch
    assert "First failure" not in launch.err
    assert "Pod stopped" in launch.err


def test_started_by_a_daemon_that_ignores_sigchld(fleetrun: Fleetrun):
    code = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
        "os.execv(sys.argv[1], sys.argv[1:])"
    )
    script = fleetrun.script("tell('here')")
    launch = fleetrun.run(script, prefix=(sys.executable, "-c", code), command=FLEETRUN)
    assert launch.code == 0, launch
    assert launch.told("here")


def test_a_progress_bar_moves_before_its_line_ends(fleetrun: Fleetrun):
    script = fleetrun.script(r"""
sys.stdout.write("\r 10%|#   |"); sys.stdout.write("\r 20%|##  |"); sys.stdout.flush()
wait_for_go()
print("\r100%|####|")
""")
    launch = fleetrun.start("--log_level", "warning", script)
    launch.until_out(" 10%|#   |")
    launch.go()
    assert launch.wait() == 0
    assert launch.raw == b"\r 10%|#   |\r 20%|##  |\r100%|####|\n"

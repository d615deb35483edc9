"""The command from words to exit code: with a launch of the test's own, and a few times for real."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from fleetrun.cli import main
from fleetrun.envs.settings.options import Resolved
from fleetrun.errors import ScriptNotFoundError
from fleetrun.verbs import VERBS

PROGRAM = """
import os, sys
from fleetrun.cli import main
sys.exit(main(sys.argv[1:], os.environ, lambda resolved: 0))
"""
COMMAND = [sys.executable, "-c", PROGRAM]

IMPORTS = """
import os, sys
from fleetrun.cli import main
main(sys.argv[1:], os.environ, lambda resolved: 0)
slow = {"torch", "numpy", "rich", "psutil", "zmq", "click", "logging", "asyncio", "importlib.metadata"}
sys.exit(", ".join(slow & sys.modules.keys()) or 0)
"""


INTERRUPTED = """
import runpy, sys
class CtrlC:
    where = sys.argv.pop(1)
    def find_spec(self, name, *_):
        if name == self.where:
            raise KeyboardInterrupt
sys.meta_path.insert(0, CtrlC())
runpy.run_module("fleetrun", run_name="__main__", alter_sys=True)
"""


class Launches:
    """A launch that only remembers what it was asked for."""

    def __init__(self, code: int = 0, error: BaseException | None = None) -> None:
        self.seen: list[Resolved] = []
        self._code = code
        self._error = error

    def __call__(self, resolved: Resolved) -> int:
        self.seen.append(resolved)
        if self._error is not None:
            raise self._error
        return self._code


def call(
    argv: Sequence[str], run: Callable[[Resolved], int], environ: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv, environ or {}, run)
    return code, out.getvalue(), err.getvalue()


def real(*words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_the_launch_gets_the_settings_and_gives_the_exit_code():
    launches = Launches(code=7)
    assert call(["--gpus", "0,1", "x.py", "--gpus"], launches, {"PADDLE_JOB_ID": "j"}) == (7, "", "")
    (resolved,) = launches.seen
    assert (resolved.settings.devices, resolved.settings.job_id) == (("0", "1"), "j")
    assert resolved.settings.script_args == ("--gpus",)


BAD = [
    ["--trainer_num", "0", "x.py"],
    ["--nproc_per_node", "100000", "x.py"],
    ["--nproc_per_node", "abc", "x.py"],
    ["--servers", "127.0.0.1:1", "x.py"],
    ["--run_mode", "foo", "x.py"],
    ["--gpus", "0,0", "x.py"],
    ["--gpus", "0,1,2", "--nproc_per_node", "2", "x.py"],
    ["--nnodes", "2", "--rank", "2", "x.py"],
    ["--legacy", "x.py"],
    ["--auto_tuner_json", "a", "x.py"],
    ["ipu"],
    ["--no_such_option", "x.py"],
    ["--gpus"],
    ["--gpus", "0"],
    ["--show_completion", "tcsh"],
]


@pytest.mark.parametrize("argv", BAD, ids=" ".join)
def test_bad_input_is_told_in_two_lines_and_nothing_is_launched(argv):
    launches = Launches()
    code, out, err = call(argv, launches)
    assert (code, out, launches.seen) == (2, "", [])
    assert err.startswith("fleetrun: error: ")
    assert len(err.splitlines()) <= 2


def test_an_unknown_option_comes_with_the_one_that_was_meant():
    _, _, err = call(["--nproc_per_nod", "2", "x.py"], Launches())
    assert err == "fleetrun: error: unknown option --nproc_per_nod\n  Did you mean --nproc_per_node?\n"


def test_no_words_at_all_get_the_short_help():
    code, out, err = call([], Launches())
    assert (code, out) == (2, "")
    assert call(["-h"], Launches()) == (0, err, "")
    assert err.startswith("usage: fleetrun [run] [OPTIONS] SCRIPT [ARGUMENTS]\n")


def test_help():
    code, out, err = call(["--help"], Launches())
    assert (code, err) == (0, "")
    assert "Parameter servers:\n" in out
    assert call(["--nnodes", "2", "--help", "x.py"], Launches()) == (0, out, "")


def test_run_may_be_said_and_words_of_other_tools_are_answered():
    launches = Launches()
    assert call(["run", "--nproc_per_node", "2", "x.py"], launches) == (0, "", "")
    assert launches.seen[0].settings.nproc_per_node == 2
    assert call(["version"], launches) == call(["--version"], launches)
    assert call(["run", "--help"], launches) == call(["--help"], launches) == call(["help", "run"], launches)


def test_an_option_of_a_launcher_behind_the_script_is_told():
    launches = Launches()
    call(["x.py", "--lr", "1", "--nproc_per_node=2"], launches)
    (notice,) = launches.seen[0].notices
    assert notice.startswith("--nproc_per_node comes after x.py")


@pytest.mark.parametrize(
    ("word", "meant"), [("-n", "--nproc_per_node or --nnodes"), ("--num_processes", "--nproc_per_node")]
)
def test_an_option_of_another_tool_comes_with_ours(word, meant):
    _, _, err = call([word, "2", "x.py"], Launches())
    assert err.endswith(f"Did you mean {meant}?\n")


def test_save_writes_the_job_file_before_the_launch(tmp_path):
    file = tmp_path / "job.toml"
    code, _, err = call(["--save", str(file), "x.py"], Launches(code=1))
    assert (code, "fleetrun up" in err) == (1, True)
    assert 'script = "x.py"' in file.read_text()


@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {"run"}))
def test_help_of_a_command(verb):
    code, out, err = call([verb, "-h"], Launches())
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: fleetrun {verb} ")


def test_no_hidden_option_of_a_command_is_suggested():
    _, _, err = call(["logs", "--her"], Launches())
    assert "--help" in err
    assert "--here" not in err


def test_version():
    assert re.fullmatch(r"fleetrun \d+\.\d+\.\d+\S*\n", call(["--version"], Launches())[1])


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("statsu", "`fleetrun status`"),
        ("dcotor", "`fleetrun doctor`"),
        ("tpo", "`fleetrun top`"),
    ],
)
def test_a_script_that_is_almost_a_command_gets_a_hint(word, hint):
    code, _, err = call([word], Launches(error=ScriptNotFoundError(f"no program {word}")))
    assert code == 127
    assert hint in err
    code, _, err = call(["xyz"], Launches(error=ScriptNotFoundError("no program xyz")))
    assert "Did you mean" not in err


def test_an_error_of_the_launch_keeps_its_exit_code():
    error = ScriptNotFoundError("there is no x.py", hint="Look again.")
    code, _, err = call(["x.py"], Launches(error=error))
    assert (code, err) == (127, "fleetrun: error: there is no x.py\n  Look again.\n")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (ValueError("a bug"), 125)])
def test_what_the_launch_does_not_handle(error, code):
    got, _, err = call(["x.py"], Launches(error=error))
    assert got == code
    assert ("a bug in fleetrun" in err) is (code == 125)


def test_a_real_usage_error():
    done = real("--server_nun=1", "x.py")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "fleetrun: error: unknown option --server_nun\n  Did you mean --server_num or --servers?\n"
    )


@pytest.mark.parametrize("where", ["fleetrun.pod.guard", "fleetrun.verbs", "fleetrun.cli", "click"])
def test_ctrl_c_while_it_is_still_importing_is_quiet(where):
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, where, "ps"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_words_that_are_not_utf8_are_told_too():
    done = real(b"--gpus", b"\xff\xfe", b"x.py", env={**os.environ, "LC_ALL": "C"})  # type: ignore[arg-type]
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["doctor"], ["doctor", "train.py"], ["--config", "job.toml"], ["train.py"]]
)
def test_a_folder_that_was_deleted_is_told(words: list[str], tmp_path: Path):
    """No file has the name of the folder where the command was started."""
    folder = tmp_path / "gone"
    folder.mkdir()
    command = [sys.executable, "-m", "fleetrun", *words]
    shell = ["sh", "-c", 'rmdir "$0" && exec "$@"', folder, *command]
    done = subprocess.run(shell, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    told = "fleetrun: error: the current directory no longer exists\n"
    told += "  Change to an existing directory, or run `cd .`.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "--help"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("words", [["--help"], ["report", "--help"]])
def test_a_full_disk_under_the_help_is_told(words):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([*COMMAND, *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 125
    assert done.stderr.startswith("fleetrun: error: cannot ")
    assert "No space left on device\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_names_in_an_error_do_nothing_to_a_terminal():
    done = real("report", "--log_dir", "a\x1b[31m\x1b]0;b\x07c\x9b2J")
    assert done.returncode == 1
    assert "no job has an event log in a" in done.stderr
    assert not any(sign in done.stderr for sign in "\x1b\x07\x9b")


@pytest.mark.parametrize(("word", "code"), [("--help", 0), ("--gpus", 2)])
def test_closed_streams_are_no_error(word, code):
    closed = ["sh", "-c", 'exec "$0" "$@" >&- 2>&-', *COMMAND, word]
    assert subprocess.run(closed, check=False, timeout=60).returncode == code


@pytest.mark.slow
def test_a_message_fits_the_terminal_and_is_one_line_in_a_pipe():
    words = ["--gpus", "0,1,2,3,4", "--nproc_per_node", "2", "x.py"]
    assert real(*words).stderr.count("\n") == 1
    main_side, terminal = pty.openpty()
    environ = {**os.environ, "COLUMNS": "40"}
    done = subprocess.run([*COMMAND, *words], stderr=terminal, stdout=terminal, check=False, env=environ)
    os.close(terminal)
    lines = os.read(main_side, 10_000).decode().splitlines()
    os.close(main_side)
    assert done.returncode == 2
    assert len(lines) > 1
    assert max(map(len, lines)) < 40


def test_the_help_in_a_pipe_follows_columns():
    done = real("--help", env={**os.environ, "COLUMNS": "60"})
    assert max(map(len, done.stdout.splitlines())) < 60


@pytest.mark.parametrize("words", [["--help"], ["--gpus"], ["x.py"], ["hostname"]])
def test_nothing_slow_is_imported(words):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.splitlines()[1:]) == (0, [])

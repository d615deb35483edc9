"""Shell completion: what a shell is told. The shells themselves are not started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

COMMAND = """
import os, sys
from fleetrun.cli import main
sys.exit(main(sys.argv[1:], os.environ, lambda resolved: 0))
"""


def ask(*words: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def completed(line: str) -> list[str]:
    words = line.split(" ")
    out = ask(_FLEETRUN_COMPLETE="bash_complete", COMP_WORDS="\n".join(words), COMP_CWORD=str(len(words) - 1))
    return [answer.partition(",")[2] for answer in out.splitlines() if answer]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fleetrun --server", ["--server_num", "--servers"]),
        ("fleetrun --run_mode p", ["ps", "ps-heter"]),
        ("fleetrun --gpus 0 --dry", ["--dry_run"]),
        ("fleetrun x.py --server", []),
        ("fleetrun sta", ["status", "stacks"]),
        ("fleetrun status --wa", ["--watch"]),
    ],
)
def test_answers(line, expected):
    assert completed(line)[: len(expected) or None] == expected


def test_words_and_scripts_stand_beside_each_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("start.py", "a b.py", "train.py"):
        (tmp_path / name).touch()
    (tmp_path / "stored").mkdir()
    assert completed("fleetrun st") == ["status", "stop", "stacks", "start.py", "stored/"]
    assert ask(_FLEETRUN_COMPLETE="bash_complete", COMP_WORDS="fleetrun\ntr", COMP_CWORD="1") == "file,tr\n"


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_calls_the_command_back(shell):
    script = ask("--show_completion", shell)
    assert f"{shell}_complete" in script
    assert "_FLEETRUN_COMPLETE" in script
    assert script == ask(_FLEETRUN_COMPLETE=f"{shell}_source")

"""The batch script in docs/slurm.md and the manifest in docs/kubernetes.md are what fleetrun prints."""

import re
import shlex
import subprocess
from pathlib import Path

from tests.support.command import FLEETRUN, environment

DOCS = Path(__file__).resolve().parents[2] / "docs"


def printed(command: str, folder: Path) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    (folder / "train.py").write_text("")
    done = subprocess.run(
        [*FLEETRUN, "--dry_run", *words[1:]],
        cwd=folder, env=environment({}), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return done.stdout


def test_the_batch_script_is_what_slurm_gets(tmp_path: Path):
    page = (DOCS / "slurm.md").read_text()
    (command,) = re.findall(r"`(fleetrun --scheduler slurm [^`]+command=[^`]+)`", page)
    assert f"```text\n{printed(command, tmp_path).rstrip()}\n```" in page


def test_the_manifest_is_what_kubectl_gets(tmp_path: Path):
    page = (DOCS / "kubernetes.md").read_text()
    (command,) = re.findall(r"^(fleetrun (?:.*\\\n)?.*token_secret=.*?) \|", page, re.MULTILINE)
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert printed(command, tmp_path).rstrip() == manifest.rstrip()

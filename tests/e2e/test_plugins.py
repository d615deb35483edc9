"""Plug-ins of packages that lie in a folder as pip leaves them, with metadata; broken ones; and programs
`fleetrun-NAME` on PATH.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.e2e.test_exporting import REPORT
from tests.support.blocks import ROOT, files
from tests.support.command import Fleetrun, environment

PAGE = ROOT / "docs" / "plugins.md"


class Packages:
    """Installs packages into a folder for one `fleetrun`."""

    def __init__(self, fleetrun: Fleetrun) -> None:
        self._fleetrun = fleetrun
        self.folder = fleetrun.folder / "packages"
        self.folder.mkdir()

    def install(self, name: str, groups: Mapping[str, Mapping[str, str]], **modules: str) -> None:
        """With the files that importlib.metadata reads, and modules of these texts."""
        info = self.folder / f"{name.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        sections = [
            f"[fleetrun.{kind}]\n" + "".join(f"{each} = {target}\n" for each, target in points.items())
            for kind, points in groups.items()
        ]
        (info / "entry_points.txt").write_text("\n".join(sections))
        for module, text in modules.items():
            (self.folder / f"{module}.py").write_text(text)

    @property
    def env(self) -> dict[str, str]:
        mine = self._fleetrun._env["PYTHONPATH"]
        return {"PYTHONPATH": f"{mine}:{self.folder}"}


@pytest.fixture
def packages(fleetrun: Fleetrun) -> Packages:
    return Packages(fleetrun)


@pytest.fixture
def example(packages: Packages) -> Packages:
    """The package of the documentation."""
    text = PAGE.read_text()
    (project,) = re.findall(r"^```toml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    (module,) = files(PAGE)
    points = tomllib.loads(project)["project"]["entry-points"]
    groups = {name.removeprefix("fleetrun."): found for name, found in points.items()}
    packages.install("fleetrun-example", groups, fleetrun_example=module.text)
    return packages


def test_a_command_of_a_package(fleetrun: Fleetrun, example: Packages):
    said = fleetrun.run("hello", "world", env=example.env)
    assert (said.code, said.out) == (0, "Hello world\n")
    assert fleetrun.run("hello", env=example.env).code == 2, "click's own error"
    assert "fleetrun hello [OPTIONS] NAME" in fleetrun.run("help", "hello", env=example.env).out
    assert "fleetrun hello [OPTIONS] NAME" in fleetrun.run("hello", "-h", env=example.env).out
    assert re.search(
        r"hello +A command of the package fleetrun-example 1\.0\.",
        fleetrun.run("--help", env=example.env).out,
    )
    assert re.search(r"plug-ins +hello", fleetrun.run("help", env=example.env).out)
    near = fleetrun.run("helo", env=example.env)
    assert (near.code, "`fleetrun hello`" in near.err) == (127, True)
    words = {"_FLEETRUN_COMPLETE": "bash_complete", "COMP_WORDS": "fleetrun hel", "COMP_CWORD": "1"}
    assert "plain,hello" in fleetrun.run(env={**example.env, **words}).out
    Path(fleetrun.folder, "hello").write_text("#!/bin/sh\necho the program\n")
    Path(fleetrun.folder, "hello").chmod(0o755)
    assert fleetrun.run("./hello", env=example.env).printed == ["the program"]
    assert fleetrun.run("run", "hello", env=example.env).printed == ["the program"]


def test_a_notifier_and_an_exporter_of_a_package(fleetrun: Fleetrun, example: Packages):
    script = fleetrun.script(f"{REPORT}\nfor step in range(3):\n    report(step)")
    words = ("--notify=append:told.jsonl", "--export=csv=loss.csv", "--nproc_per_node=2")
    launch = fleetrun.run(*words, script, env=example.env)
    assert launch.code == 0, launch
    told = [json.loads(line) for line in Path(fleetrun.folder, "told.jsonl").read_text().splitlines()]
    assert [each["event"] for each in told] == ["end"]
    rows = [row.split(",") for row in Path(fleetrun.folder, "loss.csv").read_text().splitlines()]
    found = {(name, step): round(float(loss), 3) for _, name, step, loss in rows}
    assert found["trainer.1", "2"] == 0.333
    again = fleetrun.run("again", "--dry_run", env=example.env)
    assert again.code == 0, "the record has --export"


def test_a_scheduler_of_a_package(fleetrun: Fleetrun, example: Packages):
    words = ("--scheduler=batch", "--scheduler_option=queue=gpu", "--nnodes=4", "--max_restart=1", "train.py")
    launch = fleetrun.run(*words, env=example.env)
    assert (launch.code, launch.err) == (0, "")
    assert launch.out.startswith("batch -q gpu -n 4 -- ")
    assert "--max_restart=1 -- train.py" in launch.out
    assert "kubernetes, ssh, batch" in " ".join(fleetrun.run("--help", env=example.env).out.split())
    Path(fleetrun.folder, "job.toml").write_text('script = "train.py"\nscheduler = "batch"\nnnodes = 2\n')
    assert fleetrun.run("up", "job.toml", env=example.env).out.startswith("batch -q default -n 2")
    unknown = fleetrun.run("--scheduler=batch", "--scheduler_option=que=gpu", "train.py", env=example.env)
    assert (unknown.code, "batch has no such option" in unknown.err) == (2, True)
    wrong = fleetrun.run("--scheduler=bach", "train.py", env=example.env)
    assert (wrong.code, "Did you mean batch?" in wrong.err) == (2, True)


BROKEN = {
    "commands": {
        "gone": "no_such_module:x", "raises": "bad:raises", "nothing": "bad:missing", "number": "bad:NUMBER",
        "--odd": "bad:raises",
    },
    "schedulers": {"lame": "bad:NUMBER", "broken": "bad:BROKEN"},
    "exporters": {"gone": "no_such_module:x", "stops": "bad:Stops", "late": "bad:Late"},
    "notifiers": {"gone": "no_such_module:x", "wrong": "bad:Wrong"},
}  # fmt: skip
BAD = """
import click
NUMBER = 3
@click.command()
def raises():
    raise ZeroDivisionError("in the plug-in")
class Broken:
    def submit(self, job):
        raise ZeroDivisionError("in the scheduler")
BROKEN = Broken()
class Stops:
    def __init__(self, context):
        raise ValueError("no such project")
class Late:
    def __init__(self, context):
        pass
    def take(self, message, now):
        if message["is"] == "event":
            raise KeyError("key")
    def close(self):
        pass
class Wrong:
    def __init__(self, argument):
        raise ValueError(f"{argument} is not a number")
"""


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["gone"], "the command 'gone' of bad 1.0 cannot be loaded: ModuleNotFoundError: No module named"),
        (["nothing"], "the command 'nothing' of bad 1.0 cannot be loaded: AttributeError"),
        (["number"], "the command 'number' of bad 1.0 cannot be used: bad:NUMBER has no get_help()"),
        (["raises"], "the command 'raises' of bad 1.0 failed: ZeroDivisionError: in the plug-in"),
        (["--scheduler=lame", "x.py"], "the scheduler 'lame' of bad 1.0 cannot be used: bad:NUMBER has no"),
        (["--scheduler=broken", "x.py"], "the scheduler 'broken' of bad 1.0 failed: ZeroDivisionError"),
    ],
)  # fmt: skip
def test_a_broken_one_is_told_with_its_package(fleetrun: Fleetrun, packages: Packages, words, error):
    packages.install("bad", BROKEN, bad=BAD)
    launch = fleetrun.run(*words, env=packages.env)
    assert launch.code == 125
    assert error in launch.err
    assert "bug in fleetrun" not in launch.err
    assert ("Traceback" in launch.err) == ("failed" in error)


def test_broken_ones_break_nothing_else(fleetrun: Fleetrun, packages: Packages):
    packages.install("bad", BROKEN, bad=BAD)
    info = packages.folder / "worse-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(b"[fleetrun.commands]\nno equals sign\n\xff\n")
    for words in (["--help"], ["help"], ["-h"], ["ps"], ["true"], ["--version"]):
        launch = fleetrun.run(*words, env=packages.env)
        assert launch.code == 0, launch
    assert "--odd" not in fleetrun.run("--help", env=packages.env).out, "it cannot be typed"
    rest = packages.folder / "removed-1.0.dist-info"
    rest.mkdir()
    (rest / "entry_points.txt").write_text("[fleetrun.commands]\nhalf = removed:command\n")
    assert "the program half is neither" in fleetrun.run("half", env=packages.env).err, "without its METADATA"
    asked = fleetrun.run("help", "number", env=packages.env)
    assert "the command 'number' of bad 1.0 cannot be used" in asked.err
    words = (
        "--export=gone",
        "--export=stops",
        "--export=late",
        "--notify=gone",
        "--notify=wrong:kept-secret",
    )
    launch = fleetrun.run(*words, "true", env=packages.env)
    assert launch.code == 0
    for told in (
        "the exporter 'gone' of bad 1.0 cannot be loaded",
        "the exporter 'stops' failed: ValueError: no such project; the job continues without it",
        "the exporter 'late' failed: KeyError: 'key'",
        "the notifier 'gone' of bad 1.0 cannot be loaded",
        "the notifier 'wrong' failed: ValueError: ... is not a number",
    ):
        assert told in launch.said
    assert launch.said.count("exporter 'late'") == 1, "it gets no more messages"
    assert "kept-secret" not in launch.err


def test_two_packages_with_one_name_are_refused_and_ours_come_first(fleetrun: Fleetrun, packages: Packages):
    for name in ("one", "two"):
        packages.install(name, {"commands": {"hello": "bad:raises", "ps": "bad:raises"}}, bad=BAD)
    launch = fleetrun.run("hello", env=packages.env)
    assert launch.code == 125
    assert re.search(
        r"2 commands have the name 'hello', in (one 1.0 and two|two 1.0 and one) 1.0", launch.err
    )
    assert fleetrun.run("ps", env=packages.env).code == 0


# ---- programs on PATH


def on_path(fleetrun: Fleetrun, name: str, text: str) -> dict[str, str]:
    folder = fleetrun.folder / "bin"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return {"PATH": f"{folder}:{environment()['PATH']}"}


def test_a_program_on_path(fleetrun: Fleetrun):
    env = on_path(fleetrun, "fleetrun-greet", '#!/bin/sh\necho "$0 $*"\nexit 7\n')
    path = fleetrun.folder / "bin" / "fleetrun-greet"
    launch = fleetrun.run("greet", "--loud", "a b", env=env)
    assert (launch.code, launch.out) == (7, f"{path} --loud a b\n")
    assert f"the program {path}" in fleetrun.run("help", "greet", env=env).out
    assert str(path) in fleetrun.run("--help", env=env).out.replace("\n", "")
    on_path(fleetrun, "fleetrun-ps", "#!/bin/sh\nexit 9\n")
    assert fleetrun.run("ps", env=env).code == 0, "ours comes first"
    on_path(fleetrun, "fleetrun-broken", "not a program\n")
    broken = fleetrun.run("broken", env=env)
    assert (broken.code, "interpreter" in broken.err) == (126, True)


def test_its_signals_are_its_own(fleetrun: Fleetrun):
    program = (
        f"#!{sys.executable}\nfrom telling import *\nprint(signal.getsignal(signal.SIGPIPE).name)\nstay()\n"
    )
    env = on_path(fleetrun, "fleetrun-wait", program)
    launch, _ = fleetrun.at_terminal("wait", env=env)
    assert launch.until_ready(1) == [launch.popen.pid]
    launch.type_in(b"\x03")
    assert launch.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in launch.out


def test_sigpipe_ends_it_as_usual(fleetrun: Fleetrun):
    env = on_path(fleetrun, "fleetrun-yes", "#!/bin/sh\ngrep SigIgn /proc/$$/status >&2\n")
    launch = fleetrun.run("yes", env=env)
    ignored = int(launch.err.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1))

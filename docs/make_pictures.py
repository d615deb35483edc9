"""Makes the pictures of the documentation: what a terminal shows while a real job runs, as SVG.

    python docs/make_pictures.py [NAME ...]      without names: all

A terminal of pyte's is what the commands write to; rich draws its screen.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

HERE = Path(__file__).resolve().parent
PICTURES = HERE / "pictures"
JOB = HERE / "picture_job.py"
HOME = "/home/me/digits"
"""Where the pictures say that the job runs."""
COMMAND = Path(sys.executable).parent / "fleetrun"
_COLOURS = {"brown": "yellow", "default": "default"}


@dataclass
class Terminal:
    """A command at a terminal of so many columns and lines; its screen."""

    argv: list[str]
    folder: Path
    columns: int = 90
    lines: int = 20
    screen: pyte.Screen = field(init=False)

    def __enter__(self) -> Terminal:
        self.screen = pyte.Screen(self.columns, self.lines)
        self._stream = pyte.ByteStream(self.screen)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", self.lines, self.columns, 0, 0))
        env = {**os.environ, "TERM": "xterm-256color", "XDG_RUNTIME_DIR": str(self.folder / "run")}
        for name in ("CI", "NO_COLOR", "COLUMNS", "LINES"):
            env.pop(name, None)
        self._process = subprocess.Popen(
            self.argv, cwd=self.folder, env=env, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        return self

    def watch(self, until: Callable[[str], bool], within: float = 60.0) -> None:
        """Read what is written until the text of the screen is as wanted."""
        deadline = time.monotonic() + within
        while not until("\n".join(self.screen.display)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.argv} never showed it:\n" + "\n".join(self.screen.display))
            if not self._take(0.2) and self._process.poll() is not None:
                break

    def _take(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self._stream.feed(data)
        return bool(data)

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        os.close(self._master)


def drawn(screen: pyte.Screen, title: str, folder: Path) -> str:
    """The screen as SVG, without fonts from elsewhere."""
    console = Console(record=True, width=screen.columns, file=io.StringIO(), force_terminal=True)
    last = max((number for number, line in enumerate(screen.display) if line.strip()), default=0)
    for number in range(last + 1):
        text = Text(no_wrap=True, end="")
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            text.append(cell.data, Style(color=_colour(cell.fg), bold=cell.bold, reverse=cell.reverse))
        text.rstrip()
        if str(folder) in text.plain:
            text = Text(text.plain.replace(str(folder), HOME), no_wrap=True, end="")
        console.print(text, soft_wrap=True)
    svg = console.export_svg(title=title, unique_id=re.sub(r"\W", "", title))
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _colour(name: str) -> str:
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return _COLOURS.get(name, f"bright_{name[6:]}" if name.startswith("bright") else name)


@contextlib.contextmanager
def job(folder: Path, *words: str) -> Iterator[Terminal]:
    """A job that trains for a minute, and its terminal, once it has reported progress."""
    argv = [str(COMMAND), "--job_id", "digits", "--nproc_per_node", "3", *words, "train.py"]
    with Terminal(argv, folder) as terminal:
        terminal.watch(lambda text: "loss" in text and "/s" in text)
        yield terminal


def live(folder: Path) -> str:
    """The status line of the terminal."""
    with job(folder) as terminal:
        terminal.watch(lambda text: "epoch 3" in text)
        return drawn(terminal.screen, "fleetrun --job_id digits --nproc_per_node 3 train.py", folder)


def watch(folder: Path) -> str:
    """`status --watch` while the job runs."""
    with job(folder), Terminal([str(COMMAND), "status", "--watch"], folder, 100, 24) as terminal:
        terminal.watch(lambda text: "epoch 5" in text)
        return drawn(terminal.screen, "fleetrun status --watch", folder)


def plot(folder: Path) -> str:
    """`fleetrun plot` of a job that was restarted once."""
    with Terminal(
        [str(COMMAND), "--job_id", "digits", "--nproc_per_node", "3", "train.py", "fail"], folder
    ) as terminal:
        terminal.watch(lambda text: "Pod completed" in text, 120)
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(folder / "run")}
    subprocess.run(
        [COMMAND, "plot", "-o", "plot.svg"], cwd=folder, env=environ, check=True, stdout=subprocess.DEVNULL
    )
    return (folder / "plot.svg").read_text()


ALL: dict[str, Callable[[Path], str]] = {"live": live, "watch": watch, "plot": plot}


def main(names: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in names or ALL:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(JOB, Path(folder) / "train.py")
            (PICTURES / f"{name}.svg").write_text(ALL[name](Path(folder)))
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

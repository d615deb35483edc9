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
from xml.sax.saxutils import escape

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

    def type_in(self, text: str) -> None:
        os.write(self._master, text.encode())

    def pass_time(self, seconds: float) -> None:
        """Read what is written for so long."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._take(left)

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


def top(folder: Path) -> str:
    """A recording of `fleetrun top`: the slowest process is found, and looked at."""
    with job(folder, "--nproc_per_node", "6"), Terminal([str(COMMAND), "top"], folder, 100, 18) as terminal:
        frames: list[list[list[tuple[str, Style]]]] = []

        def show(keys: str, until: str, count: int) -> None:
            terminal.type_in(keys)
            terminal.watch(lambda text: until in text)
            for _ in range(count):
                terminal.pass_time(_FRAME)
                frames.append(runs(terminal.screen, folder))

        terminal.pass_time(30)  # some bars
        show("", "sorted by rank", 4)
        show("sss", "sorted by step time", 3)
        show("\r", "epoch 2", 1)
        show("", "train.py:", 5)
        show("\x1b", "sorted by step time", 2)
        show("r", "y: yes", 3)
        show("n", "sorted by step time", 2)
        return animated(frames, "fleetrun top")


_FRAME = 1.3
"""Seconds of a frame of a recording."""
_CELL, _LINE, _MARGIN, _BAR = 8.4, 17, 12, 34
"""Of a recording, in pixels: width and height of a character, margin, and height of the title."""


def runs(screen: pyte.Screen, folder: Path) -> list[list[tuple[str, Style]]]:
    """Of each line: the texts of one style."""
    lines = []
    for number in range(screen.lines):
        line: list[tuple[str, Style]] = []
        for column in range(screen.columns):
            cell = screen.buffer[number][column]
            style = Style(
                color=_colour(cell.fg), bold=cell.bold, reverse=cell.reverse, underline=cell.underscore
            )
            if line and line[-1][1] == style:
                line[-1] = line[-1][0] + cell.data, style
            else:
                line.append((cell.data, style))
        lines.append([(text.replace(str(folder), HOME), style) for text, style in line])
    return lines


def animated(frames: list[list[list[tuple[str, Style]]]], title: str) -> str:
    """The frames as one SVG that shows them in turn, without a script. A line that stays is drawn once."""
    columns = max(sum(len(text) for text, _ in line) for line in frames[0])
    width, height = round(columns * _CELL + 2 * _MARGIN), len(frames[0]) * _LINE + _BAR + _MARGIN
    count, whole = len(frames), len(frames) * _FRAME
    body, styles = [], []
    for number in range(len(frames[0])):
        begin = 0
        for frame in range(1, count + 1):
            if frame < count and frames[frame][number] == frames[begin][number]:
                continue
            drawn_line = _line(frames[begin][number], number)
            if drawn_line and frame - begin == count:
                body.append(drawn_line)
            elif drawn_line:
                name = f"s{begin}-{frame}"
                body.append(f'<g class="s {name}">{drawn_line}</g>')
                if not any(f".{name}{{" in each for each in styles):
                    styles.append(_span(name, begin, frame, count, whole))
            begin = frame
    css = "\n".join(styles)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
text{{font:14px Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre}}
.s{{visibility:hidden;animation:{whole:g}s steps(1) infinite}}
{css}
</style>
<rect width="{width}" height="{height}" rx="8" fill="#1e2127"/>
<g fill="#c5c8c6">
<text x="{width / 2:g}" y="22" text-anchor="middle" opacity=".7">{title}</text>
{"".join(body)}
</g>
</svg>
"""


def _span(name: str, begin: int, end: int, count: int, whole: float) -> str:
    """Shown from one frame to another."""
    on, off = 100 * begin / count, 100 * end / count
    keys = [f"{on:.3f}%{{visibility:visible}}"]
    if begin:
        keys.insert(0, "0%{visibility:hidden}")
    if end < count:
        keys.append(f"{off:.3f}%{{visibility:hidden}}")
    # where nothing may move, the last frame stays
    still = (
        ""
        if end < count
        else f"@media(prefers-reduced-motion){{.{name}{{animation:none;visibility:visible}}}}"
    )
    return f".{name}{{animation-name:{name}}}@keyframes {name}{{{''.join(keys)}}}{still}"


_SHADES = {
    "black": "#4b5263", "red": "#e06c75", "green": "#98c379", "yellow": "#e5c07b", "blue": "#61afef",
    "magenta": "#c678dd", "cyan": "#56b6c2", "white": "#c5c8c6",
}  # fmt: skip


def _line(line: list[tuple[str, Style]], number: int) -> str:
    """Empty for an empty one."""
    found, column = [], 0
    for text, style in line:
        x, y = _MARGIN + column * _CELL, _BAR + number * _LINE
        column += len(text)
        name = style.color.name.removeprefix("bright_") if style.color is not None else ""
        fill = _SHADES.get(name, "#c5c8c6")
        if style.reverse:
            found.append(
                f'<rect x="{x:g}" y="{y}" width="{len(text) * _CELL:g}" height="{_LINE}" fill="{fill}"/>'
            )
            fill = "#1e2127"
        shown = text.strip(" ")
        if not shown:
            continue
        x += (len(text) - len(text.lstrip(" "))) * _CELL
        look = f' fill="{fill}"' if fill != "#c5c8c6" else ""
        look += ' font-weight="bold"' if style.bold else ""
        look += ' text-decoration="underline"' if style.underline else ""
        size = f'textLength="{len(shown) * _CELL:g}" lengthAdjust="spacingAndGlyphs"'
        found.append(f'<text x="{x:g}" y="{y + 13}" {size}{look} xml:space="preserve">{escape(shown)}</text>')
    return "".join(found)


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


ALL: dict[str, Callable[[Path], str]] = {"live": live, "top": top, "plot": plot}


def main(names: list[str]) -> None:
    PICTURES.mkdir(exist_ok=True)
    for name in names or ALL:
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(JOB, Path(folder) / "train.py")
            (PICTURES / f"{name}.svg").write_text(ALL[name](Path(folder)))
        print(f"docs/pictures/{name}.svg")


if __name__ == "__main__":
    main(sys.argv[1:])

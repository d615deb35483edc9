"""What `fleetrun`, `-h`, `--help` and `fleetrun help` print, laid out for a width."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from fleetrun import plugins
from fleetrun.envs.settings.options import (
    OWN,
    PET,
    TORCHRUN,
    Group,
    Option,
    Takes,
)
from fleetrun.errors import UsageError, similar
from fleetrun.verbs import FAMILIES, VERBS

NARROWEST, WIDEST = 60, 80
_TWO_COLUMNS = 76
"""From this width on, descriptions are printed next to the options, else below them."""

USAGE = "usage: fleetrun [run] [OPTIONS] SCRIPT [ARGUMENTS]"

_EXAMPLES = (
    ("fleetrun --gpus 0,1 train.py", "one process per GPU"),
    ("fleetrun --nproc_per_node 4 train.py", "four processes"),
    ("fleetrun --server_num 1 --trainer_num 2 train.py", "parameter server"),
    ("fleetrun --nnodes 2 --master h1:6768 train.py", "two machines, on each"),
    ("fleetrun stacks", "where its processes are"),
)

_INTRODUCTION = """\
Start the processes of a training job on this machine, show their output and state, and stop them together.
SCRIPT is a Python file, a module (-m), or any program; everything after it is passed to it.

Options can be written with _ or -, and their values after a space or =. TIME is in seconds, or as 30s, 5m,
2h. SIZE is in bytes, or as 100M, 1GiB. Most options can also be set by a variable: see `fleetrun help env`.
The options of Paddle Fleet and of torchrun are understood too: `fleetrun help paddle`, `... help torchrun`.
"""

_COMPLETION = """\
Completion: add  eval "$(fleetrun --show_completion bash)"  to ~/.bashrc. zsh: the same with zsh in ~/.zshrc.
fish: fleetrun --show_completion fish > ~/.config/fish/completions/fleetrun.fish
"""


# ---- Colours


class Style:
    """Bold headings and coloured names, as cargo has them; plain text without colours."""

    def __init__(self, colours: bool) -> None:
        self.colours = colours

    def heading(self, text: str) -> str:
        return f"\x1b[1;32m{text}\x1b[0m" if self.colours else text

    def name(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.colours else text


PLAIN = Style(False)


def style_of(terminal: bool) -> Style:
    """For stdout: NO_COLOR and TERM=dumb as usual."""
    return Style(terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


# ---- The short help


def short_help(style: Style = PLAIN) -> str:
    """At most 30 lines of 80 columns."""
    lines = [style.heading("usage:") + USAGE.partition(":")[2], ""]
    lines += [f"  {style.name(f'{typed:<50}')}{meaning}" for typed, meaning in _EXAMPLES]
    lines += ["", style.heading("options") + " (all of them: fleetrun --help)"]
    lines += [_brief(option, style) for option in _options() if option.brief]
    lines += ["", style.heading("commands") + " (fleetrun COMMAND -h)"]
    lines += [f"  {family:<15}{style.name(', '.join(words))}" for family, words in FAMILIES.items()]
    if more := plugins.other_commands():
        from textwrap import shorten  # late, as below

        lines.append(f"  {'plug-ins':<15}{style.name(shorten(', '.join(more), 60, placeholder=' ...'))}")
    lines += ["", f"{style.heading('topics')}: fleetrun help {' | '.join(_SHOWN_TOPICS)} ..."]
    return "\n".join(lines) + "\n"


def _brief(option: Option, style: Style) -> str:
    flag = "--gpus" if option.name == "devices" else option.flag  # the spelling that people know
    return f"  {style.name(f'{flag} {option.metavar}'.ljust(24))}{option.brief}"


def _options() -> Iterable[Option]:
    return (option for group in Group for option in _of_group(group))


def _of_group(group: Group) -> list[Option]:
    return [option for option in OWN if option.group is group]


# ---- The long help

_ELSEWHERE = (Group.PADDLE, Group.TORCHRUN)


def long_help(columns: int, style: Style = PLAIN) -> str:
    """All of `--help` for a terminal of this width."""
    width = _width(columns)
    usage = style.heading("usage:") + USAGE.partition(":")[2]
    parts = [usage, *_paragraphs(_INTRODUCTION, width)]
    for group in Group:
        if group not in _ELSEWHERE:
            entries = [_entry(option, width, style) for option in _of_group(group)]
            parts.append("\n".join([style.heading(f"{group}:"), *entries]))
    for family, words in FAMILIES.items():
        rows = [_row(word, VERBS[word], width, style) for word in words]
        parts.append("\n".join([style.heading(f"Commands: {family}"), *rows]))
    if more := plugins.other_commands():
        rows = [_row(word, text, width, style) for word, text in more.items()]
        parts.append("\n".join([style.heading("Commands: plug-ins"), *rows]))
    parts.append(topics(columns, style).rstrip())
    return "\n\n".join([*parts, *_paragraphs(_COMPLETION, width)]) + "\n"


def _width(columns: int) -> int:
    return max(NARROWEST, min(columns, WIDEST)) - 1


def _row(word: str, text: str, width: int, style: Style, column: int = 12) -> str:
    line = wrapped(f"{word:<{column - 1}} {text}", width, indent=" " * (column + 2), first="  ")
    return f"  {style.name(word)}{line[2 + len(word) :]}"


def wrapped(text: str, width: int, indent: str = "", first: str | None = None) -> str:
    """`text` in lines of at most `width`, broken at spaces only: a longer word stays whole."""
    from textwrap import fill  # late: a launch wraps nothing

    return fill(
        text,
        width,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _paragraphs(text: str, width: int) -> Iterable[str]:
    return (wrapped(paragraph, width) for paragraph in text.strip().split("\n\n"))


def _entry(option: Option, width: int, style: Style) -> str:
    names = wrapped(_names(option), width, indent="      ", first="  ")
    margin = 26 if width + 1 >= _TWO_COLUMNS else 6
    text = wrapped(_description(option), width, indent=" " * margin)
    shown = f"  {style.name(names[2:])}"
    if len(names) <= margin - 2:
        return shown + text[len(names) :]
    return f"{shown}\n{text}"


def _names(option: Option) -> str:
    spellings = [option.short, option.flag, *(f"--{alias}" for alias in option.aliases)]
    return f"{', '.join(filter(None, spellings))} {option.metavar}".rstrip()


def _description(option: Option) -> str:
    notes = []
    if option.choices and option.metavar != "|".join(option.choices):
        notes.append(", ".join(option.all_choices))
    if option.group is not Group.OTHER and option.takes is Takes.VALUE:
        notes.append(f"default: {option.default_text}")
    elif option.shown_default:
        notes.append(f"default: {option.shown_default}")
    return f"{option.help} [{'; '.join(notes)}]" if notes else option.help


# ---- Topics, out of the documentation

TOPICS: Mapping[str, tuple[str, str, str]] = {
    "tutorial": ("Ten minutes: a script, a failure, a restart, a checkpoint.", "tutorial.md", ""),
    "launch": ("A launch on one machine: what is shown, ports, stopping.", "launch.md", ""),
    "machines": ("Several machines: where they meet, ranks, lost machines.", "many-machines.md", ""),
    "failures": ("What fails, what is reported and restarted, hangs.", "failures.md", ""),
    "troubleshooting": ("Error messages: what they mean, what to do.", "troubleshooting.md", ""),
    "exit-codes": ("What an exit code means.", "failures.md", "Exit codes"),
    "env": ("Variables: what scripts find, and what sets options.", "reference/environment.md", "Variables"),
    "files": ("Where logs, records and sockets are.", "reference/environment.md", "Files"),
    "jobs": ("Ask and stop running jobs.", "monitoring-a-job.md", ""),
    "job-files": ("Options of a launch in a file.", "job-files.md", ""),
    "ps": ("Training with parameter servers.", "parameter-server.md", ""),
    "ps-data": ("Parameter servers: data sets and streams.", "parameter-server-data.md", ""),
    "ps-modes": ("Parameter servers: what is exact in which mode.", "parameter-server-modes.md", ""),
    "ps-running": ("Parameter servers: crashes, saves, publishing.", "parameter-server-running.md", ""),
    "fleet": ("The API for scripts.", "fleet.md", ""),
    "elastic": ("Scripts that are stopped and resume.", "elastic-training.md", ""),
    "progress": ("Steps, loss and speed of a script.", "progress.md", ""),
    "serving": ("Answer requests with a saved model.", "serving.md", ""),
    "engines": ("Slurm, MPI, Kubernetes, ssh.", "engines.md", ""),
    "plugins": ("Schedulers, exporters, notifiers, commands of your own.", "plugins.md", ""),
    "notify": ("Notifications of failures, restarts, hangs and the end.", "notifications.md", ""),
    "paddle": ("Options and names of Paddle Fleet.", "from-paddle.md", ""),
    "torchrun": ("Options of torchrun.", "from-torchrun.md", ""),
    "glossary": ("The words of the documentation.", "glossary.md", ""),
}
"""What each is about, and the page and the section that it prints."""

_SHOWN_TOPICS = ("machines", "failures", "ps", "env", "exit-codes", "files")


def topic(word: str, columns: int, colours: bool) -> str:
    """A page or a section of the documentation for a terminal. Raises UsageError."""
    if word not in TOPICS:
        known = [*TOPICS, *VERBS, *plugins.other_commands()]
        begun = [name for name in known if name.startswith(word)]
        meant = begun[0] if len(begun) == 1 else next(iter(similar(word, known)), None)
        hint = f"Did you mean `fleetrun help {meant}`?" if meant else f"There are: {', '.join(TOPICS)}."
        raise UsageError(f"there is no help on {word!r}", hint=hint)
    _, page, heading = TOPICS[word]
    text = _section((_pages() / page).read_text(), heading)
    return _rendered(_BEFORE.get(word, "") + text + _tables(word), columns, colours)


_BEFORE = {
    "ps": "This is about the mode `ps`, parameter servers. `fleetrun ps`, which lists jobs, has a `-h`.\n\n"
}


def topics(columns: int, style: Style = PLAIN) -> str:
    """What there is to ask for."""
    width = _width(columns)
    column = max(map(len, TOPICS)) + 2
    rows = [_row(name, text, width, style, column) for name, (text, *_) in TOPICS.items()]
    return "\n".join([style.heading("Topics: fleetrun help TOPIC"), *rows]) + "\n"


def _pages() -> Path:
    """The documentation: of a clone, else as it was installed. Raises UsageError."""
    clone = Path(__file__).parents[1] / "docs"
    if (clone / "launch.md").exists():
        return clone
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files("fleetrun") or () if file.name == "launch.md"]
    except PackageNotFoundError:
        found = []
    if not found:
        raise UsageError("the documentation is not installed with this copy of fleetrun")
    return Path(str(found[0].locate())).parent


def _section(page: str, heading: str) -> str:
    """The section of this heading, or the whole page."""
    if not heading:
        return page
    found = re.search(rf"^## {heading}$.*?(?=^## |\Z)", page, re.DOTALL | re.MULTILINE)
    return found.group() if found is not None else ""


def _tables(word: str) -> str:
    """What the table of options says on the topic, as Markdown."""
    if word == "env":
        rows = [(option.flag, names) for option in _options() if (names := _variables(option))]
        return f"\n## Variables of options\n\n{_table('option', 'variables', rows)}"
    if word == "paddle":
        older = [(f"`--{name}`", f"`{option.flag}`") for option in _options() for name in option.paddle]
        return (
            f"\n## Older spellings\n\n{_table('option', 'is', older)}"
            f"\n## Options that only Paddle's programs need\n\n{_described(_of_group(Group.PADDLE))}"
        )
    if word == "torchrun":
        options = (*_of_group(Group.TORCHRUN), *TORCHRUN.values())
        return f"\n## Options that only torchrun has\n\n{_described(options)}"
    return ""


def _variables(option: Option) -> str:
    return ", ".join(f"`{name}`" for name in option.env if not name.startswith(PET))


def _described(options: Iterable[Option]) -> str:
    return _table("option", "", ((f"`{_names(option)}`", option.help) for option in options))


_BAR = r"\|"


def _table(left: str, right: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [(left, right), ("---", "---"), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', _BAR) for cell in row)} |\n" for row in lines)


_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")


def _rendered(markdown: str, columns: int, colours: bool) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.markdown import CodeBlock, Markdown
    from rich.text import Text

    class Code(CodeBlock):
        """Whole lines, so that a command can be copied from a narrow terminal."""

        def __rich_console__(self, *_: object) -> Iterator[Text]:
            yield Text(str(self.text).rstrip(), "cyan", no_wrap=True, overflow="ignore")

    class Page(Markdown):
        elements = {**Markdown.elements, "fence": Code, "code_block": Code}  # noqa: RUF012 - as rich's own

    text = re.sub(r"<!--.*?-->\n?", "", markdown, flags=re.DOTALL)
    console = Console(
        file=StringIO(), width=max(40, min(columns, 100)), force_terminal=colours, no_color=not colours,
        legacy_windows=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(Page(_LINK.sub(_reference, text), hyperlinks=False), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _reference(link: re.Match[str]) -> str:
    """A link to a page as the topic that prints it; others as their text."""
    text, target = link.groups()
    page = target.partition("#")[0]
    named = next((name for name, (_, own, heading) in TOPICS.items() if own == page and not heading), None)
    if link.group().startswith("!"):
        return ""
    if named is None or not page:
        return text
    return f"{text} (`fleetrun help {named}`)"


# ---- On the terminal


def page(text: str) -> None:
    """What is longer than the terminal, in the user's pager."""
    import click

    os.environ.setdefault("LESS", "FRX")  # a text that fits is printed and stays
    sys.stdout.flush()
    click.echo_via_pager(text.rstrip("\n"))

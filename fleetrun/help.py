"""Print the texts of `fleetrun`, `-h`, `--help` and `fleetrun help`, laid out for a width."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
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
"""From this width on, descriptions are next to the options, else below them."""

USAGE = "usage: fleetrun [run] [OPTIONS] SCRIPT [ARGUMENTS]"

_EXAMPLES = (
    ("fleetrun --gpus 0,1 train.py", "one process per GPU"),
    ("fleetrun --nproc_per_node 4 train.py", "four processes"),
    ("fleetrun --server_num 1 --trainer_num 2 train.py", "parameter server"),
    ("fleetrun --nnodes 2 --master h1:6768 train.py", "two nodes, on each of them"),
    ("fleetrun stacks", "show what its processes do"),
)

_INTRODUCTION = """\
Start the processes of a training job on this node, show their output and state, and stop them together.
SCRIPT is a Python file, a module (-m), or any program. It receives all words that follow it.

Options can be written with _ or -, and their values after a space or =. TIME is in seconds, or as 30s, 5m,
2h. SIZE is in bytes, or as 100M, 1GiB. You can also set most options by an environment variable: see
`fleetrun help env`. fleetrun also accepts the options of Paddle Fleet and torchrun: `fleetrun help paddle`,
`fleetrun help torchrun`.
"""

_COMPLETION = """\
Completion: add  eval "$(fleetrun --show_completion bash)"  to ~/.bashrc. zsh: the same with zsh in ~/.zshrc.
fish: fleetrun --show_completion fish > ~/.config/fish/completions/fleetrun.fish
"""


# ---- Colours


class Style:
    """A style with bold headings and coloured names, as in cargo, or plain text without colours."""

    def __init__(self, colours: bool) -> None:
        self.colours = colours

    def heading(self, text: str) -> str:
        return f"\x1b[1;32m{text}\x1b[0m" if self.colours else text

    def name(self, text: str) -> str:
        return f"\x1b[36m{text}\x1b[0m" if self.colours else text


PLAIN = Style(False)


def style_of(terminal: bool) -> Style:
    """Return the style for stdout, which follows NO_COLOR and TERM=dumb."""
    return Style(terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


# ---- The short help


def short_help(style: Style = PLAIN) -> str:
    """Return the short help: at most 30 lines of 80 columns."""
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
    """Return the whole text of `--help` for a terminal of this width."""
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
    """Break `text` into lines of at most `width`, at spaces only. A longer word stays whole."""
    from textwrap import fill  # late: a launch wraps no text

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


# ---- Topics, from the documentation

TOPICS: Mapping[str, str] = {
    "install": "install requirements extras pip docker upgrade | Requirements, extras, GPU builds, Docker.",
    "tutorial": "tutorial quickstart start | Ten minutes: a script, a failure, a restart, a checkpoint.",
    "launch": "launch options follow signals ctrl-c display"
    " | Start a job on one node: output, options, stopping.",
    "faq": "faq questions | Questions that new users ask.",
    "many-machines#open-the-ports": "ports port firewall | Ports of a job.",
    "faq#which-gpus-do-i-get": "gpu gpus devices cuda | GPUs of a job.",
    "python": "python notebook notebooks jupyter pytest | Start jobs from a program, a notebook or a test.",
    "job-files": "job-files toml config yaml | Keep the options of a job in a file.",
    "frameworks": "frameworks huggingface transformers accelerate lightning deepspeed jax tensorflow xgboost"
    " | Hugging Face, accelerate, Lightning, DeepSpeed, JAX, ...",
    "failures": "failures failure error errors crash traceback | Read a failure report.",
    "reference/exit-codes": "exit-codes exit exit-code exitcode 123 124 125 137 | What each exit code means.",
    "hangs": "hang hangs hung stuck deadlock timeout | Find the rank that blocks the others.",
    "debugger": "debugger debug pdb breakpoint post-mortem | Debug a rank with pdb.",
    "hangs#find-stragglers": "stragglers straggler slow late | Find a slow rank.",
    "restarts": "restarts restart max-restart retry | When a job restarts, and when it ends.",
    "warm-restarts": "warm zygote | Start and restart with torch already imported.",
    "watch": "watch edit reload autoreload | Start again when the script changes.",
    "notifications": "notify notifications slack webhook email | Get a message when a job fails.",
    "elastic-training": "elastic checkpoint checkpoints resume preemption spot | Checkpoint and resume.",
    "memory-checkpoints": "in-memory memory-checkpoints | Checkpoints in memory.",
    "doctor": "checks check preflight | Check nodes before a job.",
    "monitoring-a-job": "jobs inspect attach kill | Inspect and stop running jobs.",
    "goodput": "goodput efficiency | The share of time in new steps.",
    "progress": "progress loss steps activity heartbeat | Report steps, loss and speed.",
    "monitoring": "monitoring tensorboard curves | TensorBoard, Prometheus and plots.",
    "monitoring#prometheus": "metrics prometheus grafana | Metrics for Prometheus.",
    "events": "events record event-log json jsonl | The event log of a job.",
    "reference/environment#files": "files log output stdout | Where logs, event logs and sockets are.",
    "reference/environment#variables": "env environment variables rank"
    " | Variables: what scripts find, and what sets options.",
    "many-machines": "machines multi-node nnodes master ips | Start a job on several nodes.",
    "elastic-nodes": "spares spare | Replace lost nodes.",
    "bad-nodes": "bad-nodes faults exclude ecc | Exclude bad nodes.",
    "reference/rendezvous": "rendezvous store etcd | How nodes find each other.",
    "security": "security secret secrets encryption tls | Tokens, and what they protect.",
    "slurm": "slurm srun sbatch scheduler cluster | Slurm.",
    "kubernetes": "kubernetes k8s pod kubeflow | Kubernetes.",
    "ssh": "ssh mpi mpirun | ssh and MPI.",
    "copy-code": "sync copy-code code | Copy your code to the nodes.",
    "troubleshooting": "troubleshooting messages warnings | Error messages, and what to do.",
    "troubleshooting#connections-between-ranks": "nccl gloo network | Messages of NCCL and Gloo.",
    "troubleshooting#memory-limits-and-disks": "oom memory limits ulimit shm disk"
    " | Messages about memory, limits and disks.",
    "fleet": "fleet strategy amp fsdp zero | The API for scripts.",
    "parameter-server": "ps server servers embedding pserver | Train with parameter servers.",
    "parameter-server-data": "ps-data data dataset | Parameter servers: data sets.",
    "parameter-server-streams": "streams stream kafka | Parameter servers: train on a stream.",
    "parameter-server-modes": "ps-modes async geo | Parameter servers: sync, async and geo.",
    "parameter-server-prefetch": "prefetch | Parameter servers: fetch rows ahead.",
    "parameter-server-durability": "durability | Parameter servers: keep tables through crashes.",
    "parameter-server-running": "ps-running save load | Parameter servers: save and load tables.",
    "parameter-server-publish": "publish | Parameter servers: publish while you train.",
    "parameter-server-sizing": "sizing | Parameter servers: how many, and how large.",
    "parameter-server-tables": "ps-tables table embeddings shrink ttl"
    " | Parameter servers: filter and bound tables.",
    "saving": "export saving model | Export a model.",
    "serving": "serving inference http grpc | Answer requests with a model.",
    "plugins": "plugins plugin extensions | Your own schedulers, exporters, notifiers, commands.",
    "from-paddle": "paddle from-paddle | Options and names of Paddle Fleet.",
    "from-torchrun": "torchrun from-torchrun torchelastic | Options of torchrun.",
    "glossary": "glossary words terms | The words of the documentation.",
}
"""Pages of docs/, or `page#heading`, with their words and subjects. The first word names the topic."""

WORDS = {word: page for page, row in TOPICS.items() for word in row.partition(" | ")[0].split()}

_SHOWN_TOPICS = ("machines", "failures", "hang", "resume", "ports", "env")
_MOST_LINES = 120


def topic(word: str, columns: int, colours: bool) -> str:
    """Return a page of the documentation, or a section, for a terminal. Raises UsageError.

    `word` is a word of a topic or the name of a page, perhaps with `#heading`. A text of more than 120 lines
    ends with the commands for its remaining sections.
    """
    name, _, heading = word.lower().partition("#")
    page, _, own = WORDS.get(name, name).partition("#")
    if not _is_page(page):
        meant = next(iter(similar(name, [*WORDS, *VERBS, *plugins.other_commands()])), None)
        hint = f"Did you mean `fleetrun help {meant}`?" if meant else "`fleetrun help` lists all topics."
        raise UsageError(f"no topic or command is called {word!r}", hint=hint)
    file = _pages() / f"{page}.md"
    text = _section(file.read_text(), own)
    text = _section(text + _tables(page, own), heading)
    text = _BEFORE.get(name, "") + _LINK.sub(partial(_reference, page), text)
    mark = "#" * (_level(text) + 1)
    parts = re.split(rf"^(?={mark} )", text, flags=re.MULTILINE)
    shown = [_rendered(part, columns, colours) for part in parts]
    more = [f"  fleetrun help {name}#{_slug(part)}\n" for part in parts]
    while len(shown) > 1 and "\n".join([*shown, *more[len(shown) :]]).count("\n") > _MOST_LINES - 3:
        shown.pop()
    rest = "".join(more[len(shown) :])
    lines = "\n".join([*shown, f"More:\n{rest}"] if rest else shown).splitlines(keepends=True)
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"The rest is in {file}\n"]
    return "".join(lines)


_BEFORE = {"ps": "This topic is the mode `ps`, parameter servers. To list jobs, see `fleetrun ps -h`.\n\n"}


def topics(columns: int, style: Style = PLAIN) -> str:
    """List the topics, one per line."""
    width = _width(columns)
    rows = [
        _row(words.split()[0], text, width, style, 17)
        for words, _, text in (row.partition(" | ") for row in TOPICS.values())
    ]
    return "\n".join([style.heading("Topics: fleetrun help TOPIC"), *rows]) + "\n"


def _is_page(name: str) -> bool:
    return (_pages() / f"{name}.md").is_file()


def _pages() -> Path:
    """Return the directory of the documentation, in a clone or as installed. Raises UsageError."""
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


def _slug(text: str) -> str:
    """Return the anchor of the heading in the first line, as on the site."""
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text.partition("\n")[0]).strip().lower())


def _level(text: str) -> int:
    """Return the level of the first heading: 1 for a page."""
    found = re.search(r"^(#+) ", text, re.MULTILINE)
    return len(found[1]) if found is not None else 1


def _section(text: str, anchor: str) -> str:
    """Return the section with this anchor, or the whole text."""
    for found in re.finditer(r"^##+ .*\n", text, re.MULTILINE) if anchor else ():
        if _slug(found.group()) == anchor:
            rest = re.split(
                rf"^#{{2,{_level(found.group())}}} ", text[found.end() :], maxsplit=1, flags=re.MULTILINE
            )
            return found.group() + rest[0]
    return text


def _tables(page: str, section: str) -> str:
    """Return the part of a page or a section that comes from the table of options, as Markdown."""
    if section == "variables":
        tables = [
            f"\n#### {group}\n\n{_table('option', 'variables', rows)}"
            for group in Group
            if (
                rows := [(option.flag, names) for option in _of_group(group) if (names := _variables(option))]
            )
        ]
        return f"\n### Variables of options\n{''.join(tables)}"
    if page == "from-paddle":
        older = [(f"`--{name}`", f"`{option.flag}`") for option in _options() for name in option.paddle]
        return (
            f"\n## Older spellings\n\n{_table('option', 'is', older)}"
            f"\n## Options that only Paddle's programs need\n\n{_described(_of_group(Group.PADDLE))}"
        )
    if page == "from-torchrun":
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
        """A code block with whole lines, so that you can copy a command from a narrow terminal."""

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
        console.print(Page(text, hyperlinks=False), crop=False)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _reference(page: str, link: re.Match[str]) -> str:
    """Replace a link to a page by the command that prints the page, and any other link by its text."""
    text, target = link.groups()
    if link.group().startswith("!"):
        return ""
    folder = page[: page.rfind("/") + 1]
    name, _, heading = f"{folder}{target}".replace(f"{folder}../", "").partition(".md")
    return f"{text} (`fleetrun help {name}{heading}`)" if _is_page(name) else text


# ---- On the terminal


def page(text: str) -> None:
    """Print a text. A text that is longer than the terminal goes to the user's pager."""
    import click

    os.environ.setdefault("LESS", "FRX")  # a text that fits is printed and stays
    sys.stdout.flush()
    click.echo_via_pager(text.rstrip("\n"))

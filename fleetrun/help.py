"""The text of `--help`, laid out for a width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleetrun.envs.settings.options import ACTIONS, OPTIONS, PET, Group, Option, Takes

NARROWEST, WIDEST = 60, 80
_TWO_COLUMNS = 76
"""From this width on, descriptions are printed next to the options, else below them."""

SHORT = """\
usage: fleetrun [OPTIONS] SCRIPT [ARGUMENTS]

  fleetrun --gpus 0,1 train.py                      one process per device
  fleetrun --server_num=1 --trainer_num=2 train.py  parameter server
  fleetrun ps, status, logs, stop, stacks           inspect running jobs
  fleetrun --help                                   all options and commands
"""

_INTRODUCTION = """\
Start the processes of a training job on this machine, show their output and state, and stop them together.
SCRIPT is a Python file, a module (-m), or any program; everything after it is passed to it.

Options can be written with _ or -, and their values after a space or =. The variable after env: is read when
the option is not given. TIME is in seconds, or as 30s, 5m, 2h. SIZE is in bytes, or as 100M, 1GiB.
The options of torchrun and its variables (PET_NNODES, ...) are read too.
"""

_COMMANDS = "Other commands (fleetrun COMMAND --help):"

_EPILOGUE = """\
Exit code: that of the first process that failed, 128 + n if it was ended by signal n; 130 after Ctrl-C; 143
after SIGTERM; 2: usage error; 123: the job does not need this machine; 124: --timeout or --hang_timeout; 125:
error in fleetrun, lost machine; 126: SCRIPT cannot be executed; 127: SCRIPT not found.

Completion: add  eval "$(fleetrun --show_completion bash)"  to ~/.bashrc. zsh: the same with zsh in ~/.zshrc.
fish: fleetrun --show_completion fish > ~/.config/fish/completions/fleetrun.fish
"""


def help_text(columns: int, commands: Mapping[str, str]) -> str:
    """All of `--help` for a terminal of this width. `commands` maps the name of each command to its
    description.
    """
    width = max(NARROWEST, min(columns, WIDEST)) - 1
    parts = [SHORT.partition("\n")[0], *_paragraphs(_INTRODUCTION, width)]
    for group in Group:
        options = [option for option in (*OPTIONS.values(), *ACTIONS.values()) if option.group is group]
        parts.append("\n".join([f"{group}:", *(_entry(option, width) for option in options)]))
    parts.append("\n".join([_COMMANDS, *(_command(*each, width) for each in commands.items())]))
    return "\n\n".join([*parts, *_paragraphs(_EPILOGUE, width)]) + "\n"


def _command(word: str, text: str, width: int) -> str:
    return wrapped(f"{word:<10}{text}", width, indent=" " * 12, first="  ")


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


def _entry(option: Option, width: int) -> str:
    names = wrapped(_names(option), width, indent="      ", first="  ")
    margin = 26 if width + 1 >= _TWO_COLUMNS else 6
    text = wrapped(_description(option), width, indent=" " * margin)
    if len(names) <= margin - 2:
        return names + text[len(names) :]
    return f"{names}\n{text}"


def _names(option: Option) -> str:
    spellings = [option.short, option.flag, *(f"--{alias}" for alias in option.aliases)]
    return f"{', '.join(filter(None, spellings))} {option.metavar}".rstrip()


def _description(option: Option) -> str:
    notes = []
    if option.choices and option.metavar != "|".join(option.choices):
        notes.append(", ".join(option.choices))
    if option.group is not Group.OTHER and option.takes is Takes.VALUE:
        notes.append(f"default: {option.default_text}")
    elif option.shown_default:
        notes.append(f"default: {option.shown_default}")
    variables = [name for name in option.env if not name.startswith(PET)]
    if variables:
        notes.append(f"env: {' or '.join(variables)}")
    return f"{option.help} [{'; '.join(notes)}]" if notes else option.help

"""The `fleetrun help` command prints a topic of the documentation, or the help of a command."""

from __future__ import annotations

import click

from fleetrun import help, plugins, verbs
from fleetrun.commands.output import output_width, write


def _words(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    return [
        word for word in (*help.WORDS, *verbs.VERBS, *plugins.other_commands()) if word.startswith(incomplete)
    ]


@click.command()
@click.argument("word", metavar="[TOPIC|COMMAND]", required=False, shell_complete=_words)
def command(word: str | None) -> int:
    """Explain a topic, with the text of the documentation, or a command.

    Without WORD, the command lists all topics and commands.

    \b
    Examples:
      fleetrun help failures
      fleetrun help exit-codes
      fleetrun help stacks
    """
    width = output_width()
    style = help.style_of(terminal=width is not None)
    if word is None:
        text = f"{help.short_help(style)}\n{help.topics(width or 80, style)}"
    elif word == "run":
        text = help.long_help(width or 80, style)
    elif word not in help.WORDS and (program := verbs.program_of(word)) is not None:
        text = f"fleetrun {word} is the program {program}; `fleetrun {word} --help` runs it.\n"
    elif word not in help.WORDS and (word in verbs.VERBS or plugins.is_command(word)):
        asked = verbs.command(word)
        context = click.Context(
            asked, info_name=f"fleetrun {word}", terminal_width=width, **asked.context_settings
        )
        text = f"{asked.get_help(context)}\n"
    else:
        text = help.topic(word, width or 80, style.colours)
    (write if width is None else help.page)(text)
    return 0

"""Complete shell words with click, from the options as click describes them. Imported only when a shell asks
for completion.
"""

from __future__ import annotations

import os
from shlex import quote

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from fleetrun import plugins, verbs
from fleetrun.envs.settings.options import OWN, Option, Takes
from fleetrun.errors import PluginError

VARIABLE = "_FLEETRUN_COMPLETE"
"""Set by the shell's completion script, which then runs the command again."""


def answer(instruction: str) -> int:
    """Print the completions for a shell's instruction, such as `bash_complete`, and return the exit code."""
    words = os.environ.get("COMP_WORDS", "").replace("\n", " ").split()
    named = len(words) > 1 and (words[1] in verbs.VERBS or plugins.is_command(words[1]))
    completed = _one(words[1]) if named else _command()
    return shell_complete(completed, {}, "fleetrun", VARIABLE, instruction)


def script(shell: str) -> str:
    """Return the lines that a shell evaluates to complete `fleetrun`."""
    found = get_completion_class(shell)
    if found is None:
        raise ValueError(f"click has no completion for the shell {shell}")
    return found(_command(), {}, "fleetrun", VARIABLE).source()


class _Launcher(click.Command):
    """A command whose options end at the script."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[object]]:
        return [] if ctx.params.get("script") else super().shell_complete(ctx, incomplete)


def _command() -> click.Command:
    options: list[click.Parameter] = [_option(option) for option in OWN]
    return _Launcher(
        "fleetrun",
        params=[
            *options,
            click.Argument(["script"], shell_complete=_scripts_and_words),
            click.Argument(["script_args"], nargs=-1, type=click.Path()),
        ],
        add_help_option=False,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    )


def _one(verb: str) -> click.Group:
    try:
        program = verbs.program_of(verb)
        found = _FILES if program is not None else verbs.command(verb)
    except PluginError:
        found = _FILES
    return click.Group("fleetrun", commands={verb: found})


_FILES = click.Command("program", params=[click.Argument(["words"], nargs=-1, type=click.Path())])
"""A stand-in for commands with unknown words. It completes files."""


def _scripts_and_words(
    _: click.Context, __: click.Parameter, incomplete: str
) -> list[CompletionItem[object]]:
    known = {**plugins.other_commands(), **verbs.VERBS}
    words = [CompletionItem(word, help=text) for word, text in known.items() if word.startswith(incomplete)]
    # after an item of type "file", bash would drop the words
    if words and os.environ.get(VARIABLE, "").startswith("bash"):
        return [*words, *_files(incomplete)]
    return [*words, CompletionItem(incomplete, type="file")]


def _files(start: str) -> list[CompletionItem[object]]:
    """Return the files here whose names a shell accepts without quoting."""
    with os.scandir() as entries:
        names = sorted(each.name + "/" * each.is_dir() for each in entries if each.name.startswith(start))
    return [CompletionItem(each) for each in names if each == quote(each) and not each.startswith(".")]


def _option(option: Option) -> click.Option:
    names = [option.flag, *(f"--{name}" for name in option.spellings[1:]), *filter(None, [option.short])]
    if option.takes is not Takes.VALUE:
        return click.Option([*names, option.name], is_flag=True, help=option.help)
    kind = {"DIR": click.Path(file_okay=False), "FILE": click.Path()}.get(option.metavar)
    words = click.Choice(option.all_choices) if option.choices else kind
    return click.Option([*names, option.name], type=words, help=option.help)

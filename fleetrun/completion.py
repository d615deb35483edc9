"""Shell completion by click: the options in click's words. Imported only when a shell asks."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

from fleetrun.envs.options import ACTIONS, Option, Takes
from fleetrun.envs.settings import OPTIONS

VARIABLE = "_FLEETRUN_COMPLETE"
"""The shell's completion script sets it and calls the command again."""


def answer(instruction: str) -> int:
    """Print what the shell asked for, such as `bash_complete`; return the exit code."""
    return shell_complete(_command(), {}, "fleetrun", VARIABLE, instruction)


def script(shell: str) -> str:
    """The lines that a shell evaluates to complete `fleetrun`."""
    found = get_completion_class(shell)
    if found is None:
        raise ValueError(f"click completes no shell called {shell}")
    return found(_command(), {}, "fleetrun", VARIABLE).source()


class _Launcher(click.Command):
    """A command whose options end at the script."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        return [] if ctx.params.get("script") else super().shell_complete(ctx, incomplete)


def _command() -> click.Command:
    options: list[click.Parameter] = [_option(option) for option in (*OPTIONS.values(), *ACTIONS.values())]
    return _Launcher(
        "fleetrun",
        params=[
            *options,
            click.Argument(["script"], type=click.Path()),
            click.Argument(["script_args"], nargs=-1, type=click.Path()),
        ],
        add_help_option=False,
        context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True},
    )


def _option(option: Option) -> click.Option:
    names = [option.flag, *(f"--{alias}" for alias in option.aliases), *filter(None, [option.short])]
    if option.takes is not Takes.VALUE:
        return click.Option([*names, option.name], is_flag=True, help=option.help)
    kind = click.Path(file_okay=False) if option.metavar == "DIR" else None
    return click.Option(
        [*names, option.name], type=click.Choice(option.choices) if option.choices else kind, help=option.help
    )

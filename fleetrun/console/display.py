"""How a launch is shown: chooses between the displays, and makes the console of it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetrun.console.console import LEVELS, Console, sinks, terminal_columns, wants_colour

NO_TERMINAL = (
    "--display live needs one terminal for stdout and stderr, and another TERM than dumb; showing lines only"
)


class QuietConsole(Console):
    """Errors only."""

    follows = False


def chosen(wish: str, environ: Mapping[str, str], *, terminal: bool) -> str:
    """live, plain, json or quiet. `terminal`: stdout and stderr are the same one."""
    if wish not in ("auto", "live"):
        return wish
    able = terminal and environ.get("TERM", "") not in ("", "dumb")
    machine = environ.get("CI", "").lower() not in ("", "0", "false")
    notebook = "JPY_PARENT_PID" in environ  # its `!command` has a terminal that knows colours only
    wanted = wish == "live" or not (environ.get("NO_COLOR") or machine or notebook)
    return "live" if able and wanted else "plain"


def console_for(wish: str, level: str, environ: Mapping[str, str], *, runs: bool = True) -> Console:
    """On this process's stdout and stderr. Without `runs` no processes are started from here: then there is
    nothing to show live, and no events.
    """
    out, err = sinks()
    colour = wants_colour(environ)
    how = chosen(wish, environ, terminal=out is err and os.isatty(1))
    if how == "json" and runs:
        from fleetrun.console.jsonlines import JsonConsole  # late, like the next: a launch needs one of them

        return JsonConsole(out, err, level)
    if how == "live" and runs:
        from fleetrun.console.status_line import live_console

        return live_console(out, level, colour=colour)
    kind = QuietConsole if how == "quiet" else Console
    least = max(level, "ERROR", key=LEVELS.__getitem__) if how == "quiet" else level
    console = kind(out, err, least, colour=colour, columns=terminal_columns())
    if wish == "live" and how != "live" and runs:
        console.warning(NO_TERMINAL)
    return console

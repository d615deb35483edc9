"""The display of a launch (live, plain, json or quiet): chooses it and makes its console."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fleetrun.console.console import LEVELS, Console, sinks, terminal_columns, wants_colour

NO_TERMINAL = (
    "--display live needs one terminal for both stdout and stderr, and TERM must not be dumb; "
    "showing plain lines"
)


class QuietConsole(Console):
    """Errors only."""

    shows_output = False


def choose_display(requested: str, environ: Mapping[str, str], *, terminal: bool) -> str:
    """live, plain, json or quiet. `terminal`: stdout and stderr are the same terminal."""
    if requested not in ("auto", "live"):
        return requested
    able = terminal and environ.get("TERM", "") not in ("", "dumb")
    automated = environ.get("CI", "").lower() not in ("", "0", "false")
    notebook = "JPY_PARENT_PID" in environ  # its `!command` shows colours but cannot move the cursor
    wanted = requested == "live" or not (environ.get("NO_COLOR") or automated or notebook)
    return "live" if able and wanted else "plain"


def console_for(requested: str, level: str, environ: Mapping[str, str], *, runs: bool = True) -> Console:
    """A console on stdout and stderr of this process. Without `runs` this process starts no job, so there is
    no state to show, and there are no events.
    """
    out, err = sinks()
    colour = wants_colour(environ)
    display = choose_display(requested, environ, terminal=out is err and os.isatty(1))
    if display == "json" and runs:
        from fleetrun.console.jsonlines import JsonConsole  # late, as below: a launch needs one at most

        return JsonConsole(out, err, level)
    if display == "live" and runs:
        from fleetrun.console.status_line import live_console

        return live_console(out, level, colour=colour)
    if display == "quiet":
        level = max(level, "ERROR", key=LEVELS.__getitem__)
    kind = QuietConsole if display == "quiet" else Console
    console = kind(out, err, level, colour=colour, columns=terminal_columns())
    if requested == "live" and display != "live" and runs:
        console.warning(NO_TERMINAL)
    return console

"""The screens of `fleetrun top`. Only this command imports the module.

The screens show the list of processes, one process with its stack and log, the tables of parameter servers,
and questions before a stop or a restart.
"""

from __future__ import annotations

import asyncio
import re
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from typing import ClassVar

from rich.console import Group
from rich.style import Style
from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.geometry import Size
from textual.screen import ModalScreen, Screen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Footer, Input, RichLog, Static

from fleetrun.aliases import Callback
from fleetrun.commands import live_rows, live_tables, views
from fleetrun.commands.everywhere import Where
from fleetrun.commands.find import job_title
from fleetrun.commands.live_job import Asked, RemoteWatch, Status, end_of, follow, start_command
from fleetrun.commands.live_rows import COLUMNS, ORDERS, Process, Processes
from fleetrun.commands.output import cell_text, cut, filled, table
from fleetrun.commands.status import StatusWatch
from fleetrun.console.text import format_duration, printable, sanitize
from fleetrun.control.client import Running
from fleetrun.envs.settings.parsing import plural
from fleetrun.record.journal import objects_in

_ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SILENT = 2.0
"""Seconds without an answer of the launcher, after which the heading shows its silence."""

_LOG_LINES = 2000


# ---- The list


class Ranks(ScrollView, can_focus=True):
    """The list of processes. It draws only the visible rows, however many processes exist."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "move(-1000000)", show=False),
        Binding("end,G", "move(1000000)", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[Process] = []
        self._order = "rank"
        self._cursor = 0
        self._drawn: tuple[object, list[Strip]] = (None, [])
        self._version = 0

    def show(self, rows: list[Process], order: str) -> None:
        """Show these rows. The chosen process stays chosen, even if its row moves."""
        chosen = self.chosen
        self._rows, self._order, self._version = rows, order, self._version + 1
        keys = [each.key for each in rows]
        if chosen is not None and chosen.key in keys:
            self._cursor = keys.index(chosen.key)
        self._cursor = max(0, min(self._cursor, len(rows) - 1))
        self.virtual_size = Size(self.size.width, len(rows) + 1)
        self._see()
        self.refresh()

    @property
    def chosen(self) -> Process | None:
        return self._rows[self._cursor] if self._cursor < len(self._rows) else None

    def action_move(self, lines: int) -> None:
        self._cursor = max(0, min(self._cursor + lines, len(self._rows) - 1))
        self._see()
        self.refresh()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, self.size.height - 2))

    def on_click(self, event: events.Click) -> None:
        line = int(self.scroll_offset.y) + event.y - 1
        if event.y > 0 and line < len(self._rows):
            self._cursor = line
            self.refresh()

    def _see(self) -> None:
        """Scroll to the chosen row. The first line of the screen holds the titles."""
        top, room = int(self.scroll_offset.y), max(1, self.size.height - 1)
        top = min(max(top, self._cursor - room + 1), self._cursor)
        if top != int(self.scroll_offset.y):
            self.scroll_to(y=top, animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        top = int(self.scroll_offset.y)
        width = self.size.width
        about = (self._version, top, self.size)
        if self._drawn[0] != about:
            self._drawn = about, self._strips(top, width)
        lines = self._drawn[1]
        if y >= len(lines):
            return Strip.blank(width)
        strip = lines[y]
        if y and top + y - 1 == self._cursor:
            strip = strip.apply_style(Style(reverse=True, bold=True))
        return strip

    def _strips(self, top: int, width: int) -> list[Strip]:
        seen = self._rows[top : top + max(0, self.size.height - 1)]
        slowest = live_rows.slowest_step(self._rows)
        titles, *lines = table(COLUMNS, [live_rows.cells(each, slowest) for each in seen], width)
        title = live_rows.title_of(self._order)
        titles.highlight_regex(rf"(?:^|(?<=  )|(?<=^ )){re.escape(title)}(?=  |$)", "underline")
        console = self.app.console
        return [Strip(each.render(console, end="")).adjust_cell_length(width) for each in (titles, *lines)]


# ---- Other screens


class Confirm(ModalScreen[bool]):
    """A question. The key `y` answers yes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)", "Yes"),
        Binding("n,escape,q", "answer(False)", "No"),
    ]
    CSS = """
    Confirm { align: center middle; }
    Confirm > Static { width: 70; max-width: 95%; height: auto; border: round ansi_yellow; padding: 1 2; }
    """

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(Text(f"{self._question}\n\ny: yes    n: no"))
        yield Footer()

    def action_answer(self, yes: bool) -> None:
        self.dismiss(yes)


_HELP = """\
up, down, page up, page down, home, end: choose a process

Enter  show the stack and the log of the process; u takes the stack again
s, S   change the order: rank, node, state, step, step time, lateness, CPU,
       memory; S goes back
/      show only lines that match all words: node=0-3, rank=7, role=ps,
       state=failed, 12 or 8-15 (ranks), a part of the line; Escape: all
t      show the tables of the parameter servers
r      restart the process; in a collective job all processes of all nodes
x      stop the job; press it again to kill the job immediately
q      quit; the job continues

The bars show STEP TIME of the last two minutes, and LATE (the share of the
time that others wait) of the last eight. All bars have the same scale.
CPU, memory and GPU are those of this node, or with --job of all nodes."""


class Help(ModalScreen[None]):
    """The list of keys."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter,question_mark", "dismiss", "Back")]
    CSS = """
    Help { align: center middle; }
    Help > VerticalScroll {
        width: 110; max-width: 98%; height: auto; max-height: 90%; border: round ansi_cyan; padding: 0 1;
    }
    """

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text(_HELP))
        yield Footer()


class Details(Screen[None]):
    """One process, with its fields, its stack and its log."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "app.pop_screen", "Back"),
        Binding("u", "stack", "Stack again"),
        Binding("tab", "app.focus_next", "Stack/log"),
        Binding("r", "restart", "Restart"),
    ]
    CSS = """
    Details > #about { height: auto; }
    Details > .title { height: 1; text-style: bold underline; }
    Details > RichLog { height: 1fr; scrollbar-size-horizontal: 1; scrollbar-size-vertical: 1; }
    """

    def __init__(self, asked: Asked, one: Process) -> None:
        super().__init__()
        self._asked = asked
        self.one = one
        self._kills: list[Callback] = []

    def compose(self) -> ComposeResult:
        yield Static(id="about")
        yield Static(Text("Stack"), classes="title")
        yield RichLog(id="stack", wrap=False, auto_scroll=False, max_lines=_LOG_LINES)
        yield Static(Text("Log"), classes="title")
        yield RichLog(id="log", wrap=False, max_lines=_LOG_LINES)
        yield Footer()

    def on_mount(self) -> None:
        self.take(self.one)
        self.query_one("#log").focus()
        self.action_stack()
        self._run(self._asked.logs(self.one), "#log")

    def on_unmount(self) -> None:
        for kill in self._kills:
            kill()

    def take(self, one: Process) -> None:
        """Show the newest fields of the process."""
        self.one = one
        fields = zip(COLUMNS, map(cell_text, live_rows.cells(one, 0.0)), strict=True)
        shown = [
            Text.assemble((f"{column.title.lower()} ", "dim"), text)
            for column, text in fields
            if column.title and text and column.title not in ("ROLE", "RANK", "LAST LINE")
        ]
        host = f" ({one.host})" if one.host else ""
        lines = filled([Text(f"{one.title}{printable(host)}", "bold"), *shown], self.app.size.width)
        self.query_one("#about", Static).update(Group(*lines))

    def action_stack(self) -> None:
        log = self.query_one("#stack", RichLog)
        log.clear()
        if not self.one.alive:
            log.write(Text("the process does not run"))
            return
        self._run(self._asked.stacks(self.one), "#stack")

    def action_restart(self) -> None:
        top = self.app
        assert isinstance(top, Top)
        top.ask_for_restart(self.one)

    def _run(self, words: list[str], into: str) -> None:
        lines = _Lines()

        def show(data: bytes) -> None:
            self.app.call_from_thread(self._add, into, lines.of(data))

        self._kills.append(start_command(words, show))

    def _add(self, into: str, lines: list[Text]) -> None:
        if self.is_mounted:
            log = self.query_one(into, RichLog)
            for each in lines:
                log.write(each)


class _Lines:
    """Joins pieces of any length into whole lines. It keeps colours and removes other control characters."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, data: bytes) -> list[Text]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [
            Text.from_ansi(sanitize(each.rstrip(b"\r")).decode("utf-8", "replace"))
            for each in lines[-_LOG_LINES:]
        ]


class Tables(Screen[None]):
    """The tables of the parameter servers."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,t", "app.pop_screen", "Back")]

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(id="tables")
        yield Footer()

    def show(self, status: Status) -> None:
        found = live_tables.tables_in(status)
        width = self.app.size.width - 2
        lines = [cut(Text(live_tables.heading(found), "bold"), width), *live_tables.lines(found, width)]
        if not found["tables"]:
            lines = [Text("No server has reported a table. Servers report used tables every five seconds.")]
        self.query_one("#tables", Static).update(Group(*lines))


# ---- The application


class Top(App[int]):
    """The application.

    It returns the number of the signal that ended it, or 0. `end` describes how the job ended, or is empty.
    """

    TITLE = "fleetrun top"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False),
    ]
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    #heading { height: auto; }
    #note { height: auto; }
    Ranks { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; overflow-x: hidden; }
    #filter { display: none; height: 1; border: none; padding: 0; }
    #filter.open { display: block; }
    """

    def __init__(self, watch: StatusWatch | RemoteWatch, where: Where, interval: float) -> None:
        super().__init__(ansi_color=True)
        self.end = ""
        self._watch = watch
        self._where = where
        self._interval = interval
        self._closed_view = threading.Event()
        self._status: Status = {}
        self._processes = Processes()
        self._stopping = False
        self._note = ""

    @property
    def _job(self) -> Running:
        """The job with its newest status."""
        return replace(self._watch.job, status=self._status or self._watch.job.status)

    @property
    def _asked(self) -> Asked:
        return Asked(self._job, self._where)

    def get_default_screen(self) -> Screen[None]:
        return ListScreen()

    def on_mount(self) -> None:
        self.theme = "ansi-dark"
        loop = asyncio.get_running_loop()
        for number in _ENDINGS:
            loop.add_signal_handler(number, partial(self.exit, int(number)))
        taking = self._watch, self._interval, partial(self.call_later, self._take), self._closed_view
        threading.Thread(target=follow, args=taking, daemon=True).start()

    def on_unmount(self) -> None:
        self._closed_view.set()

    def _take(self, status: Status | None) -> None:
        """Show a new status, or with None the end of the job."""
        if status is None:
            self.end, self._status = end_of(self._job, self._status or dict(self._watch.job.status))
            self._note = ""
        else:
            self._status = status
        self._processes.take(self._status, time.monotonic())
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        for screen in self.screen_stack:
            if isinstance(screen, ListScreen) and screen.is_mounted:
                screen.show(self._heading(), self._processes.all, self._note)
            elif isinstance(screen, Tables) and screen.is_mounted:
                screen.show(self._status)
            elif isinstance(screen, Details) and screen.is_mounted:
                for each in self._processes.all:
                    if each.key == screen.one.key:
                        screen.take(each)

    def _heading(self) -> list[Text]:
        status, width = self._status, self.size.width
        if not status:
            return [Text("asking the job for its state")]
        lines = filled(views.heading_fields(status), width)
        waiting = status.get("waiting")
        for text in (
            Text(live_rows.progress_text(self._processes.all)),
            views.waiting_text(status, waiting) if isinstance(waiting, dict) and not self.end else Text(""),
            self._nodes_line(),
            Text(views.text_of(status, "why"), "yellow"),
            self._silence() if not self.end else Text(""),
        ):
            if text:
                lines.append(cut(text, width))
        return [*lines, Text(self.end, "bold")] if self.end else lines

    def _nodes_line(self) -> Text:
        """Show the number of nodes, and the nodes that do not answer."""
        there = objects_in(self._status, "nodes")
        if len(there) < 2:
            return Text("")
        silent = [f"node {views.text_of(each, 'rank')}, {views.text_of(each, 'title')}: {why}"
                  for each in there if (why := views.text_of(each, "silent"))]  # fmt: skip
        more = (
            f"; {silent[0]}" + (f", and {len(silent) - 1} more" if len(silent) > 1 else "") if silent else ""
        )
        return Text.assemble(plural(len(there), "node"), (more, "yellow"))

    def _silence(self) -> Text:
        seconds = self._watch.silent_for
        if not self._status.get("silent") or seconds < _SILENT:
            return Text("")
        why = printable(str(self._status["silent"]))
        text = f"no answer for {format_duration(seconds)}: {why}; this is the last known state"
        return Text(text, "bold yellow")

    # ---- requests

    def open_details(self, one: Process) -> None:
        self.push_screen(Details(self._asked, one))

    def action_tables(self) -> None:
        if not any(each.role == "ps" for each in self._processes.all):
            self.remark("this job has no parameter servers")
            return
        self.push_screen(Tables())
        self.call_after_refresh(self._show)

    def remark(self, text: str, *, stale: bool = False) -> None:
        """Show text in the line above the keys. `stale`: drop it once the job has ended."""

        def note() -> None:
            if not (self.end and stale):
                self._note = text
                self._show()

        self.call_later(note)

    @property
    def _over(self) -> str:
        return "the connection to the job is lost" if self._job.silence else "the job has ended"

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_stop(self) -> None:
        if self.end:
            self.remark(self._over)
            return
        nodes, now = objects_in(self._status, "nodes"), self._stopping
        where = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
        what = f"{self._title()}, started in {printable(self._job.cwd)}"
        processes = plural(sum(each.alive for each in self._processes.all), "process")
        if self._where.node is not None:  # --node limits the list to one node, but all nodes stop
            processes, where = "All its processes", " on all nodes"
        question = (
            f"Kill {what}, immediately with SIGKILL? {processes} remain{where}."
            if now
            else f"Stop {what}? {processes}{where} get SIGTERM, and SIGKILL after --stop_timeout."
        )

        def answered(yes: bool | None) -> None:
            if yes and not self.end:
                self._stopping = True
                self.remark("stopping the job; press x again to kill it immediately")
                self._run(self._asked.stop(now=now))

        self.push_screen(Confirm(question), answered)

    def ask_for_restart(self, one: Process) -> None:
        if self.end or not (one.alive or self._status.get("state") == "waiting"):
            self.remark(self._over if self.end else f"{one.title} does not run")
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.remark(f"{one.title}: restart requested")
                work = threading.Thread(target=lambda: self.remark(self._asked.restart(one)), daemon=True)
                work.start()

        self.push_screen(Confirm(self._restart_question(one)), answered)

    def _title(self) -> str:
        return job_title(self._job) if self._job.pod else printable(self._job.job)

    def _restart_question(self, one: Process) -> str:
        collective = self._status.get("mode") == "collective"
        where = ", on all nodes" if len(objects_in(self._status, "nodes")) > 1 else ""
        if collective and one.role == "trainer":
            return (
                f"Restart all processes of {self._title()}{where}? In a collective job "
                f"{one.title} cannot start again alone: its group would be incomplete. They get SIGTERM "
                "first, and go on from their last checkpoint. It does not count against --max_restart."
            )
        lost = (
            " Rows of its tables that it has not saved are lost, unless it is durable."
            if one.role == "ps"
            else ""
        )
        return (
            f"Restart {one.title} alone? It gets SIGTERM first, and SIGKILL after --stop_timeout.{lost} "
            "It does not count against --max_restart."
        )

    def _run(self, words: list[str]) -> None:
        """Run a command in the background, and show its last line of output."""

        def show(data: bytes) -> None:
            lines = data.decode("utf-8", "replace").strip().splitlines()
            if lines:
                self.remark(printable(lines[-1]), stale=True)

        start_command(words, show)


class ListScreen(Screen[None]):
    """The screen with all processes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Details"),
        Binding("s", "sort", "Sort"),
        Binding("S", "reverse", show=False),
        Binding("slash", "filter", "Filter", key_display="/", priority=True),
        Binding("escape", "unfilter", show=False),
        Binding("t", "app.tables", "Tables"),
        Binding("r", "restart", "Restart"),
        Binding("x", "app.stop", "Stop"),
        Binding("question_mark", "app.help", "Help", key_display="?"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._order = "rank"
        self._reversed = False
        self._filter = ""
        self._all: list[Process] = []
        self._note = ""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(Text("asking the job for its state"), id="heading")
            yield Ranks()
            yield Static(id="note")
            yield Input(
                id="filter",
                placeholder="node=0-3  rank=7  role=ps  state=failed  or a part of a line",
                compact=True,
            )
            yield Footer()

    def on_mount(self) -> None:
        self.query_one(Ranks).focus()

    @property
    def _top(self) -> Top:
        assert isinstance(self.app, Top)
        return self.app

    def show(self, heading: list[Text], there: list[Process], note: str) -> None:
        self._all, self._note = there, note
        self.query_one("#heading", Static).update(Group(*heading))
        self._show()

    def _show(self) -> None:
        chosen = live_rows.wanted(self._filter)
        rows = sorted(filter(chosen, self._all), key=ORDERS[self._order], reverse=self._reversed)
        self.query_one(Ranks).show(rows, self._order)
        parts = [plural(len(self._all), "process"), f"sorted by {self._order}"]
        parts[0] = f"{len(rows)} of {parts[0]}" if self._filter else parts[0]
        parts += ["reversed"] if self._reversed else []
        parts += [f"filter: {printable(self._filter)} (Escape: all)"] if self._filter else []
        note = Text(", ".join(parts), "dim")
        if self._note:
            note = Text.assemble((printable(self._note), "bold"), "  ", note)
        self.query_one("#note", Static).update(cut(note, self.app.size.width))

    def action_open(self) -> None:
        if (one := self.query_one(Ranks).chosen) is not None:
            self._top.open_details(one)

    def action_sort(self) -> None:
        """Switch to the next order and scroll to the top, where the important rows are."""
        nodes = any(each.node for each in self._all)
        names = [name for name in ORDERS if nodes or name != "node"]
        self._order = names[(names.index(self._order) + 1) % len(names)]
        self._show()
        self.query_one(Ranks).action_move(-len(self._all))

    def action_reverse(self) -> None:
        self._reversed = not self._reversed
        self._show()
        self.query_one(Ranks).action_move(-len(self._all))

    def action_filter(self) -> None:
        """Open the filter, with priority and immediately.

        Otherwise text that is typed quickly after the slash would reach the keys of the list.
        """
        field = self.query_one("#filter", Input)
        field.add_class("open")
        self.set_focus(field)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the filter key inside the filter, so that a slash becomes part of the text."""
        return not (action == "filter" and isinstance(self.focused, Input))

    def action_unfilter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = self._filter = ""
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter").remove_class("open")
        self.query_one(Ranks).focus()
        self._show()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter = event.value
        self._show()

    def on_input_submitted(self) -> None:
        self._close_filter()

    def action_restart(self) -> None:
        if (one := self.query_one(Ranks).chosen) is not None:
            self._top.ask_for_restart(one)

"""The messages of a run about its pod.

They are the lines at the start, a line for each event, and the report of a failure or a hang at the end.
`Narrator` writes the events of a pod to the console. The functions only build lines.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

from fleetrun.aliases import Callback
from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.text import (
    Tail,
    columns,
    cut,
    describe_duration,
    format_count,
    format_loss,
    masked,
    printable,
    read_tail,
    without_native_frames,
    wrapped,
)
from fleetrun.envs.channels import NEXT_OF_GROUP, cause_in
from fleetrun.envs.contract import Role, is_owned
from fleetrun.envs.settings.parsing import byte_size
from fleetrun.pod.container import Container, Ended
from fleetrun.pod.events import (
    Ending,
    Failure,
    Hang,
    JobResult,
    Leaving,
    RestartAsked,
    Restarting,
    Started,
    Verdict,
)
from fleetrun.pod.policy import GiveUp, Restart
from fleetrun.pod.spec import PodSpec

# ---- Reports the events of a pod as they happen, one line each. Makes no decisions.

_WIDE = 100  # width of output to a file or a pipe, in columns


class Narrator:
    """Writes each event to the console.

    `catch_up` first shows the contents of the followed logs so far. `alone`: this node decides what follows a
    failure.
    """

    def __init__(self, console: Console, spec: PodSpec, catch_up: Callback, *, alone: bool = True) -> None:
        self._console = console
        self._spec = spec
        self._catch_up = catch_up
        self._announced = False
        self._alone = alone

    def handle(self, event: object) -> None:
        match event:
            case Started():
                self._started(event.containers)
            case Ended(finished=True):
                self._console.warning(
                    f"{event.spec.title} {event.exit} while its interpreter exited. Its script had "
                    "ended, so the process counts as completed. Often a call of "
                    "torch.distributed.destroy_process_group() is missing"
                )
            case Verdict():
                self._console.error(event.sentence)
            case Failure():
                self._failed(event)
            case Hang():
                self._hung(event)
            case RestartAsked():
                there = event.containers
                what = there[0].spec.title if len(there) == 1 else f"all {len(there)} processes"
                self._console.info(f"restart of {what} by {event.command}")
            case Restarting():
                self._console.debug(f"restarting {_titles(event.containers)}")
            case Leaving():
                self._console.debug(f"all trainers ended; waiting for {_titles(event.rest)}")
            case Ending():
                (self._console.info if event.requested else self._console.warning)(event.reason)

    def _started(self, containers: Sequence[Container]) -> None:
        if not self._announced:
            self._announced = True
            self._console.opening(pod_line("Watching", self._spec, "running"))
        for each in containers:
            if each.process is not None:
                self._console.debug(f"{each.spec.title}: pid {each.process.pid}, log {each.spec.log}")

    def _failed(self, failure: Failure) -> None:
        ended, decision = failure.ended, failure.decision
        if isinstance(decision, GiveUp) and not failure.alive and not failure.tolerated:
            return  # the report follows immediately and contains everything
        self._catch_up()
        parts = [failure_summary(ended, read_tail(ended.spec.log))]
        for spec, record in failure.earlier:
            line = printable(cause_in(record.message))
            parts.append(f"{spec.title} had failed before: {line}")
        parts.append(self._answer(failure))
        self._console.error("; ".join(parts))

    def _hung(self, hang: Hang) -> None:
        self._catch_up()
        decision = hang.decision
        if isinstance(decision, GiveUp):
            self._console.error(f"{hang.headline}; stopping the job")  # the report follows
            return
        again = f"; {_restart(decision, 'all processes')}"
        self._console.error(hang.headline + (again if self._alone else ""))
        self._console.block(hang_places(hang, terminal_columns() or _WIDE), level="ERROR")

    def _answer(self, failure: Failure) -> str:
        spec, decision = failure.ended.spec, failure.decision
        if not self._alone and not self._spec.mode.has_servers and not failure.tolerated:
            return f"log {spec.log}"
        if isinstance(decision, GiveUp):
            return (
                f"{decision.reason}: the job continues without it"
                if failure.tolerated
                else "stopping the rest"
            )
        what = spec.title if self._spec.mode.has_servers or failure.tolerated else "all processes"
        return f"{_restart(decision, what)}; log {spec.log}"


def _titles(containers: Sequence[Container]) -> str:
    return ", ".join(each.spec.title for each in containers)


def _restart(decision: Restart, what: str) -> str:
    when = "now" if decision.after == 0 else f"in {decision.after:g} s"
    since = "" if decision.step is None else f" (after progress to step {decision.step})"
    return f"restart {decision.number} of {decision.limit} of {what} {when}{since}"


# ---- The lines at the start of a run: the lines of Paddle's documents, and between them the processes, the
# nodes and the settings. All settings and the environments are only shown for debugging.

_LONGEST_VALUE = 40
_MOST_SETTINGS = 12


def configuration_lines(rows: Sequence[tuple[str, str, str | None]], *, rule: int = 50) -> list[str]:
    """Return one line per setting.

    Settings that differ from their defaults show their origin. `rule`: width of the rules.
    """
    lines = ["-----------  Configuration  ----------------------"[:rule]]
    lines += [f"{name}: {value}" + (f"  (from {origin})" if origin else "") for name, value, origin in rows]
    lines.append("-" * rule)
    return lines


def job_line(job_id: str, mode: str, nnodes: tuple[int, int]) -> str:
    """Format the job. `nnodes`: the fewest and the most nodes, which Paddle calls replicas."""
    fewest, most = nnodes
    return f"Job: {job_id}, mode {mode}, replicas {most}[{fewest}:{most}], elastic {fewest < most}"


_ROLE_NAMES = {Role.SERVER: "server", Role.HETER: "heter trainer"}


def pod_facts(spec: PodSpec, script: str, kind: str, devices: Sequence[str], log_dir: str) -> str:
    """Describe a pod, such as `1 server, 2 trainers of train.py on gpu 0,1; logs: log/default.evjsyn.*.log`.

    `kind`: the kind of the devices.
    """
    counts = ", ".join(
        f"{number} {_ROLE_NAMES.get(role, role)}{'s' if number > 1 else ''}"
        for role in Role
        if (number := sum(each.role is role for each in spec.containers))
    )
    named = f"{kind} {_shortened(','.join(devices))}"
    if not any(name.startswith("FLAGS_selected_") for each in spec.containers for name in each.env):
        named += ", not bound to any process"
    where = named if devices else "CPU"
    return f"{counts} of {script} on {where}; logs: {logs_pattern(spec, log_dir)}"


def logs_pattern(spec: PodSpec, log_dir: str) -> str:
    """Return a file name pattern that matches all logs of the pod."""
    return f"{log_dir}/{spec.job_id}.{spec.name}.*.log"


def progress_facts(reached: Sequence[tuple[int | None, float | None]], speed: str) -> list[str]:
    """Return the progress in parts, such as `step 1,200`, `loss 0.0231` and `12.3k samples/s`.

    Step and loss come from the trainer with the highest step, the speed from all trainers. `reached`: step
    and loss of each trainer.
    """
    step, newest = max(reached, key=lambda each: -1 if each[0] is None else each[0], default=(None, None))
    loss = next((each for each in (newest, *(loss for _, loss in reached)) if each is not None), None)
    return [
        *([] if step is None else [f"step {format_count(step)}"]),
        *([] if loss is None else [f"loss {format_loss(loss)}"]),
        *([speed] if speed else []),
    ]


def settings_line(rows: Sequence[tuple[str, str, str]]) -> str:
    """List the settings that differ from their defaults, by name, value and origin.

    The origin is omitted for settings from the command line.
    """
    shown = [
        f"{name}={_shortened(value)}" + ("" if origin.startswith("-") else f" ({origin})")
        for name, value, origin in rows[:_MOST_SETTINGS]
    ]
    more = f", and {len(rows) - _MOST_SETTINGS} more" if len(rows) > _MOST_SETTINGS else ""
    return f"Settings: {', '.join(shown)}{more} (-v shows more)"


def _shortened(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else f"{value[: _LONGEST_VALUE - 3]}..."


def pod_line(verb: str, spec: PodSpec, status: str) -> str:
    """Return a line in the words of Paddle's launcher."""
    return f"{verb} Pod: {spec.name}, replicas {spec.replicas}, status {status}"


def environment_tables(spec: PodSpec) -> list[str]:
    """List the variables of the first process of each role, under the title that Paddle's launcher prints."""
    lines: list[str] = []
    for role in Role:
        group = [each for each in spec.containers if each.role is role]
        if group:
            env = sorted(group[0].env.items())
            shown = {name: value for name, value in env if is_owned(name) or name in _ALSO}
            lines += [
                f"Local {role} start {len(group)} processes. "
                "First process distributed environment info (Only For Debug):",
                *(f"    {name}={_shortened(value)}" for name, value in masked(shown).items()),
            ]
    return lines


_ALSO = frozenset(
    {"CUDA_VISIBLE_DEVICES", "XPU_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "OMP_NUM_THREADS"}
)


# ---- The failure report fits one screen: which process failed first, how and when, its last output, and
# where to read on. All functions are pure.

_TRACEBACK_LINES = 12
_LOG_LINES = 10
_LOG_INDENT = 6
_OTHERS_KILL = "fleetrun did not send this SIGKILL"
_KILLED = (
    f"{_OTHERS_KILL}. Probably memory ran out: see `dmesg`, and the memory limit of the container or "
    "the batch system. Otherwise a person or the batch system sent the signal."
)
_KILLED_SMALL = f"{_OTHERS_KILL}. The script itself, a person or the batch system sent the signal."
_SMALL = 10
"""A process that never used a tenth of the node's memory was probably not killed for lack of memory."""


def failure_headline(ended: Ended) -> str:
    """Describe one failure in few words, such as `trainer 1 exited with code 3`."""
    what = f"{ended.spec.title} {ended.exit}"
    if ended.stopped and ended.record is not None:
        what = f"{ended.spec.title} raised an exception, and was stopped before it had ended"
    elif ended.stopped:
        what = f"{ended.spec.title} failed and did not end by itself"
    if ended.exit.ok:
        what += " before the trainers had ended"
    if ended.out_of_memory:
        what += " for lack of memory (the kernel's OOM killer)"
    return what


def failure_summary(ended: Ended, tail: Tail) -> str:
    """Describe a failure that is followed by a restart."""
    words = [failure_headline(ended), f"after {describe_duration(ended.ended - ended.started)}"]
    message = error_line(ended, tail)
    if ended.killed or ended.out_of_memory:
        message = ", ".join(_lack_of_memory(ended))
    return " ".join(words) + (f": {message}" if message else "")


_PERHAPS = "perhaps out of memory"


def _lack_of_memory(ended: Ended) -> list[str]:
    """Describe a probable lack of memory. The result is empty if it is unlikely."""
    if ended.killed and _was_small(ended):
        return []
    return [*([_PERHAPS] if ended.killed else []), *_peak_memory(ended)]


def _was_small(ended: Ended) -> bool:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return ended.peak_memory is not None and ended.peak_memory * _SMALL < memory


def _peak_memory(ended: Ended) -> list[str]:
    """Return the peak memory of a process that may have ended for lack of memory."""
    known = ended.peak_memory is not None and (ended.killed or ended.out_of_memory)
    return [f"peak memory {byte_size(ended.peak_memory or 0)}"] if known else []


def error_line(ended: Ended, tail: Tail) -> str:
    """Return the line of the exception, if one exists. For a C++ exception, return its message."""
    if ended.record is not None and ended.record.message:
        return printable(cause_in(ended.record.message))
    if ended.exit.signal == signal.SIGABRT:  # a C++ exception ends a process this way
        messages = (line.partition(_WHAT)[2] for line in reversed(tail.after or tail.before))
        if found := next(filter(None, messages), ""):
            return found
    return cause_in("\n".join([*tail.traceback, *tail.after]))


_WHAT = "  what():  "


def format_failure(
    result: JobResult, tail: Tail, *, width: int, log_full: bool, hints: Sequence[str]
) -> list[str]:
    """Return the lines of the report for `result.cause`, whose log ends in `tail`.

    Lines are at most `width` columns wide, except for paths, long words and the last line. The last line is
    the cause. `hints` come before the hints from the log.
    """
    ended = result.cause
    assert ended is not None, "a report needs a cause"
    first = (
        f"First failure: {failure_headline(ended)}, after {describe_duration(ended.ended - ended.started)}"
    )
    facts = [
        f"pid {ended.pid}",
        f"at {_clock(ended.failed_at)}",
        *_peak_memory(ended),
        *_attempts(result),
    ]
    lines = ["=" * min(width, 80)]
    if (began := result.began) is not None:
        lines += wrapped(f"Began with: {failure_headline(began)} at {_clock(began.failed_at)}", width)
    if (verdict := result.verdict) is not None:
        lines += verdict_lines(verdict, width)
    lines += [*wrapped(first, width), *wrapped(f"  {', '.join(facts)}", width)]
    lines += _last_words(ended, tail, width) if verdict is None else _in_one_line(ended, tail, width)
    lines += wrapped(_others(result.others), width) if result.others else []
    all_hints = [*hints, *(_hints(ended, tail, log_full) if verdict is None else ())]
    lines += [row for hint in all_hints for row in wrapped(f"Hint: {hint}", width)]
    log = "Log" if verdict is not None or not _traceback(ended, tail) else "Whole traceback"
    return [*lines, f"{log}: {_short_path(ended.spec.log)}", cause_line(result, tail)]


_LONGEST_CAUSE = 160  # in columns, two rows of a terminal


def cause_line(result: JobResult, tail: Tail) -> str:
    """Return the cause as one line, such as `trainer 1: RuntimeError: mat1 and mat2 shapes cannot be
    multiplied at train.py:36`.
    """
    ended = result.cause
    assert ended is not None, "of a failure"
    if result.verdict is not None:
        return printable(result.verdict.sentence.partition(". ")[0])
    # imported late, as `folded`, because only a failed job needs them
    from fleetrun.console.frames import place_of

    until = takewhile(lambda line: not re.match(NEXT_OF_GROUP, line), _traceback(ended, tail))
    message, place = error_line(ended, tail), place_of(list(until))
    if ended.killed or ended.out_of_memory or not message:
        line, at = ", ".join([failure_headline(ended), *_lack_of_memory(ended)]), ""
        last = next((row.strip() for row in reversed([*tail.before, *tail.after]) if row.strip()), "")
        if last and ended.exit.signal is None:  # the reason of sys.exit("why") or of an argparse error
            line += f"; its last line: {last}"
    else:
        raised = ended.record is not None or ended.exit.code == 1
        line = f"{ended.spec.title if raised else failure_headline(ended)}: {message}"
        file, _, number = place.rpartition(":")
        named = f"({file.rpartition('/')[2]}, line {number})" in message  # a SyntaxError names it
        at = f" at {place}" if place and not named else ""
    if (began := result.began) is not None:
        line = f"{failure_headline(began)}; then {line}"
    room = _LONGEST_CAUSE - len(at)
    return printable(line if columns(line) <= room else f"{cut(line, room - 4)} ...") + at


def verdict_lines(verdict: Verdict, width: int) -> list[str]:
    """Return the diagnosis behind a failure or a hang, with the stack of the rank in question."""
    rows = [row for each in verdict.stack for row in wrapped(f"    {printable(each)}", width)]
    return [*wrapped(f"Cause: {printable(verdict.sentence)}", width), *rows]


def _in_one_line(ended: Ended, tail: Tail, width: int) -> list[str]:
    """Return the message of a failure that is only a symptom, in at most three rows."""
    message = error_line(ended, tail)
    return wrapped(f"  {message}", width)[:3] if message else []


def _attempts(result: JobResult) -> list[str]:
    if not result.restarts:
        return [result.reason] if result.reason else []
    times = restarts_in_words(result.restarts)
    # each restarted on its own
    if result.forgiven and result.cause and result.cause.attempt < result.restarts:
        times += f" of {' and '.join(dict.fromkeys(each.spec.title for each in result.forgiven))}"
    return [f"{times} ({result.reason})" if result.reason else times]


def restarts_in_words(number: int) -> str:
    return f"after {number} restart{'s' if number > 1 else ''}"


def _last_words(ended: Ended, tail: Tail, width: int) -> list[str]:
    traceback = _traceback(ended, tail)
    if not traceback:
        shown = _rows([*tail.before, *tail.after], width)[-(_LOG_LINES + 5) :]
        return ["Its last lines:", *shown] if shown else ["The process printed nothing."]
    from fleetrun.console.frames import folded

    rest = _rest_of_message(ended, tail)
    own_lines = [] if ended.record is not None else tail.after[:rest]
    rows = _middle_out(_rows([*folded(traceback), *own_lines], width), _TRACEBACK_LINES)
    after = _rows([line for line in tail.after[rest:] if line.strip()], width)[-_LOG_LINES // 2 :]
    return [*rows, *(["After that:", *after] if after else [])]


def _rest_of_message(ended: Ended, tail: Tail) -> int:
    """Count the lines after the traceback that belong to its message.

    These are the lines that the process recorded itself. Otherwise they are the lines up to an empty line, if
    the exception ended the process.
    """
    if not tail.traceback:
        return 0
    if ended.record is not None:
        written = without_native_frames(map(printable, ended.record.traceback.splitlines()))
        written = written[written.index(tail.traceback[-1]) + 1 :] if tail.traceback[-1] in written else []
        written = written or [printable(line) for line in ended.record.message.splitlines()[1:]]
        same = (line == other for line, other in zip(tail.after, written, strict=False))
    else:
        same = (bool(line.strip()) and ended.exit.code == 1 for line in tail.after)
    return sum(1 for _ in takewhile(bool, same))


def _traceback(ended: Ended, tail: Tail) -> list[str]:
    """Return the traceback that the process recorded itself, else the traceback in its log."""
    lines: Sequence[str] = tail.traceback
    if ended.record is not None and ended.record.traceback:
        written = ended.record.traceback.rstrip().splitlines()
        lines = without_native_frames(map(printable, written))
    elif ended.record is not None and ended.hopeless:
        # the message contains everything
        lines = [printable(line) for line in ended.record.message.splitlines()]
    return [line for line in lines if line.strip(" |^~")]  # each underlining would take a row of the screen


def _rows(lines: Sequence[str], width: int) -> list[str]:
    """Turn lines of a log into rows of the screen, at most three rows per line."""
    most = 3 * (width - _LOG_INDENT)
    cut = (line if columns(line) <= most else f"{line[: most // 2]} ..." for line in lines)
    return [f"  {row}" for line in cut for row in wrapped(line, width - 2)]


def _middle_out(lines: Sequence[str], most: int) -> list[str]:
    """Keep the ends of a long text.

    A traceback starts with the position of the script and ends with the error.
    """
    if len(lines) <= most:
        return list(lines)
    head = 3
    return [*lines[:head], f"  ... {len(lines) - most + 1} lines ...", *lines[-(most - head - 1) :]]


def _others(others: Iterable[Ended]) -> str:
    words = [
        f"{failure_headline(other)}{',' if other.stopped else ''} at {_clock(other.failed_at)}"
        for other in others
    ]
    more = f" and {len(words) - 4} more" if len(words) > 5 else ""
    return f"Then: {'; '.join(words[:4] if more else words)}{more}"


def _hints(ended: Ended, tail: Tail, log_full: bool) -> list[str]:
    # imported late, because only a failed job needs a hint
    from fleetrun.console.causes import known_cause

    record = ended.record
    texts = [] if record is None else [record.message, record.traceback]
    ending = "\n".join([*tail.traceback, *tail.after])
    hint = known_cause([*texts, ending, "\n".join(tail.before[-_LOG_LINES:])], ended.exit.signal)
    hints = [hint] if hint else []
    if ended.killed:
        hints.append(_KILLED_SMALL if _was_small(ended) else _KILLED)
    if log_full:
        hints.append(f"The disk of {ended.spec.log.parent} is full. Output may be lost.")
    return hints


def _clock(moment: float) -> str:
    return f"{time.strftime('%H:%M:%S', time.localtime(moment))}.{int(moment % 1 * 1000):03d}"


def _short_path(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


# ---- The report of a hang: the processes that stopped, their places, and where to read on. All functions are
# pure.


def hang_report(hang: Hang, restarts: int, width: int) -> list[str]:
    """Return the lines of the report.

    All lines but the last have at most `width` columns, except for long words. The last line is the cause.
    """
    frame = "=" * min(width, 80)
    first = f"Hang: {hang.reason}"
    if restarts:
        first += f", {restarts_in_words(restarts)}"
    logs = sorted({str(each.log.parent) for each in hang.containers})
    return [
        frame,
        *(verdict_lines(hang.verdict, width) if hang.verdict is not None else []),
        *wrapped(first, width),
        *hang_places(hang, width),
        *[row for each in logs for row in wrapped(f"Logs, with the stacks: {printable(each)}", width)],
        printable(hang.cause),
    ]


def stop_report(result: JobResult, width: int) -> list[str]:
    """Return the report of a job that made no progress when it was stopped. Empty for other jobs."""
    if result.verdict is None:
        return []
    return ["=" * min(width, 80), *verdict_lines(result.verdict, width), printable(result.reason)]


def hang_places(hang: Hang, width: int) -> list[str]:
    """Return the places of the processes, the outlier first."""
    lines = hang.stacks or ("The places of the processes are unknown.",)
    return [row for each in lines for row in wrapped(f"  {printable(each)}", width)]

"""Report how a pod ended, with hints at causes outside of the script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleetrun.console.console import Console, terminal_columns
from fleetrun.console.narrator import format_failure, hang_report, stop_report
from fleetrun.console.text import Tail, printable, read_tail
from fleetrun.pod import logs
from fleetrun.pod.container import Ended
from fleetrun.pod.events import JobResult
from fleetrun.pod.kernel_log import gpu_errors
from fleetrun.pod.spec import ContainerSpec, PodSpec
from fleetrun.shadow import shadow_of_failure

WIDE = 100  # columns of a report without a terminal


def first_failure(result: JobResult | None) -> ContainerSpec | None:
    """Return the process with which the report of this result starts."""
    if result is None or result.cause is None or result.hang is not None:
        return None
    return result.cause.spec


def failure_report(result: JobResult, log_dir: Path, width: int | None = None) -> list[str]:
    """Return the lines of a result that has a cause. The cause is the last line."""
    assert result.cause is not None, "a report needs a cause"
    tail = read_tail(result.cause.spec.log)
    columns = width or terminal_columns() or WIDE
    hints = [*_shadow_hints(result.cause, tail), *_gpu_hints(result.cause)]
    return format_failure(result, tail, width=columns, log_full=logs.is_full(log_dir), hints=hints)


def _shadow_hints(cause: Ended, tail: Tail) -> list[str]:
    """Name a `trainers` package of the user, if an import from this package failed."""
    text = "\n".join([*tail.before, *tail.traceback, *tail.after])
    if cause.record is not None:
        text += cause.record.message
    shadow = shadow_of_failure(text, cause.spec.argv, cause.spec.env)
    return [f"{shadow.sentence}. {shadow.way_out}"] if shadow is not None else []


def _gpu_hints(cause: Ended) -> list[str]:
    """Name GPU errors that the kernel of this node logged while the process ran."""
    errors = gpu_errors(cause.started)
    texts = "; ".join(printable(each) for each in errors[:3])
    return (
        [f"The kernel reported a GPU error: {texts}. Reset the GPU, or stop using this node."]
        if errors
        else []
    )


def report_end(result: JobResult, spec: PodSpec, console: Console, summary: Callable[..., str]) -> list[str]:
    """Print how a pod ended, and return its report, if one exists. For `summary`, see
    `LaunchSession.summary`.
    """
    report_strays(result, console)
    lines, reached = _report(result, spec), summary(spec, result.restarts)
    if result.code == 0:
        console.info(f"Pod completed: {spec.name}, {reached}")
    elif result.cause is None:
        show = console.info if result.requested else console.error
        show(f"Pod stopped: {spec.name}, {result.reason}, exit code {result.code}, {reached}")
    else:
        console.error(f"Pod failed: {spec.name}, exit code {result.code}")
    if lines:
        console.report(lines)
    return lines


def _report(result: JobResult, spec: PodSpec) -> list[str]:
    if result.hang is not None:
        return hang_report(result.hang, result.restarts, terminal_columns() or WIDE)
    return failure_report(result, spec.log_dir) if result.cause is not None else stop_report(result, WIDE)


def report_strays(result: JobResult, console: Console) -> None:
    if result.strays:
        console.warning(f"ended {result.strays} stray processes of the job")

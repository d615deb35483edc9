"""Launch jobs from Python. `run` and `launch` start the `fleetrun` command as a child process, which
supervises the job's processes.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, overload

from fleetrun.aliases import Fields, Texts
from fleetrun.display import Display, display_of
from fleetrun.envs.contract import is_owned
from fleetrun.envs.settings.job_file import option_texts
from fleetrun.envs.settings.options import ACTIONS, OF_JOBS, Option, by_spelling, normal
from fleetrun.envs.settings.parsing import InvalidValue
from fleetrun.envs.settings.show import FUNCTION
from fleetrun.errors import UsageError
from fleetrun.function import Call
from fleetrun.job import Events, Job, Result
from fleetrun.record.journal import Event

T = TypeVar("T")
OptionValue = str | int | float | bool | os.PathLike[str] | Sequence[object] | Fields | None
Program = str | os.PathLike[str] | None
Environment = Texts | Sequence[str] | None


@overload
def run(
    program: Callable[..., T],
    /,
    args: Sequence[object] = (),
    kwargs: Fields | None = None,
    *,
    env: Environment = None,
    display: str = "auto",
    **options: OptionValue,
) -> Result[T]: ...


@overload
def run(
    program: Program = None,
    /,
    args: Sequence[object] = (),
    kwargs: None = None,
    *,
    env: Environment = None,
    display: str = "auto",
    **options: OptionValue,
) -> Result[None]: ...


def run(
    program: Any = None,
    /,
    args: Sequence[object] = (),
    kwargs: Fields | None = None,
    *,
    env: Environment = None,
    display: str = "auto",
    **options: OptionValue,
) -> Result[Any]:
    """Run a job to its end and show its output meanwhile. `run` combines `launch` and `Job.wait`.

    `display` selects the output. "auto" shows the output of trainer 0, or of the processes that `follow`
    names. In a notebook, it adds one line with the progress. "plain" omits the progress line. "quiet" shows
    nothing.

    KeyboardInterrupt stops the job as Ctrl-C does, and a second one kills it. `run` raises KeyboardInterrupt
    again after the job has ended.

    Raises the errors of `launch` and of `Job.wait`.
    """
    __tracebackhide__ = True  # IPython and pytest then show the caller's frame
    _check_arguments(args, kwargs, env)
    labelled = "follow" in options or "FLEETRUN_FOLLOW" in {**os.environ, **_added(env)}
    show = display_of(display, labelled=labelled)
    job = launch(program, args, kwargs, env=env, **options)
    try:
        _show_to_the_end(job, show)
    except BaseException:
        # after an interrupt the job has ended, but another error, such as a closed output, leaves it running
        job.stop()
        raise
    finally:
        show.close()
    return job.wait()


@overload
def launch(
    program: Callable[..., T],
    /,
    args: Sequence[object] = (),
    kwargs: Fields | None = None,
    *,
    env: Environment = None,
    **options: OptionValue,
) -> Job[T]: ...


@overload
def launch(
    program: Program = None,
    /,
    args: Sequence[object] = (),
    kwargs: None = None,
    *,
    env: Environment = None,
    **options: OptionValue,
) -> Job[None]: ...


def launch(
    program: Any = None,
    /,
    args: Sequence[object] = (),
    kwargs: Fields | None = None,
    *,
    env: Environment = None,
    **options: OptionValue,
) -> Job[Any]:
    """Start a job and return immediately.

    `program` is a function or a script. Each process of the job calls the function with `args` and `kwargs`.
    A script gets `args` as its command-line arguments. With `module=True`, `program` is the name of a module.
    With None, the script is in the job file `config`.

    `env` is a dict of additional environment variables. The processes also inherit the variables of this
    process. With `scheduler`, the variables of `env` reach the processes on all nodes. `env` may also be a
    list in the form of --env: `["NCCL_*", "A=1"]`.

    Pass each command-line option as a keyword by its Python name (`nproc_per_node=2`, `hang_timeout="10m"`,
    `nnodes=(2, 4)`). Values have the types and units of a job file, with times in seconds. A function
    restarts only if you set `max_restart`.

    The job ends when this process ends. Raises UsageError or another LaunchError, with the message and the
    hint of the command line, if the job cannot start.
    """
    _check_arguments(args, kwargs, env)
    engine = _engine_of(options)
    options, hidden = _secrets_apart(options)
    words = [f"--display={'plain' if engine else 'json'}", *_env_words(env, engine), *option_words(options)]
    added = {**_added(env), **hidden}
    if "log_level" not in map(normal, options):
        words.append("--log_level=WARNING")
    if not callable(program):
        if kwargs:
            raise UsageError("kwargs are for a function; a script accepts only args")
        if program is not None:
            words += ["--", os.fspath(program), *map(str, args)]
        elif args:
            raise UsageError("args need a program; put the arguments of a job file into the file")
        return Job(words, added, engine=engine)
    if engine:
        raise UsageError(f"{engine} runs only scripts, because other nodes cannot load a function")
    _check_for_function(program, options)
    if not {"max_restart", "max_restarts"} & set(map(normal, options)):
        words.append("--max_restart=0")
    call = Call(program, args, kwargs)
    return Job([*words, "-m", FUNCTION, str(call.folder), call.name], added, call=call)


def _check_arguments(args: object, kwargs: object, env: object) -> None:
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise UsageError(f"args is {args!r}; it must be a list, such as [{args!r}]")
    if kwargs is not None and not (
        isinstance(kwargs, Mapping) and all(isinstance(each, str) for each in kwargs)
    ):
        raise UsageError(f"kwargs is {kwargs!r}; it must be a dict from names to values")
    if env is not None and (isinstance(env, str | bytes) or not isinstance(env, Mapping | Sequence)):
        raise UsageError(f"env is {env!r}; it must be a dict from names to values, or a list of words")
    for name, value in _added(env).items():
        if value is None:
            raise UsageError(
                f"env[{name!r}] is None; it must be a text",
                hint="Remove the variable from os.environ before the call, because the processes inherit it.",
            )


def _env_words(env: Environment, engine: str) -> list[str]:
    """Return the --env words for the launcher. Local processes inherit the launcher's variables, but an
    engine passes on only the variables that these words name.
    """
    if not isinstance(env, Mapping):
        return [f"--env={word}" for word in env or ()]
    names = [name for name in env if name not in _VARIABLES and not is_owned(name)]
    return [f"--env={name}" for name in names] if engine else []


def _added(env: Environment) -> Texts:
    """Return the variables to set for the launcher, which its processes inherit."""
    return env if isinstance(env, Mapping) else {}


# ---- The command line

_VARIABLES = {name for option in OF_JOBS for name in option.env}
_KEYWORDS = by_spelling(OF_JOBS)
_NOT_HERE = {
    "display": "launch shows nothing; use run to show the output, or events() to read the events",
    "quiet": 'use display="quiet" of run',
    "verbose": 'use log_level="DEBUG"',
    **dict.fromkeys((*ACTIONS, "dry_run", "json"), "this option starts no job; use the command `fleetrun`"),
}
_NOT_CALLED = {
    "a coroutine function": inspect.iscoroutinefunction,
    "a generator function": inspect.isgeneratorfunction,
    "an asynchronous generator function": inspect.isasyncgenfunction,
}
_NOT_FOR_FUNCTIONS = {
    "module": "the program is a function",
    "no_python": "the program is a function",
    "run_path": "the program is a function",
    "watch": "the program is a function",
    "config": "a job file names its own script",
    "save": "a job file cannot hold one",
}


def option_words(options: Mapping[str, OptionValue]) -> list[str]:
    """Return the options as words such as `--nproc_per_node=2`, without options that are None. The launcher
    checks names and values.
    """
    words = []
    for keyword, value in options.items():
        if normal(keyword) in _NOT_HERE:
            raise UsageError(f"{keyword} is not for a launch from Python: {_NOT_HERE[normal(keyword)]}")
        option = _KEYWORDS.get(normal(keyword))
        if value is None and option is not None:
            continue
        texts = _texts_of(keyword, option, value) if option is not None else (str(value),)
        words += [f"--{keyword}={text}" for text in texts]
    return words


def _secrets_apart(options: Mapping[str, OptionValue]) -> tuple[dict[str, OptionValue], dict[str, str]]:
    """Split off options that may hold secrets, as environment variables. All users of a node can read command
    lines.
    """
    others = dict(options)
    variables: dict[str, str] = {}
    for keyword, value in options.items():
        option = _KEYWORDS.get(normal(keyword))
        if option is not None and option.secret:
            del others[keyword]
            if value is not None:
                variables[option.env[0]] = option.joint.join(_texts_of(keyword, option, value))
    return others, variables


def _texts_of(keyword: str, option: Option, value: OptionValue) -> Sequence[str]:
    try:
        return option_texts(option, _plain(value))
    except InvalidValue as error:
        raise UsageError(f"{keyword} {error}") from None


def _plain(value: object) -> object:
    """Convert a value to the types of a job file."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(each) for each in value]
    if not isinstance(value, str | int | float):
        kind = type(value).__qualname__
        raise InvalidValue(f"is of type {kind}; it must be a string, a number or a list of them")
    return value


def _engine_of(options: Mapping[str, OptionValue]) -> str:
    """Return the engine that starts launchers on other nodes, or an empty string if the processes run here.

    Raises UsageError if the job file cannot be read.
    """
    given = {normal(keyword): value for keyword, value in options.items()}
    engine = given.get("scheduler") or os.environ.get("FLEETRUN_SCHEDULER")
    if not engine and (config := given.get("config")):
        from fleetrun.envs.settings.job_file import load_job_file  # late: few launches have a job file

        file = load_job_file(str(_plain(config)), os.environ, "config=")
        engine = next((each.texts[-1] for each in file.options if each.option.name == "scheduler"), "")
    return str(engine or "").removeprefix("local")


def _check_for_function(program: Callable[..., Any], options: Mapping[str, OptionValue]) -> None:
    for kind, is_one in _NOT_CALLED.items():
        if is_one(program):
            name = getattr(program, "__qualname__", repr(program))
            hint = "A call of this function runs nothing. Pass a function that runs it to its end" + (
                ", such as lambda: asyncio.run(main())." if kind == "a coroutine function" else "."
            )
            raise UsageError(f"{name} is {kind}", hint=hint)
    for keyword, value in options.items():
        reason = _NOT_FOR_FUNCTIONS.get(normal(keyword))
        if reason is not None and value not in (None, False):
            raise UsageError(f"{keyword}={value!r} is not for a function: {reason}")


# ---- Showing a job


def _show_to_the_end(job: Job[object], show: Display) -> None:
    events = Events(job)
    try:
        _show(job, events, show)
    except KeyboardInterrupt:
        job.send_signal(signal.SIGINT)
        try:
            _show(job, events, show)
        except KeyboardInterrupt:
            job.send_signal(signal.SIGQUIT)
            _show(job, events, show)
        with contextlib.suppress(Exception):
            job.wait()
        raise


def _show(job: Job[object], events: Events, show: Display) -> None:
    """Show events until the stream pauses or ends. Hold back an error directly before the final events,
    because `Job.wait` raises the same error.
    """
    errors: list[Event] = []
    while True:
        try:
            event = events.within(1.0)
        except StopIteration:
            return
        if event is not None and event["event"] == "message" and event.get("level") in _ERRORS:
            errors.append(event)
        elif event is not None:
            for each in errors if not _is_final(event) else ():
                show.event(each)
            errors.clear()
            show.event(event)
        if not events.behind:
            show.progress(partial(job.status, 0.5))


_ERRORS = ("ERROR", "CRITICAL")


def _is_final(event: Event) -> bool:
    """Return True for the final event, or for the failure that leads to it."""
    if event["event"] == "failed":
        return not (event.get("restart") or event.get("beside"))
    return bool(event["event"] == "over")

"""Read job files, from TOML with included files to options as texts, environments and roles.

The steps follow the order of the file. `read_documents` reads TOML. `merged` combines the entries of all
documents and checks the keys. `Filling` fills in variables. `load_job_file` checks the types of values. Every
error names file, line and key.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from fleetrun.aliases import Document, Environ, Strings
from fleetrun.envs.contract import Mode, Role, is_owned
from fleetrun.envs.settings.options import (
    BY_VARIABLE,
    OPTIONS,
    RETIRED,
    SERVERS,
    TORCHRUN,
    EnvironmentItems,
    FileOption,
    JobFile,
    Option,
    RoleSettings,
    Takes,
    by_spelling,
    normal,
)
from fleetrun.envs.settings.parsing import (
    ROLE_WORDS,
    InvalidValue,
    closest,
    count,
    device_list,
    either,
    nonempty,
)
from fleetrun.envs.settings.toml import key_lines, nearest_line
from fleetrun.envs.variables import JOB_FILE
from fleetrun.errors import UsageError
from fleetrun.files import open_plain
from fleetrun.frozen import frozen

# ---- Documents: regular TOML files of a limited size, with the files that they include

LARGEST = 256 << 10
MOST_FILES = 32


@frozen
class TomlDocument:
    """One file, with its `name` for messages, its directory, its content, and the line of each key."""

    name: str
    folder: Path
    tree: Document
    lines: dict[Strings, int] = field(repr=False)

    def where(self, path: Strings) -> str:
        """Return the place of a key, such as `job.toml:7`."""
        return f"{printable_name(self.name)}:{nearest_line(self.lines, path)}"


def printable_name(name: str) -> str:
    """Return a name from a file with control characters escaped."""
    return name if name.isprintable() else ascii(name)[1:-1]


def read_documents(name: str, origin: str) -> list[TomlDocument]:
    """Read the file and all included files, weakest first.

    A file overrides the files that it includes. Among included files, a later file overrides an earlier one.
    Raises UsageError, which names the file, and the line if possible.
    """
    found: list[TomlDocument] = []
    _read_with_included(name, origin, (), found)
    return found


def _read_with_included(name: str, origin: str, outer: Strings, found: list[TomlDocument]) -> None:
    if "\0" in name:
        raise UsageError(f"{origin} {name!r} is not a valid file name")
    real = os.path.realpath(name)
    if real in outer:
        raise UsageError(f"{origin}: {printable_name(name)} includes itself")
    if len(outer) + len(found) >= MOST_FILES:
        raise UsageError(f"{origin}: more than {MOST_FILES} job files in one chain of includes")
    document = _document(name, _text(name, origin), origin)
    for other in _included(document):
        path = str(Path(name).parent / other)
        _read_with_included(path, f"{document.where(('include',))}: include", (*outer, real), found)
    found.append(document)


def _included(document: TomlDocument) -> list[str]:
    value = document.tree.get("include", [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"{document.where(('include',))}: include must be a list of file names",
            hint='include = ["common.toml"]',
        )
    return names


def _document(name: str, text: str, origin: str) -> TomlDocument:
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(_invalid_toml(printable_name(name), str(error), text)) from None
    except (RecursionError, ValueError) as error:  # nested brackets, or a number of thousands of digits
        why = "its values are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise UsageError(f"{origin} {printable_name(name)} cannot be read: {why}") from None
    return TomlDocument(name, Path(name).absolute().parent, tree, key_lines(text))


def _invalid_toml(name: str, error: str, text: str) -> str:
    match = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", error)
    if match is None:
        return f"{name}: invalid TOML: {error}"
    line = match[1] or str(max(1, len(text.splitlines())))
    what = error[: match.start()]
    return f"{name}:{line}: invalid TOML: {what[:1].lower()}{what[1:]}"


def _text(name: str, origin: str) -> str:
    try:
        with os.fdopen(open_plain(Path(name)), "rb") as file:
            data = file.read(LARGEST + 1)
    except OSError as error:
        hint = "`fleetrun init` writes a job file." if isinstance(error, FileNotFoundError) else None
        raise UsageError(
            f"{origin} {printable_name(name)} cannot be read: {error.strerror}", hint=hint
        ) from None
    if len(data) > LARGEST:
        raise UsageError(
            f"{origin} {printable_name(name)} is too large for a job file: more than {LARGEST >> 10} KiB"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UsageError(f"{printable_name(name)}:{line}: this line is not valid UTF-8") from None


# ---- Keys: valid keys, suggestions for wrong ones, and the merged entries of all documents

_COMMAND_LINE_ONLY = {
    "config": "is for the command line only; a job file uses include",
    "save": "is for the command line only, with --dry_run",
}
_TOP_LEVEL_KEYS = ("include", "script", "args", "variables", "environment", "roles")
_ROLE_KEYS = ("script", "args", "module", "no_python", "count", "environment", "resources")
_EVALUATOR_KEYS = (*_ROLE_KEYS, "on")
_RESOURCES = ("devices", "threads")
_ROLES = ("trainer", "server", "evaluator", "coordinator", "heter")
_SPELLINGS = {word: option for word, option in by_spelling(OPTIONS.values()).items() if word[0] != "-"}

Key = Strings
"""`("option", name)`, `("script",)`, `("environment", NAME)`, `("role", role, "script")`, ..."""


@frozen
class Entry:
    """One value, with its document and the path of its key in the document."""

    value: Any
    document: TomlDocument
    path: Strings

    @property
    def where(self) -> str:
        return self.document.where(self.path)

    @property
    def name(self) -> str:
        return printable_name(".".join(self.path))

    def wrong(self, what: str, hint: str | None = None) -> UsageError:
        """Return an error with the text `job.toml:7: roles.server.count WHAT`."""
        return UsageError(f"{self.where}: {self.name} {what}", hint=hint)


def merged(documents: Iterable[TomlDocument]) -> dict[Key, Entry]:
    """Return the entries of all documents, where a later document overrides. Raises UsageError for unknown
    keys.
    """
    found: dict[Key, Entry] = {}
    for document in documents:
        own: dict[Key, Entry] = {}
        for key, entry in _entries(document):
            if key in own:
                raise entry.wrong(f"repeats {own[key].name} ({own[key].where}); keep only one of them")
            own[key] = entry
        found |= own
    return found


def _entries(document: TomlDocument) -> Iterator[tuple[Key, Entry]]:
    for name, value in document.tree.items():
        entry = Entry(value, document, (name,))
        if name == "include":
            continue
        if name in ("script", "args"):
            yield (name,), entry
        elif name == "variables":
            yield from ((("variable", *path[1:]), each) for path, each in _table(entry))
        elif name == "environment":
            yield from _environment(entry, ("environment",))
        elif name == "roles":
            yield from _roles(entry)
        else:
            yield ("option", _option(entry).name), entry


def _table(entry: Entry) -> Iterator[tuple[Strings, Entry]]:
    if not isinstance(entry.value, dict):
        raise entry.wrong("must be a table", hint=f"[{entry.name}]")
    for name, value in entry.value.items():
        path = (*entry.path, name)
        yield path, Entry(value, entry.document, path)


def _option(entry: Entry) -> Option:
    (name,) = entry.path
    found = _SPELLINGS.get(normal(name))
    if found is not None and found.name not in _COMMAND_LINE_ONLY:
        return found
    if found is not None:
        raise entry.wrong(_COMMAND_LINE_ONLY[found.name])
    if normal(name) in RETIRED:
        raise entry.wrong(RETIRED[normal(name)])
    if normal(name) in TORCHRUN:
        raise entry.wrong(
            f"is an option of torchrun, only for the command line, where it {TORCHRUN[normal(name)].help}"
        )
    raise _unknown(entry, (*_TOP_LEVEL_KEYS, *_SPELLINGS), "an option of fleetrun")


def _unknown(entry: Entry, known: Iterable[str], what: str) -> UsageError:
    words = tuple(known)
    meant = closest(normal(entry.path[-1].lower()), words)
    if meant:
        hint = f"Did you mean {either(meant)}?"
    else:
        hint = "`fleetrun --help` lists the options." if len(words) > 20 else f"Valid: {', '.join(words)}."
    return UsageError(f"{entry.where}: {entry.name} is not {what}", hint=hint)


def _environment(entry: Entry, key: Key) -> Iterator[tuple[Key, Entry]]:
    for path, each in _table(entry):
        name = path[-1]
        if not name or "=" in name or not name.isprintable():
            raise each.wrong("is not a valid variable name")
        if name in BY_VARIABLE:
            raise each.wrong(f"is an option of fleetrun; write {BY_VARIABLE[name]} = ... instead")
        if is_owned(name):
            raise each.wrong("is set by fleetrun for each process")
        yield (*key, name), each


def _roles(entry: Entry) -> Iterator[tuple[Key, Entry]]:
    for path, each in _table(entry):
        role = ROLE_WORDS.get(path[-1])
        if role is None:
            raise _unknown(each, _ROLES, "a role")
        yield ("role", role), each
        for _, part in _table(each):
            yield from _role(part, role)


def _role(entry: Entry, role: Role) -> Iterator[tuple[Key, Entry]]:
    word = entry.path[-1]
    known = _EVALUATOR_KEYS if role is Role.EVALUATOR else _ROLE_KEYS
    if word not in known:
        raise _unknown(entry, known, f"a key of roles.{entry.path[-2]}")
    if word == "environment":
        yield from _environment(entry, ("role", role, "environment"))
    elif word == "resources":
        for path, each in _table(entry):
            if path[-1] not in _RESOURCES:
                raise _unknown(each, _RESOURCES, "a resource")
            yield ("role", role, path[-1]), each
    else:
        yield ("role", role, word), entry


# ---- `${NAME}` in strings comes from the environment, else from [variables]. `${here}` is the file's
# directory. `$${` stands for `${`.

HERE = "here"
LONGEST = 100_000
"""Characters of one text after filling in variables. A longer text cannot be one word of a command line."""

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def escaped(text: str) -> str:
    """Return a text as a job file needs it, where `${` starts a variable."""
    return text.replace("${", "$${")


class Filling:
    """Fill in the variables of one job."""

    def __init__(self, entries: Mapping[Key, Entry], environ: Environ) -> None:
        """Check the variables of the job file. Raises UsageError for an invalid name or value."""
        self._own = {key[1]: entry for key, entry in entries.items() if key[0] == "variable"}
        self._environ = environ
        for name, entry in self._own.items():
            if not _NAME.fullmatch(name) or name == HERE:
                raise entry.wrong(
                    "is not a valid variable name", hint="Use letters, digits and _, but not the name `here`."
                )
            if not isinstance(entry.value, str | int | float):
                raise entry.wrong("must be a string or a number")

    def filled(self, entry: Entry) -> object:
        """Return the value of an entry with variables filled in. Raises UsageError."""
        return self._value(entry.value, entry, ())

    def _value(self, value: object, entry: Entry, within: Strings) -> Any:
        if isinstance(value, str):
            return self._text(value, entry, within)
        if isinstance(value, list):
            return [self._value(each, entry, within) for each in value]
        if isinstance(value, dict):
            return {name: self._value(each, entry, within) for name, each in value.items()}
        return value

    def _text(self, text: str, entry: Entry, within: Strings) -> str:
        if "\0" in text:
            raise entry.wrong("has a NUL character, which cannot be passed to a process")

        def meant(match: re.Match[str]) -> str:
            if match[0] == "$${":
                return "${"
            name = match[1]
            if name is None or not _NAME.fullmatch(name):
                raise entry.wrong(
                    f"has {match[0]!r}; write a variable as ${{NAME}}", hint="$${ stands for ${ itself."
                )
            return self._variable(name, entry, within)

        filled = _REFERENCE.sub(meant, text)
        if len(filled) > LONGEST:
            raise entry.wrong(f"is longer than {LONGEST} characters")
        return filled

    def _variable(self, name: str, entry: Entry, within: Strings) -> str:
        if name == HERE:
            return str(entry.document.folder)
        if name in self._environ:
            return self._environ[name]
        if name in within:
            raise self._own[name].wrong(f"is defined by itself: {' -> '.join((*within, name))}")
        if name not in self._own:
            near = closest(name, (*self._own, HERE))
            meant = f"Did you mean {either(near)}? " if near else ""
            hint = f"{meant}Set it in the environment or under [variables]."
            raise entry.wrong(f"uses ${{{name}}}, which is not set", hint=hint)
        own = self._own[name]
        return plain(self._value(own.value, own, (*within, name)))


def plain(value: str | int | float) -> str:
    """Return a scalar as a word of a command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


# ---- From entries to options, environments and roles

_LARGEST = 1 << 63


def load_job_file(name: str, environ: Environ, origin: str) -> JobFile:
    """Load the job file `name` with all included files. Raises UsageError, which names file, line and key."""
    return _Reader(merged(read_documents(name, origin)), environ).job_file()


def job_file_of_variable(environ: Environ) -> JobFile:
    """Load the job file that a scheduler put into the environment. Raises UsageError."""
    document = _document(JOB_FILE, environ[JOB_FILE], "variable")
    return _Reader(merged([document]), environ).job_file()


class _Reader:
    def __init__(self, entries: Mapping[Key, Entry], environ: Environ) -> None:
        self._entries = entries
        self._filling = Filling(entries, environ)

    def job_file(self) -> JobFile:
        options = {
            key[1]: self._file_option(entry, OPTIONS[key[1]])
            for key, entry in self._entries.items()
            if key[0] == "option"
        }
        for given in self._of_roles(options):
            options[given.option.name] = given
        named = {"script", "args", "environment"} & {key[0] for key in self._entries}
        first = {name: next(e for key, e in self._entries.items() if key[0] == name) for name in named}
        return JobFile(
            options=tuple(options.values()),
            script=self._string(("script",)),
            args=self._words(("args",)) or (),
            environment=self._environment(("environment",)),
            roles=tuple(self._role(key[1]) for key in self._entries if key[0] == "role" and len(key) == 2),
            places={name: entry.where for name, entry in first.items()},
        )

    # ---- options

    def _file_option(self, entry: Entry, option: Option) -> FileOption:
        return FileOption(option, entry.path[-1], self._texts(entry, option), entry.where)

    def _texts(self, entry: Entry, option: Option) -> Strings:
        try:
            return option_texts(option, self._filling.filled(entry))
        except InvalidValue as error:
            raise entry.wrong(str(error)) from None

    def _of_roles(self, options: Mapping[str, FileOption]) -> list[FileOption]:
        """Return the options that role tables set: the number of processes, and the trainers' devices."""
        found = []
        for key, entry in self._entries.items():
            if (
                key[0] != "role"
                or len(key) != 3
                or key[1] is Role.EVALUATOR
                or key[2] not in ("count", "devices")
            ):
                continue
            role, what = key[1], key[2]
            if what == "devices" and role is not Role.TRAINER:
                raise entry.wrong("is for trainers and evaluators only; other roles compute on the CPU")
            name = "devices" if what == "devices" else self._count_option(role, options)
            if name in options:
                other = options[name]
                raise entry.wrong(f"repeats {other.alias} ({other.where}); keep only one of them")
            found.append(FileOption(OPTIONS[name], name, self._texts(entry, OPTIONS[name]), entry.where))
        return found

    def _count_option(self, role: Any, options: Mapping[str, FileOption]) -> str:
        """Return the option for the number of processes of a role."""
        if role is not Role.TRAINER:
            return {Role.SERVER: "server_num", Role.COORDINATOR: "coordinator_num"}.get(
                role, "heter_worker_num"
            )
        stated = options["run_mode"].texts[0] if "run_mode" in options else ""
        servers = ("role", Role.SERVER) in self._entries or any(
            given.option.modes <= SERVERS for given in options.values()
        )
        ps = servers if stated not in tuple(Mode) else Mode(stated).has_servers
        return "trainer_num" if ps else "nproc_per_node"

    # ---- roles

    def _role(self, role: Any) -> RoleSettings:
        key = ("role", role)
        evaluators = role is Role.EVALUATOR
        return RoleSettings(
            role=role,
            where=self._entries[key].where,
            script=self._string((*key, "script")),
            args=self._words((*key, "args")),
            module=self._boolean((*key, "module")),
            no_python=self._boolean((*key, "no_python")),
            environment=self._environment((*key, "environment")),
            threads=self._number((*key, "threads")),
            count=(self._number((*key, "count")) or 1) if evaluators else 0,
            each=evaluators and self._on((*key, "on")),
            devices=self._devices((*key, "devices")) if evaluators else (),
        )

    def _on(self, key: Key) -> bool:
        entry, value = self._get(key)
        if entry is not None and value not in ("first", "each"):
            raise entry.wrong(f'is {value!r}; it must be "first" (only on the first node) or "each"')
        return bool(value == "each")

    def _devices(self, key: Key) -> Strings:
        entry, _ = self._get(key)
        if entry is None:
            return ()
        text = self._texts(entry, OPTIONS["devices"])[0]
        chosen: Strings = _parsed(entry, device_list, text)
        return chosen

    # ---- kinds of values

    def _get(self, key: Key) -> tuple[Entry | None, object]:
        entry = self._entries.get(key)
        return entry, None if entry is None else self._filling.filled(entry)

    def _string(self, key: Key) -> str | None:
        entry, value = self._get(key)
        if entry is None:
            return None
        if not isinstance(value, str):
            raise entry.wrong("must be a string")
        return str(_parsed(entry, nonempty, value))

    def _words(self, key: Key) -> Strings | None:
        entry, value = self._get(key)
        if entry is None:
            return None
        if not isinstance(value, list):
            raise entry.wrong("must be a list of strings", hint='args = ["--lr", "0.1"]')
        return tuple(_scalar(each, entry) for each in value)

    def _boolean(self, key: Key) -> bool:
        entry, value = self._get(key)
        if entry is not None and not isinstance(value, bool):
            raise entry.wrong("must be true or false")
        return bool(value)

    def _number(self, key: Key) -> int | None:
        entry, value = self._get(key)
        return None if entry is None else _parsed(entry, count, _scalar(value, entry))

    def _environment(self, key: Key) -> EnvironmentItems:
        found = []
        for each, entry in self._entries.items():
            if each[:-1] == key:
                value = self._filling.filled(entry)
                if isinstance(value, bool):
                    raise entry.wrong('must be a string or a number, such as "1" or "true"')
                found.append((each[-1], _scalar(value, entry)))
        return tuple(found)


def option_texts(option: Option, value: object) -> Strings:
    """Return a value from a job file or from Python as texts for the command line. Raises InvalidValue.

    The result has several texts if the option repeats.
    """
    if option.repeats and isinstance(value, dict):  # scheduler_option = {partition = "gpu"}
        return tuple(f"{name}={scalar_text(each)}" for name, each in value.items())
    if not isinstance(value, list):
        return (scalar_text(value),)
    if option.repeats:
        return tuple(map(scalar_text, value))
    joint = next(
        (joint for joint in ";:" if joint in option.metavar), "," if "LIST" in option.metavar else ""
    )
    if not joint or option.takes is not Takes.VALUE:
        raise InvalidValue("is a list; it must be one value")
    parts = (
        ",".join(map(scalar_text, part)) if isinstance(part, list) else scalar_text(part) for part in value
    )
    return (joint.join(parts),)


def scalar_text(value: object) -> str:
    """Return one value as text for the command line. Raises InvalidValue."""
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise InvalidValue("is too large a number")
    if not isinstance(value, str | int | float):
        kinds: dict[type, str] = {dict: "a table", list: "a nested list"}
        kind = kinds.get(type(value), "a date or time")
        raise InvalidValue(f"is {kind}; it must be a string or a number")
    return plain(value)


def _scalar(value: object, entry: Entry) -> str:
    try:
        return scalar_text(value)
    except InvalidValue as error:
        raise entry.wrong(str(error)) from None


def _parsed(entry: Entry, parse: Any, text: str) -> Any:
    try:
        return parse(text.strip())
    except InvalidValue as error:
        raise entry.wrong(f"is {text!r}; {error}") from None

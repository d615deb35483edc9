"""The keys of job files: which there are, and what a wrong one was perhaps meant to be. Merges the files of a
job into one. Takes values as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from fleetrun.envs.contract import OWNED, OWNED_PREFIXES, Role
from fleetrun.envs.options import RETIRED, Option, by_spelling, normal
from fleetrun.envs.settings import OPTIONS
from fleetrun.envs.values import ROLE_WORDS, closest, either
from fleetrun.errors import UsageError
from fleetrun.jobfile.pages import Page, shown

_NOT_HERE = {
    "config": "is for the command line; in a job file it is include",
    "save": "is for the command line, with --dry_run",
}
_OF_THE_FILE = ("include", "script", "args", "variables", "environment", "roles")
_OF_A_ROLE = ("script", "args", "module", "no_python", "count", "environment", "resources")
_OF_EVALUATORS = (*_OF_A_ROLE, "on")
_RESOURCES = ("devices", "threads")
_SPELLINGS = {word: option for word, option in by_spelling(OPTIONS.values()).items() if word[0] != "-"}
_BY_VARIABLE = {name: option.name for option in OPTIONS.values() for name in option.env}

Key = tuple[str, ...]
"""`("option", name)`, `("script",)`, `("environment", NAME)`, `("role", role, "script")`, ..."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One value, where it stands, and how its key is written there."""

    value: Any
    page: Page
    path: tuple[str, ...]

    @property
    def where(self) -> str:
        return self.page.where(self.path)

    @property
    def name(self) -> str:
        return shown(".".join(self.path))

    def wrong(self, what: str, hint: str | None = None) -> UsageError:
        """`job.toml:7: roles.server.count WHAT`."""
        return UsageError(f"{self.where}: {self.name} {what}", hint=hint)


def merged(pages: Iterable[Page]) -> dict[Key, Entry]:
    """What all of them say; a later page counts more. Raises UsageError for a key that there is not."""
    found: dict[Key, Entry] = {}
    for page in pages:
        own: dict[Key, Entry] = {}
        for key, entry in _entries(page):
            if key in own:
                raise entry.wrong(
                    f"says again what {own[key].name} says ({own[key].where}): keep one of them"
                )
            own[key] = entry
        found |= own
    return found


def _entries(page: Page) -> Iterator[tuple[Key, Entry]]:
    for name, value in page.tree.items():
        entry = Entry(value, page, (name,))
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


def _table(entry: Entry) -> Iterator[tuple[tuple[str, ...], Entry]]:
    if not isinstance(entry.value, dict):
        raise entry.wrong("must be a table", hint=f"[{entry.name}]")
    for name, value in entry.value.items():
        path = (*entry.path, name)
        yield path, Entry(value, entry.page, path)


def _option(entry: Entry) -> Option:
    (name,) = entry.path
    found = _SPELLINGS.get(normal(name))
    if found is not None and found.name not in _NOT_HERE:
        return found
    if found is not None:
        raise entry.wrong(_NOT_HERE[found.name])
    if normal(name) in RETIRED:
        raise entry.wrong(RETIRED[normal(name)])
    raise _unknown(entry, (*_OF_THE_FILE, *_SPELLINGS), "an option of fleetrun")


def _unknown(entry: Entry, known: Iterable[str], what: str) -> UsageError:
    words = tuple(known)
    meant = closest(normal(entry.path[-1].lower()), words)
    if meant:
        hint = f"did you mean {either(meant)}?"
    else:
        hint = "fleetrun --help lists the options." if len(words) > 20 else f"There are {', '.join(words)}."
    return UsageError(f"{entry.where}: {entry.name} is not {what}", hint=hint)


def _environment(entry: Entry, key: Key) -> Iterator[tuple[Key, Entry]]:
    for path, each in _table(entry):
        name = path[-1]
        if not name or "=" in name or not name.isprintable():
            raise each.wrong("is no name of a variable")
        if name in _BY_VARIABLE:
            raise each.wrong(f"is read by fleetrun itself: write {_BY_VARIABLE[name]} = ... instead")
        if name in OWNED or name.startswith(OWNED_PREFIXES):
            raise each.wrong("is set by fleetrun, for each process")
        yield (*key, name), each


def _roles(entry: Entry) -> Iterator[tuple[Key, Entry]]:
    for path, each in _table(entry):
        role = ROLE_WORDS.get(path[-1])
        if role is None:
            raise _unknown(each, dict.fromkeys(_role_names()), "a role")
        yield ("role", role), each
        for _, part in _table(each):
            yield from _role(part, role)


def _role_names() -> list[str]:
    return ["trainer", "server", "evaluator", "coordinator", "heter"]


def _role(entry: Entry, role: Role) -> Iterator[tuple[Key, Entry]]:
    word = entry.path[-1]
    known = _OF_EVALUATORS if role is Role.EVALUATOR else _OF_A_ROLE
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

"""From the entries of job files to what they ask for: options as texts, environments, roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleetrun.envs.contract import Mode, Role
from fleetrun.envs.options import SERVERS, Option, Takes
from fleetrun.envs.settings import OPTIONS
from fleetrun.envs.values import BadValue, count, device_list, nonempty
from fleetrun.envs.wishes import Filed, JobFile, RoleWish, Variables
from fleetrun.jobfile.entries import Entry, Key, merged
from fleetrun.jobfile.filling import Filling, plain
from fleetrun.jobfile.pages import pages

_LARGEST = 1 << 63


def load(name: str, environ: Mapping[str, str], origin: str = "--config") -> JobFile:
    """The job file of that name with all that it includes. Raises UsageError, which names file, line and
    key.
    """
    return _Reading(merged(pages(name, origin)), environ).job_file()


class _Reading:
    def __init__(self, entries: Mapping[Key, Entry], environ: Mapping[str, str]) -> None:
        self._entries = entries
        self._filling = Filling(entries, environ)

    def job_file(self) -> JobFile:
        options = {
            key[1]: self._filed(entry, OPTIONS[key[1]])
            for key, entry in self._entries.items()
            if key[0] == "option"
        }
        for filed in self._of_roles(options):
            options[filed.option.name] = filed
        named = {"script", "args", "environment"} & {key[0] for key in self._entries}
        first = {name: next(e for key, e in self._entries.items() if key[0] == name) for name in named}
        return JobFile(
            options=tuple(options.values()),
            script=self._text(("script",)),
            args=self._words(("args",)) or (),
            environment=self._environment(("environment",)),
            roles=tuple(self._role(key[1]) for key in self._entries if key[0] == "role" and len(key) == 2),
            places={name: entry.where for name, entry in first.items()},
        )

    # ---- options

    def _filed(self, entry: Entry, option: Option) -> Filed:
        return Filed(option, entry.path[-1], self._texts(entry, option), entry.where)

    def _texts(self, entry: Entry, option: Option) -> tuple[str, ...]:
        value = self._filling.filled(entry)
        if option.repeats and isinstance(value, dict):  # scheduler_option = {partition = "gpu"}
            return tuple(f"{name}={_scalar(each, entry)}" for name, each in value.items())
        if not isinstance(value, list):
            return (_scalar(value, entry),)
        if option.repeats:
            return tuple(_scalar(each, entry) for each in value)
        joint = next(
            (joint for joint in ";:" if joint in option.metavar), "," if "LIST" in option.metavar else ""
        )
        if not joint or option.takes is not Takes.VALUE:
            raise entry.wrong("is a list; it must be one value")
        parts = [",".join(_scalar(x, entry) for x in part) if isinstance(part, list) else _scalar(part, entry)
                 for part in value]  # fmt: skip
        return (joint.join(parts),)

    def _of_roles(self, options: Mapping[str, Filed]) -> list[Filed]:
        """What the tables of roles say of options: how many processes, and the trainers' devices."""
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
                raise entry.wrong("is for trainers and evaluators: others compute on the CPU")
            name = "devices" if what == "devices" else self._counted(role, options)
            if name in options:
                other = options[name]
                raise entry.wrong(f"says again what {other.alias} says ({other.where}): keep one of them")
            found.append(Filed(OPTIONS[name], name, self._texts(entry, OPTIONS[name]), entry.where))
        return found

    def _counted(self, role: Any, options: Mapping[str, Filed]) -> str:
        """The option that says how many processes of a role there are."""
        if role is not Role.TRAINER:
            return {Role.SERVER: "server_num", Role.COORDINATOR: "coordinator_num"}.get(
                role, "heter_worker_num"
            )
        stated = options["run_mode"].texts[0] if "run_mode" in options else ""
        servers = ("role", Role.SERVER) in self._entries or any(
            filed.option.modes <= SERVERS for filed in options.values()
        )
        ps = servers if stated not in tuple(Mode) else Mode(stated).has_servers
        return "trainer_num" if ps else "nproc_per_node"

    # ---- roles

    def _role(self, role: Any) -> RoleWish:
        key = ("role", role)
        evaluators = role is Role.EVALUATOR
        return RoleWish(
            role=role,
            where=self._entries[key].where,
            script=self._text((*key, "script")),
            args=self._words((*key, "args")),
            module=self._truth((*key, "module")),
            no_python=self._truth((*key, "no_python")),
            environment=self._environment((*key, "environment")),
            threads=self._number((*key, "threads")),
            count=(self._number((*key, "count")) or 1) if evaluators else 0,
            each=evaluators and self._on((*key, "on")),
            devices=self._devices((*key, "devices")) if evaluators else (),
        )

    def _on(self, key: Key) -> bool:
        entry, value = self._get(key)
        if entry is not None and value not in ("first", "each"):
            raise entry.wrong(f'is {value!r}; it must be "first" (machine) or "each"')
        return bool(value == "each")

    def _devices(self, key: Key) -> tuple[str, ...]:
        entry, _ = self._get(key)
        if entry is None:
            return ()
        text = self._texts(entry, OPTIONS["devices"])[0]
        chosen: tuple[str, ...] = _parsed(entry, device_list, text)
        return chosen

    # ---- kinds of values

    def _get(self, key: Key) -> tuple[Entry | None, Any]:
        entry = self._entries.get(key)
        return entry, None if entry is None else self._filling.filled(entry)

    def _text(self, key: Key) -> str | None:
        entry, value = self._get(key)
        if entry is None:
            return None
        if not isinstance(value, str):
            raise entry.wrong("must be a text")
        return str(_parsed(entry, nonempty, value))

    def _words(self, key: Key) -> tuple[str, ...] | None:
        entry, value = self._get(key)
        if entry is None:
            return None
        if not isinstance(value, list):
            raise entry.wrong("must be a list of words", hint='args = ["--lr", "0.1"]')
        return tuple(_scalar(each, entry) for each in value)

    def _truth(self, key: Key) -> bool:
        entry, value = self._get(key)
        if entry is not None and not isinstance(value, bool):
            raise entry.wrong("must be true or false")
        return bool(value)

    def _number(self, key: Key) -> int | None:
        entry, value = self._get(key)
        return None if entry is None else _parsed(entry, count, _scalar(value, entry))

    def _environment(self, key: Key) -> Variables:
        found = []
        for each, entry in self._entries.items():
            if each[:-1] == key:
                value = self._filling.filled(entry)
                if isinstance(value, bool):
                    raise entry.wrong('must be a text or a number, such as "1" or "true"')
                found.append((each[-1], _scalar(value, entry)))
        return tuple(found)


def _scalar(value: Any, entry: Entry) -> str:
    if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
        raise entry.wrong("is a number that is too large")
    if not isinstance(value, str | int | float):
        kinds: dict[type, str] = {dict: "a table", list: "a list in a list"}
        kind = kinds.get(type(value), "a date or a time")
        raise entry.wrong(f"is {kind}; it must be a text or a number")
    return plain(value)


def _parsed(entry: Entry, parse: Any, text: str) -> Any:
    try:
        return parse(text.strip())
    except BadValue as error:
        raise entry.wrong(f"is {text!r}; {error}") from None

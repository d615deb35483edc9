"""Text to value: numbers, words, times, sizes, device lists. Knows no option by name and no machine.

A parser takes the text of one option and returns its value, or raises BadValue with what the text must be, as
the second half of a sentence: "--trainer_num is '0'; " + "it must be a whole number from 1 to 4096".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from fleetrun.envs.contract import Mode, Role

Parser = Callable[[str], Any]

PROCESSES_PER_NODE = 4096
"""More processes than this on one machine is a typing error."""

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off"})

# As text: a pattern takes longer to compile than to import all else here, and few options need one.
_WHOLE = r"[+-]?[0-9]{1,18}"
_SECONDS = r"([0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*(s|m|min|h)?"
_SIZE = r"(?i)([0-9]{1,15}(?:\.[0-9]{1,3})?)\s*([kmgt]?)(i?b)?"
_DEVICE = r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z/-]+"
_JOB_ID = r"(?!\.)[\w.-]{1,128}"

SMALLEST_LOG = 4096


class BadValue(ValueError):
    """The text is not a value. The message says what it must be, `meant` what was perhaps meant."""

    def __init__(self, requirement: str, meant: tuple[str, ...] = ()) -> None:
        super().__init__(requirement)
        self.meant = meant


def closest(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """Which of `words` may have been meant, at most two: those that begin with `word`, else similar ones."""
    known = tuple(words)
    begun = tuple(other for other in known if len(word) > 1 and other.startswith(word))
    if begun:
        return begun[:2]
    from difflib import get_close_matches  # late: only a mistake pays for it

    return tuple(get_close_matches(word, known, n=2, cutoff=0.5))


def whole(low: int, high: int | None = None) -> Parser:
    """A whole number from `low` to `high`, both included."""
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(_WHOLE, text) else None
        if number is None or number < low or (high is not None and number > high):
            raise BadValue(f"it must be a whole number {limits}")
        return number

    return parse


count = whole(1, PROCESSES_PER_NODE)
count_or_none = whole(0, PROCESSES_PER_NODE)


def count_or_word(*words: str) -> Parser:
    """A number of processes, or one of the words that stand for a number known only on the machine."""

    def parse(text: str) -> int | str:
        if text.lower() in words:
            return text.lower()
        try:
            number: int = count(text)
        except BadValue as error:
            raise BadValue(f"{error}, or {either(words)}") from None
        return number

    return parse


def choice(*words: str, also: dict[str, str] | None = None) -> Parser:
    """One of `words` in any case; `also` maps other spellings to one of them."""
    known = {word.lower(): word for word in words} | (also or {})

    def parse(text: str) -> str:
        found = known.get(text.lower())
        if found is None:
            raise BadValue(f"it must be {either(words)}", closest(text.lower(), known))
        return found

    return parse


def either(words: tuple[str, ...]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_mode_word = choice(*Mode, also={"ps_heter": "ps-heter", "heter": "ps-heter"})


def run_mode(text: str) -> Mode:
    return Mode(_mode_word(text))


def boolean(text: str) -> bool:
    word = text.lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise BadValue("it must be true or false")
    return word in TRUE_WORDS


def seconds(text: str) -> float:
    """`10`, `1.5`, `30s`, `5m`, `2h`: seconds, more than none."""
    match = re.fullmatch(_SECONDS, text)
    amount = float(match[1]) * {"m": 60, "min": 60, "h": 3600}.get(match[2], 1) if match else 0.0
    if not amount > 0:
        raise BadValue("it must be a time longer than 0, such as 10, 1.5, 30s, 5m or 2h")
    return amount


def seconds_from(least: float) -> Parser:
    """A time of at least so many seconds."""

    def parse(text: str) -> float:
        amount = seconds(text)
        if amount < least:
            raise BadValue(f"it must be at least {least:g} s")
        return amount

    return parse


def assignment(text: str) -> tuple[str, ...]:
    """`NAME=VALUE`, alone in a tuple, so that several add up."""
    name, equals, _ = text.partition("=")
    if not (name.strip() and equals):
        raise BadValue("it must be NAME=VALUE")
    return (text,)


def size(text: str) -> int:
    """`4096`, `100M`, `1GiB` (powers of 1024) or `100MB` (powers of 1000): bytes."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        raise BadValue("it must be a size in bytes, such as 100M, 1GiB or 500MB")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    amount = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if amount < SMALLEST_LOG:
        raise BadValue(f"it must be at least {SMALLEST_LOG} bytes")
    return amount


def nonempty(text: str) -> str:
    if not text:
        raise BadValue("it must not be empty")
    return text


def job_id(text: str) -> str:
    """A name that can stand in a file name."""
    if not re.fullmatch(_JOB_ID, text):
        raise BadValue("it must be a name of letters, digits, '.', '_' and '-', and not start with '.'")
    return text


def shell_words(text: str) -> str:
    """A command line whose quotes are balanced, as it was written."""
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadValue(f"it must be a command line ({str(error).lower()})") from None
    if not words:
        raise BadValue("it must be a command line")
    return text


def device_list(text: str) -> tuple[str, ...]:
    """`0,1,3` or UUIDs; each once."""
    devices = tuple(part.strip() for part in text.split(","))
    if not all(re.fullmatch(_DEVICE, device) for device in devices):
        raise BadValue("it must be a comma separated list of device numbers or UUIDs, such as 0,1")
    return unique(tuple(str(int(device)) if device.isdigit() else device for device in devices))


def unique(items: tuple[str, ...]) -> tuple[str, ...]:
    """`items` as they are, if each is there once."""
    for position, item in enumerate(items):
        if item in items[:position]:
            raise BadValue(f"it names {item} twice")
    return items


def stage_counts(text: str) -> tuple[int, ...]:
    """`2` or `1;2`: the number of processes of each stage."""
    try:
        return tuple(count(part.strip()) for part in text.split(";"))
    except BadValue as error:
        raise BadValue(f"{error}, or several joined by ';', such as '1;2'") from None


_device_word = choice("cpu", "gpu", "xpu", "npu")


def stage_devices(text: str) -> tuple[str, ...]:
    """`gpu` or `gpu;cpu`: the kind of device of each stage."""
    try:
        return tuple(_device_word(part.strip()) for part in text.split(";"))
    except BadValue as error:
        raise BadValue(f"{error}, or several joined by ';', such as 'gpu;cpu'", error.meant) from None


FollowRule = tuple[Role, tuple[int, ...] | None]
"""A role, and which of its processes on this node (None: all of them)."""

ROLE_WORDS = {
    "trainer": Role.TRAINER,
    "worker": Role.TRAINER,
    "ps": Role.SERVER,
    "server": Role.SERVER,
    "heter": Role.HETER,
    "coordinator": Role.COORDINATOR,
    "evaluator": Role.EVALUATOR,
}
"""How roles are called after --follow and in a job file."""


def follow(text: str) -> tuple[FollowRule, ...]:
    """`all`, `none`, or roles with or without process numbers: `trainer`, `trainer:0,2`, `trainer:0+ps`."""
    if text == "all":
        return tuple((role, None) for role in Role)
    if text == "none":
        return ()
    return tuple(_follow_rule(part.strip()) for part in text.split("+"))


def _follow_rule(text: str) -> FollowRule:
    word, colon, numbers = text.partition(":")
    if word not in ROLE_WORDS:
        raise BadValue(
            "it must be all, none, or roles such as trainer, ps:0 or trainer:0,1+ps",
            closest(word, ("all", "none", *ROLE_WORDS)),
        )
    if not colon:
        return ROLE_WORDS[word], None
    parts = [number.strip() for number in numbers.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) <= 4 for part in parts):
        raise BadValue(f"{word}: takes process numbers, such as {word}:0,1; join several roles with '+'")
    return ROLE_WORDS[word], tuple(sorted(set(map(int, parts))))


def written_follow(rules: tuple[FollowRule, ...]) -> str:
    """The text that `follow` reads as these rules."""
    if not rules:
        return "none"
    if {role for role, numbers in rules if numbers is None} == set(Role):
        return "all"
    return "+".join(
        f"{role}:{','.join(map(str, numbers))}" if numbers else str(role) for role, numbers in rules
    )

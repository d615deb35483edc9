"""Parse numbers, words, times, sizes, devices, hosts, ports and endpoints.

A parser returns the value of an option's text, or raises InvalidValue. The message of InvalidValue is the
second half of a sentence, as in "--trainer_num is '0'; " + "it must be a whole number from 1 to 4096".
Parsers depend only on the text. They do not resolve host names or open sockets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fleetrun import plugins
from fleetrun.aliases import Integers, Strings
from fleetrun.envs.contract import Mode, NodeLoss, Role
from fleetrun.errors import similar

Parser = Callable[[str], Any]

PROCESSES_PER_NODE = 4096
"""A larger number of processes on one node is certainly a typing error."""

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n", "off"})

# As text, because compiling a pattern takes longer than all imports of this module, and few options need one.
_WHOLE = r"[+-]?[0-9]{1,18}"
_SECONDS = r"([0-9]{1,9}(?:\.[0-9]{1,9})?|\.[0-9]{1,9})\s*(s|m|min|h|d)?"
_SIZE = r"(?i)([0-9]{1,15}(?:\.[0-9]{1,3})?)\s*([kmgt]?)(i?b)?"
_DEVICE = r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z/-]+"
_VARIABLE = r"[^\W\d][\w.-]*"
_VARIABLE_PATTERN = (
    r"[\w.*?\[\]!-]*[A-Za-z_][\w.*?\[\]!-]*"  # not `*` alone, because each node has its own PATH and HOME
)
_JOB_ID = r"(?!\.)[\w.-]{1,128}"

SMALLEST_LOG = 4096


class InvalidValue(ValueError):
    """The text is not a value of this option. The message states the requirement, and `meant` has
    suggestions.
    """

    def __init__(self, requirement: str, meant: Strings = ()) -> None:
        super().__init__(requirement)
        self.meant = meant


_ELSEWHERE = {
    "n": ("nproc_per_node", "nnodes"),
    "v": ("version", "verbose"),
    **dict.fromkeys(("np", "nprocs", "num_proc", "num_processes"), ("nproc_per_node",)),
    **dict.fromkeys(("num_nodes", "num_machines"), ("nnodes",)),
    "machine_rank": ("rank",),
    "main_process_ip": ("master",),
    "num_gpus": ("gpus", "nproc_per_node"),
}
"""The likely meaning of options of mpirun, accelerate and deepspeed."""


def closest(word: str, words: Iterable[str]) -> Strings:
    """Return at most two suggestions from `words`: words that start with `word`, else similar words."""
    known = tuple(words)
    if len(word) == 1 or word in _ELSEWHERE:
        return tuple(each for each in _ELSEWHERE.get(word, ()) if each in known)
    longer = tuple(other for other in known if len(word) > 1 and other.startswith(word))
    if longer:
        return longer[:2]
    return tuple(similar(word, known, most=2, cutoff=0.5))


def parts_of(text: str, joint: str = ",") -> Strings:
    """Return the parts of a list, without surrounding blanks."""
    return tuple(part.strip() for part in text.split(joint))


def whole(low: int, high: int | None = None) -> Parser:
    """Return a parser for a whole number from `low` to `high`, both included."""
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        number = int(text) if re.fullmatch(_WHOLE, text) else None
        if number is None or number < low or (high is not None and number > high):
            raise InvalidValue(f"it must be a whole number {limits}")
        return number

    return parse


count = whole(1, PROCESSES_PER_NODE)
count_or_none = whole(0, PROCESSES_PER_NODE)


def count_or_word(*words: str) -> Parser:
    """Return a parser for a number of processes, or for a word whose number depends on the node."""

    def parse(text: str) -> int | str:
        if text.lower() in words:
            return text.lower()
        try:
            number: int = count(text)
        except InvalidValue as error:
            raise InvalidValue(f"{error}, or {either(words)}") from None
        return number

    return parse


def choice(*words: str, also: dict[str, str] | None = None) -> Parser:
    """Return a parser for one of `words` in any case. `also` maps other spellings to one of them."""
    known = {word.lower(): word for word in words} | (also or {})

    def parse(text: str) -> str:
        found = known.get(text.lower())
        if found is None:
            raise InvalidValue(f"it must be {either(words)}", closest(text.lower(), known))
        return found

    return parse


def either(words: Strings) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_mode_word = choice(*Mode, also={"ps_heter": "ps-heter", "heter": "ps-heter"})


def run_mode(text: str) -> Mode:
    return Mode(_mode_word(text))


_node_loss_word = choice(*NodeLoss, also={"-1": "fail", "0": "wait", "1": "shrink"})


def node_loss(text: str) -> NodeLoss:
    """Parse a word, or one of Paddle's numbers (`--elastic_level`)."""
    try:
        return NodeLoss(_node_loss_word(text))
    except InvalidValue as error:
        raise InvalidValue(f"{error}, in Paddle's numbers -1, 0 or 1", error.meant) from None


def boolean(text: str) -> bool:
    word = text.lower()
    if word not in TRUE_WORDS | FALSE_WORDS:
        raise InvalidValue("it must be true or false")
    return word in TRUE_WORDS


def seconds(text: str) -> float:
    """Parse a time longer than 0, such as `10`, `1.5`, `30s`, `5m` or `2h`, into seconds."""
    match = re.fullmatch(_SECONDS, text)
    amount = float(match[1]) * {"m": 60, "min": 60, "h": 3600, "d": 86400}.get(match[2], 1) if match else 0.0
    if not amount > 0:
        raise InvalidValue("it must be a time longer than 0, such as 10, 1.5, 30s, 5m or 2h")
    return amount


def seconds_from(least: float) -> Parser:
    """Return a parser for a time of at least `least` seconds."""

    def parse(text: str) -> float:
        amount = seconds(text)
        if amount < least:
            raise InvalidValue(f"it must be at least {least:g} s")
        return amount

    return parse


def assignment(text: str) -> Strings:
    """Parse `NAME=VALUE` into a tuple of one, so that repeated options can be added."""
    name, equals, _ = text.partition("=")
    if not (name.strip() and equals):
        raise InvalidValue("it must be NAME=VALUE")
    return (text,)


# ---- Names that plug-ins can add. Installed packages are searched only for names outside fleetrun

ENGINES = ("local", *plugins.IN_TREE["schedulers"])


def engine(text: str) -> str:
    """Parse the name of a scheduler."""
    if text.lower() in ENGINES:
        return text.lower()
    known = (*ENGINES, *plugins.others("schedulers"))
    if text not in known:
        raise InvalidValue(f"it must be {either(known)}", closest(text.lower(), known))
    return text


Addressed = tuple[str, str]
"""The name of an exporter or notifier, and its argument."""


def exports(text: str) -> tuple[Addressed, ...]:
    """Parse `NAME` or `NAME=ARGUMENT` of another package's exporter. Several stand on separate lines."""
    found = []
    for line in text.splitlines():
        name, _, argument = line.strip().partition("=")
        if name in plugins.IN_TREE["exporters"]:
            raise InvalidValue("--tensorboard and --metrics_port turn on the exporters of fleetrun")
        known = tuple(plugins.others("exporters"))
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "and no other exporter"
            raise InvalidValue(
                f"no installed package has an exporter of this name, {there}", closest(name, known)
            )
        found.append((name, argument))
    return tuple(found)


MOMENTS = ("failure", "restart", "hang", "end")


def moments(text: str) -> Strings:
    """Parse a list such as `failure,hang` into entries of `MOMENTS`, in the order of `MOMENTS`."""
    asked = parts_of(text)
    for each in asked:
        if each not in MOMENTS:
            raise InvalidValue(
                f"it must be {either(MOMENTS)}, several joined by commas", closest(each, MOMENTS)
            )
    return tuple(each for each in MOMENTS if each in asked)


_NOTIFIERS = "it must be https://HOST/PATH, command:WORDS, or NAME:ARGUMENT of an installed notifier"


def notifiers(text: str) -> tuple[Addressed, ...]:
    """Parse a URL, `command:WORDS` or `NAME:ARGUMENT`. Several stand on separate lines.

    Error messages leave out the text, because it may contain a secret.
    """
    return tuple(_notifier(line.strip()) for line in text.splitlines() if line.strip())


def _notifier(text: str) -> Addressed:
    name, colon, argument = text.partition(":")
    if name.lower() in ("http", "https"):
        name, argument = "webhook", text
    argument = argument.strip()
    if name == "webhook":
        if not host_of_url(argument):
            raise InvalidValue(
                "a webhook must be http://HOST/PATH or https://HOST/PATH, without a user or spaces"
            )
    elif name == "command":
        if not argument:
            raise InvalidValue("command: needs a command, such as command:mail -s fleetrun me@example.com")
    elif name not in plugins.others("notifiers"):
        named = f"there is no notifier {name!r}; " if colon and re.fullmatch(r"[a-z]{1,12}", name) else ""
        raise InvalidValue(named + _NOTIFIERS, closest(name, plugins.names("notifiers")) if named else ())
    return name, argument


def host_of_url(url: str) -> str:
    """Return host and port of an HTTP URL, or an empty string if the text is not an HTTP URL.

    The rest of the URL may be a secret, so it is left out.
    """
    from urllib.parse import urlsplit  # late, because few runs have a URL

    try:
        parts = urlsplit(url)
        named = parts.port != 0 and parts.hostname and parts.username is None
    except ValueError:
        return ""
    valid = parts.scheme in ("http", "https") and url.isascii() and url.isprintable() and " " not in url
    return parts.netloc if valid and named else ""


def written_notifiers(found: tuple[Addressed, ...]) -> str:
    """Return the hosts of webhooks, and other names, for display."""
    return ", ".join(host_of_url(argument) if name == "webhook" else name for name, argument in found)


def variables(text: str) -> Strings:
    """Parse `NAME=VALUE`, or names and patterns joined by commas, such as `NCCL_*,HF_HOME`."""
    name, equals, _ = text.partition("=")
    if equals and re.fullmatch(_VARIABLE, name):
        return (text,)
    words = parts_of(text)
    if equals or not all(re.fullmatch(_VARIABLE_PATTERN, word) for word in words):
        raise InvalidValue("it must be NAME=VALUE, or names and patterns joined by commas, such as NCCL_*")
    return words


def assignments(text: str) -> tuple[tuple[str, str], ...]:
    """Parse `a=1,b=2`. The text may be empty, or in quotes, which remain from a list in YAML."""
    pairs = [part.partition("=") for part in text.strip("'\"").split(",") if part.strip()]
    if not all(name.strip() and value.strip() for name, _, value in pairs):
        raise InvalidValue("it must be NAME=VALUE, several joined by commas")
    return tuple((name.strip(), value.strip()) for name, _, value in pairs)


def number_list(text: str) -> Integers:
    """Parse `0,2` into unique ascending numbers. Empty text gives an empty tuple."""
    numbers = _numbers(text) if text else ()
    if numbers is None:
        raise InvalidValue("it must be numbers joined by commas, such as 0,2")
    return numbers


def _numbers(text: str) -> Integers | None:
    """Return comma-separated numbers, unique and ascending, or None for any other text."""
    numbers = parts_of(text)
    if not all(each.isascii() and each.isdigit() and len(each) <= 4 for each in numbers):
        return None
    return tuple(sorted(set(map(int, numbers))))


def streams(text: str) -> dict[int, int]:
    """Parse torchrun's `3` or `0:3,1:1` into a stream number by local rank.

    1 is stdout, 2 is stderr, 3 is both, and 0 is no stream. Rank -1 stands for all other ranks.
    """
    if re.fullmatch(r"[0-3]", text):
        return {-1: int(text)}
    if not re.fullmatch(r"\d{1,4}:[0-3](,\d{1,4}:[0-3])*", text, re.ASCII):
        raise InvalidValue("it must be 0 to 3, or RANK:0 to RANK:3 joined by commas, such as 0:3,1:1")
    pairs = (part.split(":") for part in text.split(","))
    return {-1: 0} | {int(rank): int(stream) for rank, stream in pairs}


def size(text: str) -> int:
    """Parse `4096`, `100M`, `1GiB` (powers of 1024) or `100MB` (powers of 1000) into bytes."""
    match = re.fullmatch(_SIZE, text)
    if match is None:
        raise InvalidValue("it must be a size in bytes, such as 100M, 1GiB or 500MB")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    amount = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
    if amount < SMALLEST_LOG:
        raise InvalidValue(f"it must be at least {SMALLEST_LOG} bytes")
    return amount


def anything(text: str) -> str:
    """Return any text unchanged."""
    return text


def nonempty(text: str) -> str:
    if not text:
        raise InvalidValue("it must not be empty")
    return text


def job_id(text: str) -> str:
    """Check a name that can be part of a file name."""
    if not re.fullmatch(_JOB_ID, text):
        raise InvalidValue("it must be a name of letters, digits, '.', '_' and '-', and not start with '.'")
    return text


def shell_words(text: str) -> str:
    """Check that the quotes of a command line are balanced, and return it unchanged."""
    import shlex

    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidValue(f"it must be a command line ({str(error).lower()})") from None
    if not words:
        raise InvalidValue("it must be a command line")
    return text


def device_list(text: str) -> Strings:
    """Parse `0,1,3` or UUIDs, without repetitions."""
    devices = parts_of(text)
    if not all(re.fullmatch(_DEVICE, device) for device in devices):
        raise InvalidValue("it must be a comma-separated list of device numbers or UUIDs, such as 0,1")
    return unique(tuple(str(int(device)) if device.isdigit() else device for device in devices))


def unique(items: Strings) -> Strings:
    """Return the same items. Raises InvalidValue for an item that occurs twice."""
    for position, item in enumerate(items):
        if item in items[:position]:
            raise InvalidValue(f"{item} is listed twice")
    return items


def stage_counts(text: str) -> Integers:
    """Parse `2` or `1;2` into the number of processes of each stage."""
    return _stages(count, text, "1;2")


def _stages(parse: Parser, text: str, example: str) -> tuple[Any, ...]:
    try:
        return tuple(map(parse, parts_of(text, ";")))
    except InvalidValue as error:
        raise InvalidValue(f"{error}, or several joined by ';', such as {example!r}", error.meant) from None


_device_word = choice("cpu", "gpu", "xpu", "npu")


def stage_devices(text: str) -> Strings:
    """Parse `gpu` or `gpu;cpu` into the device kind of each stage."""
    return _stages(_device_word, text, "gpu;cpu")


FollowRule = tuple[Role, Integers | None]
"""A role, and its process numbers on this node (None for all)."""

ROLE_WORDS = {
    "trainer": Role.TRAINER,
    "worker": Role.TRAINER,
    "ps": Role.SERVER,
    "server": Role.SERVER,
    "heter": Role.HETER,
    "coordinator": Role.COORDINATOR,
    "evaluator": Role.EVALUATOR,
}
"""The names of roles for --follow and in a job file."""


def follow(text: str) -> tuple[FollowRule, ...]:
    """Parse `all`, `none`, or roles with optional process numbers.

    Examples are `trainer`, `trainer:0,2` and `trainer:0+ps`.
    """
    if text == "all":
        return tuple((role, None) for role in Role)
    if text == "none":
        return ()
    return tuple(map(_follow_rule, parts_of(text, "+")))


def _follow_rule(text: str) -> FollowRule:
    word, colon, numbers = text.partition(":")
    if word not in ROLE_WORDS:
        raise InvalidValue(
            "it must be all, none, or roles such as trainer, ps:0 or trainer:0,1+ps",
            closest(word, ("all", "none", *ROLE_WORDS)),
        )
    if not colon:
        return ROLE_WORDS[word], None
    found = _numbers(numbers)
    if found is None:
        raise InvalidValue(f"{word}: needs process numbers, such as {word}:0,1; join several roles with '+'")
    return ROLE_WORDS[word], found


def written_follow(rules: tuple[FollowRule, ...]) -> str:
    """Return the text that `follow` parses into these rules."""
    if not rules:
        return "none"
    if {role for role, numbers in rules if numbers is None} == set(Role):
        return "all"
    return "+".join(
        f"{role}:{','.join(map(str, numbers))}" if numbers else str(role) for role, numbers in rules
    )


# ---- Hosts, ports and endpoints

port = whole(1, 65535)

_NAME = r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_NUMBERS = r"[0-9.]+"
_ENDPOINT = "it must be host:port, such as 10.0.0.1:6170 or [::1]:6170"


def host(text: str) -> str:
    """Parse a host name or an IP address (IPv6 with or without brackets), without a port."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if not (_is_ipv6(bare) if ":" in bare else _is_name(bare)):
        raise InvalidValue("it must be a host name or an IP address, without a port")
    return bare


def _is_name(text: str) -> bool:
    if re.fullmatch(_NUMBERS, text):
        octets = text.split(".")
        return len(octets) == 4 and all(octet.isdigit() and int(octet) <= 255 for octet in octets)
    return re.fullmatch(_NAME, text) is not None


def _is_ipv6(text: str) -> bool:
    from ipaddress import IPv6Address  # late, because it is rarely needed and takes 2 ms

    try:
        IPv6Address(text)
    except ValueError:
        return False
    return True


def endpoint(text: str) -> str:
    """Parse `host:port`, with an IPv6 address in brackets."""
    name, _, number = text.rpartition(":")
    bracketed = name.startswith("[") and name.endswith("]")
    if not number.isdecimal() or (":" in name) != bracketed:
        raise InvalidValue(_ENDPOINT)
    try:
        host(name)
    except InvalidValue:
        raise InvalidValue(_ENDPOINT) from None
    try:
        return f"{name}:{port(number)}"
    except InvalidValue:
        raise InvalidValue(f"the port of {text} must be from 1 to 65535") from None


def host_list(text: str) -> Strings:
    """Parse unique hosts, joined by commas."""
    return _listed(host, text)


def endpoint_list(text: str) -> Strings:
    """Parse unique endpoints, joined by commas. Empty text is an empty list, as in Paddle."""
    return _listed(endpoint, text) if text else ()


def trainer_list(text: str) -> Strings:
    """Parse endpoints, or hosts without ports. `with_ports` adds the missing ports as Paddle does."""
    trainers = parts_of(text)
    if not text or any(":" in each for each in trainers):
        return endpoint_list(text)
    return tuple(map(host, trainers))


def with_ports(hosts: Strings, first: int) -> Strings:
    """Add ports from `first` on to hosts without a port."""
    return tuple(
        text if ":" in text else f"{text}:{number}" for number, text in enumerate(hosts, start=first)
    )


def stage_endpoints(text: str) -> tuple[Strings, ...]:
    """Parse stages joined by `;`, each with its endpoints joined by `,`."""
    if not text:
        return ()
    stages = tuple(map(endpoint_list, parts_of(text, ";")))
    if not all(stages):
        raise InvalidValue("every stage must have an endpoint")
    unique(tuple(address for stage in stages for address in stage))
    return stages


def _listed(parse: Parser, text: str) -> Strings:
    """Parse unique entries joined by commas. If there are several, the error starts with "each entry"."""
    try:
        return unique(tuple(map(parse, parts_of(text))))
    except InvalidValue as error:
        message = str(error)
        several = message.replace("it must", "each entry must", 1) if "," in text else message
        raise InvalidValue(several) from None


def port_range(text: str) -> tuple[int, int]:
    """Parse `LOW:HIGH`, both included."""
    low, _, high = text.partition(":")
    try:
        first, last = port(low.strip()), port(high.strip())
    except InvalidValue:
        raise InvalidValue("it must be LOW:HIGH with ports from 1 to 65535, such as 35100:64000") from None
    if first > last:
        raise InvalidValue(f"it must be LOW:HIGH, but {first} is greater than {last}")
    return first, last


_nodes = whole(1, 65535)


def node_range(text: str) -> tuple[int, int]:
    """Parse `N` or `MIN:MAX` nodes."""
    low, colon, high = text.partition(":")
    try:
        least = _nodes(low.strip())
        most = _nodes(high.strip()) if colon else least
    except InvalidValue:
        raise InvalidValue("it must be a number of nodes, N or MIN:MAX, such as 2 or 2:4") from None
    if least > most:
        raise InvalidValue(f"it must be MIN:MAX, but {least} is greater than {most}")
    return least, most


STORE_PORT = 6768
"""Port where nodes meet if you give none. It is the port of Paddle's documents."""

EMBEDDED = "embedded:"


def rendezvous_address(text: str) -> str:
    """Parse the address where nodes meet.

    Valid forms are `host:port`, `http://host:port` (the same),
    `etcd://host:port[,host:port][?NAME=VALUE&...]`, `host[:port],host[:port],...`, and `embedded:N`.
    """
    scheme, _, rest = text.rpartition("://")
    if scheme not in ("", "http", "etcd"):
        raise InvalidValue("it must be host:port, host,host,host or etcd://host:port")
    if scheme == "etcd":
        members, question, parameters = rest.partition("?")
        return f"etcd://{','.join(endpoint_list(members) or _missing())}{question}{parameters}"
    if rest.startswith(EMBEDDED):
        count = rest.removeprefix(EMBEDDED)
        _check_majority(int(count) if count.isdecimal() and count.isascii() else 0)
        return rest
    if "," in rest:
        members = ",".join(with_port(each, STORE_PORT) for each in parts_of(rest))
        _check_majority(len(endpoint_list(members)))
        return members
    return endpoint(rest)


def with_port(text: str, port: int) -> str:
    """Add the port to a host without one. Return any other text unchanged."""
    try:
        return endpoint(f"{text}:{port}")
    except InvalidValue:
        return text


def _check_majority(machines: int) -> None:
    """Raise InvalidValue unless 3, 5 or 7 nodes serve a store. An even number only adds a node to lose."""
    if machines not in (3, 5, 7):
        raise InvalidValue("a store runs on 1, 3, 5 or 7 nodes")


def _missing() -> Strings:
    raise InvalidValue(_ENDPOINT)


# ---- Ranks as a short text: `0-2,5`

_PART = re.compile(r"\s*(\d{1,7})(?:-(\d{1,7}))?\s*", re.ASCII)
_MOST = 1_000_000


def written_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as `0-2,5-6`, ascending."""
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in _runs(ranks))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """Return ranks as `0-2, 5, 6`, for a sentence."""
    return ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in _runs(ranks)
    )


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """Return the ranks, grouped into consecutive runs."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return runs


def rank_set(text: str) -> frozenset[int] | None:
    """Parse a text such as `0-2,5` into ranks. Return None for a malformed text."""
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part)
        low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if high < low or high > _MOST:
            return None
        found.update(range(low, high + 1))
    return frozenset(found)


def byte_size(amount: float) -> str:
    """Return bytes in readable form, in powers of 1024, such as `64 MiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.3g} TiB"


def some(names: Sequence[str], most: int) -> str:
    """Return the first `most` names and the number of the others, as `h1, h2 and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def plural(number: int, word: str) -> str:
    """Return a number with its word, as `1 process` or `2 processes`."""
    ending = "es" if word.endswith(("s", "ch")) else "s"
    return f"{number} {word}{'' if number == 1 else ending}"

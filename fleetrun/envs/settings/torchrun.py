"""Translate torchrun's options into fleetrun's, and collect notices about options without effect here."""

from __future__ import annotations

import re

from fleetrun.envs.contract import join_endpoint
from fleetrun.envs.settings.command_line import Choice, Choices, Source, parsed
from fleetrun.envs.settings.options import OPTIONS, PET, TORCHRUN
from fleetrun.values import replace

PORTS = {"static": 29500, "c10d": 29400, "etcd": 2379, "etcd-v2": 2379}
"""The default port of --rdzv_endpoint, by --rdzv_backend."""

_SAME = {"rdzv_id": "job_id", "local_addr": "host", "shutdown_timeout": "stop_timeout"}
_CONFIGURATION = {
    "join_timeout": "rdzv_timeout",
    "timeout": "rdzv_timeout",
    "last_call_timeout": "elastic_timeout",
}
"""Keys of --rdzv_conf that have an option here. If two keys set one option, the first has priority."""

_SILENT = ("monitor_interval", "start_method", "event_log_handler", "logs_specs", "signals_to_handle",
           "duplicate_stdout_filters", "duplicate_stderr_filters")  # fmt: skip
_OF_SEVERAL = ("nnodes", "rank", "master_addr", "master_port")
_NOT_IN_NAMES = r"[^\w.-]|^\."
_TRUE = ("1", "true", "t", "yes", "y")  # as in torch's get_as_bool
_BOTH = 3


def translated(choices: Choices) -> tuple[Choices, list[str]]:
    """Return the same choices in fleetrun's options, and a notice on each choice without effect.

    For equal sources, fleetrun's own option has priority over torchrun's. Raises UsageError for an invalid
    value.
    """
    translation = _Translation(choices)
    translation.place_alone()
    translation.rendezvous()
    for name, own in _SAME.items():
        translation.rename(name, own)
    translation.configuration()
    translation.output()
    translation.rest()
    return translation.choices, translation.notices


class _Translation:
    def __init__(self, choices: Choices) -> None:
        self.choices = {name: choice for name, choice in choices.items() if name in OPTIONS}
        self.notices: list[str] = []
        self._given = {name: choice for name, choice in choices.items() if name in TORCHRUN and choice.text}

    def _set(self, name: str, text: str, given: Choice) -> None:
        """Set fleetrun's option, unless an equally strong source set it."""
        option = OPTIONS[name]
        choice = Choice(option, parsed(option, given.origin, text), given.origin, text, name, given.source)
        other = self.choices.get(name)
        if other is None or other.source < given.source:
            self.choices[name] = choice
        elif other.source is given.source and other.value != choice.value:
            self._ignore(given, f"{other} was given")

    def _ignore(self, choice: Choice, why: str) -> None:
        self.notices.append(f"{choice} is ignored: {why}")

    def _drop(self, name: str, why: str) -> None:
        """Drop a choice. Skip the notice for a choice of one node or rank 0."""
        choice = self.choices.pop(name, None) or self._given.pop(name, None)
        if choice is not None and choice.value not in (0, (1, 1)):
            self._ignore(choice, why)

    # -- Nodes

    def place_alone(self) -> None:
        """Give --standalone and --nnodes 1 on the command line priority over the PET_* variables of a
        cluster's pod.
        """
        alone = self._alone()
        if alone is None:
            return
        for name in (*_OF_SEVERAL, "rdzv_endpoint", "rdzv_backend"):
            other = self.choices.get(name) or self._given.get(name)
            weaker = other is not None and _pet(other) and other.source < alone.source
            if weaker or (alone.option.name == "standalone" and name in self._given):
                self._drop(name, f"{alone} was given")

    def _alone(self) -> Choice | None:
        standalone, nodes = self.choices.get("standalone"), self.choices.get("nnodes")
        if standalone is not None and standalone.value:
            return standalone
        return nodes if nodes is not None and nodes.value == (1, 1) else None

    def rendezvous(self) -> None:
        """Translate --rdzv_endpoint into --master, according to --rdzv_backend.

        For a job on one node, it becomes MASTER_ADDR and MASTER_PORT.
        """
        backend, endpoint = self._given.pop("rdzv_backend", None), self._given.pop("rdzv_endpoint", None)
        kind = "static" if backend is None else str(backend.value)
        if backend is not None and kind != "static":
            rank = self.choices.get("rank")
            if rank is not None and (rank.alias == "node_rank" or _pet(rank)):
                self._drop("rank", f"{backend} ranks nodes by arrival; --rank sets the rank of this node")
        if endpoint is None:
            self._address_of_pod()
            return
        for name in ("master_addr", "master_port"):
            self._drop(name, f"{endpoint} was given")
        host, port = _split(endpoint.value, PORTS[kind])
        if kind.startswith("etcd"):
            self._set("master", f"etcd://{host}:{port}", endpoint)
        elif self._several():
            if int(port):  # with 0, the launcher takes a free port and prints it
                self._set("master", f"{host}:{port}", endpoint)
        elif kind == "static":
            self._set("master_addr", host, endpoint)
            if int(port):
                self._set("master_port", port, endpoint)

    def _address_of_pod(self) -> None:
        """Let nodes meet at PET_MASTER_ADDR in every mode. A pod on its own may not resolve its own name."""
        address = self.choices.get("master_addr")
        if address is None or not _pet(address):
            return
        port = self.choices.get("master_port")
        if self._several() and "master" not in self.choices:
            number = port.value if port is not None else PORTS["static"]
            self._set("master", join_endpoint(address.value, number), address)
            self.choices.pop("master_port", None)
        elif port is not None and _pet(port) and "master" in self.choices:
            del self.choices["master_port"]
        del self.choices["master_addr"]

    def _several(self) -> bool:
        nodes = self.choices.get("nnodes")
        return nodes is not None and nodes.value != (1, 1)

    # -- Names and times

    def rename(self, name: str, own: str) -> None:
        given = self._given.pop(name, None)
        if given is not None:
            text = re.sub(_NOT_IN_NAMES, "-", given.text) if own == "job_id" else given.text
            self._set(own, text, given)

    def configuration(self) -> None:
        given = self._given.pop("rdzv_conf", None)
        if given is None:
            return
        values = dict(given.value)
        for key, own in _CONFIGURATION.items():
            if key in values:
                self._set(own, values[key], replace(given, origin=f"{given.origin} {key}", text=values[key]))
        if values.pop("is_host", "0").lower() in _TRUE and self._several():
            self._set("rank", "0", replace(given, origin=f"{given.origin} is_host", text="1"))
        others = [key for key in values if key not in _CONFIGURATION]
        if others:
            self.notices.append(f"{given.origin} {', '.join(others)} has no effect in fleetrun")

    # -- Output

    def output(self) -> None:
        """Select the output that torchrun would show.

        torchrun shows the local ranks in the filter whose output is not redirected, or is copied to the
        console.
        """
        redirects, tee, only = (
            self._given.pop(name, None) for name in ("redirects", "tee", "local_ranks_filter")
        )
        given = [choice for choice in (only, tee, redirects) if choice is not None]
        if not given:
            return
        hidden, shown = (
            {-1: 0} if redirects is None else redirects.value,
            {-1: 0} if tee is None else tee.value,
        )
        if {1, 2} & {*hidden.values(), *shown.values()}:
            self.notices.append(f"{given[-1]}: fleetrun shows stdout and stderr of a process together")

        def visible(rank: int) -> bool:
            return bool(hidden.get(rank, hidden[-1]) != _BOTH or shown.get(rank, shown[-1]))

        named = sorted(({*hidden, *shown} if only is None else {*only.value}) - {-1})
        text = _ranks([rank for rank in named if visible(rank)])
        if only is None and visible(-1):
            text = self._all_but([rank for rank in named if not visible(rank)], given[0])
        self._set("follow", text, max(given, key=lambda choice: choice.source))

    def _all_but(self, hidden: list[int], given: Choice) -> str:
        number = self.choices["nproc_per_node"].value if "nproc_per_node" in self.choices else None
        if hidden and isinstance(number, int):
            return _ranks([rank for rank in range(number) if rank not in hidden])
        if hidden:
            self.notices.append(
                f"{given} needs --nproc_per_node as a number; fleetrun shows the output of all processes"
            )
        return "trainer"

    # -- Options without effect

    def rest(self) -> None:
        for name in _SILENT:
            if name in self._given:
                self.notices.append(f"{self._given[name]} {TORCHRUN[name].help}")


def _pet(choice: Choice) -> bool:
    return choice.source is Source.VARIABLE and choice.origin.startswith(PET)


def _split(endpoint: str, port: int) -> tuple[str, str]:
    """Return host and port, with `port` as the default."""
    match = re.fullmatch(r"(.+):(\d+)", endpoint)
    if match is None or (endpoint.startswith("[") and endpoint.endswith("]")):
        return endpoint, str(port)
    return match[1], match[2]


def _ranks(ranks: list[int]) -> str:
    return f"trainer:{','.join(map(str, ranks))}" if ranks else "none"

"""Determine the requirements of a launch on this node: its place, its devices and its ports.

Obstacles become findings. Measurements are in `measure`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import TypeVar

from fleetrun.aliases import Environ, Strings
from fleetrun.doctor.facts import Finding, Wanted, failed, passed, warned
from fleetrun.envs.contract import TOKEN, Role, split_endpoint
from fleetrun.envs.settings.options import LaunchSettings, Resolved
from fleetrun.errors import LaunchError
from fleetrun.host.network import Ports
from fleetrun.launcher.prepare import check_program, equipped, locate, offer_of, take_token
from fleetrun.plan.topology import Host, Offer, offer, process_command
from fleetrun.pod.linux import check_pidfds
from fleetrun.shadow import find_shadow
from fleetrun.values import replace

T = TypeVar("T")

_SOCKET_NAMES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_EXTRAS = {
    "tensorboard": ("tensorboard", "monitor"),
    "metrics_port": ("prometheus_client", "monitor"),
}
"""Options that need a package of an optional extra, with the module and the extra."""


@dataclass(slots=True)
class Plan:
    """The requirements of a launch."""

    names_script: bool = True
    """If False, the script of the settings is a placeholder."""
    findings: list[Finding] = field(default_factory=list)
    site: Host | None = None
    """None if unknown. `findings` then hold the reason. The same applies to `host` and `offer`."""
    host: Host | None = None
    offer: Offer | None = None
    wanted: Wanted = field(default_factory=Wanted)

    def attempt(self, check: str, act: Callable[[], T]) -> T | None:
        """Return the result of `act`. If it fails, add a finding and return None."""
        try:
            return act()
        except LaunchError as error:
            self.findings.append(failed(check, error.message, error.hint or ""))
            return None


def make_plan(
    resolved: Resolved, ports: Ports, environ: MutableMapping[str, str], *, names_script: bool
) -> Plan:
    """Make the plan.

    Its ports stay reserved until `ports` is closed. `names_script`: the user has named a script.
    """
    settings = resolved.settings
    plan = Plan(names_script=names_script)

    def warn(text: str) -> None:
        plan.findings.append(warned("options", text, ""))

    for notice in resolved.notices:
        warn(notice)
    plan.attempt("kernel", check_pidfds)
    plan.attempt("secret", lambda: take_token(settings, environ, warn))
    if names_script:
        plan.attempt("script", lambda: plan.findings.append(_script(settings)))
    shadow = find_shadow(process_command(settings), {**environ, **dict(settings.environment)})
    if shadow is not None:
        plan.findings.append(warned("trainers", shadow.sentence, shadow.way_out))
    plan.findings += extras(settings, lambda name: importlib.util.find_spec(name) is not None)
    site = plan.site = plan.attempt("address", lambda: locate(settings))
    if site is None:
        return plan
    host = plan.host = plan.attempt("devices", lambda: equipped(site, resolved, lambda text: None, environ))
    if host is None:
        return plan
    plan.offer = plan.attempt("ports", lambda: offer_of(settings, host, ports))
    if settings.metrics_port is not None:
        plan.attempt("metrics port", lambda: ports.fixed(settings.metrics_port or 0))
    only_here = (site.master or "").startswith(("127.", "localhost:", "[::1]:"))
    if not site.alone and not environ.get(TOKEN) and not only_here:
        plan.findings.append(
            warned(
                "secret",
                "not set: anyone who can reach the rendezvous store can join or end the job",
                f"Set the same --token_file or {TOKEN} on every node.",
            )
        )
    plan.wanted = wanted(settings, host, plan.offer, environ)
    return plan


def _script(settings: LaunchSettings) -> Finding:
    check_program(settings)
    return passed("script", settings.script)


def extras(settings: LaunchSettings, installed: Callable[[str], bool]) -> Iterator[Finding]:
    """Check the packages that the options need."""
    needed = [pair for name, pair in _EXTRAS.items() if getattr(settings, name) is not None]
    if (settings.master or "").startswith("etcd://"):
        needed.append(("etcd3gw", "etcd"))
    for module, extra in needed:
        if not installed(module):
            yield failed("packages", f"{module} is not installed", f"pip install 'fleetrun[{extra}]'")


def wanted(settings: LaunchSettings, host: Host, found: Offer | None, environ: Environ) -> Wanted:
    """Collect the processes that would run.

    `found` is None if a requested port is in use. Ports that are not requested always suffice.
    """
    wanted = found or offer(replace(settings, start_port=None), host, lambda port: port or 0)
    trainer = settings.role_settings(Role.TRAINER)
    environ = {**environ, **dict(settings.environment), **dict(trainer.environment)}
    endpoints = _endpoints(found) if found is not None else ()
    asked = settings.start_port is not None or bool(settings.servers)
    return Wanted(
        processes=wanted.size,
        trainers=len(wanted.trainers),
        servers=settings.run_mode.has_servers,
        several=not host.alone,
        address=host.address,
        device_kind=host.device_kind,
        devices=host.devices,
        named=host.wanted_devices,
        backend=settings.backend,
        threads=environ.get("OMP_NUM_THREADS") if trainer.threads is None else str(trainer.threads),
        fixed_ports=tuple(split_endpoint(each)[1] for each in endpoints) if asked else (),
        ports=len(endpoints),
        socket_names=tuple((name, environ[name]) for name in _SOCKET_NAMES if environ.get(name)),
    )


def _endpoints(offer: Offer) -> Strings:
    heter = tuple(each for stage in offer.heter for each in stage)
    found = (*offer.servers, *offer.trainers, *heter, *offer.coordinators, offer.service, offer.gloo)
    return tuple(filter(None, found))

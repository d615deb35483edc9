"""From the end of an ssh connection to one sentence and an exit code. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from fleetrun.schedulers.link import Farewell

_SSH_FAILED = 255
_HINTS = {
    "Host key verification failed": "its key is not the known one, or none is known: connect once by hand",
    "Permission denied": "the key was not accepted: fleetrun asks for no password, use an agent or a key",
    "Could not resolve": "there is no host of this name",
    "Connection refused": "no sshd listens there",
    "timed out": "it does not answer",
    "No route to host": "it cannot be reached",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`begun` and `lost`: whether fleetrun had begun there, and whether the connection broke."""

    code: int
    message: str = ""
    begun: bool = True
    lost: bool = False


def judge(host: str, farewell: Farewell) -> Verdict:
    """What the end of a host's connection means."""
    if farewell.code is not None:
        message = f"{host}: fleetrun ended with exit code {farewell.code}" if farewell.code else ""
        return Verdict(farewell.code, message)
    if farewell.begun:
        message = "" if farewell.cut else f"{host}: the connection was lost; its processes end there"
        return Verdict(125, message, lost=True)
    if farewell.cut:
        return Verdict(125, begun=False)
    text = " ".join(farewell.said)
    if farewell.client == _SSH_FAILED:
        why = next((hint for part, hint in _HINTS.items() if part in text), "ssh failed")
        said = _relevant(farewell.said)
        return Verdict(125, f"{host}: no connection, {why}" + (f" ({said})" if said else ""), begun=False)
    missing = farewell.client == 127 or "No module named" in text
    return Verdict(
        127 if missing else farewell.client or 125,
        f"{host}: fleetrun did not start there ({_relevant(farewell.said) or f'code {farewell.client}'}); "
        "--scheduler_option python=PATH says with which Python, dir=PATH in which directory",
        begun=False,
    )


def _relevant(said: tuple[str, ...]) -> str:
    """The line that names the trouble: ssh frames a bad host key with others."""
    for line in said:
        if any(part in line for part in _HINTS):
            return line
    return said[-1] if said else ""

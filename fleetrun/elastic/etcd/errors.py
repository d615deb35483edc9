"""What can go wrong between a client and an etcd, and what it means. Pure: from an exception or the text
of an answer to one of the few cases that a client distinguishes.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from requests.exceptions import ConnectTimeout
from urllib3.exceptions import NewConnectionError

INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = 3, 5, 6, 7
FAILED_PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 9, 11, 16
_ANSWERS = frozenset({INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE})
"""gRPC codes that are about the question; the others are troubles of the member that was asked."""

_PARTS = frozenset({"header", "result", "token"})
"""Every answer has one of these."""

CLOSED = "the connection was closed"
_STRANGER = "what answers is no etcd of version 3.4 or later"
_BROKEN_OFF = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


class Unreachable(Exception):
    """No member answered, or none that could do it; `str` is for people. May be asked again."""


class StreamEnded(Exception):
    """By the member, or on the way. Another try may well succeed."""


class UnknownFate(Exception):
    """A question that must not be repeated was sent and not answered."""


class Rejected(Exception):
    """etcd's answer: it will not do this. `code` is the gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Denied(Exception):
    """etcd's answer: not you (user, password, rights), or never (too large)."""


class Trouble(Exception):
    """With one member. `sent`: the question may have arrived there. `fatal`: it will not heal."""

    def __init__(self, why: str, *, sent: bool = True, fatal: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.fatal = fatal


def meaning(text: str) -> Exception:
    """Of the body of an HTTP answer that is an error."""
    try:
        return _meaning(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return Trouble(_STRANGER, fatal=True)


def message(answer: Any) -> dict[str, Any]:
    """A message of a stream, or an answer, if it is none of an error. Raises like `meaning`."""
    if not isinstance(answer, dict):
        raise Trouble(_STRANGER, fatal=True)
    if isinstance(answer.get("error"), dict):
        raise _meaning(answer["error"])
    if not answer.keys() & _PARTS:
        raise Trouble(_STRANGER, fatal=True)
    return answer


def _meaning(error: Mapping[str, Any]) -> Exception:
    code = int(error.get("grpc_code") or error["code"])
    words = str(error["message"]).removeprefix("etcdserver: ")
    if code == UNAUTHENTICATED or "auth store is old" in words:
        return Rejected(UNAUTHENTICATED, words)
    if code == PERMISSION_DENIED or "user name is empty" in words or "too large" in words:
        return Denied(words)
    return Rejected(code, words) if code in _ANSWERS else Trouble(words)


def trouble(error: BaseException, seconds: float) -> Trouble:
    """Why there was no answer within `seconds`."""
    causes = list(_causes(error))
    sent = not any(isinstance(cause, ConnectTimeout | NewConnectionError) for cause in causes)
    for cause in causes:
        if isinstance(cause, _BROKEN_OFF):
            return Trouble(CLOSED, sent=sent)
        if isinstance(cause, ssl.SSLError):
            return Trouble(f"TLS failed: {_tls(cause)}", sent=False, fatal=True)
        if isinstance(cause, TimeoutError):
            return Trouble(f"no answer within {seconds:.2g} s", sent=sent)
        if isinstance(cause, OSError) and cause.strerror:
            return Trouble(cause.strerror, sent=sent)
        if isinstance(cause, ValueError):
            return Trouble(_STRANGER, fatal=True)
    if type(error) is OSError:  # how requests says that a certificate file is gone
        return Trouble(str(error), sent=False, fatal=True)
    return Trouble(CLOSED, sent=sent)


def timed_out(error: BaseException) -> bool:
    return any(isinstance(cause, TimeoutError) for cause in _causes(error))


def _tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good ({error.verify_message})"
    return (error.reason or str(error)).lower().replace("_", " ")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, nearest first, however the libraries wrapped it."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inside = (*each.args, getattr(each, "reason", None), each.__cause__, each.__context__)
        waiting += [other for other in inside if isinstance(other, BaseException)]

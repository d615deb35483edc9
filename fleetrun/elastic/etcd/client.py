"""Send requests to an etcd cluster, one at a time. Choose the member and the user, interpret errors, and
decide when to try the next member. All functions block, so they run in threads.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import requests
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception
from requests.exceptions import ConnectTimeout
from urllib3.exceptions import NewConnectionError

from fleetrun.aliases import Document, Fields
from fleetrun.elastic.etcd.wire import PASSWORD_VARIABLE, Body, EtcdAddress, in_one_read
from fleetrun.envs.contract import split_endpoint
from fleetrun.errors import LaunchError, UsageError

# ---- Shared by the threads of a store: address, certificates, authentication token

_API = "/v3/"  # 3.4 and later; earlier versions have /v3beta/ and /v3alpha/


class Access:
    """The shared state of a store's threads: the cluster, the timeout, and the authentication token of the
    user.

    `proven` becomes True with the first write that etcd carried out. From then on, every error may be
    temporary. A certificate or password that worked once can be corrected while the job runs.
    """

    def __init__(self, address: EtcdAddress, password: str, timeout: float) -> None:
        for name in filter(None, (address.cacert, address.cert, address.key)):
            if not os.access(name, os.R_OK):
                raise UsageError(f"{name}, named in the address of the etcd, cannot be read")
        context = ssl.create_default_context()
        try:
            if address.cacert:
                context.load_verify_locations(cafile=address.cacert)
            if address.cert:
                # an encrypted key must not prompt at the terminal: a wrong password makes it an error
                context.load_cert_chain(address.cert, address.key or None, password="-")
        except OSError as error:  # ssl.SSLError is an OSError
            raise UsageError(
                f"the certificate files in the address of the etcd cannot be used: {error}",
                hint="they must be PEM files, cert must match key, and the key must not be encrypted",
            ) from None
        self.address = address
        self.timeout = timeout
        self.proven = False
        self._password = password
        self._token: str | None = None
        self._lock = threading.Lock()

    def prove(self) -> None:
        """Note that etcd has carried out a write."""
        self.proven = True

    def token(self, login: Callable[[Body], str]) -> str:
        """Return the user's authentication token. Log in first if it is missing."""
        with self._lock:  # one login is enough for all threads
            if self._token is None:
                self._token = login({"name": self.address.user, "password": self._password})
            return self._token

    def forget(self, token: str) -> None:
        """Drop an authentication token that etcd refused, unless another thread has replaced it."""
        with self._lock:
            if self._token == token:
                self._token = None


def member_at(endpoint: str, secure: bool, session: requests.Session) -> Etcd3Client:
    host, port = split_endpoint(endpoint)
    return Etcd3Client(host, port, "https" if secure else "http", api_path=_API, session=session)


class StreamInterrupt:
    """End a stream from another thread."""

    def __init__(self) -> None:
        self.used = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def use(self) -> None:
        """End the stream now, or as soon as it starts."""
        with self._lock:
            self.used = True
            self._shut_down()

    def arm(self, fd: int) -> None:
        """Set the connection to end, by its descriptor."""
        with self._lock:
            self._socket = socket.socket(fileno=os.dup(fd))
            if self.used:
                self._shut_down()

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            self._socket = None

    def _shut_down(self) -> None:
        if self._socket is not None:
            try:
                # Ends the connection, not only this descriptor, so that the thread that reads it wakes.
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                return  # it is closed already


# ---- Errors of etcd, reduced to the few cases that a client distinguishes

INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED = 3, 5, 6, 7
FAILED_PRECONDITION, OUT_OF_RANGE, UNAUTHENTICATED = 9, 11, 16
_ANSWERS = frozenset({INVALID_ARGUMENT, NOT_FOUND, ALREADY_EXISTS, FAILED_PRECONDITION, OUT_OF_RANGE})
"""gRPC codes for errors in the request. All other codes are failures of the member."""

_PARTS = frozenset({"header", "result", "token"})
"""Every answer has one of these fields."""

CLOSED = "the connection was closed"
_NOT_ETCD = "the server is not an etcd of version 3.4 or later"
_BROKEN = (
    ConnectionResetError,
    BrokenPipeError,
    ssl.SSLEOFError,
    ssl.SSLZeroReturnError,
    ssl.SSLSyscallError,
)


class Unreachable(Exception):
    """No member could answer. The request may be repeated. `str` is for users."""


class StreamEnded(Exception):
    """The member or the network ended the stream. Another attempt may succeed."""


class UnknownOutcome(Exception):
    """A request that must not be repeated was sent and not answered."""


class Rejected(Exception):
    """etcd refused the request. `code` is the gRPC code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Denied(Exception):
    """etcd refused the user (password, permissions), or a request that is too large."""


class MemberError(Exception):
    """One member failed.

    `sent` means that the request may have arrived. `fatal` means that another attempt will not help.
    """

    def __init__(self, why: str, *, sent: bool = True, fatal: bool = False) -> None:
        super().__init__(why)
        self.sent = sent
        self.fatal = fatal


def error_in(text: str) -> Exception:
    """Return the error in the body of an HTTP answer."""
    try:
        return _error(json.loads(text))
    except (ValueError, KeyError, TypeError):
        return MemberError(_NOT_ETCD, fatal=True)


def message(answer: object) -> Document:
    """Check an answer, or a message of a stream, and return it. Raises its error, as `error_in` returns
    it.
    """
    if not isinstance(answer, dict):
        raise MemberError(_NOT_ETCD, fatal=True)
    if isinstance(answer.get("error"), dict):
        raise _error(answer["error"])
    if not answer.keys() & _PARTS:
        raise MemberError(_NOT_ETCD, fatal=True)
    return answer


def _error(error: Fields) -> Exception:
    code = int(error.get("grpc_code") or error["code"])
    words = str(error["message"]).removeprefix("etcdserver: ")
    if code == UNAUTHENTICATED or "auth store is old" in words:
        return Rejected(UNAUTHENTICATED, words)
    if code == PERMISSION_DENIED or "user name is empty" in words or "too large" in words:
        return Denied(words)
    return Rejected(code, words) if code in _ANSWERS else MemberError(words)


def member_error(error: BaseException, seconds: float) -> MemberError:
    """Return the reason why no answer came within `seconds`."""
    causes = list(_causes(error))
    sent = not any(isinstance(cause, ConnectTimeout | NewConnectionError) for cause in causes)
    for cause in causes:
        if isinstance(cause, _BROKEN):
            return MemberError(CLOSED, sent=sent)
        if isinstance(cause, ssl.SSLError):
            return MemberError(f"TLS failed: {_tls(cause)}", sent=False, fatal=True)
        if isinstance(cause, TimeoutError):
            return MemberError(f"no answer within {seconds:.2g} s", sent=sent)
        if isinstance(cause, OSError) and cause.strerror:
            return MemberError(cause.strerror, sent=sent)
        if isinstance(cause, ValueError):
            return MemberError(_NOT_ETCD, fatal=True)
    if type(error) is OSError:  # requests raises it if a certificate file is missing
        return MemberError(str(error), sent=False, fatal=True)
    return MemberError(CLOSED, sent=sent)


def _tls(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid ({error.verify_message})"
    return (error.reason or str(error)).lower().replace("_", " ")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and its causes, nearest first, regardless of how the libraries wrapped them."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        inside = (*each.args, getattr(each, "reason", None), each.__cause__, each.__context__)
        waiting += [other for other in inside if isinstance(other, BaseException)]


# ---- Requests to the cluster

_Answer = TypeVar("_Answer")

_CHUNK = 1 << 20  # bytes at most; data that have arrived are not held back for more
_LOGIN_TIMEOUT = 10.0  # seconds; checking a password is slow on purpose


class Client:
    """The requests of one thread. They go to one member until that member fails.

    Raises Unreachable, UnknownOutcome, Rejected, and LaunchError if another attempt will not help. Every
    request ends by `deadline` (time.monotonic), if it is set.
    """

    def __init__(self, access: Access, first: int) -> None:
        self.deadline: float | None = None
        self._access = access
        self._names = access.address.endpoints
        address = access.address
        self._session = requests.Session()
        self._session.trust_env = False  # ignores proxies, certificates and .netrc in the environment
        self._session.verify = address.cacert or True
        self._session.cert = (address.cert, address.key) if address.key else address.cert or None
        self._members = [member_at(name, address.secure, self._session) for name in self._names]
        self._at = first % len(self._members)

    def ask(self, path: str, body: Body, *, repeat: bool = True) -> Body:
        """Return the first answer of a member. `repeat` means that the request may be sent twice."""
        return self._in_turn(lambda member: self._post(member, path, body), repeat)

    def follow(
        self, path: str, requests_: list[Body], patience: float, interrupt: StreamInterrupt
    ) -> Iterator[Body]:
        """Yield the messages of a stream, until the stream was silent for `patience` seconds or `interrupt`
        was used.

        Raises StreamEnded if the stream ends otherwise.
        """
        text = in_one_read(requests_)
        response = self._in_turn(lambda member: self._stream(member, path, text, patience), repeat=True)
        with closing(response), closing(interrupt):
            try:
                interrupt.arm(response.raw.fileno())
                for line in response.iter_lines(chunk_size=_CHUNK):
                    if line:
                        yield message(json.loads(line))["result"]
            except (OSError, ValueError, KeyError, MemberError, Denied) as error:
                if interrupt.used or any(isinstance(cause, TimeoutError) for cause in _causes(error)):
                    return
                raise StreamEnded(str(error)) from None
            if not interrupt.used:
                raise StreamEnded(CLOSED)

    @property
    def name(self) -> str:
        """The member that gets the requests now."""
        return self._names[self._at]

    def close(self) -> None:
        self._session.close()

    def _in_turn(self, act: Callable[[Etcd3Client], _Answer], repeat: bool) -> _Answer:
        errors: dict[int, MemberError] = {}
        for _ in self._members:
            at = self._at
            try:
                return self._as_user(act, self._members[at])
            except Denied as error:
                raise self._denied(str(error)) from None
            except MemberError as error:
                errors[at] = error
                self._at = (at + 1) % len(self._members)
                if error.sent and not repeat:
                    raise UnknownOutcome(f"{self._names[at]}: {error}") from None
        why = "; ".join(f"{self._names[at]}: {self._words(errors[at])}" for at in sorted(errors))
        if all(each.fatal for each in errors.values()) and not self._access.proven:
            raise LaunchError(f"no usable etcd: {why}", hint="check the address and its certificates")
        raise Unreachable(why)

    def _words(self, each: MemberError) -> str:
        if str(each) != CLOSED or self._access.proven:
            return str(each)
        guess = "is TLS disabled there?" if self._access.address.secure else "does it require TLS?"
        return f"{each} ({guess})"

    def _denied(self, words: str) -> Exception:
        everywhere = ",".join(self._names)
        if "too large" in words:
            return LaunchError(
                f"the etcd at {everywhere} refused the request: {words}",
                hint="start it with a larger --max-request-bytes",
            )
        if self._access.proven:
            return Unreachable(f"{everywhere}: the request was refused: {words}")
        user = self._access.address.user
        hint = f"check {PASSWORD_VARIABLE} and the permissions of {user}" if user else "add '?user=NAME'"
        return LaunchError(f"the etcd at {everywhere} refused the request: {words}", hint=hint)

    def _as_user(self, act: Callable[[Etcd3Client], _Answer], member: Etcd3Client) -> _Answer:
        if not self._access.address.user:
            return act(member)
        token = self._authorize(member)
        try:
            return act(member)
        except Rejected as error:
            if error.code != UNAUTHENTICATED:
                raise
            self._access.forget(token)  # tokens expire after some minutes, and with the etcd that issued them
            self._authorize(member)
        try:
            return act(member)
        except Rejected as error:
            raise MemberError(str(error), sent=False) if error.code == UNAUTHENTICATED else error from None

    def _authorize(self, member: Etcd3Client) -> str:
        token = self._access.token(lambda body: self._login(member, body))
        if token:
            self._session.headers["Authorization"] = token
        return token

    def _login(self, member: Etcd3Client, body: Body) -> str:
        self._session.headers.pop("Authorization", None)
        try:
            return str(self._post(member, "/auth/authenticate", body, _LOGIN_TIMEOUT)["token"])
        except Rejected as error:
            if "not enabled" in str(error):
                return ""
            raise Denied(str(error)) from None
        except MemberError as error:
            raise MemberError(str(error), sent=False, fatal=error.fatal) from None

    def _post(self, member: Etcd3Client, path: str, body: Body, timeout: float = 0.0) -> Body:
        member.timeout = seconds = self._patience(timeout or self._access.timeout)
        try:
            return message(member.post(member.get_url(path), json=body))
        except Etcd3Exception as error:
            raise _from_etcd3gw(error, seconds) from None
        except (requests.RequestException, OSError) as error:
            raise member_error(error, seconds) from None

    def _stream(self, member: Etcd3Client, path: str, text: str, patience: float) -> requests.Response:
        timeout = (self._patience(self._access.timeout), patience)
        try:
            response = self._session.post(member.get_url(path), data=text, stream=True, timeout=timeout)
            if response.ok:
                return response
            with closing(response):
                raise error_in(response.text)
        except (requests.RequestException, OSError) as error:
            raise member_error(error, max(timeout)) from None

    def _patience(self, timeout: float) -> float:
        left = timeout if self.deadline is None else self.deadline - time.monotonic()
        if left <= 0:
            raise MemberError("no time is left", sent=False)
        return min(timeout, left)


def _from_etcd3gw(error: Etcd3Exception, seconds: float) -> Exception:
    """Convert an error of etcd3gw. It uses one class for an error answer of etcd and a failed connection."""
    failed_connection = isinstance(error.__context__, requests.RequestException)
    return member_error(error, seconds) if failed_connection else error_in(error.detail_text or "")

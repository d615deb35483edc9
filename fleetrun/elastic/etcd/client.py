"""Questions to an etcd cluster, one after the other: which member to ask, and when to ask the next. Blocks:
belongs to a thread. Knows no store and no loop.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import requests
from etcd3gw import Etcd3Client
from etcd3gw.exceptions import Etcd3Exception

from fleetrun.elastic.etcd.access import Access, member_at, session_with
from fleetrun.elastic.etcd.cut import Cut
from fleetrun.elastic.etcd.errors import (
    CLOSED,
    UNAUTHENTICATED,
    Denied,
    Rejected,
    StreamEnded,
    Trouble,
    UnknownFate,
    Unreachable,
    meaning,
    message,
    timed_out,
    trouble,
)
from fleetrun.elastic.etcd.url import PASSWORD_VARIABLE
from fleetrun.elastic.etcd.wire import Body, in_one_reading
from fleetrun.errors import LaunchError

_Answer = TypeVar("_Answer")

_CHUNK = 1 << 20  # bytes at most: what has come is not held back for more
_LOGIN_TIMEOUT = 10.0  # seconds: etcd makes checking a password expensive on purpose


class Client:
    """One thread's way to the cluster. It stays with a member until that one fails.

    Raises Unreachable, UnknownFate, Rejected, and LaunchError for what cannot heal. No question takes longer
    than until `deadline` (time.monotonic), if there is one.
    """

    def __init__(self, access: Access, first: int) -> None:
        self.deadline: float | None = None
        self._access = access
        self._names = access.address.endpoints
        self._session = session_with(access.address)
        self._members = [member_at(name, access.address.secure, self._session) for name in self._names]
        self._at = first % len(self._members)

    def ask(self, path: str, body: Body, *, repeat: bool = True) -> Body:
        """The answer of the first member that gives one. `repeat`: asking twice does no harm."""
        return self._in_turn(lambda member: self._post(member, path, body), repeat)

    def follow(self, path: str, questions: list[Body], patience: float, cut: Cut) -> Iterator[Body]:
        """The messages of a stream, until nothing came for `patience` seconds or `cut` was used. Raises
        StreamEnded when it ends otherwise.
        """
        text = in_one_reading(questions)
        response = self._in_turn(lambda member: self._stream(member, path, text, patience), repeat=True)
        with closing(response), closing(cut):
            try:
                cut.arm(response.raw.fileno())
                for line in response.iter_lines(chunk_size=_CHUNK):
                    if line:
                        yield message(json.loads(line))["result"]
            except (OSError, ValueError, KeyError, Trouble, Denied) as error:
                if cut.used or timed_out(error):
                    return
                raise StreamEnded(str(error)) from None
            if not cut.used:
                raise StreamEnded(CLOSED)

    @property
    def name(self) -> str:
        """The member that is asked now."""
        return self._names[self._at]

    def close(self) -> None:
        self._session.close()

    def _in_turn(self, act: Callable[[Etcd3Client], _Answer], repeat: bool) -> _Answer:
        troubles: dict[int, Trouble] = {}
        for _ in self._members:
            at = self._at
            try:
                return self._as_user(act, self._members[at])
            except Denied as error:
                raise self._denied(str(error)) from None
            except Trouble as each:
                troubles[at] = each
                self._at = (at + 1) % len(self._members)
                if each.sent and not repeat:
                    raise UnknownFate(f"{self._names[at]}: {each}") from None
        why = "; ".join(f"{self._names[at]}: {self._words(troubles[at])}" for at in sorted(troubles))
        if all(each.fatal for each in troubles.values()) and not self._access.proven:
            raise LaunchError(
                f"no etcd that can be used: {why}", hint="check the address and its certificates"
            )
        raise Unreachable(why)

    def _words(self, each: Trouble) -> str:
        if str(each) != CLOSED or self._access.proven:
            return str(each)
        return f"{each} (does it speak {'no ' if self._access.address.secure else ''}TLS?)"

    def _denied(self, words: str) -> Exception:
        everywhere = ",".join(self._names)
        if "too large" in words:
            return LaunchError(
                f"the etcd at {everywhere} refuses: {words}",
                hint="start it with a larger --max-request-bytes",
            )
        if self._access.proven:
            return Unreachable(f"{everywhere}: it refuses: {words}")
        user = self._access.address.user
        hint = f"check {PASSWORD_VARIABLE} and what {user} may do" if user else "name a user by '?user=NAME'"
        return LaunchError(f"the etcd at {everywhere} refuses: {words}", hint=hint)

    def _as_user(self, act: Callable[[Etcd3Client], _Answer], member: Etcd3Client) -> _Answer:
        if not self._access.address.user:
            return act(member)
        token = self._authorize(member)
        try:
            return act(member)
        except Rejected as error:
            if error.code != UNAUTHENTICATED:
                raise
            self._access.forget(token)  # tokens end with the etcd that gave them, and after some minutes
            self._authorize(member)
        try:
            return act(member)
        except Rejected as error:
            raise Trouble(str(error), sent=False) if error.code == UNAUTHENTICATED else error from None

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
        except Trouble as each:
            raise Trouble(str(each), sent=False, fatal=each.fatal) from None

    def _post(self, member: Etcd3Client, path: str, body: Body, timeout: float = 0.0) -> Body:
        member.timeout = seconds = self._patience(timeout or self._access.timeout)
        try:
            return message(member.post(member.get_url(path), json=body))
        except Etcd3Exception as error:
            raise _from_etcd3gw(error, seconds) from None
        except (requests.RequestException, OSError) as error:
            raise trouble(error, seconds) from None

    def _stream(self, member: Etcd3Client, path: str, text: str, patience: float) -> requests.Response:
        timeout = (self._patience(self._access.timeout), patience)
        try:
            response = self._session.post(member.get_url(path), data=text, stream=True, timeout=timeout)
            if response.ok:
                return response
            with closing(response):
                raise meaning(response.text)
        except (requests.RequestException, OSError) as error:
            raise trouble(error, max(timeout)) from None

    def _patience(self, timeout: float) -> float:
        left = timeout if self.deadline is None else self.deadline - time.monotonic()
        if left <= 0:
            raise Trouble("there is no time left", sent=False)
        return min(timeout, left)


def _from_etcd3gw(error: Etcd3Exception, seconds: float) -> Exception:
    """It puts both kinds into one: answers, whose text is JSON, and what went wrong on the way."""
    on_the_way = isinstance(error.__context__, requests.RequestException)
    return trouble(error, seconds) if on_the_way else meaning(error.detail_text or "")

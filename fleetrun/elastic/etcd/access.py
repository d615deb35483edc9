"""What all threads of one store share of an etcd: address, certificate files, the token of a user; and
how a thread gets to a member. Asks nothing by itself.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable

import requests
from etcd3gw import Etcd3Client

from fleetrun.elastic.etcd.url import EtcdAddress
from fleetrun.elastic.etcd.wire import Body
from fleetrun.errors import UsageError

_API = "/v3/"  # 3.4 and later; earlier ones have /v3beta/ and /v3alpha/


class Access:
    """What all threads of one store share: the cluster, their patience, and the token of their user.

    `proven` becomes true with the first write that etcd took. From then on nothing is hopeless: what worked
    once (a certificate, a password) can be put right while the job goes on.
    """

    def __init__(self, address: EtcdAddress, password: str, timeout: float) -> None:
        _check_files(address)
        self.address = address
        self.timeout = timeout
        self.proven = False
        self._password = password
        self._token: str | None = None
        self._lock = threading.Lock()

    def prove(self) -> None:
        self.proven = True

    def token(self, login: Callable[[Body], str]) -> str:
        with self._lock:  # one login serves all threads
            if self._token is None:
                self._token = login({"name": self.address.user, "password": self._password})
            return self._token

    def forget(self, token: str) -> None:
        with self._lock:
            if self._token == token:
                self._token = None


def _check_files(address: EtcdAddress) -> None:
    for name in filter(None, (address.cacert, address.cert, address.key)):
        if not os.access(name, os.R_OK):
            raise UsageError(f"{name}, named in the address of the etcd, cannot be read")
    context = ssl.create_default_context()
    try:
        if address.cacert:
            context.load_verify_locations(cafile=address.cacert)
        if address.cert:
            # an encrypted key must not ask at the terminal: with a password, a wrong one, it is an error
            context.load_cert_chain(address.cert, address.key or None, password="-")
    except OSError as error:  # ssl.SSLError is one
        raise UsageError(
            f"the certificate files in the address of the etcd cannot be used: {error}",
            hint="they must be PEM files, cert and key must belong together, and the key not be encrypted",
        ) from None


def session_with(address: EtcdAddress) -> requests.Session:
    session = requests.Session()
    session.trust_env = False  # no proxy, no certificates from elsewhere, no .netrc
    session.verify = address.cacert or True
    session.cert = (address.cert, address.key) if address.key else address.cert or None
    return session


def member_at(endpoint: str, secure: bool, session: requests.Session) -> Etcd3Client:
    host, _, port = endpoint.rpartition(":")
    return Etcd3Client(
        host.strip("[]"), int(port), "https" if secure else "http", api_path=_API, session=session
    )

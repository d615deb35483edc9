"""Access to an etcd: TLS, users, servers that are not an etcd, proxies; and which errors are final."""

from __future__ import annotations

import socket
import socketserver
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from fleetrun.elastic.etcd.store import EtcdStore
from fleetrun.elastic.store import ABSENT
from fleetrun.errors import UsageError
from fleetrun.pod.loop import Loop
from tests.elastic.conformance import Answers, Recorder, run_for, until
from tests.elastic.test_etcd_store import kept, renewed, troubles
from tests.support.cluster import reserved_endpoints
from tests.support.etcd import Certificates, Etcd, etcd_cluster, needs_etcd, needs_openssl

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
LEASE = 100.0
"""Its end is no reason for anything here; and an etcd may take some seconds over an answer."""
PASSWORD = "FLEETRUN_ETCD_PASSWORD"

Try = Callable[..., Recorder]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def attempt(loop: Loop) -> Iterator[Try]:
    """`attempt(url, environ)`: an open client that mirrors `k/` and has asked for one write."""
    stores = []

    def make(url: str, environ: dict[str, str] | None = None, lease: float = LEASE) -> Recorder:
        store = EtcdStore(loop, url, job_id="job", node_id="a", lease=lease, environ=environ or {})
        stores.append(store)
        seen = Recorder(store)
        store.watch("k/")
        store.put("k/1", b"x", leased=True)
        store.open(seen)
        return seen

    yield make
    for store in stores:
        store.close()


def works(loop: Loop, seen: Recorder) -> None:
    until(loop, lambda: seen.errors or (seen.ups and seen.values == {"k/1": b"x"}))
    assert kept(seen)
    assert troubles(seen) == []


def refusal(loop: Loop, seen: Recorder) -> str:
    """What it was told; once, and nothing else after it."""
    until(loop, lambda: seen.errors)
    told = len(seen.downs)
    run_for(loop, 0.2)
    assert (len(seen.errors), len(seen.downs), seen.ups) == (1, told, [])
    return seen.errors[0].message


# ---- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.made(tmp_path_factory.mktemp("tls") / "theirs")


@pytest.fixture(scope="module")
def tls_etcd(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Etcd]:
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), certificates=certificates) as (member,):
        yield member


def tls_url(etcd: Etcd, ca: Certificates, client: Certificates | None) -> str:
    own = "" if client is None else f"&cert={client['client.pem']}&key={client['client.key']}"
    return f"{etcd.url}?cacert={ca['ca.pem']}{own}"


@needs_etcd
@needs_openssl
@pytest.mark.etcd
class TestTls:
    def test_with_good_certificates(self, loop, attempt, tls_etcd, certificates):
        works(loop, attempt(tls_url(tls_etcd, certificates, certificates)))

    def test_closing_ends_the_lease_through_tls_too(self, loop, attempt, tls_etcd, certificates):
        url = tls_url(tls_etcd, certificates, certificates)
        first, second = attempt(url), attempt(url)
        until(loop, lambda: first.values and second.values)
        second.store.close()
        until(loop, lambda: not first.values)

    def test_a_server_of_another_authority(self, loop, attempt, tls_etcd, strangers, certificates):
        words = refusal(loop, attempt(tls_url(tls_etcd, strangers, certificates)))
        assert f"{tls_etcd.endpoint}: TLS failed: its certificate" in words

    def test_a_client_without_a_certificate(self, loop, attempt, tls_etcd, certificates):
        words = refusal(loop, attempt(tls_url(tls_etcd, certificates, None)))
        assert "TLS failed" in words
        assert "certificate" in words

    def test_a_client_of_another_authority(self, loop, attempt, tls_etcd, certificates, strangers):
        words = refusal(loop, attempt(tls_url(tls_etcd, certificates, strangers)))
        assert "TLS failed" in words

    def test_a_server_that_speaks_no_tls(self, loop, attempt, shared_etcd, certificates):
        seen = attempt(tls_url(shared_etcd, certificates, certificates))
        until(loop, lambda: troubles(seen))
        assert troubles(seen)[0].endswith("the connection was closed (is TLS disabled there?)")

    def test_a_client_that_speaks_no_tls(self, loop, attempt, tls_etcd):
        seen = attempt(tls_etcd.url)
        until(loop, lambda: troubles(seen))
        assert troubles(seen) == [f"{tls_etcd.endpoint}: the connection was closed (does it require TLS?)"]

    def test_one_good_member_is_enough(self, loop, attempt, tls_etcd, shared_etcd, certificates):
        url = f"{shared_etcd.url},{tls_url(tls_etcd, certificates, certificates).removeprefix('etcd://')}"
        works(loop, attempt(url))


def test_files_that_cannot_be_read(loop, tmp_path):
    with pytest.raises(UsageError, match=r"missing\.pem, named in the address of the etcd, cannot be read"):
        EtcdStore(loop, f"etcd://a?cacert={tmp_path}/missing.pem", job_id="j", node_id="n", lease=LEASE)


def test_files_that_are_no_certificates(loop, tmp_path):
    file = tmp_path / "x.pem"
    file.write_text("nothing\n")
    for name in ("cacert", "cert"):
        with pytest.raises(UsageError, match="cannot be used"):
            EtcdStore(loop, f"etcd://a?{name}={file}", job_id="j", node_id="n", lease=LEASE)


# ---- users


@pytest.fixture
def etcd_with_users(tmp_path: Path) -> Iterator[Etcd]:
    """`me` may do everything under /fleetrun/job/, `reader` may read it."""
    with etcd_cluster(tmp_path) as (member,):
        for name, rights in (("root", None), ("me", 2), ("reader", 0)):
            member.ask("/auth/user/add", {"name": name, "password": f"secret of {name}"})
            member.ask("/auth/role/add", {"name": name})
            member.ask("/auth/user/grant", {"user": name, "role": name})
            if rights is not None:
                span = {"key": "L2ZsZWV0cnVuL2pvYi8=", "range_end": "L2ZsZWV0cnVuL2pvYjA="}
                member.ask("/auth/role/grant", {"name": name, "perm": {"permType": rights, **span}})
        member.ask("/auth/enable", {})
        yield member


def set_password(etcd: Etcd, password: str) -> None:
    """Of `me`."""
    root = etcd.ask("/auth/authenticate", {"name": "root", "password": "secret of root"})["token"]
    etcd.ask("/auth/user/changepw", {"name": "me", "password": password}, root)


@needs_etcd
@pytest.mark.etcd
class TestUsers:
    def test_the_right_password(self, loop, attempt, etcd_with_users):
        works(loop, attempt(f"{etcd_with_users.url}?user=me", {PASSWORD: "secret of me"}))

    def test_a_wrong_password(self, loop, attempt, etcd_with_users):
        seen = attempt(f"{etcd_with_users.url}?user=me", {PASSWORD: "hunter2"})
        words = refusal(loop, seen)
        assert "authentication failed, invalid user ID or password" in words
        assert "hunter2" not in words
        assert PASSWORD in str(seen.errors[0].hint)

    def test_no_user(self, loop, attempt, etcd_with_users):
        seen = attempt(etcd_with_users.url)
        assert "user name is empty" in refusal(loop, seen)
        assert "?user=" in str(seen.errors[0].hint)

    def test_a_user_who_may_only_read(self, loop, attempt, etcd_with_users):
        seen = attempt(f"{etcd_with_users.url}?user=reader", {PASSWORD: "secret of reader"})
        until(loop, lambda: seen.errors)
        assert "permission denied" in seen.errors[0].message

    def test_another_job_is_not_his(self, loop, etcd_with_users):
        store = EtcdStore(
            loop, f"{etcd_with_users.url}?user=me", job_id="job1", node_id="a", lease=LEASE,
            environ={PASSWORD: "secret of me"},
        )  # fmt: skip
        seen = Recorder(store)
        store.watch("k/")
        store.open(seen)
        assert "permission denied" in refusal(loop, seen)

    def test_an_etcd_without_users_takes_anybody(self, loop, attempt, shared_etcd):
        works(loop, attempt(f"{shared_etcd.url}?user=me", {PASSWORD: "x"}))

    def test_a_token_that_has_ended_is_replaced(self, loop, attempt, etcd_with_users):
        seen = attempt(f"{etcd_with_users.url}?user=me", {PASSWORD: "secret of me"}, lease=12.0)
        works(loop, seen)
        set_password(etcd_with_users, "secret of me")  # the same; but it ends all tokens
        answers = Answers()
        seen.store.put("k/2", b"y", expect=ABSENT, then=answers)
        until(loop, lambda: answers == [True] and len(seen.values) == 2)
        renewed(loop, seen.store)
        assert kept(seen)
        assert (troubles(seen), len(seen.values)) == ([], 2)

    def test_what_worked_once_is_never_hopeless(self, loop, attempt, etcd_with_users):
        """The password was changed, perhaps by mistake: training continues, and it may be corrected."""
        seen = attempt(f"{etcd_with_users.url}?user=me", {PASSWORD: "secret of me"})
        works(loop, seen)
        set_password(etcd_with_users, "another")
        seen.store.put("k/2", b"y")
        until(loop, lambda: any("authentication failed" in why for why in seen.downs))
        ups = len(seen.ups)
        set_password(etcd_with_users, "secret of me")
        until(loop, lambda: len(seen.ups) > ups and "k/2" in seen.values)
        assert seen.errors == []


# ---- servers that are not an etcd


class Stranger(BaseHTTPRequestHandler):
    """A server for something else; or an etcd of version 2, which knows no /v3/ either."""

    code, body = 404, b"404 page not found\n"

    def do_POST(self) -> None:
        body = self.body
        self.send_response(self.code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture(
    params=[(404, b"404 page not found\n"), (200, b"<html>"), (200, b"{}"), (500, b"oh"), (405, b"")]
)
def stranger(request: pytest.FixtureRequest) -> Iterator[str]:
    code, body = request.param
    server = HTTPServer(("127.0.0.1", 0), type("Stranger", (Stranger,), {"code": code, "body": body}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_etcd_that_is_too_old_or_none(loop, attempt, stranger):
    words = refusal(loop, attempt(f"etcd://{stranger}"))
    assert f"{stranger}: the server is not an etcd of version 3.4 or later" in words


@pytest.mark.parametrize("end", ["a reset", "an end"])
def test_a_server_that_answers_nothing(loop, attempt, end):
    """Which of the two an etcd with TLS does to a request without, depends on what it had read."""

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            linger = struct.pack("ii", end == "a reset", 0)
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.request.close()

    with socketserver.TCPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        endpoint = f"127.0.0.1:{server.server_address[1]}"
        seen = attempt(f"etcd://{endpoint}")
        until(loop, lambda: troubles(seen))
        server.shutdown()
        thread.join()
    assert troubles(seen)[0] == f"{endpoint}: the connection was closed (does it require TLS?)"


def test_names_that_cannot_be_resolved(loop, attempt):
    seen = attempt("etcd://no-such-host.invalid:2379")
    until(loop, lambda: seen.downs)
    assert seen.downs[0].startswith("no-such-host.invalid:2379: ")
    assert seen.errors == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_a_thread_is_not_waited_for(loop):
    with reserved_endpoints(1) as (unserved,):
        store = EtcdStore(loop, f"etcd://{unserved}", job_id="job", node_id="a", lease=LEASE)
        seen = Recorder(store)
        store._watcher._prefixes = (None,)  # no text: it cannot be asked for
        store.open(seen)
        until(loop, lambda: seen.errors)
        assert seen.errors[0].message == "the client of the etcd has failed"
        store._watch_thread.join()  # the traceback comes after the news


# ---- what surrounds it


@needs_etcd
@pytest.mark.etcd
def test_proxies_are_not_for_etcd(loop, attempt, shared_etcd, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    works(loop, attempt(shared_etcd.url))


def test_without_the_package_it_says_how_to_get_it():
    code = (
        "import sys; sys.modules['etcd3gw'] = None\n"
        "from fleetrun.errors import NotSupportedError\n"
        "try:\n    import fleetrun.elastic.etcd.store\n"
        "except NotSupportedError as error:\n    print(error.message, error.hint, sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    message, hint = done.stdout.splitlines()
    assert "etcd3gw" in message
    assert hint == "pip install 'fleetrun[etcd]'"

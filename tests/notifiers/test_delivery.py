"""How often and when a notification is tried again, and what is told of it when it is given up."""

import io
import json
import threading
import time
import tracemalloc

import pytest

from fleetrun import plugins
from fleetrun.notifiers.base import Undelivered
from fleetrun.notifiers.command import Command
from fleetrun.notifiers.process import Delivery, deliver, run
from fleetrun.notifiers.webhook import Webhook as Notifier
from fleetrun.notifiers.webhook import retry_after
from tests.support.webhook import PATH, Webhook

MESSAGE = {"event": "failure", "text": "a &lt; b", "sentence": "a < b"}


def tried(*outcomes, patient=True):
    """Why it was given up, and the pauses before further attempts."""
    left, pauses = list(outcomes), []

    def pause(seconds):
        pauses.append(seconds)
        return patient

    return deliver(lambda: left.pop(0), pause), pauses


@pytest.mark.parametrize(
    ("outcomes", "why", "pauses"),
    [
        ([None], None, []),
        ([OSError("x"), None], None, [1]),
        ([Undelivered("503", after=7), Undelivered("503"), None], None, [7, 2]),
        ([Undelivered("503", after=3600), None], None, [60]),
        ([Undelivered("404", again=False)], "404", []),
        ([OSError("a"), Undelivered("gone", again=False)], "gone", [1]),
        ([Undelivered("500")] * 4, "500 (4 attempts)", [1, 2, 4]),
        ([ValueError("bad")] * 4, "ValueError: bad (4 attempts)", [1, 2, 4]),
    ],
)
def test_attempts(outcomes, why, pauses):
    assert tried(*outcomes) == (why, pauses)


def test_without_time_for_another_attempt_it_is_given_up():
    assert tried(Undelivered("500", after=30), None, patient=False) == ("500 (1 attempt)", [30])


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("", 0), ("12", 12), (" 3 ", 3), ("soon", 0), ("-1", 0), ("1e9", 0),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10), ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
    ],
)  # fmt: skip
def test_retry_after(text, seconds):
    assert retry_after(text, 1000.0) == seconds


@pytest.mark.parametrize(
    ("answer", "again", "after", "why"),
    [
        (200, None, 0, ""), (204, None, 0, ""),
        (500, True, 0, "the server answered 500"), ((429, 5), True, 5, "the server answered 429"),
        (404, False, 0, "the server answered 404"), (302, False, 0, "the server answered 302"),
        ("close", True, 0, "the server closed the connection"), ("garbage", True, 0, "BadStatusLine"),
    ],
)  # fmt: skip
def test_answers_of_a_webhook(answer, again, after, why):
    with Webhook(answer) as server:
        if again is None:
            Notifier(server.url).send(MESSAGE)
        else:
            with pytest.raises(Undelivered) as raised:
                Notifier(server.url).send(MESSAGE)
            assert (raised.value.again, raised.value.after) == (again, after)
            assert why in raised.value.why
            assert PATH not in raised.value.why
    assert server.posted == [MESSAGE]


def test_no_server_at_all():
    with Webhook() as server:
        url = server.url
    with pytest.raises(Undelivered, match="Connection refused") as raised:
        Notifier(url).send(MESSAGE)
    assert raised.value.again


# ---- the process


def ran(notifiers, *messages):
    """The warnings of it for these messages."""
    written = []
    lines = b"".join(json.dumps(each).encode() + b"\n" for each in (notifiers, *messages))
    run(io.BytesIO(lines), written.append)
    return [json.loads(line)["warning"] for line in written]


def test_one_notifier_does_not_wait_for_another(tmp_path):
    begun = time.monotonic()
    with Webhook("hang") as slow, Webhook() as quick:
        listed = [["webhook", slow.url, slow.host], ["webhook", quick.url, quick.host]]
        thread = threading.Thread(target=ran, args=(listed, MESSAGE, MESSAGE), daemon=True)
        thread.start()
        while len(quick.posted) < 2:
            assert time.monotonic() < begun + 60
            time.sleep(0.005)
        assert len(slow.posted) <= 1
    thread.join()  # it tries again, and the next server may get this port


def test_what_cannot_be_told_is_a_warning_without_the_secret():
    with Webhook(404) as server:
        (warning,) = ran([["webhook", server.url, server.host]], MESSAGE)
    assert warning == f"cannot notify {server.host} of the failure: the server answered 404"


class Talkative:
    def send(self, message):
        raise ValueError("cannot reach sms://kept-secret")


@pytest.mark.slow
def test_what_a_notifier_of_another_package_raises_has_no_secret_when_it_is_told():
    told, over = [], threading.Event()
    delivery = Delivery(Talkative(), "sms", "kept-secret", told.append, over)
    over.set()
    delivery.put(MESSAGE)
    delivery.finish()
    assert told == ["cannot notify sms of the failure: ValueError: cannot reach sms://... (3 attempts)"]


class Exits:
    def __init__(self, argument):
        if argument == "at once":
            raise SystemExit(3)

    def send(self, message):
        raise SystemExit("no such number")


@pytest.mark.slow
def test_one_that_calls_exit_failed(monkeypatch):
    monkeypatch.setitem(plugins.IN_TREE["notifiers"], "exits", f"{__name__}:Exits")
    told = ran([["exits", "at once", "exits"], ["exits", "later", "exits"]], MESSAGE)
    assert told == [
        "the notifier 'exits' failed: SystemExit: 3; this notifier sends no notifications",
        "cannot notify exits of the failure: SystemExit: no such number (3 attempts)",
    ]


def test_of_a_command_that_writes_without_end_the_last_is_kept():
    written = Command("head -c 100000000 /dev/zero >&2; echo >&2; echo no mail >&2; exit 3")
    tracemalloc.start()
    try:
        with pytest.raises(Undelivered, match="exit code 3: no mail"):
            written.send(MESSAGE)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_a_notifier_that_there_is_not():
    (warning,) = ran([["sms", "+49", "sms"]], MESSAGE)
    assert warning.startswith("there is no notifier called 'sms'")


@pytest.mark.slow
def test_commands(tmp_path):
    told, name = tmp_path / "told", "command"
    listed = [
        [name, f'echo "$FLEETRUN_EVENT: $FLEETRUN_TEXT" > {told}; cat >> {told}', name],
        [name, "echo no mail >&2; exit 3", name],
        [name, f"test -e {tmp_path}/later || {{ touch {tmp_path}/later; exit 75; }}", name],
    ]
    assert ran(listed, MESSAGE) == ["cannot notify command of the failure: exit code 3: no mail"]
    first, rest = told.read_text().split("\n", 1)
    assert first == "failure: a < b"
    assert json.loads(rest) == MESSAGE
    assert (tmp_path / "later").exists()

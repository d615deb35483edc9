"""The notifier `webhook` posts a message as JSON to a URL, in the format of Slack's incoming webhooks."""

from __future__ import annotations

import http.client
import json
import ssl
from email.utils import parsedate_to_datetime
from time import time
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from fleetrun.aliases import Fields
from fleetrun.notifiers.base import Undelivered

_TIMEOUT = 10.0  # seconds without an answer
_AGAIN = frozenset({408, 425, 429})  # besides all codes from 500 on


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, because a redirected POST would become a GET without the message."""

    def redirect_request(self, *_: object) -> None:
        return None


class Webhook:
    """Posts messages. `argument` is the URL, which is secret. Messages only show its host."""

    def __init__(self, argument: str) -> None:
        self._url = argument
        self._opener = build_opener(_NoRedirects)  # also uses HTTPS_PROXY

    def send(self, message: Fields) -> None:
        data = json.dumps(message).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "fleetrun"}
        request = Request(self._url, data, headers, method="POST")
        try:
            with self._opener.open(request, timeout=_TIMEOUT) as answer:
                answer.read(1)
        except HTTPError as error:
            again = error.code in _AGAIN or error.code >= 500
            after = retry_after(error.headers.get("Retry-After", ""), time())
            error.close()
            raise Undelivered(f"the server answered {error.code}", again=again, after=after) from None
        except URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                why = f"its certificate is not trusted ({error.reason.verify_message}); SSL_CERT_FILE names"
                raise Undelivered(f"{why} a file of authorities to trust", again=False) from None
            raise Undelivered(_reason(error.reason)) from None
        except (OSError, http.client.HTTPException) as error:
            raise Undelivered(_reason(error)) from None


def retry_after(text: str, now: float) -> float:
    """Return the seconds to wait according to Retry-After, a number or a date. 0 if neither."""
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _reason(error: object) -> str:
    """Describe an error without the URL, which some errors contain."""
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT:g} s"
    if isinstance(error, http.client.RemoteDisconnected):
        return "the server closed the connection"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"not an answer of HTTP ({type(error).__name__})" if isinstance(error, Exception) else str(error)

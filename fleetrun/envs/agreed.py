"""A port on which processes agree without a word between them: from a number that all of them know."""

from __future__ import annotations

FIRST_PORT = 20_000
PORT_COUNT = 10_000
"""20000 to 29999: above the services, below the ports that Linux gives to clients (32768 and up)."""


def agreed_port(number: int) -> int:
    """The port for a job's number: neighbouring numbers have different ones."""
    return FIRST_PORT + number % PORT_COUNT

"""Which variables look like secrets, and how they are shown. Everything that prints an environment goes
through here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MASK = "******"
_LOOKS_SECRET = (
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIALS?|AUTH|COOKIE|DSN)(?:_|\d|$)"
    r"|SECRET|PASSW|TOKEN|CREDENTIAL|APIKEY"
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"})
_URL_PASSWORD = r"(://[^/\s:@]*:)[^/\s@]+@"


def masked(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy to show: values of secret-looking names are replaced, passwords inside URLs too."""
    return {
        name: MASK if _is_secret(name) and value else re.sub(_URL_PASSWORD, rf"\1{MASK}@", value)
        for name, value in environ.items()
    }


def _is_secret(name: str) -> bool:
    return name not in _NOT_SECRET and re.search(_LOOKS_SECRET, name) is not None

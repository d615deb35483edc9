"""Choose environment variables for --env by name, pattern or value, and detect names that look secret."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from fleetrun.aliases import Environ, Strings, Texts
from fleetrun.envs.contract import is_owned
from fleetrun.errors import UsageError, similar
from fleetrun.values import frozen_by_name

_LOOKS_SECRET = (
    r"(?i)(?:^|_)(?:API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASS|PWD|CREDENTIALS?|AUTH|COOKIE|DSN)(?:_|\d|$)"
    r"|SECRET|PASSW|TOKEN|CREDENTIAL|APIKEY|ACCOUNTKEY|^(?:FLEETRUN_)?NOTIFY$"
)
_NOT_SECRET = frozenset({"PWD", "OLDPWD", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM"})

JOB_FILE = "FLEETRUN_JOB_FILE"
"""The environment variable with the text of a job file, for a launcher that a scheduler starts."""


def looks_secret(name: str) -> bool:
    """Return True if the value of a variable with this name must stay hidden."""
    return name not in _NOT_SECRET and re.search(_LOOKS_SECRET, name) is not None


@frozen_by_name
class Chosen:
    """The chosen variables with their values.

    `left_out` holds the secrets that a pattern matched, and `unused` the patterns without a match.
    """

    values: Texts
    left_out: Strings = ()
    unused: Strings = ()

    @property
    def remarks(self) -> list[str]:
        """Notices for the user."""
        texts = [f"--env {pattern} matches no environment variable of this shell" for pattern in self.unused]
        if self.left_out:
            names = ", ".join(self.left_out)
            texts.append(f"--env does not pass on {names}, because patterns skip secrets; pass their names")
        return texts


def assignments(words: Iterable[str], options: Texts) -> dict[str, str]:
    """Return the words of the form NAME=VALUE. `options` maps variables of fleetrun to its options.

    Raises UsageError for a variable that the job may not set. It also raises UsageError for a secret, because
    other users can read a command line and a job file.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            continue
        _check_name(name, options)
        if looks_secret(name):
            raise UsageError(
                f"--env {name}=...: the name looks like a secret, and other users can read a command line",
                hint=f"Set the variable in the environment, and pass on its name: --env {name}",
            )
        found[name] = value
    return found


def _check_name(name: str, options: Texts) -> None:
    if name in options:
        raise UsageError(f"--env {name}: this variable sets an option of fleetrun; use --{options[name]}")
    if is_owned(name):
        raise UsageError(f"--env {name}: fleetrun sets this variable for each process")


def chosen(words: Iterable[str], environ: Environ, options: Texts) -> Chosen:
    """Return the variables of `environ` that names and patterns choose.

    A pattern leaves out secrets, options of fleetrun, and variables that fleetrun sets. Raises UsageError for
    a name that is not set, or that the job may not set.
    """
    values: dict[str, str] = {}
    left_out: dict[str, None] = {}
    unused = []
    for word in words:
        if "=" in word:
            continue
        if not any(letter in word for letter in "*?["):
            _check_name(word, options)
            if word not in environ:
                raise UsageError(
                    f"--env {word}: this variable is not set in this shell", hint=_nearby(word, environ)
                )
            values[word] = environ[word]
            continue
        fitting = _fitting(word, environ, options)
        secret = [name for name in fitting if looks_secret(name)]
        left_out |= dict.fromkeys(secret)
        values |= {name: environ[name] for name in fitting if name not in secret}
        if not fitting:
            unused.append(word)
    return Chosen(
        values=values, left_out=tuple(name for name in left_out if name not in values), unused=tuple(unused)
    )


def _fitting(pattern: str, environ: Environ, options: Collection[str]) -> list[str]:
    from fnmatch import fnmatchcase  # late, because few runs have a pattern

    return sorted(
        name for name in environ if fnmatchcase(name, pattern) and name not in options and not is_owned(name)
    )


def _nearby(name: str, environ: Environ) -> str:
    near = similar(name, list(environ), cutoff=0.75)
    return f"Did you mean {near[0]}?" if near else "Export the variable in this shell, or remove the option."

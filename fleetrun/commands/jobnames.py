"""The names of jobs that a shell offers for JOB (Tab): of those that run, and of those that ran here."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

import click

from fleetrun.control.running import running
from fleetrun.record.history import names, records

_PATIENCE = 1.0  # seconds that Tab may take
_NAME = re.compile(r"[\w.-]+")  # that of a job, --job_id


def of_running(_: click.Context, __: click.Parameter, start: str) -> list[str]:
    """Jobs that run on this machine. Several of one name: their pods."""
    there = running(os.environ, _PATIENCE)
    often = Counter(each.job for each in there)
    return _offered([each.job if each.job and often[each.job] == 1 else each.pod for each in there], start)


def of_any(context: click.Context, parameter: click.Parameter, start: str) -> list[str]:
    """Those, and the jobs that have a record in --log_dir, the newest first."""
    there = records(Path(context.params.get("log_dir") or "log"))
    ran = [known[0] for each in there if (known := names(each)) is not None]
    return _offered([*of_running(context, parameter, start), *ran], start)


def _offered(words: list[str], start: str) -> list[str]:
    """Each once; of files that are no records of ours none that a shell would not take as it is."""
    return [word for word in dict.fromkeys(words) if word.startswith(start) and _NAME.fullmatch(word)]

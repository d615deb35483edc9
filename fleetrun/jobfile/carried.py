"""What only a job file can say, on its way to the machines of an engine: as a file of its own, without the
options, which go there as words.
"""

from __future__ import annotations

import os
import string
from collections.abc import Mapping
from pathlib import Path

from fleetrun.envs.filed import parts
from fleetrun.envs.settings import Resolved
from fleetrun.errors import UsageError
from fleetrun.jobfile.writing import create, tables


def words_to_carry(resolved: Resolved) -> Mapping[str, str]:
    """The options as words for other machines. Where a job file has to go along, it is written into the log
    directory, which is there and which the machines share; not with --dry_run.

    Raises UsageError when it cannot be written, or there would be nobody to read it.
    """
    settings, words = resolved.settings, resolved.words
    if "config" not in words:
        return words
    if settings.scheduler == "kubernetes":
        raise UsageError(
            f"{resolved.origins['config']} {settings.config}: its [environment] and [roles] do not go to "
            "kubernetes, whose pods do not see this machine's files",
            hint="Put the job file into the image, and start `fleetrun up FILE` there.",
        )
    token = "".join(string.ascii_lowercase[byte % 26] for byte in os.urandom(6))
    path = Path(settings.log_dir).absolute() / f"{settings.job_id}.{token}.job.toml"
    if not settings.dry_run:
        create(
            str(path), tables(parts(settings), "# What only a job file can say of this launch."), "--log_dir:"
        )
    return {**words, "config": f"--config={path}"}

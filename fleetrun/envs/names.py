"""Names of the contract that more than one side needs."""

from __future__ import annotations

VISIBLE_VARIABLE = {
    "gpu": "CUDA_VISIBLE_DEVICES",
    "xpu": "XPU_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
}

MARK = "FLEETRUN_CONTAINER"
"""Whose process this is: `pod.role.rank`. Everything that a container starts inherits it."""

NOTICE = "FLEETRUN_NOTICE"
"""The file in which a process that is asked to end finds why, and until when it may go on."""

LONG = "PADDLE_BACKUP_ENV_PATH"
"""The file, as JSON, with the variables that are too long for an environment; Paddle's name and custom."""

LONGEST = 120 << 10
"""Bytes of the longest value that stays in the environment; Linux takes 128 KiB for one, name included."""

PROGRESS = "FLEETRUN_PROGRESS"
"""The unix datagram socket at which a process reports its progress; see `trainers.progress`."""

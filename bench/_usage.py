"""What the servers of a job have used, as a trainer on the same machine sees it. Knows /proc.

Servers leave their process ids in files RESULT.server<index>; `usage` reads what the kernel says of them.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def leave_pid(result: str, index: int) -> None:
    Path(f"{result}.server{index}").write_text(str(os.getpid()))


def server_usage(result: str) -> tuple[float, float]:
    """(CPU seconds so far of all servers, peak resident MB of the largest)."""
    cpu, peak = 0.0, 0.0
    for path in Path(result).parent.glob(f"{Path(result).name}.server*"):
        process = Path("/proc") / path.read_text()
        fields = (process / "stat").read_text().rpartition(")")[2].split()
        cpu += (int(fields[11]) + int(fields[12])) / _TICKS
        status = (process / "status").read_text()
        peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) / 1024)
    return cpu, peak


def own_cpu() -> float:
    """CPU seconds so far of this process and its ended children."""
    return sum(os.times()[:4])

"""A launcher for distributed training: starts and watches processes, and never imports torch.

`from fleetrun import fleet` is `from trainers import fleet`, also beside another package named `trainers`.
"""

__version__ = "0.1.0"

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` takes milliseconds to import, and Ctrl-C in it would end in a traceback
    from typing import Any


def __getattr__(name: str) -> "Any":
    if name == "fleet":
        from fleetrun.shadow import load_fleet  # late: the launcher does not need it

        return load_fleet()
    raise AttributeError(f"module 'fleetrun' has no attribute {name!r}")

"""`python -m trainers.ps` compiles the kernels of parameter servers ahead of a job."""

from __future__ import annotations

import time

from trainers.process.log import glog
from trainers.ps.allkernels import use_all


def main() -> None:
    """Compiles everything and logs how long it took."""
    started = time.monotonic()
    use_all()
    glog(f"all kernels are ready, after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()

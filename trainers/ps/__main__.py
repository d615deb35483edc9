"""`python -m trainers.ps` compiles the kernels of parameter servers ahead of a job."""

from __future__ import annotations

import argparse
import time

from trainers.process.log import glog


def main() -> None:
    """Compile all kernels, and log how long the compilation took."""
    about = (
        "Compile the kernels of parameter servers ahead of a job, once on each machine. It takes about a "
        "minute; without it the first job that needs a kernel compiles it."
    )
    argparse.ArgumentParser("python -m trainers.ps", description=about).parse_args()
    from trainers.ps.allkernels import use_all  # import late, because --help does not need the kernels

    started = time.monotonic()
    use_all()
    glog(f"all kernels are ready, after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()

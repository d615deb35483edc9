"""`python -m trainers.ps` compiles the kernels of parameter servers, as the first job on a machine would."""

from __future__ import annotations

import time

from trainers.data.warm import warm_up as warm_data
from trainers.glog import glog
from trainers.ps.tables.warm import warm_up as warm_tables


def main() -> None:
    """Returns when every kernel is on disk, and says how long it took."""
    started = time.monotonic()
    warm_tables(tables=True)
    warm_data()
    glog(f"all kernels are ready, after {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()

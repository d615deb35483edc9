"""For all tests: one thread of computing in each process. Several processes run at once here, and threads
that wait for each other in turn wait for the processors too.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for what tests start

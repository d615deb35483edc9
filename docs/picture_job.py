"""The job in the pictures: three processes that learn nothing, at a steady pace."""

import math
import os
import sys
import time

from trainers import progress

rank = int(os.environ["RANK"])
attempt = int(os.environ["PADDLE_RESTART_COUNT"])
steps = 300 if "fail" in sys.argv else 1200
for step in range(1, steps + 1):
    time.sleep(0.04 + 0.005 * rank)
    loss = 2.3 * math.exp(-step / 120) + 0.1 + 0.02 * math.sin(step / 3 + rank)
    progress.report(step=step, of=steps, samples=32, loss=loss)
    if step % 40 == 0:
        print(f"epoch {step // 40}: loss {loss:.4f}", flush=True)
    if "fail" in sys.argv and attempt == 0 and rank == 1 and step == 120:
        raise RuntimeError("the battery of this machine is empty")

"""Log lines of the runtime."""

import re
import subprocess
import sys
from pathlib import Path

FULL = """
import resource
from trainers.process.log import glog
glog("before")
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (1, limit[1]))
glog("while")
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
glog("after")
"""


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        ended = subprocess.run([sys.executable, "-c", FULL], stderr=log, check=False)
    said = (tmp_path / "log").read_text()
    assert ended.returncode == 0, said
    lines = re.findall(r"^I\d{4} [\d:.]+ \d+ <string>:\d+\] (\w+)$", said, re.MULTILINE)
    assert [each for each in lines if each != "while"] == ["before", "after"]  # Python may keep that line

"""The finder that waits for the import of one module."""

import subprocess
import sys
from pathlib import Path

import fleetrun

INSIDE = Path(fleetrun.__file__).parent / "probe" / "inside"
SCRIPT = """
import sys
from importlib.util import find_spec
sys.path.insert(0, sys.argv[1])
from fleetrun_probe import WhenImported
finder = WhenImported("colorsys", lambda module: print("imported", module.__name__))
sys.meta_path.insert(0, finder)
print(find_spec("colorsys").name, finder in sys.meta_path)
import colorsys
print(finder in sys.meta_path)
"""


def test_it_still_waits_after_somebody_only_looked_for_the_module():
    """A zygote does, before it imports a module of its list."""
    argv = [sys.executable, "-c", SCRIPT, str(INSIDE)]
    printed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert printed.split("\n") == ["colorsys True", "imported colorsys", "False", ""]

"""The lookup of the benches, which are no package."""

import importlib.util
from pathlib import Path
from typing import Any

_PATH = Path(__file__).resolve().parents[2] / "bench" / "_folded.py"
_SPEC = importlib.util.spec_from_file_location("_folded", _PATH)
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
FoldedEmbedding: Any = _MODULE.FoldedEmbedding

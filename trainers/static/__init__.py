"""Train in static style: declare a step once, then feed it and fetch values by an executor.

Static style is no emulation, because nothing is recorded and no graph is built. A `Program` adds the parts of
Paddle's programs (feeds, a loss, an optimizer, values to fetch) to an ordinary torch model. `Executor.run`
checks the feeds, runs the step and returns numpy arrays.

    x = static.data("x", [None, 64], "float32")
    y = static.data("y", [None], "int64")

    def network(model, x, y):
        out = model(x)
        return {"cost": torch.nn.functional.cross_entropy(out, y), "acc": (out.argmax(1) == y).float().mean()}

    program = static.Program(model, [x, y], network, loss="cost", optimizer=optimizer)
    exe = static.Executor("cpu")
    for batch in loader:
        cost, acc = exe.run(program, feed=batch, fetch_list=["cost", "acc"])
"""

from __future__ import annotations

from typing import Any

from trainers.errors import NotSupportedError
from trainers.static.executor import Executor
from trainers.static.program import Data, Program, data

__all__ = ["Data", "Executor", "Program", "data"]

_NO_GRAPH = "no program is recorded implicitly"
_INSTEAD = {
    "CPUPlace": 'torch names devices: static.Executor("cpu")',
    "CUDAPlace": 'torch names devices: static.Executor("cuda:0")',
    "CompiledProgram": "write static.Program(..., compile=True), which is torch.compile",
    "default_main_program": f"{_NO_GRAPH}, so pass the static.Program that you created",
    "default_startup_program": "torch modules get their first values when you create them, so remove the run",
    "enable_static": "both styles work side by side, so remove the call",
    "global_scope": "model.state_dict() has the values",
    "load_inference_model": "use trainers.inference.load_inference_model",
    "nn": "use the layers of torch.nn",
    "program_guard": f"{_NO_GRAPH}, so create as many static.Program objects as you need",
    "save_inference_model": "use fleet.save_inference_model",
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise NotSupportedError(f"NotSupported: static.{name}; {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainers.static' has no attribute {name!r}")

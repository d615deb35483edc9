"""torch.compile for a model that is to be wrapped. Knows what has to be there for it."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

import torch

from trainers.collective.shardingconfigs import CompileConfigs
from trainers.errors import NotSupportedError


def compile_in_place(model: torch.nn.Module, configs: CompileConfigs) -> None:
    """The module's calls are compiled from the first on; it keeps its type and its names. DDP, wrapped around
    it, still has torch cut the program at its buckets, so that gradients travel during the backward pass.

    Raises NotSupportedError where inductor has no C++ compiler: it would fail at the first step.
    """
    check_compiler(configs.backend, "strategy.compile")

    # What `model.compile()` does but for this frame: torch compiles no frame of its own modules, and a
    # Sequential, or another of them, would stay as it is without a word.
    def call(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch's

    model._compiled_call_impl = torch.compile(
        call,
        backend=configs.backend,
        mode=configs.mode,
        dynamic=configs.dynamic,
        fullgraph=configs.fullgraph,
    )


def check_compiler(backend: str, asked: str, path: str | None = None) -> None:
    """Raises NotSupportedError, with what `asked` for it, where a backend of torch.compile lacks the program
    that it calls. `path`: where to look for that, if not at PATH.
    """
    compiler = _compiler()
    if backend == "inductor" and shutil.which(compiler, path=path) is None:
        raise NotSupportedError(
            f"NotSupported: {asked} needs a C++ compiler, and {compiler!r} is not here; install g++, or set "
            'the variable CXX, or use the backend "aot_eager"'
        )


def _compiler() -> str:
    """As torch._inductor chooses it."""
    return os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")

"""What Paddle 2.6.2 needs so that its parameter server runs as its documents say. For measuring only.

Import this module before anything of Paddle's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import types
from typing import Any


def _give_protobuf_its_c_module() -> None:
    """DistributedStrategy imports google.protobuf.pyext._message for a type's name; the pure Python protobuf
    3.20 that the wheel asks for has no such module.
    """
    from google.protobuf import pyext
    from google.protobuf.internal import containers

    if not hasattr(pyext, "_message"):
        module: Any = types.ModuleType("google.protobuf.pyext._message")
        module.RepeatedScalarContainer = containers.RepeatedScalarFieldContainer
        sys.modules[module.__name__] = module
        pyext._message = module


_give_protobuf_its_c_module()


class SyncCommunicator:
    """What synchronous training lacks in the wheel: only geo training makes a communicator, and nothing sets
    its barrier any more, without which the first step waits for ever (or reads a null pointer).
    """

    _CLASS = "_ZN6paddle11distributed"
    _INSTANCE = f"{_CLASS}12Communicator13communicator_E"
    _RESET = f"{_CLASS}21HalfAsyncCommunicator19BarrierTriggerResetEi"
    _SEND = (
        f"{_CLASS}17AsyncCommunicator4SendERKSt6vectorINSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEESaIS8_EE"
        "RKNS_9framework5ScopeE"
    )

    def __init__(self, fleet: Any) -> None:
        """After fleet.init_worker()."""
        import paddle
        from paddle.distributed.communicator import Communicator
        from paddle.distributed.ps.utils.public import get_the_one_recv_context

        runtime = fleet.fleet._runtime_handle
        trainer = runtime.context["trainer"]
        settings = {
            "need_global_step": "0",
            "trainer_id": fleet.worker_index(),
            "trainers": fleet.worker_num(),
            "barrier_table_id": runtime.ps_desc_builder.barrier_table_id,
            "pserver_endpoints": runtime.role_maker._get_pserver_endpoints(),
        }
        communicator = Communicator(trainer.mode, settings, trainer.get_communicator_flags())
        communicator.init_with_ctx(
            {},  # the program's own ops push gradients: the communicator has nothing to send
            get_the_one_recv_context(runtime.context, split_dense_table=False),
            runtime.ps_desc_builder.build_worker_desc(),
            runtime.string_hosts,
            paddle.static.global_scope(),
        )
        communicator.start()
        runtime._communicator = communicator
        paddle.static.default_main_program()._is_distributed = True

    def arm(self, threads: int) -> None:
        """Before each pass over the data."""
        import paddle.base.libpaddle as library

        loaded = ctypes.CDLL(library.__file__)
        instance = ctypes.c_void_p.in_dll(loaded, self._INSTANCE)
        getattr(loaded, self._RESET)(instance, threads)
        nothing = (ctypes.c_void_p * 3)()  # an empty vector of names: takes back "waiting", sends nothing
        getattr(loaded, self._SEND)(instance, nothing, nothing)


def leave(fleet: Any) -> None:
    """End the job: stop_worker() leaves the servers of the wheel in run_server() for ever."""
    if fleet.is_first_worker():
        fleet.fleet._runtime_handle._worker.stop_server()
    os._exit(0)

"""The runtimes behind the calls of fleet: the same parameters, and refusals in the words of their kind."""

from __future__ import annotations

import inspect

import pytest

from tests.trainers.test_fleet import server, trainer
from trainers import fleet
from trainers.collective.runtime import CollectiveRuntime
from trainers.errors import UsageError
from trainers.fleet import Fleet
from trainers.ps.runtime import TrainerRuntime
from trainers.ps.server_runtime import ServerRuntime

KINDS = (CollectiveRuntime, TrainerRuntime, ServerRuntime)

PASSED_ON = {name for name, each in vars(Fleet).items() if hasattr(each, "__wrapped__")}
"""Calls that fleet leaves to the runtime whole."""


def test_these_calls_are_passed_on():
    assert {"barrier_worker", "init_server", "publish", "shrink", "stream", "stop_worker"} <= PASSED_ON


@pytest.mark.parametrize("call", sorted(PASSED_ON))
def test_each_runtime_defines_a_call_with_its_parameters(call: str):
    declared = inspect.signature(getattr(Fleet, call))
    kinds = [kind for kind in KINDS if call in vars(kind)]
    assert kinds, "no runtime defines it"
    for kind in kinds:
        here = inspect.signature(getattr(kind, call))
        assert here.parameters == declared.parameters, kind
        assert here.return_annotation in (declared.return_annotation, "NoReturn"), kind


@pytest.mark.parametrize("call", sorted(PASSED_ON))
def test_what_a_process_cannot_do_it_refuses(call: str):
    for kind, process in ((TrainerRuntime, trainer), (ServerRuntime, server)):
        if call not in vars(kind):
            with pytest.raises(
                UsageError, match=rf"^fleet\.{call}\(\) was called on a (trainer|server)\. Move"
            ):
                getattr(process(), call)()


def test_a_collective_job_refuses_what_needs_servers():
    runtime = object.__new__(CollectiveRuntime)  # without a process group
    for call in PASSED_ON - vars(CollectiveRuntime).keys():
        with pytest.raises(UsageError, match=rf"^fleet\.{call}\(\) is for training with parameter servers"):
            runtime.ask(call)


def test_every_public_call_has_a_function_of_its_name():
    public = {name for name in vars(Fleet) if name[0] != "_"} - {"known_identity"}
    assert public <= set(fleet.__all__)
    assert len(fleet.__all__) == len(set(fleet.__all__))
    for name in fleet.__all__:
        assert getattr(fleet, name, None) is not None

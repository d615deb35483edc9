"""torch.compile inside DDP, in a group of one."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trainers.collective.configs import CompileConfigs, RecomputeConfigs
from trainers.collective.data_parallel import DataParallel
from trainers.collective.modules import compile_in_place, recompute
from trainers.collective.runtime import shaped
from trainers.errors import UsageError
from trainers.strategy import DistributedStrategy

pytestmark = pytest.mark.slow


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def graphs() -> Iterator[list[torch.fx.GraphModule]]:
    """What the backend "counting" was given to compile."""
    import torch._dynamo

    found: list[torch.fx.GraphModule] = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        found.append(graph)
        return graph.forward

    torch._dynamo.register_backend(counting, name="counting")
    yield found
    torch._dynamo.reset()


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 600),
        nn.Sequential(nn.Linear(600, 600), nn.Tanh()),
        nn.Linear(600, 600),
        nn.Linear(600, 1),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch, of its own tracing
@pytest.mark.usefixtures("group")
def test_a_compiled_model_is_cut_at_the_buckets_and_trains_as_without(
    graphs: list[torch.fx.GraphModule],
) -> None:
    plain, compiled = net(), net()
    recompute(compiled, RecomputeConfigs(checkpoints=["1"]), compiled=True)
    compile_in_place(compiled, CompileConfigs(backend="counting"))
    model = DataParallel(compiled, bucket_cap_mb=1.0)
    for values in (torch.randn(4, 8), torch.randn(4, 8)):
        for each in (plain, model):
            each(values).square().mean().backward()
    assert len(graphs) > 1, "one bucket after the other can travel while the rest is computed"
    assert compiled.state_dict().keys() == plain.state_dict().keys()
    for name, param in plain.named_parameters():
        assert torch.allclose(compiled.get_parameter(name).grad, param.grad), name


def test_buckets_that_torch_refuses_at_the_first_step_are_refused_before() -> None:
    strategy = DistributedStrategy()
    strategy.compile = True
    strategy.compile_configs = {"backend": "eager"}
    strategy.fuse_grad_size_in_MB = 0.5
    with pytest.raises(
        UsageError, match=r"compile with fuse_grad_size_in_MB 0\.5.*the first bucket has 1\.0 MB"
    ):
        shaped(net(), strategy)


def test_a_copy_of_a_compiled_model_is_one_of_its_own() -> None:
    model = net()
    compile_in_place(model, CompileConfigs(backend="eager"))
    twin = copy.deepcopy(model)
    torch.nn.init.zeros_(twin[3].weight)
    torch.nn.init.zeros_(twin[3].bias)
    assert not twin(torch.ones(2, 8)).any()

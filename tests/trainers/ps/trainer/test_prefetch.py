import pytest
import torch

from trainers.errors import UsageError
from trainers.runtime import ids_by_module


def test_ids_of_the_only_module_need_no_name() -> None:
    module, ids = torch.nn.Identity(), torch.arange(3)
    assert ids_by_module(ids, [module]) == {module: [ids]}
    assert ids_by_module([ids, ids], [module]) == {module: [ids, ids]}
    assert ids_by_module({module: ids}, [torch.nn.Identity(), module]) == {module: [ids]}


def test_ids_that_belong_nowhere_are_refused() -> None:
    with pytest.raises(UsageError, match="servers have 2 embeddings"):
        ids_by_module(torch.arange(3), [torch.nn.Identity(), torch.nn.Identity()])
    with pytest.raises(UsageError, match="which is on no server"):
        ids_by_module({torch.nn.Identity(): torch.arange(3)}, [torch.nn.Identity()])

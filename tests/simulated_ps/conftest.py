from collections.abc import Iterator

import pytest
import torch

from tests.simulated_ps.job import prepare


@pytest.fixture(scope="module", autouse=True)
def prepared() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prepare()
    yield
    torch.set_num_threads(threads)

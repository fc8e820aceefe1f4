"""Pages in batches are the same bytes as pages one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmill.model.kvstore.transfer import bytes_per_page, copy_in, copy_out, gather, scatter


def tensors(seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, 7, 2, 4, 8, generator=random),
        torch.randn(3, 7, 2, 4, generator=random).to(torch.bfloat16),
        torch.randn(2, 7, 5, generator=random).to(torch.float8_e4m3fn),
        torch.randint(256, (1, 7, 3), generator=random, dtype=torch.uint8),
    ]


@pytest.mark.parametrize("pages", [[4], [6, 0, 3], list(range(7))], ids=str)
def test_a_batch_is_its_pages(pages: list[int]) -> None:
    source, index = tensors(0), torch.tensor(pages)
    staging = gather(source, index)
    assert staging.shape == (len(pages), bytes_per_page(source))
    for row, page in zip(staging, pages, strict=True):
        assert bytes(row.numpy().data) == bytes(copy_out(source, page))
    batched, single = tensors(1), tensors(1)
    scatter(batched, index, staging)
    for row, page in zip(staging, pages, strict=True):
        copy_in(single, page, row.clone().numpy().data)
    for mine, theirs in zip(batched, single, strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    assert [bytes(copy_out(batched, page)) for page in pages] == [bytes(copy_out(source, page)) for page in pages]


def test_pages_of_another_store_do_not_fit() -> None:
    with pytest.raises(AssertionError, match="another store"):
        scatter(tensors(0), torch.tensor([1]), torch.zeros(1, bytes_per_page(tensors(0)) + 1, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="another store"):
        copy_in(tensors(0), 1, memoryview(bytearray(bytes_per_page(tensors(0)) + 1)))

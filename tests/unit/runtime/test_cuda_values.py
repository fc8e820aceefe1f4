"""Columns of values on a GPU: split by head and joined again with one pass at most."""

from __future__ import annotations

import torch

from tokenmill.runtime.executors.cuda.values import join_columns, split_columns


def test_parts_of_heads_are_those_of_the_spec() -> None:
    x = torch.arange(3 * 24).float().view(3, 24)
    wanted = [part.flatten(1) for part in x.view(3, 2, 12).split([5, 4, 3], dim=2)]
    got = split_columns(x, (5, 4, 3), 2)
    assert all(torch.equal(one, two) for one, two in zip(got, wanted, strict=True))
    assert [part.shape[1] for part in split_columns(x, (20, 4), 1)] == [20, 4]
    assert split_columns(x, (20, 4), 1)[0].data_ptr() == x.data_ptr()


def test_parts_side_by_side_are_not_copied_and_others_are() -> None:
    x = torch.arange(3 * 24).float().view(3, 24)
    q, k, v, gate = split_columns(x, (3, 3, 2, 4), 2)
    joined = join_columns((q, k, v))
    assert joined.data_ptr() == q.data_ptr()
    assert torch.equal(joined, torch.cat((q, k, v), dim=1))
    for parts in ((q, v), (k, q), (q, gate, v), (q, k.clone())):
        assert torch.equal(join_columns(parts), torch.cat(parts, dim=1))
    one = split_columns(x[:1], (3, 3, 2, 4), 2)
    assert torch.equal(join_columns(one[:3]), torch.cat(one[:3], dim=1))

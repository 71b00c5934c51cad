"""Embedding gradients as rows, against autograd's own dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from twistlm.compute.gradient import add_rows_, intercept_, sums_by_id


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_rows_equal_the_dense_gradient(padding_idx):
    torch.manual_seed(0)
    table = nn.Embedding(11, 4, padding_idx=padding_idx, dtype=torch.float64)
    ids = torch.tensor([[3, 1, 3, 7], [7, 7, 0, 10]])
    weights = torch.randn(2, 4, 4, dtype=torch.float64)
    (expected,) = torch.autograd.grad((table(ids).sin() * weights).sum(), table.weight)
    model = nn.Sequential(table)
    (lookup,) = intercept_(model)
    assert lookup.name == "0.weight"
    loss = (model(ids).sin() * weights).sum()
    (d_out,) = torch.autograd.grad(loss, lookup.out)
    grad = torch.ones(11, 4, dtype=torch.float64)  # of the tied head, say
    lookup.add_(grad, d_out)
    torch.testing.assert_close(grad, 1 + expected)


def test_many_small_rows_of_one_id_are_not_lost_in_bf16():
    """256 rows of 1/256 are 1; a GPU that adds them to 1 one by one in bf16 rounds each of them away."""
    ids = torch.tensor([2] * 256 + [4, 0, 4])
    rows = torch.full((259, 2), 1 / 256, dtype=torch.bfloat16)
    sums = sums_by_id(ids, rows, 5)
    assert sums.dtype == torch.float32
    expected = torch.zeros(259, 2)
    expected[[0, 256, 257]] = torch.tensor([[1.0], [2 / 256], [1 / 256]])
    assert torch.equal(sums, expected)
    grad = torch.ones(5, 2, dtype=torch.bfloat16)
    add_rows_(grad, ids, rows)
    assert grad[:, 0].tolist() == [1.0, 1.0, 2.0, 1.0, 1 + 2 / 256]


def test_only_plain_embeddings_are_intercepted():
    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    model = nn.ModuleList([Scaled(5, 2), nn.Embedding(5, 2, max_norm=1.0), nn.Embedding(5, 2)])
    assert [lookup.name for lookup in intercept_(model)] == ["2.weight"]

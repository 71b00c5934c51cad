"""Both ways to the same gradient, for every family."""

from __future__ import annotations

import pytest
import torch
from families_table import TABLE, tiny_model
from torch import nn

from twistlm.compute import gradient
from twistlm.compute.gradient import add_rows_, intercept_, sums_by_id
from twistlm.compute.loss import chunked_loss, loss_for, next_token_loss


@pytest.mark.parametrize("name", TABLE)
def test_direct_equals_autograd(name, monkeypatch):
    """Head and embeddings straight into the buffer, several chunks, a share of the loss."""
    monkeypatch.setattr(
        "twistlm.compute.loss.CHUNK", 5
    )  # read at call time: 3 x 11 tokens are seven chunks
    model = tiny_model(name).double().eval()
    assert gradient.is_direct(model, loss_for(model)) == (name != "gemma3_text")
    if name == "gemma3_text":  # scales its embeddings
        return
    model.requires_grad_()
    ids = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    params = dict(model.named_parameters())
    expected = torch.autograd.grad(0.25 * next_token_loss(model, ids), list(params.values()))
    value = next_token_loss(model, ids).detach()

    def plain(model, grads):
        return gradient.plain(model, chunked_loss, grads)

    # no logits are few enough for torch's own loss, or all are
    for small, make in ((0, plain), (1 << 24, plain), (1 << 24, gradient.direct)):
        monkeypatch.setattr("twistlm.compute.loss.SMALL", small)
        grads = {n: torch.full_like(p, torch.nan) for n, p in params.items()}  # all is overwritten
        run = make(model, grads)
        for _ in range(2):  # nothing is left over from the call before
            torch.testing.assert_close(run(ids, 0.25), value)
        for (param, got), want in zip(grads.items(), expected, strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, param=param: f"{param}: {text}")


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
    """256 rows of 1/256 are 1; added to 1 one by one in bf16, each is rounded away."""
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

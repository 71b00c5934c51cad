"""Both ways to the same gradient, for every family."""

from __future__ import annotations

import pytest
import torch
from families_table import TABLE, tiny_model
from torch import nn

from twistlm.compute import gradient
from twistlm.compute.gradient import add_rows_, intercept_
from twistlm.compute.loss import chunked_loss, loss_for, next_token_loss


@pytest.mark.parametrize("name", TABLE)
def test_direct_equals_autograd(name, monkeypatch):
    """Head and embeddings straight into the buffer, several chunks, a share of the loss."""
    monkeypatch.setattr("twistlm.compute.loss.CHUNK", 5)  # 3 x 11 tokens are seven chunks
    model = tiny_model(name).double().eval()
    assert gradient.is_direct(model, loss_for(model)) == (name != "gemma3_text")
    if name == "gemma3_text":  # scales its embeddings
        return
    model.requires_grad_()
    ids = torch.randint(0, 40, (3, 12), generator=torch.Generator().manual_seed(1))
    params = dict(model.named_parameters())
    value = next_token_loss(model, ids)
    expected = torch.autograd.grad(0.25 * value, list(params.values()))

    def plain(model, grads):
        return gradient.plain(model, chunked_loss, grads)

    # no logits are few enough for torch's own loss, or all are
    for small, make in ((0, plain), (1 << 24, plain), (1 << 24, gradient.direct)):
        monkeypatch.setattr("twistlm.compute.loss.SMALL", small)
        grads = {n: torch.full_like(p, torch.nan) for n, p in params.items()}  # all is overwritten
        run = make(model, grads)
        for _ in range(2):  # nothing is left over from the call before
            torch.testing.assert_close(run(ids, 0.25), value.detach())
        for (param, got), want in zip(grads.items(), expected, strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, param=param: f"{param}: {text}")


def test_embeddings_that_scale_pad_or_round():
    """256 rows of 1/256 are 1; added to 1 one by one in bf16, each is rounded away."""

    class Scaled(nn.Embedding):
        def forward(self, ids):
            return 2 * super().forward(ids)

    padded = nn.Embedding(11, 4, padding_idx=3, dtype=torch.float64)
    model = nn.ModuleList([Scaled(5, 2), nn.Embedding(5, 2, max_norm=1.0), padded])
    ids = torch.tensor([[3, 1, 3, 7], [7, 7, 0, 10]])
    (expected,) = torch.autograd.grad(padded(ids).sin().sum(), padded.weight)
    (lookup,) = intercept_(model)  # the others are not plain
    assert lookup.name == "2.weight"
    (d_out,) = torch.autograd.grad(padded(ids).sin().sum(), lookup.out)
    grad = torch.ones(11, 4, dtype=torch.float64)  # of the tied head, say
    lookup.add_(grad, d_out)
    torch.testing.assert_close(grad, 1 + expected)
    rows, grad = torch.full((259, 2), 1 / 256), torch.ones(5, 2)
    rows, grad = rows.bfloat16(), grad.bfloat16()
    add_rows_(grad, torch.tensor([2] * 256 + [4, 0, 4]), rows)
    assert grad[:, 0].tolist() == [1.0, 1.0, 2.0, 1.0, 1 + 2 / 256]

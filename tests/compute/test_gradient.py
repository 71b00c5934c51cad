"""Both ways to the same gradient, for every family."""

from __future__ import annotations

import pytest
import torch
from families_table import TABLE, tiny_model

from twistlm.compute import gradient
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

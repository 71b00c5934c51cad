"""The chunked loss against torch's own cross-entropy, and the families it serves."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from families_table import TABLE, tiny_model
from torch import Tensor

from twistlm.compute import loss as losses
from twistlm.compute.attention import causal_
from twistlm.compute.loss import chunked_loss, linear_cross_entropy, loss_for, next_token_loss
from twistlm.system.device import pick_device


def inputs(dtype: torch.dtype, bias: bool) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, 16), (101, 16)] + [(101,)] * bias
    leaves = [torch.randn(s, dtype=dtype, generator=generator).requires_grad_() for s in shapes]
    return leaves, torch.randint(0, 101, (37,), generator=generator)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 10, 37, 8192])
def test_linear_cross_entropy_and_its_gradients(bias, chunk):
    leaves, targets = inputs(torch.float64, bias)
    hidden, weight, *rest = leaves
    loss = linear_cross_entropy(hidden, weight, rest[0] if bias else None, targets, chunk)
    grads = torch.autograd.grad(0.3 * loss, leaves)
    expected = F.cross_entropy(F.linear(hidden, weight, *rest), targets)
    torch.testing.assert_close(loss, expected)
    for got, want in zip(grads, torch.autograd.grad(0.3 * expected, leaves), strict=True):
        torch.testing.assert_close(got, want)


def test_gradients_survive_finite_differences():
    """torch's own numerical check, in float64."""
    (hidden, weight), targets = inputs(torch.float64, bias=False)
    small = (hidden[:5].detach().requires_grad_(), weight[:7].detach().requires_grad_())
    torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, None, targets[:5] % 7, 2), small
    )


def test_bf16_logits_lose_little():
    """The softmax is exact; only the head's products and the gradients are rounded."""
    pick_device("cpu")  # without oneDNN on ARM: it warns about bf16
    (hidden, weight), targets = inputs(torch.float64, bias=False)
    expected = F.cross_entropy(hidden @ weight.T, targets)
    wanted = torch.autograd.grad(expected, (hidden, weight))
    low = [t.detach().bfloat16().requires_grad_() for t in (hidden, weight)]
    loss = linear_cross_entropy(*low, None, targets, 10)
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) / float(expected.detach()) - 1) < 1e-2
    for got, want in zip(torch.autograd.grad(loss, low), wanted, strict=True):
        assert (got.double() - want).norm() / want.norm() < 2e-2


@pytest.mark.parametrize("name", TABLE)
def test_every_family_takes_the_chunked_loss(name, monkeypatch):
    model = tiny_model(name)
    ids = torch.randint(
        0, model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1)
    )
    assert loss_for(model) is chunked_loss
    whole = copy.deepcopy(model)
    causal_(whole)
    assert whole.config._attn_implementation == "causal"
    for small in (0, 1 << 24):  # in chunks, and all at once
        monkeypatch.setattr(losses, "SMALL", small)
        with torch.no_grad():
            torch.testing.assert_close(chunked_loss(whole, ids), next_token_loss(model, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_few_logits_take_torch_s_own_loss_and_more_are_chunked(dtype, monkeypatch):
    """Up to `SMALL` of them; in bf16 the softmax is float32's either way."""
    pick_device("cpu")  # without oneDNN on ARM: it warns about bf16
    model = copy.deepcopy(tiny_model("gpt2")).to(dtype).requires_grad_()
    ids = torch.arange(12).view(2, 6)  # 10 targets
    n_logits, made = 10 * model.config.vocab_size, []
    for small in (n_logits, n_logits - 1):
        monkeypatch.setattr(losses, "SMALL", small)
        made.append(chunked_loss(model, ids))
    assert [type(loss.grad_fn).__name__ for loss in made] == [
        "NllLossBackward0",
        "_LinearCrossEntropyBackward",
    ]
    assert [loss.dtype for loss in made] == [torch.float32] * 2
    torch.testing.assert_close(*made)


def test_logits_that_are_more_than_the_head_s_take_the_plain_loss():
    """A capped logit is not the head's product any more."""
    model = copy.deepcopy(tiny_model("gemma3_text"))
    model.config.final_logit_softcapping = 0.05
    assert loss_for(model) is next_token_loss


def test_a_sliding_window_keeps_its_mask():
    """Windows shorter than the text must not become plain causal attention."""
    model = copy.deepcopy(tiny_model("mistral"))
    ids = torch.randint(
        0, model.config.vocab_size, (1, 24), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        model.config.sliding_window = 4
        narrow = next_token_loss(model, ids)
        causal_(model)
        torch.testing.assert_close(next_token_loss(model, ids), narrow)
        model.config.sliding_window = None
        assert abs(float(next_token_loss(model, ids)) - float(narrow)) > 1e-4


@pytest.mark.parametrize("room", [True, False])
def test_padding_rows_of_a_head_in_a_flat_buffer(room, monkeypatch):
    """As on a GPU: the rows behind the head are the next parameter's, and change nothing."""
    monkeypatch.setattr(losses, "_aligned_rows", lambda weight: 104)
    (hidden, weight), targets = inputs(torch.float64, bias=False)
    flat, grads = torch.randn(2, (104 if room else 101) * 16 + 7, dtype=torch.float64)
    flat, grads = flat[7:], grads[7:]  # the head does not begin where the storage does
    head = flat[: 101 * 16].view(101, 16)
    head.copy_(weight.detach())
    into = losses.Into(grads[: 101 * 16].view(101, 16), None, share=0.3)
    before = flat.clone()
    expected = F.cross_entropy(F.linear(hidden, weight), targets)
    loss, d_hidden = losses._forward(hidden.detach(), head, None, targets, 10, into)
    wanted = torch.autograd.grad(0.3 * expected, (hidden, weight))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(d_hidden, wanted[0])
    torch.testing.assert_close(into.weight, wanted[1])
    assert torch.equal(flat, before)
    assert not room or not grads[101 * 16 :].any()

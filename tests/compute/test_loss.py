"""The chunked loss against torch's own cross-entropy, and the families it serves."""

import copy

import pytest
import torch
import torch.nn.functional as F
from families_table import tiny_model, tokens
from torch import Tensor

from twistlm.compute import loss as losses
from twistlm.compute.attention import causal_
from twistlm.compute.loss import (
    CachedTeacher,
    Prediction,
    Teacher,
    chunked_loss,
    linear_cross_entropy,
    loss_for,
    next_token_loss,
    topk_prediction,
)
from twistlm.data.teacher_cache import pack, unpack
from twistlm.system.device import autocast, pick_device


def inputs(bias: bool) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(37, 16), (101, 16)] + [(101,)] * bias
    leaves = [torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    targets = torch.randint(0, 101, (37,), generator=generator)
    return [leaf.requires_grad_() for leaf in leaves], targets


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "gemma3_text"])
def test_a_teacher_for_every_way_to_the_loss(name, monkeypatch):
    """Few logits, chunks, capped logits, and a cache: one loss, one gradient."""
    model, other = tiny_model(name), tiny_model(name)
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.1 * torch.randn_like(param))
    ids = tokens(3, 9)
    params = list(model.requires_grad_().parameters())
    with torch.no_grad():
        logits = other(input_ids=ids).logits[:, :-1]
    vocab = logits.shape[-1]
    log_probs, likeliest = logits.log_softmax(-1).topk(vocab)
    for teacher, topk in (
        (Teacher(other, 0.9), None),
        (CachedTeacher(vocab, 0.9), pack(likeliest, log_probs, vocab)),
    ):
        found = []
        for loss, small in ((next_token_loss, 0), (chunked_loss, losses.SMALL), (chunked_loss, 0)):
            monkeypatch.setattr(losses, "SMALL", small)
            value = loss(model, ids, teacher=teacher, teacher_topk=topk)
            grads = torch.autograd.grad(value, params)
            found.append((value.detach(), torch.cat([g.flatten() for g in grads])))
        for value, grad in found[1:]:
            torch.testing.assert_close(value, found[0][0])
            torch.testing.assert_close(grad, found[0][1], rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            mine = model(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
        theirs = logits.double().log_softmax(-1)
        kl = (theirs.exp() * (theirs - mine)).sum(-1).mean()
        by_hand = 0.9 * kl - 0.1 * mine.gather(2, ids[:, 1:, None]).mean()
        within = 1e-5 if isinstance(teacher, Teacher) else 1e-3  # float16
        assert float(found[0][0]) == pytest.approx(float(by_hand), rel=within)


def over_k_and_the_rest(logits: Tensor, targets: Tensor, ids: Tensor, p: Tensor) -> Tensor:
    """0.3 cross-entropy + 0.7 KL over k + 1 outcomes, as one writes it down."""
    s = logits.softmax(-1)
    named = s.gather(1, ids)
    kl = (p * (p / named).log()).sum(-1)
    if ids.shape[1] < logits.shape[1]:
        p_rest, s_rest = 1 - p.sum(-1), 1 - named.sum(-1)
        kl = kl + p_rest * (p_rest / s_rest).log()
    return (0.3 * F.cross_entropy(logits, targets, reduction="none") + 0.7 * kl).mean()


@pytest.mark.parametrize("chunk", [1, 10, 8192])
@pytest.mark.parametrize("teacher", ["none", "logits", 1, 10, 101])  # or its k likeliest tokens
def test_linear_cross_entropy_and_its_gradients(teacher, chunk, monkeypatch):
    """Against float64 autograd of the formula; k of the whole vocabulary is the teacher itself."""
    monkeypatch.setattr(losses, "CHUNK", chunk)
    generator = torch.Generator().manual_seed(1)
    theirs = torch.randn(37, 101, dtype=torch.float64, generator=generator)
    for bias in (False, True):
        leaves, targets = inputs(bias)
        logits = F.linear(*leaves)
        kept, ids = theirs.log_softmax(-1).topk(101 if isinstance(teacher, str) else teacher)
        prediction = topk_prediction(ids, kept, 0.7)
        expected = over_k_and_the_rest(logits, targets, ids, kept.exp())
        if teacher == "none":
            prediction, expected = None, F.cross_entropy(logits, targets)
        elif teacher == "logits":
            prediction = Prediction(lambda at, mine: theirs[at], 0.7)
        head = leaves if bias else (*leaves, None)
        loss = linear_cross_entropy(*head, targets, prediction, None, True)
        torch.testing.assert_close(loss, expected)
        wanted = torch.autograd.grad(0.3 * expected, leaves)
        for got, want in zip(torch.autograd.grad(0.3 * loss, leaves), wanted, strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("high", [30.0, 300.0])
def test_a_rest_of_next_to_nothing_teaches_no_nan(high):
    """The teacher gives everything to its k tokens (float16 even more), or the model does."""
    logits = torch.tensor([[high, 0, -1, 1], [0, 1, 2, high], [high, high, 0, 0]])
    logits.requires_grad_()
    teacher_log_probs = torch.tensor([[0.0, -9.0], [-1e-3, -7.0], [-0.69287, -0.69287]]).half()
    prediction = topk_prediction(torch.tensor([[0, 2], [0, 1], [0, 1]]), teacher_log_probs, 0.9)
    loss = losses._mean_loss(logits, torch.tensor([1, 1, 1]), prediction)
    (grad,) = torch.autograd.grad(loss, logits)
    assert torch.isfinite(loss)
    assert torch.isfinite(grad).all()
    assert grad.sum(1).abs().max() < 1e-6  # both distributions are whole
    assert grad[1, 3] > 0.3 - 0.01  # towards the teacher, who leaves almost nothing to this token


def test_a_wide_teachers_predictions_survive_their_bytes():
    vocab, n_bytes = 1 << 17, 18
    ids = torch.randint(0, vocab, (2, 5, 3), generator=torch.Generator().manual_seed(0))
    ids[0, 0, 0] = vocab - 1
    log_probs = torch.tensor([-0.5, -3.0, -torch.inf]).expand(2, 5, 3)
    packed = pack(ids, log_probs, vocab)
    assert packed.shape == (2, 5, n_bytes)
    again, kept = unpack(packed[:, 1:], vocab)
    assert torch.equal(again, ids[:, 1:])
    assert torch.equal(kept[..., :2].float(), log_probs[:, 1:, :2])
    assert torch.isfinite(kept).all()
    assert (kept[..., 2] < -1e4).all()


def test_a_model_that_could_be_trained_is_scored_without_gradients(monkeypatch):
    """As a GPU scores a ticket that was loaded to be healed: autocast over float32 parameters."""
    device = pick_device("cpu")  # without oneDNN on ARM: it warns about bf16
    monkeypatch.setattr(losses, "SMALL", 0)  # in chunks, as on a GPU
    model, ids = copy.deepcopy(tiny_model("gpt2")).requires_grad_(), torch.arange(12).view(2, 6)
    with torch.no_grad(), autocast("bf16", device):
        found = chunked_loss(model, ids)
    assert abs(float(found) / float(next_token_loss(model, ids).detach()) - 1) < 1e-2


@pytest.mark.parametrize("cap", [0.05, 30.0, 1000.0])
def test_logits_that_are_more_than_the_head_s_take_the_plain_loss(cap):
    """A capped logit is not the head's product any more, however small it is before training."""
    model = copy.deepcopy(tiny_model("gemma3_text"))
    model.config.final_logit_softcapping = cap
    assert loss_for(model) is next_token_loss
    plain = tiny_model("gemma3_text")
    assert loss_for(plain, Teacher(plain, 0.5)) is chunked_loss
    assert loss_for(plain, Teacher(model, 0.5)) is next_token_loss  # of a teacher neither


def test_a_sliding_window_keeps_its_mask():
    """Windows shorter than the text must not become plain causal attention."""
    model = copy.deepcopy(tiny_model("mistral"))
    ids = tokens(1, 24)
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
    monkeypatch.setattr(losses, "CHUNK", 10)
    (hidden, weight), targets = inputs(bias=False)
    flat, grads = torch.randn(2, (104 if room else 101) * 16 + 7, dtype=torch.float64)
    flat, grads = flat[7:], grads[7:]  # the head does not begin where the storage does
    head = flat[: 101 * 16].view(101, 16)
    head.copy_(weight.detach())
    head_grads = losses.HeadGrads(grads[: 101 * 16].view(101, 16), None, share=0.3)
    before = flat.clone()
    expected = F.cross_entropy(F.linear(hidden, weight), targets)
    loss = linear_cross_entropy(hidden, head, None, targets, None, head_grads, True)
    wanted = torch.autograd.grad(0.3 * expected, (hidden, weight))
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], wanted[0])
    torch.testing.assert_close(head_grads.weight, wanted[1])
    assert torch.equal(flat, before)
    assert not room or not grads[101 * 16 :].any()

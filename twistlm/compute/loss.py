"""Next-token loss without all the logits: head, softmax and loss in chunks of tokens.

The loss is the cross-entropy of the text, or with a teacher (1 - a) of it plus a KL(teacher ||
model), both at temperature 1 over the whole vocabulary; of a teacher's cache, over its k likeliest
tokens and the rest as one.

The logits of 32 x 1024 tokens of GPT-2 are 6.6 GB in float32. Here one chunk's live in the model's
precision, and both gradients are made on the way forward; torch's own chunked loss (2.13) does the
same but cannot be compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..data.teacher_cache import unpack
from ..model import kernels

# (model, ids [batch, seq_len], teacher=None, teacher_topk=None) -> mean loss
Loss = Callable[..., Tensor]

CHUNK = 8192  # tokens; their logits for a vocabulary of 50,304 are 0.8 GB in bf16
SMALL = 1 << 24  # logits; so few (64 MB in float32) a CPU takes all at once, with torch's own loss
ALIGN = 64  # rows of the head on a GPU: with 50,257 its products run at a sixth of their speed


@dataclass(frozen=True)
class HeadGrads:
    """Buffers for the gradient of `share` times the loss by the head's weight and bias."""

    weight: Tensor
    bias: Tensor | None
    share: float = 1.0


@dataclass(frozen=True)
class Teacher:
    """A frozen model to learn from, and the weight of KL(teacher || model) in the loss."""

    model: PreTrainedModel
    weight: float

    @torch.no_grad()
    def predict(self, ids: Tensor, teacher_topk: Tensor | None = None) -> TeacherLogits:
        """Its predictions for ids [batch, seq_len], up to the head."""
        hidden = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        head: Any = self.model.get_output_embeddings()
        return TeacherLogits(
            hidden.flatten(0, 1), head.weight, getattr(head, "bias", None), self.weight
        )


@dataclass(frozen=True)
class TeacherLogits:
    """A teacher's last hidden states [tokens, d] and head, which make logits by the chunk."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    weight: float  # of KL in the loss

    def logits(self, at: slice, mine: Tensor) -> Tensor:
        """[tokens, vocab]; on a GPU with some columns more, which mean nothing."""
        logits = self.hidden[at] @ _aligned(self.head).T
        if self.bias is None:
            return logits
        return logits + F.pad(self.bias, (0, logits.shape[1] - len(self.bias)))


@dataclass(frozen=True)
class CachedTeacher:
    """A teacher whose predictions come with the tokens (`data/teacher_cache.py`)."""

    vocab_size: int
    weight: float

    def predict(self, ids: Tensor, teacher_topk: Tensor | None = None) -> TeacherTopK:
        """What came for ids [batch, seq_len]: packed uint8 [batch, seq_len - 1, bytes]."""
        assert teacher_topk is not None, "the teacher's cache did not come with the tokens"
        return TeacherTopK(*unpack(teacher_topk.flatten(0, 1), self.vocab_size), self.weight)


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher's k likeliest tokens and their log-probs, [tokens, k]; the rest is one sum."""

    ids: Tensor
    log_probs: Tensor
    weight: float  # of KL in the loss

    def logits(self, at: slice, mine: Tensor) -> Tensor:
        """log p of the k; for the others the model's own logits `mine`, shifted to what p leaves.

        With p_rest = 1 - sum p, KL to this distribution has the value and the gradient of the KL
        over k + 1 outcomes, sum p log(p / s) + p_rest log(p_rest / s_rest): inside the rest both
        are alike.
        """
        mine, ids = _exact(mine.detach()), self.ids[at]
        log_probs = self.log_probs[at].to(mine.dtype)
        rest = mine.scatter(1, ids, -math.inf).logsumexp(-1, keepdim=True)
        # float16 may round the k up to more than 1; softmax then makes them 1
        left = (1 - log_probs.exp().sum(-1, keepdim=True)).clamp(min=kernels.LEAST)
        return (mine + (left.log() - rest)).scatter(1, ids, log_probs)


AnyTeacher = Teacher | CachedTeacher
Prediction = TeacherLogits | TeacherTopK


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    prediction: Prediction | None = None,
    head_grads: HeadGrads | None = None,
) -> Tensor:
    """Mean loss of the logits `hidden @ weight.T + bias` against `targets` and a teacher."""
    leaves = (hidden, weight) if bias is None else (hidden, weight, bias)
    # a Function's `needs_input_grad` is true of parameters under no_grad, too
    if not (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves)):
        return _forward(hidden, weight, bias, targets, chunk, None, prediction)[0]
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk, prediction, head_grads)


def chunked_loss(
    model: PreTrainedModel,
    ids: Tensor,
    head_grads: HeadGrads | None = None,
    teacher: AnyTeacher | None = None,
    teacher_topk: Tensor | None = None,
) -> Tensor:
    """`next_token_loss` through the base model and the head, a chunk of tokens at a time.

    With `head_grads`, autograd sees the hidden states alone, this loss must be the root of its
    graph, and what lies behind `head_grads.weight` in memory must be written after it (`_aligned`).
    """
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head: Any = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    hidden, targets = hidden.flatten(0, 1), ids[:, 1:].flatten()
    prediction = None if teacher is None else teacher.predict(ids, teacher_topk)
    if head_grads is None and not hidden.is_cuda and len(targets) * len(head.weight) <= SMALL:
        logits = F.linear(hidden, head.weight, bias)
        if prediction is None:
            return F.cross_entropy(_exact(logits), targets)
        teacher_logits = prediction.logits(slice(None), logits)
        return _mean_loss(logits, targets, teacher_logits, prediction.weight)
    weight = head.weight if head_grads is None else head.weight.detach()
    return linear_cross_entropy(hidden, weight, bias, targets, CHUNK, prediction, head_grads)


def next_token_loss(
    model: PreTrainedModel,
    ids: Tensor,
    *,
    teacher: AnyTeacher | None = None,
    teacher_topk: Tensor | None = None,
) -> Tensor:
    """Mean loss of tokens 1.. given those before (HF's own rounds float64 to float32)."""
    logits, targets = _logits(model, ids), ids[:, 1:].flatten()
    if teacher is None:
        return F.cross_entropy(_exact(logits), targets)
    with torch.no_grad():
        if isinstance(teacher, Teacher):
            teacher_logits = _logits(teacher.model, ids)
        else:
            teacher_logits = teacher.predict(ids, teacher_topk).logits(slice(None), logits)
    return _mean_loss(logits, targets, teacher_logits, teacher.weight)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)


def _mean_loss(logits: Tensor, targets: Tensor, teacher_logits: Tensor, share: float) -> Tensor:
    """Mean over tokens of (1 - a) cross-entropy + a KL(teacher || model), a = `share`."""
    mine = _exact(logits).log_softmax(-1)
    teacher_log_probs = _exact(teacher_logits[:, : logits.shape[1]]).log_softmax(-1)
    plain = F.nll_loss(mine, targets, reduction="none")
    kl = F.kl_div(mine, teacher_log_probs, reduction="none", log_target=True).sum(-1)
    return ((1 - share) * plain + share * kl).mean()


def _exact(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@torch.no_grad()
def loss_for(model: PreTrainedModel, teacher: AnyTeacher | None = None) -> Loss:
    """The chunked loss where logits are the head's product, else the plain one.

    (Some families cap or scale their logits.) `model` is tried on a few tokens, and so is a
    teacher.
    """
    if isinstance(teacher, Teacher) and loss_for(teacher.model) is next_token_loss:
        return next_token_loss
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(8, device=model.device)[None] % embeddings.weight.shape[0]
    plain, chunked = next_token_loss(model, ids), chunked_loss(model, ids)
    return chunked_loss if torch.allclose(plain, chunked, rtol=1e-3) else next_token_loss


class _LinearCrossEntropy(torch.autograd.Function):
    """mean of logsumexp(h W^T + b) - (h W^T + b)[target], mixed with KL to a teacher.

    With `head_grads` it fills these, and its own gradient is taken to be 1.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        prediction: Prediction | None,
        head_grads: HeadGrads | None,
    ) -> Tensor:
        ctx.is_root = head_grads is not None
        if head_grads is None:
            rows = weight.new_empty(_aligned_rows(weight), weight.shape[1])
            d_bias = None if bias is None else torch.empty_like(bias)
            head_grads = HeadGrads(rows[: len(weight)], d_bias)
        loss, d_hidden = _forward(hidden, weight, bias, targets, chunk, head_grads, prediction)
        of_head = (None, None) if ctx.is_root else (head_grads.weight, head_grads.bias)
        ctx.save_for_backward(d_hidden, *of_head)
        return loss

    @staticmethod
    def backward(ctx: Any, share: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        if not ctx.is_root:
            found = [None if d is None else d * share.to(d.dtype) for d in found]
        return (*found, *(None,) * 4)


def _forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    chunk: int,
    head_grads: HeadGrads | None = None,
    prediction: Prediction | None = None,
) -> tuple[Tensor, Tensor]:
    """The mean loss and, with `head_grads`, which it fills, its gradient by `hidden`."""
    n_tokens, vocab = len(targets), len(weight)
    head = _aligned(weight)
    d_head = None if head_grads is None else _aligned(head_grads.weight)
    n_pad = len(head) - vocab
    losses, d_hidden = [], []
    for i, (x, y) in enumerate(zip(hidden.split(chunk), targets.split(chunk), strict=True)):
        logits = x @ head.T  # [chunk, vocab + n_pad]
        if bias is not None:
            logits = logits + F.pad(bias, (0, n_pad))
        scale = n_tokens / (1.0 if head_grads is None else head_grads.share)
        if prediction is None:
            losses.append(_softmax_(logits, y, vocab, scale, head_grads is not None))
        else:
            at = slice(i * chunk, i * chunk + len(y))
            losses.append(_distil_(logits, prediction, at, y, vocab, scale))
        if head_grads is None or d_head is None:
            continue
        # `logits` now holds the gradient of the loss by the logits: 0 in the padding
        d_hidden.append(logits @ head)
        if i == 0:
            torch.mm(logits.T, x, out=d_head)
        else:
            d_head.addmm_(logits.T, x)
        if head_grads.bias is not None:
            total = logits[:, :vocab].sum(0)
            head_grads.bias.copy_(total if i == 0 else head_grads.bias + total)
    if head_grads is None or d_head is None:
        return torch.cat(losses).mean(), hidden
    if d_head.data_ptr() != head_grads.weight.data_ptr():
        head_grads.weight.copy_(d_head[:vocab])
    return torch.cat(losses).mean(), torch.cat(d_hidden)


def _aligned_rows(weight: Tensor) -> int:
    return len(weight) + -len(weight) % ALIGN if weight.is_cuda else len(weight)


def _aligned(weight: Tensor) -> Tensor:
    """The head, or its gradient, with a multiple of `ALIGN` rows on a GPU.

    In a flat buffer the rows beyond its own are the next parameter's, and nothing is copied. As
    weights they are multiplied by zeros; as gradients they become zeros before the next parameter's
    are written.
    """
    n_rows, (vocab, d) = _aligned_rows(weight), weight.shape
    assert weight.is_contiguous()
    end = (weight.storage_offset() + n_rows * d) * weight.element_size()
    if end <= weight.untyped_storage().nbytes():
        return weight.as_strided((n_rows, d), (d, 1))
    return F.pad(weight, (0, 0, 0, n_rows - vocab))


def _has_kernels(logits: Tensor) -> bool:
    return kernels.usable(logits) and logits.dtype != torch.float64


def _softmax_(logits: Tensor, targets: Tensor, vocab: int, n_tokens: float, wanted: bool) -> Tensor:
    """Each token's loss; where `wanted`, `logits` become the gradient of the sum over `n_tokens`.

    Columns from `vocab` on are padding: they count for nothing and their gradient is 0.
    """
    if _has_kernels(logits):
        return kernels.softmax_(logits, targets, vocab, n_tokens, wanted)
    log_probs = _exact(logits[:, :vocab]).log_softmax(-1)
    losses = -log_probs.gather(1, targets[:, None])[:, 0]
    if wanted:
        grad = log_probs.exp_()
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
        logits[:, :vocab] = grad.div_(n_tokens)
        logits[:, vocab:] = 0.0
    return losses


def _distil_(
    logits: Tensor,
    prediction: Prediction,
    at: slice,
    targets: Tensor,
    vocab: int,
    n_tokens: float,
) -> Tensor:
    """The same with a teacher's logits t: gradient softmax(s) - (1 - a) onehot - a softmax(t)."""
    share = prediction.weight
    if _has_kernels(logits) and isinstance(prediction, TeacherTopK):
        named = prediction.ids[at], prediction.log_probs[at]
        return kernels.distil_topk_(logits, *named, targets, vocab, n_tokens, share)
    teacher_logits = prediction.logits(at, logits[:, :vocab])
    if _has_kernels(logits):
        return kernels.distil_(logits, teacher_logits, targets, vocab, n_tokens, share)
    mine, teacher_log_probs = (
        _exact(x[:, :vocab]).log_softmax(-1) for x in (logits, teacher_logits)
    )
    probs = teacher_log_probs.exp()
    losses = -(1 - share) * mine.gather(1, targets[:, None])[:, 0]
    losses += share * (probs * (teacher_log_probs - mine)).sum(-1)
    grad = mine.exp_() - share * probs
    grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), share - 1.0))
    logits[:, :vocab] = grad.div_(n_tokens)
    logits[:, vocab:] = 0.0
    return losses

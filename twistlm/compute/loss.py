"""Next-token loss without all the logits: head, softmax and loss in chunks of tokens.

The loss is the cross-entropy of the text, or with a teacher (1 - a) of it plus a KL(teacher ||
model), both at temperature 1 over the whole vocabulary; of a teacher's cache, over its k likeliest
tokens and the rest as one.

The logits of 32 x 1024 tokens of GPT-2 are 6.6 GB in float32. Here one chunk's live in the model's
precision, and both gradients are made on the way forward; torch's own chunked loss (2.13) does the
same but cannot be compiled.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.teacher_cache import unpack
from ..model import kernels
from ..model.huggingface import Model, vocab_size
from ..model.kernels import LEAST

CHUNK = 8192  # tokens on a GPU; their logits for a vocabulary of 50,304 are 0.8 GB in bf16
SMALL = 1 << 24  # logits on a CPU; so few (64 MB in float32) are made by torch's own loss
LARGE = 1e6  # of a logit: far above every cap
ALIGN = 64  # rows of the head on a GPU: with 50,257 its products run at a sixth of their speed


@dataclass(frozen=True)
class HeadGrads:
    """Buffers for the gradient of `share` times the loss by the head's weight and bias."""

    weight: Tensor
    bias: Tensor | None
    share: float = 1.0
    add: bool = False  # to what they hold


class Prediction(NamedTuple):
    """A teacher's logits of a slice of tokens, beside the model's own, and the weight of KL."""

    logits: Callable[[slice, Tensor], Tensor]  # on a GPU with columns more, which mean nothing
    weight: float
    # of a cache: k tokens of each, and their log p. A GPU needs no logits then
    topk: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Teacher:
    """A frozen model to learn from, and the weight of KL(teacher || model) in the loss."""

    model: Model
    weight: float

    @torch.no_grad()
    def predict(self, ids: Tensor, teacher_topk: Tensor | None = None) -> Prediction:
        """Its predictions for ids [batch, seq_len], up to the head."""
        hidden, (head, bias) = _hidden(self.model, ids), _padded(*_head(self.model))
        return Prediction(lambda rows, mine: F.linear(hidden[rows], head, bias), self.weight)


@dataclass(frozen=True)
class CachedTeacher:
    """A teacher whose predictions come with the tokens (`data/teacher_cache.py`)."""

    vocab_size: int
    weight: float

    def predict(self, ids: Tensor, teacher_topk: Tensor | None = None) -> Prediction:
        """What came for ids [batch, seq_len]: packed uint8 [batch, seq_len - 1, bytes]."""
        assert teacher_topk is not None, "the teacher's cache did not come with the tokens"
        return topk_prediction(*unpack(teacher_topk.flatten(0, 1), self.vocab_size), self.weight)


def topk_prediction(ids: Tensor, log_probs: Tensor, weight: float) -> Prediction:
    """log p of k tokens [tokens, k]; the others have the model's logits, shifted to what p leaves.

    With p_rest = 1 - sum p, KL to this distribution has the value and the gradient of the KL over
    k + 1 outcomes, sum p log(p / s) + p_rest log(p_rest / s_rest): inside the rest both are alike.
    """

    def logits(rows: slice, mine: Tensor) -> Tensor:
        mine = _exact(mine.detach())
        named = log_probs[rows].to(mine.dtype)
        rest = mine.scatter(1, ids[rows], -math.inf).logsumexp(-1, keepdim=True)
        # float16 may round the k up to more than 1; softmax then makes them 1
        left = (1 - named.exp().sum(-1, keepdim=True)).clamp(min=LEAST)
        return (mine + (left.log() - rest)).scatter(1, ids[rows], named)

    return Prediction(logits, weight, (ids, log_probs))


AnyTeacher = Teacher | CachedTeacher


# (model, ids [batch, seq_len], teacher, teacher_topk) -> the mean loss of tokens 1.., given those
# before; `teacher_topk` is what came for these ids, of a `CachedTeacher`
Loss = Callable[..., Tensor]


def chunked_loss(
    model: Model,
    ids: Tensor,
    head_grads: HeadGrads | None = None,
    *,
    teacher: AnyTeacher | None = None,
    teacher_topk: Tensor | None = None,
) -> Tensor:
    """`next_token_loss` through the base model and the head, a chunk of tokens at a time.

    With `head_grads`, autograd sees the hidden states alone, this loss must be the root of its
    graph, and what lies behind `head_grads.weight` in memory must be written after it (`_aligned`).
    """
    hidden, (weight, bias), targets = _hidden(model, ids), _head(model), ids[:, 1:].flatten()
    prediction = None if teacher is None else teacher.predict(ids, teacher_topk)
    if head_grads is None and not hidden.is_cuda and len(targets) * len(weight) <= SMALL:
        return _mean_loss(F.linear(hidden, weight, bias), targets, prediction)
    head = weight if head_grads is None else weight.detach(), bias
    wanted = torch.is_grad_enabled()
    return linear_cross_entropy(hidden, *head, targets, prediction, head_grads, wanted)


def next_token_loss(
    model: Model,
    ids: Tensor,
    *,
    teacher: AnyTeacher | None = None,
    teacher_topk: Tensor | None = None,
) -> Tensor:
    """Mean loss of tokens 1.. given those before (HF's own rounds float64 to float32)."""
    logits, prediction = _logits(model, ids), None
    if isinstance(teacher, Teacher):  # all of its logits: it may cap or scale them
        with torch.no_grad():
            theirs = _logits(teacher.model, ids)
        prediction = Prediction(lambda rows, mine: theirs, teacher.weight)
    elif teacher is not None:
        prediction = teacher.predict(ids, teacher_topk)
    return _mean_loss(logits, ids[:, 1:].flatten(), prediction)


def _logits(model: Model, ids: Tensor) -> Tensor:
    return model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)


def _hidden(model: Model, ids: Tensor) -> Tensor:
    states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return states[:, :-1].flatten(0, 1)


def _head(model: Model) -> tuple[Tensor, Tensor | None]:
    head: Any = model.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


def _mean_loss(logits: Tensor, targets: Tensor, prediction: Prediction | None) -> Tensor:
    """Mean over tokens of (1 - a) cross-entropy + a KL(teacher || model), a = its weight."""
    if prediction is None:
        return F.cross_entropy(_exact(logits), targets)
    mine, a = _exact(logits).log_softmax(-1), prediction.weight
    theirs = _exact(prediction.logits(slice(None), logits)[:, : logits.shape[1]]).log_softmax(-1)
    plain = F.nll_loss(mine, targets, reduction="none")
    kl = F.kl_div(mine, theirs, reduction="none", log_target=True).sum(-1)
    return ((1 - a) * plain + a * kl).mean()


def _exact(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


@torch.no_grad()
def loss_for(model: Model, teacher: AnyTeacher | None = None) -> Loss:
    """The chunked loss where a try shows that logits are the head's product, else the plain one."""
    if isinstance(teacher, Teacher) and loss_for(teacher.model) is next_token_loss:
        return next_token_loss
    ids = torch.arange(8, device=model.device)[None] % vocab_size(model)
    hidden, (weight, bias), head = _hidden(model, ids), _head(model), model.get_output_embeddings()
    # logits of a model that is not trained are so small that a cap on them would not show
    factor = LARGE / max(float(F.linear(hidden, weight).abs().max()), 1e-30)
    with head.register_forward_pre_hook(lambda _, args: (args[0] * factor,)):
        logits = _logits(model, ids)
    apart = float((logits - F.linear(hidden * factor, weight, bias)).abs().max())
    return chunked_loss if apart < 1e-2 * LARGE else next_token_loss


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean loss of `hidden @ weight.T + bias`; with `head_grads` its own gradient is taken as 1."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        hidden, weight, bias, targets, prediction, head_grads, is_wanted = args
        ctx.is_root, vocab, (head, padded) = bool(head_grads), len(weight), _padded(weight, bias)
        if is_wanted and head_grads is None:
            rows = weight.new_empty(head.shape)
            d_bias = None if bias is None else torch.empty_like(bias)
            head_grads = HeadGrads(rows[:vocab], d_bias)
        d_head = _aligned(head_grads.weight) if is_wanted else None
        scale = len(targets) / (head_grads.share if is_wanted else 1.0)
        losses, d_hidden = [], []
        n = CHUNK if hidden.is_cuda else min(CHUNK, SMALL // vocab or CHUNK)
        for i, (x, y) in enumerate(zip(hidden.split(n), targets.split(n), strict=True)):
            logits = F.linear(x, head, padded)  # [chunk, vocab and padding]
            rows = slice(i * n, i * n + len(y))
            losses.append(_losses_(logits, prediction, rows, y, vocab, scale, is_wanted))
            if d_head is None:
                continue
            # `logits` now holds the gradient of the loss by the logits: 0 in the padding
            d_hidden.append(logits @ head)
            fills = i == 0 and not head_grads.add
            if fills:
                torch.mm(logits.T, x, out=d_head)
            else:
                d_head.addmm_(logits.T, x)
            if head_grads.bias is not None:
                total = logits[:, :vocab].sum(0)
                head_grads.bias.copy_(total if fills else head_grads.bias + total)
        if d_head is not None:
            if d_head.data_ptr() != head_grads.weight.data_ptr():
                head_grads.weight.copy_(d_head[:vocab])
            of_head = (None, None) if ctx.is_root else (head_grads.weight, head_grads.bias)
            ctx.save_for_backward(torch.cat(d_hidden), *of_head)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, share: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.saved_tensors
        if not ctx.is_root:
            found = [None if d is None else d * share.to(d.dtype) for d in found]
        return (*found, *(None,) * 4)


linear_cross_entropy = _LinearCrossEntropy.apply


def _aligned_rows(weight: Tensor) -> int:
    return len(weight) + -len(weight) % ALIGN if weight.is_cuda else len(weight)


def _padded(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    head = _aligned(weight)
    return head, None if bias is None else F.pad(bias, (0, len(head) - len(bias)))


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


def _losses_(
    logits: Tensor,
    prediction: Prediction | None,
    rows: slice,  # the tokens among those of the batch
    targets: Tensor,
    vocab: int,
    n_tokens: float,
    wanted: bool,
) -> Tensor:
    """Each token's loss; where `wanted`, `logits` become the gradient of sum / `n_tokens`.

    That is softmax(s) - (1 - a) onehot - a softmax(t), t a teacher's logits and a its weight.
    Columns from `vocab` on are padding: they count for nothing and their gradient is 0.
    """
    fast, share, theirs = kernels.usable(logits) and logits.dtype != torch.float64, 0.0, None
    if prediction is not None:
        share = prediction.weight
        if wanted and fast and prediction.topk is not None:
            ids, log_probs = (each[rows] for each in prediction.topk)
            return kernels.distil_topk_(logits, ids, log_probs, targets, vocab, n_tokens, share)
        theirs = prediction.logits(rows, logits[:, :vocab])
    if fast:
        return kernels.softmax_(logits, targets, vocab, n_tokens, wanted, theirs, share)
    mine = _exact(logits[:, :vocab]).log_softmax(-1)
    losses = -(1 - share) * mine.gather(1, targets[:, None])[:, 0]
    probs: Tensor | float = 0.0
    if theirs is not None:
        log_p = _exact(theirs[:, :vocab]).log_softmax(-1)
        probs = log_p.exp()
        losses += share * (probs * (log_p - mine)).sum(-1)
    if wanted:
        grad = mine.exp_() - share * probs
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), share - 1.0))
        logits[:, :vocab] = grad.div_(n_tokens)
        logits[:, vocab:] = 0.0
    return losses

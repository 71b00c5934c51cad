"""Next-token cross-entropy without all the logits: head, softmax and loss in chunks of tokens.

The logits of 32 x 1024 tokens of GPT-2 are 6.6 GB in float32. Here one chunk's logits live in the model's
own precision, the softmax in float32 registers, and both gradients are made on the way forward.
torch's own chunked `linear_cross_entropy` (2.13) does the same but cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from . import kernels

Loss = Callable[[PreTrainedModel, Tensor], Tensor]  # (model, ids [batch, seq_len]) -> mean loss

CHUNK = 8192  # tokens; their logits for a vocabulary of 50,304 are 0.8 GB in bf16
ALIGN = (
    64  # rows of the head on a GPU: with GPT-2's 50,257 its products run at a sixth of their speed
)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int = CHUNK
) -> Tensor:
    """Mean cross-entropy of `hidden @ weight.T + bias` [tokens, vocab] against `targets` [tokens]."""
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk)


def chunked_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`next_token_loss` through the base model and the head, a chunk of tokens at a time."""
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    head: Any = model.get_output_embeddings()
    return linear_cross_entropy(
        hidden.flatten(0, 1), head.weight, getattr(head, "bias", None), ids[:, 1:].flatten()
    )


def next_token_loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Mean cross-entropy of tokens 1.. given those before (HF's own rounds float64 to float32)."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def loss_for(model: PreTrainedModel) -> Loss:
    """The chunked loss where the logits are the head's alone, the plain one where more is done to them.

    (Some families cap or scale their logits.) `model` is tried on a few tokens.
    """
    embeddings: Any = model.get_input_embeddings()
    ids = torch.arange(8, device=model.device)[None] % embeddings.weight.shape[0]
    plain, chunked = next_token_loss(model, ids), chunked_loss(model, ids)
    return chunked_loss if torch.allclose(plain, chunked, rtol=1e-3) else next_token_loss


class _LinearCrossEntropy(torch.autograd.Function):
    """mean over tokens of logsumexp(h W^T + b) - (h W^T + b)[target]."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
    ) -> Tensor:
        n_tokens, vocab = len(targets), weight.shape[0]
        n_pad = -vocab % ALIGN if weight.is_cuda else 0
        head = F.pad(weight, (0, 0, 0, n_pad)) if n_pad else weight
        wanted = any(ctx.needs_input_grad)
        losses, d_hidden = [], []
        d_head, d_bias = None, None
        for x, y in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            logits = x @ head.T  # [chunk, vocab + n_pad]
            if bias is not None:
                logits = logits + F.pad(bias, (0, n_pad))
            losses.append(_softmax_(logits, y, vocab, n_tokens, wanted))
            if wanted:  # `logits` now holds the gradient of the loss by the logits
                d_hidden.append(logits @ head)
                d_head = logits.T @ x if d_head is None else torch.addmm(d_head, logits.T, x)
                if bias is not None:
                    d_bias = logits.sum(0) if d_bias is None else d_bias + logits.sum(0)
        if wanted:
            assert d_head is not None
            ctx.save_for_backward(
                torch.cat(d_hidden), d_head[:vocab], None if d_bias is None else d_bias[:vocab]
            )
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, share: Tensor) -> tuple[Tensor | None, ...]:
        return (
            *(None if d is None else d * share.to(d.dtype) for d in ctx.saved_tensors),
            None,
            None,
        )


def _softmax_(logits: Tensor, targets: Tensor, vocab: int, n_tokens: int, wanted: bool) -> Tensor:
    """Each token's loss; where `wanted`, `logits` become the gradient of the mean over `n_tokens`.

    Columns from `vocab` on are padding: they count for nothing and their gradient is 0.
    """
    if kernels.usable(logits) and logits.dtype != torch.float64:
        return kernels.softmax_(logits, targets, vocab, n_tokens, wanted)
    exact = logits[:, :vocab]
    if logits.dtype in (torch.bfloat16, torch.float16):
        exact = exact.float()
    lse = exact.logsumexp(-1, keepdim=True)
    losses = (lse - exact.gather(1, targets[:, None]))[:, 0]
    if wanted:
        grad = (exact - lse).exp_()
        grad.scatter_add_(1, targets[:, None], grad.new_full((len(targets), 1), -1.0))
        logits.zero_()[:, :vocab].copy_(grad.div_(n_tokens))
    return losses

"""`twistlm generate`: a model writes, token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .runnable import Runnable, check_room


class Stream(BaseStreamer):
    """Hands text on as soon as its bytes are complete: what `generate` calls with each token."""

    def __init__(self, tokenizer: Tokenizer, emit: Callable[[str], None]):
        self.tokenizer, self.emit = tokenizer, emit
        self.decoder = DecodeStream(skip_special_tokens=True)

    def put(self, value: Tensor) -> None:
        for token in value.flatten().tolist():  # the prompt comes first, as a whole
            if text := self.decoder.step(self.tokenizer, token):
                self.emit(text)

    def end(self) -> None:
        pass


@torch.no_grad()
def write(
    runnable: Runnable,
    prompt: str,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    emit: Callable[[str], None],
) -> list[int]:
    """Emit the prompt and its continuation; greedy, unless a temperature or top-k asks to draw."""
    tokenizer = runnable.tokenizer()
    ids = torch.tensor([tokenizer.encode(prompt).ids], dtype=torch.long)
    n_new = check_room(runnable, ids.shape[1], max_new_tokens)
    options: dict[str, Any] = {"do_sample": False}
    if temperature is not None or top_k is not None:
        # top_k = 0 is "all tokens": transformers' own default would be 50
        options = {"do_sample": True, "temperature": temperature or 1.0, "top_k": top_k or 0}
        torch.manual_seed(seed)
    model: Any = runnable.model
    ids = ids.to(model.device)
    written = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=n_new,
        streamer=Stream(tokenizer, emit),
        **options,
    )
    return written[0].tolist()

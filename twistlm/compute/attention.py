"""Causal attention on whole sequences, with no mask tensor.

transformers cannot see, inside a compiled graph, that a batch holds no packed sequences, and builds
a mask [batch, 1, T, T]; the flash kernels refuse masks, and attention then takes three times as
long. Our training and evaluation sequences are never padded or packed, so `is_causal` says it all.
"""

from __future__ import annotations

from typing import Any

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "causal"


def _mask(*, kv_length: int, local_size: int | None = None, **kwargs: Any) -> Any:
    """None for plain causal attention; a sliding window shorter than the text keeps its mask."""
    if local_size is None or local_size >= kv_length:
        return None
    return sdpa_mask(kv_length=kv_length, local_size=local_size, **kwargs)


AttentionInterface.register(NAME, sdpa_attention_forward)
AttentionMaskInterface.register(NAME, _mask)


def causal_(model: PreTrainedModel) -> None:
    """Let a model that runs on whole sequences alone skip the mask."""
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)

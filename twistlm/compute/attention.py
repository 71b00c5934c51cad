"""Causal attention on whole sequences, with no mask tensor.

transformers cannot see, inside a compiled graph, that a batch holds no packed sequences, and builds
a mask [batch, 1, T, T]; the flash kernels refuse masks, and attention then takes three times as
long. Our training and evaluation sequences are never padded or packed, so `is_causal` says it all.
"""

from functools import cache
from typing import Any

from ..model.huggingface import Model

NAME = "causal"


@cache
def _register() -> None:
    """Tell transformers, once, of attention that has a mask for a sliding window alone."""
    # here, for they import torch's compiler: seconds, also of a process that has no model
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(*, kv_length: int, local_size: int | None = None, **kwargs: Any) -> Any:
        """None, unless the text is longer than the window."""
        if local_size is None or local_size >= kv_length:
            return None
        return sdpa_mask(kv_length=kv_length, local_size=local_size, **kwargs)

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, mask)


def causal_(model: Model) -> None:
    """Let a model that runs on whole sequences alone skip the mask."""
    if model.config._attn_implementation == "sdpa":
        _register()
        model.set_attn_implementation(NAME)

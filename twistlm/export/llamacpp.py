"""The runner of a GGUF file in llama.cpp."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import need
from .verify import Runner

QUANTIZES = ("q4_k_m",)  # types that llama.cpp itself makes, out of float32


def quantize_(path: Path, type_: str) -> None:
    """Replace a float32 GGUF file by llama.cpp's quantization of it."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_.upper()}")
    target = path.with_suffix(".quantized")
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it tells of every tensor
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise ValueError(f"llama.cpp cannot quantize this model to {type_}")
    os.replace(target, path)


class LlamaRunner(Runner):
    """A GGUF file in llama.cpp; `all_logits` for n_logits > 1, `exact` for a float32 KV cache."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        threads: int = 0,
        all_logits: bool = False,
        exact: bool = False,
    ):
        need("llama.cpp (it compiles)", "llama", "llama_cpp")
        import llama_cpp

        # flash attention takes other widths in every layer, but rounds keys and values to f16
        cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        self._llm = llama_cpp.Llama(
            str(path),
            n_ctx=n_ctx,
            logits_all=all_logits,
            flash_attn=not exact,
            type_k=cache,
            type_v=cache,
            n_threads=threads or None,
            n_threads_batch=threads or None,
            verbose=False,
        )
        self._last = llama_cpp.llama_get_logits_ith
        self._all_logits = all_logits

    def forget(self) -> None:
        self._llm.reset()

    def tokenize(self, text: str) -> list[int]:
        """llama.cpp's own tokens of a text."""
        return self._llm.tokenize(text.encode(), special=True)

    def read(self, ids: Sequence[int], n_logits: int) -> np.ndarray:
        self._llm.eval(list(ids))
        if self._all_logits:
            return self._llm.scores[self._llm.n_tokens - n_logits : self._llm.n_tokens].copy()
        assert n_logits == 1
        last = self._last(self._llm.ctx, -1)
        return np.ctypeslib.as_array(last, shape=(1, self._llm.n_vocab())).copy()

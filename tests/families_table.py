"""Tiny random models of every supported family: the table that the family tests run over.

Names and head counts are written down here by hand and never read from `twistlm.model.families`: a
reference that asks the code under test proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 64
N_LAYERS = 3
N_NEURONS = 48


@dataclass(frozen=True)
class Row:
    """One model: its Hugging Face config, and where its attention and FFN projections are."""

    type: str
    config: dict[str, Any]
    n_query: int = 4
    n_kv: int = 4
    head_dim: int = 8
    layers: str = "model.layers"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    attn_out: str = "self_attn.o_proj"
    ffn_ins: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    ffn_out: str = "mlp.down_proj"
    transposed: bool = False  # weights are [in, out]
    ways: tuple[str, ...] = ("head",)  # legal blocks.attn_by

    def n_attn(self, attn_by: str) -> int:
        """Attention blocks in a layer."""
        return self.n_query // self.n_kv if attn_by == "query" else self.n_kv

    def block_of_head(self, attn_by: str, head: int) -> int:
        """The block that query head `head` belongs to."""
        queries_per_kv = self.n_query // self.n_kv
        return head % queries_per_kv if attn_by == "query" else head // queries_per_kv

    def block_of_input(self, kind: str, attn_by: str, position: int, n_ffn: int) -> int:
        """The block that one input of the output projection comes from."""
        if kind == "attn":
            return self.block_of_head(attn_by, position // self.head_dim)
        return position // (N_NEURONS // n_ffn)


def _common(**more: Any) -> dict[str, Any]:
    """Special tokens are off: greedy generation must not stop early."""
    off = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return {"vocab_size": VOCAB, "num_hidden_layers": N_LAYERS, **off, **more}


def _llama_like(**more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": N_NEURONS, "num_attention_heads": 4}
    return _common(**{**sizes, "max_position_embeddings": 40, **more})


def _gqa(**more: Any) -> dict[str, Any]:
    """9 query heads on 3 kv heads, as in SmolLM2, so that both ways to cut leave K = 1, 2 < N."""
    return _llama_like(
        **{"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, **more}
    )


GROUPED: dict[str, Any] = {"n_query": 9, "n_kv": 3, "ways": ("group", "query")}
PHI: dict[str, Any] = {"attn_out": "self_attn.dense", "ffn_ins": ("mlp.fc1",), "ffn_out": "mlp.fc2"}

TABLE: dict[str, Row] = {
    "gpt2": Row(
        "gpt2",
        _common(n_embd=32, n_head=4, n_inner=N_NEURONS, n_positions=40),
        layers="transformer.h",
        qkv=("attn.c_attn",),
        attn_out="attn.c_proj",
        ffn_ins=("mlp.c_fc",),
        ffn_out="mlp.c_proj",
        transposed=True,
    ),
    "opt": Row(
        "opt",
        _common(
            hidden_size=32, num_attention_heads=4, ffn_dim=N_NEURONS, max_position_embeddings=40
        ),
        layers="model.decoder.layers",
        attn_out="self_attn.out_proj",
        ffn_ins=("fc1",),
        ffn_out="fc2",
    ),
    "phi": Row("phi", _llama_like(), **PHI),
    "phi-qk-norm": Row("phi", _llama_like(qk_layernorm=True), **PHI),
    "llama": Row("llama", _llama_like()),
    "llama-biases": Row("llama", _llama_like(attention_bias=True, mlp_bias=True)),
    "llama-gqa": Row("llama", _gqa(head_dim=8), **GROUPED),
    "llama-mqa": Row("llama", _llama_like(num_key_value_heads=1), n_kv=1, ways=("query",)),
    "mistral": Row("mistral", _gqa(head_dim=8, sliding_window=5), **GROUPED),
    "qwen2": Row("qwen2", _gqa(), **GROUPED, head_dim=4),
    "qwen3": Row("qwen3", _gqa(head_dim=8), **GROUPED),
    "gemma3_text": Row(
        "gemma3_text",
        _gqa(
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        **GROUPED,
    ),
    "smollm3": Row("smollm3", _gqa(no_rope_layers=[1, 0, 1]), **GROUPED, head_dim=4),
}


def ways(*names: str) -> Iterator[tuple[str, str]]:
    """(row, attn_by) for the named rows, or for all."""
    for name in names or TABLE:
        for attn_by in TABLE[name].ways:
            yield name, attn_by


def build(model_type: str, config: dict[str, Any], seed: int = 0) -> PreTrainedModel:
    """A random model in float32 with noise on every parameter.

    Hugging Face starts biases at 0 and norms at 1: a bias cut or scaled wrongly would not show.
    """
    torch.manual_seed(seed)
    hf_config = AutoConfig.for_model(model_type, **config)
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.2 * torch.randn_like(param))
    return model.eval()


def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """The model of one row; `.double()` it where float32 is too coarse."""
    return build(TABLE[name].type, TABLE[name].config, seed)

"""GGUF for llama.cpp: its two architectures that take a width of their own in every layer.

`deci` is Llama's graph and `openelm` is Qwen3's with tied embeddings, both with arrays for heads, kv
heads and FFN. llama.cpp's own `llama`, `qwen2`, `qwen3` and `gpt2` take one width for all layers.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from ..compute.perplexity import Text
from ..model import families, huggingface
from ..system.files import draft_folder
from . import GGUF_TYPES, llamacpp, verify


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's graphs: where it expects which tensor."""

    name: str
    shared: dict[str, str]  # Hugging Face module -> GGUF tensor, without .weight or .bias
    layer: dict[str, str]
    fused: tuple[str, ...] = ()  # these modules' rows in one `attn_qkv`
    interleaved: bool = False  # RoPE turns neighbouring pairs: rows of q and k are reordered


SHARED = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
DECI = Architecture(
    "deci",
    SHARED | {"lm_head": "output"},
    LAYER | dict(zip(QKV, ("attn_q", "attn_k", "attn_v"), strict=True)),
    interleaved=True,
)
OPENELM = Architecture(
    "openelm",
    SHARED,
    LAYER | {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"},
    fused=QKV,
)
HOMES = {"llama": DECI, "mistral": DECI, "qwen2": DECI, "qwen3": OPENELM}


def export(
    model: PreTrainedModel,
    path: Path,
    type_: str = "q8_0",
    tokenizer: Path | None = None,
    text: Text | None = None,
    prompt: str = verify.PROMPT,
) -> list[verify.Verified]:
    """Write a GGUF file and PATH.json, compare it with torch in llama.cpp where that is installed.

    Matrices get `type_`; vectors stay float32, and rows that q8_0 cannot hold (no multiple of 32) f16.
    """
    if type_ not in GGUF_TYPES:
        raise ValueError(f"--type {type_}: GGUF is written as {', '.join(GGUF_TYPES)}")
    gguf, home = _library(), _home(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(path) as folder:
        draft = folder / path.name
        tensors = dict(_tensors(model, home))
        _write(gguf, model, home, tensors, draft, type_, tokenizer)
        worst = _read_back(gguf, draft, tensors, home)
        goal = verify.reference(model, tokenizer, prompt)
        rows = [verify.torch_row(model, goal, text)]
        if llamacpp.installed():
            n_ctx = max(len(goal.logits), text.seq_len if text else 0)
            runner = llamacpp.load(draft, n_ctx, all_logits=True, exact=type_ == "f32")
            if goal.tokenizer and (found := runner.tokenize(prompt)) != goal.prompt:
                raise ValueError(f"llama.cpp splits {prompt!r} into other tokens: {found}")
            name = f"llama.cpp {type_}"
            rows.append(verify.check(name, runner, goal, text, draft.stat().st_size))
            if type_ == "f32":
                verify.demand_equal(rows[-1], goal)
        record = {"format": "gguf", "type": type_, "max_weight_delta": worst}
        record |= verify.record(rows)
        Path(f"{draft}.json").write_text(json.dumps(record, indent=1) + "\n")
        for suffix in (".json", ""):
            os.replace(f"{draft}{suffix}", f"{path}{suffix}")
    return rows


def _write(
    gguf: Any,
    model: PreTrainedModel,
    home: Architecture,
    tensors: dict[str, Tensor],
    path: Path,
    type_: str,
    tokenizer: Path | None,
) -> None:
    config, n_tokens = model.config, huggingface.vocab_size(model)
    writer = gguf.GGUFWriter(path, home.name)
    writer.add_name(path.stem)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(n_tokens)
    dh, params = families.head_dim(model.config), huggingface.state(model)
    n_query, n_key, n_ffn = (
        [
            params[f"model.layers.{i}.{name}.weight"].shape[0]
            for i in range(config.num_hidden_layers)
        ]
        for name in (QKV[0], QKV[1], "mlp.up_proj")
    )
    writer.add_head_count([n // dh for n in n_query])
    writer.add_head_count_kv([n // dh for n in n_key])
    writer.add_feed_forward_length(n_ffn)
    writer.add_key_length(dh)
    writer.add_value_length(dh)
    writer.add_rope_dimension_count(dh)
    writer.add_rope_freq_base(_rope_base(model))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = gguf.LlamaFileType
    files = {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "q8_0": kinds.MOSTLY_Q8_0}
    writer.add_file_type(files[type_])
    add_vocabulary_(writer, tokenizer, n_tokens, config)
    for name, tensor in tensors.items():
        kind = gguf.GGMLQuantizationType[_stored(tensor, type_).upper()]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _library() -> Any:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("a GGUF file needs the gguf library: pip install 'twistlm[gguf]'")
    import gguf

    return gguf


def _home(model: PreTrainedModel) -> Architecture:
    """The architecture that computes what this model computes, or the reason why none does."""
    config = model.config
    other = "use `--to onnx`, or the ticket folder with transformers or vLLM"
    if config.model_type not in HOMES:
        raise ValueError(
            f"no GGUF for {config.model_type}: llama.cpp takes a width of its own in every layer for "
            f"{', '.join(HOMES)} models only; {other}"
        )
    home = HOMES[config.model_type]
    windows = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if config.model_type == "mistral" and config.sliding_window is not None:
        windows = {f"sliding_window = {config.sliding_window}"}
    if windows:
        raise ValueError(
            f"no GGUF for this {config.model_type}: llama.cpp's {home.name} attends to everything, and "
            f"this model has {', '.join(sorted(windows))}; {other}"
        )
    if config.hidden_act != "silu":
        raise ValueError(
            f"no GGUF for this model: llama.cpp's {home.name} knows silu alone, not "
            f"{config.hidden_act}; {other}"
        )
    known = {*home.shared, *home.layer, *home.fused}
    for name in huggingface.state(model):
        module, _, leaf = name.rpartition(".")
        inner = module.split(".", 3)[3] if module.startswith("model.layers.") else module
        if inner not in known or (leaf == "bias" and home.fused):
            raise ValueError(
                f"no GGUF for this {config.model_type}: llama.cpp's {home.name} has no place for "
                f"{name}; {other}"
            )
    return home


def _tensors(model: PreTrainedModel, home: Architecture) -> Iterator[tuple[str, Tensor]]:
    """GGUF name and value of every tensor; rows of q and k in the order that llama.cpp turns them."""
    state = {name: p.detach().float().cpu() for name, p in huggingface.state(model).items()}
    dh = families.head_dim(model.config)

    def turned(name: str) -> Tensor:
        """(heads, 2 halves, dh/2) -> (heads, dh/2, 2): Hugging Face's halves as neighbours."""
        rows = state[name]
        if not home.interleaved or (".q_proj." not in name and ".k_proj." not in name):
            return rows.contiguous()
        halves = rows.reshape(-1, 2, dh // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    places = [(module, target) for module, target in home.shared.items()]
    for i in range(model.config.num_hidden_layers):
        places += [(f"model.layers.{i}.{m}", f"blk.{i}.{t}") for m, t in home.layer.items()]
        if home.fused:
            parts = [turned(f"model.layers.{i}.{module}.weight") for module in home.fused]
            yield f"blk.{i}.attn_qkv.weight", torch.cat(parts)
    for module, target in places:
        for leaf in ("weight", "bias"):
            if f"{module}.{leaf}" in state:
                yield f"{target}.{leaf}", turned(f"{module}.{leaf}")
    factors = _rope_factors(model)
    if not torch.allclose(factors, torch.ones_like(factors), rtol=1e-6):
        if home is not DECI:
            raise ValueError(f"no GGUF for this model: llama.cpp's {home.name} scales no RoPE")
        yield "rope_freqs.weight", factors


def _rope_base(model: PreTrainedModel) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def _rope_factors(model: PreTrainedModel) -> Tensor:
    """What llama.cpp divides theta^(-2i/dh) by: 1 without RoPE scaling."""
    rope: Any = model.get_submodule("model.rotary_emb")
    dh, kind = (
        families.head_dim(model.config),
        model.config.rope_parameters.get("rope_type", "default"),
    )
    if kind not in ("default", "linear", "llama3") or 2 * len(rope.inv_freq) != dh:
        raise ValueError(
            f"no GGUF for this model: rope_type {kind!r} with {2 * len(rope.inv_freq)} of {dh} head "
            f"dimensions turned is not written; default, linear and llama3 of all dimensions are"
        )
    plain = _rope_base(model) ** -(torch.arange(0, dh, 2, dtype=torch.float64) / dh)
    return (plain / rope.inv_freq.double().cpu()).float()


def _stored(tensor: Tensor, type_: str) -> str:
    if tensor.ndim == 1:
        return "f32"
    return "f16" if type_ == "q8_0" and tensor.shape[-1] % 32 else type_


def _read_back(gguf: Any, path: Path, tensors: dict[str, Tensor], home: Architecture) -> float:
    """The largest |Δweight| of the file against the tensors it was made of; other contents raise."""
    reader = gguf.GGUFReader(path)
    if (found := {t.name for t in reader.tensors}) != set(tensors):
        raise OSError(f"{path}: written tensors differ: {sorted(found ^ set(tensors))[:3]}")
    assert reader.fields["general.architecture"].contents() == home.name
    worst = 0.0
    for entry in reader.tensors:
        value = gguf.quants.dequantize(entry.data, entry.tensor_type)
        want = tensors[entry.name].numpy()
        if value.shape != want.shape:
            raise OSError(f"{path}: {entry.name} was written as {value.shape}, not {want.shape}")
        worst = max(worst, float(np.abs(value - want).max()))
    return worst


# How text is split before the merges: a tokenizer.json's own words -> llama.cpp's name
GPT4_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|NUMBER|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    ("bytes",): "gpt-2",
    ("digits", "bytes"): "smollm",
    (GPT4_LIKE.replace("NUMBER", r"\p{N}"),): "qwen2",
    (GPT4_LIKE.replace("NUMBER", r"\p{N}{1,3}"),): "llama-bpe",
}


def add_vocabulary_(
    writer: Any, path: Path | None, n_tokens: int, config: PretrainedConfig
) -> None:
    """Add tokens, merges, kinds, special ids and the way text is split to a GGUF writer."""
    from gguf import TokenType

    if path is None:  # ids in, ids out
        writer.add_tokenizer_model("none")
        return
    tokenizer, plain = Tokenizer.from_file(str(path)), json.loads(path.read_text())
    split = _split(plain, path)
    tokens = [f"[PAD{i}]" for i in range(n_tokens)]  # embeddings may have more rows than tokens
    kinds = [TokenType.UNUSED] * n_tokens
    for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
        if i >= n_tokens:
            raise ValueError(f"{path}: token {token!r} has id {i}, the model {n_tokens} embeddings")
        tokens[i], kinds[i] = token, TokenType.NORMAL
    for added in plain["added_tokens"]:
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")  # llama.cpp's word for every byte-level BPE
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = plain["model"]["merges"]  # pairs, or in older files already "a b"
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    writer.add_add_bos_token(tokenizer.encode("a").ids[0] != bare[0])
    for what in ("bos", "eos", "pad"):
        found = getattr(config, f"{what}_token_id", None)
        found = found[0] if isinstance(found, list) else found
        if found is not None:
            getattr(writer, f"add_{what}_token_id")(found)


def _split(plain: dict[str, Any], path: Path) -> str:
    """llama.cpp's name for the pre-tokenizer; a wrong one would tokenize wrongly in silence."""
    pre = plain.get("pre_tokenizer") or {}
    words = []
    for step in pre.get("pretokenizers", [pre]):
        kind = step.get("type")
        if kind == "ByteLevel" and not step.get("add_prefix_space"):
            words += ["bytes"] if step.get("use_regex", True) else []
        elif kind == "Digits" and step.get("individual_digits"):
            words.append("digits")
        elif kind == "Split":
            words.append(step["pattern"].get("Regex", kind))
        else:
            words.append(str(kind))
    model = plain["model"]["type"]
    if model != "BPE" or plain.get("normalizer") or tuple(words) not in SPLITS:
        raise ValueError(
            f"{path}: this tokenizer ({model}, split by {', '.join(words)}) has no name in llama.cpp "
            f"that twistlm knows ({', '.join(SPLITS.values())}); use `--to onnx`"
        )
    return SPLITS[tuple(words)]

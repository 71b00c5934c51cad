"""GGUF for llama.cpp: tensors, sizes and vocabulary in a file, read back and run if it can be."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..compute.perplexity import Text
from ..model import families, huggingface
from ..model.families import kv_name, sublayers
from ..system.files import draft_folder
from . import GGUF_TYPES, installed, llamacpp, need, ollama, verify
from .architectures import QKV, Architecture, add_rope_, architecture_of, widths


def export(
    model: PreTrainedModel,
    path: Path,
    type_: str = "q8_0",
    tokenizer: Path | None = None,
    text: Text | None = None,
    prompt: str = verify.PROMPT,
    tell: verify.Tell = verify.silent,
) -> list[verify.Verified]:
    """Write a GGUF file, PATH.json and PATH.Modelfile (Ollama), and compare it with torch.

    It is run in llama.cpp where that is installed. Matrices get `type_`; vectors stay float32, and
    rows that q8_0 cannot hold (no multiple of 32) f16. q4_k_m is made by llama.cpp.
    """
    if type_ not in GGUF_TYPES:
        raise ValueError(f"--type {type_}: GGUF is written as {', '.join(GGUF_TYPES)}")
    need("a GGUF file", "gguf", "gguf")
    if type_ in llamacpp.QUANTIZES:
        need(f"--type {type_}, which llama.cpp makes,", "llama", "llama_cpp")
    import gguf

    found = architecture_of(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    with draft_folder(path) as folder:
        draft = folder / path.name
        tell("write the file")
        tensors = dict(_tensors(model, found))
        plain = type_ if type_ not in llamacpp.QUANTIZES else "f32"
        _write(gguf, model, found, tensors, draft, plain, tokenizer)
        if plain != type_:
            llamacpp.quantize_(draft, type_)
        tell("read it back")
        worst = _read_back(gguf, draft, tensors)
        tell("run torch")
        goal = verify.reference(model, tokenizer, prompt)
        rows = [verify.torch_row(model, goal, text)]
        tell("run llama.cpp")
        if installed("llama_cpp"):
            n_ctx = max(len(goal.logits), text.seq_len if text else 0)
            runner = llamacpp.LlamaRunner(draft, n_ctx, all_logits=True, exact=type_ == "f32")
            if goal.tokenizer and (ids := runner.tokenize(prompt)) != goal.prompt:
                raise ValueError(f"llama.cpp splits {prompt!r} into other tokens: {ids}")
            name = f"llama.cpp {type_}"
            rows.append(verify.check(name, runner, goal, text, draft.stat().st_size))
            if type_ == "f32":
                verify.demand_equal(rows[-1], goal)
        record = {"format": "gguf", "type": type_, "max_weight_delta": worst}
        record |= verify.record(rows)
        Path(f"{draft}.json").write_text(json.dumps(record, indent=1) + "\n")
        Path(f"{draft}.Modelfile").write_text(ollama.modelfile(path.name, tokenizer))
        for suffix in (".json", ".Modelfile", ""):
            os.replace(f"{draft}{suffix}", f"{path}{suffix}")
    return rows


def _write(
    gguf: Any,
    model: PreTrainedModel,
    found: Architecture,
    tensors: dict[str, Tensor],
    path: Path,
    type_: str,
    tokenizer: Path | None,
) -> None:
    config, n_tokens = model.config, huggingface.vocab_size(model)
    writer = gguf.GGUFWriter(path, found.name)
    writer.add_name(path.stem)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(n_tokens)
    subs, sizes = sublayers(model), widths(model)
    for add, name in (
        (writer.add_head_count, subs["attn"].width),
        (writer.add_head_count_kv, kv_name(config, subs["attn"])),
        (writer.add_feed_forward_length, subs["ffn"].width),
    ):
        each = [layer[name] for layer in sizes]
        add(each if found.per_layer else each[0])
    dh = families.head_dim(config)
    writer.add_key_length(dh)
    writer.add_value_length(dh)
    if (factors := add_rope_(writer, found, model)) is not None:
        tensors["rope_freqs.weight"] = factors
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    kinds = gguf.LlamaFileType
    files = {"f32": kinds.ALL_F32, "f16": kinds.MOSTLY_F16, "q8_0": kinds.MOSTLY_Q8_0}
    writer.add_file_type(files[type_])
    add_vocabulary_(writer, tokenizer, n_tokens, config)
    for name, tensor in tensors.items():
        fits = "f16" if type_ == "q8_0" and tensor.shape[-1] % 32 else type_
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else fits.upper()]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(model: PreTrainedModel, found: Architecture) -> Iterator[tuple[str, Tensor]]:
    """GGUF name and value of every tensor; rows of q and k in the order of llama.cpp's RoPE."""
    state = {name: p.detach().float().cpu() for name, p in huggingface.state(model).items()}
    dh = families.head_dim(model.config)

    def turned(module: str, leaf: str) -> Tensor:
        """(heads, 2 halves, dh/2) -> (heads, dh/2, 2): Hugging Face's halves as neighbours."""
        rows = state[f"{module}.{leaf}"]
        if leaf == "weight" and isinstance(model.get_submodule(module), Conv1D):
            rows = rows.T
        if found.one_plus and rows.ndim == 1:
            rows = 1 + rows
        if not found.interleaved or not module.endswith(QKV[:2]):
            return rows.contiguous()
        halves = rows.reshape(-1, 2, dh // 2, *rows.shape[1:])
        return halves.transpose(1, 2).reshape(rows.shape)

    places = list(found.shared.items())
    for i in range(model.config.num_hidden_layers):
        layer = f"{found.layers}.{i}"
        places += [(f"{layer}.{m}", f"blk.{i}.{t}") for m, t in found.layer.items()]
        if found.fused:
            parts = [turned(f"{layer}.{module}", "weight") for module in found.fused]
            yield f"blk.{i}.attn_qkv.weight", torch.cat(parts)
    for module, target in places:
        for leaf in ("weight", "bias"):
            if f"{module}.{leaf}" in state:
                yield f"{target}.{leaf}", turned(module, leaf)


def _read_back(gguf: Any, path: Path, tensors: dict[str, Tensor]) -> float:
    """The largest |Δweight| of the file against what it was made of."""
    entries = gguf.GGUFReader(path).tensors
    assert len(entries) == len(tensors)
    values = ((t.name, gguf.quants.dequantize(t.data, t.tensor_type)) for t in entries)
    return max(float(np.abs(value - tensors[name].numpy()).max()) for name, value in values)


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
    template = path.parent / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text())
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
            f"{path}: this tokenizer ({model}, split by {', '.join(words)}) has no name in "
            f"llama.cpp that twistlm knows ({', '.join(SPLITS.values())}); use `--to onnx`"
        )
    return SPLITS[tuple(words)]

"""GGUF for llama.cpp: tensors, sizes and vocabulary in a file, read back and run if it can be."""

import json
import logging
import os
from collections.abc import Sequence
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
from ..model.families import kv_name, layer_widths, sublayers
from ..system.files import draft_folder
from . import QUANTIZES, check_target, check_type, installed, need, verify
from .architectures import Architecture, add_rope_, architecture_of


def export(
    model: PreTrainedModel,
    path: Path,
    type_: str = "q8_0",
    tokenizer: Path | None = None,
    text: Text | None = None,
    prompt: str = verify.PROMPT,
) -> list[verify.Verified]:
    """Write a GGUF file and PATH.json, and compare it with torch.

    It is run in llama.cpp where that is installed. Matrices get `type_`; vectors stay float32, and
    rows that q8_0 cannot hold (no multiple of 32) f16. q4_k_m is made by llama.cpp.
    """
    check_type("gguf", type_)
    found = architecture_of(model)
    check_target("gguf", path)
    with draft_folder(path) as folder:
        draft = folder / path.name
        plain = type_ if type_ not in QUANTIZES else "f32"
        tensors = _write(model, found, draft, plain, tokenizer)
        if plain != type_:
            _quantize_(draft, type_)
        worst = _read_back(draft, tensors)
        beside = verify.Comparison(model, tokenizer, text, prompt)
        if installed("llama_cpp"):
            n_ctx = max(len(beside.logits), text.seq_len if text else 0)
            runner = LlamaRunner(draft, n_ctx, all_logits=True, exact=type_ == "f32")
            ids = runner.tokenize(prompt) if beside.tokenizer else beside.prompt
            if ids[: len(beside.prompt)] != beside.prompt:
                raise ValueError(f"llama.cpp splits {prompt!r} into other tokens: {ids}")
            size = draft.stat().st_size
            beside.add(f"llama.cpp {type_}", runner, size, exact=type_ == "f32")
        beside.write(Path(f"{draft}.json"), format="gguf", type=type_, max_weight_delta=worst)
        Path(f"{path}.json").unlink(missing_ok=True)  # it says of what type the file is
        for suffix in ("", ".json"):
            os.replace(f"{draft}{suffix}", f"{path}{suffix}")
    return beside.rows


def type_of(path: Path) -> str:
    """The type of a GGUF file as its PATH.json has it; empty where one of the two is missing."""
    record = Path(f"{path}.json")
    return json.loads(record.read_text())["type"] if path.is_file() and record.is_file() else ""


def _write(
    model: PreTrainedModel, found: Architecture, path: Path, type_: str, tokenizer: Path | None
) -> dict[str, Tensor]:
    """Write the file; returns what is in it, exactly."""
    import gguf

    tensors = _tensors(model, found)
    config, n_tokens = model.config, huggingface.vocab_size(model)
    writer = gguf.GGUFWriter(path, found.name)
    writer.add_name(path.stem)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(n_tokens)
    subs, sizes = sublayers(model), layer_widths(model, huggingface.shapes(model))
    for add, name in (
        (writer.add_head_count, subs["attn"].width),
        (writer.add_head_count_kv, kv_name(config, subs["attn"])),
        (writer.add_feed_forward_length, subs["ffn"].width),
    ):
        each = [layer[name] for layer in sizes.values()]
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
    stored = "ALL_F32" if type_ == "f32" else f"MOSTLY_{type_.upper()}"
    writer.add_file_type(gguf.LlamaFileType[stored])
    add_vocabulary_(writer, tokenizer, n_tokens, config)
    for name, tensor in tensors.items():
        fits = "f16" if type_ == "q8_0" and tensor.shape[-1] % 32 else type_
        kind = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else fits.upper()]
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def _tensors(model: PreTrainedModel, found: Architecture) -> dict[str, Tensor]:
    """GGUF name and value of every tensor; rows of q and k in the order of llama.cpp's RoPE."""
    places, dh = found.places(model), families.head_dim(model.config)
    tensors: dict[str, Tensor] = {}
    for name, param in huggingface.state(model).items():
        rows, place = param.detach().float().cpu(), str(places[name])
        if rows.ndim == 2 and isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D):
            rows = rows.T
        if found.one_plus and rows.ndim == 1:
            rows = 1 + rows
        if found.interleaved and place.split(".")[-2] in ("attn_q", "attn_k"):
            # (heads, 2 halves, dh/2) -> (heads, dh/2, 2): Hugging Face's halves as neighbours
            halves = rows.reshape(-1, 2, dh // 2, *rows.shape[1:])
            rows = halves.transpose(1, 2).reshape(rows.shape)
        tensors[place] = (
            torch.cat([tensors[place], rows]) if place in tensors else rows.contiguous()
        )
    return tensors


def _read_back(path: Path, tensors: dict[str, Tensor]) -> float:
    """The largest |Δweight| of the file against what it was made of."""
    import gguf

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
    split = split_of(plain, path)
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


def split_of(plain: dict[str, Any], name: str | Path) -> str:
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
    # llama.cpp normalizes nothing: of Qwen2 it leaves NFC out, which most text is in already
    normalizer = (plain.get("normalizer") or {}).get("type")
    is_known = normalizer is None or (normalizer == "NFC" and SPLITS.get(tuple(words)) == "qwen2")
    if model != "BPE" or not is_known or tuple(words) not in SPLITS:
        raise ValueError(
            f"{name}: this tokenizer ({model}, split by {', '.join(words)}) has no name in "
            f"llama.cpp that twistlm knows ({', '.join(SPLITS.values())}); use `--to onnx`"
        )
    return SPLITS[tuple(words)]


def _quantize_(path: Path, type_: str) -> None:
    """Replace a float32 GGUF file by llama.cpp's quantization of it."""
    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{type_.upper()}")
    target = path.with_suffix(".quantized")
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)  # it tells of every tensor
    if llama_cpp.llama_model_quantize(str(path).encode(), str(target).encode(), params):
        raise ValueError(f"llama.cpp cannot quantize this model to {type_}")
    os.replace(target, path)


class LlamaRunner(verify.Runner):
    """A GGUF file in llama.cpp; `all_logits` for n_logits > 1, `exact` for a float32 KV cache."""

    def __init__(
        self, path: Path, n_ctx: int, threads: int = 0, all_logits: bool = False, exact=False
    ):
        need("llama.cpp (it compiles)", "llama", "llama_cpp")
        import llama_cpp

        # flash attention takes other widths in every layer, but rounds keys and values to f16
        cache = llama_cpp.GGML_TYPE_F32 if exact else llama_cpp.GGML_TYPE_F16
        kind: Any = {"flash_attn": not exact, "type_k": cache, "type_v": cache, "verbose": False}
        kind |= {"n_threads": threads or None, "n_threads_batch": threads or None}
        self._llm = llama_cpp.Llama(str(path), n_ctx=n_ctx, logits_all=all_logits, **kind)
        self._last = llama_cpp.llama_get_logits_ith
        self._all_logits = all_logits

    def tokenize(self, text: str) -> list[int]:
        """llama.cpp's own tokens of a text."""
        return self._llm.tokenize(text.encode(), special=True)

    def prefill(self, ids: Sequence[int], n_logits: int = 1, *, after: bool = False) -> np.ndarray:
        if not after:
            self._llm.reset()
        self._llm.eval(list(ids))
        if self._all_logits:
            return self._llm.scores[self._llm.n_tokens - n_logits : self._llm.n_tokens].copy()
        assert n_logits == 1
        last = self._last(self._llm.ctx, -1)
        return np.ctypeslib.as_array(last, shape=(1, self._llm.n_vocab())).copy()

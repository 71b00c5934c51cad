"""A tokenizer.json's byte-level BPE in GGUF's words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PretrainedConfig

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


def add_(writer: Any, path: Path | None, n_tokens: int, config: PretrainedConfig) -> None:
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

"""Tokenizers from a file, a folder, the hub or a GGUF file."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from tokenizers import Encoding, Tokenizer

from .huggingface import check_source, gguf_tokenizer, gguf_vocabulary, refusing

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
MOST_GROWTH = 32  # times as many characters; tokenizers that people use need 1 to 4


def load_tokenizer(source: str) -> Tokenizer:
    """A tokenizer from tokenizer.json, a folder with one, the hub or a GGUF file."""
    if source.startswith("gguf:"):
        tok = gguf_tokenizer(source).backend_tokenizer
    else:
        tok = _from_path_or_hub(source)
    for part in filter(None, (tok.normalizer, tok.decoder)):
        if (times := _growth(json.loads(part.__getstate__()))) > MOST_GROWTH:
            grows = f"its {type(part).__name__} may make a text {times:,} times as long"
            raise ValueError(f"tokenizer {source}: {grows}; legal are at most {MOST_GROWTH}")
    tok.no_padding()  # its file may ask for any length, of gigabytes
    tok.no_truncation()
    return tok


def _growth(step: dict[str, Any]) -> int:
    """How many times as long a text may become by a normalizer or decoder and its parts."""
    parts = step.get("normalizers", step.get("decoders", ()))
    put = len(step.get("content", step.get("prepend", "")))
    taken = len(step.get("pattern", {}).get("String", ""))  # a regex may match between characters
    return max(1, math.ceil(put / taken) if taken else 1 + put) * math.prod(map(_growth, parts))


def same_ids(a: Tokenizer, b: Tokenizer) -> bool:
    """Do two tokenizers make the same ids of every text? Compared are the parts that make them.

    The other parts are written by transformers in its own way.
    """
    ours, theirs = json.loads(a.to_str()), json.loads(b.to_str())
    return all(ours[part] == theirs[part] for part in ("normalizer", "pre_tokenizer", "model"))


def encode(tok: Tokenizer, texts: Sequence[str], special: bool = True) -> list[Encoding]:
    """The tokens of texts; what its library can make nothing of is a ValueError."""
    try:
        return tok.encode_batch(texts, add_special_tokens=special)
    except BaseException as error:  # a panic in Rust is no Exception
        if isinstance(error, TypeError):
            for text in texts:
                text.encode()  # half of a surrogate pair is a ValueError that names it
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer gave up on the text: {error}") from None


def _from_path_or_hub(source: str) -> Tokenizer:
    with refusing(f"tokenizer {source}"):
        check_source(source, "tokenizer.json")
    path = Path(source).expanduser()
    if not path.exists():
        return Tokenizer.from_pretrained(source)
    if path.is_dir() and not (path := path / "tokenizer.json").is_file():
        raise ValueError(f"no tokenizer at {source}: expected a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None


def vocabulary_of(model: str) -> dict[str, int] | None:
    """Tokens and their ids that come with a model's folder, GGUF file or hub id, or None."""
    if model.startswith("gguf:"):
        return gguf_vocabulary(model)
    if (path := Path(model)).exists():
        file = path / "tokenizer.json"
        return load_tokenizer(str(file)).get_vocab() if file.is_file() else None
    try:
        return load_tokenizer(hf_hub_download(model, "tokenizer.json")).get_vocab()
    except OSError:  # the hub has no such file, or cannot be reached
        return None


def covers(ids: dict[str, int], tok: Tokenizer) -> bool:
    """Whether every token of `tok` has its id in `ids`, whatever the bytes of both files."""
    return all(ids.get(token) == i for token, i in tok.get_vocab().items())


def find_eos(tok: Tokenizer, eos: str | None = None) -> int | None:
    """The id written after each document; None if the tokenizer has no such token."""
    if eos is not None:
        if (found := tok.token_to_id(eos)) is None:
            raise ValueError(f"--eos {eos!r}: the tokenizer has no such token")
        return found
    return next((i for name in EOS_NAMES if (i := tok.token_to_id(name)) is not None), None)

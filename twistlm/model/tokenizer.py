"""Tokenizers from a file, a folder, the hub or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

from .source import check_source

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")


def load_tokenizer(source: str) -> Tokenizer:
    """A tokenizer from tokenizer.json, a folder with one, the hub or a GGUF file.

    It neither pads nor cuts: its file may ask for padding to any length, of gigabytes.
    """
    if source.startswith("gguf:"):
        from .huggingface import gguf_tokenizer

        tok = gguf_tokenizer(source)
    else:
        tok = _from_path_or_hub(source)
    tok.no_padding()
    tok.no_truncation()
    return tok


def _from_path_or_hub(source: str) -> Tokenizer:
    try:
        check_source(source, "tokenizer.json")
    except ValueError as error:
        raise ValueError(f"tokenizer {source}: {error}") from None
    path = Path(source).expanduser()
    if not path.exists():
        return Tokenizer.from_pretrained(source)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"no tokenizer at {source}: expected a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer.json: {error}") from None


def vocabulary_of(model: str) -> dict[str, int] | None:
    """Tokens and their ids that come with a model's folder, GGUF file or hub id, or None."""
    if model.startswith("gguf:"):
        from .huggingface import gguf_vocabulary

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

"""Tokenizers from a file, a folder, the hub or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

EOS_NAMES = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")


def load_tokenizer(source: str) -> Tokenizer:
    """A tokenizer from tokenizer.json, a folder that has one, or the hub, which neither pads nor cuts.

    Its file may ask for padding to any length: a prompt of one word would take gigabytes.
    """
    tok = _load(source)
    tok.no_padding()
    tok.no_truncation()
    return tok


def _load(source: str) -> Tokenizer:
    if source.startswith("gguf:"):
        from ..model.huggingface import gguf_tokenizer

        return gguf_tokenizer(source)
    path = Path(source)
    if path.is_dir():
        path = path / "tokenizer.json"
    if path.suffix == ".json" or path.exists():
        if not path.is_file():
            raise ValueError(f"no tokenizer at {source}: expected a tokenizer.json")
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
    try:
        return Tokenizer.from_pretrained(source)
    except Exception as error:
        raise ValueError(
            f"tokenizer {source!r} is no local file and the hub gave none: {error}"
        ) from None


def vocabulary_of(model: str) -> dict[str, int] | None:
    """The tokens that a model's folder, GGUF file or hub id brings along, with their ids; None if it brings none."""
    if model.startswith("gguf:"):
        from ..model.huggingface import gguf_vocabulary

        return gguf_vocabulary(model)
    if (path := Path(model)).exists():
        file = path / "tokenizer.json"
        return load_tokenizer(str(file)).get_vocab() if file.is_file() else None
    try:
        return load_tokenizer(hf_hub_download(model, "tokenizer.json")).get_vocab()
    except OSError:  # the hub has no such file, or cannot be reached
        return None


def covers(ids: dict[str, int], tok: Tokenizer) -> bool:
    """Whether every token of `tok` has its id in `ids`, too; files of one tokenizer may differ in their bytes."""
    return all(ids.get(token) == i for token, i in tok.get_vocab().items())


def find_eos(tok: Tokenizer, eos: str | None = None) -> int | None:
    """The id written after each document; None if the tokenizer has no such token."""
    if eos is not None:
        if (found := tok.token_to_id(eos)) is None:
            raise ValueError(f"--eos {eos!r}: the tokenizer has no such token")
        return found
    return next((i for name in EOS_NAMES if (i := tok.token_to_id(name)) is not None), None)

"""Token files of words with a tokenizer behind them, and of sequences that can be told apart."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

from twistlm.data.prepare import prepare
from twistlm.data.token_file import TokenMeta, write_meta


def word_level(names: list[str]) -> Tokenizer:
    tok = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    tok.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tok


def write_words(name: str, names: list[str], n: int) -> None:
    """A real token file, with a tokenizer behind it: every word once, then random ones."""
    words = (names + random.Random(n).choices(names, k=n))[:n]
    Path(f"{name}.txt").write_text(" ".join(words))
    prepare([f"{name}.txt"], name, word_level(names), quiet=True)


def numbered_tokens(stem: Path, n: int, seq_len: int = 16) -> str:
    """A token file in which the first id of a sequence is its number."""
    tokens = np.random.default_rng(0).integers(0, n, (n, seq_len)).astype("<u2")
    tokens[:, 0] = np.arange(n)
    tokens.tofile(f"{stem}.bin")
    write_meta(stem, TokenMeta(n * seq_len, 1, n, n - 1, "uint16", "none", None, ["numbers"]))
    return str(stem)

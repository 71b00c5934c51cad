"""The text that blocks are scored on and pruned models are fitted to: the same for every command.

It is the text that was named (`--data`), else the training tokens of the parent's run: never its
validation tokens unless they are named, since the result is measured on those. From it come random
windows of `data.seq_len` tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor

from ..config import Config
from ..data.token_file import TokenFile
from ..model import huggingface
from .parent import Parent, open_text

MOST_SEQUENCES = 128  # unless more are asked for


@dataclass(frozen=True)
class Calibration:
    """Windows of a token file."""

    stem: str
    ids: Tensor  # int64 [n_sequences, seq_len]


def calibrate(
    parent: Parent,
    data: str | None,
    n: int,
    seed: int,
    options: tuple[str, str] = ("--data", "--n"),  # what the caller calls `data` and `n`
) -> Calibration:
    """`n` random windows; text that has fewer is refused."""
    file, seq_len = _open_text(parent, data, options[0]), parent.cfg.data.seq_len
    n_all = file.n_sequences(seq_len)
    if not 1 <= n <= n_all:
        raise ValueError(
            f"{file.stem} is too short for {options[1]} {n}: it has {n_all} sequences of "
            f"data.seq_len = {seq_len}"
            if n > 0
            else f"{options[1]} {n}: calibration needs at least one sequence"
        )
    return _draw(file, seq_len, n, seed)


def calibrate_on_tokens(parent: Parent, data: str | None, tokens: int, seed: int) -> Calibration:
    """About `tokens` tokens (0: no limit) in random windows: 1 to `MOST_SEQUENCES` of them."""
    file, seq_len = _open_text(parent, data, "--data"), parent.cfg.data.seq_len
    n = max(1, tokens // seq_len) if tokens else MOST_SEQUENCES
    return _draw(file, seq_len, min(n, MOST_SEQUENCES, file.n_sequences(seq_len)), seed)


def check_calibration(
    source: str, cfg: Config, data: str | None, option: str = "--data"
) -> TokenFile:
    """The text to calibrate on: `data`, or the training tokens of the run."""
    if not (data or cfg.data.train):
        raise ValueError(f"{source} has no tokens to calibrate on: give {option} STEM")
    return open_text(source, cfg, data, "train")


def _open_text(parent: Parent, data: str | None, option: str) -> TokenFile:
    cfg = parent.cfg.data
    file = check_calibration(parent.source, parent.cfg, data, option)
    file.check(cfg.seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)
    huggingface.check_positions(parent.template, cfg.seq_len)
    return file


def _draw(file: TokenFile, seq_len: int, n: int, seed: int) -> Calibration:
    rows = random.Random(seed).sample(range(file.n_sequences(seq_len)), n)
    return Calibration(file.stem, file.sequences(rows, seq_len))

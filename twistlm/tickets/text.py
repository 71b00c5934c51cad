"""The text of a parent: what it is measured on, and what its blocks are scored on."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedModel

from ..compute.perplexity import Text
from ..config import Config
from ..data.builtin import resolve
from ..data.token_file import TokenFile, open_tokens
from ..model import huggingface
from ..model.tokenizer import load_tokenizer, same_ids
from .parent import Parent

MOST_SEQUENCES = 128  # of calibration, unless more are asked for


def open_text(
    source: str,
    cfg: Config,
    data: str | None,
    split: Literal["train", "valid"],
    option: str = "--data",  # what the caller calls `data`
) -> TokenFile:
    """The token file `data`, or the run's own: found from here, or from a folder above the run."""
    if data:
        return open_tokens(resolve(data, split))
    stem = getattr(cfg.data, split)
    if not stem:
        what = "to calibrate on" if split == "train" else "of its own"
        raise ValueError(f"{source} has no tokens {what}: give {option} STEM")
    found = resolve(stem, split, Path(source))
    if not Path(f"{found}.bin").is_file():
        raise ValueError(
            f"the run's own tokens, data.{split} = {stem!r}, are neither here nor in a folder "
            f"above {source}: give {option} STEM"
        )
    return open_tokens(found)


def check_text(parent: Parent, file: TokenFile) -> None:
    """A text whose sequences the model can read."""
    seq_len = parent.cfg.data.seq_len
    file.check(seq_len, huggingface.vocab_size(parent.template), parent.tokenizer_sha256)


def text_of(parent: Parent, data: str | None, tokens: int) -> Text:
    """The first tokens (0: all) of `data`, or of the run's own validation tokens."""
    file = open_text(parent.source, parent.cfg, data, "valid")
    check_text(parent, file)
    return Text(file, parent.cfg.data.seq_len, tokens)


def text_for(
    model: PreTrainedModel, file: TokenFile, seq_len: int, tokens: int, tokenizer: Path | None
) -> Text:
    """The first tokens (0: all) of a file that a model, with its own tokenizer, can read."""
    huggingface.check_positions(model, seq_len)
    file.check(seq_len, huggingface.vocab_size(model))
    theirs = file.tokenizer_path
    if tokenizer is not None and tokenizer.is_file() and theirs.is_file():
        ours, other = (load_tokenizer(str(path)) for path in (tokenizer, theirs))
        if not same_ids(ours, other):  # the number would mean nothing
            raise ValueError(f"{file.stem} was made with another tokenizer than {tokenizer}")
    return Text(file, seq_len, tokens)


@dataclass(frozen=True)
class Calibration:
    """Windows of the text that blocks are scored on and pruned models are fitted to."""

    stem: str
    ids: Tensor  # int64 [n_sequences, seq_len]

    def to_dict(self) -> dict[str, Any]:
        n, seq_len = self.ids.shape
        return {"data": self.stem, "n_sequences": n, "seq_len": seq_len}


def calibrate(
    parent: Parent,
    data: str | None,
    n: int,
    seed: int,
    options: tuple[str, str] = ("--data", "--n"),  # what the caller calls `data` and `n`
) -> Calibration:
    """`n` random windows of `data.seq_len` tokens; text that has fewer is refused."""
    seq_len = parent.cfg.data.seq_len
    file = open_text(parent.source, parent.cfg, data, "train", options[0])
    check_text(parent, file)
    n_all = file.n_sequences(seq_len)
    if not 1 <= n <= n_all:
        raise ValueError(
            f"{file.stem} is too short for {options[1]} {n}: it has {n_all} sequences of "
            f"data.seq_len = {seq_len}; legal are 1..{n_all}"
        )
    rows = random.Random(seed).sample(range(n_all), n)
    return Calibration(file.stem, file.sequences(rows, seq_len))


def calibrate_on_tokens(parent: Parent, data: str | None, tokens: int, seed: int) -> Calibration:
    """About `tokens` tokens (0: no limit) in random windows: 1 to `MOST_SEQUENCES` of them."""
    seq_len = parent.cfg.data.seq_len
    n_all = open_text(parent.source, parent.cfg, data, "train").n_sequences(seq_len)
    n = tokens // seq_len if tokens else MOST_SEQUENCES
    return calibrate(parent, data, max(1, min(n, MOST_SEQUENCES, n_all)), seed)

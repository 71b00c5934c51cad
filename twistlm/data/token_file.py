"""Token files, and batches as a pure function of (seed, worker, step).

A token file is `STEM.bin` (little-endian uint16 or uint32, memory-mapped), `STEM.json` (counts,
hashes, where it came from) and `STEM.tokenizer.json` (the tokenizer that made it).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenMeta:
    """What `STEM.json` says."""

    n_tokens: int
    n_documents: int
    vocab_size: int
    max_id: int
    dtype: str
    tokenizer_sha256: str
    eos_id: int | None
    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file, opened and checked."""

    stem: str
    meta: TokenMeta
    tokens: np.ndarray

    @property
    def tokenizer_path(self) -> Path:
        return Path(f"{self.stem}.tokenizer.json")

    def n_sequences(self, seq_len: int) -> int:
        return self.meta.n_tokens // seq_len

    def sequences(self, rows: np.ndarray | list[int], seq_len: int) -> Tensor:
        """Non-overlapping windows by number: int64 [len(rows), seq_len]."""
        starts = np.asarray(rows, dtype=np.int64)[:, None] * seq_len
        return torch.from_numpy(self.tokens[starts + np.arange(seq_len)].astype(np.int64))

    def check(self, seq_len: int, vocab_size: int, tokenizer_sha256: str | None = None) -> None:
        """The file must hold a sequence, and its ids must mean something to the model."""
        if self.n_sequences(seq_len) < 1:
            raise ValueError(
                f"{self.stem}: {self.meta.n_tokens} tokens are shorter than one sequence of "
                f"data.seq_len = {seq_len}"
            )
        if self.meta.max_id >= vocab_size:
            raise ValueError(
                f"{self.stem}: token id {self.meta.max_id} does not exist in the model's vocabulary of "
                f"{vocab_size}: the tokenizer does not match the model"
            )
        if tokenizer_sha256 and tokenizer_sha256 != self.meta.tokenizer_sha256:
            raise ValueError(
                f"{self.stem} was made with another tokenizer (sha256 "
                f"{self.meta.tokenizer_sha256[:12]}...) than this run's ({tokenizer_sha256[:12]}...)"
            )


def open_tokens(stem: str) -> TokenFile:
    """Open `STEM.bin` + `STEM.json`, refusing files that do not belong together."""
    stem = stem.removesuffix(".bin").removesuffix(".json")
    meta_path, bin_path = Path(f"{stem}.json"), Path(f"{stem}.bin")
    if not meta_path.is_file() or not bin_path.is_file():
        raise ValueError(
            f"no token file {stem}.bin + {stem}.json: make one with `twistlm prepare FILE... -o {stem}`"
        )
    try:
        meta = TokenMeta(**json.loads(meta_path.read_text()))
        dtype = np.dtype(meta.dtype).newbyteorder("<")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{meta_path} is not a token file's description: {error}") from None
    size = bin_path.stat().st_size
    if size != meta.n_tokens * dtype.itemsize or size == 0:
        raise ValueError(
            f"{bin_path} has {size} bytes, but {meta_path.name} says {meta.n_tokens} tokens of "
            f"{dtype.itemsize} bytes: the file is empty, truncated or from another run"
        )
    return TokenFile(stem, meta, np.memmap(bin_path, dtype=dtype, mode="r"))


def write_meta(stem: Path, meta: TokenMeta) -> None:
    Path(f"{stem}.json").write_text(json.dumps(asdict(meta), indent=1) + "\n")

"""Lessons: a teacher's k likeliest tokens and their log-probs for every prediction in a token file.

The windows are those of training: without overlap, seq_len tokens, seq_len - 1 predictions in each. In
`STEM.teacher.bin` a prediction is k token ids (little-endian uint16; uint32 for vocabularies beyond 65,536),
likeliest first, and k log-probs (float16). `STEM.teacher.json` says whose they are, and for which tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..system.files import file_sha256, whole_file
from .token_file import TokenFile

MOST = 1024  # likeliest tokens: beyond it a cache is larger than any teacher is slow
LEAST_LOG_PROB = -60000.0  # what float16 still holds: a token that the teacher rules out


@dataclass(frozen=True)
class LessonsMeta:
    """What `STEM.teacher.json` says."""

    teacher: str
    weights_sha256: str  # of the teacher's parameters
    top: int  # k
    seq_len: int
    vocab_size: int  # of the teacher's embeddings: it must be the model's
    n_sequences: int
    tokens_sha256: str  # of STEM.bin
    tokenizer_sha256: str
    n_bytes: int = 0  # of STEM.teacher.bin
    sha256: str = ""

    @property
    def record(self) -> int:
        """Bytes of one prediction."""
        return self.top * (id_bytes(self.vocab_size) + 2)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n_sequences, self.seq_len - 1, self.record


@dataclass(frozen=True)
class Lessons:
    """A memory-mapped cache of a teacher's predictions, opened and checked."""

    stem: str
    meta: LessonsMeta
    records: np.ndarray  # uint8 [n_sequences, seq_len - 1, bytes of a prediction]

    def sequences(self, rows: np.ndarray | list[int]) -> Tensor:
        """The predictions for windows by number, as they lie in the file: `unpack` reads them."""
        told = torch.from_numpy(self.records[np.asarray(rows, dtype=np.int64)])
        if (largest := int(unpack(told, self.meta.vocab_size)[0].max())) >= self.meta.vocab_size:
            raise ValueError(
                f"{self.stem}.teacher.bin is damaged: it holds token {largest} of a vocabulary of "
                f"{self.meta.vocab_size}"
            )
        return told


def id_bytes(vocab_size: int) -> int:
    return 2 if vocab_size <= 1 << 16 else 4


def pack(ids: Tensor, log_probs: Tensor, vocab_size: int) -> Tensor:
    """Token ids and log-probs [..., k] as uint8 [..., bytes]."""
    words = ids.to(torch.int16 if id_bytes(vocab_size) == 2 else torch.int32)
    halves = log_probs.clamp(min=LEAST_LOG_PROB).half()
    return torch.cat([words.view(torch.uint8), halves.view(torch.uint8)], -1)


def unpack(told: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """uint8 [..., bytes] as token ids int64 [..., k] and log-probs float16 [..., k]."""
    width = id_bytes(vocab_size)
    top = told.shape[-1] // (width + 2)
    words, halves = (part.contiguous() for part in told.split([top * width, top * 2], -1))
    ids = words.view(torch.int16).long() & 0xFFFF if width == 2 else words.view(torch.int32).long()
    return ids, halves.view(torch.float16)


def write_lessons(tokens: TokenFile, meta: LessonsMeta, pieces: Iterable[Tensor]) -> Lessons:
    """Write packed predictions, window after window; they appear whole or not at all."""
    path, about = _paths(tokens.stem)
    digest = hashlib.sha256()

    def fill(draft: Path) -> None:
        with draft.open("wb") as file:
            for piece in pieces:
                digest.update(piece.numpy().data)
                file.write(piece.numpy().data)
        about.unlink(missing_ok=True)  # of an earlier cache: now it would describe other bytes

    whole_file(path, fill)
    done = replace(meta, n_bytes=path.stat().st_size, sha256=digest.hexdigest())
    whole_file(about, json.dumps(asdict(done), indent=1) + "\n")
    return open_lessons(tokens, meta.seq_len, meta.vocab_size)


def open_lessons(tokens: TokenFile, seq_len: int, vocab_size: int) -> Lessons:
    """The lessons beside a token file, refusing those of other tokens, windows or vocabularies."""
    path, about = _paths(tokens.stem)
    again = f"make it with `twistlm prepare -o {tokens.stem} --teacher MODEL --seq-len {seq_len}`"
    if not path.is_file() or not about.is_file():
        raise ValueError(f"no teacher's cache {path} + {about}: {again}")
    try:
        meta = LessonsMeta(**json.loads(about.read_text()))
        n_bytes = meta.n_sequences * (meta.seq_len - 1) * meta.record
    except (TypeError, ValueError) as error:
        raise ValueError(f"{about} is not the description of a teacher's cache: {error}") from None
    if meta.seq_len != seq_len:
        raise ValueError(
            f"{about} is for sequences of {meta.seq_len} tokens, data.seq_len is {seq_len}: {again}"
        )
    if meta.vocab_size != vocab_size:
        raise ValueError(
            f"{about} is of a teacher that knows {meta.vocab_size} tokens, the model {vocab_size}: a "
            f"teacher needs the same tokenizer"
        )
    if not 1 <= meta.top <= min(vocab_size, MOST):
        raise ValueError(f"{about}: top = {meta.top} must lie in 1..{min(vocab_size, MOST)}")
    if (size := path.stat().st_size) != n_bytes or size != meta.n_bytes:
        raise ValueError(
            f"{path} has {size} bytes, {about.name} says {meta.n_bytes} for {meta.n_sequences} sequences: "
            f"the file is truncated or from another run"
        )
    mine = (tokens.n_sequences(seq_len), tokens.meta.tokenizer_sha256, tokens_sha256(tokens))
    if (meta.n_sequences, meta.tokenizer_sha256, meta.tokens_sha256) != mine:
        raise ValueError(f"{about} is for other tokens than those in {tokens.stem}.bin: {again}")
    return Lessons(tokens.stem, meta, np.memmap(path, np.uint8, "r", shape=meta.shape))


def tokens_sha256(tokens: TokenFile) -> str:
    """Of the token file's ids."""
    return file_sha256(Path(f"{tokens.stem}.bin"))


def _paths(stem: str) -> tuple[Path, Path]:
    return Path(f"{stem}.teacher.bin"), Path(f"{stem}.teacher.json")

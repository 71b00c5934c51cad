"""A teacher's k likeliest tokens and their log-probs for every prediction in a token file.

The windows are those of training: without overlap, seq_len tokens, seq_len - 1 predictions in each.
In `STEM.teacher.bin` a prediction is k token ids (little-endian uint16; uint32 for vocabularies
beyond 65,536), likeliest first, and k log-probs (float16). `STEM.teacher.json` says whose they are,
and for which tokens.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..system import manifest
from ..system.files import file_sha256, is_locked, naming, whole_file
from .token_file import TokenFile, check_ranges, read_description

PART = "teacher.bin"  # STEM.PART is vouched for by STEM.teacher.json
MOST = 1024  # likeliest tokens: beyond it a cache is larger than any teacher is slow
SAVE = 64 << 20  # bytes after which a cache in the making is made safe
LEAST_LOG_PROB = -60000.0  # what float16 still holds: a token that the teacher rules out


@dataclass(frozen=True)
class TeacherCacheMeta:
    """What `STEM.teacher.json` says."""

    teacher: str
    weights_sha256: str  # of the teacher's parameters
    top: int  # k
    seq_len: int
    vocab_size: int  # of the teacher's embeddings: it must be the model's
    n_sequences: int
    tokens_sha256: str  # of STEM.bin
    tokenizer_sha256: str

    def __post_init__(self) -> None:
        check_ranges(self, vocab_size=(1, 1 << 31), seq_len=(2, 1 << 31), n_sequences=(1, 1 << 48))
        check_ranges(self, top=(1, min(MOST, self.vocab_size)))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Windows, predictions in each, bytes of a prediction."""
        return self.n_sequences, self.seq_len - 1, self.top * (id_bytes(self.vocab_size) + 2)

    @property
    def sequence_bytes(self) -> int:
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class TeacherCache:
    """A memory-mapped cache of a teacher's predictions, opened and checked."""

    stem: str
    meta: TeacherCacheMeta
    records: np.ndarray  # uint8 [n_sequences, seq_len - 1, bytes of a prediction]

    def sequences(self, rows: np.ndarray | list[int]) -> Tensor:
        """The predictions for windows by number, as they lie in the file: `unpack` reads them."""
        told, width = self.records[np.asarray(rows, dtype=np.int64)], id_bytes(self.meta.vocab_size)
        ids = told[..., : self.meta.top * width].view(f"<u{width}")
        if (largest := int(ids.max(initial=0))) >= self.meta.vocab_size:
            what = f"token {largest} of a vocabulary of {self.meta.vocab_size}"
            raise ValueError(f"{self.stem}.{PART} is damaged: it holds {what}")
        return torch.from_numpy(told)


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


def write_teacher_cache(
    tokens: TokenFile, meta: TeacherCacheMeta, pieces: Callable[[int], Iterable[Tensor]]
) -> TeacherCache:
    """Write packed predictions; `pieces(first)` makes those from window `first` on.

    The cache appears whole or not at all. What a stopped process had written stays in
    `STEM.teacher.part`, and the next one for the same tokens, teacher and k goes on with it.
    """
    path, about = _paths(tokens.stem)
    growing, state = path.with_suffix(".part"), path.with_suffix(".part.json")
    with naming(path), growing.open("a+b") as file:
        opened = os.fstat(file.fileno())  # renamed since, it is another process's finished cache
        if not (is_locked(file) and growing.exists() and os.path.samestat(opened, growing.stat())):
            raise ValueError(f"{path}: another process makes this cache; wait for it")
        n_done, digest = _kept(file, state, meta)
        n_saved = n_done

        def save() -> None:
            """From here on a later process goes on."""
            file.flush()
            os.fsync(file.fileno())
            told = {"meta": asdict(meta), "n_done": n_done, "sha256": digest.hexdigest()}
            whole_file(state, manifest.written(told))

        try:
            for piece in pieces(n_done):
                digest.update(piece.numpy().data)
                file.write(piece.numpy().data)
                n_done += len(piece)
                if (n_done - n_saved) * meta.sequence_bytes >= SAVE:
                    save()
                    n_saved = n_done
        finally:
            if n_done > n_saved:
                save()
            elif not n_done:
                growing.unlink()
        about.unlink(missing_ok=True)  # of an earlier cache: now it would describe other bytes
        growing.replace(path)
    state.unlink(missing_ok=True)
    files = {PART: {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}}
    record = manifest.sealed({**asdict(meta), manifest.FILES: files})
    whole_file(about, manifest.written(record))
    return open_teacher_cache(tokens, meta.seq_len, meta.vocab_size)


def _kept(file: BufferedRandom, state: Path, meta: TeacherCacheMeta) -> tuple[int, Any]:
    """Windows that an earlier process left of this cache, and their sha256; the rest is cut off."""
    # nothing, or nothing that can be read
    with suppress(OSError, ValueError, TypeError, KeyError):
        told = manifest.read_json(state)
        n = int(told["n_done"])
        if told["meta"] == asdict(meta) and 0 < n <= meta.n_sequences:
            file.truncate(n * meta.sequence_bytes)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256")
            if digest.hexdigest() == told["sha256"]:
                return n, digest
    file.truncate(0)
    return 0, hashlib.sha256()


def open_teacher_cache(tokens: TokenFile, seq_len: int, vocab_size: int) -> TeacherCache:
    """The lessons beside a token file, refusing those of other tokens, windows or vocabularies."""
    path, about = _paths(tokens.stem)
    again = f"make it with `twistlm prepare -o {tokens.stem} --teacher MODEL --seq-len {seq_len}`"
    if not path.is_file() or not about.is_file():
        raise ValueError(f"no teacher's cache {path} + {about}: {again}")
    meta, file = _read(about)
    if meta.seq_len != seq_len:
        its = f"{about} is for sequences of {meta.seq_len} tokens"
        raise ValueError(f"{its}, data.seq_len is {seq_len}: {again}")
    if meta.vocab_size != vocab_size:
        raise ValueError(
            f"{about} is of a teacher that knows {meta.vocab_size} tokens, the model {vocab_size}: "
            "a teacher needs the same tokenizer"
        )
    if (needed := math.prod(meta.shape)) != (found := path.stat().st_size):
        raise ValueError(f"{path} is damaged: {found:,} bytes instead of {needed:,}")
    mine = (tokens.n_sequences(seq_len), tokens.meta.tokenizer_sha256, tokens_sha256(tokens))
    if (meta.n_sequences, meta.tokenizer_sha256, meta.tokens_sha256) != mine:
        raise ValueError(f"{about} is for other tokens than those in {tokens.stem}.bin: {again}")
    manifest.check_file(path, file)
    return TeacherCache(tokens.stem, meta, np.memmap(path, np.uint8, "r", shape=meta.shape))


def verify_teacher_cache(tokens: TokenFile) -> str | None:
    """Read every byte of what stands beside a token file; a sentence about what was found right."""
    path, about = _paths(tokens.stem)
    if not about.is_file():
        return None
    meta, _ = _read(about)
    open_teacher_cache(tokens, meta.seq_len, meta.vocab_size)
    return f"teacher's cache {path}: {meta.n_sequences:,} sequences match their sha256"


def _read(about: Path) -> tuple[TeacherCacheMeta, dict[str, Any]]:
    """The description, and what it vouches for."""
    what = "the description of a teacher's cache"
    meta, record = read_description(about, TeacherCacheMeta, what)
    if (file := manifest.vouched(about, record).get(PART)) is None:
        raise ValueError(f"{about} is not {what}: it names no {PART}")
    return meta, file


def tokens_sha256(tokens: TokenFile) -> str:
    """Of the token file's ids."""
    return tokens.sha256 or file_sha256(Path(f"{tokens.stem}.bin"))


def _paths(stem: str) -> tuple[Path, Path]:
    return Path(f"{stem}.{PART}"), Path(f"{stem}.teacher.json")

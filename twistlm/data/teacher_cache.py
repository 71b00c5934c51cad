"""Lessons: a teacher's k likeliest tokens and their log-probs for every prediction in a token file.

The windows are those of training: without overlap, seq_len tokens, seq_len - 1 predictions in each.
In `STEM.teacher.bin` a prediction is k token ids (little-endian uint16; uint32 for vocabularies
beyond 65,536), likeliest first, and k log-probs (float16). `STEM.teacher.json` says whose they are,
and for which tokens.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..system import manifest
from ..system.files import file_sha256, is_locked, naming, whole_file
from ..system.manifest import HashCheck, Vouched
from .token_file import TokenFile

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
        """Refuse what no cache can say, before memory is spent on it."""
        for name, least, most in (
            ("vocab_size", 1, 1 << 31),
            ("top", 1, MOST),
            ("seq_len", 2, 1 << 31),
            ("n_sequences", 1, 1 << 48),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{name} is {value!r}, legal are {least}..{most}")
        if self.top > self.vocab_size:
            raise ValueError(f"top is {self.top}, legal are 1..{self.vocab_size}")

    @property
    def record(self) -> int:
        """Bytes of one prediction."""
        return self.top * (id_bytes(self.vocab_size) + 2)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.n_sequences, self.seq_len - 1, self.record

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape)

    @property
    def sequence_bytes(self) -> int:
        return math.prod(self.shape[1:])


@dataclass(frozen=True)
class TeacherCache:
    """A memory-mapped cache of a teacher's predictions, opened and checked."""

    stem: str
    meta: TeacherCacheMeta
    records: np.ndarray  # uint8 [n_sequences, seq_len - 1, bytes of a prediction]
    hashed: HashCheck

    def sequences(self, rows: np.ndarray | list[int]) -> Tensor:
        """The predictions for windows by number, as they lie in the file: `unpack` reads them."""
        self.hashed.raise_damage()
        told, width = self.records[np.asarray(rows, dtype=np.int64)], id_bytes(self.meta.vocab_size)
        ids = told[..., : self.meta.top * width].view(f"<u{width}")
        if (largest := int(ids.max(initial=0))) >= self.meta.vocab_size:
            raise ValueError(
                f"{self.stem}.{PART} is damaged: it holds token {largest} of a vocabulary of "
                f"{self.meta.vocab_size}"
            )
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
    with _growing(path, meta) as part:
        for piece in pieces(part.n_done):
            part.add(piece)
        about.unlink(missing_ok=True)  # of an earlier cache: now it would describe other bytes
    files = {PART: {"bytes": path.stat().st_size, "sha256": part.digest.hexdigest()}}
    record = manifest.sealed({**asdict(meta), manifest.FILES: files})
    whole_file(about, manifest.written(record))
    return open_teacher_cache(tokens, meta.seq_len, meta.vocab_size)


class _Part:
    """A cache in the making: a file that grows, and beside it how far it is safe on the disk."""

    def __init__(self, file: BufferedRandom, about: Path, meta: TeacherCacheMeta):
        self.file, self.about, self.meta = file, about, meta
        self.n_done, self.digest = self._kept()  # windows; their sha256
        file.truncate(self.n_done * meta.sequence_bytes)
        self.n_saved = self.n_done

    def _kept(self) -> tuple[int, Any]:
        """What an earlier process left for this cache, if every byte of it is as it was."""
        try:
            told = manifest.read_json(self.about)
            n_done = int(told["n_done"])
            if told["meta"] == asdict(self.meta) and 0 < n_done <= self.meta.n_sequences:
                self.file.truncate(n_done * self.meta.sequence_bytes)
                self.file.seek(0)
                digest = hashlib.file_digest(self.file, "sha256")
                if digest.hexdigest() == told["sha256"]:
                    return n_done, digest
        except (OSError, ValueError, TypeError, KeyError):  # nothing, or nothing that can be read
            pass
        return 0, hashlib.sha256()

    def add(self, piece: Tensor) -> None:
        """Packed predictions [windows, seq_len - 1, bytes] of the next windows."""
        self.digest.update(piece.numpy().data)
        self.file.write(piece.numpy().data)
        self.n_done += len(piece)
        if (self.n_done - self.n_saved) * self.meta.sequence_bytes >= SAVE:
            self.save()

    def save(self) -> None:
        """From here on a later process goes on."""
        self.file.flush()
        os.fsync(self.file.fileno())
        told = {"meta": asdict(self.meta), "n_done": self.n_done}
        whole_file(self.about, manifest.written({**told, "sha256": self.digest.hexdigest()}))
        self.n_saved = self.n_done


@contextmanager
def _growing(path: Path, meta: TeacherCacheMeta) -> Iterator[_Part]:
    """The part that becomes `path` at the end; after an error it stays for the next process."""
    growing, about = path.with_suffix(".part"), path.with_suffix(".part.json")
    with naming(path), growing.open("a+b") as file:
        opened = os.fstat(file.fileno())  # renamed since, it is another process's finished cache
        if not (is_locked(file) and growing.exists() and os.path.samestat(opened, growing.stat())):
            raise ValueError(f"{path}: another process makes this cache; wait for it")
        part = _Part(file, about, meta)
        try:
            yield part
        finally:
            if part.n_done > part.n_saved:
                part.save()
            elif not part.n_done:
                growing.unlink()
        growing.replace(path)
    about.unlink(missing_ok=True)


def open_teacher_cache(tokens: TokenFile, seq_len: int, vocab_size: int) -> TeacherCache:
    """The lessons beside a token file, refusing those of other tokens, windows or vocabularies."""
    path, about = _paths(tokens.stem)
    again = f"make it with `twistlm prepare -o {tokens.stem} --teacher MODEL --seq-len {seq_len}`"
    if not path.is_file() or not about.is_file():
        raise ValueError(f"no teacher's cache {path} + {about}: {again}")
    meta, file = _read(about)
    if meta.seq_len != seq_len:
        raise ValueError(
            f"{about} is for sequences of {meta.seq_len} tokens, data.seq_len is {seq_len}: {again}"
        )
    if meta.vocab_size != vocab_size:
        raise ValueError(
            f"{about} is of a teacher that knows {meta.vocab_size} tokens, the model {vocab_size}: "
            "a teacher needs the same tokenizer"
        )
    manifest.check_size(path, file)
    if meta.n_bytes != file.n_bytes:
        raise ValueError(
            f"{path} has {file.n_bytes} bytes, {about.name} needs {meta.n_bytes}: both are not of "
            "one cache"
        )
    mine = (tokens.n_sequences(seq_len), tokens.meta.tokenizer_sha256, tokens_sha256(tokens))
    if (meta.n_sequences, meta.tokenizer_sha256, meta.tokens_sha256) != mine:
        raise ValueError(f"{about} is for other tokens than those in {tokens.stem}.bin: {again}")
    records = np.memmap(path, np.uint8, "r", shape=meta.shape)
    return TeacherCache(tokens.stem, meta, records, HashCheck(path, file.sha256))


def verify_teacher_cache(tokens: TokenFile) -> str | None:
    """Read every byte of what stands beside a token file; a sentence about what was found right."""
    path, about = _paths(tokens.stem)
    if not about.is_file():
        return None
    meta, file = _read(about)
    found = open_teacher_cache(tokens, meta.seq_len, meta.vocab_size)
    manifest.check_hash(path, file.sha256)
    return f"teacher's cache {path}: {found.meta.n_sequences:,} sequences match their sha256"


def _read(about: Path) -> tuple[TeacherCacheMeta, Vouched]:
    """The description, and what it vouches for."""
    try:
        record = manifest.read_json(about)
        rest = {k: v for k, v in record.items() if k not in (manifest.OWN, manifest.FILES)}
        meta, file = TeacherCacheMeta(**rest), manifest.vouched(about, record).get(PART)
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{about} is not the description of a teacher's cache: {error}") from None
    if file is None:
        raise ValueError(f"{about} is not the description of a teacher's cache: it names no {PART}")
    return meta, file


def tokens_sha256(tokens: TokenFile) -> str:
    """Of the token file's ids."""
    if tokens.hashed is not None:
        return tokens.hashed.sha256
    return file_sha256(Path(f"{tokens.stem}.bin"))


def _paths(stem: str) -> tuple[Path, Path]:
    return Path(f"{stem}.{PART}"), Path(f"{stem}.teacher.json")

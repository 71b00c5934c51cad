"""Token files: `STEM.bin` (little-endian ids, memory-mapped) and what describes them.

`STEM.json` holds counts, where the text came from, and bytes and sha256 of the other two files;
`STEM.tokenizer.json` is the tokenizer that made the ids.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..system import manifest
from ..system.manifest import HashCheck, Vouched

DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PARTS = ("bin", "tokenizer.json")  # STEM.part is vouched for by STEM.json


def check_ranges(meta: object, **ranges: tuple[int, int]) -> None:
    """Refuse numbers that no file can have, before memory is spent on them."""
    for name, (least, most) in ranges.items():
        value = getattr(meta, name)
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{name} is {value!r}, legal are {least}..{most}")


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

    def __post_init__(self) -> None:
        """Refuse what no token file can say; the JSON is a stranger's until its hash is known."""
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, legal are {' and '.join(DTYPES)}")
        check_ranges(
            self,
            n_tokens=(0, manifest.LARGEST - 1),
            n_documents=(0, manifest.LARGEST - 1),
            vocab_size=(1, (1 << 33) - 1),
            max_id=(0, (1 << 8 * DTYPES[self.dtype].itemsize) - 1),
        )
        if not isinstance(self.tokenizer_sha256, str):
            raise ValueError(f"tokenizer_sha256 is {self.tokenizer_sha256!r}, not text")


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file, opened and checked."""

    stem: str
    meta: TokenMeta
    tokens: np.ndarray
    hashed: HashCheck | None = None  # None: nothing vouches for a file of before manifests

    @property
    def tokenizer_path(self) -> Path:
        return Path(f"{self.stem}.tokenizer.json")

    @property
    def sha256(self) -> str:
        """Of the ids; empty where nothing vouches for them."""
        return self.hashed.sha256 if self.hashed is not None else ""

    def n_sequences(self, seq_len: int) -> int:
        return self.meta.n_tokens // seq_len

    def sequences(self, rows: np.ndarray | list[int], seq_len: int) -> Tensor:
        """Non-overlapping windows by number: int64 [len(rows), seq_len], refusing illegal ids."""
        ids, bad = self.read(rows, seq_len)
        if bad:
            raise ValueError(f"{self.describe(bad[0], seq_len)}: the file is damaged")
        return torch.from_numpy(ids.astype(np.int64))

    def read(self, rows: np.ndarray | list[int], seq_len: int) -> tuple[np.ndarray, list[int]]:
        """Windows [len(rows), seq_len] as they are, and which of them hold an illegal id."""
        ids = self._cut(rows, seq_len)
        worst = ids.max(axis=1, initial=0)
        bad = [int(row) for row, top in zip(rows, worst, strict=True) if top > self.meta.max_id]
        return ids, bad

    def describe(self, row: int, seq_len: int) -> str:
        """The name of a sequence, and its largest id."""
        return (
            f"{self.stem}.bin: sequence {row} (tokens {row * seq_len}..{(row + 1) * seq_len - 1}) "
            f"holds id {int(self._cut([row], seq_len).max())}, the largest legal one is "
            f"{self.meta.max_id}"
        )

    def _cut(self, rows: np.ndarray | list[int], seq_len: int) -> np.ndarray:
        """[len(rows), seq_len] of the file's own dtype; a file known to be damaged is refused."""
        if self.hashed is not None:
            self.hashed.raise_damage()
        starts = np.asarray(rows, dtype=np.int64)[:, None] * seq_len
        return self.tokens[starts + np.arange(seq_len)]

    def check(self, seq_len: int, vocab_size: int, tokenizer_sha256: str | None = None) -> None:
        """The file must hold a sequence, and its ids must mean something to the model."""
        if self.n_sequences(seq_len) < 1:
            raise ValueError(
                f"{self.stem}: {self.meta.n_tokens} tokens are shorter than one sequence of "
                f"data.seq_len = {seq_len}"
            )
        if self.meta.max_id >= vocab_size:
            raise ValueError(
                f"{self.stem}: token id {self.meta.max_id} does not exist in the model's "
                f"vocabulary of {vocab_size}: the tokenizer does not match the model"
            )
        if tokenizer_sha256 and tokenizer_sha256 != self.meta.tokenizer_sha256:
            raise ValueError(
                f"{self.stem} was made with another tokenizer (sha256 "
                f"{self.meta.tokenizer_sha256[:12]}...) than this run's "
                f"({tokenizer_sha256[:12]}...)"
            )


def open_tokens(stem: str) -> TokenFile:
    """Open a token file: sizes are compared now, the hash in the background."""
    stem = stem.removesuffix(".bin").removesuffix(".json")
    meta, files = _read(stem)
    ids = Path(f"{stem}.bin")
    hashed = HashCheck(ids, files["bin"].sha256) if "bin" in files else None
    return TokenFile(stem, meta, np.memmap(ids, dtype=DTYPES[meta.dtype], mode="r"), hashed)


def verify_tokens(stem: str) -> str:
    """Read every byte of a token file; a sentence about what was found right."""
    file = open_tokens(stem)
    _, files = _read(file.stem)
    for part, expected in files.items():
        manifest.check_hash(Path(f"{file.stem}.{part}"), expected.sha256)
    step = 1 << 20
    for first in range(0, file.meta.n_tokens, step):
        if (top := int(file.tokens[first : first + step].max())) > file.meta.max_id:
            raise ValueError(
                f"{file.stem}.bin is damaged: it holds id {top}, the largest legal one is "
                f"{file.meta.max_id}"
            )
    what = f"token file {file.stem}: {file.meta.n_tokens:,} ids are legal"
    if not files:
        return f"{what}; nothing vouches for them (written before manifests): prepare it anew"
    return f"{what}, {len(files)} files match their sha256"


def _read(stem: str) -> tuple[TokenMeta, dict[str, Vouched]]:
    """The description, and what it vouches for by part."""
    meta_path, bin_path = Path(f"{stem}.json"), Path(f"{stem}.bin")
    if not meta_path.is_file() or not bin_path.is_file():
        raise ValueError(
            f"no token file {stem}.bin + {stem}.json: make one with `twistlm prepare FILE... -o "
            f"{stem}`"
        )
    meta, record = read_description(meta_path, TokenMeta, "a token file's description")
    size, itemsize = bin_path.stat().st_size, DTYPES[meta.dtype].itemsize
    if size != meta.n_tokens * itemsize or size == 0:
        raise ValueError(
            f"{bin_path} has {size} bytes, but {meta_path.name} says {meta.n_tokens} tokens of "
            f"{itemsize} bytes: the file is empty, truncated or from another run"
        )
    files = manifest.vouched(meta_path, record)
    for part, expected in files.items():
        manifest.check_size(Path(f"{stem}.{part}"), expected)
    if "tokenizer.json" in files:  # a few MB
        manifest.check_hash(Path(f"{stem}.tokenizer.json"), files["tokenizer.json"].sha256)
    return meta, files


def read_description(path: Path, kind: type, what: str) -> tuple[Any, dict[str, Any]]:
    """What a JSON file says as `kind`, and all of it."""
    try:
        record = manifest.read_json(path)
        rest = {k: v for k, v in record.items() if k not in (manifest.OWN, manifest.FILES)}
        return kind(**rest), record
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not {what}: {error}") from None


def write_meta(stem: Path, meta: TokenMeta) -> None:
    """Describe the files of a stem, and vouch for them: the last to be written."""
    parts = {part: Path(f"{stem}.{part}") for part in PARTS}
    files = manifest.describe_files({k: path for k, path in parts.items() if path.is_file()})
    record = manifest.sealed({**asdict(meta), manifest.FILES: files})
    Path(f"{stem}.json").write_text(manifest.written(record))

"""Token files: `STEM.bin` (little-endian ids, memory-mapped) and what describes them.

`STEM.json` holds counts, where the text came from, and bytes and sha256 of the other two files;
`STEM.tokenizer.json` is the tokenizer that made the ids.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..fields import WHOLE
from ..system import manifest
from ..system.files import draft_folder

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
        any_count = (0, WHOLE)
        check_ranges(self, n_tokens=any_count, n_documents=any_count, vocab_size=(1, 1 << 33))
        check_ranges(self, max_id=(0, (1 << 8 * DTYPES[self.dtype].itemsize) - 1))
        if not isinstance(self.tokenizer_sha256, str):
            raise ValueError(f"tokenizer_sha256 is {self.tokenizer_sha256!r}, not text")


@dataclass(frozen=True)
class TokenFile:
    """A memory-mapped token file, opened and checked."""

    stem: str
    meta: TokenMeta
    tokens: np.ndarray
    sha256: str = ""  # of the ids; empty: nothing vouches for a file of before manifests

    @property
    def tokenizer_path(self) -> Path:
        return Path(f"{self.stem}.tokenizer.json")

    def n_sequences(self, seq_len: int) -> int:
        return self.meta.n_tokens // seq_len

    def sequences(self, rows: np.ndarray | list[int], seq_len: int) -> Tensor:
        """Non-overlapping windows by number: int64 [len(rows), seq_len], refusing illegal ids."""
        ids, is_bad = self.read(rows, seq_len)
        if is_bad.any():
            first = int(rows[is_bad.argmax()])
            raise ValueError(f"{self.describe(first, seq_len)}: the file is damaged")
        return torch.from_numpy(ids.astype(np.int64))

    def read(self, rows: np.ndarray | list[int], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows [len(rows), seq_len] as they are, and whether they hold an illegal id."""
        starts = np.asarray(rows, dtype=np.int64)[:, None] * seq_len
        ids = self.tokens[starts + np.arange(seq_len)]
        return ids, ids.max(axis=1, initial=0) > self.meta.max_id

    def describe(self, row: int, seq_len: int) -> str:
        """The name of a sequence, and its largest id."""
        return (
            f"{self.stem}.bin: sequence {row} (tokens {row * seq_len}..{(row + 1) * seq_len - 1}) "
            f"holds id {int(self.read([row], seq_len)[0].max())}, the largest legal one is "
            f"{self.meta.max_id}"
        )

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
            its, mine = self.meta.tokenizer_sha256[:12], tokenizer_sha256[:12]
            raise ValueError(
                f"{self.stem} was made with another tokenizer (sha256 {its}...) than this run's "
                f"({mine}...)"
            )


def open_tokens(stem: str) -> TokenFile:
    """Open a token file, which must be as it was written."""
    stem = stem.removesuffix(".bin").removesuffix(".json")
    about, ids = Path(f"{stem}.json"), Path(f"{stem}.bin")
    if not about.is_file() or not ids.is_file():
        how = f"make one with `twistlm prepare FILE... -o {stem}`"
        raise ValueError(f"no token file {stem}.bin + {stem}.json: {how}")
    meta, record = read_description(about, TokenMeta, "a token file's description")
    size, dtype = ids.stat().st_size, DTYPES[meta.dtype]
    if size != meta.n_tokens * dtype.itemsize or size == 0:
        raise ValueError(
            f"{ids} has {size} bytes, but {about.name} says {meta.n_tokens} tokens of "
            f"{dtype.itemsize} bytes: the file is empty, truncated or from another run"
        )
    files = manifest.vouched(about, record)
    for part, told in files.items():
        manifest.check_file(Path(f"{stem}.{part}"), told)
    sha256 = files.get("bin", {}).get("sha256", "")
    return TokenFile(stem, meta, np.memmap(ids, dtype=dtype, mode="r"), sha256)


def verify_tokens(stem: str) -> str:
    """Read every byte of a token file; a sentence about what was found right."""
    file, step = open_tokens(stem), 1 << 20
    for first in range(0, file.meta.n_tokens, step):
        if (top := int(file.tokens[first : first + step].max())) > file.meta.max_id:
            legal = f"the largest legal one is {file.meta.max_id}"
            raise ValueError(f"{file.stem}.bin is damaged: it holds id {top}, {legal}")
    what = f"token file {file.stem}: {file.meta.n_tokens:,} ids are legal"
    if not file.sha256:
        return f"{what}; nothing vouches for them (written before manifests): prepare it anew"
    return f"{what}, all files match their sha256"


def read_description(path: Path, kind: type, what: str) -> tuple[Any, dict[str, Any]]:
    """What a JSON file says as `kind`, and all of it."""
    try:
        record = manifest.read_json(path)
        rest = {k: v for k, v in record.items() if k not in (manifest.OWN, manifest.FILES)}
        return kind(**rest), record
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not {what}: {error}") from None


def check_target(stem: Path, tokenizer: str) -> None:
    """An earlier token file is replaced; anything else is left alone.

    A process that was killed leaves parts without STEM.json, the tokenizer's copy first: they are
    replaced where that copy is this `tokenizer`, which would be written again.
    """
    about, ids, copy = (Path(f"{stem}.{end}") for end in ("json", *PARTS))
    if about.exists():
        try:
            read_description(about, TokenMeta, "a token file's description")
            return
        except (OSError, ValueError):
            foreign = [about]
    elif copy.is_file() and copy.read_bytes() == tokenizer.encode():
        return
    else:
        foreign = [path for path in (copy, ids) if path.exists()]
    if foreign:
        what = f"{foreign[0]} exists and is no part of a token file"
        raise ValueError(f"--out {stem}: {what}: choose another")


@contextmanager
def token_draft(stem: Path) -> Iterator[Path]:
    """The stem of a draft to fill; its files then appear under `stem`, or nothing does."""
    with draft_folder(Path(f"{stem}.bin")) as folder:
        yield folder / "tokens"
        for suffix in (*reversed(PARTS), "json"):  # the last one says "complete"
            os.replace(folder / f"tokens.{suffix}", f"{stem}.{suffix}")


def write_meta(stem: Path, meta: TokenMeta) -> None:
    """Describe the files of a stem, and vouch for them: the last to be written."""
    parts = {part: Path(f"{stem}.{part}") for part in PARTS}
    files = manifest.describe_files({k: path for k, path in parts.items() if path.is_file()})
    record = manifest.sealed({**asdict(meta), manifest.FILES: files})
    Path(f"{stem}.json").write_text(manifest.written(record))

"""Records of token files, tickets and checkpoints: sha256 of every file, and of the record."""

import hashlib
import json
from collections.abc import Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from .files import file_sha256
from .terminal import console

OWN = "sha256"  # the record's key for its own hash
FILES = "files"  # and for the files that it vouches for
BESIDE_MODELS = {"checkpoint.json": (), "ticket.json": ("README.md",)}  # and what people edit there
LARGE = 256 << 20  # bytes: such a file is read once per process


def parse_json(text: str | bytes, what: str | Path) -> Any:
    """JSON, or a ValueError that names `what`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON of ours: {error}") from None


def read_json(path: Path) -> Any:
    return parse_json(path.read_bytes(), path)


def describe_files(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """name -> bytes and sha256, in the order of the names: what a record holds under `FILES`."""
    named = sorted(files.items())
    return {name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for name, p in named}


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its own sha256 at the end."""
    rest = {key: value for key, value in record.items() if key != OWN}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, OWN: hashlib.sha256(text.encode()).hexdigest()}


def written(record: Mapping[str, Any]) -> str:
    """The text of a record as it stands in its file."""
    return json.dumps(record, indent=1) + "\n"


def vouched(path: Path, record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """name -> sha256, and bytes where told, of the files that the record in `path` vouches for.

    The record must be, byte for byte, what its own sha256 was made of.
    """
    if OWN not in record and FILES not in record:  # written before there were manifests
        return {}
    if sealed(record) != record or path.read_bytes() != written(record).encode():
        raise ValueError(f"{path} is damaged: it does not match its own sha256")
    try:  # a checkpoint's record tells hashes alone
        files = record[FILES].items()
        told = {name: {"sha256": e} if isinstance(e, str) else dict(e) for name, e in files}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: its list of files cannot be read") from None
    for name in told:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} is damaged: {name!r} is no file of its folder")
    return told


def check_file(path: Path, told: Mapping[str, Any]) -> None:
    """A file must hold the bytes that a record vouches for."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: its manifest names it")
    info = path.stat()
    if (size := told.get("bytes", info.st_size)) != info.st_size:
        raise ValueError(f"{path} is damaged: {info.st_size:,} bytes instead of {size:,}")
    known = (path, info.st_size, info.st_mtime_ns, info.st_ino)
    if (file_sha256(path) if info.st_size < LARGE else _known_hash(*known)) != told.get("sha256"):
        raise ValueError(f"{path} is damaged: it does not match its sha256")


@lru_cache(maxsize=64)
def _known_hash(path: Path, size: int, mtime: int, inode: int) -> str:
    return file_sha256(path)


def folder_files(folder: Path) -> dict[str, Path]:
    """All files of a folder by their path in it."""
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}


def foreign_files(folder: Path, ours: Collection[str]) -> list[Path]:
    """What else lies in a folder, as paths in it: files, links, and empty folders."""
    found = sorted(folder.rglob("*"))
    ends = [p for p in found if p.is_symlink() or not p.is_dir() or not any(p.iterdir())]
    named = [path.relative_to(folder) for path in ends]
    return [path for path in named if path.as_posix() not in ours]


def check_folder(folder: Path, record: str, editable: tuple[str, ...] = ()) -> list[str]:
    """Compare every file of a folder's record; returns sentences about changed `editable` ones."""
    changed = []
    for name, told in vouched(folder / record, read_json(folder / record)).items():
        try:
            check_file(folder / name, told)
        except ValueError as error:
            if name not in editable:
                raise
            changed.append(str(error))
    return changed


def check_model_folder(folder: Path) -> None:
    """A checkpoint or ticket must be as it was written; other Hugging Face folders pass unread.

    An edited model card is said.
    """
    for record, editable in BESIDE_MODELS.items():
        if (path := folder / record).is_file():
            if not {FILES, "blueprint"} & set(read_json(path)):  # tickets of before manifests
                raise ValueError(f"{path} is damaged: it vouches for no files")
            for sentence in check_folder(folder, record, editable):
                console.print(f"the model card was changed: {sentence}", style="yellow")

"""Records that vouch for files: bytes and sha256 of each, and a sha256 of the record itself.

A token file's JSON, a ticket's ticket.json and a checkpoint's checkpoint.json are such records.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from .files import file_sha256

OWN = "sha256"  # the record's key for its own hash
FILES = "files"  # and for the files that it vouches for
LARGEST = 1 << 63  # no count of ours needs more
BESIDE_MODELS = {"checkpoint.json": (), "ticket.json": ("README.md",)}  # and what people edit there
AT_ONCE = 256 << 20  # bytes that are hashed before a file is used (0.2 to 0.5 s), more in a thread


def parse_json(text: str | bytes, what: str | Path) -> Any:
    """JSON whose numbers can be reckoned with; anything else is a ValueError that names `what`."""
    try:
        return json.loads(text, parse_int=_integer, parse_float=_real)
    except RecursionError:
        raise ValueError(f"{what} is no JSON of ours: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{what} is no JSON of ours: {error}") from None


def read_json(path: Path) -> Any:
    """The JSON of a file."""
    return parse_json(path.read_bytes(), path)


def _integer(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) >= LARGEST:
        raise ValueError(f"{digits[:20]}... ({len(digits)} digits) is no number of ours")
    return int(digits)


def _real(digits: str) -> float:
    if abs(value := float(digits)) == float("inf"):
        raise ValueError(f"{digits[:40]} is no number of ours")
    return value


@dataclass(frozen=True)
class Vouched:
    """What a record says of one file."""

    n_bytes: int | None  # None: a checkpoint's record tells hashes alone
    sha256: str


def describe_files(files: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """name -> bytes and sha256, in the order of the names: what a record holds under `FILES`."""
    return {
        name: {"bytes": files[name].stat().st_size, "sha256": file_sha256(files[name])}
        for name in sorted(files)
    }


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its own sha256 at the end."""
    rest = {key: value for key, value in record.items() if key != OWN}
    text = json.dumps(rest, sort_keys=True)
    return {**rest, OWN: hashlib.sha256(text.encode()).hexdigest()}


def written(record: Mapping[str, Any]) -> str:
    """The text of a record as it stands in its file; what could not be read again is refused."""
    text = json.dumps(record, indent=1) + "\n"
    parse_json(text, "the record to be written")
    return text


def check_seal(path: Path, record: Mapping[str, Any]) -> None:
    """The record in `path` must be, byte for byte, what its own sha256 was made of."""
    if sealed(record) != record or path.read_bytes() != written(record).encode():
        raise ValueError(f"{path} is damaged: it does not match its own sha256")


def vouched(path: Path, record: Mapping[str, Any]) -> dict[str, Vouched]:
    """The files that the record in `path` vouches for; none if it was written before manifests."""
    if OWN not in record and FILES not in record:
        return {}
    check_seal(path, record)
    try:
        found = {n: _said(entry) for n, entry in record[FILES].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"{path} is damaged: its list of files cannot be read") from None
    for name in found:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} is damaged: {name!r} is no file of its folder")
    return found


def _said(entry: Any) -> Vouched:
    if isinstance(entry, str):
        return Vouched(None, entry)
    return Vouched(int(entry["bytes"]), str(entry["sha256"]))


def check_size(path: Path, expected: Vouched) -> None:
    """A file that is vouched for must be there with all its bytes: nothing is read."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: its manifest names it")
    if expected.n_bytes is not None and (found := path.stat().st_size) != expected.n_bytes:
        raise ValueError(f"{path} is damaged: {found:,} bytes instead of {expected.n_bytes:,}")


def check_hash(path: Path, sha256: str) -> None:
    """The file's bytes must be those that were written; a large file is read once per process."""
    info = path.stat()
    if info.st_size <= AT_ONCE:
        found = file_sha256(path)
    else:
        found = _known_hash(path, info.st_size, info.st_mtime_ns, info.st_ino)
    if found != sha256:
        raise ValueError(f"{path} is damaged: it does not match its sha256")


@lru_cache(maxsize=64)
def _known_hash(path: Path, size: int, mtime: int, inode: int) -> str:
    return file_sha256(path)


class HashCheck:
    """Compares a file with its sha256: a small one at once, a large one in a thread.

    Who uses the file calls `raise_damage` before each use; it does not wait for the thread.
    """

    def __init__(self, path: Path, sha256: str):
        self.path, self.sha256 = path, sha256
        self._damage: ValueError | None = None
        if path.stat().st_size <= AT_ONCE:
            check_hash(path, sha256)
        else:
            threading.Thread(target=self._run, name="hash", daemon=True).start()

    def raise_damage(self) -> None:
        """Raise what has been found so far."""
        if self._damage is not None:
            raise self._damage

    def _run(self) -> None:
        try:
            check_hash(self.path, self.sha256)
        except ValueError as damage:
            self._damage = damage
        except OSError as error:
            self._damage = ValueError(f"{self.path} cannot be read: {error.strerror or error}")


def folder_files(folder: Path) -> dict[str, Path]:
    """All files of a folder by their path in it."""
    return {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}


def foreign_files(folder: Path, ours: Collection[str]) -> list[Path]:
    """What else lies in a folder, as paths in it: files, links, and empty folders."""
    found = (
        path.relative_to(folder)
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    )
    return [path for path in found if path.as_posix() not in ours]


def check_folder(folder: Path, record: str, editable: tuple[str, ...] = ()) -> list[str]:
    """Compare a folder with its record, every byte; sentences about changed `editable` files.

    Foreign files in the folder are nobody's business. A folder of before manifests passes unread.
    """
    changed = []
    for name, expected in vouched(folder / record, read_json(folder / record)).items():
        try:
            check_size(folder / name, expected)
            check_hash(folder / name, expected.sha256)
        except ValueError as error:
            if name not in editable:
                raise
            changed.append(str(error))
    return changed


def check_model_folder(folder: Path) -> None:
    """A checkpoint or ticket must be as it was written; other Hugging Face folders pass unread."""
    for record, editable in BESIDE_MODELS.items():
        if (folder / record).is_file():
            said = read_json(folder / record)
            # a ticket of before manifests has a blueprint
            if FILES not in said and "blueprint" not in said:
                raise ValueError(f"{folder / record} is damaged: it vouches for no files")
            check_folder(folder, record, editable)

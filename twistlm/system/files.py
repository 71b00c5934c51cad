"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write safetensors that transformers reads."""
    # views of one buffer are cloned one by one: safetensors refuses shared storage
    copies = {name: t.detach().cpu().clone() for name, t in tensors.items()}
    try:
        save_file(copies, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(f"{path.name} could not be written: {error}") from None


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A draft to fill; `target` then appears (or is replaced) whole, or the draft is gone."""
    draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".draft-"))
    try:
        yield draft
        (draft / "mode").mkdir()  # shows the umask; reading it would change it for all threads
        mode = (draft / "mode").stat().st_mode & 0o777
        (draft / "mode").rmdir()
        for path in (*draft.rglob("*"), draft):  # mkdtemp and safetensors make private ones
            path.chmod(mode if path.is_dir() else mode & 0o666)
            _fsync(path)
        if target.exists():
            shutil.rmtree(target)
        os.rename(draft, target)
        _fsync(target.parent)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def whole_file(path: Path, write: Callable[[Path], Any] | str) -> None:
    """Write a text, or let `write` fill a draft; the file appears (or is replaced) whole, or the draft is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        if isinstance(write, str):
            draft.write_text(write)
        else:
            write(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


LOCK = "lock"


class InUse(ValueError):
    """Another process trains there; its lock goes with it, however it ends."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, or raise `InUse`. A record lock: forked children do not inherit it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that is held
            raise InUse(
                f"run.out = {str(folder)!r}: another process trains there; wait for it, or choose another folder"
            ) from None
        except OSError:  # a file system without locks: go on without one
            pass
        try:
            yield
        finally:
            if [path.name for path in folder.iterdir()] == [
                LOCK
            ]:  # refused before anything was written
                (folder / LOCK).unlink()
                folder.rmdir()

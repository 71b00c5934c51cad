"""Files and folders that appear whole or not at all."""

import errno
import fcntl
import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

DRAFT = ".draft-"
OLD = "old-"  # in a draft: the folder that is being replaced
LOCK = "lock"


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write safetensors that transformers reads."""
    with naming(path):
        save_file({name: _own_storage(t) for name, t in tensors.items()}, path, {"format": "pt"})


def _own_storage(tensor: Tensor) -> Tensor:
    """The same memory as a storage of its own: safetensors refuses views of one buffer."""
    plain = tensor.detach().cpu()
    # numpy knows no bfloat16; what does not lie in one piece is for safetensors to judge
    can = plain.dtype in (torch.float32, torch.float64) and plain.is_contiguous()
    return torch.from_numpy(plain.numpy()) if can else plain.clone()


@contextmanager
def whole_folder(target: Path, keep: Iterable[Path] = ()) -> Iterator[Path]:
    """A draft to fill; `target` then appears (or is replaced) whole, or the draft is gone.

    Files of the old folder in `keep` (paths in it) live on in the new one.
    """
    with draft_folder(target) as place:
        draft, old = place / "new", place / f"{OLD}{target.name}"
        draft.mkdir()
        mode = draft.stat().st_mode & 0o777  # of the umask; safetensors makes private files
        yield draft
        for path in (*draft.rglob("*"), draft):
            path.chmod(mode if path.is_dir() else mode & 0o666)
            _fsync(path)
        for path in keep:
            if os.path.lexists(draft / path):
                raise ValueError(f"{target / path} is not ours and would be replaced: move it away")
            (draft / path).parent.mkdir(parents=True, exist_ok=True)
            if (target / path).is_dir() and not (target / path).is_symlink():
                (draft / path).mkdir()  # an empty one
            else:
                shutil.copy2(target / path, draft / path, follow_symlinks=False)
        if target.exists():
            os.rename(target, old)  # if the process dies here, the next one puts it back
        try:
            os.rename(draft, target)
        except BaseException:
            if old.exists():
                os.rename(old, target)
            raise
        _fsync(target.parent)


def whole_file(path: Path, write: Callable[[Path], Any] | str) -> None:
    """Write a text, or let `write` fill a draft; the file appears whole, or the draft is gone."""
    with draft_folder(path) as place:
        draft = place / path.name
        draft.write_text(write) if isinstance(write, str) else write(draft)
        draft.replace(path)


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target` that is gone at the end, however that comes.

    What a killed process left there goes when the next one starts. An error names `target`.
    """
    with naming(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_dead_drafts(target.parent)
        name = f"{DRAFT}{socket.gethostname()}-{os.getpid()}-"
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=name))
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)


@contextmanager
def naming(target: Path) -> Iterator[None]:
    """Let an error of the disk name what was being written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        code, said = getattr(error, "errno", None) or errno.EIO, str(error)
        said = (getattr(error, "strerror", None) or said).removeprefix("could not be written: ")
        if code == errno.ENOSPC or "os error 28" in said:  # as safetensors says it
            said = "the disk is full"
        raise OSError(code, f"could not be written: {said}", str(target)) from None


def _remove_dead_drafts(folder: Path) -> None:
    """Remove the drafts of this machine's processes that are gone; others are not ours to judge."""
    for path in folder.glob(f"{DRAFT}*"):
        host, _, pid = path.name.removeprefix(DRAFT).rpartition("-")[0].rpartition("-")
        if host == socket.gethostname() and pid.isdigit() and not _lives(int(pid)):
            for old in path.glob(f"{OLD}*"):
                if not (target := folder / old.name.removeprefix(OLD)).exists():
                    os.rename(old, target)
            shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH  # else it is another user's
    return True


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_locked(file: IO[Any]) -> bool:
    """Take the lock of an open file, which goes with the process; False if another one holds it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that is held
        return False
    except OSError:  # a file system without locks: go on without one
        pass
    return True


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which goes with the process; forked children do not inherit it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a") as file:
        if not is_locked(file):
            where = f"run.out = {str(folder)!r}"
            raise ValueError(f"{where}: another process trains there; wait, or choose another")
        try:
            yield
        finally:
            if os.listdir(folder) == [LOCK]:  # refused before anything was written
                (folder / LOCK).unlink()
                folder.rmdir()

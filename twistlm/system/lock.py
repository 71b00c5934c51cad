"""One process at a time trains in a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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

"""Checkpoints off the critical path: training waits for a copy in host memory, not for the disk."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..config import Config
from ..model.central import Central
from ..system.terminal import console
from . import checkpoint
from .progress import Progress


class Writer:
    """Saves the central model in a thread of its own; at most one checkpoint is in flight.

    A disk that takes no more is said at once, with path and bytes, and is no reason to stop:
    `failure` asks for another try after the next round. Only at the end it is an error.
    """

    def __init__(
        self,
        folder: Path,
        cfg: Config,
        model: PreTrainedModel,
        tokenizer: Path | None,
        central: Central | None,  # None on ranks that save nothing
    ):
        self.folder, self.cfg, self.model, self.tokenizer = folder, cfg, model, tokenizer
        self.last: Path | None = None  # the newest checkpoint that is whole on disk
        self.failure: str | None = None  # why the one before could not be written
        # host memory, used again for every checkpoint; the first touch of its pages is the slow one
        self._copy = None if central is None else _copied(central, None)
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def save(self, central: Central, progress: Progress) -> None:
        """Copy the central model and write it from there; it may change as soon as this returns."""
        self.wait()
        self.failure = None
        self._copy = _copied(central, self._copy)
        self._thread = threading.Thread(
            target=self._write, args=(self._copy, progress), name="checkpoint"
        )
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Until nothing is in flight."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._bug is not None:
            bug, self._bug = self._bug, None
            raise bug

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.wait()
        if self.failure and kind is None:
            raise OSError(self.failure)

    def _write(self, central: Central, progress: Progress) -> None:
        try:
            self.last = checkpoint.save(
                self.folder,
                central,
                progress,
                self.cfg,
                self.model,
                self.tokenizer,
                self.cfg.run.keep,
            )
        except OSError as error:
            self.failure = self._sentence(central, progress.round, error)
            console.print(self.failure, style="yellow")
        except BaseException as bug:  # not ours to hide: it is raised where the run can see it
            self._bug = bug

    def _sentence(self, central: Central, done: int, error: OSError) -> str:
        kept = [central.buffer] if central.velocity is None else [central.buffer, central.velocity]
        n_bytes = sum(tensor.nbytes for tensor in kept)
        try:
            free = f"{shutil.disk_usage(self.folder).free:,}"
        except OSError:
            free = "unknown"
        return (
            f"checkpoint {self.folder / checkpoint.folder_name(done)} ({n_bytes:,} bytes, {free} "
            f"free) could not be written: {error}; older checkpoints are unharmed"
        )


def _copied(central: Central, old: Central | None) -> Central:
    """A copy in host memory; the tensors of an earlier copy are filled anew."""
    buffer = _host(central.buffer, old.buffer if old else None)
    velocity = None
    if central.velocity is not None:
        velocity = _host(central.velocity, old.velocity if old else None)
    if central.buffer.is_cuda:
        torch.cuda.current_stream(central.buffer.device).synchronize()
    return replace(central, buffer=buffer, velocity=velocity, sums=None)


def _host(tensor: Tensor, old: Tensor | None) -> Tensor:
    if old is None:
        old = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return old.copy_(tensor, non_blocking=True)

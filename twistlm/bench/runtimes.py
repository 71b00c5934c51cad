"""The runtimes that `bench deploy` can drive: how each gets its files from a ticket, and runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from .. import deploy


class Session(Protocol):
    """A loaded model with a KV cache of one sequence; logits are those of the last token alone."""

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Forget everything, read these tokens."""

    def decode(self, token: int) -> np.ndarray:
        """Read one more token."""


@dataclass(frozen=True)
class Runtime:
    """One row of the table; `write` raises ValueError where library or family do not permit."""

    name: str
    write: Callable[[Path, Path], tuple[Path, ...]]  # (ticket, empty folder) -> files of weights
    load: Callable[[Path, int, int], Session]  # (first of the files, threads, tokens to hold)


class Torch:
    """PyTorch in float32, eager."""

    def __init__(self, path: Path, threads: int, n_context: int):
        torch.set_num_threads(threads)
        self.model: Any = deploy.load_ticket(path.parent)
        self.cache = DynamicCache()

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        self.cache = DynamicCache(config=self.model.config)
        return self._run(ids)

    def decode(self, token: int) -> np.ndarray:
        return self._run([token])

    @torch.inference_mode()
    def _run(self, ids: Sequence[int]) -> np.ndarray:
        # logits of one position: with all of them the LM head would cost more than the layers
        out = self.model(
            input_ids=torch.tensor([list(ids)]),
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[0, -1].numpy()


def _ticket_itself(ticket: Path, folder: Path) -> tuple[Path, ...]:
    return tuple(sorted(ticket.glob("*.safetensors")))


RUNTIMES: dict[str, Runtime] = {
    runtime.name: runtime for runtime in (Runtime("torch", _ticket_itself, Torch),)
}
